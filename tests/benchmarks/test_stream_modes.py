"""The ways of `python -m benchmarks stream`: no cell is left out, and answers are equal where nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.streaming import all_stream
from benchmarks.quality import FORCED_TOKENS
from benchmarks.stream import costs as stream_costs
from benchmarks.stream.modes import MODES, QUICK_MODES, Given, Meeting, StreamMode
from benchmarks.stream.site import ContextSetup, Site
from benchmarks.stream.traces import Trace
from benchmarks.waiting.timeline import LinkCosts, owners, start
from rekindle.core.cells import Cell, Progress
from rekindle.engine.fake import FakeEngine
from rekindle.remote.latency import MIN_BANDWIDTH

CHUNKS, LAYERS = 5, 3
CONTEXT, QUESTION = 300, 10  # the last chunk is shorter


def costs(bandwidth: float = 1e3) -> LinkCosts:
    ones = np.ones((CHUNKS, LAYERS))
    return LinkCosts(ones, ones / 5, ones * 1e3, np.ones(LAYERS), bandwidth)


@given(computed=st.integers(0, CHUNKS), came=st.integers(0, CHUNKS * LAYERS), flying=st.integers(0, 4))
def test_who_meets_leaves_no_cell_out_and_takes_none_twice(computed: int, came: int, flying: int) -> None:
    back = [Cell(chunk, layer) for chunk in reversed(range(computed, CHUNKS)) for layer in range(LAYERS)]
    progress = Progress(
        (LAYERS,) * computed + (0,) * (CHUNKS - computed), frozenset(back[:came]), tuple(back[came : came + flying])
    )
    steering = Meeting(costs())
    schedule = steering.revise(steering.begin(costs(), start(CHUNKS)), progress, costs())
    assert (owners(schedule, progress) == 1).all()
    free = [chunk for chunk in range(computed, CHUNKS) if not any(c.chunk == chunk for c in back[: came + flying])]
    assert schedule.split.computed.count(LAYERS) == computed + bool(free)  # the next one, if the link has not begun it
    assert list(schedule.order)[:1] in ([], back[came + flying : came + flying + 1])


def test_a_given_schedule_is_changed_by_a_dead_link_alone() -> None:
    given_one = all_stream(costs())
    steering, begun = Given(given_one), start(CHUNKS)
    assert steering.begin(costs(), start(CHUNKS)) is given_one
    assert steering.revise(given_one, begun, costs(0.1 + MIN_BANDWIDTH)) is given_one
    assert steering.revise(given_one, begun, costs(MIN_BANDWIDTH)).split.computed == (LAYERS,) * CHUNKS


def test_a_quick_run_has_every_kind_that_a_bar_is_about() -> None:
    names = {mode.name for mode in QUICK_MODES}
    assert names == {"local", "plain", "stream q5", "fixed", "bidirectional", "ours q5", "ours"}
    assert names < {mode.name for mode in MODES}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    engine = FakeEngine()
    tokens = tuple(3 + (7 * place) % 50 for place in range(CONTEXT + QUESTION))
    setting = ContextSetup(engine, tokens, CONTEXT)
    with Site(setting, tmp_path_factory.mktemp("origin"), ["raw", "q5"]) as made:
        made.learn(stream_costs.measure(engine, tokens, True, 1, 0, lambda _: None))
        yield made
    engine.close()


@pytest.mark.parametrize("kind", list(dict.fromkeys(mode.kind for mode in MODES)))
def test_every_way_gives_the_same_answers_where_nothing_is_lost(site: Site, kind: str) -> None:
    level = None if kind in ("local", "plain") else "raw"
    run = site.run(StreamMode(kind, level), steady(2e6), 10.0, 1.0)  # type: ignore[arg-type]
    assert run.failed is None and run.kl == pytest.approx(0.0, abs=1e-9) and run.top1 == 1.0
    assert (run.bytes > 0) == (level is not None)
    assert 0.0 <= run.streamed_share <= 1.0 and run.ttft_s > run.question_s


def test_what_is_streamed_counts_and_costs_quality_where_something_is_lost(site: Site) -> None:
    raw, coded = (site.run(StreamMode("stream", level), steady(2e6), 10.0, 1.0) for level in ("raw", "q5"))
    assert raw.streamed_share == coded.streamed_share == 1.0
    assert coded.bytes < raw.bytes and coded.kl > raw.kl
    for run, level in ((raw, "raw"), (coded, "q5")):
        assert run.bytes >= site.sizes(level).sum()
        came = {(event.chunk, event.first_layer) for event in run.events if event.lane == "link"}
        assert len(came) == site.sizes(level).size


def test_ours_looks_no_longer_for_a_context_than_a_session_would(site: Site) -> None:
    silent = Trace("silent", np.array([1000.0, 1.0]), np.array([0.0, 1e6]))
    run = site.run(StreamMode("ours", "raw"), silent, 2.0, 1.0)
    assert run.failed is not None and run.streamed_share == 0 and run.kl == pytest.approx(0.0, abs=1e-9)


def test_quality_is_judged_on_enough_positions() -> None:
    assert FORCED_TOKENS >= 16


def steady(rate: float) -> Trace:
    return Trace("steady", np.ones(1), np.full(1, rate))
