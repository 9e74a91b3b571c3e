"""Laws of computing and streaming: pure functions, driven at random."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines.streaming import all_compute, all_stream, fixed
from benchmarks.waiting.revise import revise
from benchmarks.waiting.schedule import bidirectional, greedy
from benchmarks.waiting.timeline import LinkCosts, SearchTask, Timeline, mask_of, order_of, owners, simulate
from rekindle.core.cells import Cell, Progress, Schedule, Split, TransferOrder
from tests.benchmarks.streams import KINDS, slow_seconds, some_costs

ROUNDING = 1 + 1e-9


@st.composite
def any_costs(draw: st.DrawFn, decoding: bool = True) -> LinkCosts:
    kind, seed = draw(st.sampled_from(KINDS)), draw(st.integers(0, 10_000))
    costs = some_costs(kind, seed, draw(st.integers(1, 9)), draw(st.integers(1, 7)))
    costs = costs.at(costs.bandwidth * draw(st.sampled_from([1e-4, 0.1, 0.5, 1.0, 2.0, 10.0, 1e4])))
    if not decoding:
        return costs
    usual = float(costs.link_seconds.mean())
    decode = draw(st.sampled_from([0.0, 0.1, 3.0])) * usual / float(costs.size_bytes.mean())
    return replace(
        costs, decode_seconds_per_byte=decode, request_seconds=draw(st.sampled_from([0.0, 0.1, 5.0])) * usual
    )


@st.composite
def any_progress(draw: st.DrawFn, costs: LinkCosts) -> Progress:
    """Some steps are over, anywhere, some cells came and some fly, whether that makes sense or not."""
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    done = random.integers(0, costs.layers + 1, costs.chunks) * (random.random(costs.chunks) < random.random())
    cells = [
        Cell(chunk, layer)
        for chunk, computed in enumerate(done)
        for layer in range(int(computed), costs.layers)
        if random.random() < 0.4
    ]
    flying = random.integers(0, min(2, len(cells)) + 1)
    busy = float(random.random()), float(random.random()) if flying else 0.0
    return Progress(tuple(done.tolist()), frozenset(cells[flying:]), tuple(cells[:flying]), *busy)


def without(order: TransferOrder, cells: Iterable[Cell]) -> TransferOrder:
    """The same order, less some cells."""
    gone = set(cells)
    return order_of(order.layers, (cell for cell in order if cell not in gone))


def after_step(schedule: Schedule, timeline: Timeline, chunk: int) -> tuple[Progress, float]:
    """Where the simulated run stands when the step of a chunk is over, and when that is."""
    now = float(np.nanmax(timeline.compute_stop[chunk]))
    done = tuple(count if number <= chunk else 0 for number, count in enumerate(schedule.split.computed))
    arrived = frozenset(cell for cell in schedule.order if timeline.ready[cell] <= now)
    flying = tuple(cell for cell in schedule.order if timeline.link_start[cell] < now < timeline.link_stop[cell])
    busy = max((float(timeline.link_stop[cell]) for cell in flying), default=now) - now
    return Progress(done, arrived, flying, 0.0, busy), now


@given(any_costs())
def test_every_cell_is_provided_for_once(costs: LinkCosts) -> None:
    for make in (greedy, all_compute, all_stream, bidirectional, lambda c: fixed(c, 2 * c.bandwidth)):
        assert (owners(make(costs)) == 1).all()


@given(st.data())
def test_a_simulation_is_what_a_plain_one_says(data: st.DataObject) -> None:
    costs = data.draw(any_costs())
    progress = data.draw(any_progress(costs))
    least = st.tuples(*(st.integers(done, costs.layers) for done in progress.computed))
    split = Split(costs.layers, data.draw(least))
    brought = progress.brought(costs.layers)
    order = TransferOrder(
        costs.layers, tuple(data.draw(st.permutations(np.flatnonzero(~mask_of(split) & ~brought).tolist())))
    )
    timeline = simulate(split, order, costs, progress)
    assert timeline.seconds == pytest.approx(slow_seconds(split, order, costs, progress))


@given(st.data())
def test_an_estimate_is_what_the_order_of_the_need_takes(data: st.DataObject) -> None:
    costs = data.draw(any_costs(decoding=False))
    progress = data.draw(any_progress(costs))
    task = SearchTask.of(costs, progress)
    splits = [
        Split(costs.layers, data.draw(st.tuples(*(st.integers(done, costs.layers) for done in progress.computed))))
        for _ in range(3)
    ]
    depths = [task.depths(split) for split in splits]
    expected = [task.schedule(depth).seconds for depth in depths]
    assert task.estimate(np.stack(depths)) == pytest.approx(expected)


@given(any_costs())
def test_ours_is_never_later_than_computing_streaming_or_meeting_in_the_middle(costs: LinkCosts) -> None:
    rivals = all_compute(costs), all_stream(costs), bidirectional(costs)
    assert greedy(costs).seconds <= min(rival.seconds for rival in rivals) * ROUNDING


@given(st.data())
def test_the_same_holds_in_the_middle_of_a_run(data: st.DataObject) -> None:
    costs = data.draw(any_costs())
    progress = data.draw(any_progress(costs))
    ours = greedy(costs, progress)
    assert (owners(ours, progress) == 1).all()
    assert ours.seconds <= all_compute(costs, progress).seconds * ROUNDING
    assert ours.seconds <= all_stream(costs, progress).seconds * ROUNDING


@given(any_costs(), st.floats(1.0, 100.0))
def test_a_schedule_is_not_later_over_a_faster_link(costs: LinkCosts, faster: float) -> None:
    schedule = greedy(costs)
    over = simulate(schedule.split, schedule.order, costs.at(costs.bandwidth * faster))
    assert over.seconds <= schedule.seconds * ROUNDING


@given(any_costs(decoding=False), st.floats(1.0, 100.0))
def test_a_faster_link_does_not_lead_to_a_later_schedule(costs: LinkCosts, faster: float) -> None:
    """Ours is a heuristic: it may miss a little on one of the two links."""
    assert greedy(costs.at(costs.bandwidth * faster)).seconds <= greedy(costs).seconds * 1.1


@given(st.data())
def test_a_revision_touches_nothing_that_is_done_or_under_way(data: st.DataObject) -> None:
    costs = data.draw(any_costs())
    schedule = greedy(costs)
    begun = data.draw(st.integers(0, costs.chunks))
    random = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    cells = [cell for cell in schedule.order if random.random() < 0.5]
    flying = cells[:1]
    progress = Progress(
        (*schedule.split.computed[:begun], *(0,) * (costs.chunks - begun)), frozenset(cells[1:]), tuple(flying)
    )
    now = costs.at(costs.bandwidth * data.draw(st.sampled_from([1e-9, 0.2, 0.5, 1.0, 2.0, 5.0])))
    max_count = data.draw(st.integers(1, 12))
    revised = revise(schedule, progress, now, max_count)

    assert (owners(revised, progress) == 1).all()
    assert not set(cells) & set(revised.order)
    assert all(new >= done for new, done in zip(revised.split.computed, progress.computed, strict=True))
    left = without(schedule.order, cells)
    kept = simulate(schedule.split, left, now, progress).seconds
    assert revised.seconds <= kept * ROUNDING
    moved = set(left.numbers) ^ set(revised.order.numbers)
    assert len(moved) <= max_count or not revised.order.numbers


@given(any_costs(decoding=False), st.integers(0, 8))
def test_a_revision_after_no_surprise_keeps_the_end(costs: LinkCosts, chunk: int) -> None:
    schedule = greedy(costs)
    begun = [number for number, count in enumerate(schedule.split.computed) if count]
    if not begun:
        return
    timeline = simulate(schedule.split, schedule.order, costs)
    progress, now = after_step(schedule, timeline, begun[chunk % len(begun)])
    revised = revise(schedule, progress, costs)
    assert now + revised.seconds <= schedule.seconds * ROUNDING + 1e-9
    unchanged = revised.order == without(schedule.order, [*progress.arrived, *progress.flying])
    assert unchanged or revised.seconds < (schedule.seconds - now) * 0.98 * ROUNDING


@given(st.data())
def test_a_link_that_dies_at_any_moment_leaves_a_run_that_ends(data: st.DataObject) -> None:
    costs = data.draw(any_costs())
    progress = data.draw(any_progress(costs))
    schedule = greedy(costs, progress)
    given_up = replace(progress, flying=())
    dead = revise(schedule, given_up, costs.at(1e-9 * costs.bandwidth), 1)
    assert not dead.order.numbers
    assert (owners(dead, given_up) == 1).all()
    assert dead.seconds <= all_compute(costs, given_up).seconds * ROUNDING


@settings(max_examples=50)
@given(any_costs(decoding=False))
def test_a_run_whose_link_dies_after_any_step_costs_no_more_than_that_step_and_all_steps(costs: LinkCosts) -> None:
    """What was computed before is computed at most once more."""
    schedule = greedy(costs)
    timeline = simulate(schedule.split, schedule.order, costs)
    for chunk in np.flatnonzero(schedule.split.computed):
        progress, now = after_step(schedule, timeline, int(chunk))
        dead = revise(schedule, replace(progress, flying=(), link_busy_seconds=0.0), costs.at(1e-9 * costs.bandwidth))
        assert now + dead.seconds <= (now + all_compute(costs).seconds) * ROUNDING
