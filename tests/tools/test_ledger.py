"""`make ledger`: what it reads from the results of a bench, and how two checkouts stand side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import ledger

KEPT = Path(__file__).resolve().parents[2] / "docs" / "numbers"


@pytest.mark.parametrize("line", ledger.HEADLINES, ids=lambda line: f"{line.bench} {line.field}")
def test_every_headline_is_a_field_of_its_bench(line: ledger.Headline) -> None:
    result = json.loads((KEPT / f"{line.bench}-x86_64.json").read_text("utf-8"))
    assert (ledger.value(result, line.field) or 0) > 0


def test_two_checkouts_stand_side_by_side_and_what_got_worse_is_marked() -> None:
    lower, higher = ledger.Headline("a", "b", "lower"), ledger.Headline("a", "b", "higher")
    assert ledger.shown(lower, [1.0, 1.3]).split() == ["a:", "b", "1", "1.3", "1.30x", "worse"]
    assert ledger.shown(higher, [1.0, 1.3]).split()[-1] == "1.30x"
    assert ledger.shown(higher, [1.3, 1.0]).split()[-1] == "worse"
    assert ledger.shown(lower, [None, 1.0]).split() == ["a:", "b", "-", "1"] and "x" not in ledger.shown(lower, [2.0])


def test_an_older_checkout_is_run_as_it_wants_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Done:
        returncode, stdout = 0, "{}"

    monkeypatch.setattr(ledger.subprocess, "run", lambda words, **_: asked.append(words) or Done())
    ledger.run(tmp_path, "store")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__main__.py").touch()
    ledger.run(tmp_path, "store")
    assert [words[2:] for words in asked] == [
        ["rekindle", "bench", "store", "--quick", "--json"],
        ["benchmarks", "store", "--quick", "--json"],
    ]
