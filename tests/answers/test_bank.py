"""A bank gives an answer only while everything it came from is as it was; it never grows past its limit."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rekindle.answers.bank import DRAFT_SIMILARITY, AnswerBank, BankLookup, BankQuestion
from rekindle.answers.bank_rows import AnswerText, BankEntry
from rekindle.core.keys import token_bytes
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import Floats, Retrieval, Retriever, VectorIndex, to_stored
from rekindle.knowledge.schema import MIGRATIONS
from rekindle.store.catalog.schema import APPLICATION_ID
from tests.knowledge.conftest import DIMENSIONS, cut, library, vector

ROOT = Path(__file__).parents[2]
TERMS = "model, greedy"
LAMPS, FERRY = "The lamp in the hall burns nine hours.", "The ferry to Ormund costs eleven crowns."
WAITING = "state!='fresh' ORDER BY state='stale' DESC, asked IS NOT NULL DESC, id"
WHERE_LAMP, COST = "How long does the lamp burn?", "What does the ferry cost?"


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def opened(known: Library, *, limit_bytes: int = 1 << 20) -> AnswerBank:
    return AnswerBank(known, "e", DIMENSIONS, limit_bytes=limit_bytes, clock=Clock())


@pytest.fixture
def known(tmp_path: Path) -> Library:
    made = library(tmp_path)
    made.put([cut("lamps", LAMPS, seed=100), cut("ferry", FERRY, seed=200)], "e")
    return made


@pytest.fixture
def bank(known: Library) -> AnswerBank:
    return opened(known)


def finding(known: Library) -> object:
    """Finds passages by their words, as the session would."""

    def retrieve(question: str, top_k: int, retrieval: Retrieval) -> Sequence[int]:
        none = _no_embedder
        return [hit.chunk.id for hit in Retriever(known, none).retrieve(question, top_k, "bm25").hits]  # type: ignore[arg-type]

    return retrieve


def _no_embedder() -> object:
    raise AssertionError("words need no embedder")


def asked(known: Library, text: str, *, seed: int | None = None, terms: str = TERMS, top_k: int = 1) -> BankQuestion:
    """A question with a vector of its own: always the same for the same text."""
    generation = known.generation
    hits = Retriever(known, _no_embedder).retrieve(text, top_k, "bm25").hits  # type: ignore[arg-type]
    made = vector(sum(text.encode()) if seed is None else seed)
    evidence, documents = [hit.chunk.id for hit in hits], {hit.chunk.document for hit in hits}
    return BankQuestion(text, made, terms, top_k, "bm25", tuple(evidence), tuple(documents), generation)


def near(one: BankQuestion, text: str, known: Library, similarity: float) -> BankQuestion:
    """Another question whose vector has that cosine with the one of the first."""
    other = np.roll(one.vector, 1) - np.float32(np.roll(one.vector, 1) @ one.vector) * one.vector
    turned = similarity * one.vector + (1 - similarity**2) ** 0.5 * other / np.linalg.norm(other)
    made: Floats = turned.astype(np.float32)
    return replace(asked(known, text), vector=made)


def text(words: str, *, finish: str = "stop", seconds: float = 1.0) -> AnswerText:
    return AnswerText(words, tuple(words.encode()), "bytes", finish, seconds)  # type: ignore[arg-type]


def look(bank: AnswerBank, question: BankQuestion, threshold: float | None = 0.95) -> BankLookup:
    return bank.lookup(question, finding(bank.library), threshold)


def the_only(bank: AnswerBank) -> BankEntry:
    (entry,) = bank.entries()
    return entry


# -- kept and found


def test_what_is_kept_comes_back_as_it_was(bank: AnswerBank, known: Library) -> None:
    question = asked(known, "Nul\0, ünïcode 日本 '; -- and 🐧: how long does the lamp burn?")
    answer = replace(text("Neuf heures\0 🐧"), tokens=(0, 1, 2**32 - 1), seconds=2.5)
    id = bank.keep(question, answer)
    entry = the_only(bank)
    assert entry.id == id and entry.question == question.text and entry.answer == answer
    assert (entry.evidence, entry.terms, entry.origin) == (question.evidence, TERMS, "user")
    assert (entry.top_k, entry.retrieval, entry.generation) == (1, "bm25", known.generation)
    assert entry.state == "fresh" and entry.asked == entry.made and entry.uses == 0


def test_the_identical_question_is_answered_at_once(bank: AnswerBank, known: Library) -> None:
    question = asked(known, COST)
    bank.keep(question, text("Eleven crowns."))
    found = look(bank, question)
    assert found.direct is not None and found.direct.entry.answer == text("Eleven crowns.")
    assert found.direct.similarity == pytest.approx(1, abs=1e-3) and found.refused is None
    assert [one.entry.question for one in found.drafts] == [COST]


def test_without_a_threshold_an_answer_is_a_draft_only(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    found = look(bank, asked(known, COST), None)
    assert found.direct is None and found.refused is None and len(found.drafts) == 1


@pytest.mark.parametrize(("similarity", "serves"), [(0.99, True), (0.96, True), (0.94, False), (0.5, False)])
def test_the_threshold_decides_how_near_is_near_enough(
    bank: AnswerBank, known: Library, similarity: float, serves: bool
) -> None:
    question = asked(known, COST)
    bank.keep(question, text("Eleven crowns."))
    other = near(question, "What's the ferry cost?", known, similarity)
    found = look(bank, other)
    assert (found.direct is not None) == serves and found.refused is None
    assert bool(found.drafts) == (similarity >= DRAFT_SIMILARITY)


def test_a_question_that_only_looks_alike_is_refused_with_a_reason(bank: AnswerBank, known: Library) -> None:
    from benchmarks.answers.ways import unguard  # imports torch, which the other processes do not need

    known.put([cut("more", "The ferry to Vesk costs nine crowns.", seed=300)], "e")
    question = asked(known, "What does the ferry to Ormund cost?")
    bank.keep(question, text("Eleven crowns."))
    found = look(bank, near(question, "What does the ferry to Vesk cost?", known, 0.99))
    assert found.direct is None and found.refused is not None and "Ormund" in found.refused
    assert found.drafts
    unguarded = look(unguard(bank), near(question, "What does the ferry to Vesk cost?", known, 0.99))
    assert unguarded.direct is not None


def test_an_answer_that_was_cut_off_is_a_draft_and_benches_of_one_length_give_it(
    bank: AnswerBank, known: Library
) -> None:
    from benchmarks.answers.ways import take_cut

    question, cut_off = asked(known, COST), replace(text("Eleven"), finish="length")
    bank.keep(question, cut_off)
    found = look(bank, question)
    assert found.direct is None and found.refused is not None and "cut off" in found.refused and found.drafts
    taking = take_cut(take_cut(bank))
    taking.keep(question, cut_off)
    given = look(taking, question).direct
    assert given is not None and given.entry.answer is not None and given.entry.answer.text == "Eleven"


def test_a_question_that_other_passages_answer_is_refused(bank: AnswerBank, known: Library) -> None:
    question = asked(known, COST)
    bank.keep(question, text("Eleven crowns."))
    lamp = asked(known, WHERE_LAMP)
    for same in (COST, "What's the ferry cost?"):
        other = replace(question, text=same, evidence=lamp.evidence, documents=lamp.documents)
        found = look(bank, other)
        assert found.direct is None and found.refused is not None and "passages" in found.refused


def test_other_terms_never_give_an_answer_at_once(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    found = look(bank, asked(known, COST, terms="another model"))
    assert found.direct is None and found.refused is not None and "another model" in found.refused
    assert len(found.drafts) == 1


def test_an_answer_of_the_right_terms_is_found_beside_those_of_others(bank: AnswerBank, known: Library) -> None:
    for number in range(8):
        bank.keep(asked(known, COST, terms=f"t{number}"), text(f"Answer {number}."))
    for number in range(8):
        found = look(bank, asked(known, COST, terms=f"t{number}"))
        assert found.direct is not None and found.direct.entry.answer == text(f"Answer {number}.")


def test_an_open_question_gives_nothing_and_does_not_replace_an_answer(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), None, "abstract")
    found = look(bank, asked(known, COST))
    assert found.direct is None and found.drafts == () and found.refused is not None
    bank.keep(asked(known, COST), text("Eleven crowns."))
    bank.keep(asked(known, COST), None)
    entry = the_only(bank)
    assert entry.state == "fresh" and entry.origin == "abstract" and entry.asked is not None
    assert look(bank, asked(known, COST)).direct is not None


def test_a_better_answer_replaces_the_old_one(bank: AnswerBank, known: Library) -> None:
    first = bank.keep(asked(known, COST), text("Ten."))
    assert bank.keep(asked(known, COST), text("Eleven crowns.")) == first
    assert the_only(bank).answer == text("Eleven crowns.")


def test_an_answer_that_was_cut_off_does_not_replace_a_whole_one(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns, and for children nine."))
    bank.keep(asked(known, COST), text("Eleven", finish="length"))
    entry = the_only(bank)
    assert entry.answer == text("Eleven crowns, and for children nine.") and entry.asked == entry.made + 1
    bank.keep(asked(known, WHERE_LAMP), text("Nine", finish="length"))
    bank.keep(asked(known, WHERE_LAMP), text("Nine hours", finish="length"))
    bank.keep(asked(known, WHERE_LAMP), text("Nine hours."))
    found = look(bank, asked(known, WHERE_LAMP)).direct
    assert found is not None and found.entry.answer == text("Nine hours.")
    known.put([cut("ferry", "The ferry to Ormund costs twelve crowns.", seed=201)], "e")
    bank.keep(asked(known, COST), text("Twelve", finish="length"))
    assert bank.entries([entry.id])[0].answer == text("Twelve", finish="length")


def test_an_answer_that_was_cut_off_is_a_draft_only(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven", finish="length"))
    found = look(bank, asked(known, COST))
    assert found.direct is None and found.refused is not None and "cut off by a token limit" in found.refused
    assert [near.entry.question for near in found.drafts] == [COST]


def test_history_open_and_counts(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven."))
    bank.keep(asked(known, WHERE_LAMP), None, "abstract")
    bank.keep(asked(known, "Who lights the lamp?"), None)
    assert [entry.question for entry in bank.history(9)] == [COST, "Who lights the lamp?"]
    assert [entry.question for entry in bank.history(1)] == ["Who lights the lamp?"]
    bank.keep(asked(known, COST), None)  # asked again
    assert [entry.question for entry in bank.history(9)] == ["Who lights the lamp?", COST]
    assert [entry.question for entry in bank.entries(where=WAITING, max_count=9)] == [
        "Who lights the lamp?",
        WHERE_LAMP,
    ]
    known.put([cut("ferry", "The ferry to Ormund costs twelve crowns.", seed=201)], "e")
    assert [entry.question for entry in bank.entries(where=WAITING, max_count=9)] == [
        COST,
        "Who lights the lamp?",
        WHERE_LAMP,
    ]
    assert len(bank.entries(where=WAITING, max_count=1)) == 1
    counts = bank.counts()
    assert (counts["questions"], counts["fresh"], counts["open"], counts["stale"]) == (3, 0, 2, 1)
    assert counts["bytes"] > 3 * 256


def test_what_was_served_is_counted(bank: AnswerBank, known: Library) -> None:
    id = bank.keep(asked(known, COST), text("Eleven."))
    assert id is not None
    bank.record_use(id, 1.5)
    bank.record_use(id, 0.5)
    assert the_only(bank).uses == 2 and the_only(bank).saved == 2.0
    assert bank.counts()["uses"] == 2 and bank.counts()["saved_seconds"] == 2.0


def test_removing_takes_some_or_all(bank: AnswerBank, known: Library) -> None:
    ids = [bank.keep(asked(known, f"Which ferry number {number}?"), text("one")) for number in range(3)]
    assert bank.remove([id for id in ids[:1] if id is not None]) == 1 and bank.remove([]) == 0
    assert look(bank, asked(known, "Which ferry number 0?")).direct is None
    assert bank.remove() == 2 and bank.counts()["questions"] == 0 and bank.nearest(vector(1), 5) == []
    with known.reading() as connection:
        assert connection.execute("SELECT count(*) FROM grounds").fetchone() == (0,)


def test_an_empty_bank_knows_nothing(bank: AnswerBank, known: Library, tmp_path: Path) -> None:
    assert look(bank, asked(known, COST)) == BankLookup()
    assert bank.entries(where=WAITING, max_count=5) == bank.history(5) == [] and bank.counts()["bytes"] == 0


# -- documents that change


def test_a_changed_document_takes_its_answers_along_and_leaves_the_questions(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    bank.keep(asked(known, WHERE_LAMP), text("Nine hours."))
    known.put([cut("ferry", "The ferry to Ormund costs twelve crowns.", seed=201)], "e")
    found = look(bank, asked(known, COST))
    assert found.direct is None and found.drafts == () and found.refused is not None
    (stale,) = [entry for entry in bank.entries() if entry.state == "stale"]
    assert stale.question == COST and stale.answer is None
    assert look(bank, asked(known, WHERE_LAMP)).direct is not None
    bank.keep(asked(known, COST), text("Twelve crowns."))
    direct = look(bank, asked(known, COST)).direct
    assert direct is not None and direct.entry.answer == text("Twelve crowns.")


def test_a_document_that_changed_twice_still_takes_its_questions_when_it_goes(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    for price in ("twelve", "thirteen"):
        known.put([cut("ferry", f"The ferry to Ormund costs {price} crowns.", seed=201)], "e")
    (entry,) = known.find("ferry")
    known.remove([entry.id])
    assert bank.counts()["questions"] == 0


def test_a_removed_document_takes_questions_and_answers_along(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    bank.keep(asked(known, "Which ferry?"), None, "passage")
    bank.keep(asked(known, WHERE_LAMP), text("Nine hours."))
    (entry,) = known.find("ferry")
    known.remove([entry.id])
    assert [one.question for one in bank.entries()] == [WHERE_LAMP]
    assert look(bank, asked(known, WHERE_LAMP)).direct is not None


def test_without_documents_there_are_no_questions_either(bank: AnswerBank, known: Library) -> None:
    nothing = asked(known, "Zebra, quagga?")
    assert nothing.evidence == ()
    bank.keep(nothing, text("The passages do not say."))
    (ferry,), (lamps,) = known.find("ferry"), known.find("lamps")
    known.remove([ferry.id])
    assert bank.counts()["questions"] == 1
    known.remove([lamps.id])
    assert bank.counts()["questions"] == 0 and bank.nearest(nothing.vector, 5) == []


def test_a_document_that_is_added_counts_if_it_changes_what_is_found(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    known.put([cut("bread", "Bread is baked at four.", seed=300)], "e")
    assert look(bank, asked(known, COST)).direct is not None  # nothing else is found for it
    assert the_only(bank).generation == known.generation  # and that is known from now on
    known.put([cut("prices", "Ferry: cost. What does the ferry cost? Ferry cost: nine crowns.", seed=400)], "e")
    found = look(bank, asked(known, COST))
    assert found.direct is None and found.refused is not None and the_only(bank).state == "stale"


def test_answers_that_are_out_of_date_are_found_when_idle(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    bank.keep(asked(known, WHERE_LAMP), text("Nine hours."))
    known.put([cut("prices", "Ferry: cost. What does the ferry cost? Ferry cost: nine crowns.", seed=400)], "e")
    assert bank.mark_stale(finding(known)) == 1  # type: ignore[arg-type]
    assert bank.mark_stale(finding(known)) == 0  # type: ignore[arg-type]
    assert [entry.question for entry in bank.entries(where=WAITING, max_count=9)] == [COST]


def test_an_answer_whose_document_changed_while_it_was_written_is_not_kept(bank: AnswerBank, known: Library) -> None:
    question = asked(known, COST)
    known.put([cut("ferry", "The ferry to Ormund costs twelve crowns.", seed=201)], "e")
    assert bank.keep(question, text("Eleven crowns.")) is None and bank.entries() == []


def test_an_answer_that_another_passage_changed_while_it_was_written_is_not_given(
    bank: AnswerBank, known: Library
) -> None:
    question = asked(known, COST)
    known.put([cut("prices", "Ferry: cost. What does the ferry cost? Ferry cost: nine crowns.", seed=400)], "e")
    bank.keep(question, text("Eleven crowns."))
    assert look(bank, asked(known, COST)).direct is None


def test_an_old_answer_that_is_kept_late_is_not_taken_for_a_new_one(bank: AnswerBank, known: Library) -> None:
    """Between looking whether a stored answer is current and noting it, another answer takes its place."""
    old = asked(known, COST)
    known.put([cut("prices", "Ferry: cost. What does the ferry cost? Ferry cost: nine crowns.", seed=400)], "e")
    bank.keep(asked(known, COST), text("Nine crowns."))
    known.put([cut("bread", "Bread is baked at four.", seed=300)], "e")
    real = finding(known)

    def then_replaced(*given: object) -> Sequence[int]:
        found = real(*given)  # type: ignore[operator]
        bank.keep(old, text("Eleven crowns."))
        return found  # type: ignore[no-any-return]

    bank.lookup(asked(known, COST), then_replaced, 0.95)
    assert look(bank, asked(known, COST)).direct is None


# -- limits


def test_the_limit_is_never_exceeded(known: Library) -> None:
    limit = 5000
    bank = opened(known, limit_bytes=limit)
    for number in range(60):
        bank.keep(
            asked(known, f"Which ferry is number {number}?"), text("x" * (number * 37 % 900)) if number % 3 else None
        )
        assert bank.counts()["bytes"] <= limit
        assert look(bank, asked(known, f"Which ferry is number {number}?")).direct is not None or number % 3 == 0
    with known.reading() as connection:
        wrong = "SELECT count(*) FROM grounds WHERE answer NOT IN (SELECT id FROM answers)"
        assert connection.execute(wrong).fetchone() == (0,)
        size = "length(CAST(question AS BLOB)) + length(vector) + coalesce(length(text) + length(tokens), 0)"
        assert connection.execute(f"SELECT sum({size}) FROM answers").fetchone()[0] <= limit


def test_an_answer_larger_than_the_limit_is_not_kept(known: Library) -> None:
    bank = opened(known, limit_bytes=2000)
    bank.keep(asked(known, COST), text("x" * 5000))
    assert bank.counts() == dict.fromkeys(bank.counts(), 0)


def test_by_worth_what_is_stale_goes_before_what_saves_time(known: Library) -> None:
    bank = opened(known, limit_bytes=3000)
    bank.keep(asked(known, WHERE_LAMP), text("x" * 100, seconds=50.0))
    bank.keep(asked(known, COST), text("x" * 100, seconds=50.0))
    bank.keep(asked(known, "Which ferry is cheap?"), text("x" * 100, seconds=0.1))
    known.put([cut("ferry", "The ferry to Ormund costs twelve crowns.", seed=201)], "e")
    bank.keep(asked(known, "Which lamp is cheap?"), text("x" * 300, seconds=0.1))
    assert "fresh" in {entry.state for entry in bank.entries() if entry.question == WHERE_LAMP}
    assert not [entry for entry in bank.entries() if entry.state == "stale"] or len(bank.entries()) == 4


# -- whose it is


@pytest.mark.parametrize(("tenant", "salt"), [("other", ""), ("local", "salted")])
def test_tenants_and_salts_never_see_each_others(tenant: str, salt: str, known: Library, tmp_path: Path) -> None:
    theirs = library(tmp_path, tenant, salt)
    theirs.put([cut("lamps", LAMPS, seed=100), cut("ferry", FERRY, seed=200)], "e")
    one, two = opened(known), opened(theirs)
    one.keep(asked(known, COST), text("Eleven crowns."))
    assert look(two, asked(theirs, COST)) == BankLookup() and two.counts()["questions"] == 0
    two.keep(asked(theirs, COST), text("Twelve."))
    assert look(one, asked(known, COST)).direct is not None
    assert one.entries()[0].answer == text("Eleven crowns.")
    theirs.remove([entry.id for entry in theirs.entries()])
    assert one.counts()["questions"] == 1 and two.counts()["questions"] == 0


OTHER = """
import sys
from pathlib import Path
from tests.answers.test_bank import COST, asked, cut, library, look, opened, text
known = library(Path(sys.argv[1]))
bank = opened(known)
if sys.argv[2] == "keep":
    for number in range(20):
        bank.keep(asked(known, f"Which ferry number {sys.argv[3]}{number}?"), text(sys.argv[3]))
