"""A prompt of which an origin has the beginning: computed and streamed at the same time, so that it is there sooner.

    compute   [chunk 0][chunk 1][chunk 2, lower layers] ....... [question]
    link      [chunk 5][chunk 4][chunk 3][chunk 2, upper layers]

`reuse/stream` decides which cell comes from where; here that is carried out, and looked at again after every step: by
how fast the link was, and how fast the machine computes just now. Whatever the link does, the prompt is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rekindle.core.cells import Cell, Cells, Event, Progress, Schedule, Streamed, steps
from rekindle.core.kv import LayerKv, Span
from rekindle.engine.base import Engine, EngineSequence, KvFeed, Logits, Row, StayingFeed
from rekindle.errors import Cancelled
from rekindle.reuse.latency import LEAST_BANDWIDTH
from rekindle.reuse.stream import StreamCosts, greedy, revise, speculate
from rekindle.run.link import Link
from rekindle.settings import Settings

if TYPE_CHECKING:
    from rekindle.run.streams import Streams

_TINY = 1e-9  # seconds
_LOOK_SECONDS = 0.02  # how often a wait for the link looks at the schedule again
_TRUST = 0.5  # how much of what a step took compared to what was expected goes into what the next are expected to take


@dataclass
class StreamReport:
    """What came of streaming a prompt."""

    computed: tuple[int, ...] = ()  # layers of each chunk
    streamed_cells: int = 0
    streamed_bytes: int = 0
    revisions: int = 0
    failed: str | None = None  # why the link was given up
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _CellFeed:
    """Slices that are here already: some layers of one chunk."""

    span: Span
    layers: range
    kv: dict[int, LayerKv]

    def fill(self, layer: int, out: LayerKv) -> None:
        """Copy a layer."""
        out.keys[...] = self.kv[layer].keys
        out.values[...] = self.kv[layer].values


class Steering:
    """Decides what is computed and what is streamed. Rivals, in benches, decide otherwise."""

    def begin(self, costs: StreamCosts) -> Schedule:
        """The schedule to begin with."""
        return greedy(costs)

    def revise(self, schedule: Schedule, progress: Progress, costs: StreamCosts) -> Schedule:
        """The schedule to go on with, before each step and while the link is waited for."""
        return revise(schedule, progress, costs)

    def ahead(self, schedule: Schedule, progress: Progress) -> Streamed:
        """What the link may bring when the schedule leaves it nothing to do."""
        return speculate(schedule, progress)


class Streaming:
    """One prompt on its way into an empty sequence. Used by one thread, beside that of the link."""

    def __init__(
        self,
        engine: Engine,
        sequence: EngineSequence,
        tokens: Sequence[int],
        cells: Cells,
        link: Link,
        costs: StreamCosts,
        cancelled: Callable[[], bool] | None = None,
        steering: Steering | None = None,
    ) -> None:
        """`cells` are the beginning of `tokens` that `link` can bring; what follows it is computed at the end."""
        if not 0 < cells.tokens < len(tokens):
            raise ValueError(f"{cells.tokens} of {len(tokens)} tokens are streamed: the last must be computed")
        self._engine, self._sequence, self._tokens = engine, sequence, tokens
        self._cells, self._link, self._costs = cells, link, costs
        self._cancelled = cancelled
        self._steering = steering or Steering()
        self._computed = [0] * cells.chunks
        self._pace = 1.0  # how long steps take, of what was expected
        self._started = time.monotonic()
        self.told = StreamReport()

    def run(self) -> Logits:
        """Fill the sequence with the whole prompt; the logits of its last token. Raises `Cancelled`."""
        schedule = self._steering.begin(self._now())
        while True:
            self._check_cancelled()
            progress = self._progress()
            schedule = self._revised(schedule, progress)
            self._link.want((*schedule.order, *self._steering.ahead(schedule, progress)))
            todo = steps(schedule.split, progress)
            if todo and self._is_ready(*todo[0]):
                self._step(*todo[0])
            elif not todo and self._is_complete():
                break
            else:
                self._link.wait(_LOOK_SECONDS)
        self._link.close()
        logits = self._question()
        self._tell()
        return logits

    def _now(self) -> StreamCosts:
        """What things cost by now."""
        costs, pace = self._costs, self._pace
        speed = self._link.bytes_per_second()
        if speed is None:  # nobody knows: as fast as computing
            speed = float(costs.size_bytes.sum() / max(costs.depth_seconds[:, -1].sum() * pace, _TINY))
        return replace(
            costs,
            compute_seconds=costs.compute_seconds * pace,
            top_seconds=costs.top_seconds * pace,
            question_seconds=costs.question_seconds * pace,
            bandwidth=max(speed, LEAST_BANDWIDTH),
        )

    def _progress(self) -> Progress:
        link = self._link
        return Progress(tuple(self._computed), link.arrived_cells, link.flying, link_busy_seconds=link.busy_seconds)

    def _revised(self, schedule: Schedule, progress: Progress) -> Schedule:
        revised = self._steering.revise(schedule, progress, self._now())
        self.told.revisions += revised.split != schedule.split
        return revised

    def _is_ready(self, chunk: int, depth: int) -> bool:
        """Whether all that a step attends to is here: every layer of the chunks before it but the step's last."""
        return all(self._has(before, layer) for before in range(chunk) for layer in range(depth - 1))

    def _is_complete(self) -> bool:
        layers = self._cells.layers
        return all(self._has(chunk, layer) for chunk in range(self._cells.chunks) for layer in range(layers))

    def _has(self, chunk: int, layer: int) -> bool:
        return layer < self._computed[chunk] or Cell(chunk, layer) in self._link.arrived

    def _step(self, chunk: int, depth: int) -> None:
        """Compute the first layers of a chunk; all of them, if nothing before is missing, extend the sequence."""
        span, layers = self._cells.span(chunk), self._cells.layers
        whole = depth == layers and self._sequence.length == span.start
        row = Row(
            self._sequence,
            self._tokens[span.start : span.stop],
            np.arange(span.start, span.stop, dtype=np.int64),
            logits="none",
            feeds=() if whole else self._feeds(chunk, depth - 1),
            until=None if whole else depth,
            replay=False,
            prefill=True,
        )
        start = time.monotonic()
        self._engine.step([row], self._cancelled)
        took, expected = time.monotonic() - start, float(self._costs.depth_seconds[chunk, depth])
        self._computed[chunk] = depth
        if expected > 0:
            self._pace += _TRUST * (took / expected - self._pace)
        self._note(chunk, depth, start)

    def _feeds(self, before: int, layers: int) -> tuple[KvFeed, ...]:
        """What the first layers of the chunks before one consist of: computed and still in the buffers, or arrived."""
        feeds: list[KvFeed] = []
        for chunk in range(before):
            span = self._cells.span(chunk)
            if span.stop <= self._sequence.length or not layers:
                continue
            own = min(self._computed[chunk], layers)
            if own:
                feeds.append(StayingFeed(span, range(own)))
            if own < layers:
                kv = {layer: self._link.arrived[Cell(chunk, layer)] for layer in range(own, layers)}
                feeds.append(_CellFeed(span, range(own, layers), kv))
        return tuple(feeds)

    def _question(self) -> Logits:
        """Compute the rest of the prompt, after everything that came or was computed."""
        at, most = self._cells.tokens, max(1, self._engine.prefill_tokens)
        feeds = self._feeds(self._cells.chunks, self._cells.layers)
        while True:
            self._check_cancelled()
            stop = min(len(self._tokens), at + most)
            last = stop == len(self._tokens)
            row = Row(
                self._sequence,
                self._tokens[at:stop],
                np.arange(at, stop, dtype=np.int64),
                logits="last" if last else "none",
                feeds=feeds,
                replay=False,
                prefill=True,
            )
            start = time.monotonic()
            (logits,) = self._engine.step([row], self._cancelled)
            self._note(self._cells.chunks, self._cells.layers, start)
            if last:
                return logits
            at, feeds = stop, ()

    def _note(self, chunk: int, layers: int, start: float) -> None:
        begun = self._started
        self.told.events.append(Event("compute", chunk, 0, layers, start - begun, time.monotonic() - begun))

    def _tell(self) -> None:
        self.told.computed = tuple(self._computed)
        self.told.streamed_cells = sum(cell.layer >= self._computed[cell.chunk] for cell in self._link.arrived_cells)
        self.told.streamed_bytes = self._link.size_bytes
        self.told.failed = self._link.failed
        for cell, start, stop in self._link.arrivals:
            times = (start - self._started, stop - self._started)
            self.told.events.append(Event("link", cell.chunk, cell.layer, cell.layer + 1, *times))

    def _check_cancelled(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise Cancelled("The request was cancelled.")


def streams_of(engine: Engine, settings: Settings) -> Streams | None:
    """What a session streams; None if it has no origin. Raises `InvalidSetting`."""
    if settings.origin is None:
        return None
    from rekindle.run.streams import Streams  # what checks signatures is not always installed

    return Streams(engine, settings)
