"""Extents: files whose headers and layers say anything, with digests that fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

from rekindle.codec.coder import EXACT, Coder
from rekindle.codec.digest import PlainDigester
from rekindle.codec.extent import Coding, ExtentHeader, ExtentPlan, parse_header
from rekindle.codec.quantizer import BitPlan
from rekindle.core.keys import BLOCK_TOKENS, KvSpace, NodeKey, token_bytes
from rekindle.core.kv import KvLayout, LayerKv, LayerShape, Span
from rekindle.store.catalog.catalog import Extent
from rekindle.store.extents import Damaged, ExtentFiles, OpenBase
from rekindle.store.files import Files
from tests.fuzz import mutations
from tests.fuzz.coded_layers import other_structure
from tests.fuzz.family import Family
from tests.kvs import KV_SPACE, make_kv

LAYOUT = KvLayout("float16", (LayerShape(2, 16, 16),) * 2)
TOKENS = 200
_NAMES = ("0" * 16, "1" * 16, "2" * 16, "3" * 16)


class Inputs(Family):
    """An extent of each kind; the row of the catalog has the digest of whatever header there is."""

    errors = (Damaged,)

    def __init__(self, folder: Path) -> None:
        self.files = ExtentFiles(folder, Files(), PlainDigester())
        kv_space = KvSpace(KV_SPACE.namespace, LAYOUT)
        kv = make_kv(range(TOKENS), Span(0, TOKENS), kv_space).layers
        plans = [
            ExtentPlan(name, "kv_space", NodeKey(bytes(16)), LAYOUT, token_bytes(range(TOKENS)), "xxh3-64", 8)
            for name in _NAMES
        ]
        anchor = self.files.write(plans[0], kv).header
        quantized = Coder(BitPlan.uniform(2, 4), BitPlan.uniform(2, 3))
        opened = OpenBase(self._open(anchor.plan), Span(0, TOKENS), 0)
        moved = [LayerKv(one.keys * kv[0].keys.dtype.type(1.01), one.values) for one in kv]
        for plan, coder, on in (
            (plans[1], quantized, None),
            (plans[2], EXACT, "kv_space"),
            (plans[3], quantized, "kv_space"),
        ):
            self.files.write_coded(self.files.encode(plan, moved, coder, on, [opened] if on else []))
        self.files.release(opened.extent)
        self.anchor = self.files.path(_NAMES[0]).read_bytes()
        self.samples = [self.files.path(name).read_bytes() for name in _NAMES]
        self.row, self.layer, self.span = self._row(_NAMES[0], self.anchor), 0, Span(0, TOKENS)

    def prepare(self, random: Random) -> int:
        number = random.randrange(len(self.samples))
        data, name = self.samples[number], _NAMES[number]
        for _ in range(random.randint(1, 2)):
            data = self._changed(random, data)
        self.files.path(name).write_bytes(data)
        self.row = self._row(name, data)
        self.layer = random.randrange(2)
        self.span = Span(*sorted(random.choices((0, 1, 31, 32, 150, TOKENS), k=2)))
        return len(data) + TOKENS * LAYOUT.token_bytes

    def read(self) -> None:
        extent = self.files.open(self.row, "kv_space", fresh=True)
        try:
            if (coding := extent.header.plan.coding) is not None and coding.base_kv_space is not None:
                opened = self._open(parse_header(self.anchor[: int.from_bytes(self.anchor[:8], "little") + 8]).plan)
                extent = replace(extent, bases=(OpenBase(opened, Span(0, TOKENS), 0),))
            keys, values = ((2, len(self.span), 16), (2, len(self.span), 16))
            out = LayerKv(*(LAYOUT_EMPTY[:, : shape[1]].copy() for shape in (keys, values)))  # as an engine gives it
            layout = extent.header.plan.layout
            if layout.layers[self.layer : self.layer + 1] != (LAYOUT.layers[0],) or layout.dtype != LAYOUT.dtype:
                if coding is not None and self.layer < len(layout.layers):
                    self.files.read(extent, self.layer, self.span, out)
                    raise AssertionError("KV of another layout was served")
                return  # KV that is not coded is no longer than its file
            if self.span.stop <= extent.header.plan.token_count:
                self.files.read(extent, self.layer, self.span, out)
        finally:
            self.files.release(extent)

    def _open(self, plan: ExtentPlan):
        path = self.files.path(plan.name)
        return self.files.open(self._row(plan.name, path.read_bytes()), "kv_space", fresh=True)

    def _row(self, name: str, data: bytes) -> Extent:
        length = min(int.from_bytes(data[:8], "little") + 8, len(data))
        digest = self.files.digester.header(data[:length])
        blocks = -(-TOKENS // BLOCK_TOKENS)
        return Extent(1, name, 1, "live", len(data), "", digest, 0, blocks, blocks, TOKENS, 0, 0, 0, 0, 0, None)

    def _changed(self, random: Random, data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little") + 8
        if len(data) < 8 or length > len(data) or random.randrange(8) == 0:
            return mutations.bits(random, data)
        kind = random.randrange(4)
        try:
            header = parse_header(data[:length])
        except ValueError:
            kind = 0
        if kind == 0:  # the JSON, be it as it may
            try:
                fields = mutations.tree(random, json.loads(data[8:length]))
            except (ValueError, RecursionError):
                return mutations.bits(random, data)
            text = mutations.text_of(fields, _compact).encode("utf-8", "surrogatepass")
            text += b" " * (-(len(text) + 8) % 64)
            return len(text).to_bytes(8, "little") + text + data[length:]
        if kind == 1:
            return mutations.integer(random, data, 0, 8)
        if kind == 2:  # the plan, so that all of it fits together again
            return self._replanned(random, header, data[length:])
        return self._relayered(random, header, data)

    def _replanned(self, random: Random, header: ExtentHeader, body: bytes) -> bytes:
        plan, shapes = header.plan, list(header.plan.layout.layers)
        numbers = [number for number in mutations.NUMBERS if 0 <= number < 1 << 31]
        kind = random.randrange(4)
        if kind == 0:
            shapes[random.randrange(len(shapes))] = LayerShape(*random.choices(numbers, k=3))
        elif kind == 1:
            shapes = (shapes * random.choice((0, 2, 1000)))[:3000]
        elif kind == 2:
            plan = replace(plan, tokens=plan.tokens[: random.choice((0, 3, 4, 400))] * random.choice((1, 2, 20)))
        elif plan.coding is not None:
            sizes = tuple(random.choice((size, size, random.choice(numbers))) for size in plan.coding.sizes)
            plan = replace(plan, coding=Coding(plan.coding.coder, plan.coding.base_kv_space, sizes))
        plan = replace(plan, layout=KvLayout(random.choice(("float16", "float32", "uint8")), tuple(shapes)))
        digests = bytes(plan.digest_width * plan.layer_digests * len(shapes))
        text = plan.header(digests)
        return text + body[: max(0, min(len(body), plan.file_bytes - len(text)))]

    def _relayered(self, random: Random, header: ExtentHeader, data: bytes) -> bytes:
        """A layer changed, and its digest with it."""
        plan, coding = header.plan, header.plan.coding
        if coding is None:
            return mutations.bits(random, data, 1)
        layers = [data[plan.coded_at(n).start : plan.coded_at(n).stop] for n in range(len(coding.sizes))]
        at = random.randrange(len(layers))
        layers[at] = other_structure(random, layers[at])
        plan = replace(plan, coding=replace(coding, sizes=tuple(map(len, layers))))
        digests, width = bytearray(header.digests), plan.digest_width
        stop = (at + 1) * plan.layer_digests * width
        state = self.files.digester.data()
        state.update(layers[at])
        digests[stop - width : stop] = state.digest()
        return plan.header(bytes(digests)) + b"".join(layers)


def _compact(root: object) -> str:
    return json.dumps(root, separators=(",", ":"))


LAYOUT_EMPTY = make_kv(range(TOKENS), Span(0, TOKENS), KvSpace(KV_SPACE.namespace, LAYOUT)).layers[0].keys
