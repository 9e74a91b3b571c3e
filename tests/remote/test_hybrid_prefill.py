"""A prompt that is computed and streamed at once: the same logits as computed alone, whatever the link does."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines.streaming import Steered, SteeredByToken, Steering, steered
from benchmarks.stream.modes import Given
from benchmarks.waiting.timeline import LinkCosts, order_of
from rekindle.core.cells import Cell, CellGrid, Schedule, Split
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.engine.base import Engine, Logits, Row, StayingFeed
from rekindle.engine.fake import FakeEngine
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import Cancelled, KvLost, StepRefused
from rekindle.remote.hybrid_prefill import HybridPrefill
from rekindle.remote.latency import Bandwidth
from rekindle.remote.schedule import StreamCosts
from rekindle.remote.transfer_queue import TransferQueue
from tests.engine.contract import Stored
from tests.parity.engines import make
from tests.server.serving import eventually
from tests.tiny import byte_tokenizer, tiny_engine, tiny_model

CHUNK, CHUNKS, QUESTION = 16, 5, 7
SLICE_BYTES = 1000


class Carrier:
    """Brings KV that was computed before, each slice after a while; or no more, from some slice on."""

    def __init__(
        self, kv: Kv, cells: CellGrid, waits: Sequence[float] = (0.0,), most: int | None = None, hang: bool = False
    ) -> None:
        """`waits` are taken in turns."""
        self._kv, self._cells, self._waits, self._most, self._hang = kv, cells, itertools.cycle(waits), most, hang
        self._cancelled = threading.Event()
        self.hangs = threading.Event()
        self.sizes = np.full((cells.chunks, cells.layers), SLICE_BYTES)
        self.brought: list[Cell] = []

    def carry(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, LayerKv]]:
        for cell in cells:
            if self._most is not None and len(self.brought) >= self._most:
                if self._hang:
                    self.hangs.set()
                    self._cancelled.wait()
                    raise Cancelled("The transfer was cancelled.")
                raise KvLost("The origin is gone.")
            self._cancelled.wait(next(self._waits))
            if self._cancelled.is_set():
                raise Cancelled("The transfer was cancelled.")
            span, layer = self._cells.span(cell.chunk), self._kv.layers[cell.layer]
            self.brought.append(cell)
            yield cell, LayerKv(layer.keys[:, span.start : span.stop], layer.values[:, span.start : span.stop])

    def adapt(self, left: Sequence[Cell], bytes_per_second: float | None, pace: float) -> None: ...

    def cancel(self) -> None:
        self._cancelled.set()


class Prompt:
    """A prompt whose beginning is published, and what computing it alone gives."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.layers = len(engine.layout.layers)
        self.cells = CellGrid(CHUNK * CHUNKS - 5, self.layers, CHUNK)  # the last chunk is shorter
        self.tokens = [3 + (7 * choose_placement) % 50 for choose_placement in range(self.cells.tokens + QUESTION)]
        sequence = engine.open(len(self.tokens), engine.regime(len(self.tokens)))
        self.logits = self._alone(sequence)
        self.kv = sequence.export(Span(0, len(self.tokens)))
        sequence.close()

    def _alone(self, sequence: Any) -> Logits:
        for span in self.cells.spans:
            self.engine.step([Row.following(sequence, self.tokens[span.start : span.stop], logits="none")])
        return self.engine.step([Row.following(sequence, self.tokens[self.cells.tokens :])])[0]

    def costs(self, compute: float = 1.0, top: float = 0.2) -> StreamCosts:
        shape = (self.cells.chunks, self.layers)
        return LinkCosts(
            np.full(shape, compute * 1e-3),
            np.full(shape, top * 1e-3),
            np.full(shape, float(SLICE_BYTES)),
            np.full(self.layers, 1e-4),
            bandwidth=1.0,
        )


