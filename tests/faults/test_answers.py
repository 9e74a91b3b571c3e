"""A bank in trouble: every question is answered as if there were none, and none waits for it."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.answers.bank import AnswerBank
from rekindle.errors import AdapterNotFound, KnowledgeUnusable, ModelNotFound
from rekindle.knowledge.library import Library
from tests.session.test_answers import BOATS, BREAD, FERRY, HOW, LAMPS, ask, documents, embedder, open_session, way

__all__ = ["embedder", "open_session"]  # fixtures

Open = Callable[..., Session]


@pytest.fixture(autouse=True)
def plain(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "rekindle")


@pytest.fixture
def session(open_session: Open) -> Iterator[Session]:
    with open_session() as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        ask(session)
        assert way(ask(session)) == "direct"
        yield session


def truly(session: Session) -> str:
    return session.ask(FERRY, **HOW, answers="off").text


FAILURES = [
    KnowledgeUnusable("The library cannot be used: database is locked"),
    ValueError("buffer size must be a multiple of element size"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    OSError(5, "Input/output error"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["lookup", "entries"])
def test_whatever_fails_in_a_bank_the_model_answers(
    session: Session, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = truly(session)

    def fails(*_: object, **__: object) -> object:
        raise error

    monkeypatch.setattr(AnswerBank, where, fails)
    for answers in ("direct", "verified"):
        answer = ask(session, answers=answers)
        assert answer.text == right and way(answer) != "direct" and answer.sources
    monkeypatch.undo()
    assert way(ask(session)) == "direct"


@pytest.mark.parametrize("where", ["keep", "record_use"])
def test_what_cannot_be_kept_fails_no_question(session: Session, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> object:
        raise KnowledgeUnusable("The library cannot be used: disk full")

    monkeypatch.setattr(AnswerBank, where, fails)
    assert way(ask(session)) == "direct"
    assert ask(session, "Who is the baker?").text


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TABLE answers",
        "DROP TABLE grounds",
        "ALTER TABLE answers RENAME COLUMN evidence TO proof",
        "UPDATE answers SET vector=x'0102'",
        "UPDATE answers SET vector='words'",
        "UPDATE answers SET evidence=x'01'",
        "UPDATE answers SET tokens=x'0102'",
        "UPDATE answers SET text=CAST(x'ff00ff' AS TEXT)",
        "UPDATE answers SET generation='many', state='fresh'",
        "UPDATE answers SET finish=NULL, tokenizer=NULL",
        "UPDATE about SET value='words' WHERE name='answers'",
    ],
)
def test_a_damaged_bank_never_changes_an_answer(session: Session, damage: str, open_session: Open) -> None:
    right = truly(session)
    with session.knowledge.library().writing() as connection:
        connection.execute(damage)
        if damage.startswith("UPDATE answers"):
            connection.execute("UPDATE about SET value=CAST(value AS INTEGER)+1 WHERE name='answers'")
    assert ask(session).text == right
    with open_session() as again:
        for answers in ("direct", "verified"):
            assert ask(again, answers=answers).text == right


def test_a_question_does_not_wait_for_who_writes(session: Session) -> None:
    """Another process is in the middle of a long change: stored answers are given, and counted later."""
    right, library = truly(session), session.knowledge.library()
    session.ingest(documents=documents("Tea is served at five."))  # so that there is something to note
    other = sqlite3.connect(library.path, isolation_level=None, timeout=0)
    other.execute("BEGIN IMMEDIATE")
    other.execute("UPDATE documents SET app='x'")
    answered = threading.Event()
    answers: list[Any] = []

    def asking() -> None:
        answers.append(session.ask(FERRY, **HOW))
        answers.append(session.ask(FERRY, **HOW, answers="verified"))
        answered.set()

    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    given = answered.wait(60)
    still_locked = other.in_transaction
    other.execute("ROLLBACK")
    other.close()
    thread.join(60)
    assert given and still_locked and [answer.text for answer in answers] == [right, right]
    assert way(answers[0]) == "direct"
    assert session.flush()


def test_a_library_that_can_only_be_read_gives_its_answers(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Library) -> object:
        raise KnowledgeUnusable("can only be read")

    session.ingest(documents=documents("Tea is served at five."))
    monkeypatch.setattr(Library, "writing", refuse)
    assert way(ask(session)) == "direct"
    assert ask(session, "Who is the baker?").text
    monkeypatch.undo()


def test_a_library_whose_folder_is_gone_takes_its_answers_along(session: Session) -> None:
    shutil.rmtree(session.knowledge.folder)
    session.ingest(documents=documents(LAMPS, BOATS, BREAD))
    answer = ask(session)
    assert way(answer) != "direct" and answer.text == truly(session)
    assert way(ask(session)) == "direct"


def test_an_embedder_that_cannot_be_loaded_is_needed_by_no_search_for_words(
    session: Session, monkeypatch: pytest.MonkeyPatch, open_session: Open
) -> None:
    right = truly(session)
    with open_session() as again:

        def missing() -> object:
            raise ModelNotFound("The embedder is not here.")

        monkeypatch.setattr(again.knowledge, "embedder", missing)
        answer = ask(again)
        assert answer.text == right and way(answer) != "direct"


def test_another_embedder_neither_breaks_the_bank_nor_is_broken_by_it(
    session: Session, open_session: Open, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoConfig, AutoModel

    from tests.engine.embedding.tiny_encoders import SIZES, word_tokenizer

    torch.manual_seed(1)
    wider = {**SIZES, "hidden_size": 2 * SIZES["hidden_size"]}
    AutoModel.from_config(AutoConfig.for_model("bert", **wider)).save_pretrained(tmp_path / "wide")
    word_tokenizer().save(str(tmp_path / "wide" / "tokenizer.json"))
    with open_session(embedder=str(tmp_path / "wide")) as other:
        for _ in range(2):
            assert ask(other, "Who is the baker?").text
    assert way(ask(session)) == "direct"
    assert ask(session, "Who is the baker?").text and way(ask(session, "Who is the baker?")) == "direct"


def test_errors_of_the_question_itself_are_told_as_without_a_bank(session: Session) -> None:
    with pytest.raises(AdapterNotFound):
        session.ask(FERRY, **HOW, adapter="nobody")


def test_a_session_that_ends_without_closing_keeps_its_answers(open_session: Open) -> None:
    session = open_session()
    session.ingest(documents=documents(BOATS))
    session.ask(FERRY, **HOW)
    session.close()
    session.close()
    with open_session() as again:
        assert way(ask(again)) == "direct"
