"""`bench warmstart` on a model of a few numbers: computing everything is exact, and rows follow from runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import charts
from benchmarks.adapters import warm_start
from benchmarks.adapters.warm_start import WAYS, WarmRun, WarmWay
from benchmarks.base import Report
from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.lora_files import read_adapter
from tests.engine.hf.test_lora import peft_of
from tests.tiny import tiny_engine

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_way_that_computes_everything_is_exact_and_one_that_computes_nothing_is_not(
    way: WarmWay, tmp_path: Path
) -> None:
    engine = tiny_engine("llama")
    peft_of(engine, tmp_path)
    lora = read_adapter(tmp_path)
    engine.load_adapter(lora)
    context, question = np.random.default_rng(1).integers(3, 250, (2, 48)).tolist()
    with engine.open(48, "plain") as sequence:
        engine.step([Row.following(sequence, context, logits="none")])
        base = sequence.export(Span(0, 48))
    prompt = warm_start.WarmPrompt(engine, lora, context, question[:8])
    stale, whole = (prompt.measure("chosen", "one", "model", base, way, budget) for budget in (0.0, 1.0))
    assert whole.kl < 1e-6 < stale.kl and whole.top1 == 1.0
    assert (stale.way, whole.way) == ("none", way.name)
    prompt.close()
    engine.close()


def test_rows_are_medians_of_adapters_and_what_is_shown_is_judged(tmp_path: Path) -> None:
    runs = [
        WarmRun(half, name, source, way, budget, kl, 0.96, 0.5, 1.0)
        for half, source in (("chosen", "model"), ("shown", "model"), ("shown", "adapter"))
        for name, kl in (("a", 0.001), ("b", 0.01), ("c", 0.5))
        for way, budget in (("none", 0.0), ("seen", 0.5))
    ]
    report = Report("warmstart")
    warm_start.add_rows(report, runs, WAYS[2], ["a", "b", "c"])  # type: ignore[arg-type]
    fields = report.fields
    row = next(row for row in fields["rows"] if row["half"] == "shown" and row["budget"] == 0.5)
    assert (row["kl"], row["worst_kl"], row["ratio"], row["near"]) == (0.01, 0.5, 0.5, True)
    assert fields["wins"] == 2 and fields["positions"] == 6 * warm_start.REPLY_TOKENS
    assert fields["kl_by_adapter"]["adapter 50%"] == {"a": 0.001, "b": 0.01, "c": 0.5}
    charts.save_chart(report.as_json(), tmp_path / "chart.png")
