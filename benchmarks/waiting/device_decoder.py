"""Coded KV onto a device: decompressed by all cores of the host, restored by the device, many layers at a time.

    host     [decompress a][decompress b] ...       into memory that the device reads
    copies   [anchor a][anchor b] ...               meanwhile, on a stream of their own
    device                 [copy a][restore a] ...

The host does only what a device cannot. The rest is a few dozen operations over a batch of layers, however many groups
it has.

The numbers are those of `codec/coder.decode`, bit by bit: the same sums and products of float32 in the same order,
each rounded by itself, steps from the same table, and the nearest number of the engine's type at the end.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from rekindle.codec import quantized
from rekindle.codec.coder import SAME_LAYER
from rekindle.codec.packing import LARGEST_RATIO, TABLES
from rekindle.codec.quantized import Coded, CodedLayout, Kind, describe, locate_parts
from rekindle.codec.quantizer import steps_of
from rekindle.core.kv import LayerKv, LayerSpec, Span
from rekindle.engine.hf.sequence import TORCH_TYPE


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


@dataclass(frozen=True)
class FrameRun:
    """Frames beside each other that are unpacked alike."""

    per_byte: int
    half: int
    tokens: int
    frames: slice
    symbols: slice
    codes: slice


@dataclass(frozen=True, eq=False)
class Pile:
    """What a batch is, decompressed: `tables | symbols, frames that are alike together | side numbers, layer by layer`.

    Side numbers are low bytes, then high bytes, of each layer. Places are counted from where the symbols start.
    """

    coded: Coded
    counts: tuple[int, int]  # layers, groups
    kept: slice  # of the tokens of all groups
    frames: NDArray[np.int64]  # see `expand_into`
    runs: tuple[FrameRun, ...]
    tables: Tables
    size_bytes: int
    codes: int
    strays: int
    side_numbers: int


def pile_of(places: CodedLayout, span: Span | None) -> Pile:
    """The pile of the groups that hold tokens of `span`, all by default."""
    coded, shape = places.coded, places.coded.shape
    groups = coded.groups_of(span)
    own = slice(groups.start, groups.stop)
    tokens = np.array([len(coded.group(number)) for number in groups])
    first = 0 if span is None else span.start - groups.start * coded.group_tokens
    kept = slice(first, first + (coded.tokens if span is None else len(span)))

    layers, strays = len(places.sides), places.strays[:, own]
    totals = places.side_starts[:, -1]
    before = np.cumsum(totals) - totals  # side numbers of the layers before
    keys_at = places.side_starts[:, :-1][:, own] + before[:, None]  # [layers, groups]
    values_at = keys_at + 2 * shape.kv_heads * shape.key_dim
    centres_at = values_at + shape.kv_heads * tokens
    strays_at = centres_at + shape.kv_heads * shape.value_dim + 1

    layer, group, half = (axis.reshape(-1) for axis in np.indices(strays.shape))
    dense = places.per_byte[:, own].reshape(-1)
    order = np.lexsort((layer, half, tokens[group], dense))
    layer, group, half, dense = layer[order], group[order], half[order], dense[order]
    sizes = -(-shape.kv_heads * tokens[group] * np.array([shape.key_dim, shape.value_dim])[half] // dense)
    symbol_stops, code_stops = np.cumsum(sizes), np.cumsum(sizes * dense)
    stray_counts = strays.reshape(-1)[order]
    stray_starts = np.stack([strays_at, strays_at + strays[..., 0]], axis=-1).reshape(-1)[order]
    stray_starts -= np.cumsum(stray_counts) - stray_counts
    planes = int(symbol_stops[-1]) + 2 * before
    tables = Tables(
        {
            "layer": layer,
            "group": group,
            "tokens": tokens,
            "keys_at": keys_at,
            "values_at": values_at,
            "centres_at": centres_at,
            "side_counts": totals,
            "planes": np.stack([planes - before, planes - before + totals], axis=1),
            "stray_counts": stray_counts,
            "strays": np.stack([stray_starts, code_stops - sizes * dense, code_stops], axis=1),
        }
    )
    head = tables.joined.nbytes
    symbols = np.column_stack([layer, places.frames[:, own].reshape(-1, 2)[order], head + symbol_stops - sizes, sizes])
    aside = np.column_stack([np.arange(layers), places.sides, head + planes, 2 * totals])
    return Pile(
        coded=coded,
        counts=(layers, len(groups)),
        kept=kept,
        frames=np.concatenate([symbols, aside]),
        runs=_runs(np.column_stack([dense, half, tokens[group]]), symbol_stops, code_stops),
        tables=tables,
        size_bytes=head + int(symbol_stops[-1]) + 2 * int(totals.sum()),
        codes=int(code_stops[-1]),
        strays=int(stray_counts.sum()),
        side_numbers=int(totals.sum()),
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


def check_frame(frame: memoryview, size: int) -> None:
    """Raises `ValueError` unless a frame says that it holds `size` bytes, can, and ends where it should: before
    memory is taken for it."""
    try:
        reported, header = zstandard.frame_content_size(frame), zstandard.frame_header_size(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error
    if reported != size or size > len(frame) * LARGEST_RATIO:
        raise ValueError(f"a frame holds {reported} bytes instead of {size}")
    if _end_of(frame, header) != len(frame):
        raise ValueError("a frame does not end where it should")


def _end_of(frame: memoryview, at: int) -> int | None:
    """Where a frame ends whose blocks begin at `at`; None if that is nowhere. A frame of ours has no checksum."""
    if frame[4] & 4:
        return None
    while at + 3 <= len(frame):
        block = int.from_bytes(frame[at : at + 3], "little")  # whether it is the last, 2 bits of type, the size
        at += 3 + (1 if block & 6 == 2 else block >> 3)  # one byte repeated: the size is that of the content
        if block & 1:
            return at
    return None


def expand_into(sources: Sequence[bytes], frames: NDArray[np.int64], target: memoryview, threads: int) -> None:
    """Decompress many frames, several at a time, each to its place in `target`.

    frames   [n, 5]: the source of each, where it starts there, its bytes, where its content starts in `target`, and
             the bytes of that

    Raises `ValueError` if one is damaged or holds another number of bytes; all that was begun is then over.
    """
    views, rows = [memoryview(source) for source in sources], iter(frames.tolist())
    workers = min(threads, len(frames))
    if workers <= 1:
        _expand_rows(views, rows, target)
        return
    # All take from one list, so that none is left with more than the others. The C code lets go of Python's lock.
    works = [_pool(threads).submit(_expand_rows, views, rows, target) for _ in range(workers)]
    errors = [error for work in works if (error := work.exception()) is not None]
    if errors:
        raise errors[0]


def _expand_rows(views: Sequence[memoryview], rows: Iterator[list[int]], target: memoryview) -> None:
    """Decompress until there is none left. Straight into the target: copied there, it would take Python's lock."""
    decompressor = zstandard.ZstdDecompressor()
    try:
        for source, start, length, place, size in rows:
            frame = views[source][start : start + length]
            check_frame(frame, size)
            if decompressor.stream_reader(frame).readinto(target[place : place + size]) != size:
                raise ValueError("a frame ends early")
    except zstandard.ZstdError as error:
        raise ValueError(f"a frame is damaged: {error}") from error


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="rekindle-expand")


