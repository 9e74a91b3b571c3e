"""Feeds at work: a thread brings layer after layer into the sequences while the layers before are computed.

    thread   [fill 0][fill 1][fill 2][fill 3] ...       disk, memory or network
    step             [layer 0][layer 1][layer 2] ...    waits only where the next layer is not there yet

Keys that were computed at other positions are turned there and then, by the thread, on the model's own device.

What a CUDA device fetches by itself needs no thread: the step asks for it some layers ahead.

The step stays in charge: cancelling ends its wait at once, however long a read hangs. The thread may then still be
writing, so the sequences leave their buffers to it and take others.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from rekindle.engine.base import KvFeed, MovedFeed
from rekindle.engine.fetch import Fetch
from rekindle.engine.sequence import Landing, TorchSequence
from rekindle.engine.turn import Turn, Turner
from rekindle.errors import Cancelled, KvLost

_LOOK_SECONDS = 0.005  # how often a wait looks whether it was cancelled
_LAYERS_AHEAD = 8  # what a device fetches by itself is asked for so many layers before it is needed


class Filling:
    """The feeds of one step. `start`, then `wait(layer)` before each layer, then `stop`, whatever happened."""

    def __init__(
        self,
        feeds: Sequence[tuple[TorchSequence, KvFeed]],
        layers: int,
        device: torch.device,
        turner: Turner | None = None,
        *,
        between: bool = False,
    ) -> None:
        """`turner` is for feeds that move: without it, none may have a shift. `between` says that something that stays
        may stand between feeds."""
        self._between = between
        self._feeds: dict[TorchSequence, list[KvFeed]] = {}
        for sequence, feed in feeds:
            self._feeds.setdefault(sequence, []).append(feed)
        self._layers = layers
        self._device = device
        self._turner = turner
        self._turns: dict[tuple[TorchSequence, int], Turn] = {}  # by layer
        self._fetches: dict[TorchSequence, Fetch] = {}  # what the device reads from memory by itself
        self._changed = threading.Condition()
        self._filled = 0  # layers that are there
        self._error: BaseException | None = None
        self._stopped = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._arrivals: list[torch.cuda.Event] = []
        self._thread: threading.Thread | None = threading.Thread(
            target=self._fill_all, name="rekindle-fill", daemon=True
        )

    def start(self) -> None:
        """Begin to fill."""
        self._prepare_turns()  # not in the thread: asking a rope for its angles may change it, and the step asks too
        if self._stream is not None:
            fetches = {sequence: Fetch.of(sequence, feeds, self._layers) for sequence, feeds in self._feeds.items()}
            self._fetches = {sequence: fetch for sequence, fetch in fetches.items() if fetch is not None}
            # What reads the buffers now must be through before they are written.
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            if len(self._fetches) == len(self._feeds):  # nothing to wait for here, and a thread delays the launches
                self._thread = None
                return
        try:
            assert self._thread is not None
            self._thread.start()
        except RuntimeError:  # the system has no thread left: each layer is filled when it is needed
            self._thread = None

    def wait(self, layer: int, cancelled: Callable[[], bool] | None) -> None:
        """Block until `layer` is there. Raises what its feed raised, or `Cancelled`."""
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
        """Fill no further layer. A fill that is under way keeps the buffers it writes to; the sequences get others."""
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
            if self._filled < self._layers:  # given up: what it copies from and to must not go before
                self._stream.synchronize()
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _prepare_turns(self) -> None:
        for sequence, feeds in self._feeds.items():
            if not any(_shift(feed) for feed in feeds):
                continue
            assert self._turner is not None, "rows whose feeds move are refused without a turner"
            known: dict[tuple[int, ...], Turn] = {}  # most layers have the same feeds
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
        except BaseException as error:  # noqa: BLE001  (raised again by whoever waits)
            with self._changed:
                self._error = _as_lost(error)
                self._changed.notify_all()
        finally:
            if self._stopped and self._stream is not None:  # what it copies from and to must not go before
                self._stream.synchronize()

    def _fill_until(self, stop: int) -> None:
        """Fill here and now, without a thread; a device goes on with more while the step computes."""
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
                    landing = self._landing(sequence, layer, group)
                    if landing is None:
                        return
                    for feed, out in zip(group, landing.outs, strict=True):
                        feed.fill(layer, out)
                    landing.land()
                    keys = landing.layer_keys
                if (turn := self._turns.get((sequence, layer))) is not None and turn.parts:
                    turn.apply(layer, keys)
            if self._stream is not None:
                arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrival.record(self._stream)
                self._arrivals.append(arrival)

    def _groups(self, sequence: TorchSequence, feeds: Sequence[KvFeed]) -> list[list[KvFeed]]:
        """The feeds that land together: on a GPU as many as can, for a copy of each would take longer than the data.

        Measured for 16 passages of 512 tokens in an 8B shape on an H200.
        """
        apart = all(first.span.stop <= second.span.start for first, second in pairwise(feeds))
        together = self._stream is not None and apart and bool(feeds) and feeds[0].span.start >= sequence.length
        groups: list[list[KvFeed]] = []
        for feed in feeds:
            follows = bool(groups) and groups[-1][-1].span.stop == feed.span.start
            if together and groups and (follows or not self._between):  # what lies between them is overwritten
                groups[-1].append(feed)
            else:
                groups.append([feed])
        return groups

    def _landing(self, sequence: TorchSequence, layer: int, feeds: Sequence[KvFeed]) -> Landing | None:
        with self._changed:  # once stopped, the sequence may have other buffers, which are none of ours
            return None if self._stopped else Landing(sequence, layer, [feed.span for feed in feeds])


def _as_lost(error: BaseException) -> BaseException:
    """What a device raises while it is brought KV is no reason to fail: then it is computed."""
    if not isinstance(error, RuntimeError):
        return error
    lost = KvLost(f"KV could not be brought to the device ({error}); it is computed instead.")
    lost.__cause__ = error
    return lost


def _shift(feed: KvFeed) -> int:
    return feed.shift if isinstance(feed, MovedFeed) else 0
