"""Abstracts cover all passages and go with their documents; the model asks and judges by itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.idle.abstracts import _MAX_MERGED, AbstractWriter
from rekindle.idle.generated_questions import (
    is_answerable,
    list_grammar,
    parse_questions,
    prompt_for_questions,
)
from rekindle.idle.idle import Idle, IdleOptions
from rekindle.idle.log import IdleAction
from tests.idle.idling import DETAILED, GENERAL, JUDGING, MERGING, SAID, SUMMING, Scripted, free_words, session
from tests.knowledge.test_languages import NOTES, QUESTIONS
from tests.server.soak import tiny_embedder
from tests.session.asking import forms_of_text, traces

__all__ = ["free_words"]
pytestmark = pytest.mark.usefixtures("free_words")

OPTIONS = IdleOptions(stride=2, settle_seconds=0.0, max_tokens=6, seconds_per_hit=0.0)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


def counts(done: Sequence[IdleAction]) -> dict[str, int]:
    names = [did.action for did in done]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def long_document(parts: int) -> dict[str, str]:
    lines = [f"Keeper {number} wrote in the book of the lighthouse that day. " * 9 for number in range(parts)]
    return {"text": "\n\n".join(lines), "source": "book", "title": "book"}


def asked_with(own: Session, words: str) -> list[str]:
    engine = own.engine
    assert isinstance(engine, Scripted)
    return [prompt for prompt in engine.asked if words in prompt]


def test_all_passages_of_a_document_are_summarized_and_merged(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder) as own:
        own.ingest(documents=[long_document(8)])
        done = Idle(own, OPTIONS).abstracts()
        found = counts(done)
        assert found["abstract"] > 3 + 1
        assert [did.what for did in done if did.action == "merge"] == ["book", "the library"]
        read = "".join(asked_with(own, SUMMING))
        assert all(f"Keeper {number} wrote" in read for number in range(8))
        assert Idle(own, OPTIONS).abstracts() == []


def test_abstracts_that_were_written_are_not_written_again(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder) as own:
        own.ingest(documents=[long_document(8)])
        idle = Idle(own, OPTIONS)
        whole = [did.what for did in Idle(own, OPTIONS, tenant="other").abstracts()]
        assert whole == []
        left = [5]

        def may_continue() -> bool:
            left[0] -= 1
            return left[0] > 0

        writer = AbstractWriter(own, idle._preparer, may_continue, idle._write)
        first = writer.documents(0.0)
        second = idle.abstracts()
        told = [did.what for did in (*first, *second) if did.action == "abstract"]
        assert first and second and len(told) == len(set(told))


def test_many_abstracts_are_merged_a_few_at_a_time(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder) as own:
        more = [{"text": f"Note {number}.", "source": f"n{number}", "title": f"n{number}"} for number in range(30)]
        own.ingest(documents=more)
        assert counts(Idle(own, OPTIONS).abstracts())["merge"] > 1
        sizes = [prompt.count("\n- ") for prompt in asked_with(own, MERGING)]
        assert max(sizes) <= _MAX_MERGED
        own.ingest(documents=[{"text": "One more.", "source": "more", "title": "more"}])
        again = counts(Idle(own, OPTIONS).abstracts())
        assert again["abstract"] == 1 and again["merge"] <= 2  # the last group, and all groups together


def test_a_changed_or_removed_document_takes_its_abstracts_with_it(tmp_path: Path, embedder: str) -> None:
    secret = "The smugglers meet at the seventh buoy."
    said = {SUMMING: secret, MERGING: f"All of it: {secret}"}
    with session(tmp_path, embedder, Scripted({**SAID, **said})) as own:
        Idle(own, OPTIONS).abstracts()
        assert traces(tmp_path / "cache", forms_of_text(secret))
        own.engine.said = {SUMMING: "A note.", MERGING: "Notes.", **SAID}  # type: ignore[attr-defined]
        for name in ("lamp", "ferry"):
            own.ingest(documents=[{"text": f"Another {name}.", "source": name, "title": name}])
        assert counts(Idle(own, OPTIONS).abstracts()) == {"abstract": 2, "merge": 1}
        own.forget("bread")
        own.flush()
    assert not traces(tmp_path / "cache", forms_of_text(secret))


def test_the_model_is_asked_for_general_and_detailed_questions(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder) as own:
        done = Idle(own, OPTIONS).run()
        assert {"merge", "judge", "answer"} <= {*counts(done)}
        prompts = [prompt for prompt in own.engine.asked if GENERAL in prompt or DETAILED in prompt]  # type: ignore[attr-defined]
        assert any("All of it is about a harbour town." in prompt for prompt in prompts)
        assert any("A short note." in prompt and DETAILED in prompt for prompt in prompts)
        assert {entry.origin for entry in own.answers.bank().entries()} == {"abstract"}


def test_what_the_model_says_cannot_be_answered_is_not_prepared(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder, Scripted({**SAID, JUDGING: "no"})) as own:
        done = counts(Idle(own, IdleOptions(stride=2, settle_seconds=0.0, sources=("abstract",))).run())
        assert done["judge"] > 0 and "answer" not in done and own.answers.bank().entries() == []


def test_the_grammar_is_of_the_format_alone() -> None:
    pattern = list_grammar(2).text
    assert re.fullmatch(pattern, "1. Is it so?\n2. Who paid for the paint of the boat?")
    assert re.fullmatch(pattern, "1. 排练几点开始？\n2. أين الطرد؟")
    assert not re.fullmatch(pattern, "1. Is it so?") and not re.fullmatch(pattern, "Sure! 1. Is it so?\n2. Who paid?")


@pytest.mark.parametrize("language", QUESTIONS)
def test_questions_in_any_language_are_read_and_found_answerable(language: str) -> None:
    asked = QUESTIONS[language]
    found = parse_questions("\n".join(f"{number}. {text}" for number, text in enumerate(asked, start=1)), 5)
    assert len(found) == len(asked)
    others = next(name for name in NOTES if name != language)
    for question, note, other in zip(found, NOTES[language], NOTES[others], strict=True):
        assert is_answerable(question, [(note, 0.5)]) and not is_answerable(question, [(other, 0.5)])


def test_a_prompt_names_the_kinds_it_has_notes_for() -> None:
    (both,) = prompt_for_questions(["All of it."], ["A part."], 3)
    (parts,) = prompt_for_questions([], ["A part."], 3)
    assert "- All of it.\n- A part." in both.content and "general" in both.content and "detailed" in both.content
    assert "general" not in parts.content and "3 questions" in parts.content