if hasattr(os, "register_at_fork"):  # a child has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


_BATCH_NUMBERS = 1 << 25  # restored at a time: each takes some 20 bytes on the device until it is done
_MAX_THREADS = 16
_STRAY = -(2**15)  # a code that none has
_EXPONENTS = np.arange(-252, 221, dtype=np.int16)  # all that steps have


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """Keys and values of some tokens in one layer, as tensors."""

    keys: Tensor  # [kv_heads, tokens, key_dim]
    values: Tensor  # [kv_heads, tokens, value_dim]


AnchorKv = LayerTensors | LayerKv


def can_unpack(layers: Sequence[bytes]) -> bool:
    """Whether all layers are coded in a way that is known here: quantized, or the anchor's own."""
    return all(data[:4] == quantized.MAGIC or data == SAME_LAYER for data in layers)


def default_threads() -> int:
    """How many cores decompress, where nobody says."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


def unpack(
    layers: Sequence[bytes],
    out: Sequence[LayerTensors],
    anchor: Sequence[AnchorKv] | None = None,
    span: Span | None = None,
    threads: int | None = None,
) -> None:
    """Write the KV of the tokens `span`, all by default, of every coded layer into `out`: views of an engine's buffers.

    `anchor` is what they are differences from, cut to `span`: on the device, or in memory of the host, which a CUDA
    device reads meanwhile if it is pinned. Everything is there when this returns. Raises `ValueError` for damaged
    bytes, for an anchor that is missing or cannot be theirs, and if `out` is of another shape or type; what is in
    `out` is then undefined.
    """
    if len(layers) != len(out) or (anchor is not None and len(anchor) != len(out)):
        raise ValueError(f"{len(layers)} coded layers do not fit into {len(out)}")
    if not out:
        return
    copies = Copies(out[0].keys.device)
    try:
        with torch.inference_mode():
            sound = []
            for batch in cut_batches(layers, out, anchor, span):
                below = batch.bring_anchor(copies)
                raw = batch.decompress(threads or default_threads()).to(copies.device, non_blocking=True)
                copies.join(below)
                sound.append(batch.restore(raw, below))
            if not bool(torch.stack(sound).all()):
                raise ValueError("codes are damaged: their strays do not match")
    finally:
        copies.finish()


def cut_batches(
    layers: Sequence[bytes],
    out: Sequence[LayerTensors],
    anchor: Sequence[AnchorKv] | None = None,
    span: Span | None = None,
) -> Iterator[Batch]:
    """The layers in their order, those together that are coded alike, but not too many. Raises as `unpack` does."""
    found: list[_CodedLayer] = []
    for index, data in enumerate(layers):
        below = None if anchor is None else anchor[index]
        layer = _CodedLayer(data, _describe(data, below), out[index], below)
        layer.check(span)
        max_count = _BATCH_NUMBERS // max(1, layer.out.keys.numel() + layer.out.values.numel())
        if found and (layer.kind != found[0].kind or len(found) >= max_count):
            yield Batch(found, span)
            found = []
        found.append(layer)
    if found:
        yield Batch(found, span)


def _describe(data: bytes, anchor: AnchorKv | None) -> Coded | None:
    """What is coded; None for the anchor's own layer."""
    if data[:4] == quantized.MAGIC:
        return describe(data)
    if anchor is None:
        raise ValueError("a difference needs its anchor")
    if data != SAME_LAYER:
        raise ValueError("this KV is coded in a way that no device unpacks, or is damaged")
    return None


