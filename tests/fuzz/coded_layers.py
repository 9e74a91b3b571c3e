"""Coded layers: quantized KV, byte planes, slices of origins, and what says how they are coded."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

import numpy as np
import zstandard

from rekindle.codec import coder, quantized
from rekindle.codec.coder import Coder
from rekindle.codec.quantizer import BitPlan
from rekindle.core.kv import KvLayout, LayerKv, LayerShape, Span
from rekindle.remote import slices
from rekindle.store.catalog.variant_rows import PackedScores, unpack_scores
from tests.codec.arrays import smooth
from tests.fuzz import mutations
from tests.fuzz.family import Family

TOKENS, SHAPE = 300, LayerShape(2, 16, 8)
LAYOUT = KvLayout("float16", (SHAPE,))
_PLANES = struct.Struct("<4sBHIIII")
_QUANTIZED = struct.Struct("<4sBBHIIIII")


def cut(kv: LayerKv, span: Span) -> LayerKv:
    """Some tokens of it."""
    return LayerKv(kv.keys[:, span.start : span.stop], kv.values[:, span.start : span.stop])


class Inputs(Family):
    """Layers of one shape, coded in every way."""

    errors = (ValueError,)

    def __init__(self, folder: Path) -> None:
        self.anchor = smooth(SHAPE, TOKENS, "float16", 1)
        kv = LayerKv(self.anchor.keys + np.float16(0.01), self.anchor.values * np.float16(1.01))
        quantized = Coder(BitPlan.uniform(1, 4), BitPlan.uniform(1, 3))
        self.samples = [
            (quantized.encode(0, kv, None, "float16"), None, "layer"),
            (quantized.encode(0, kv, self.anchor, "float16"), self.anchor, "layer"),
            (coder.EXACT.encode(0, kv, self.anchor, "float16"), self.anchor, "layer"),
            (coder.SAME_LAYER, self.anchor, "layer"),
            (slices.encode(slices.level_named("raw", LAYOUT), LAYOUT, 0, kv), None, "slice"),
            (slices.encode(slices.level_named("q3", LAYOUT), LAYOUT, 0, kv), None, "slice"),
            (Coder(BitPlan.uniform(3, 4), BitPlan.uniform(3, 3)).to_json().encode(), None, "coder"),
            (bytes(4 * TOKENS + 28 * 3), None, "scores"),
        ]
        self.data, self.anchor_used, self.kind, self.span = self.samples[0][0], None, "layer", Span(0, TOKENS)

    def prepare(self, random: Random) -> int:
        self.data, self.anchor_used, self.kind = random.choice(self.samples)
        self.span = Span(*sorted(random.choices((0, 1, 32, 127, 128, 129, 256, TOKENS), k=2)))
        if random.randrange(3) == 0:
            self.span = Span(0, TOKENS)
        if self.kind == "coder":
            changed = mutations.tree(random, [[[4, 4], [3, 3]], "exact", [[3, 3]]])
            if isinstance(changed, list):  # its parts are texts of JSON themselves
                changed = [mutations.text_of(part) if isinstance(part, list) else part for part in changed[:2]]
            self.data = mutations.text_of(changed).encode("utf-8", "surrogatepass")
        elif random.randrange(4):
            for _ in range(random.randint(1, 3)):
                self.data = other_structure(random, self.data)
        if random.randrange(4) == 0:
            self.data = mutations.bits(random, self.data)
        return len(self.data) + TOKENS * LAYOUT.token_bytes

    def read(self) -> None:
        if self.kind == "coder":
            Coder.from_json(self.data.decode("utf-8", "replace"))
        elif self.kind == "slice":
            slices.decode(self.data, LAYOUT, 0, TOKENS)
        elif self.kind == "scores":
            half = 2 * TOKENS
            packed = PackedScores(self.data[:half], self.data[half : 2 * half], 0.5, self.data[2 * half :])
            unpack_scores(packed, TOKENS)
        else:
            anchor = None if self.anchor_used is None else cut(self.anchor_used, self.span)
            kv = coder.decode(self.data, LAYOUT.layer_spec(0, TOKENS), anchor, self.span)
            assert kv.keys.shape == (2, len(self.span), 16) and kv.values.shape == (2, len(self.span), 8)


def other_structure(random: Random, data: bytes) -> bytes:
    """A field of the header, an entry of the table, or a frame replaced, and the sizes with it."""
    is_quantized = data[:4] == quantized.MAGIC
    head = _QUANTIZED if is_quantized else _PLANES
    if len(data) < head.size:
        return data
    kind = random.randrange(4)
    if kind == 0:
        at = random.choice((8, 12, 16, 20, 24) if is_quantized else (7, 11, 15, 19))
        return mutations.integer(random, data, at, 4)
    if kind == 1:
        return mutations.integer(random, data, random.choice((4, 5, 6)), 1)
    if kind == 2:  # somewhere in the tables behind it
        at = head.size + 2 * random.randrange(40)
        return mutations.integer(random, data, at, random.choice((2, 4)))
    return _with_frame(random, data, head.size)


def _with_frame(random: Random, data: bytes, start: int) -> bytes:
    """One frame replaced by another of the same or another length; a table entry that had its length gets the new."""
    at = data.find(b"\x28\xb5\x2f\xfd", random.randrange(start, len(data) + 1))
    if at < 0:
        return data
    stop = data.find(b"\x28\xb5\x2f\xfd", at + 4)
    old = data[at : stop if stop > 0 else len(data)]
    new = hostile_frame(random, old)
    told = data[:at].rfind(len(old).to_bytes(4, "little"))
    before = data[:at]
    if told >= 0:
        before = before[:told] + len(new).to_bytes(4, "little") + before[told + 4 :]
    return before + new + data[at + len(old) :]


def hostile_frame(random: Random, old: bytes) -> bytes:
    """A zstd frame: of zeros, of anything, whose content size or window lies, several in one, one to be skipped."""
    try:
        size = zstandard.frame_content_size(old)
    except zstandard.ZstdError:
        size = 1000
    claimed = random.choice((size, size, mutations.number(random, 4, size)))
    kind = random.randrange(6)
    if kind == 0:
        return zstandard.compress(bytes(min(claimed, 1 << 20)))
    if kind == 1:
        return zstandard.compress(random.randbytes(min(claimed, 1 << 12)))
    if kind == 2:  # blocks of one byte repeated: 4 bytes for 128 KB each
        blocks = [struct.pack("<I", (131072 << 3) | 2)[:3] + b"\1"] * random.choice((1, 100, 20_000))
        blocks[-1] = bytes([blocks[-1][0] | 1]) + blocks[-1][1:]
        return b"\x28\xb5\x2f\xfd\xe0" + claimed.to_bytes(8, "little") + b"".join(blocks)
    if kind == 3:  # a window of up to 3.75 TB, the content size given
        return b"\x28\xb5\x2f\xfd\xc0" + bytes([random.randrange(256)]) + claimed.to_bytes(8, "little") + old[-20:]
    if kind == 4:
        return old + zstandard.compress(bytes(1000))
    return b"\x50\x2a\x4d\x18" + claimed.to_bytes(8, "little")[:4] + old