elif sys.argv[2] == "change":
    known.put([cut("ferry", "The ferry to Ormund costs twelve crowns.", seed=201)], "e")
else:
    found = look(bank, asked(known, COST))
    print(found.direct.entry.answer.text if found.direct else found.refused)
"""


def other(folder: Path, *what: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OTHER, str(folder), *what]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(process: subprocess.Popen[str]) -> str:
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    return out.strip()


@pytest.mark.thorough
def test_processes_share_a_bank(bank: AnswerBank, known: Library, tmp_path: Path) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    assert done(other(tmp_path, "look")) == "Eleven crowns."
    keeping = [other(tmp_path, "keep", name) for name in "ab"]
    for number in range(20):
        bank.keep(asked(known, f"Which ferry number c{number}?"), text("c"))
    for process in keeping:
        done(process)
    assert bank.counts()["questions"] == 61
    for name in "abc":
        found = look(bank, asked(known, f"Which ferry number {name}7?"))
        assert found.direct is not None and found.direct.entry.answer == text(name)
    done(other(tmp_path, "change"))
    assert look(bank, asked(known, COST)).direct is None
    assert "up to date" in done(other(tmp_path, "look"))


def test_vectors_of_another_embedder_are_never_mixed_in(bank: AnswerBank, known: Library) -> None:
    """Two sessions with two embedders: the library is one's, and no vector of the other one gets in."""
    stranger = AnswerBank(known, "other", 2 * DIMENSIONS, clock=Clock())
    question = asked(known, WHERE_LAMP)
    stranger.keep(replace(question, vector=np.ones(2 * DIMENSIONS, np.float32) / 4), text("Nine hours."))
    bank.keep(asked(known, COST), text("Eleven crowns."))
    assert look(bank, asked(known, COST)).direct is not None
    assert len(VectorIndex(known, DIMENSIONS, "answers").snapshot("e").ids) == 1
    assert stranger.nearest(np.ones(2 * DIMENSIONS, np.float32), 5) == []