@dataclass(frozen=True, eq=False)
class _CodedLayer:
    """A coded layer, where it goes, and what it is a difference from."""

    data: bytes
    coded: Coded | None
    out: LayerTensors
    anchor: AnchorKv | None

    @property
    def kind(self) -> object:
        """What is equal for layers that go together."""
        return self.coded, self.out.keys.shape, self.out.values.shape, self.out.keys.dtype

    def check(self, span: Span | None) -> None:
        """Raises `ValueError` unless all of it fits together: before memory is taken for what a header says."""
        keys, values = self.out.keys, self.out.values
        if self.anchor is not None:
            for ours, theirs in ((keys, self.anchor.keys), (values, self.anchor.values)):
                if tuple(theirs.shape) != tuple(ours.shape) or _tensor(theirs, ours.dtype) is None:
                    raise ValueError("the anchor has another shape, type or number of tokens than the difference")
        if self.coded is None:
            return
        coded, tokens = self.coded, self.coded.tokens if span is None else len(span)
        heads = coded.shape.kv_heads
        wanted = (heads, tokens, coded.shape.key_dim), (heads, tokens, coded.shape.value_dim)
        if (tuple(keys.shape), tuple(values.shape)) != wanted or keys.dtype != TORCH_TYPE[coded.dtype]:
            raise ValueError(
                f"{tokens} tokens of {coded.dtype} KV are coded, {coded.shape}: there is no place for them"
            )


