"""Triton kernels of attention for CUDA devices, where torch needs several passes or many launches.

attend_scattered   attention of queries at any positions: masked by positions, without a mask of queries x keys
attend_split       the same for a few queries over many keys: blocks share the keys of a query, too
attention_received what some of those queries attend to
attention_sent     what all queries of a row attend to, by segments of keys, and what each key receives

Triton comes with torch for CUDA. Without it, or without the compiler it needs, everything works as on other devices,
only slower: see `are_available`.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

_DIMS = (64, 128, 256)
_TYPES = (torch.float16, torch.bfloat16)
_LOG2_E = 1.4426950408889634
_QUERIES, _KEYS = 64, 64  # of a block: the fastest of 23 choices on an H200, for heads of 128 numbers
_MAX_SPLITS = 32
_SPLIT_BLOCKS = 256  # of `attend_split`: two for each processor of an H200
_RECEIVED_BYTES = 512 << 20  # the largest table of what keys receive from each block of queries
KEYS_READ = 64  # at a time, of `attention_received`

_log = logging.getLogger(__name__)


@functools.cache
def are_available(device: torch.device) -> bool:
    """Whether kernels can be compiled and run on the device; tried once, with a small one."""
    if triton is None or device.type != "cuda" or torch.version.cuda is None:
        return False
    if device.index not in (None, torch.cuda.current_device()):  # Triton launches on the current device
        return False
    try:
        rows = torch.zeros(1, 1, 1, _DIMS[0], dtype=_TYPES[0], device=device)
        attend_scattered(rows, rows, rows, torch.zeros(1, dtype=torch.int64, device=device), 1.0)
        torch.cuda.synchronize(device)  # raises errors of the launch
    except Exception as error:  # noqa: BLE001  (whatever compilers and drivers raise)
        _log.info("No kernels can be compiled here: %s", error)
        return False
    return True


def supports(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether `attend_scattered` can compute these: half precision, a known head size, a device with kernels."""
    sizes = query.shape[-1] in _DIMS and values.shape[-1] in _DIMS
    return sizes and query.dtype in _TYPES and query.dtype == keys.dtype == values.dtype and are_available(query.device)


