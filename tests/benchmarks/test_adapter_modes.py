"""The ways of serving adapters that `bench adapters` compares, on a model of a few numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from benchmarks import base
from benchmarks.adapters import bench, quality
from benchmarks.adapters.modes import (
    APART,
    EXACT,
    MODES,
    NONE,
    OURS,
    PEFT,
    AdapterReply,
    Replies,
    Watch,
    answer_all,
    open_runs,
)
from benchmarks.adapters.report import ModeResult, ScenarioResult
from benchmarks.adapters.workload import AdapterRequest, AppWorkload, Scenario
from benchmarks.base import BenchOptions
from benchmarks.baselines.peft_generate import PeftGenerate
from rekindle.models.adapter_registry import RegisteredAdapter
from tests.benchmarks.test_units import stopping_after
from tests.engine.hf.test_lora import peft_of
from tests.tiny import tiny_engine

pytestmark = pytest.mark.thorough

PROMPT = tuple(np.random.default_rng(3).integers(3, 250, 96).tolist())
LIMIT = 8 << 20
SCENARIO = Scenario("S", 2, len(PROMPT))


@pytest.mark.usefixtures("published_policies")
def test_every_mode_answers_and_those_that_lose_nothing_as_peft_does(tmp_path: Path) -> None:
    engine = tiny_engine("llama")
    adapters = []
    for seed, name in enumerate(("first", "second")):
        peft_of(engine, tmp_path / name, seed)
        adapters.append(RegisteredAdapter(name, str(tmp_path / name)))
    asks = tuple(AdapterRequest("mail", name, "writing", PROMPT) for name in ("first", "second") * 2)
    workload = AppWorkload(SCENARIO, "made up", ("first", "second"), asks, filling=2)
    peft, folder, replies = PeftGenerate(engine, adapters), tmp_path / "caches", list[Replies]()
    for requests in (range(3), range(3, 4)):  # with sessions of their own: a bench that was cut goes on
        with open_runs(engine, peft, MODES, adapters, folder, LIMIT) as runs, Watch() as watch:
            replies += [answer_all(runs, workload, number, watch, lambda _: None) for number in requests]
            apart = next(run for run in runs if run.mode.name == APART)
            limits = {session.settings.disk_limit for session in apart.sessions.values()}
    assert sorted(path.name for path in (folder / APART).iterdir()) == ["first", "second"]
    assert limits == {str(LIMIT // 2)}  # a cache for each adapter has its share
    types = TypeAdapter(list[Replies])
    assert types.validate_json(types.dump_json(replies)) == replies, "a line holds all of it"
    served = {mode.name: ModeResult.of(mode, replies, workload.filling) for mode in MODES}
    theirs = [answer.tokens for answer in served[PEFT].answers]
    for name, run in served.items():
        assert run.reason is None and len(run.answers) == 2, name
        assert not run.mode.exact or [answer.tokens for answer in run.answers] == theirs, name
        assert all((answer.reused_tokens > 0) == run.mode.caches for answer in run.answers), name
        assert len(run.filled) == 2 * run.mode.caches and (run.kept["bytes_per_token"] is not None) == run.mode.caches


def test_ours_is_measured_against_the_best_baseline() -> None:
    seconds = {"lfu": 1.0, EXACT: 0.9, OURS: 0.5}
    served = {}
    for mode in MODES:
        answer = AdapterReply("writing", seconds.get(mode.name, 2.0), len(PROMPT), 0, (1,), 0)
        served[mode.name] = ModeResult(mode, None, (answer,), ())
    found = ScenarioResult(AppWorkload(SCENARIO, "made up", (), (), 0), served, 1, 1)
    assert found.best == "lfu" and found.computed.mode.name == NONE
    assert found.ratio(EXACT) == pytest.approx(0.9) and found.reduction(OURS, found.best) == pytest.approx(0.5)
    without = ScenarioResult(found.workload, {name: one for name, one in served.items() if name != NONE}, 1, 1)
    assert without.computed.mode.name == PEFT


@pytest.mark.usefixtures("published_policies")
def test_a_scenario_that_is_cut_goes_on_with_the_folders_that_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("first", "second")):
        peft_of(tiny_engine("llama"), tmp_path / "adapters" / name, seed)
    monkeypatch.setattr(bench, "load", lambda options: tiny_engine("llama"))
    monkeypatch.setattr(quality, "measure_deltas", lambda *_, **__: quality.unmeasured("not here"))
    file = tmp_path / "units.jsonl"
    options = BenchOptions(quick=True, limit=2, adapters=tmp_path / "adapters", resume=file)

    def run(limit: int) -> dict[str, Any]:
        """Deltas, the scenario, and so many of its requests in every mode."""
        monkeypatch.setattr(base, "timed", lambda options, advance: stopping_after(limit))
        return bench.run(options, lambda part: None).as_json()

    first = run(2 + 3 * (1 + len(MODES)) - 2 * 2)  # two modes are not filled; all but one of those measured
    (scenario,) = first["scenarios"]
    assert scenario["requests"] == 1 and (tmp_path / "units.jsonl.S1").is_dir()
    found = run(100)
    assert found["scenarios"][0]["requests"] == 2 and not (tmp_path / "units.jsonl.S1").exists()
    assert {row["mode"]: row["requests"] for row in found["rows"]} == dict.fromkeys([mode.name for mode in MODES], 2)
    assert [part["steps"] for part in found["measured_by"]] == [1 + 3, 1]
    rows = {row["mode"]: row for row in found["rows"]}
    assert {"refused", "evicted_bytes", "bytes_per_token", "accounted_bytes"} <= set(rows[EXACT])