def test_another_embedder_that_takes_over_drops_the_vectors(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    known.put([cut("bread", "Bread is baked at four.", seed=300)], "another")
    assert bank.nearest(asked(known, COST).vector, 5) == []
    late = AnswerBank(known, "another", DIMENSIONS)
    assert late.nearest(asked(known, COST).vector, 5) == [] and late.counts()["questions"] == 1
    late.keep(asked(known, COST), text("Eleven crowns."))
    assert late.lookup(asked(known, COST), finding(known), 0.9).direct is not None  # type: ignore[arg-type]


# -- damage, and older files


def spoil(known: Library, column: str, value: object) -> None:
    with known.writing() as connection:
        connection.execute(f"UPDATE answers SET {column}=?", (value,))
        connection.execute("UPDATE about SET value=CAST(value AS INTEGER)+1 WHERE name='answers'")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("vector", b"\1\2\3"),
        ("vector", b""),
        ("vector", b"\xff" * 2 * DIMENSIONS),
        ("vector", "text"),
        ("evidence", b"1"),
        ("evidence", b""),
        ("tokens", b"abc"),
        ("tokens", None),
        ("generation", -5),
    ],
)
def test_a_damaged_row_is_no_answer_and_does_not_hide_the_others(
    column: str, value: object, bank: AnswerBank, known: Library
) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    spoil(known, column, value)
    bank.keep(asked(known, WHERE_LAMP), text("Nine hours."))
    fresh = opened(known)
    served = look(fresh, asked(known, COST)).direct
    right = column in ("generation", "vector")  # the identical question is told by its text
    assert (served is not None) == right
    assert look(fresh, asked(known, WHERE_LAMP)).direct is not None
    assert look(bank, asked(known, WHERE_LAMP)).direct is not None
    bank.keep(asked(known, COST), text("Eleven crowns."))
    assert look(opened(known), asked(known, COST)).direct is not None  # keeping it again replaces it