class Copies:
    """Brings KV to a device; from the host on a stream of its own, so that the device computes meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def bring(self, halves: Sequence[Tensor | NDArray[Any]], dtype: torch.dtype) -> Tensor:
        """Keys or values of some layers as one, `[layers, kv_heads, tokens, dim]`: to be used after `join`."""
        tensors = [tensor for half in halves if (tensor := _tensor(half, dtype)) is not None]
        if all(tensor.device == self.device for tensor in tensors):
            return torch.stack(tensors)
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            brought = torch.empty((len(tensors), *tensors[0].shape), dtype=dtype, device=self.device)
            for place, tensor in zip(brought, tensors, strict=True):
                # What is not in one piece would be copied on the host before, by one core.
                parts = [(place, tensor)] if tensor.is_contiguous() else zip(place, tensor, strict=True)
                for target, part in parts:
                    target.copy_(part, non_blocking=True)
        return brought

    def join(self, brought: Sequence[Tensor]) -> None:
        """From now on the current stream may use what was brought."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._stream)
            for tensor in brought:
                tensor.record_stream(current)

    def finish(self) -> None:
        """Wait until nothing is read from the host any more."""
        if self._stream is not None:
            self._stream.synchronize()


class Batch:
    """Layers that are coded alike: `decompress`, then `restore`."""

    def __init__(self, layers: Sequence[_CodedLayer], span: Span | None) -> None:
        self._layers = layers
        self._pile = None
        if layers[0].coded is not None:
            kind: Kind = "whole" if layers[0].anchor is None else "difference"
            coded = layers[0].coded
            spec = LayerSpec(coded.dtype, coded.shape, coded.tokens)  # checked against `out`
            places = locate_parts([layer.data for layer in layers], kind, spec, span)
            for layer, (start, size), numbers in zip(layers, places.sides, places.side_starts[:, -1], strict=True):
                check_frame(memoryview(layer.data)[start : start + size], 2 * int(numbers))
            self._pile = pile_of(places, span) if layers[0].out.keys.numel() else None

    def decompress(self, threads: int) -> Tensor:
        """All bytes, in memory that a CUDA device reads, if it is for one. Raises `ValueError` if they are damaged."""
        pile = self._pile
        if pile is None:
            return torch.empty(0, dtype=torch.uint8)
        pinned = self._layers[0].out.keys.device.type == "cuda"
        raw = torch.empty(pile.size_bytes, dtype=torch.uint8, pin_memory=pinned)
        bytes_ = raw.numpy()
        bytes_[: pile.tables.joined.nbytes] = pile.tables.joined.view(np.uint8)
        expand_into([layer.data for layer in self._layers], pile.frames, bytes_.data, threads)
        return raw

    def bring_anchor(self, copies: Copies) -> tuple[Tensor, ...]:
        """Keys and values of the anchor, `[layers, kv_heads, tokens, dim]`; nothing for whole KV."""
        anchors = [layer.anchor for layer in self._layers if layer.anchor is not None]
        dtype = self._layers[0].out.keys.dtype
        halves = [anchor.keys for anchor in anchors], [anchor.values for anchor in anchors]
        return tuple(copies.bring(half, dtype) for half in halves) if anchors else ()

    def restore(self, raw: Tensor, anchor: Sequence[Tensor]) -> Tensor:
        """Write the layers, from what `decompress` gave and is on the device now; whether its strays are right."""
        if self._pile is None:
            self._write(anchor)
            return torch.ones((), dtype=torch.bool, device=raw.device)
        numbers, sound = _restore(self._pile, raw)
        for half, theirs in zip(numbers, anchor, strict=False):
            half += theirs
        limits = torch.finfo(self._layers[0].out.keys.dtype)
        if limits.dtype != "float32":
            for half in numbers:
                half.clamp_(limits.min, limits.max)
        self._write(numbers)
        return sound

    def _write(self, halves: Sequence[Tensor]) -> None:
        """Put numbers `[layers, kv_heads, tokens, dim]` where they belong, as the nearest of the type there."""
        for layer, *numbers in zip(self._layers, *halves, strict=False):
            for place, half in zip((layer.out.keys, layer.out.values), numbers, strict=False):
                place.copy_(half)


def _tensor(half: Tensor | NDArray[Any], dtype: torch.dtype) -> Tensor | None:
    """The same as a tensor; None if it does not hold numbers of that type. Brain floats are carried as raw bits."""
    if not isinstance(half, Tensor):
        half = torch.from_numpy(half)
        half = half.view(dtype) if half.dtype == torch.uint16 and dtype == torch.bfloat16 else half
    return half if half.dtype == dtype else None


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


