"""Loading KV layer by layer: a thread fills the next layers of the sequences while earlier ones are computed.

    thread   [fill 0][fill 1][fill 2][fill 3] ...       disk, memory or network
    step             [layer 0][layer 1][layer 2] ...    waits only where the next layer is not there yet

Keys that were computed at other positions are rotated by the thread, on the model's own device.

A CUDA device fetches KV in pinned memory by itself, without a thread: the step requests it some layers ahead, from a
table of addresses made once for all layers, because Python delays every other launch while a step runs.

Cancelling ends the step's wait at once, however long a read hangs. The thread may still be writing then, so the
sequences leave their buffers to it and take others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rekindle.core.kv import Held, LayerKv
from rekindle.engine.base import HeldFeed, KvFeed, MovedFeed
from rekindle.engine.hf import kernels
from rekindle.engine.hf.device import PinnedMemory, pinned_memory
from rekindle.engine.hf.rope import RopeShift, RopeShifter
from rekindle.engine.hf.sequence import Buffers, LayerStaging, TorchSequence
from rekindle.errors import Cancelled, KvLost


@dataclass(frozen=True, eq=False)
class DeviceFetch:
    """What a device fetches for one sequence in one step. Keeps the buffers alive if the sequence moves to others."""

    buffers: Buffers
    held: Sequence[Held]
    pieces: Tensor  # [layers, pieces, 4]: see `kernels.fetch`
    blocks: Tensor  # [blocks, 2], the same in all layers

    @classmethod
    def of(cls, sequence: TorchSequence, feeds: Sequence[KvFeed], layers: int) -> DeviceFetch | None:
        """A fetch equivalent to the feeds; None if some KV is not in pinned memory, or spans overlap."""
        memory, buffers = pinned_memory(), sequence.buffers
        device = buffers.keys[0].device
        if memory is None or not kernels.are_available(device) or any(feed.layers != range(layers) for feed in feeds):
            return None
        spans = sorted((feed.span for feed in feeds), key=lambda span: span.start)
        if any(first.stop > second.start for first, second in pairwise(spans)):
            return None
        found: list[tuple[int, Held]] = []  # position and piece
        for feed in feeds:
            pieces = feed.held() if isinstance(feed, HeldFeed) else None
            if pieces is None:
                return None
            place = feed.span.start
            for piece in pieces:
                found.append((place, piece))
                place += len(piece.span)
        alike = len({(half.shape, half.dtype) for half in (*buffers.keys, *buffers.values)}) == 1
        token_bytes = buffers.keys[0].stride(2) * buffers.keys[0].element_size()
        if not found or not alike or token_bytes % kernels.WORD_BYTES:
            return None
        sources = _Sources(memory)
        if not all(sources.readable(piece.layers[0]) for _, piece in found):
            return None
        table = np.empty((layers, 2, len(found), 4), dtype=np.int64)
        for index, (place, piece) in enumerate(found):
            table[:, :, index, 0] = sources.addresses(piece.layers) + piece.span.start * token_bytes
            table[:, :, index, 1] = piece.layers[0].keys.strides[0]
            table[:, :, index, 2] = place * token_bytes
            table[:, :, index, 3] = len(piece.span) * token_bytes // kernels.WORD_BYTES
        targets = [[key.data_ptr(), value.data_ptr()] for key, value in zip(buffers.keys, buffers.values, strict=True)]
        table[..., 2] += np.array(targets)[:, :, None]
        blocks = kernels.fetch_blocks(table[0, :, :, 3].reshape(-1))
        moved = (torch.from_numpy(numbers).to(device) for numbers in (table.reshape(layers, -1, 4), blocks))
        return cls(buffers, [piece for _, piece in found], *moved)

    def fetch(self, layer: int) -> Tensor:
        """Start to fetch a layer on the current stream; returns its keys `[kv_heads, capacity, key_dim]`."""
        keys = self.buffers.keys[layer][0]
        kernels.fetch(self.pieces[layer], self.blocks, keys.shape[0], keys.stride(0) * keys.element_size())
        return keys


class _Sources:
    """Addresses of KV in pinned memory; several pieces may come from one extent."""

    def __init__(self, memory: PinnedMemory) -> None:
        self._memory = memory
        self._known: dict[int, NDArray[np.int64]] = {}

    def readable(self, kv: LayerKv) -> bool:
        """Whether the device can read it, with equal strides of keys and values."""
        return self._memory.holds(kv.keys) and self._memory.holds(kv.values) and kv.keys.strides == kv.values.strides

    def addresses(self, layers: Sequence[LayerKv]) -> NDArray[np.int64]:
        """Addresses of keys and values in each layer, `[layers, 2]`."""
        known = self._known.get(id(layers))
        if known is None:
            known = np.array([[_address(kv.keys), _address(kv.values)] for kv in layers])
            self._known[id(layers)] = known
        return known


def _address(array: NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


_LOOK_SECONDS = 0.005  # interval at which a wait checks for cancellation
_LAYERS_AHEAD = 8  # how many layers ahead a device fetches


class LayerLoader:
    """The feeds of one step. `start`, then `wait(layer)` before each layer, then `stop`, whatever happened."""

    def __init__(
        self,
        feeds: Sequence[tuple[TorchSequence, KvFeed]],
        layers: int,
        device: torch.device,
        turner: RopeShifter | None = None,
        *,
        between: bool = False,
    ) -> None:
        """`turner` rotates keys of feeds that move: without it, none may have a shift. `between`: KV that stays may lie
        between feeds."""
        self._between = between
        self._feeds: dict[TorchSequence, list[KvFeed]] = {}
        for sequence, feed in feeds:
            self._feeds.setdefault(sequence, []).append(feed)
        self._layers = layers
        self._device = device
        self._turner = turner
        self._turns: dict[tuple[TorchSequence, int], RopeShift] = {}  # by layer
        self._fetches: dict[TorchSequence, DeviceFetch] = {}  # what the device reads by itself
        self._changed = threading.Condition()
        self._filled = 0  # number of filled layers
        self._error: BaseException | None = None
        self._stopped = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._arrivals: list[torch.cuda.Event] = []
        self._thread: threading.Thread | None = threading.Thread(
            target=self._fill_all, name="rekindle-fill", daemon=True
        )

    def start(self) -> None:
        """Start filling."""
        self._prepare_turns()  # not in the thread: computing angles may change the rope, which the step uses too
        if self._stream is not None:
            fetches = {
                sequence: DeviceFetch.of(sequence, feeds, self._layers) for sequence, feeds in self._feeds.items()
            }
            self._fetches = {sequence: fetch for sequence, fetch in fetches.items() if fetch is not None}
            # Whatever reads the buffers now must finish before they are written.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            if len(self._fetches) == len(self._feeds):  # no thread needed, and one would delay the launches
                self._thread = None
                return
        try:
            assert self._thread is not None
            self._thread.start()
        except RuntimeError:  # no thread left: each layer is filled when it is needed
            self._thread = None

    def wait(self, layer: int, cancelled: Callable[[], bool] | None) -> None:
        """Block until `layer` is filled. Raises what its feed raised, or `Cancelled`."""
        if self._thread is None:
            self._fill_until(layer + 1)
        with self._changed:
            while self._filled <= layer and self._error is None:
                self._changed.wait(None if cancelled is None else _LOOK_SECONDS)
                if cancelled is not None and self._filled <= layer and cancelled():
                    raise Cancelled("The request was cancelled.")
            if self._filled <= layer and self._error is not None:
                raise self._error
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._arrivals[layer])

    def stop(self) -> None:
        """Fill no further layer. A fill in progress keeps the buffers it writes to; the sequences get others."""
        with self._changed:
            self._stopped = True
        under_way = False
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout=_LOOK_SECONDS)
            under_way = self._thread.is_alive() and self._filled < self._layers and self._error is None
        if under_way:
            for sequence in self._feeds:
                sequence.leave_buffers()
        elif self._stream is not None:
            if self._filled < self._layers:  # given up: keep source and target alive until the copies end
                self._stream.synchronize()
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _prepare_turns(self) -> None:
        for sequence, feeds in self._feeds.items():
            if not any(_shift(feed) for feed in feeds):
                continue
            assert self._turner is not None, "rows whose feeds move are refused without a turner"
            known: dict[tuple[int, ...], RopeShift] = {}  # most layers have the same feeds
            for layer in range(self._layers):
                own = tuple(index for index, feed in enumerate(feeds) if layer in feed.layers)
                if own not in known:
                    moves = [(feeds[index].span, _shift(feeds[index])) for index in own]
                    with torch.inference_mode():
                        known[own] = self._turner.turn(moves, sequence.regime, self._device)
                self._turns[sequence, layer] = known[own]

    def _fill_all(self) -> None:
        try:
            for layer in range(self._layers):
                if self._stopped:
                    return
                self._fill(layer)
                with self._changed:
                    self._filled = layer + 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  (raised again in `wait`)
            with self._changed:
                self._error = _as_lost(error)
                self._changed.notify_all()
        finally:
            if self._stopped and self._stream is not None:  # keep source and target alive until the copies end
                self._stream.synchronize()

    def _fill_until(self, stop: int) -> None:
        """Fill synchronously, without a thread; a device fetches some layers ahead while the step computes."""
        ahead = _LAYERS_AHEAD if self._fetches else 0
        while self._filled < min(stop + ahead, self._layers):
            try:
                self._fill(self._filled)
            except RuntimeError as error:
                raise _as_lost(error) from error
            self._filled += 1

    def _fill(self, layer: int) -> None:
        side = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with torch.inference_mode(), side:
            for sequence, feeds in self._feeds.items():
                if (fetch := self._fetches.get(sequence)) is not None:
                    keys = fetch.fetch(layer)
                    feeds = []
                for group in self._groups(sequence, [feed for feed in feeds if layer in feed.layers]):
                    staging = self._staging(sequence, layer, group)
                    if staging is None:
                        return
                    for feed, out in zip(group, staging.outs, strict=True):
                        feed.fill(layer, out)
                    staging.commit()
                    keys = staging.layer_keys
                if (turn := self._turns.get((sequence, layer))) is not None and turn.parts:
                    turn.apply(layer, keys)
            if self._stream is not None:
                arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrival.record(self._stream)
                self._arrivals.append(arrival)

    def _groups(self, sequence: TorchSequence, feeds: Sequence[KvFeed]) -> list[list[KvFeed]]:
        """Groups of feeds that are copied together: on a GPU as many as possible, because each copy has overhead.

        Measured for 16 passages of 512 tokens in an 8B shape on an H200.
        """
        apart = all(first.span.stop <= second.span.start for first, second in pairwise(feeds))
        together = self._stream is not None and apart and bool(feeds) and feeds[0].span.start >= sequence.length
        groups: list[list[KvFeed]] = []
        for feed in feeds:
            follows = bool(groups) and groups[-1][-1].span.stop == feed.span.start
            if together and groups and (follows or not self._between):  # the gap between them is overwritten
                groups[-1].append(feed)
            else:
                groups.append([feed])
        return groups

    def _staging(self, sequence: TorchSequence, layer: int, feeds: Sequence[KvFeed]) -> LayerStaging | None:
        with self._changed:  # once stopped, the sequence may have other buffers
            return None if self._stopped else LayerStaging(sequence, layer, [feed.span for feed in feeds])


def _as_lost(error: BaseException) -> BaseException:
    """A device error while loading KV becomes `KvLost`, so that the KV is computed instead."""
    if not isinstance(error, RuntimeError):
        return error
    lost = KvLost(f"KV could not be brought to the device ({error}); it is computed instead.")
    lost.__cause__ = error
    return lost


def _shift(feed: KvFeed) -> int:
    return feed.shift if isinstance(feed, MovedFeed) else 0