@pytest.mark.parametrize("column", ["text", "question", "terms", "finish", "tokenizer"])
def test_a_row_whose_text_is_no_text_hides_none_of_the_others(column: str, bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    with known.writing() as connection:
        connection.execute(f"UPDATE answers SET {column}=CAST(x'ff41' AS TEXT)")
    bank.keep(asked(known, WHERE_LAMP), text("Nine hours."))
    assert [entry.question for entry in bank.entries()] == [WHERE_LAMP]
    assert look(bank, asked(known, COST)).direct is None
    assert look(bank, asked(known, WHERE_LAMP)).direct is not None


def test_a_library_of_the_first_format_keeps_its_documents(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("lamps", LAMPS, seed=100)], "e")
    known.close()
    old = tmp_path / "old.sqlite"
    with sqlite3.connect(old) as connection:
        connection.executescript(MIGRATIONS[0])
        connection.execute("ATTACH ? AS now", (str(known.path),))
        for table in ("about", "files", "documents", "chunks", "tokens"):
            connection.execute(f"INSERT INTO {table} SELECT * FROM now.{table}")
        connection.execute("INSERT INTO words (rowid, title, body) SELECT id, title, body FROM searched")
        connection.execute("PRAGMA user_version=1")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    for suffix in ("", "-wal", "-shm"):
        Path(f"{known.path}{suffix}").unlink(missing_ok=True)
    old.rename(known.path)
    again = library(tmp_path)
    assert [entry.source for entry in again.entries()] == ["lamps"] and again.counts()["embedded"] == 1
    bank = opened(again)
    bank.keep(asked(again, WHERE_LAMP), text("Nine hours."))
    assert look(bank, asked(again, WHERE_LAMP)).direct is not None
    again.close()
    with sqlite3.connect(known.path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)


