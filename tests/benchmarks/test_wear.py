"""What the default write budget means for an agent and for people: the simulation of `benchmarks/wear`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from benchmarks.wear import TOKEN_BYTES, agent, ordinary, simulate
from rekindle.settings import Settings
from rekindle.store.settings import StoreSettings

DEFAULT = StoreSettings(disk_limit="50GB", write_budget=Settings().write_budget)


def test_an_ordinary_day_with_a_library_is_never_refused(tmp_path: Path) -> None:
    wear = simulate(tmp_path / "c", islice(ordinary(), 3000 + 20 * 6 + 30), DEFAULT)
    assert wear.refused == 0
    assert wear.written.total() > 90e9


def test_an_agent_cannot_write_more_than_the_days_total(tmp_path: Path) -> None:
    """It wants to write more than a terabyte a day."""
    wear = simulate(tmp_path / "c", islice(agent(2), 288), DEFAULT)
    assert wear.refused > 200
    assert 24 * 30_000 * TOKEN_BYTES < wear.written.total() <= 160e9
