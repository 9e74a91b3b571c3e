"""The arithmetic of the capacity model, and that its page shows what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.capacity import Assumptions, MeasuredCosts, fleet_need, table

COSTS = MeasuredCosts(compute_seconds=2.0, load_seconds=0.5, kv_bytes=1_000)
GIVEN = Assumptions(reused=0.8, elsewhere=0.5, size=1.0, busy=0.5, link=100.0, memory=10_000.0, window=10.0)
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "capacity.md"


def test_the_arithmetic_is_that_of_the_page() -> None:
    need = fleet_need(1.0, COSTS, GIVEN)
    assert need.nodes == pytest.approx((2.0 * 0.2 + 0.5 * 0.4) / 0.5)
    assert (need.read_bytes, need.written_bytes) == pytest.approx((400.0, 200.0))
    assert need.stored_bytes == pytest.approx(2_000.0)
    assert (need.tier_links, need.tier_memories) == pytest.approx((6.0, 0.2))
    assert need.node_link == pytest.approx(6.0 / 2)  # two nodes
    assert need.breaks == ["the tier's network", "a node's network", "compute"]
    assert COSTS.break_even_bytes == 500.0


def test_everything_grows_with_the_rate_and_quantized_kv_needs_less_of_the_tier() -> None:
    small, large = (fleet_need(rate, COSTS, GIVEN) for rate in (1.0, 10.0))
    assert large.nodes == pytest.approx(10 * small.nodes) and large.tier_links == pytest.approx(10 * small.tier_links)
    quantized = fleet_need(1.0, COSTS, replace(GIVEN, size=0.25))
    assert quantized.nodes == small.nodes and quantized.tier_links == pytest.approx(small.tier_links / 4)


def test_what_fits_into_one_machine_does_not_break() -> None:
    assert fleet_need(1e-6, COSTS, GIVEN).breaks == []


def test_the_page_shows_what_the_script_prints() -> None:
    text, costs = PAGE.read_text("utf-8"), MeasuredCosts.read()
    for given in (Assumptions(), Assumptions(size=0.25)):
        assert table(costs, given) in text
    assert f"{costs.break_even_bytes / 1e9:.1f} GB/s" in text
