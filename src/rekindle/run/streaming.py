"""A prompt of which an origin has the beginning: computed and streamed at the same time, so that it is there sooner.

    compute   [chunks 0 and 1][chunk 2, from below][question]
    link      [chunk 5][chunk 4][chunk 3][chunk 2, from above]

Usually both lanes go towards each other until they meet, in the middle of a chunk: a step asks at every layer whether
all that is above has come by now. `reuse/stream` says where that is expected, or what else is sooner; it is asked again
after every step, by how fast the link was, and how fast the machine computes just now. Whatever the link does, the
prompt is finished, and nothing but the lowest layer is computed twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rekindle.core.cells import Cell, Cells, Event, Progress, Schedule, Streamed, steps
from rekindle.core.kv import LayerKv, Span
from rekindle.core.request import Request
from rekindle.engine.base import Engine, EngineSequence, KvFeed, Logits, Row, StayingFeed
from rekindle.errors import Cancelled
from rekindle.reuse.latency import LEAST_BANDWIDTH, Sample
from rekindle.reuse.stream import StreamCosts, begin, revise, speculate
from rekindle.run.link import Link
from rekindle.settings import Settings

if TYPE_CHECKING:
    from rekindle.run.cache import PrefixCache
    from rekindle.run.keep import Guard
    from rekindle.run.prompt import PromptTokens
    from rekindle.run.streams import Prefetched, Streams

_TINY = 1e-9  # seconds
_LOOK_SECONDS = 0.02  # how often a wait for the link looks at the schedule again
_FAR = 0.75  # the share of the way to where both lanes are expected to meet that one step may go
_TELLING = 8  # layers of a step that tell how long one takes
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
    samples: list[Sample] = field(default_factory=list)  # how long layers took


@dataclass(frozen=True)
class _Step:
    """Some chunks, through their first layers.

    whole   all layers, and nothing before is missing: afterwards the sequence is longer
    enough  whether it ends as soon as everything above has come
    """

    chunks: range
    depth: int
    whole: bool = False
    enough: bool = False


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

    def begin(self, costs: StreamCosts, progress: Progress) -> Schedule:
        """The schedule to begin with."""
        return begin(costs, progress)

    def revise(self, schedule: Schedule, progress: Progress, costs: StreamCosts) -> Schedule:
        """The schedule to go on with, before each step and while the link is waited for."""
        return revise(schedule, progress, costs)

    def ahead(self, schedule: Schedule, progress: Progress) -> Streamed:
        """What the link may bring when the schedule leaves it nothing to do."""
        return speculate(schedule, progress)


class Streaming:
    """One prompt on its way into a sequence that is empty, or has its first chunks. Used by one thread, beside that of
    the link."""

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
        if sequence.length % cells.chunk_tokens or sequence.length >= cells.tokens:
            raise ValueError(f"{sequence.length} of {cells.tokens} tokens are here: not some of the first chunks")
        self._engine, self._sequence, self._tokens = engine, sequence, tokens
        self._cells, self._link, self._costs = cells, link, costs
        self._cancelled = cancelled
        self._steering = steering or Steering()
        here = sequence.length // cells.chunk_tokens
        self._computed = [cells.layers] * here + [0] * (cells.chunks - here)
        self._pace = 1.0  # how long steps take, of what was expected
        self.since = time.monotonic()  # of the timeline
        self.alone: Callable[[], bool] = lambda: True  # else steps are short: others wait for them
        self.told = StreamReport()

    def run(self) -> Logits:
        """Fill the sequence with the whole prompt; the logits of its last token. Raises `Cancelled`."""
        schedule = self._steering.begin(self._now(), self._progress())
        while True:
            self._check_cancelled()
            progress = self._progress()
            schedule = self._revised(schedule, progress)
            self._link.want((*schedule.order, *self._steering.ahead(schedule, progress)))
            if self._is_complete():
                break
            step = self._towards(schedule, progress) if schedule.meeting else self._next(schedule, progress)
            if step is None:
                self._link.wait(_LOOK_SECONDS)
            else:
                self._compute(step)
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

    def _next(self, schedule: Schedule, progress: Progress) -> _Step | None:
        """The next step of a schedule; None while what it attends to is not here."""
        todo, layers = steps(schedule.split, progress), self._cells.layers
        if not todo:
            return None
        chunk, depth = todo[0]
        if depth == layers and self._sequence.length == self._cells.span(chunk).start:
            whole = [following == (chunk + n, layers) for n, following in enumerate(todo)]
            count = min((*whole, False).index(False), self._most_chunks)
            return _Step(range(chunk, chunk + count), depth, whole=True)
        # Every layer of the chunks before it but the step's last.
        ready = all(self._has(before, layer) for before in range(chunk) for layer in range(depth - 1))
        return _Step(range(chunk, chunk + 1), depth) if ready else None

    def _towards(self, schedule: Schedule, progress: Progress) -> _Step | None:
        """The next step towards the link; None if what is missing is about to come."""
        split, layers = schedule.split, self._cells.layers
        low = [chunk for chunk, depth in steps(split, progress) if depth == 1]
        if low and not self.told.events:  # keys and values of the lowest layer attend to nothing: all of them at once
            return _Step(range(max(low[0], split.chunks - self._most_chunks), split.chunks), 1)
        tops = [self._top(chunk) for chunk in range(split.chunks)]  # once: more comes meanwhile
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
        count = min(int(_FAR * far), untouched, self._most_chunks)
        return _Step(range(front, front + max(1, count)), depth, enough=True)

    @property
    def _most_chunks(self) -> int:
        return max(1, self._engine.prefill_tokens // self._cells.chunk_tokens) if self.alone() else 1

    def _top(self, chunk: int) -> int:
        """How many layers of a chunk have to be computed if nothing more comes."""
        layers = reversed(range(self._cells.layers))
        return next((layer + 1 for layer in layers if not self._has(chunk, layer)), 0)

    def _is_complete(self) -> bool:
        return not any(map(self._top, range(self._cells.chunks)))

    def _has(self, chunk: int, layer: int) -> bool:
        return layer < self._computed[chunk] or Cell(chunk, layer) in self._link.arrived

    def _compute(self, step: _Step) -> None:
        start, stop = self._cells.span(step.chunks[0]).start, self._cells.span(step.chunks[-1]).stop
        ended = step.depth

        def enough(layer: int) -> bool:
            """Whether all that is above has come; remembered, because the step ends then."""
            nonlocal ended
            above = range(layer + 1, step.depth)
            if not all(self._has(chunk, higher) for chunk in step.chunks for higher in above):
                return False
            ended = layer + 1
            return True

        row = Row(
            self._sequence,
            self._tokens[start:stop],
            np.arange(start, stop, dtype=np.int64),
            logits="none",
            feeds=() if step.whole else self._feeds(step.chunks[0], step.depth - 1),
            until=None if step.whole else step.depth,
            enough=enough if step.enough else None,
            replay=False,
            prefill=True,
        )
        begun = time.monotonic()
        self._engine.step([row], self._cancelled)
        for chunk in step.chunks:
            self._computed[chunk] = ended
        took, expected = time.monotonic() - begun, float(self._costs.depth_seconds[step.chunks, ended].sum())
        if expected > 0 and ended > 1:  # the lowest layer alone is mostly something else
            self._pace += _TRUST * (took / expected - self._pace)
        if ended >= _TELLING:  # the last layer is keys and values only
            self.told.samples.append(Sample(stop - start, start, took / (ended - 1)))
        self._note(step.chunks, ended, begun)

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
            self._note(range(self._cells.chunks, self._cells.chunks + 1), self._cells.layers, start)
            if last:
                return logits
            at, feeds = stop, ()

    def _note(self, chunks: range, layers: int, start: float) -> None:
        """Remember a step for the timeline, each of its chunks with an equal share of the time."""
        times = np.linspace(start, time.monotonic(), len(chunks) + 1) - self.since
        for chunk, begun, over in zip(chunks, times[:-1].tolist(), times[1:].tolist(), strict=True):
            self.told.events.append(Event("compute", chunk, 0, layers, begun, over))

    def _tell(self) -> None:
        self.told.computed = tuple(self._computed)
        self.told.streamed_cells = sum(cell.layer >= self._computed[cell.chunk] for cell in self._link.arrived_cells)
        self.told.streamed_bytes = self._link.size_bytes
        self.told.failed = self._link.failed
        for cell, start, stop in self._link.arrivals:
            times = (start - self.since, stop - self.since)
            self.told.events.append(Event("link", cell.chunk, cell.layer, cell.layer + 1, *times))

    def _check_cancelled(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise Cancelled("The request was cancelled.")


def prefetch(cache: PrefixCache, request: Request, prompt: PromptTokens, guard: Guard | None) -> Prefetched | None:
    """Let a prompt that has to wait for its turn come from the origin meanwhile; None if it does not.

    `guard` decides whether passages of it may be kept.
    """
    if cache.streams is None:
        return None
    known = cache.look(request, prompt.tokens, prompt.outline)
    cache.forget(known)
    known = replace(known, parked=None, guard=guard, asker=request.asker(known.shelf.namespace.tenant))
    return cache.streams.prefetch(known, cache.plan(known), cache.costs.rates, cache.passages)


def streams_of(engine: Engine, settings: Settings) -> Streams | None:
    """What a session streams; None if it has no origin. Raises `InvalidSetting`."""
    if settings.origin is None:
        return None
    from rekindle.run.streams import Streams  # what checks signatures is not always installed

    return Streams(engine, settings)
