"""The scripted model stands in for a real one in tests with clients: it has to be warm where a real one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle import Session
from rekindle.cache.cost import Costs, prior_rates
from rekindle.core.kv import Span
from rekindle.core.reply import Reuse
from rekindle.engine.base import Engine
from tests.server.scripted import ScriptedEngine

AGENT = {"role": "system", "content": "The keeper lights the lamp at dusk, and writes the hour into the book. " * 400}


def asked(folder: Path, question: str) -> Reuse:
    """One request to a session of its own."""
    with Session(ScriptedEngine(["Yes."]), cache=str(folder), disk_limit="200MB") as session:
        return session.chat([AGENT, {"role": "user", "content": question}], max_tokens=8).reuse


@pytest.mark.measured_costs
def test_it_is_warm_after_a_restart_by_the_costs_that_were_measured(tmp_path: Path) -> None:
    assert asked(tmp_path / "cache", "Is it lit?").computed > 28_000
    again = asked(tmp_path / "cache", "Is it late?")
    assert again.disk > 28_000 and again.computed < 100


@pytest.mark.measured_costs
def test_were_computing_free_it_would_be_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(engine: Engine) -> Costs:
        costs = Costs(prior_rates(engine))
        costs.computed(Span(0, 28_000), 1e-6)
        for size_bytes in [1 << binary for binary in range(10, 40)] * 3:
            costs.loaded("disk", size_bytes, 1e-3)
        return costs

    asked(tmp_path / "cache", "Is it lit?")
    monkeypatch.setattr("rekindle.cache.stored_kv.recall_costs", free)
    again = asked(tmp_path / "cache", "Is it late?")
    assert again.disk == 0 and again.miss == "slower"
