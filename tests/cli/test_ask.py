"""`rekindle ask`, end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import rekindle
from tests.knowledge.conftest import embedder_folder

__all__ = ["embedder_folder"]  # a fixture

QUESTION = "Who lights the lamp of Ternholm?"


@pytest.fixture
def settings(tiny_folder: Path, tmp_path: Path, embedder_folder: Path) -> list[str]:
    where = ["--cache", str(tmp_path / "cache"), "--embedder", str(embedder_folder)]
    notes = tmp_path / "notes.txt"
    notes.write_text("The lamp of Ternholm burns oil from Vesk. Mara lights it at dusk.", "utf-8")
    assert rekindle("ingest", str(notes), *where).exit_code == 0
    ask = ["--model", str(tiny_folder), *where, "-k", "1"]
    letter = json.loads(rekindle("ask", QUESTION, *ask, "-n", "4", "--answers", "off", "--json").stdout)["text"][-1]
    return [*ask, "-n", "12", "--stop", letter]  # an answer that the limit cut off would not be given


def test_a_direct_answer_that_the_model_had_to_write_is_a_line_with_the_reason(settings: list[str]) -> None:
    first = rekindle("ask", QUESTION, *settings, "--answers", "direct")
    assert first.exit_code == 0, first.output
    assert (
        "note: no earlier answer was given: no earlier question is near enough (similarity_threshold=" in first.stderr
    )
    again = rekindle("ask", QUESTION, *settings, "--answers", "direct")
    assert again.exit_code == 0 and "stored answer of" in again.stderr and "note:" not in again.stderr
    shorter = rekindle("ask", QUESTION, *settings, "-n", "1", "--answers", "direct")
    assert "note: no earlier answer was given: its answer is longer than this request allows" in shorter.stderr
    shown = json.loads(rekindle("ask", "What burns in it?", *settings, "--answers", "direct", "--json").stdout)
    assert shown["refused"] is not None
    off = rekindle("ask", QUESTION, *settings, "--answers", "off")
    assert off.exit_code == 0 and "note:" not in off.stderr


def test_the_sentence_of_the_source_stands_under_the_answer_and_says_where_it_is_uncertain(settings: list[str]) -> None:
    quoted = '[1] "Mara lights it at dusk."'
    lamp = rekindle("ask", "Does Mara light it at dusk?", *settings, "--answers", "off")
    assert lamp.exit_code == 0 and quoted in lamp.stdout and "Uncertain" not in lamp.stdout
    lost = rekindle("ask", "Which zeppelin museum sells postcards?", *settings, "--answers", "off")
    assert lost.exit_code == 0 and "Uncertain: no passage is clearly about the question." in lost.stdout
    told = json.loads(rekindle("ask", "Does Mara light it at dusk?", *settings, "--answers", "off", "--json").stdout)
    assert told["quote"] == {"number": 1, "text": "Mara lights it at dusk."} and told["uncertain"] is False