def run(
    prompt: Prompt,
    carrier: Carrier,
    costs: StreamCosts | None = None,
    steering: Steering | None = None,
    here: int = 0,
    after_link: bool = False,
    prefill: type[Steered] | None = None,
) -> tuple[Logits, Kv, HybridPrefill]:
    """Stream and compute it, its first chunks being `here`; all but the first step after what the link can bring."""
    engine, tokens = prompt.engine, prompt.tokens
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    if here:
        engine.step([Row.following(sequence, tokens[: here * CHUNK], logits="none")])
    link = TransferQueue(carrier)
    streaming = (prefill or steered(engine))(engine, sequence, tokens, prompt.cells, link, costs or prompt.costs())
    streaming.steering = steering
    try:
        with pytest.MonkeyPatch.context() as patch:
            if after_link:
                steps = itertools.count()

                def step(*given: Any) -> list[Logits]:
                    if next(steps):
                        eventually(lambda: link.failed or carrier.hangs.is_set() or not (link._wanted or link._flying))
                    return type(engine).step(engine, *given)

                patch.setattr(engine, "step", step)
            logits = streaming.run()
        assert sequence.length == len(tokens)
        return logits, sequence.export(Span(0, len(tokens))), streaming
    finally:
        link.close()
        sequence.close()


CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


BY_LAYER = ["fake", "llama", "mistral", "gemma3_text", "qwen3", pytest.param("cuda", marks=CUDA)]
BY_TOKEN = ["llamacpp", "llamacpp-f32", "llamacpp-q8", "llamacpp-sliding"]
by_layer = pytest.mark.parametrize("prompt", BY_LAYER, indirect=True)


@pytest.fixture(scope="module", params=[*BY_LAYER, *BY_TOKEN])
def prompt(request: pytest.FixtureRequest) -> Iterator[Prompt]:
    engine: Engine
    if request.param in BY_TOKEN:
        engine = make(request.param)
    elif request.param == "fake":
        engine = FakeEngine()
    elif request.param == "cuda":
        placement = choose_placement("cuda", "float32")
        model = tiny_model("llama").to(placement.device, placement.dtype)
        engine = HfEngine(model, byte_tokenizer(), name="llama", placement=placement)
    else:
        engine = tiny_engine(request.param)
    yield Prompt(engine)
    engine.close()


def assert_same(prompt: Prompt, logits: Logits, kv: Kv) -> None:
    exact = isinstance(prompt.engine, FakeEngine) or not prompt.engine.capabilities.layer_feeds
    tolerance = 0.0 if exact else 1e-4
    np.testing.assert_allclose(logits, prompt.logits, rtol=0, atol=tolerance)
    for got, expected in zip(kv.layers, prompt.kv.layers, strict=True):
        np.testing.assert_allclose(got.keys, expected.keys, rtol=0, atol=tolerance)
        np.testing.assert_allclose(got.values, expected.values, rtol=0, atol=tolerance)


def test_a_fast_link_brings_nearly_all(prompt: Prompt) -> None:
    logits, kv, streaming = run(prompt, Carrier(prompt.kv, prompt.cells), after_link=True)
    assert_same(prompt, logits, kv)
    told = streaming.report
    assert len(told.streamed_cells) >= 0.5 * prompt.cells.chunks * prompt.layers and told.failed is None
    assert len(told.streamed_cells) + sum(told.computed) == prompt.cells.chunks * prompt.layers


def test_a_slow_link_is_not_waited_for(prompt: Prompt) -> None:
    logits, kv, streaming = run(prompt, Carrier(prompt.kv, prompt.cells, waits=[30.0]))
    assert_same(prompt, logits, kv)
    assert streaming.report.computed == (prompt.layers,) * prompt.cells.chunks and not streaming.report.streamed_cells


@pytest.mark.parametrize("most", [0, 1, 3, 7])
@pytest.mark.parametrize("hang", [True, False])
def test_an_origin_that_dies_or_hangs_costs_no_answer(prompt: Prompt, most: int, hang: bool) -> None:
    carrier = Carrier(prompt.kv, prompt.cells, most=most, hang=hang)
    logits, kv, streaming = run(prompt, carrier, after_link=True)
    assert_same(prompt, logits, kv)
    assert len(streaming.report.streamed_cells) <= most
    assert hang or (streaming.report.failed is None) == (most >= prompt.cells.chunks * prompt.layers)


