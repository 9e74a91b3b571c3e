"""What the default write budget means for an agent and for people: the simulation of `benchmarks/wear`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from benchmarks.wear import DAYS, TOKEN_BYTES, agent, ordinary, simulate
from rekindle.settings import Settings
from rekindle.store.settings import StoreSettings

DEFAULT = StoreSettings(disk_limit="50GB", write_budget=Settings().write_budget)


def test_ordinary_days_with_a_library_are_never_refused(tmp_path: Path) -> None:
    wear = simulate(tmp_path / "c", ordinary(), DEFAULT)
    assert wear.refused == 0
    assert 30e9 < wear.written[0] <= 40e9 and len(wear.written) == DAYS


def test_an_agent_writes_the_budget_on_each_day_and_no_more(tmp_path: Path) -> None:
    """It wants to write more than a terabyte a day."""
    wear = simulate(tmp_path / "c", islice(agent(2), 2 * 288), DEFAULT)
    assert wear.refused > 400
    assert all(9 * 30_000 * TOKEN_BYTES < wear.written[day] <= 40e9 for day in range(2))