def test_a_question_that_patterns_made_of_a_document_counts_as_predicted_from_it(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("lamps", LAMPS, seed=100)], "e")
    opened(known).keep(asked(known, WHERE_LAMP), text("Nine hours."), "abstract")
    with known.writing() as connection:
        connection.execute("UPDATE answers SET origin='passage'")
    known.close()
    with sqlite3.connect(known.path) as connection:
        connection.execute("PRAGMA user_version=5")
    again = library(tmp_path)
    assert [entry.origin for entry in opened(again).entries()] == ["abstract"]
    again.close()


def test_a_vector_of_no_numbers_is_near_nothing(bank: AnswerBank, known: Library) -> None:
    bank.keep(asked(known, COST), text("Eleven crowns."))
    spoil(known, "vector", b"\xff" * 2 * DIMENSIONS)
    assert look(opened(known), asked(known, "What's the ferry cost?")) == BankLookup()


def test_vectors_are_kept_in_half_precision(bank: AnswerBank, known: Library) -> None:
    question = asked(known, COST)
    bank.keep(question, text("Eleven."))
    with known.reading() as connection:
        row = connection.execute("SELECT vector, tokens FROM answers").fetchone()
    assert row == (to_stored(question.vector[None])[0], token_bytes(list(b"Eleven.")))


