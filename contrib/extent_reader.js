// Reads KV that Rekindle stored: one extent file (docs/reference/extent.md), without Python and without packages.
//
//   node extent_reader.js FILE OUT    check every digest, print what it holds, write the data of all layers to OUT
//   node extent_reader.js --kv-space WEIGHTS CONFIG TOKENIZER TEMPLATE DTYPE ROPE TENANT SALT ADAPTER CODEC LAYOUT
//                                     the root of a model's keys and its KV space, as the catalog has them
//
// Written to be read and carried over to another language: numbers of 64 bits are BigInt here, and so it is slow.
const fs = require("fs");

const MASK = (1n << 64n) - 1n;
const u64 = (value) => value & MASK;  // 64 bits of it
const rd = (data, at) => data.readBigUInt64LE(at);
const rd4 = (data, at) => BigInt(data.readUInt32LE(at));
const rotr = (value, bits) => u64((value >> bits) | (value << (64n - bits)));
const le = (value) => Buffer.from(BigUint64Array.of(BigInt(value)).buffer);
const need = (ok, reason) => { if (!ok) throw new Error(reason); };

// ---- XXH3 with 64 bits and seed 0: the digests of KV
const SECRET = Buffer.from(
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" +
  "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" +
  "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb" +
  "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e", "hex");
const [P1, P2, P3] = [0x9e3779b185ebca87n, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n];
const [P4, P5, Q1] = [0x85ebca77c2b2ae63n, 0x27d4eb2f165667c5n, 0x9e3779b1n];
const [Q2, Q3, M1, M2] = [0x85ebca77n, 0xc2b2ae3dn, 0x165667919e3779f9n, 0x9fb21c651e98df25n];

const fold = (a, b) => u64(a * b) ^ ((a * b) >> 64n);
const end = (value) => ((h) => h ^ (h >> 32n))(u64((u64(value) ^ (u64(value) >> 37n)) * M1));
const mix = (data, at, s) => fold(rd(data, at) ^ rd(SECRET, s), rd(data, at + 8) ^ rd(SECRET, s + 8));
const pair = (s) => rd(SECRET, s) ^ rd(SECRET, s + 8);

function xxh3Short(data, n) {  // of 4 to 240 bytes
  const size = BigInt(n);
  need(n > 3, "a digest of fewer bytes than any layer has");
  if (n < 9) {
    let h = u64(rd4(data, n - 4) + (rd4(data, 0) << 32n)) ^ pair(8);
    h = u64((h ^ rotr(h, 15n) ^ rotr(h, 40n)) * M2);
    h = u64((h ^ ((h >> 35n) + size)) * M2);
    return h ^ (h >> 28n);
  }
  if (n < 17) {
    const [low, high] = [rd(data, 0) ^ pair(24), rd(data, n - 8) ^ pair(40)];
    return end(size + le(low).readBigUInt64BE() + high + fold(low, high));
  }
  let h = size * P1;
  if (n < 129) {
    for (let i = 0; i <= (n - 1) >> 5; i++) h += mix(data, 16 * i, 32 * i) + mix(data, n - 16 * (i + 1), 32 * i + 16);
    return end(h);
  }
  for (let i = 0; i < 8; i++) h += mix(data, 16 * i, 16 * i);
  h = end(h);
  for (let i = 8; i < n >> 4; i++) h += mix(data, 16 * i, 16 * (i - 8) + 3);
  return end(h + mix(data, n - 16, 119));
}

function xxh3(data) {
  const n = data.length, last = (n - 1) >> 6;
  if (n <= 240) return xxh3Short(data, n);
  const acc = [Q3, P1, P2, P3, P4, Q2, P5, Q1];
  for (let stripe = 0; stripe <= last; stripe++) {
    const at = stripe < last ? 64 * stripe : n - 64, key = stripe < last ? 8 * (stripe % 16) : 121;
    for (let i = 0; i < 8; i++) {
      const value = rd(data, at + 8 * i), x = value ^ rd(SECRET, key + 8 * i);
      acc[i ^ 1] = u64(acc[i ^ 1] + value);
      acc[i] = u64(acc[i] + (x & 0xffffffffn) * (x >> 32n));
    }
    if (stripe < last && stripe % 16 === 15)
      for (let i = 0; i < 8; i++) acc[i] = u64((acc[i] ^ (acc[i] >> 47n) ^ rd(SECRET, 128 + 8 * i)) * Q1);
  }
  let h = BigInt(n) * P1;
  for (let i = 0; i < 8; i += 2) h += fold(acc[i] ^ rd(SECRET, 11 + 8 * i), acc[i + 1] ^ rd(SECRET, 19 + 8 * i));
  return end(h);
}

// ---- BLAKE2b with 128 bits: keys and identities
const IV = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const ORDER = [
  "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
  "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0",
];

