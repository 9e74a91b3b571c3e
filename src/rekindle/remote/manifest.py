"""The manifest: what an origin has of one context, signed by its publisher and encrypted if there is a secret.

Slices of a level follow each other in the file without gaps, by chunk and then by layer, so their sizes give their
offsets. By chunk first, because what is computed locally is always a chunk's lower layers: what remains to fetch, the
upper layers of one chunk or all of several, is one range.

Bytes have exactly one form: a manifest that does not serialize to the same bytes is refused.

    header, JSON    signer, lookups, salt if encrypted; in clear, for administrators
    signature       of header and body, hexadecimal
    body            the manifest

The signature is checked before decryption, and decryption comes before anything in the body is read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.cipher import SALT_BYTES, TAG_BYTES, Secret, new_salt
from rekindle.core.cells import CHUNK_TOKENS, Cell, CellGrid
from rekindle.core.chunk import ChunkDigest, ChunkScores, EarlierChunk
from rekindle.core.keys import TOKEN_BYTES, layout_text, parse_layout
from rekindle.core.kv import Span
from rekindle.remote.index import CHAIN_BYTES, CONTEXT, FILE, LOOKUP, KvModel
from rekindle.remote.signing import SIGNATURE_BYTES, SigningKey, TrustedKeys
from rekindle.remote.slices import NAME, largest_bytes
from rekindle.safe_read import parse_untrusted_json

FORMAT = "rekindle-origin/2"
SLICE_DIGEST_BYTES = 16  # against a second preimage by the origin, not against the publisher
MAX_TOKENS = 1 << 24
MAX_BYTES = 12 << 20  # parsing a body takes six times its size
MAX_TITLE = 200
_MAX_LEVELS = 16
_SIZE = np.dtype("<u4")
_HALF = np.dtype("<f2")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class TokenFile:
    """The file with the tokens of a context."""

    file: str
    size_bytes: int
    salt: bytes | None = None


@dataclass(frozen=True, eq=False)
class LevelFile:
    """The slices of one level. `bits`: per number, before compression; `salt` if encrypted.

    `kl`: what the publisher measured on the beginning of the context, the mean KL in nats of the tokens that follow KV
    of this level to those that follow exact KV; None if it did not.
    """

    name: str
    bits: float
    file: str
    sizes: NDArray[np.int64]  # [chunks, layers], bytes in the file
    digests: NDArray[np.uint8]  # [chunks, layers, 16], of the same bytes
    salt: bytes | None = None
    kl: float | None = None

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.sizes.reshape(-1).tolist(), initial=0))

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._starts[-1]

    def number(self, cell: Cell) -> int:
        """Index of a slice in the file. Raises `ValueError` if there is none."""
        chunks, layers = map(int, self.sizes.shape)
        if not (0 <= cell.chunk < chunks and 0 <= cell.layer < layers):
            raise ValueError(f"there is no slice of chunk {cell.chunk} in layer {cell.layer}")
        return cell.chunk * layers + cell.layer

    def place(self, cell: Cell) -> Span:
        """Byte range of a slice in the file."""
        number = self.number(cell)
        return Span(self._starts[number], self._starts[number + 1])

    def digest(self, cell: Cell) -> bytes:
        """Digest of a slice."""
        self.number(cell)
        return bytes(self.digests[cell.chunk, cell.layer])


@dataclass(frozen=True, eq=False)
class PublishedPassage:
    """The first passage of a context, which clients reuse behind other tokens as well.

    `name`: its digest (`ContextNames.passage`); `scores` when its KV was computed, after the head of its prompt.
    """

    name: bytes
    span: Span
    scores: ChunkScores


@dataclass(frozen=True, eq=False)
class Manifest:
    """What is published of a context. `chain`: the digest of each chunk; `title`: the model's name, for display."""

    context: str
    model: KvModel
    tokens: int
    chain: tuple[bytes, ...]
    levels: tuple[LevelFile, ...]
    token_file: TokenFile
    created: int
    title: str = ""
    passage: PublishedPassage | None = None

    @property
    def cells(self) -> CellGrid:
        """Its chunks and layers."""
        return CellGrid(self.tokens, len(self.model.layout.layers))

    def level(self, name: str) -> LevelFile:
        """The level of that name. Raises `ValueError` for an unknown one."""
        for level in self.levels:
            if level.name == name:
                return level
        raise ValueError(f"there is no level {name!r}, only {', '.join(level.name for level in self.levels)}")

    @property
    def files(self) -> frozenset[str]:
        """The names of all its files."""
        return frozenset({self.token_file.file, *(level.file for level in self.levels)})

    def to_bytes(self) -> bytes:
        """The body; always the same bytes for the same manifest."""
        return canonical(
            {
                "adapter": self.model.adapter,
                "chain": _base64(b"".join(self.chain)),
                "chunk_tokens": CHUNK_TOKENS,
                "context": self.context,
                "created": self.created,
                "exact": self.model.exact,
                "format": FORMAT,
                "layout": layout_text(self.model.layout),
                "levels": [_level_fields(level) for level in self.levels],
                "passage": None if self.passage is None else _passage_fields(self.passage),
                "title": self.title,
                "token_file": {
                    "file": self.token_file.file,
                    "salt": hex_of(self.token_file.salt),
                    "size_bytes": self.token_file.size_bytes,
                },
                "tokens": self.tokens,
                "weights": self.model.weights,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse a body. Raises `ValueError` unless it is valid, complete and consistent."""
        try:
            fields = parse_untrusted_json(data)
            if fields["format"] != FORMAT or fields["chunk_tokens"] != CHUNK_TOKENS:
                raise ValueError("an unknown format")
            manifest = _manifest(fields)
            del fields  # frees as much memory as the manifest takes
            same = manifest.to_bytes() == data
        except (KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, IndexError) as error:
            raise ValueError(f"not a manifest: {error!r}") from error
        if not same:
            raise ValueError("not a manifest: its fields contradict each other")
        return manifest


def slice_digest(data: bytes | bytearray) -> bytes:
    """The digest of a slice's bytes in the file."""
    return hashlib.blake2b(data, digest_size=SLICE_DIGEST_BYTES).digest()


def slice_place(context: str, level: str, cell: Cell) -> bytes:
    """Associated data of an encrypted slice: it cannot be decrypted as another one."""
    return f"rekindle/slice/1 {context} {level} {cell.chunk} {cell.layer}".encode()


def tokens_place(context: str) -> bytes:
    """Associated data of the encrypted tokens of a context."""
    return f"rekindle/tokens/1 {context}".encode()


def _manifest(fields: Any) -> Manifest:
    layout = parse_layout(fields["layout"])
    model = KvModel(text_of(fields["exact"]), text_of(fields["weights"]), layout, fields["adapter"])
    if model.adapter is not None:
        text_of(model.adapter)
    tokens = _whole(fields["tokens"], CHUNK_TOKENS, MAX_TOKENS)
    cells = CellGrid(tokens, len(model.layout.layers))
    chain = _bytes(fields["chain"], cells.chunks * CHAIN_BYTES)
    levels = tuple(_level(level, cells) for level in fields["levels"])
    if not 1 <= len(levels) <= _MAX_LEVELS or len({level.name for level in levels}) < len(levels):
        raise ValueError("its levels are invalid")
    for level in levels:
        _check_sizes(level, model, cells)
    about = fields["token_file"]
    token_file = TokenFile(
        text_of(about["file"], FILE), _whole(about["size_bytes"], 1, tokens * TOKEN_BYTES + TAG_BYTES), salt_of(about)
    )
    return Manifest(
        context=text_of(fields["context"], CONTEXT),
        model=model,
        tokens=tokens,
        chain=tuple(chain[start : start + CHAIN_BYTES] for start in range(0, len(chain), CHAIN_BYTES)),
        levels=levels,
        token_file=token_file,
        created=_whole(fields["created"], 0, 1 << 40),
        title=_title(fields["title"]),
        passage=None if fields["passage"] is None else _passage(fields["passage"], tokens),
    )


def _passage(fields: Any, tokens: int) -> PublishedPassage:
    start = _whole(fields["start"], 1, tokens)
    span = Span(start, _whole(fields["stop"], start + 1, tokens))
    outside, received = (
        np.frombuffer(_bytes(fields[name], len(span) * _HALF.itemsize), _HALF) for name in ("outside", "received")
    )
    head = ChunkDigest(bytes.fromhex(text_of(fields["head"], _DIGEST)))
    numbers = fields["intra"], fields["mass"]
    if not all(type(number) is float and 0.0 <= number < math.inf for number in numbers):
        raise ValueError("the scores of a passage make no sense")
    if not (np.isfinite(outside).all() and np.isfinite(received).all()):
        raise ValueError("the scores of a passage make no sense")
    earlier = EarlierChunk(head, _whole(fields["head_tokens"], 0, start), fields["mass"])
    scores = ChunkScores(outside, received, fields["intra"], (earlier,))
    return PublishedPassage(_bytes(fields["name"], CHAIN_BYTES), span, scores)


def _passage_fields(passage: PublishedPassage) -> dict[str, Any]:
    scores = passage.scores
    (head,) = scores.earlier
    return {
        "head": head.digest.hex(),
        "head_tokens": head.tokens,
        "intra": float(scores.intra),
        "mass": float(head.mass),
        "name": _base64(passage.name),
        "outside": _base64(scores.outside.astype(_HALF).tobytes()),
        "received": _base64(scores.received.astype(_HALF).tobytes()),
        "start": passage.span.start,
        "stop": passage.span.stop,
    }


def _level(fields: Any, cells: CellGrid) -> LevelFile:
    count = cells.chunks * cells.layers
    sizes = np.frombuffer(_bytes(fields["sizes"], count * _SIZE.itemsize), _SIZE).astype(np.int64)
    digests = np.frombuffer(_bytes(fields["digests"], count * SLICE_DIGEST_BYTES), np.uint8)
    bits = fields["bits"]
    if type(bits) is not float or not 0 <= bits <= 64:
        raise ValueError("the bits of a level are invalid")
    kl = fields.get("kl")
    if kl is not None and not (type(kl) is float and 0 <= kl < math.inf):
        raise ValueError("the KL of a level is invalid")
    return LevelFile(
        text_of(fields["name"], NAME),
        bits,
        text_of(fields["file"], FILE),
        sizes.reshape(cells.chunks, cells.layers),
        digests.reshape(cells.chunks, cells.layers, SLICE_DIGEST_BYTES),
        salt_of(fields),
        kl,
    )


def _level_fields(level: LevelFile) -> dict[str, Any]:
    measured = {} if level.kl is None else {"kl": level.kl}  # earlier manifests have none
    return {
        **measured,
        "bits": level.bits,
        "digests": _base64(level.digests.tobytes()),
        "file": level.file,
        "name": level.name,
        "salt": hex_of(level.salt),
        "sizes": _base64(level.sizes.astype(_SIZE).tobytes()),
    }


def _check_sizes(level: LevelFile, model: KvModel, cells: CellGrid) -> None:
    """Raises `ValueError` for impossibly large slices, before memory is allocated for them."""
    for chunk in {0, cells.chunks - 1}:  # all but the last have as many tokens as the first
        tokens = len(cells.span(chunk))
        most = np.array([largest_bytes(model.layout, layer, tokens) + TAG_BYTES for layer in range(cells.layers)])
        rows = level.sizes[chunk:] if chunk else level.sizes
        if (rows < 1).any() or (rows > most).any():
            raise ValueError("the size of a slice makes no sense")


def canonical(fields: dict[str, Any]) -> bytes:
    """JSON in canonical form."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str, size: int) -> bytes:
    data = base64.b64decode(text, validate=True)
    if len(data) != size:
        raise ValueError(f"{len(data)} bytes in place of {size}")
    return data


def hex_of(data: bytes | None) -> str | None:
    """A salt as text; None stays None."""
    return None if data is None else data.hex()


def salt_of(fields: Any) -> bytes | None:
    """The salt in some fields. Raises `ValueError` if it is invalid."""
    if fields["salt"] is None:
        return None
    salt = bytes.fromhex(fields["salt"])
    if len(salt) != SALT_BYTES:
        raise ValueError("a salt has another length")
    return salt


def text_of(value: Any, pattern: re.Pattern[str] | None = None) -> str:
    """A text that matches the pattern. Raises `ValueError` for anything else."""
    if not isinstance(value, str) or (pattern is not None and not pattern.fullmatch(value)):
        raise ValueError(f"an unexpected value: {str(value)[:80]!r}")
    return value


def _title(value: Any) -> str:
    """A title for display, without control characters."""
    if not text_of(value).isprintable() or len(value) > MAX_TITLE:
        raise ValueError("a title cannot be shown")
    return str(value)


def _whole(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"not a number that makes sense: {str(value)[:80]!r}")
    return value


_MAX_HEADER_BYTES = 1 << 14
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Header:
    """The unencrypted part: the publisher's key, the lookups that list it, its salt if encrypted."""

    key: str
    lookups: tuple[str, ...]
    salt: bytes | None = None

    def to_bytes(self) -> bytes:
        """One line, without line break."""
        return canonical({"format": FORMAT, "key": self.key, "lookups": list(self.lookups), "salt": hex_of(self.salt)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """Raises `ValueError` for an invalid header."""
        try:
            fields = parse_untrusted_json(data)
            header = cls(
                text_of(fields["key"], _KEY), tuple(text_of(t, LOOKUP) for t in fields["lookups"]), salt_of(fields)
            )
            same = fields["format"] == FORMAT and header.to_bytes() == data
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a manifest header: {error!r}") from error
        if not same:
            raise ValueError("not a manifest header")
        return header


@dataclass(frozen=True)
class SignedManifest:
    """The parsed file of a manifest, not verified yet."""

    header: Header
    signature: bytes
    body: bytes

    def to_bytes(self) -> bytes:
        return b"\n".join([self.header.to_bytes(), self.signature.hex().encode(), self.body])

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedManifest:
        """Raises `ValueError` for invalid files."""
        if len(data) > MAX_BYTES:
            raise ValueError("not a manifest: none is that long")
        parts = data.split(b"\n", 2)
        if len(parts) < 3 or len(parts[0]) > _MAX_HEADER_BYTES:
            raise ValueError("not a manifest: it has no header")
        if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * SIGNATURE_BYTES), parts[1]):
            raise ValueError("not a manifest: it has no signature")
        return cls(Header.from_bytes(parts[0]), bytes.fromhex(parts[1].decode()), parts[2])

    @classmethod
    def seal(cls, manifest: Manifest, lookups: Sequence[str], key: SigningKey, secret: Secret | None) -> SignedManifest:
        """Encrypt a manifest if there is a secret, and sign the result."""
        header = Header(key.name, tuple(lookups), None if secret is None else new_salt())
        body = manifest.to_bytes()
        if secret is not None and header.salt is not None:
            body = secret.cipher(b"manifest", header.salt).seal(0, body, header.to_bytes())
        return cls(header, key.sign(_signed(header, body)), body)

    def open(self, keys: TrustedKeys, secret: Secret | None) -> Manifest:
        """The verified manifest. Raises `ValueError` unless a trusted key signed it and it can be read.

        With a secret, it must be encrypted.
        """
        keys.check(self.header.key, self.signature, _signed(self.header, self.body))
        if secret is not None and self.header.salt is None:
            raise ValueError("it is not encrypted, though there is a secret")
        manifest = self.peek(secret)
        salts = [manifest.token_file.salt, *(level.salt for level in manifest.levels)]
        if any((salt is None) != (secret is None) for salt in salts):
            raise ValueError("some of its files are encrypted, others are not")
        return manifest

    def peek(self, secret: Secret | None) -> Manifest:
        """The manifest without checking the signature, for administration. Raises `ValueError` if it is unreadable."""
        body = self.body
        if self.header.salt is not None:
            if secret is None:
                raise ValueError("it is encrypted, and there is no secret")
            body = secret.cipher(b"manifest", self.header.salt).open(0, body, self.header.to_bytes())
        return Manifest.from_bytes(body)


def _signed(header: Header, body: bytes) -> bytes:
    return b"rekindle/manifest/1\n" + header.to_bytes() + b"\n" + body
