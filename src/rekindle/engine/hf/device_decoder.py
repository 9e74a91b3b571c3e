"""Quantized KV decoded on a device: threads of the host decompress it, the device restores the numbers.

    thread   [decompress layer 0][decompress layer 1] ...      zstd frames, into pinned memory
    device            [copy 0][restore 0][copy 1][restore 1]   a few dozen operations, straight into the sequence

The numbers are those of `codec/coder.decode`, bit by bit: the same sums and products of float32 in the same order,
each rounded by itself, steps from the same table, and the nearest number of the engine's type at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from rekindle.codec.packing import LARGEST_RATIO, TABLES
from rekindle.codec.quantized import GROUP_TOKENS, Coded, CodedFrame, Kind, locate_parts
from rekindle.codec.quantizer import steps_of
from rekindle.core.kv import CodedPiece, LayerKv, LayerSpec, Span
from rekindle.engine.base import CodedFeed
from rekindle.engine.hf.sequence import TORCH_TYPE, TorchSequence, raw_view
from rekindle.errors import KvLost

_BATCH_NUMBERS = 1 << 25  # restored at a time: each takes some 20 bytes on the device until it is done
_ALIGNED_BYTES = 256
_STRAY = -(2**15)  # a code that none has
_EXPONENTS = np.arange(-252, 221, dtype=np.int16)  # all that steps have


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """Keys and values of some tokens in one layer, as tensors."""

    keys: Tensor  # [kv_heads, tokens, key_dim]
    values: Tensor  # [kv_heads, tokens, value_dim]

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def window(self, start: int, stop: int) -> LayerTensors:
        return LayerTensors(self.keys[:, start:stop], self.values[:, start:stop])


class SlotMemory:
    """Parts of a slot of pinned memory, one after the other; other memory when it is used up."""

    def __init__(self, slot: Tensor | None) -> None:
        slot = torch.empty(0, dtype=torch.uint8) if slot is None else slot
        self._free = slot[-slot.storage_offset() % _ALIGNED_BYTES :]

    def take(self, size_bytes: int) -> Tensor:
        """A tensor of bytes."""
        if size_bytes > self._free.numel():
            return torch.empty(size_bytes, dtype=torch.uint8)
        taken, self._free = self._free[:size_bytes], self._free[-(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES :]
        return taken


class CodedStaging:
    """A layer of a coded feed on its way into a sequence: `run` in a thread, then `commit` by the step."""

    def __init__(self, feed: CodedFeed, span: Span, sequence: TorchSequence, layer: int, memory: SlotMemory) -> None:
        self._feed, self._layer, self._memory = feed, layer, memory
        self._target = LayerTensors(sequence.keys(layer)[0], sequence.values(layer)[0]).window(span.start, span.stop)
        self._parts: list[tuple[CodedPiece, DecodedPart | CodedPart]] = []

    def run(self) -> None:
        """Read and decompress it. Raises `KvLost`."""
        self._feed.fill_coded(self._layer, self._take)

    def _take(self, piece: CodedPiece) -> None:
        try:
            self._parts += [(piece, part) for part in unpack(piece, self._target, self._memory)]
        except ValueError as error:
            raise self._feed.damaged(piece, f"layer {self._layer}: {error}") from error

    def commit(self) -> list[SoundCheck]:
        """Restore it on the current stream."""
        found = ((piece, part.restore()) for piece, part in self._parts)
        return [SoundCheck(self._feed, self._layer, piece, sound) for piece, sound in found if sound is not None]


@dataclass(frozen=True, eq=False)
class SoundCheck:
    """Whether a piece that was restored had its strays where they should be: known once the device has come to it."""

    feed: CodedFeed
    layer: int
    piece: CodedPiece
    sound: Tensor

    def failure(self) -> KvLost:
        """What to raise if it is not sound."""
        return self.feed.damaged(self.piece, f"layer {self.layer}: codes are damaged: their strays do not match")


def unpack(piece: CodedPiece, target: LayerTensors, memory: SlotMemory) -> list[DecodedPart | CodedPart]:
    """What is left to restore of a piece, in order. Raises `ValueError` for damaged bytes, or if it does not fit."""
    out, spec = target.window(piece.at, piece.at + len(piece.span)), piece.spec
    wanted = [(spec.shape.kv_heads, len(piece.span), dim) for dim in (spec.shape.key_dim, spec.shape.value_dim)]
    if [tuple(half.shape) for half in out.halves] != wanted:
        raise ValueError(f"{len(piece.span)} tokens of {spec.dtype} KV, {spec.shape}: there is no place for them")
    if isinstance(piece.data, LayerKv):
        return [DecodedPart(_staged(piece.data, piece.span, out, memory), out)]
    if piece.span.stop > len(piece.data) * spec.tokens:
        raise ValueError(f"these are {len(piece.data) * spec.tokens} tokens, not {piece.span.stop}")
    if piece.delta and out.keys.dtype != TORCH_TYPE.get(spec.dtype):
        raise ValueError(f"a delta of {spec.dtype} KV cannot be added to {out.keys.dtype}")
    parts: list[DecodedPart | CodedPart] = []
    at_a_time = max(1, _BATCH_NUMBERS // (sum(heads * dim for heads, _, dim in wanted) * GROUP_TOKENS))  # groups
    each = max(1, at_a_time * GROUP_TOKENS // max(1, spec.tokens))  # pieces of data
    for number in range(0, len(piece.data), each):
        code = JoinedCode.of(piece.data[number : number + each], "difference" if piece.delta else "whole", spec)
        start = number * spec.tokens
        for own in code.parts(piece.span, start, at_a_time):
            plan = DecodePlan.of(code, own)
            raw = memory.take(plan.size_bytes)
            _expand(code.data, plan, raw.numpy())
            place = start + own.start - piece.span.start
            parts.append(CodedPart(plan, raw, out.window(place, place + len(own)), piece.delta))
    return parts


@dataclass(frozen=True, eq=False)
class JoinedCode:
    """Coded bytes of one layer, one after the other, as if they were one. Nothing is decompressed."""

    data: bytes
    coded: Coded  # of all tokens
    frames: NDArray[np.int64]  # [groups, 2, 2]: of keys and values, where the frame starts and its bytes
    per_byte: NDArray[np.int64]  # [groups, 2]
    strays: NDArray[np.int64]  # [groups, 2]
    sides: NDArray[np.int64]  # [n, 3]: where the frame starts, its bytes, its numbers
    side_starts: NDArray[np.int64]  # [groups]: the first number of each group

    @classmethod
    def of(cls, data: Sequence[bytes], kind: Kind, spec: LayerSpec) -> JoinedCode:
        """Raises `ValueError` for bytes that are damaged, as far as that shows, or not alike."""
        if len(data) > 1 and spec.tokens % GROUP_TOKENS:
            raise ValueError(f"{spec.tokens} tokens are not whole groups, and others follow")
        layouts = [locate_parts(one, kind, spec) for one in data]
        frames, side_starts, sides = list[CodedFrame](), list[int](), list[tuple[int, int, int]]()
        start = first = 0  # of a layout: its bytes, its numbers of the side
        for one, places in zip(data, layouts, strict=True):
            for group in places.groups:
                frames += [half._replace(start=start + half.start, stop=start + half.stop) for half in group.halves]
                side_starts.append(first + group.side_start)
            sides.append((start + places.side_start, places.side_stop - places.side_start, places.side_numbers))
            start, first = start + len(one), first + places.side_numbers
        table = np.array(frames, np.int64).reshape(-1, 2, 4)  # [groups, 2]: start, stop, codes a byte, strays
        return cls(
            b"".join(data),
            replace(layouts[0].coded, tokens=len(data) * spec.tokens),
            np.stack([table[..., 0], table[..., 1] - table[..., 0]], axis=-1),
            table[..., 2],
            table[..., 3],
            np.array(sides, np.int64).reshape(-1, 3),
            np.array(side_starts, np.int64),
        )

    def parts(self, span: Span, start: int, at_a_time: int) -> Iterator[Span]:
        """Its own tokens of `span`, some groups at a time; the first of its tokens is number `start` there."""
        first, stop = max(span.start - start, 0), min(span.stop - start, self.coded.tokens)
        size = at_a_time * self.coded.group_tokens
        while first < stop:
            after = min(stop, (first // size + 1) * size)
            yield Span(first, after)
            first = after


def _staged(kv: LayerKv, span: Span, out: LayerTensors, memory: SlotMemory) -> LayerTensors:
    """Decoded KV in memory that a device reads quickly."""
    halves = []
    for half, like in zip((kv.keys, kv.values), out.halves, strict=True):
        staged = memory.take(like.numel() * like.element_size()).view(like.dtype).view(like.shape)
        own, place = half[:, span.start : span.stop], raw_view(staged)
        if (own.shape, own.dtype) != (place.shape, place.dtype):
            raise ValueError("decoded KV of another shape, type or number of tokens")
        np.copyto(place, own)
        halves.append(staged)
    return LayerTensors(*halves)


@dataclass(frozen=True, eq=False)
class DecodedPart:
    """KV on its way to `out`."""

    kv: LayerTensors
    out: LayerTensors

    def restore(self) -> None:
        for place, half in zip(self.out.halves, self.kv.halves, strict=True):
            place.copy_(half, non_blocking=True)


@dataclass(frozen=True, eq=False)
class CodedPart:
    """Decompressed KV on its way to `out`."""

    plan: DecodePlan
    raw: Tensor
    out: LayerTensors
    delta: bool  # from what is in `out`

    def restore(self) -> Tensor:
        """Write the numbers; whether the strays are right."""
        numbers, sound = _restore(self.plan, self.raw.to(self.out.keys.device, non_blocking=True))
        limits = torch.finfo(self.out.keys.dtype)
        for half, place in zip(numbers, self.out.halves, strict=True):
            if self.delta:
                half += place
            if limits.dtype != "float32":
                half.clamp_(limits.min, limits.max)
            place.copy_(half)
        return sound


@dataclass(frozen=True)
class FrameRun:
    """Frames beside each other that are unpacked alike."""

    per_byte: int
    half: int
    tokens: int
    frames: slice
    symbols: slice
    codes: slice


class Tables:
    """Small arrays that travel together."""

    def __init__(self, arrays: Mapping[str, NDArray[np.int64]]) -> None:
        self._shapes = {name: array.shape for name, array in arrays.items()}
        self.joined = np.concatenate([array.reshape(-1) for array in arrays.values()]).astype(np.int64)

    def on_device(self, raw: Tensor) -> dict[str, Tensor]:
        """The arrays, from the bytes that begin with them."""
        numbers = raw[: self.joined.nbytes].view(torch.int64)
        found, start = {}, 0
        for name, shape in self._shapes.items():
            stop = start + math.prod(shape)
            found[name], start = numbers[start:stop].view(shape), stop
        return found


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """Where everything is, decompressed: `tables | symbols, frames that are alike together | side numbers`.

    Side numbers are low bytes, then high bytes. Places are counted from where the symbols start.
    """

    coded: Coded
    groups: int
    kept: slice  # of the tokens of all groups
    frames: NDArray[np.int64]  # [n, 4]: where each starts, its bytes, where its content starts, the bytes of that
    sides: NDArray[np.int64]  # [n, 4]: where each starts, its bytes, where its low bytes go, its numbers
    runs: tuple[FrameRun, ...]
    tables: Tables
    size_bytes: int
    codes: int
    strays: int
    side_numbers: int

    @classmethod
    def of(cls, code: JoinedCode, span: Span) -> DecodePlan:
        """The plan of the groups that hold tokens of `span`."""
        coded, shape = code.coded, code.coded.shape
        groups = coded.groups_of(span)
        own = slice(groups.start, groups.stop)
        tokens = coded.tokens_of_groups[own]
        first = span.start - groups.start * coded.group_tokens

        strays = code.strays[own]  # [groups, 2]
        total = int(code.sides[:, 2].sum())
        keys_at = code.side_starts[own]
        values_at = keys_at + 2 * shape.kv_heads * shape.key_dim
        centres_at = values_at + shape.kv_heads * tokens
        strays_at = centres_at + shape.kv_heads * shape.value_dim + 1

        group, half = (axis.reshape(-1) for axis in np.indices(strays.shape))
        dense = code.per_byte[own].reshape(-1)
        order = np.lexsort((half, tokens[group], dense))
        group, half, dense = group[order], half[order], dense[order]
        sizes = -(-shape.kv_heads * tokens[group] * np.array([shape.key_dim, shape.value_dim])[half] // dense)
        symbol_stops, code_stops = np.cumsum(sizes), np.cumsum(sizes * dense)
        stray_counts = strays.reshape(-1)[order]
        stray_starts = np.stack([strays_at, strays_at + strays[:, 0]], axis=-1).reshape(-1)[order]
        stray_starts -= np.cumsum(stray_counts) - stray_counts
        tables = Tables(
            {
                "group": group,
                "tokens": tokens,
                "keys_at": keys_at,
                "values_at": values_at,
                "centres_at": centres_at,
                "stray_counts": stray_counts,
                "strays": np.stack([stray_starts, code_stops - sizes * dense, code_stops], axis=1),
            }
        )
        head, side_at = tables.joined.nbytes, tables.joined.nbytes + int(symbol_stops[-1])
        low_at = side_at + np.cumsum(code.sides[:, 2]) - code.sides[:, 2]
        return cls(
            coded=coded,
            groups=len(groups),
            kept=slice(first, first + len(span)),
            frames=np.column_stack([code.frames[own].reshape(-1, 2)[order], head + symbol_stops - sizes, sizes]),
            sides=np.column_stack([code.sides[:, :2], low_at, code.sides[:, 2]]),
            runs=_runs(np.column_stack([dense, half, tokens[group]]), symbol_stops, code_stops),
            tables=tables,
            size_bytes=side_at + 2 * total,
            codes=int(code_stops[-1]),
            strays=int(stray_counts.sum()),
            side_numbers=total,
        )


def _runs(kinds: NDArray[Any], symbol_stops: NDArray[Any], code_stops: NDArray[Any]) -> tuple[FrameRun, ...]:
    """The runs of frames of equal kinds: density, half, tokens."""
    changes = np.flatnonzero((kinds[1:] != kinds[:-1]).any(1)) + 1
    edges = [0, *changes.tolist(), len(kinds)]
    symbols, codes = np.concatenate([[0], symbol_stops]).tolist(), np.concatenate([[0], code_stops]).tolist()
    found = []
    for a, b in pairwise(edges):
        per_byte, half, tokens = kinds[a].tolist()
        found.append(
            FrameRun(per_byte, half, tokens, slice(a, b), slice(symbols[a], symbols[b]), slice(codes[a], codes[b]))
        )
    return tuple(found)


def _expand(data: bytes, plan: DecodePlan, target: NDArray[np.uint8]) -> None:
    """Write the tables and the content of all frames. Raises `ValueError` if a frame is damaged.

    All frames in one call, without Python's lock: called for each, eight threads were no faster than two.
    """
    target[: plan.tables.joined.nbytes] = plan.tables.joined.view(np.uint8)
    frames = np.concatenate([plan.frames, plan.sides])
    starts, sizes = frames[:, :2], np.concatenate([plan.frames[:, 3], 2 * plan.sides[:, 3]])
    if (sizes > starts[:, 1] * LARGEST_RATIO).any():
        raise ValueError("a frame is too short for what it should hold")
    _check_ends(np.frombuffer(data, np.uint8), starts[:, 0], starts.sum(1))
    try:
        segments = zstandard.BufferWithSegments(data, starts.astype("<u8").tobytes())
        contents = zstandard.ZstdDecompressor().multi_decompress_to_buffer(segments, sizes.astype("<u8").tobytes())
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error
    count = len(plan.frames)
    for index, (place, size) in enumerate(plan.frames[:, 2:].tolist()):
        target[place : place + size] = np.frombuffer(contents[index], np.uint8)  # type: ignore[call-overload]
    for index, (place, numbers) in enumerate(plan.sides[:, 2:].tolist(), start=count):
        planes = np.frombuffer(contents[index], np.uint8).reshape(2, numbers)  # type: ignore[call-overload]
        for plane, at in zip(planes, (place, place + plan.side_numbers), strict=True):
            target[at : at + numbers] = plane


def _check_ends(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
    """Raises `ValueError` unless each frame ends where it should. Frames of ours say their size, and have neither
    checksum nor dictionary."""
    flags = data[starts + 4]
    single = (flags >> 5) & 1
    if (flags & 7).any() or (flags < 32).any():
        raise ValueError("a frame is damaged: its header is not one of ours")
    at = starts + 6 - single + np.array([0, 2, 4, 8])[flags >> 6] + (single & (flags < 64))  # where blocks begin
    is_open = np.ones(len(starts), dtype=bool)
    while is_open.any() and (at + 3 <= stops)[is_open].all():
        here = at[is_open]
        # Of a block: whether it is the last, 2 bits of type, its size. One byte repeated has the size of its content.
        block = data[here] + (data[here + 1].astype(np.int64) << 8) + (data[here + 2].astype(np.int64) << 16)
        at[is_open] = here + 3 + np.where(block & 6 == 2, 1, block >> 3)
        is_open[is_open] = block & 1 == 0
    if is_open.any() or (at != stops).any():
        raise ValueError("a frame does not end where it should")


@dataclass(frozen=True, eq=False)
class _Constants:
    """What is looked up on a device."""

    codes: dict[int, Tensor]  # by density: byte -> codes, [256, per_byte]
    steps: Tensor  # by exponent

    def steps_of(self, exponents: Tensor) -> Tensor:
        low, high = int(_EXPONENTS[0]), int(_EXPONENTS[-1])
        return self.steps[exponents.int().clamp_(low, high).sub_(low)]


@functools.cache
def _constants(device: torch.device) -> _Constants:
    # The largest code of an alphabet stands for a stray.
    codes = {each: np.where(table == table.max(), np.int16(_STRAY), table) for each, table in TABLES.items()}
    on_device = {each: torch.from_numpy(table).to(device) for each, table in codes.items()}
    return _Constants(on_device, torch.from_numpy(steps_of(_EXPONENTS)).to(device))


def _restore(plan: DecodePlan, raw: Tensor) -> tuple[list[Tensor], Tensor]:
    """Keys and values as float32 `[kv_heads, tokens, dim]`, and whether strays are where they should be."""
    shape, constants = plan.coded.shape, _constants(raw.device)
    tables, body = plan.tables.on_device(raw), raw[plan.tables.joined.nbytes :]
    count = functools.partial(torch.arange, device=raw.device)

    planes = body[-2 * plan.side_numbers :].view(2, plan.side_numbers)
    side = planes.t().contiguous().view(torch.int16)[:, 0]
    codes, sound = _codes(plan, body, tables, side)

    heads, widest = shape.kv_heads, codes[0].shape[2]
    ahead = side[tables["keys_at"][:, None] + count(2 * heads * shape.key_dim)]  # [groups, 2 * heads * dim]
    exponents, centres = ahead.view(plan.groups, 2, heads, 1, shape.key_dim).transpose(0, 2).unbind(1)
    keys = codes[0] + centres.float()  # [heads, groups, tokens, dim]
    keys *= constants.steps_of(exponents)

    rows = count(heads)[:, None] * tables["tokens"][:, None, None] + count(widest)  # [groups, heads, tokens]
    at = (tables["values_at"][:, None, None] + rows).clamp_(max=plan.side_numbers - 1)  # a short group has fewer
    exponents = side[at].transpose(0, 1)[..., None]  # [heads, groups, tokens, 1]
    ahead = side[tables["centres_at"][:, None] + count(heads * shape.value_dim + 1)]
    centres = ahead[:, :-1].float() * constants.steps_of(ahead[:, -1:])
    values = codes[1] * constants.steps_of(exponents >> 1)
    centres = centres.view(plan.groups, heads, 1, shape.value_dim).transpose(0, 1)  # [heads, groups, 1, dim]
    values.addcmul_(centres, 1.0 - (exponents & 1))
    return [half.flatten(1, 2)[:, plan.kept] for half in (keys, values)], sound


def _codes(
    plan: DecodePlan, body: Tensor, tables: Mapping[str, Tensor], side: Tensor
) -> tuple[Sequence[Tensor], Tensor]:
    """The codes of keys and values `[kv_heads, groups, tokens, dim]`, strays among them."""
    shape, constants = plan.coded.shape, _constants(body.device)
    flat = torch.empty(plan.codes, dtype=torch.int16, device=body.device)
    symbols = body[: plan.runs[-1].symbols.stop].int()
    for run in plan.runs:
        target = flat[run.codes].view(-1, run.per_byte)
        torch.index_select(constants.codes[run.per_byte], 0, symbols[run.symbols], out=target)

    # Those that are strays, one more than there should be: nobody has to wait for how many there are.
    strays = torch.nonzero_static(flat == _STRAY, size=plan.strays + 1, fill_value=-1)[:, 0]
    surplus, found = strays[-1], strays[:-1]
    stray_table = torch.repeat_interleave(tables["strays"], tables["stray_counts"], 0, output_size=plan.strays)
    number, start, stop = stray_table.unbind(1)  # of the side, less the strays before; of the codes of the frame
    sound = ((found >= start) & (found < stop)).all() & (surplus < 0)
    flat[found.clamp(min=0)] = side[number + torch.arange(plan.strays, device=body.device)]

    heads, widest = shape.kv_heads, max(run.tokens for run in plan.runs)
    halves = [
        torch.empty(heads, plan.groups, widest, dim, dtype=torch.int16, device=body.device)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    for run in plan.runs:
        half = halves[run.half]
        frames, size = run.frames.stop - run.frames.start, (heads, run.tokens, half.shape[3])
        own = flat[run.codes].view(frames, -1)[:, : math.prod(size)].reshape(frames, *size)
        half.transpose(0, 1)[..., : run.tokens, :][tables["group"][run.frames]] = own
    return halves, sound