def _restore(pile: Pile, raw: Tensor) -> tuple[list[Tensor], Tensor]:
    """Keys and values as float32 `[layers, kv_heads, tokens, dim]`, and whether strays are where they should be."""
    shape, constants = pile.coded.shape, _constants(raw.device)
    tables, body = pile.tables.on_device(raw), raw[pile.tables.joined.nbytes :]
    count = functools.partial(torch.arange, device=raw.device)

    places = torch.repeat_interleave(tables["planes"], tables["side_counts"], 0, output_size=pile.side_numbers)
    side = body[places + count(pile.side_numbers)[:, None]].view(torch.int16)[:, 0]
    codes, sound = _codes(pile, body, tables, side)

    heads, widest = shape.kv_heads, codes[0].shape[3]
    ahead = side[tables["keys_at"][..., None] + count(2 * heads * shape.key_dim)]  # [layers, groups, 2 * heads * dim]
    exponents, centres = ahead.view(*pile.counts, 2, heads, 1, shape.key_dim).transpose(1, 3).unbind(2)
    keys = codes[0] + centres.float()
    keys *= constants.steps_of(exponents)

    rows = count(heads)[:, None] * tables["tokens"][:, None, None] + count(widest)  # [groups, heads, tokens]
    at = (tables["values_at"][..., None, None] + rows).clamp_(max=pile.side_numbers - 1)  # a short group has fewer
    exponents = side[at].transpose(1, 2)[..., None]  # [layers, heads, groups, tokens, 1]
    ahead = side[tables["centres_at"][..., None] + count(heads * shape.value_dim + 1)]
    centres = ahead[..., :-1].float() * constants.steps_of(ahead[..., -1:])
    values = codes[1] * constants.steps_of(exponents >> 1)
    centres = centres.view(*pile.counts, heads, 1, shape.value_dim).transpose(1, 2)  # [layers, heads, groups, 1, dim]
    values.addcmul_(centres, 1.0 - (exponents & 1))
    return [half.flatten(2, 3)[:, :, pile.kept] for half in (keys, values)], sound


def _codes(
    pile: Pile, body: Tensor, tables: Mapping[str, Tensor], side: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The codes of keys and values `[layers, kv_heads, groups, tokens, dim]`, strays among them."""
    shape, constants = pile.coded.shape, _constants(body.device)
    flat = torch.empty(pile.codes, dtype=torch.int16, device=body.device)
    symbols = body[: pile.runs[-1].symbols.stop].int()
    for run in pile.runs:
        target = flat[run.codes].view(-1, run.per_byte)
        torch.index_select(constants.codes[run.per_byte], 0, symbols[run.symbols], out=target)

    # Those that are strays, one more than there should be: nobody has to wait for how many there are.
    strays = torch.nonzero_static(flat == _STRAY, size=pile.strays + 1, fill_value=-1)[:, 0]
    surplus, found = strays[-1], strays[:-1]
    stray_table = torch.repeat_interleave(tables["strays"], tables["stray_counts"], 0, output_size=pile.strays)
    number, start, stop = stray_table.unbind(1)  # of the side, less the strays before; of the codes of the frame
    sound = ((found >= start) & (found < stop)).all() & (surplus < 0)
    flat[found.clamp(min=0)] = side[number + torch.arange(pile.strays, device=body.device)]

    (layers, groups), heads = pile.counts, shape.kv_heads
    widest = max(run.tokens for run in pile.runs)
    halves = [
        torch.empty(layers, heads, groups, widest, dim, dtype=torch.int16, device=body.device)
        for dim in (shape.key_dim, shape.value_dim)
    ]
    for run in pile.runs:
        half = halves[run.half]
        frames, size = run.frames.stop - run.frames.start, (heads, run.tokens, half.shape[4])
        own = flat[run.codes].view(frames, -1)[:, : math.prod(size)].reshape(frames, *size)
        half.transpose(1, 2)[..., : run.tokens, :][tables["layer"][run.frames], tables["group"][run.frames]] = own
    return (halves[0], halves[1]), sound