@settings(max_examples=40)
@given(
    splits=st.lists(st.integers(0, 4), min_size=CHUNKS, max_size=CHUNKS),
    order=st.randoms(use_true_random=False),
)
def test_any_split_gives_the_logits_of_computing_alone(splits: list[int], order: Any) -> None:
    """Whatever is computed and streamed, in whatever order it comes: not by schedule, step by step."""
    prompt = _fake_prompt()
    layers = prompt.layers
    computed = [min(layers, count) for count in splits]
    missing = [Cell(t, layer) for t in range(CHUNKS) for layer in range(computed[t], layers)]
    order.shuffle(missing)
    schedule = Schedule(Split(layers, tuple(computed)), order_of(layers, missing), 0.0)
    logits, kv, streaming = run(prompt, Carrier(prompt.kv, prompt.cells), steering=Given(schedule))
    assert_same(prompt, logits, kv)
    assert streaming.report.computed == tuple(computed) and len(streaming.report.streamed_cells) == len(missing)


@by_layer
def test_what_stays_between_what_comes_is_not_overwritten(prompt: Prompt) -> None:
    """On a device what comes for a layer may land in one copy, with what lies between."""
    layers = prompt.layers
    computed = (layers, 0, min(2, layers), 0, min(3, layers))
    missing = [Cell(chunk, layer) for chunk, count in enumerate(computed) for layer in range(count, layers)]
    schedule = Schedule(Split(layers, computed), order_of(layers, missing), 0.0)
    logits, kv, _ = run(prompt, Carrier(prompt.kv, prompt.cells), steering=Given(schedule))
    assert_same(prompt, logits, kv)


@settings(max_examples=40)
@given(waits=st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.02]), min_size=1, max_size=8), here=st.integers(0, 3))
def test_both_lanes_meet_whatever_the_link_does(waits: list[float], here: int) -> None:
    """However fast each slice comes, every chunk is computed at most once, but for its lowest layer alone."""
    prompt = _fake_prompt()
    carrier = Carrier(prompt.kv, prompt.cells, waits=waits)
    logits, kv, streaming = run(prompt, carrier, prompt.costs(compute=0.1, top=0.02), here=here)
    assert_same(prompt, logits, kv)
    told = streaming.report
    assert told.computed[:here] == (prompt.layers,) * here
    assert len(told.streamed_cells) + sum(told.computed) == prompt.cells.chunks * prompt.layers
    deep = [event.chunk for event in told.events if event.lane == "compute" and event.stop_layer > 1]
    assert len(set(deep)) == len(deep) and min(deep) >= here


@settings(max_examples=40)
@given(waits=st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.02]), min_size=1, max_size=8), here=st.integers(0, 3))
def test_by_token_every_chunk_is_computed_once_or_comes_whole(waits: list[float], here: int) -> None:
    prompt = _fake_prompt()
    carrier = Carrier(prompt.kv, prompt.cells, waits=waits)
    logits, kv, streaming = run(prompt, carrier, prompt.costs(compute=0.1), here=here, prefill=SteeredByToken)
    assert_same(prompt, logits, kv)
    told = streaming.report
    assert told.computed[:here] == (prompt.layers,) * here and set(told.computed) <= {0, prompt.layers}
    assert len(told.streamed_cells) + sum(told.computed) == prompt.cells.chunks * prompt.layers


