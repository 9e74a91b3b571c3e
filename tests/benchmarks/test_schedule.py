"""Computing and streaming: what happens when, and which schedules are chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.baselines.streaming import all_compute, all_stream, fixed
from benchmarks.waiting.revise import revise
from benchmarks.waiting.schedule import bidirectional, greedy
from benchmarks.waiting.timeline import mask_of, owners, simulate, start
from rekindle.core.cells import Cell, Progress, Schedule, Split, TransferOrder
from tests.benchmarks.streams import order_of, plain_costs, slow_seconds, some_costs, split_of


def test_a_step_costs_its_whole_layers_and_two_projections() -> None:
    costs = plain_costs(1, 4)
    assert simulate(split_of(4, 4), order_of(4), costs).seconds == 3.25
    assert costs.depth_seconds.tolist() == [[0.0, 0.25, 1.25, 2.25, 3.25]]


def test_the_top_layer_of_a_step_waits_for_nobody() -> None:
    streamed = [(0, layer) for layer in range(3)]
    timeline = simulate(split_of(3, 0, 1), order_of(3, *streamed, (1, 1), (1, 2)), plain_costs(2, 3))
    assert timeline.compute_stop[1, 0] == 0.25


def test_a_whole_layer_waits_for_that_layer_of_all_earlier_chunks() -> None:
    order = order_of(3, (0, 0), (0, 1), (0, 2), (1, 2))
    timeline = simulate(split_of(3, 0, 2), order, plain_costs(2, 3))
    # Layer 0 of chunk 0 is there after a second; the top layer needs only what layer 0 made.
    assert timeline.compute_start[1].tolist()[:2] == [1.0, 2.0]
    assert timeline.compute_stop[1].tolist()[:2] == [2.0, 2.25]
    assert np.isnan(timeline.compute_start[1, 2])
    assert timeline.seconds == 4.0


def test_the_question_goes_up_as_layers_arrive() -> None:
    costs = plain_costs(1, 3, question_seconds=np.full(3, 2.0))
    rising = simulate(split_of(3, 0), order_of(3, (0, 0), (0, 1), (0, 2)), costs)
    assert rising.compute_start[1].tolist() == [1.0, 3.0, 5.0]
    falling = simulate(split_of(3, 0), order_of(3, (0, 2), (0, 1), (0, 0)), costs)
    assert falling.compute_start[1].tolist() == [3.0, 5.0, 7.0]


def test_decoding_overlaps_with_the_next_slice() -> None:
    costs = plain_costs(1, 3, decode_seconds_per_byte=0.005, request_seconds=0.5)
    timeline = simulate(split_of(3, 0), order_of(3, (0, 0), (0, 1), (0, 2)), costs)
    assert timeline.link_stop[0].tolist() == [1.5, 3.0, 4.5]
    assert timeline.ready[0].tolist() == [2.0, 3.5, 5.0]


@pytest.mark.parametrize("order", [[], [(0, 1), (1, 0)], [(1, 0), (1, 1), (0, 0)]])
def test_an_order_that_is_not_what_is_left_is_refused(order: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="left to stream"):
        simulate(split_of(2, 2, 0), order_of(2, *order), plain_costs(2, 2))


def test_a_split_cannot_take_back_what_was_computed() -> None:
    with pytest.raises(ValueError, match="takes back"):
        simulate(split_of(2, 1, 0), order_of(2, (1, 0), (1, 1)), plain_costs(2, 2), Progress((2, 0)))


def test_a_chunk_that_goes_on_after_its_step_is_computed_from_the_bottom() -> None:
    progress = Progress((2,), compute_busy_seconds=1.0)
    assert simulate(split_of(4, 4), order_of(4), plain_costs(1, 4), progress).seconds == 1.0 + 3.25


@pytest.mark.parametrize(
    "changed", [{"bandwidth": 0.0}, {"question_seconds": np.zeros(3)}, {"top_seconds": np.ones(2)}]
)
def test_costs_that_do_not_fit_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        plain_costs(2, 2, **changed)


def test_rivals_take_whole_chunks() -> None:
    costs = plain_costs(6, 4)
    assert set(all_compute(costs).split.computed) == {4}
    assert set(all_stream(costs).split.computed) == {0}
    met = bidirectional(costs)
    assert met.split.computed == (4, 4, 4, 0, 0, 0)
    assert [cell.chunk for cell in met.order] == [5] * 4 + [4] * 4 + [3] * 4
    assert met.seconds == 12.0
    assert bidirectional(costs.at(50.0)).split.computed == (4, 4, 4, 4, 0, 0)
    assert fixed(costs, 100.0).split.computed == (4, 4, 4, 0, 0, 0)
    slow = fixed(costs.at(50.0), 100.0)  # planned for twice as much
    assert slow.split.computed == (4, 4, 4, 0, 0, 0)
    assert slow.seconds == 24.0


def test_front_chunks_are_computed_and_back_ones_streamed_from_the_back() -> None:
    growing = np.ones((8, 6)) * (1 + np.arange(8) / 4)[:, None]
    schedule = greedy(plain_costs(8, 6, compute_seconds=growing, top_seconds=growing / 8))
    computed = schedule.split.computed
    assert list(computed) == sorted(computed, reverse=True)
    assert computed[0] == 6
    assert schedule.order.numbers == tuple(sorted(schedule.order.numbers, reverse=True))


def test_a_shape_in_which_nobody_waits_is_kept_where_others_are_hardly_sooner() -> None:
    for seed in range(6):
        computed = greedy(some_costs("alike", seed, 12, 16)).split.computed
        assert list(computed) == sorted(computed, reverse=True)
        assert sum(1 < count < 16 for count in computed) <= 1


def test_a_cheap_chunk_far_back_is_computed_before_a_costly_one_in_front() -> None:
    compute = np.full((5, 6), 4.0)
    compute[4] = 0.25  # of another context, say: sparse attention leaves nearly everything out
    size = np.full((5, 6), 100.0)
    size[4] = 1000.0
    costs = plain_costs(5, 6, compute_seconds=compute, top_seconds=compute / 8, size_bytes=size)
    schedule = greedy(costs)
    assert schedule.split.computed[4] == 6
    assert schedule.split.computed[3] < 6
    assert schedule.seconds < 0.75 * bidirectional(costs).seconds


def test_the_order_puts_what_the_question_needs_first_only_where_that_is_sooner() -> None:
    costs = plain_costs(3, 4, compute_seconds=np.full((3, 4), 50.0), top_seconds=np.full((3, 4), 50.0))
    assert next(iter(greedy(costs).order)) == Cell(2, 3)
    asked = replace(costs, question_seconds=np.full(4, 3.0))
    schedule = greedy(asked)
    assert schedule.seconds == 15.0  # no wait but for layer 0
    assert {cell.layer for cell in list(schedule.order)[:3]} == {0}


def test_a_dead_link_leaves_everything_to_be_computed() -> None:
    costs = plain_costs(6, 4)
    schedule = greedy(costs)
    progress = Progress((schedule.split.computed[0], *(0,) * 5))
    dead = revise(schedule, progress, costs.at(1e-3), max_cells=1)
    assert not dead.order.numbers
    assert set(dead.split.computed) == {4}
    assert dead.seconds == pytest.approx(costs.depth_seconds[1:, -1].sum())


def test_a_chunk_whose_hidden_state_is_gone_is_computed_again_when_the_link_dies() -> None:
    costs = plain_costs(3, 4)
    schedule = replace(greedy(costs), split=split_of(4, 2, 4, 4), order=order_of(4, (0, 2), (0, 3)))
    progress = Progress((2, 0, 0), arrived=frozenset([Cell(0, 2)]))
    dead = revise(schedule, progress, costs.at(1e-3))
    assert dead.split.computed == (4, 4, 4)
    assert dead.seconds == pytest.approx(3 * 3.25)  # the first chunk once more as a whole
    assert (owners(dead, progress) == 1).all()


def test_what_was_given_up_on_its_way_has_to_come_again() -> None:
    costs = plain_costs(2, 2, compute_seconds=np.full((2, 2), 9.0), top_seconds=np.full((2, 2), 9.0))
    schedule = replace(all_stream(costs), order=order_of(2, (0, 0), (0, 1), (1, 1)))  # (1, 0) was flying
    revised = revise(schedule, start(2), costs)
    assert (owners(revised) == 1).all()
    assert list(revised.order)[-1] == Cell(1, 0)


def test_a_faster_link_takes_over_the_tail_of_the_steps() -> None:
    costs = plain_costs(8, 4)
    schedule = greedy(costs)
    progress = Progress((4, *(0,) * 7))
    revised = revise(schedule, progress, costs.at(1000.0), max_cells=6)
    less = np.asarray(schedule.split.computed) - np.asarray(revised.split.computed)
    assert 0 < less.sum() <= 6
    changed = np.flatnonzero(less)
    assert changed[-1] == np.flatnonzero(schedule.split.computed)[-1]
    assert less[0] == 0


def test_a_slower_link_gives_its_tail_to_the_steps_that_are_about_to_end() -> None:
    costs = plain_costs(8, 4)
    schedule = greedy(costs)
    assert schedule.split.computed == (4, 4, 4, 3, 1, 1, 1, 1)
    early = revise(schedule, Progress((4, *(0,) * 7)), costs.at(60.0))
    assert early.split == schedule.split  # enough to do until it is known better
    arrived = frozenset(list(schedule.order)[:4])
    progress = Progress((4, 4, 4, *(0,) * 5), arrived)
    revised = revise(schedule, progress, costs.at(40.0), max_cells=5)
    more = np.asarray(revised.split.computed) - np.asarray(schedule.split.computed)
    assert 0 < more.sum() <= 5
    gone = set(schedule.order.numbers[4:]) - set(revised.order.numbers)
    assert gone == set(schedule.order.numbers[-int(more.sum()) :])


def test_a_step_that_would_wait_for_a_slow_link_has_what_it_waits_for_computed() -> None:
    costs = plain_costs(3, 4)
    schedule = replace(all_stream(costs), split=split_of(4, 1, 4, 4), order=order_of(4, (0, 1), (0, 2), (0, 3)))
    progress = Progress((1, 0, 0))
    freed = revise(schedule, progress, costs.at(10.0))
    assert freed.split.computed[0] >= 3
    assert freed.seconds < simulate(schedule.split, schedule.order, costs.at(10.0), progress).seconds / 2


def test_what_flies_is_waited_for() -> None:
    costs = plain_costs(1, 2, question_seconds=np.ones(2))
    progress = Progress((1,), flying=(Cell(0, 1),), link_busy_seconds=5.0)
    kept = revise(replace(all_stream(costs), split=Split(2, (1,)), order=TransferOrder(2, ())), progress, costs)
    assert not kept.order.numbers
    assert kept.split.computed == (1,)
    assert kept.seconds == 6.0


@pytest.mark.parametrize("kind", ["alike", "growing", "sizes", "sparse", "contexts"])
def test_a_schedule_takes_what_a_plain_simulation_says(kind: str) -> None:
    for seed in range(6):
        costs = replace(some_costs(kind, seed, 5, 4), request_seconds=0.01, decode_seconds_per_byte=seed * 1e-6)
        for schedule in (greedy(costs), bidirectional(costs), all_stream(costs), all_compute(costs)):
            assert slow_seconds(schedule.split, schedule.order, costs) == pytest.approx(schedule.seconds)


def test_a_split_computes_the_lowest_layers() -> None:
    split = Split(3, (3, 1, 0))
    assert mask_of(split).tolist() == [[True] * 3, [True, False, False], [False] * 3]


def test_a_schedule_owns_what_came_what_is_computed_and_what_will_come() -> None:
    progress = Progress((2, 0), frozenset([Cell(1, 0)]), (Cell(1, 2),))
    schedule = Schedule(Split(3, (2, 2)), order_of(3, (0, 2)), 1.0)
    assert np.array_equal(owners(schedule, progress), np.ones((2, 3)))
    assert owners(schedule)[1, 2] == 0  # from the start on, nobody would bring it