def attend_scattered(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scaling: float, window: int | None = None
) -> Tensor:
    """Attention output `[1, heads, tokens, value_dim]` of queries at sorted `positions` over the keys up to them.

    query [1, heads, tokens, key_dim]; keys, values [1, kv_heads, capacity, dim].

    2,522 queries over 8,192 keys, 32/8 heads of 128 numbers, on an H200: 0.44 ms, where tiles with masks take 0.75.
    """
    heads, count = query.shape[1], query.shape[2]
    out = torch.empty(1, count, heads, values.shape[3], dtype=query.dtype, device=query.device).transpose(1, 2)
    wide = max(query.shape[3], values.shape[3]) > 128
    _attend_scattered[triton.cdiv(count, _QUERIES), heads](
        query, keys, values, out, positions,
        query.stride(1), query.stride(2), keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
        out.stride(1), out.stride(2), count, scaling * _LOG2_E, -1 if window is None else window,
        group=heads // keys.shape[1], key_dim=query.shape[3], value_dim=values.shape[3], queries=_QUERIES,
        keys_at_once=_KEYS // 2 if wide else _KEYS, windowed=window is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class LayerAddress:
    """Where the buffers of one layer are, `[kv_heads, capacity, dim]` each: read on the device, so that a recorded
    kernel serves any buffers.

    table   int64: addresses of the keys of all layers, of their values, numbers from head to head
    """

    table: Tensor
    layer: int
    kv_heads: int

    @property
    def layers(self) -> int:
        """How many layers the table has."""
        return len(self.table) // 2


def fits_split(dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `attend_split` and `kv_kernels.write_rows` can be used for heads of this size."""
    return dtype in _TYPES and 16 <= dim <= 256 and dim % 8 == 0 and are_available(device)


def attend_split(
    query: Tensor, kept: LayerAddress, positions: Tensor, scaling: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """The same as `attend_scattered`, faster for a few queries: their keys are cut into ranges, whose results are
    combined. Where and how many the keys are is read on the device. Positions may repeat.

    Returns, too, the sum of the exponentials of each range, `[ranges, tokens, heads]`, as base-2 logarithms.

    64 queries over 8,192 keys, 32/8 heads of 128 numbers, on an H200: 0.04 ms; over 32,768 keys: 0.12.
    """
    heads, count, dim = query.shape[1:]
    group = heads // kept.kv_heads
    rows = 16 if count * group <= 16 else _QUERIES
    blocks = triton.cdiv(count * group, rows)
    splits = max(1, min(triton.next_power_of_2(_SPLIT_BLOCKS // (blocks * kept.kv_heads)), _MAX_SPLITS))
    parts = torch.empty(splits, count, heads, dim, dtype=torch.float32, device=query.device)
    sums = torch.empty(splits, count, heads, dtype=torch.float32, device=query.device)
    out = torch.empty(1, count, heads, dim, dtype=query.dtype, device=query.device).transpose(1, 2)
    padded = triton.next_power_of_2(dim)
    _attend_part[blocks, kept.kv_heads, splits](
        query, kept.table, parts, sums, positions, query.stride(1), query.stride(2), count, scaling * _LOG2_E,
        -1 if window is None else window, kept.layer, kept.layers, group=group, dim=dim, padded=padded, queries=rows,
        keys_at_once=_KEYS // 2 if padded > 128 else _KEYS, windowed=window is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    _combine_parts[count, heads](
        parts, sums, out, out.stride(1), out.stride(2), count, heads, dim=dim, padded=padded, splits=splits
    )
    return out, sums


@dataclass(frozen=True)
class ReceivedAttention:
    """What some queries attend to in one layer, on the device.

    seen     [positions] the attention a position receives from the queries times the norm of its value, maximum over
             heads
    norms    [blocks of `KEYS_READ` positions] the sum of the norms of their values, over all key heads
    """

    seen: Tensor
    norms: Tensor


def attention_received(
    query: Tensor,
    kept: LayerAddress,
    positions: Tensor,
    sums: Tensor,
    asked: Tensor,
    out: ReceivedAttention,
    scaling: float,
    window: int | None = None,
) -> None:
    """Write to `out` what the queries from `asked[0]` to `asked[1]`, on the device, attend to.

    query, positions   those of `attend_split`
    sums               what it returned
    """
    heads, count, dim = query.shape[1:]
    padded = triton.next_power_of_2(dim)
    _attention_received[(min(_SPLIT_BLOCKS, len(out.norms)),)](
        query, kept.table, sums, positions, asked, out.seen, out.norms, query.stride(1), query.stride(2), count, heads,
        kept.kv_heads, scaling * _LOG2_E, -1 if window is None else window, kept.layer, kept.layers,
        group=heads // kept.kv_heads, dim=dim, padded=padded, splits=len(sums), queries=_QUERIES,
        keys_at_once=KEYS_READ, windowed=window is not None, num_warps=4,
    )  # fmt: skip


_SEGMENTS = 32, 128  # there is a kernel for each of these numbers
MAX_SEGMENTS = _SEGMENTS[-1]


def attention_sent(
    query: Tensor,
    keys: Tensor,
    positions: Tensor,
    segments: Tensor,
    count: int,
    asked: tuple[int, int],
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """The attention that queries at sorted positions pay: to each segment of keys, `[tokens, segments]`, mean over
    heads; and what each key receives from the queries from `asked[0]` to `asked[1]`, `[heads, keys]`.

    query      [1, heads, tokens, key_dim]; keys [1, kv_heads, capacity, key_dim]
    segments   [keys] int32: the segment of each key, or -1; `count` of them, at most `MAX_SEGMENTS`
    """
    heads, tokens, dim = query.shape[1:]
    blocks, size = triton.cdiv(tokens, _QUERIES), next(size for size in _SEGMENTS if size >= count)
    sent = torch.zeros(heads, tokens, size, dtype=torch.float32, device=query.device)
    received = torch.empty(heads, len(segments), dtype=torch.float32, device=query.device)
    at_once = max(1, min(heads, _RECEIVED_BYTES // (4 * blocks * len(segments))))
    for first in range(0, heads, at_once):
        some = min(at_once, heads - first)
        parts = torch.zeros(blocks, some, len(segments), dtype=torch.float32, device=query.device)
        _attention_sent[blocks, some](
            query, keys, positions, segments, sent, parts, query.stride(1), query.stride(2), keys.stride(1),
            keys.stride(2), first, tokens, len(segments), *asked, scaling * _LOG2_E, -1 if window is None else window,
            group=heads // keys.shape[1], dim=dim, queries=_QUERIES, keys_at_once=_KEYS, segment_count=size,
            windowed=window is not None, num_warps=4, num_stages=3,
        )  # fmt: skip
        received[first : first + some] = parts.sum(dim=0)
    return sent[..., :count].mean(dim=0), received


def compiled(kernel: Any, *changing: str) -> Any:
    """A kernel, compiled at its first launch. `changing`: arguments whose values must not make another kernel."""
    return kernel if triton is None else triton.jit(kernel, do_not_specialize=list(changing))


def _attend_scattered_kernel(  # type: ignore[no-untyped-def]  # Triton
    query, keys, values, out, positions,
    query_head, query_token, key_head, key_token, value_head, value_token, out_head, out_token,
    count, scaling, window,
    group: tl.constexpr, key_dim: tl.constexpr, value_dim: tl.constexpr, queries: tl.constexpr,
    keys_at_once: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head, in the way of flash attention: a running maximum, sum and mean.

    keys ->      0 . . . . . . . . . . . . n
    block 0      ####|\\\\\\\\|                    # seen by all its queries    \\\\ compared, position by position
    block 1      ########|\\\\\\\\\\\\|
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1)
    rows = block * queries + tl.arange(0, queries)
    inside = rows < count
    own = tl.load(positions + tl.minimum(rows, count - 1))  # those beyond the end do as the last one does
    first = tl.load(positions + block * queries)
    last = tl.load(positions + tl.minimum(block * queries + queries, count) - 1)
    low = first * 0
    if windowed:
        low = tl.maximum(first - window + 1, 0) // keys_at_once * keys_at_once
    key_dims, value_dims = tl.arange(0, key_dim), tl.arange(0, value_dim)
    asked = tl.load(query + head * query_head + tl.minimum(rows, count - 1)[:, None] * query_token + key_dims[None])
    key_rows = keys + (head // group) * key_head
    value_rows = values + (head // group) * value_head
    highest = tl.full([queries], -float("inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, value_dim], tl.float32)
    # Whole blocks of keys that every query sees; a window hides some keys of any block from some queries.
    seen = low if windowed else (first + 1) // keys_at_once * keys_at_once
    for start in range(low, seen, keys_at_once):
        places = start + tl.arange(0, keys_at_once)
        key = tl.load(key_rows + places[None] * key_token + key_dims[:, None])
        products = tl.dot(asked, key) * scaling
        above = tl.maximum(highest, tl.max(products, 1))
        weights = tl.exp2(products - above[:, None])
        kept = tl.exp2(highest - above)
        total = total * kept + tl.sum(weights, 1)
        value = tl.load(value_rows + places[:, None] * value_token + value_dims[None])
        mixed = tl.dot(weights.to(value.dtype), value, mixed * kept[:, None])
        highest = above
    for start in range(seen, last + 1, keys_at_once):
        places = start + tl.arange(0, keys_at_once)
        there = places <= last  # what lies behind is not filled
        key = tl.load(key_rows + places[None] * key_token + key_dims[:, None], mask=there[None], other=0.0)
        visible = places[None] <= own[:, None]
        if windowed:
            visible = visible & (places[None] > own[:, None] - window)
        products = tl.where(visible, tl.dot(asked, key) * scaling, -1e30)
        above = tl.maximum(highest, tl.max(products, 1))
        weights = tl.where(visible, tl.exp2(products - above[:, None]), 0.0)
        kept = tl.exp2(highest - above)
        total = total * kept + tl.sum(weights, 1)
        value = tl.load(value_rows + places[:, None] * value_token + value_dims[None], mask=there[:, None], other=0.0)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * kept[:, None])
        highest = above
    mixed = mixed / total[:, None]
    target = out + head * out_head + rows[:, None] * out_token + value_dims[None]
    tl.store(target, mixed.to(out.dtype.element_ty), mask=inside[:, None])


def _attend_part_kernel(  # type: ignore[no-untyped-def]
    query, table, parts, sums, positions, query_head, query_token, count, scaling, window, layer, layers,
    group: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
    queries: tl.constexpr, keys_at_once: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """One block of rows, and one range of the keys. A row is a query of one of the heads that share a key head."""
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = block * queries + tl.arange(0, queries)
    inside = rows < count * group
    token = tl.minimum(rows // group, count - 1)
    head = kv_head * group + rows % group
    own = tl.load(positions + token)
    first = tl.load(positions + tl.minimum(block * queries // group, count - 1))
    last = tl.load(positions + tl.minimum((block * queries + queries - 1) // group, count - 1))
    low = first * 0
    if windowed:
        low = tl.maximum(first - window + 1, 0) // keys_at_once * keys_at_once
    size = tl.cdiv(tl.cdiv(last + 1 - low, keys_at_once), tl.num_programs(2)) * keys_at_once
    start, stop = low + split * size, tl.minimum(low + (split + 1) * size, last + 1)
    kind = tl.pointer_type(query.dtype.element_ty)
    pitch = tl.multiple_of(tl.load(table + 2 * layers), 8)
    keys = tl.multiple_of(tl.load(table + layer).to(kind), 16) + kv_head * pitch
    values = tl.multiple_of(tl.load(table + layers + layer).to(kind), 16) + kv_head * pitch
    numbers = tl.arange(0, padded)
    real = numbers < dim
    asked = tl.load(
        query + head[:, None] * query_head + token[:, None] * query_token + numbers[None], mask=real[None], other=0.0
    )
    highest = tl.full([queries], -float("inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, padded], tl.float32)
    for at in range(start, stop, keys_at_once):
        places = at + tl.arange(0, keys_at_once)
        there = places < stop
        key = tl.load(keys + places[None] * dim + numbers[:, None], mask=there[None] & real[:, None], other=0.0)
        visible = (places[None] <= own[:, None]) & there[None]
        if windowed:
            visible = visible & (places[None] > own[:, None] - window)
        products = tl.where(visible, tl.dot(asked, key) * scaling, -1e30)
        above = tl.maximum(highest, tl.max(products, 1))
        weights = tl.where(visible, tl.exp2(products - above[:, None]), 0.0)
        left = tl.exp2(highest - above)
        total = total * left + tl.sum(weights, 1)
        value = tl.load(values + places[:, None] * dim + numbers[None], mask=there[:, None] & real[None], other=0.0)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * left[:, None])
        highest = above
    seen = total > 0
    place = (split * count + token) * (group * tl.num_programs(1)) + head
    tl.store(sums + place, tl.where(seen, highest + tl.log2(total), -float("inf")), mask=inside)
    mixed = mixed / tl.where(seen, total, 1.0)[:, None]
    tl.store(parts + place[:, None] * dim + numbers[None], mixed, mask=inside[:, None] & real[None])


def _combine_parts_kernel(  # type: ignore[no-untyped-def]
    parts, sums, out, out_head, out_token, count, heads,
    dim: tl.constexpr, padded: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """One query of one head: the mean of its parts, weighted by their sums."""
    token, head = tl.program_id(0), tl.program_id(1)
    numbers = tl.arange(0, padded)
    real = numbers < dim
    place = (tl.arange(0, splits) * count + token) * heads + head
    sizes = tl.load(sums + place)
    weights = tl.exp2(sizes - tl.max(sizes, 0))
    part = tl.load(parts + place[:, None] * dim + numbers[None], mask=real[None], other=0.0)
    mixed = tl.sum(part * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + head * out_head + token * out_token + numbers, mixed.to(out.dtype.element_ty), mask=real)


def _attention_received_kernel(  # type: ignore[no-untyped-def]
    query, table, sums, positions, asked, seen, norms, query_head, query_token, count, heads, kv_heads, scaling, window,
    layer, layers, group: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr, splits: tl.constexpr,
    queries: tl.constexpr, keys_at_once: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """Every n-th block of keys, for all heads."""
    first, stop = tl.load(asked), tl.load(asked + 1)
    end = tl.load(positions + count - 1) + 1
    kind = tl.pointer_type(query.dtype.element_ty)
    pitch = tl.multiple_of(tl.load(table + 2 * layers), 8)
    keys = tl.multiple_of(tl.load(table + layer).to(kind), 16)
    values = tl.multiple_of(tl.load(table + layers + layer).to(kind), 16)
    numbers, ranges = tl.arange(0, padded), tl.arange(0, splits)
    real = numbers < dim
    for block in range(tl.program_id(0), tl.cdiv(end, keys_at_once), tl.num_programs(0)):
        places = block * keys_at_once + tl.arange(0, keys_at_once)
        there = places < end
        most = tl.zeros([keys_at_once], tl.float32)
        norm = tl.zeros([keys_at_once], tl.float32)
        for kv_head in range(kv_heads):
            row = kv_head * pitch + places * dim
            key = tl.load(keys + row[None] + numbers[:, None], mask=there[None] & real[:, None], other=0.0)
            value = tl.load(values + row[:, None] + numbers[None], mask=there[:, None] & real[None], other=0.0)
            length = tl.sqrt(tl.sum(value.to(tl.float32) * value.to(tl.float32), 1))
            norm += length
            for head in range(kv_head * group, kv_head * group + group):
                mass = tl.zeros([keys_at_once], tl.float32)
                for start in range(first, stop, queries):
                    token = start + tl.arange(0, queries)
                    inside = token < stop
                    own = tl.load(positions + token, mask=inside, other=-1)
                    some = tl.load(
                        query + head * query_head + token[:, None] * query_token + numbers[None],
                        mask=inside[:, None] & real[None], other=0.0,
                    )  # fmt: skip
                    part = tl.load(
                        sums + (ranges[:, None] * count + token[None]) * heads + head, mask=inside[None], other=0.0
                    )
                    highest = tl.max(part, 0)
                    total = highest + tl.log2(tl.sum(tl.exp2(part - highest[None]), 0))
                    visible = places[None] <= own[:, None]
                    if windowed:
                        visible = visible & (places[None] > own[:, None] - window)
                    weights = tl.exp2(tl.dot(some, key) * scaling - total[:, None])
                    mass += tl.sum(tl.where(visible, weights, 0.0), 0)
                most = tl.maximum(most, mass * length)
        tl.store(seen + places, most / (stop - first), mask=there)
        tl.store(norms + block, tl.sum(norm, 0))


def _attention_sent_kernel(  # type: ignore[no-untyped-def]
    query, keys, positions, segments, sent, received, query_head, query_token, key_head, key_token,
    first_head, count, key_count, asked_first, asked_stop, scaling, window,
    group: tl.constexpr, dim: tl.constexpr, queries: tl.constexpr, keys_at_once: tl.constexpr,
    segment_count: tl.constexpr, windowed: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: first the sums of the exponentials, then the weights."""
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), first_head + tl.program_id(1)
    rows = block * queries + tl.arange(0, queries)
    own = tl.load(positions + tl.minimum(rows, count - 1))
    first = tl.load(positions + block * queries)
    last = tl.load(positions + tl.minimum(block * queries + queries, count) - 1)
    low = first * 0
    if windowed:
        low = tl.maximum(first - window + 1, 0) // keys_at_once * keys_at_once
    numbers, numbered = tl.arange(0, dim), tl.arange(0, segment_count)
    some = tl.load(query + head * query_head + tl.minimum(rows, count - 1)[:, None] * query_token + numbers[None])
    key_rows = keys + (head // group) * key_head + numbers[:, None]
    highest = tl.full([queries], -float("inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    for start in range(low, last + 1, keys_at_once):
        places = start + tl.arange(0, keys_at_once)
        key = tl.load(key_rows + places[None] * key_token, mask=(places <= last)[None], other=0.0)
        visible = places[None] <= own[:, None]
        if windowed:
            visible = visible & (places[None] > own[:, None] - window)
        products = tl.where(visible, tl.dot(some, key) * scaling, -1e30)
        above = tl.maximum(highest, tl.max(products, 1))
        total = total * tl.exp2(highest - above) + tl.sum(tl.where(visible, tl.exp2(products - above[:, None]), 0.0), 1)
        highest = above
    sums = highest + tl.log2(total)
    asking = (rows >= asked_first) & (rows < asked_stop) & (rows < count)
    mass = tl.zeros([queries, segment_count], tl.float32)
    target = received + (block * tl.num_programs(1) + tl.program_id(1)) * key_count
    for start in range(low, last + 1, keys_at_once):
        places = start + tl.arange(0, keys_at_once)
        there = places <= last
        key = tl.load(key_rows + places[None] * key_token, mask=there[None], other=0.0)
        visible = places[None] <= own[:, None]
        if windowed:
            visible = visible & (places[None] > own[:, None] - window)
        weights = tl.where(visible, tl.exp2(tl.dot(some, key) * scaling - sums[:, None]), 0.0)
        segment = tl.load(segments + places, mask=there, other=-1)
        inside = (segment[:, None] == numbered[None]).to(tl.float16)
        mass = tl.dot(weights.to(tl.float16), inside, mass)
        tl.store(target + places, tl.sum(tl.where(asking[:, None], weights, 0.0), 0), mask=there)
    place = sent + (head * count + rows[:, None]) * segment_count + numbered[None]
    tl.store(place, mass, mask=(rows < count)[:, None])


_attend_scattered = compiled(_attend_scattered_kernel, "count", "window")
_attend_part = compiled(_attend_part_kernel, "layer", "layers", "count", "window")
_combine_parts = compiled(_combine_parts_kernel, "count")
_attention_received = compiled(_attention_received_kernel, "layer", "layers", "count", "window")
_attention_sent = compiled(
    _attention_sent_kernel, "first_head", "count", "key_count", "asked_first", "asked_stop", "window"
)