def test_a_reply_that_only_cites_is_never_an_answer_of_the_bank(known: Library, bank: AnswerBank) -> None:
    question = asked(known, COST)
    only_cited = AnswerText("[1]", (1, 2), "t", "stop", 1.0)
    id = bank.keep(question, only_cited)
    assert id is not None and bank.entries([id])[0].state == "open" and bank.entries([id])[0].answer is None
    bank.keep(question, AnswerText("Eleven crowns.", (3, 4), "t", "stop", 1.0))
    with known.writing() as connection:  # as an earlier version kept it
        connection.execute("UPDATE answers SET text='[1], [2]'")
    found = bank.lookup(question, finding(known), 0.85)  # type: ignore[arg-type]
    assert found.direct is None and found.drafts == ()
    assert bank.entries([id])[0].answer is None


def test_a_question_about_relevant_passages_is_found_again_as_that(known: Library, bank: AnswerBank) -> None:
    question = replace(asked(known, COST), top_k=None)
    id = bank.keep(question, AnswerText("Eleven crowns.", (3, 4), "t", "stop", 1.0))
    assert id is not None and bank.entries([id])[0].top_k is None
    known.put([cut("news", "The lamp was sold.", seed=300)], "e")
    seen: list[int | None] = []

    def retrieve(_question: str, top_k: int | None, _retrieval: Retrieval) -> Sequence[int]:
        seen.append(top_k)
        return question.evidence

    assert bank.lookup(question, retrieve, 0.85).direct is not None
    assert bank.mark_stale(retrieve) == 0 and set(seen) == {None}
