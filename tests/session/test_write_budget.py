"""The write budget of a session: what it refuses costs no request anything, and is said where people look."""

from __future__ import annotations

from pathlib import Path

from rekindle import Session
from rekindle.daemon.jobs import run_job
from rekindle.engine.fake import FakeEngine
from rekindle.store.tiered import TieredStore

RULES = "The keeper lights the lamp at dusk, and writes the hour into the book. " * 6  # long enough to be written early
FULL_BYTES = 10_000_000


def opened(folder: Path, **settings: object) -> Session:
    return Session(FakeEngine(), cache=folder, write_budget="10MB", **settings)  # type: ignore[arg-type]


def store_of(session: Session) -> TieredStore:
    assert session.cache.store is not None
    return session.cache.store


def spend(session: Session, size_bytes: int) -> None:
    room, database = store_of(session).disk.room, store_of(session).disk.database
    with database.writing() as connection:
        room.add_written(connection, size_bytes)


def ask(session: Session, text: str, **options: object) -> None:
    session.generate(text, max_tokens=4, **options)  # type: ignore[arg-type]
    assert session.flush()


def refused(session: Session) -> int:
    with store_of(session).disk.database.reading() as connection:
        return store_of(session).disk.room.written(connection)["refused_day_writes"]


def test_with_a_spent_budget_replies_are_the_same_and_the_next_turn_goes_on_in_the_engine(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache="off") as plain:
        right = plain.generate(RULES, max_tokens=8).text
    with opened(tmp_path / "cache") as session:
        spend(session, FULL_BYTES)
        first = session.generate(RULES, max_tokens=8)
        assert first.text == right and session.flush()
        again = session.generate(RULES + first.text + " Why?", max_tokens=2)
        assert again.reuse.engine >= len(RULES)
        assert session.flush() and store_of(session).disk.entries() == []
        assert refused(session) == store_of(session).counts.refused == 2
        assert store_of(session).counts.write_failures == 0


def test_one_request_is_one_use_however_often_it_is_written(tmp_path: Path) -> None:
    """A long prompt is written early and again after its reply."""
    with opened(tmp_path / "cache", admission="second-use") as session:
        ask(session, RULES)
        assert store_of(session).disk.entries() == []
        session.cache.unpark()
        ask(session, RULES)
        assert store_of(session).disk.entries() != []
        session.cache.unpark()
        assert session.generate(RULES + "Why?", max_tokens=1).reuse.reused >= len(RULES)


def test_a_chat_is_kept_a_turn_later_on_second_use(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", admission="second-use") as session:
        first = session.generate(RULES, max_tokens=4)
        second = RULES + first.text + "And then? " * 8
        ask(session, second)
    with opened(tmp_path / "cache") as session:
        kept = session.generate(second, max_tokens=1).reuse.disk
        assert len(RULES) - 32 < kept < len(second) - 32, "whole blocks of what the first turn had"


def test_what_is_warmed_is_refused_in_words_when_the_budget_is_spent(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as session:
        job = {"kind": "warm", "prompts": [RULES], "passages": None}
        done = run_job(session, job, lambda _: None)
        assert done["refused"] == 0 and done["reasons"] == [] and store_of(session).disk.entries() != []
        spend(session, FULL_BYTES)
        done = run_job(session, {**job, "prompts": [RULES[3:]]}, lambda _: None)
        (reason,) = done["reasons"]
        assert done["refused"] == 1 and reason.startswith("the write budget (10.0 MB a day) is spent until about ")


def test_none_switches_it_off(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache=tmp_path / "cache", write_budget="none") as session:
        spend(session, 10**15)
        ask(session, RULES)
        assert store_of(session).settings.write_budget is None and store_of(session).disk.entries() != []
