"""What the gain depends on, and what trouble costs, is measured on the engine, row by row. Speed is not asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="part of the crypto extra")

from benchmarks.stream import costs as stream_costs
from benchmarks.stream import sensitivity as stream_sensitivity
from benchmarks.stream.modes import LEVEL
from benchmarks.stream.site import ContextSetup, Site
from benchmarks.stream.trouble import KINDS, Trouble
from tests.tiny import tiny_engine


def test_one_row_for_each_value(tmp_path: Path) -> None:
    engine = tiny_engine("llama")
    tokens = tuple(3 + (7 * place) % 50 for place in range(384 + 8))
    setting = ContextSetup(engine, tokens, 384)
    said: list[str] = []
    measured = stream_costs.measure(engine, tokens[:384], True, 1, 0, said.append)
    with Site(setting, tmp_path / "whole", (LEVEL,)) as site:
        site.learn(measured)
        jobs = stream_sensitivity.jobs(lambda: site, setting, tmp_path, measured, 0.05)
        rows = [job() for job in jobs.values()]
        trouble = [Trouble(setting, site, tmp_path, measured, 0.05, said.append).row(kind) for kind in KINDS]
    engine.close()
    assert [row["trouble"] for row in trouble] == list(KINDS)
    assert all(row["vs_local"] == row["ours_s"] / row["local_s"] > 0 for row in trouble)
    kinds = [(row["what"], row["value"]) for row in rows]
    assert kinds[0] == ("context tokens", 384)
    assert kinds[-3:] == [("requests", count) for count in stream_sensitivity.REQUESTS]
    assert ("busy cores", 0) in kinds and ("busy cores", 1) in kinds
    assert all(row["local_s"] > 0 and row["ours_s"] > 0 and 0 <= row["streamed_share"] <= 1 for row in rows)
    assert "4 at once" in jobs
