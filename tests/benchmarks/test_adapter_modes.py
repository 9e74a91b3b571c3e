"""The ways of serving adapters that `bench adapters` compares, on a model of a few numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.adapters.modes import APART, EXACT, MODES, NONE, OURS, PEFT, AdapterReply, Watch, answer_all, open_runs
from benchmarks.adapters.report import ModeResult, ScenarioResult
from benchmarks.adapters.workload import AdapterRequest, AppWorkload, Scenario
from benchmarks.baselines.peft_generate import PeftGenerate
from rekindle.models.adapter_registry import RegisteredAdapter
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
    peft, folder = PeftGenerate(engine, adapters), tmp_path / "caches"
    with open_runs(engine, peft, MODES, adapters, folder, LIMIT) as runs, Watch() as watch:
        answer_all(runs, workload, watch, lambda _: None)
        served = {run.mode.name: run for run in runs}
        limits = {session.settings.disk_limit for session in served[APART].sessions.values()}
    assert sorted(path.name for path in (folder / APART).iterdir()) == ["first", "second"]
    assert limits == {str(LIMIT // 2)}  # a cache for each adapter has its share
    theirs = [answer.tokens for answer in served[PEFT].answers]
    for name, run in served.items():
        assert run.reason is None and len(run.answers) == 2, name
        assert not run.mode.exact or [answer.tokens for answer in run.answers] == theirs, name
        assert all((answer.reused_tokens > 0) == run.mode.caches for answer in run.answers), name


def test_ours_is_measured_against_the_best_baseline() -> None:
    seconds = {"lfu": 1.0, EXACT: 0.9, OURS: 0.5}
    served = {}
    for mode in MODES:
        answer = AdapterReply("writing", seconds.get(mode.name, 2.0), len(PROMPT), 0, (1,), 0)
        served[mode.name] = ModeResult(mode, None, (answer,), (), 0, 0, {})
    found = ScenarioResult(AppWorkload(SCENARIO, "made up", (), (), 0), served, 1, 1, 0.0)
    assert found.best == "lfu" and found.computed.mode.name == NONE
    assert found.ratio(EXACT) == pytest.approx(0.9) and found.reduction(OURS, found.best) == pytest.approx(0.5)
    without = ScenarioResult(found.workload, {name: one for name, one in served.items() if name != NONE}, 1, 1, 0.0)
    assert without.computed.mode.name == PEFT
