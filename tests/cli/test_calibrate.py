"""`rekindle calibrate`: the table, one sentence, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.session.calibrate.prompts import read_questions
from tests.cli.test_commands import rekindle


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    passages = [[f"Lamp {number}{letter} burns." for letter in "abcde"] for number in range(2)]
    records = [{"question": f"House {number}?", "contexts": some} for number, some in enumerate(passages)]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, records)), "utf-8")
    (folder / "text.txt").write_text("Light the lamp at dusk, and write the hour into the book. " * 20, "utf-8")
    return folder


def test_a_model_folder_is_calibrated_on_prompts_of_ones_own(tiny_folder: Path, data: Path) -> None:
    done = rekindle("calibrate", str(tiny_folder), "--data", str(data), "--kl", "5")
    assert done.exit_code == 0, done.output
    assert "ROUGE-L" in done.stdout and "bits a number" in done.stdout and "by effect" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("From now on sessions of ")
    told = json.loads(rekindle("calibrate", str(tiny_folder), "--data", str(data), "--json").stdout)
    assert told["budget"]["prompts"] == 2 and told["budget"]["max_kl"] == 0.015
    assert len(told["bits"]["whole_plan"]) == 4 and told["summary"].startswith("From now on")


@pytest.mark.real
@pytest.mark.long
def test_what_was_calibrated_for_the_embedded_model_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("chunks.match", "cache.coders"):
        monkeypatch.setattr(f"rekindle.{module}.home_folder", lambda: tmp_path / "home")
    monkeypatch.setattr("rekindle.session.calibrate.budget.BUDGETS", (0.4, 0.7))
    monkeypatch.setattr("rekindle.session.calibrate.bits.TEXTS", 1)
    done = rekindle("calibrate", "smollm2", "--engine", "hf", "--prompts", "2", "--kl", "5", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    budget, plans = told["budget"], told["bits"]["tried"]
    assert budget["reached"] and 0 < budget["budget"] < 1
    assert [one["plan"] for one in plans[:2]] == ["default", "by effect"] and plans[-1]["quantized"]
    one, other = read_questions(None)[:2]
    with Session("smollm2", engine="hf", cache=str(tmp_path / "cache"), reuse="approximate") as session:
        messages = [{"role": "user", "content": other.question}]
        session.chat(messages, documents=[other.paragraphs[0], *one.paragraphs[:2]], max_tokens=1)
        session.flush()
        reply = session.chat(messages, documents=[*one.paragraphs[1::-1], other.paragraphs[1]], max_tokens=1)
    assert reply.reuse.from_chunks > 0 and reply.reuse.calibrated is True
    assert reply.reuse.budget == pytest.approx(budget["budget"])