@pytest.mark.parametrize("prompt", ["fake", "llamacpp"], indirect=True)
def test_by_token_a_step_is_given_up_once_all_has_arrived(prompt: Prompt) -> None:
    engine, tokens, steps = prompt.engine, prompt.tokens, list[str]()
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    carrier = Carrier(prompt.kv, prompt.cells)
    link = TransferQueue(carrier)
    everything = prompt.cells.chunks * prompt.layers

    def step(rows: Any, cancelled: Any = None) -> list[Logits]:
        if len(carrier.brought) < everything:  # the first one: while it runs, everything comes
            link.want(Cell(chunk, layer) for chunk in range(prompt.cells.chunks) for layer in range(prompt.layers))
            eventually(lambda: len(link.arrived) == everything)
        try:
            done = type(engine).step(engine, rows, cancelled)
        except Cancelled:
            steps.append("given up")
            raise
        steps.append("done")
        return done

    streaming = SteeredByToken(engine, sequence, tokens, prompt.cells, link, prompt.costs(compute=1e-9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", step)
        logits = streaming.run()
    assert steps == ["given up", "done"] and set(streaming.report.computed) == {0}
    assert_same(prompt, logits, sequence.export(Span(0, len(tokens))))
    sequence.close()


@pytest.mark.parametrize("prefill", [Steered, SteeredByToken])
def test_the_first_step_is_short_because_the_machine_may_be_busy(prefill: type[Steered]) -> None:
    prompt, lengths = _fake_prompt(), list[int]()
    engine, tokens = prompt.engine, prompt.tokens
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    link = TransferQueue(Carrier(prompt.kv, prompt.cells, most=0, hang=True), Bandwidth(1.0))

    def step(rows: Any, cancelled: Any = None) -> list[Logits]:
        lengths.extend(len(row.tokens) for row in rows)
        return type(engine).step(engine, rows, cancelled)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", step)
        prefill(engine, sequence, tokens, prompt.cells, link, prompt.costs(compute=1e-6)).run()
    assert lengths[0] == CHUNK < lengths[1] and link.pace > 1  # it took longer than expected
    sequence.close()


@pytest.mark.parametrize(("long", "measured"), [(0.0, True), (1e9, False)])
def test_a_link_that_brought_nothing_for_long_counts_as_slow(
    long: float, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would be measured otherwise, and the next prompt would try again."""
    monkeypatch.setattr("rekindle.remote.transfer_queue.AT_A_TIME_SECONDS", long)
    prompt, bandwidth = _fake_prompt(), Bandwidth()
    carrier = Carrier(prompt.kv, prompt.cells, most=0, hang=True)
    link = TransferQueue(carrier, bandwidth)
    link.want(Cell(0, layer) for layer in range(prompt.cells.layers))
    assert carrier.hangs.wait(60.0)
    link.close()
    known = bandwidth.bytes_per_second()
    link.close()
    assert (known is not None) == measured
    assert bandwidth.bytes_per_second() == known


@by_layer
def test_a_step_ends_at_the_layer_where_it_is_told(prompt: Prompt) -> None:
    engine, tokens, span = prompt.engine, prompt.tokens, prompt.cells.span(0)
    sequence, asked = engine.open(len(tokens), engine.regime(len(tokens))), []

    def enough(layer: int) -> bool:
        asked.append(layer)
        return layer == 1

    row = Row.following(sequence, tokens[: span.stop], logits="none")
    engine.step([replace(row, until=prompt.layers, enough=enough)])
    assert asked == [0, 1] and sequence.length == 0
    rest = Stored(prompt.kv, span, range(2, prompt.layers))
    at = np.arange(span.stop, len(tokens))
    row = Row(sequence, tokens[span.stop :], at, feeds=(StayingFeed(span, range(2)), rest))
    (logits,) = engine.step([row])
    assert_same(prompt, logits, sequence.export(Span(0, len(tokens))))
    with pytest.raises(StepRefused, match="may end sooner"):
        engine.step([replace(Row.following(sequence, [1]), enough=enough)])
    sequence.close()


def test_chunks_that_are_here_must_be_whole() -> None:
    prompt = _fake_prompt()
    for length in (1, CHUNK + 1, prompt.cells.tokens):
        sequence = prompt.engine.open(len(prompt.tokens), prompt.engine.regime(len(prompt.tokens)))
        prompt.engine.step([Row.following(sequence, prompt.tokens[:length], logits="none")])
        with pytest.raises(ValueError, match="not some of the first chunks"):
            HybridPrefill(prompt.engine, sequence, prompt.tokens, prompt.cells, None, prompt.costs())  # type: ignore[arg-type]
        sequence.close()


_PROMPTS: dict[str, Prompt] = {}


def _fake_prompt() -> Prompt:
    return _PROMPTS.setdefault("fake", Prompt(FakeEngine()))


def test_it_can_be_cancelled_while_it_waits(prompt: Prompt) -> None:
    engine, tokens = prompt.engine, prompt.tokens
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    link = TransferQueue(Carrier(prompt.kv, prompt.cells, most=0, hang=True))
    asked = iter([False] * 3)
    costs = prompt.costs(compute=1e9, top=1e9)  # computing is out of the question
    streaming = steered(engine)(engine, sequence, tokens, prompt.cells, link, costs, lambda: next(asked, True))
    try:
        with pytest.raises(Cancelled):
            streaming.run()
    finally:
        link.close()
        sequence.close()


def test_the_last_token_is_always_computed(prompt: Prompt) -> None:
    whole = CellGrid(len(prompt.tokens), prompt.layers, CHUNK)
    with pytest.raises(ValueError, match="must be computed"):
        HybridPrefill(prompt.engine, None, prompt.tokens, whole, None, prompt.costs())  # type: ignore[arg-type]
