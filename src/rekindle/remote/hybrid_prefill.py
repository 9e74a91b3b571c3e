"""Prefill of a prompt whose beginning an origin has: computed and fetched at the same time.

    compute   [chunks 0 and 1][chunk 2, from below][question]
    link      [chunk 5][chunk 4][chunk 3][chunk 2, from above]

Both lanes move towards each other until they meet, in the middle of a chunk: at every layer a step checks whether
everything above has arrived. `schedule` predicts where they meet and is asked again after every step, with the current
speed of the link and of computing. Whatever the link does, the prompt is finished, and nothing but the lowest layer is
computed twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from rekindle.core.cells import (
    Cell,
    CellGrid,
    Progress,
    RemoteReport,
    Schedule,
    Split,
    TimelineEvent,
    TransferOrder,
    steps,
)
from rekindle.core.kv import CodedPiece, KvType, LayerKv, Span
from rekindle.engine.base import Engine, EngineSequence, KvFeed, Logits, Row, StayingFeed, Stopwatch, Wanted
from rekindle.errors import Cancelled, KvLost
from rekindle.remote.client import CodedSlice
from rekindle.remote.latency import MIN_BANDWIDTH, LayerTiming
from rekindle.remote.schedule import RemainingWork, StreamCosts, meet_in_the_middle
from rekindle.remote.transfer_queue import ArrivedKv, TransferQueue

_TINY = 1e-9  # seconds
_LOOK_SECONDS = 0.02  # how often a wait for the link recomputes the schedule
_FAR = 0.75  # share of the way to the expected meeting point that one step may cover
_FIRST_FAR = 0.25  # the same before a step was timed: the machine may be busier than it was
_TELLING = 8  # minimum layers of a step for a timing
_TRUST = 0.5  # weight of the newest step in `_pace`
_ORIGIN = "origin"


@dataclass(frozen=True)
class ComputeStep:
    """Some chunks, through their first `depth` layers.

    enough  whether it ends as soon as everything above has arrived
    """

    chunks: range
    depth: int
    enough: bool = False


@dataclass(frozen=True, eq=False)
class ArrivedFeed:
    """Arrived slices: some layers of chunks that follow each other."""

    cells: CellGrid
    chunks: Sequence[int]
    layers: range
    arrived: Mapping[Cell, ArrivedKv]
    dtype: KvType

    @property
    def span(self) -> Span:
        return Span(self.cells.span(self.chunks[0]).start, self.cells.span(self.chunks[-1]).stop)

    def fill(self, layer: int, out: LayerKv) -> None:
        """Copy the slices of a layer, which are decoded."""
        for chunk in self.chunks:
            kv, at = self.arrived[Cell(chunk, layer)], self._place(chunk)
            assert isinstance(kv, LayerKv), "an engine that does not decode has asked for coded slices"
            out.keys[:, at], out.values[:, at] = kv.keys, kv.values

    @property
    def coded(self) -> bool:
        """Whether some slices are to be decoded by the engine."""
        return any(isinstance(kv, CodedSlice) for kv in self.arrived.values())

    def fill_coded(self, layer: int, take: Callable[[CodedPiece], None]) -> None:
        """Give the slices of a layer, coded ones together that follow each other: each piece takes the device many
        small operations."""
        own = [(self._place(chunk).start, self.arrived[Cell(chunk, layer)]) for chunk in self.chunks]
        for spec, alike in groupby(own, lambda one: one[1].spec if isinstance(one[1], CodedSlice) else None):
            places, slices = zip(*alike, strict=True)
            if spec is not None:
                span = Span(0, len(slices) * spec.tokens)
                take(CodedPiece(tuple(one.data for one in slices), spec, span, places[0], delta=False, owner=_ORIGIN))
                continue
            for place, kv in zip(places, slices, strict=True):
                own_spec = kv.spec(self.dtype)
                take(CodedPiece(kv, own_spec, Span(0, own_spec.tokens), place, delta=False, owner=_ORIGIN))

    def damaged(self, piece: CodedPiece, reason: str) -> KvLost:  # noqa: ARG002
        """Its signature was right: who published it made a mistake."""
        return KvLost(f"KV from the origin cannot be decoded ({reason}); it is computed instead.")

    def _place(self, chunk: int) -> slice:
        """Where a chunk stands in the span."""
        span, start = self.cells.span(chunk), self.span.start
        return slice(span.start - start, span.stop - start)


@dataclass(frozen=True)
class _TimedStep:
    """A step that a device may still compute."""

    watch: Stopwatch
    span: Span
    depth: int
    expected_seconds: float


class HybridPrefill:
    """Prefill of one prompt into a sequence that is empty or has its first chunks. Used by one thread."""

    def __init__(
        self,
        engine: Engine,
        sequence: EngineSequence,
        tokens: Sequence[int],
        cells: CellGrid,
        link: TransferQueue,
        costs: StreamCosts,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """`cells`: the prefix of `tokens` that `link` can fetch; the rest is computed at the end."""
        if not 0 < cells.tokens < len(tokens):
            raise ValueError(f"{cells.tokens} of {len(tokens)} tokens are streamed: the last must be computed")
        if sequence.length % cells.chunk_tokens or sequence.length >= cells.tokens:
            raise ValueError(f"{sequence.length} of {cells.tokens} tokens are here: not some of the first chunks")
        self._engine, self._sequence, self._tokens = engine, sequence, tokens
        self._cells, self._link, self._costs = cells, link, costs
        self._cancelled = cancelled
        here = sequence.length // cells.chunk_tokens
        self._computed = [cells.layers] * here + [0] * (cells.chunks - here)
        self._pace = 1.0  # actual over expected time of steps
        self._timed = False  # whether that was measured
        self.since = time.monotonic()  # start of the timeline
        self.alone: Callable[[], bool] = lambda: True  # else steps are short: other requests wait
        self.report = RemoteReport()
        self.samples: list[LayerTiming] = []  # timings of layers
        self._underway: deque[_TimedStep] = deque()  # not known yet how long they took

    def run(self) -> Logits:
        """Prefill the whole prompt; returns the logits of its last token. Raises `Cancelled`."""
        while True:
            self._check_cancelled()
            self._learn_timings()
            progress = self._progress()
            schedule = self.plan(progress)
            self._link.want(schedule.order)
            if self._is_complete():
                break
            step = self.next_step(schedule, progress)
            if step is None:
                self._link.wait(_LOOK_SECONDS)
            else:
                self._compute(step)
        self._link.close()
        logits = self._question()
        self._learn_timings()
        self._finish_report()
        return logits

    def _now(self) -> StreamCosts:
        """Costs at the current speed of link and machine."""
        costs, pace, source = self._costs, self._pace, self._link.source
        if source is not None:  # other levels have other sizes
            costs = replace(costs, size_bytes=source.sizes.astype(np.float64))
        speed = self._link.bytes_per_second()
        if speed is None:  # unknown: assume as fast as computing
            speed = float(costs.size_bytes.sum() / max(costs.depth_seconds[:, -1].sum() * pace, _TINY))
        return replace(
            costs,
            compute_seconds=costs.compute_seconds * pace,
            top_seconds=costs.top_seconds * pace,
            question_seconds=costs.question_seconds * pace,
            bandwidth=max(speed, MIN_BANDWIDTH),
        )

    def _progress(self) -> Progress:
        link = self._link
        return Progress(tuple(self._computed), link.arrived_cells, link.flying, link_busy_seconds=link.busy_seconds)

    def plan(self, progress: Progress) -> Schedule:
        """Where both lanes are now expected to meet, and the order of the link."""
        return meet_in_the_middle(RemainingWork.of(self._now(), progress))

    def next_step(self, schedule: Schedule, progress: Progress) -> ComputeStep | None:
        """The next step; None if what is missing is about to arrive."""
        split, layers = schedule.split, self._cells.layers
        low = [chunk for chunk, depth in steps(split, progress) if depth == 1]
        if low and not self.report.events:  # keys and values of the lowest layer need no attention: all at once
            return ComputeStep(range(max(low[0], split.chunks - self._max_chunks), split.chunks), 1)
        tops = [self._top(chunk) for chunk in range(split.chunks)]  # read once: more arrives meanwhile
        front = next((chunk for chunk, top in enumerate(tops) if top), None)
        if front is None:
            return None
        depth = tops[front]
        flying = {cell.layer for cell in progress.flying if cell.chunk == front}
        coming = all(layer in flying for layer in range(depth) if not self._has(front, layer))
        if coming and progress.link_busy_seconds < self._costs.depth_seconds[front, depth] * self._pace:
            return None
        far = sum(count == layers for count in split.computed[front:])
        untouched = (*(top == layers for top in tops[front:]), False).index(False)
        count = min(int(self._step_share * far), untouched, self._max_chunks)
        return ComputeStep(range(front, front + max(1, count)), depth, enough=True)

    @property
    def _step_share(self) -> float:
        """Share of the way to the expected meeting point that the next step may cover."""
        return _FAR if self._timed else _FIRST_FAR

    @property
    def _max_chunks(self) -> int:
        return max(1, self._engine.prefill_tokens // self._cells.chunk_tokens) if self.alone() else 1

    def _top(self, chunk: int) -> int:
        """Number of layers of a chunk to compute if nothing more arrives."""
        layers = reversed(range(self._cells.layers))
        return next((layer + 1 for layer in layers if not self._has(chunk, layer)), 0)

    def _is_complete(self) -> bool:
        return not any(map(self._top, range(self._cells.chunks)))

    def _has(self, chunk: int, layer: int) -> bool:
        return layer < self._computed[chunk] or Cell(chunk, layer) in self._link.arrived

    def _compute(self, step: ComputeStep) -> None:
        start, stop = self._cells.span(step.chunks[0]).start, self._cells.span(step.chunks[-1]).stop
        ended = step.depth

        def enough(layer: int) -> bool:
            """Whether everything above has arrived; records where the step ends."""
            nonlocal ended
            above = range(layer + 1, step.depth)
            if not all(self._has(chunk, higher) for chunk in step.chunks for higher in above):
                return False
            ended = layer + 1
            return True

        row = self.row(step, Span(start, stop))
        begun, watch = time.monotonic(), self._engine.stopwatch()
        self._engine.step([replace(row, enough=enough) if step.enough else row], lambda: self._stops(step))
        watch.stop()
        for chunk in step.chunks:
            self._computed[chunk] = ended
        expected = float(self._costs.depth_seconds[step.chunks, ended].sum())
        self._underway.append(_TimedStep(watch, Span(start, stop), ended, expected))
        self._note(step.chunks, ended, begun)

    def _learn_timings(self) -> None:
        """Compare the steps that are computed with what was expected of them."""
        while self._underway and (took := self._underway[0].watch.seconds) is not None:
            step = self._underway.popleft()
            if step.expected_seconds > 0 and step.depth > 1:  # the lowest layer alone is mostly overhead
                self._pace += (_TRUST if self._timed else 1.0) * (took / step.expected_seconds - self._pace)
                self._timed, self._link.pace = True, self._pace
            if step.depth >= _TELLING:  # the last layer computes keys and values only
                self.samples.append(LayerTiming(len(step.span), step.span.start, took / (step.depth - 1)))

    def _stops(self, step: ComputeStep) -> bool:  # noqa: ARG002
        """Whether a running step shall end."""
        return self._cancelled is not None and self._cancelled()

    def row(self, step: ComputeStep, span: Span) -> Row:
        """The engine row of a step over these tokens."""
        return replace(self._row(span, "none", self._feeds(step.chunks[0], step.depth - 1)), until=step.depth)

    def _row(self, span: Span, logits: Wanted, feeds: tuple[KvFeed, ...]) -> Row:
        tokens, positions = self._tokens[span.start : span.stop], np.arange(span.start, span.stop, dtype=np.int64)
        return Row(self._sequence, tokens, positions, logits, feeds, replay=False, prefill=True)

    def _feeds(self, before: int, layers: int) -> tuple[KvFeed, ...]:
        """Feeds of the first layers of earlier chunks: computed and still in the buffers, or arrived."""
        here = sum(self._cells.span(chunk).stop <= self._sequence.length for chunk in range(before))
        feeds: list[KvFeed] = []
        for own, alike in groupby(range(here, before), lambda chunk: min(self._computed[chunk], layers)):
            chunks = tuple(alike)
            if own:
                span = Span(self._cells.span(chunks[0]).start, self._cells.span(chunks[-1]).stop)
                feeds.append(StayingFeed(span, range(own)))
            if own < layers:
                cells = [Cell(chunk, layer) for chunk in chunks for layer in range(own, layers)]
                kv = {cell: self._link.arrived[cell] for cell in cells}
                feeds.append(ArrivedFeed(self._cells, chunks, range(own, layers), kv, self._engine.layout.dtype))
        return tuple(feeds)

    def _question(self) -> Logits:
        """Compute the rest of the prompt."""
        at, most = self._cells.tokens, max(1, self._engine.prefill_tokens)
        feeds = self._feeds(self._cells.chunks, self._cells.layers)
        while True:
            self._check_cancelled()
            stop = min(len(self._tokens), at + most)
            last = stop == len(self._tokens)
            row = self._row(Span(at, stop), "last" if last else "none", feeds)
            start = time.monotonic()
            (logits,) = self._engine.step([row], self._cancelled)
            self._note(range(self._cells.chunks, self._cells.chunks + 1), self._cells.layers, start)
            if last:
                return logits
            at, feeds = stop, ()

    def _note(self, chunks: range, layers: int, start: float) -> None:
        """Record a step in the timeline, each of its chunks with an equal share of the time."""
        times = np.linspace(start, time.monotonic(), len(chunks) + 1) - self.since
        for chunk, begun, over in zip(chunks, times[:-1].tolist(), times[1:].tolist(), strict=True):
            self.report.events.append(TimelineEvent("compute", chunk, 0, layers, begun, over))

    def _finish_report(self) -> None:
        self.report.computed = tuple(self._computed)
        arrived = self._link.arrived_cells
        self.report.streamed_cells = tuple(cell for cell in arrived if cell.layer >= self._computed[cell.chunk])
        self.report.failed = self._link.failed
        for cell, start, stop in self._link.arrivals:
            times = (start - self.since, stop - self.since)
            self.report.events.append(TimelineEvent("link", cell.chunk, cell.layer, cell.layer + 1, *times))

    def _check_cancelled(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise Cancelled("The request was cancelled.")


class WholeTokenPrefill(HybridPrefill):
    """The same for engines that take only whole tokens, all layers at once (llama.cpp).

        compute   [chunks 0 and 1][chunk 2 ...  given up: all of it has arrived][question]
        link      [chunk 5][chunk 4][chunk 3][chunk 2 ...]

    Lanes meet between two chunks. The chunk where they would meet is computed and fetched at the same time, and
    whichever ends first is used: a step is cancelled as soon as everything from its first token on has arrived.
    """

    def plan(self, progress: Progress) -> Schedule:
        """The number of chunks from the front to compute so that both lanes end soonest, and the others backwards."""
        task = RemainingWork.of(self._now(), progress)
        layers, here = self._cells.layers, [self._top(chunk) == 0 for chunk in range(self._cells.chunks)]
        compute = np.where(here, 0.0, task.costs.compute_seconds.sum(axis=1))
        link = task.slice_seconds.sum(axis=1)
        computing = np.concatenate([[0.0], np.cumsum(compute)])
        fetching = link.sum() - np.concatenate([[0.0], np.cumsum(link)])
        if fetching[0] > 0:
            fetching += progress.link_busy_seconds
        ends = np.maximum(computing, fetching)
        count = int(np.argmin(ends))
        split = Split(layers, (layers,) * count + (0,) * (self._cells.chunks - count))
        order = TransferOrder(layers, tuple(np.flatnonzero(task.missing)[::-1].tolist()))
        return Schedule(split, order, float(ends[count] + task.costs.question_seconds.sum()))

    def next_step(self, schedule: Schedule, progress: Progress) -> ComputeStep | None:  # noqa: ARG002
        """The next chunks, even if they are expected to arrive sooner, since a step can be given up; None if all that
        is missing is being received."""
        layers, computed = self._cells.layers, schedule.split.computed
        front = next((chunk for chunk in range(self._cells.chunks) if self._top(chunk)), None)
        if front is None or not schedule.order.numbers:
            return None
        far = sum(count == layers for count in computed[front:])
        return ComputeStep(range(front, front + max(1, min(int(self._step_share * far), self._max_chunks))), layers)

    def row(self, step: ComputeStep, span: Span) -> Row:
        """All layers, behind what has arrived before."""
        return replace(super().row(step, span), feeds=self._feeds(step.chunks[0], step.depth), until=None)

    def _compute(self, step: ComputeStep) -> None:
        try:
            super()._compute(step)
        except Cancelled:
            self._check_cancelled()  # else everything has arrived

    def _stops(self, step: ComputeStep) -> bool:
        """Whether a running step shall end."""
        arrived = not any(map(self._missing, range(step.chunks[0], self._cells.chunks)))
        return arrived or super()._stops(step)

    def _missing(self, chunk: int) -> bool:
        return any(Cell(chunk, layer) not in self._link.arrived for layer in range(self._cells.layers))