function blake2b(data) {
  const h = IV.map((value, i) => (i ? value : value ^ 0x01010010n));
  for (let at = 0; at === 0 || at < data.length; at += 128) {
    const block = Buffer.concat([data.subarray(at, at + 128), Buffer.alloc(128)]);
    const seen = Math.min(at + 128, data.length), v = [...h, ...IV];
    v[12] ^= BigInt(seen);
    if (seen === data.length) v[14] ^= MASK;
    const half = (a, b, c, d, word, first, second) => {
      v[a] = u64(v[a] + v[b] + word), v[d] = rotr(v[d] ^ v[a], first);
      v[c] = u64(v[c] + v[d]), v[b] = rotr(v[b] ^ v[c], second);
    };
    for (let round = 0; round < 12; round++)
      for (let i = 0; i < 8; i++) {
        const k = i >> 2, a = i % 4, b = 4 + ((a + k) % 4), c = 8 + ((a + 2 * k) % 4), d = 12 + ((a + 3 * k) % 4);
        const word = (place) => rd(block, 8 * parseInt(ORDER[round % 10][place], 16));
        half(a, b, c, d, word(2 * i), 32n, 24n);
        half(a, b, c, d, word(2 * i + 1), 16n, 63n);
      }
    for (let i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
  }
  return Buffer.concat([le(h[0]), le(h[1])]);
}
const digestOfFields = (...fields) =>
  blake2b(Buffer.concat(fields.flatMap((field) => [le(Buffer.from(field).length), Buffer.from(field)])));

// ---- the extent
function readExtent(file) {
  need(file.length > 8 && rd(file, 0) <= BigInt(file.length - 8), "it is not an extent: too short");
  const start = 8 + Number(rd(file, 0)), header = file.subarray(0, start), tensors = JSON.parse(header.subarray(8));
  const about = tensors.__metadata__, layers = JSON.parse(about.layout).layers, found = [];
  need(about.format === "rekindle-extent/3", `it is of another format: ${about.format}`);
  need(about.digest === "xxh3-64", `its digests need a key: ${about.digest}`);
  const [tokens, digests] = [about.tokens, about.digests].map((text) => Buffer.from(text, "hex"));
  const count = tokens.length / 4, row = digests.length / 8 / layers.length;  // digests of a layer
  const check = (layer, place, data) =>
    need(digests.readBigUInt64BE(8 * (layer * row + place)) === xxh3(data), `layer ${layer} is damaged`);
  const tensor = (name) => {
    const [first, stop] = tensors[name].data_offsets;
    need(start + stop <= file.length, `${name} is cut off`);
    found.push(file.subarray(start + first, start + stop));
    return found[found.length - 1];
  };
  layers.forEach(([heads], layer) => {
    if (about.coding) return check(layer, row - 1, tensor(`layer.${layer}.coded`));
    const halves = ["keys", "values"].map((half) => tensor(`layer.${layer}.${half}`));
    halves.forEach((data, half) => check(layer, half, data));
    for (let block = 0; 32 * block < count; block++) {  // a cell: keys of its tokens, head by head, then values
      const rows = halves.flatMap((data) => [...Array(heads).keys()].map((head) => {
        const size = data.length / heads / count, at = (head * count + 32 * block) * size;
        return data.subarray(at, at + Math.min(32, count - 32 * block) * size);
      }));
      check(layer, 2 + block, Buffer.concat(rows));
    }
  });
  const keys = [];
  for (let at = 0, key = Buffer.from(about.parent, "hex"); at < tokens.length; at += 128) {
    const block = tokens.subarray(at, at + 128);
    key = blake2b(Buffer.concat([Buffer.from("rekindle/node/1"), key, le(block.length), block]));
    keys.push(key.toString("hex"));
  }
  const { extent, kv_space, layout, coding } = about;
  const header_digest = blake2b(header).toString("hex"), data = Buffer.concat(found);
  return { data, extent, kv_space, layout, coding, keys, header: header_digest };
}

function kvSpace(identity, tenant, salt, adapter, codec, layout) {
  const model = digestOfFields("rekindle/identity/2", ...identity).toString("hex");
  const root = digestOfFields("rekindle/root/1", model, tenant, salt);
  const space = digestOfFields("rekindle/kv-space/1", root, adapter ? `adapter:${adapter}` : "base", codec, layout);
  return { root: root.toString("hex"), kv_space: space.toString("hex") };
}

try {
  const [first, ...rest] = process.argv.slice(2);
  if (first === "--kv-space") {
    console.log(JSON.stringify(kvSpace(rest.slice(0, 6), ...rest.slice(6))));
  } else {
    const { data, ...about } = readExtent(fs.readFileSync(first));
    fs.writeFileSync(rest[0], data);
    console.log(JSON.stringify(about));
  }
} catch (error) {
  console.error(`${process.argv[2]} cannot be read: ${error.message}`);
  process.exit(1);
}
