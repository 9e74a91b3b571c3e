"""A context at an origin, behind a link of a chosen speed: where every way to get it is run and timed."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.streaming import DeadlineLadder, all_compute, steered
from benchmarks.quality import FORCED_TOKENS, divergence
from benchmarks.stream.costs import LayerTimings
from benchmarks.stream.modes import KL_BUDGET, LEVEL, Given, StreamMode, steering_of
from benchmarks.stream.shaped_origin import ShapedOrigin
from benchmarks.stream.traces import Trace
from benchmarks.waiting.timeline import LinkCosts
from rekindle.core.cells import Cell, CellGrid, RemoteReport, TimelineEvent
from rekindle.core.kv import LayerKv
from rekindle.engine.base import Engine, EngineSequence, Logits, Row
from rekindle.errors import Cancelled
from rekindle.remote.client import Origin, PublishedPrefix
from rekindle.remote.connection import OriginFailed, OriginLimits
from rekindle.remote.fetch import RemotePrefixFetch
from rekindle.remote.index import KvModel
from rekindle.remote.ladder import LevelLadder, LevelLimit, PricedLevel
from rekindle.remote.publish.publisher import Publisher, PublishSource
from rekindle.remote.remote_kv import MAX_PATIENCE_SECONDS, PATIENCE
from rekindle.remote.signing import SigningKey
from rekindle.remote.slices import level_named
from rekindle.remote.transfer_queue import OriginSlices, TransferQueue
from rekindle.session.calibrate.nearness import log_softmax
from rekindle.session.publish import level_kl

# Nobody gives up because a trace is silent for a while: what is measured is who waits for what.
_LIMITS = OriginLimits(silence_seconds=300.0, min_bytes_a_second=1.0)


@dataclass(frozen=True)
class _Nothing:
    """A carrier for who streams nothing."""

    sizes: NDArray[np.int64]

    def adapt(self, left: Sequence[Cell], bytes_per_second: float | None, pace: float) -> None:
        """There is nothing to choose."""

    def carry(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, LayerKv]]:  # noqa: ARG002
        raise Cancelled("Nothing is streamed.")

    def cancel(self) -> None:
        """There is nothing to end."""


@dataclass(frozen=True)
class StreamRun:
    """One prompt in one way."""

    mode: StreamMode
    ttft_s: float
    bytes: int
    streamed_share: float
    kl: float
    top1: float
    question_s: float
    find_s: float
    revisions: int = 0
    failed: str | None = None
    events: tuple[TimelineEvent, ...] = ()
    slices: Mapping[str, int] = field(default_factory=dict)  # used, by level
    expected_kl: float | None = None


@dataclass(frozen=True)
class ContextSetup:
    """What is asked: a context that is published, and a question behind it."""

    engine: Engine
    tokens: tuple[int, ...]
    context_tokens: int

    @property
    def cells(self) -> CellGrid:
        """Of the context."""
        return CellGrid(self.context_tokens, len(self.engine.layout.layers))

    def open(self) -> EngineSequence:
        """A sequence for it, and for what is forced behind it."""
        capacity = len(self.tokens) + FORCED_TOKENS + 1
        return self.engine.open(capacity, self.engine.regime(capacity))

    def compute(self, sequence: EngineSequence, stop: int, piece: int) -> Logits:
        """Compute the prompt up to there, in pieces."""
        logits = None
        for start in range(0, stop, piece):
            part = self.tokens[start : min(stop, start + piece)]
            row = Row.following(sequence, part, logits="last" if start + piece >= stop else "none")
            (logits,) = self.engine.step([replace(row, replay=False, prefill=True)])
        assert logits is not None
        return logits


class Site:
    """An origin that has the context, behind a shaped link. A context manager."""

    def __init__(self, setting: ContextSetup, folder: Path, levels: Sequence[str]) -> None:
        """Computes the context and publishes it; then everything is ready to run."""
        self._setting, self._engine = setting, setting.engine
        self._stack = ExitStack()
        self._model = KvModel.of(self._engine, len(setting.tokens) + FORCED_TOKENS + 1)
        self._key = SigningKey.new()
        self._publish(folder, levels)
        self._remote = self._stack.enter_context(ShapedOrigin(folder))
        self._url = self._remote.url
        self._found = self._look()
        self.left_coded = self._engine.capabilities.decodes  # quantized slices, for the engine

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def elsewhere(self, url: str) -> Iterator[Site]:
        """Itself, looking for its origin at another address."""
        self._url, before = url, self._url
        try:
            yield self
        finally:
            self._url = before

    def sizes(self, level: str) -> NDArray[np.float64]:
        """[chunks, layers] the bytes of each slice."""
        return self._found.sizes(level).astype(np.float64)

    def kls(self) -> dict[str, float]:
        """The KL of each level, as it was published."""
        return {level.name: level.kl or 0.0 for level in self._found.manifest.levels}

    def learn(self, measured: LayerTimings) -> None:
        """What computing costs here: schedules are made from it."""
        self._measured = measured

    def costs(self, level: str) -> LinkCosts:
        """What the cells cost at a level."""
        question = len(self._setting.tokens) - self._setting.context_tokens
        return self._measured.costs(self._setting.cells, self.sizes(level), question)

    def run(self, mode: StreamMode, trace: Trace, local_seconds: float, window_seconds: float) -> StreamRun:
        """Get the prompt in one way, over a link that begins now."""
        sequence = self._setting.open()
        try:
            self._remote.begin(trace)
            if mode.kind == "plain":
                return self._plain(mode, sequence)
            return self._streamed(mode, sequence, trace, local_seconds, window_seconds)
        finally:
            sequence.close()

    def together(self, mode: StreamMode, count: int, trace: Trace, local_seconds: float) -> tuple[float, float]:
        """Several prefills at once over one link: the time of each, and the mean streamed share. Nothing is judged."""
        sequences = [self._setting.open() for _ in range(count)]
        self._remote.begin(trace)
        try:
            with ThreadPoolExecutor(count) as threads:
                run = functools.partial(self._streamed, mode, trace=trace, local_seconds=local_seconds, judged=False)
                done = list(threads.map(lambda sequence: run(sequence, window_seconds=local_seconds), sequences))
        finally:
            for sequence in sequences:
                sequence.close()
        return statistics.fmean(one.ttft_s for one in done), statistics.fmean(one.streamed_share for one in done)

    def _publish(self, folder: Path, levels: Sequence[str]) -> None:
        setting, layout = self._setting, self._engine.layout
        with ExitStack() as stack:
            sequence = setting.open()
            stack.callback(sequence.close)
            setting.compute(sequence, setting.context_tokens, self._setting.cells.chunk_tokens)
            context = setting.tokens[: setting.context_tokens]
            measure = functools.partial(level_kl, self._engine, context, sequence.export, None)
            source = PublishSource(self._model, context, sequence.export, "bench", self._engine.name, measure=measure)
            Publisher(folder, self._key).publish(source, [level_named(name, layout) for name in levels])
            rest = Row.following(sequence, setting.tokens[setting.context_tokens :])
            (logits,) = self._engine.step([replace(rest, replay=False, prefill=True)])
            self._reply: list[int] = [int(logits[-1].argmax())]
            along = [logits[-1:]]
            for _ in range(FORCED_TOKENS):
                (logits,) = self._engine.step([Row.following(sequence, self._reply[-1:])])
                along.append(logits[-1:])
                self._reply.append(int(logits[-1].argmax()))
            self._expected = log_softmax(np.concatenate(along))  # [positions, vocabulary]

    def _look(self) -> PublishedPrefix:
        origin = Origin(self._remote.url, [self._key.public], limits=_LIMITS)
        try:
            return self._find(origin)
        finally:
            origin.close()

    def _find(self, origin: Origin) -> PublishedPrefix:
        found = origin.find(self._setting.tokens[:-1], self._model)
        if found is None or found.tokens != self._setting.context_tokens:
            raise OriginFailed("The origin does not have what was published.")
        return found

    def _plain(self, mode: StreamMode, sequence: EngineSequence) -> StreamRun:
        started = time.perf_counter()
        logits = self._setting.compute(sequence, len(self._setting.tokens), max(1, self._engine.prefill_tokens))
        seconds = time.perf_counter() - started
        return StreamRun(mode, seconds, 0, 0.0, *self._near(sequence, logits), 0.0, 0.0)

    def _streamed(
        self,
        mode: StreamMode,
        sequence: EngineSequence,
        trace: Trace,
        local_seconds: float,
        window_seconds: float,
        judged: bool = True,
    ) -> StreamRun:
        setting, costs = self._setting, self.costs(mode.level or LEVEL)
        steering = steering_of(mode, costs, trace, window_seconds)
        with ExitStack() as stack:
            started, since = time.perf_counter(), time.monotonic()
            find = self._meanwhile if mode.kind == "ours" else self._first
            link, failed = find(mode, sequence, local_seconds, stack)
            find_s = time.perf_counter() - started
            stack.callback(link.close)
            streaming = steered(self._engine)(self._engine, sequence, setting.tokens, setting.cells, link, costs)
            streaming.steering = steering if failed is None else Given(all_compute(costs))
            streaming.since = since
            logits = streaming.run()
            seconds, carried = time.perf_counter() - started, self._remote.carried_bytes
        outcome = streaming.report
        asked = [event for event in outcome.events if event.chunk == setting.cells.chunks]
        return StreamRun(
            mode,
            seconds,
            carried,
            len(outcome.streamed_cells) / (setting.cells.chunks * setting.cells.layers),
            *(self._near(sequence, logits) if judged else (math.nan, math.nan)),
            sum(event.stop - event.start for event in asked),
            find_s,
            streaming.revisions,
            failed or outcome.failed,
            tuple(outcome.events),
            *self._by_level(link, outcome),
        )

    @staticmethod
    def _by_level(link: TransferQueue, outcome: RemoteReport) -> tuple[dict[str, int], float | None]:
        """What was used of each level, and its expected KL."""
        source = link.source
        if not isinstance(source, OriginSlices):
            return {}, None
        return source.ladder.slices(outcome.streamed_cells), source.ladder.kl(outcome.streamed_cells)

    def _first(
        self, mode: StreamMode, _sequence: EngineSequence, local_seconds: float, stack: ExitStack
    ) -> tuple[TransferQueue, str | None]:
        """What brings slices, and why it does not, once it was found."""
        if mode.kind == "local":
            return self._nothing(), None
        try:
            return TransferQueue(self._offer(self._connected(stack), mode, local_seconds)), None
        except OriginFailed as failed:
            return self._nothing(), str(failed)

    def _nothing(self) -> TransferQueue:
        return TransferQueue(_Nothing(self._found.sizes(LEVEL)))

    def _meanwhile(
        self, mode: StreamMode, sequence: EngineSequence, local_seconds: float, stack: ExitStack
    ) -> tuple[TransferQueue, str | None]:
        """The same while the first chunks are computed, as a session does it."""
        setting, origin, failed = self._setting, self._connected(stack), list[str]()
        lowest = 1 if self._engine.capabilities.layer_feeds else 0
        offer = lambda _stop: self._offer(origin, mode, local_seconds)  # noqa: E731
        coming = RemotePrefixFetch(offer, 0, failed.append, lowest_layer=lowest)
        stack.callback(coming.close)
        coming.wait_for_first(min(PATIENCE * local_seconds, MAX_PATIENCE_SECONDS))
        chunk, last = setting.cells.chunk_tokens, setting.cells.spans[-1].start
        while not coming.over and sequence.length < last:
            stop = min(
                last, sequence.length + max(chunk, sequence.length), sequence.length + self._engine.prefill_tokens
            )
            row = Row.following(sequence, setting.tokens[sequence.length : stop // chunk * chunk], logits="none")
            self._engine.step([replace(row, replay=False, prefill=True)])
        if coming.offer is None:
            return self._nothing(), failed[0] if failed else "The origin did not answer in time."
        return coming, None

    def _connected(self, stack: ExitStack) -> Origin:
        origin = Origin(self._url, [self._key.public], limits=_LIMITS)
        stack.callback(origin.close)
        return origin

    def _offer(self, origin: Origin, mode: StreamMode, local_seconds: float) -> OriginSlices:
        found = self._find(origin)
        levels = LevelLimit(KL_BUDGET if mode.kind == "ours" else math.inf).levels(found)
        if mode.level is not None:
            file = found.manifest.level(mode.level)
            levels = (PricedLevel(mode.level, file.kl or 0.0, file.bits, found.sizes(mode.level)),)
        if mode.kind == "cachegen":
            deadline = time.monotonic() + local_seconds
            ladder: LevelLadder = DeadlineLadder(levels, found.cells, math.inf, local_seconds, deadline=deadline)
        else:
            ladder = LevelLadder(levels, found.cells, KL_BUDGET, local_seconds)
        return OriginSlices(origin, found, ladder, left_coded=self.left_coded)

    def _near(self, sequence: EngineSequence, logits: Logits) -> tuple[float, float]:
        """KL and top-1 agreement with the full computation, along its own reply."""
        forced = self._reply[:FORCED_TOKENS]
        (found,) = self._engine.step([Row.following(sequence, forced, logits="all")])
        return divergence(self._expected, log_softmax(np.concatenate([logits[-1:], found])))
