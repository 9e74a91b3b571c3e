"""Models that write give the facts of the notes in `docs/examples/notes.jsonl`, each in a note of its own.

`MODELS_FOR_TESTS` is a folder with GGUF files of larger models.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from rekindle import Session

NOTES = Path(__file__).parents[2] / "docs" / "examples" / "notes.jsonl"
FACTS = {
    "At which mooring does the rowing boat lie?": "17",
    "What is the piano tuner called?": "Oswin Tarrant",
    "Where did Aunt Vilja move the beehives?": "monastery",
    "What is the code of the alarm?": "4471",
    "In which city does the choir sing?": "Dresden",
}
LARGER = ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
WANTED = 4  # of five

pytestmark = [
    pytest.mark.real,
    pytest.mark.llamacpp,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="llama.cpp is not installed"),
]


def test_the_embedded_model_and_the_sentence_under_its_answer_give_the_facts(tmp_path: Path) -> None:
    written, quoted = _facts("smollm2", tmp_path)
    assert sum(quoted) >= WANTED, quoted
    assert sum(written) >= WANTED, written


@pytest.mark.long
@pytest.mark.parametrize("name", LARGER)
def test_a_model_that_writes_gives_the_facts(name: str, tmp_path: Path) -> None:
    folder = os.environ.get("MODELS_FOR_TESTS")
    if folder is None or not (Path(folder) / name).is_file():
        pytest.skip(f"MODELS_FOR_TESTS names no folder with {name}")
    written, quoted = _facts(str(Path(folder) / name), tmp_path)
    assert sum(written) >= WANTED, written
    assert sum(quoted) >= WANTED, quoted


def _facts(model: str, folder: Path) -> tuple[list[bool], list[bool]]:
    """For each question, whether the model writes the fact, and whether the sentence under the answer has it."""
    written, quoted = [], []
    with Session(model, engine="llamacpp", cache="off", library=folder / "library") as session:
        assert session.ingest(NOTES).added == len(FACTS)
        for question, fact in FACTS.items():
            answer = session.ask(question, max_tokens=48)
            assert len(answer.sources) == 1 and not answer.uncertain  # the others are not about that
            written.append(fact in answer.text)
            quoted.append(answer.quote is not None and fact in answer.quote.text)
    return written, quoted
