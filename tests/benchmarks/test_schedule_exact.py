"""The exact schedule is checked by trying everything, and ours by the exact one."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest

from benchmarks.waiting.schedule import bidirectional, greedy
from benchmarks.waiting.timeline import LinkCosts, mask_of, simulate
from rekindle.core.cells import Split, TransferOrder
from tests.benchmarks.streams import KINDS, plain_costs, some_costs

pytest.importorskip("scipy", reason="part of the bench extra")

from benchmarks.waiting.exact import exact


def tried(costs: LinkCosts) -> float:
    """The end of the best of all splits, each with all orders."""
    chunks, layers = costs.chunks, costs.layers
    best = np.inf
    for computed in product(range(layers + 1), repeat=chunks):
        split = Split(layers, computed)
        for order in permutations(np.flatnonzero(~mask_of(split)).tolist()):
            best = min(best, simulate(split, TransferOrder(layers, order), costs).seconds)
    return best


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 2), (5, 1), (1, 5)])
def test_no_schedule_at_all_beats_the_exact_one(kind: str, shape: tuple[int, int]) -> None:
    costs = some_costs(kind, 3, *shape)
    found = exact(costs)
    assert found.bound_seconds == pytest.approx(found.schedule.seconds, rel=1e-5)
    assert found.schedule.seconds == pytest.approx(tried(costs), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_no_split_beats_the_exact_one(kind: str) -> None:
    """Larger ones, each split with the order of the need: that no order is better, the test above shows."""
    costs = some_costs(kind, 4, 3, 4)
    best = min(
        simulate(split, TransferOrder(4, by_need(split)), costs).seconds
        for split in (Split(4, computed) for computed in product(range(5), repeat=3))
    )
    assert exact(costs).schedule.seconds == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("carry", [0.5, 1.0, 2.0, 4.0])
def test_the_exact_one_knows_who_waits_for_whom(carry: float) -> None:
    """A first chunk that is better streamed, and a second that is better computed, layer by layer behind it."""
    compute, size = np.array([[9.0] * 3, [1.5] * 3]), np.array([[100.0 * carry] * 3, [2000.0] * 3])
    costs = plain_costs(2, 3, compute_seconds=compute, top_seconds=compute / 4, size_bytes=size)
    found = exact(costs)
    assert found.schedule.split.computed[0] < 2 < found.schedule.split.computed[1]
    assert found.bound_seconds == pytest.approx(tried(costs), rel=1e-5)
    assert found.schedule.seconds == pytest.approx(found.bound_seconds, rel=1e-5)


def by_need(split: Split) -> tuple[int, ...]:
    """What steps need, in their order, then what the question needs, layer by layer."""

    def first(number: int) -> tuple[int, int]:
        chunk, layer = divmod(number, split.layers)
        users = [later for later in range(chunk + 1, split.chunks) if split.computed[later] - 1 > layer]
        return (users[0] if users else split.chunks), layer

    return tuple(sorted(np.flatnonzero(~mask_of(split)).tolist(), key=first))


def test_decoding_is_bounded_from_below() -> None:
    for seed in range(4):
        costs = replace(some_costs("sizes", seed, 3, 3), decode_seconds_per_byte=3e-6)
        found = exact(costs)
        assert found.bound_seconds <= found.schedule.seconds * (1 + 1e-6)
        assert found.schedule.seconds <= found.bound_seconds + costs.decode_seconds.max() * 3


@pytest.mark.parametrize("kind", KINDS)
def test_ours_is_near_the_exact_schedule_and_never_behind_the_one_that_meets_in_the_middle(kind: str) -> None:
    ratios = []
    for seed in range(8):
        costs = some_costs(kind, seed, *[(3, 3), (4, 4), (5, 4), (3, 6)][seed % 4])
        ours, best = greedy(costs), exact(costs)
        assert ours.seconds >= best.bound_seconds * (1 - 1e-5)
        assert ours.seconds <= bidirectional(costs).seconds * (1 + 1e-9)
        ratios.append(ours.seconds / best.schedule.seconds)
    assert np.median(ratios) <= 1.05
    assert max(ratios) <= 1.15
