"""Triton kernels that write, fetch, rotate and shift KV on CUDA devices, where torch needs many launches.

write_rows         new keys and values to buffers whose address is read on the device
fetch              KV from many places in host memory to the buffers, in one launch
rotate_keys        keys rotated in place, in one launch
move_rest          KV that is not recomputed follows the mean change of what is

Where they can be used: `kernels.are_available`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rekindle.engine.hf.kernels import LayerAddress, compiled

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

WORD_BYTES = 8  # what is fetched comes in whole words
_FETCHING = 64  # concurrent blocks: enough to fill the bus, few enough to leave room for others
_FETCH_WORDS = 2048
_ROTATE_TOKENS = 32
_MOVE_TOKENS = 32


def write_rows(kept: LayerAddress, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write keys and values `[1, kv_heads, tokens, dim]` to their sorted slots, wherever the buffers are. A slot that
    repeats is padding: only the first counts."""
    dim = key.shape[3]
    _write_rows[key.shape[2], kept.kv_heads](
        kept.table, slots, key, value, key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        kept.layer, kept.layers, dim=dim, padded=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


def fetch_blocks(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Blocks for `fetch` of pieces of `words` words per head, `[blocks, 2]`: the piece, and the first word."""
    counts = -(-words // _FETCH_WORDS)
    piece = np.repeat(np.arange(len(words)), counts)
    place = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([piece, place * _FETCH_WORDS], axis=1)


def fetch(pieces: Tensor, blocks: Tensor, heads: int, target_pitch: int) -> None:
    """Copy words from pinned host memory to the device, on the current stream.

    pieces   [n, 4] int64: address to copy from, bytes from head to head there, address to copy to, words a head
    blocks   [m, 2] int64, from `fetch_blocks`
    """
    _fetch[(_FETCHING,)](pieces, blocks, blocks.shape[0] * heads, heads, target_pitch, words=_FETCH_WORDS, num_warps=8)


def rotate_keys(keys: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, first: slice, second: slice) -> None:
    """Rotate the keys `[kv_heads, capacity, key_dim]` at `slots` in place: numbers `first` with numbers `second`.

    cos, sin [slots, pairs] in float32.
    """
    count, pairs = cos.shape
    _rotate_keys[triton.cdiv(count, _ROTATE_TOKENS), keys.shape[0]](
        keys, slots, cos, sin, keys.stride(0), keys.stride(1), count, first.start or 0, second.start or 0,
        pairs, step=first.step or 1, tokens=_ROTATE_TOKENS, most=triton.next_power_of_2(pairs),
    )  # fmt: skip


@dataclass(frozen=True)
class MovingSpans:
    """Spans of a context some of whose tokens are recomputed; on the device.

    slots         [row's tokens] where each token of the row belongs
    own           [n] places in the row of the recomputed tokens, span by span
    own_starts    [spans + 1] where each span begins in `own`
    rest          [m] positions of the others, span by span
    rest_starts   [spans + 1]
    """

    slots: Tensor
    own: Tensor
    own_starts: Tensor
    rest: Tensor
    rest_starts: Tensor


def move_rest(buffer: Tensor, rows: Tensor, spans: MovingSpans, gain: float) -> None:
    """Add to the rest of each span `gain` times the mean change of its recomputed tokens.

    buffer [kv_heads, capacity, dim]; rows [kv_heads, row's tokens, dim], which will be written there.
    """
    dim = rows.shape[2]
    _move_rest[len(spans.own_starts) - 1, rows.shape[0]](
        buffer, rows, spans.slots, spans.own, spans.own_starts, spans.rest, spans.rest_starts, gain,
        buffer.stride(0), buffer.stride(1), rows.stride(0), rows.stride(1),
        dim=dim, padded=triton.next_power_of_2(dim), tokens=_MOVE_TOKENS, num_warps=4,
    )  # fmt: skip


def _write_rows_kernel(  # type: ignore[no-untyped-def]
    table, slots, key, value, key_head, key_token, value_head, value_token, layer, layers,
    dim: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """One token of one head."""
    token, head = tl.program_id(0), tl.program_id(1)
    numbers = tl.arange(0, padded)
    repeated = (token > 0) & (tl.load(slots + tl.maximum(token - 1, 0)) == tl.load(slots + token))
    real = (numbers < dim) & (not repeated)
    place = head * tl.load(table + 2 * layers) + tl.load(slots + token) * dim + numbers
    kind = tl.pointer_type(key.dtype.element_ty)
    row = tl.load(key + head * key_head + token * key_token + numbers, mask=real)
    tl.store(tl.load(table + layer).to(kind) + place, row, mask=real)
    row = tl.load(value + head * value_head + token * value_token + numbers, mask=real)
    tl.store(tl.load(table + layers + layer).to(kind) + place, row, mask=real)


def _fetch_kernel(  # type: ignore[no-untyped-def]
    pieces, blocks, count, heads, target_pitch, words: tl.constexpr
):
    """Copies every n-th block."""
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        block, head = index // heads, index % heads
        piece = pieces + tl.load(blocks + 2 * block) * 4
        place = tl.load(blocks + 2 * block + 1) + tl.arange(0, words)
        source = (tl.load(piece) + head * tl.load(piece + 1)).to(tl.pointer_type(tl.int64))
        target = (tl.load(piece + 2) + head * target_pitch).to(tl.pointer_type(tl.int64))
        inside = place < tl.load(piece + 3)
        tl.store(target + place, tl.load(source + place, mask=inside), mask=inside)


def _rotate_keys_kernel(  # type: ignore[no-untyped-def]
    keys, slots, cos, sin, key_head, key_token, count, first, second, pairs,
    step: tl.constexpr, tokens: tl.constexpr, most: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head."""
    rows = tl.program_id(0) * tokens + tl.arange(0, tokens)
    numbers = tl.arange(0, most)
    inside = (rows < count)[:, None] & (numbers < pairs)[None]
    angles = rows[:, None] * pairs + numbers[None]
    wide, high = tl.load(cos + angles, mask=inside), tl.load(sin + angles, mask=inside)
    own = keys + tl.program_id(1) * key_head + tl.load(slots + rows, mask=rows < count, other=0)[:, None] * key_token
    ones, others = own + first + numbers[None] * step, own + second + numbers[None] * step
    x = tl.load(ones, mask=inside).to(tl.float32)
    y = tl.load(others, mask=inside).to(tl.float32)
    tl.store(ones, (x * wide - y * high).to(keys.dtype.element_ty), mask=inside)
    tl.store(others, (y * wide + x * high).to(keys.dtype.element_ty), mask=inside)


def _move_rest_kernel(  # type: ignore[no-untyped-def]
    buffer, rows, slots, own, own_starts, rest, rest_starts, gain,
    buffer_head, buffer_token, row_head, row_token,
    dim: tl.constexpr, padded: tl.constexpr, tokens: tl.constexpr,
):  # fmt: skip
    """One span of one head."""
    span, head = tl.program_id(0), tl.program_id(1)
    numbers = tl.arange(0, padded)
    real = (numbers < dim)[None]
    kept, new = buffer + head * buffer_head + numbers[None], rows + head * row_head + numbers[None]
    first, stop = tl.load(own_starts + span), tl.load(own_starts + span + 1)
    change = tl.zeros([tokens, padded], tl.float32)
    for start in range(first, stop, tokens):
        index = start + tl.arange(0, tokens)
        place = tl.load(own + index, mask=index < stop, other=0)
        wanted = (index < stop)[:, None] & real
        slot = tl.load(slots + place)
        old = tl.load(kept + slot[:, None] * buffer_token, mask=wanted, other=0.0)
        change += tl.load(new + place[:, None] * row_token, mask=wanted, other=0.0).to(tl.float32) - old.to(tl.float32)
    mean = (tl.sum(change, 0) * (gain / (stop - first))).to(buffer.dtype.element_ty)[None]
    first, stop = tl.load(rest_starts + span), tl.load(rest_starts + span + 1)
    for start in range(first, stop, tokens):
        index = start + tl.arange(0, tokens)
        wanted = (index < stop)[:, None] & real
        place = kept + tl.load(rest + index, mask=index < stop, other=0)[:, None] * buffer_token
        tl.store(place, tl.load(place, mask=wanted) + mean, mask=wanted)


_write_rows = compiled(_write_rows_kernel, "layer", "layers")
_fetch = compiled(_fetch_kernel, "count")
_rotate_keys = compiled(_rotate_keys_kernel, "count")
_move_rest = compiled(_move_rest_kernel)
