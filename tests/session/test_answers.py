"""Earlier answers: given only where they are still right, checked where they may not be, and always told."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rekindle import Session
from rekindle.core.document import Document, Passage, Section
from rekindle.core.grammar import Grammar
from rekindle.core.reply import Answer, Usage
from rekindle.core.request import MAX_DRAFTS
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import END, VOCABULARY, FakeEngine
from rekindle.engine.reloadable import ReloadableEngine
from rekindle.errors import InvalidSetting, NothingKnown
from rekindle.knowledge.rows import SplitDocument
from tests.lora import fake_pairs, save_lora
from tests.server.soak import tiny_embedder
from tests.session.asking import Terse, Waiting, forms_of_text, forms_of_tokens, traces

pytestmark = pytest.mark.thorough

LAMPS = "The lamp in the hall burns for nine hours. Its oil comes from the harbour town of Vesk."
BOATS = "Boats leave Vesk on Tuesdays. The ferry to Ormund costs eleven crowns."
BREAD = "Bread is baked at four in the morning. The baker is called Tomas Ivarsen."
FERRY = "What does the ferry to Ormund cost?"
HOW: dict[str, Any] = {"top_k": 1, "retrieval": "bm25", "max_tokens": 16, "min_tokens": 12}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


def documents(*texts: str) -> list[dict[str, str]]:
    return [{"text": text, "source": text[:4]} for text in texts]


@pytest.fixture
def open_session(tmp_path: Path, embedder: str) -> Callable[..., Session]:
    def opened(engine: Any = None, **settings: Any) -> Session:
        chosen = {"cache": tmp_path / "cache", "embedder": embedder, "answers": "direct", **settings}
        return Session(engine or Terse(), **chosen)

    return opened


@pytest.fixture
def session(open_session: Callable[..., Session]) -> Iterator[Session]:
    with open_session() as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        yield session


def ask(session: Session, question: str = FERRY, **options: Any) -> Answer:
    answer = session.ask(question, **{**HOW, **options})
    assert session.flush()
    return answer


def way(answer: Answer) -> str | None:
    return None if answer.stored is None else answer.stored.way


# -- given, checked, told


def test_a_stored_answer_wakes_no_model_that_rests(open_session: Callable[..., Session]) -> None:
    engine = ReloadableEngine(Terse)
    with open_session(engine) as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        first = ask(session)
        assert session.cache.rest()
        engine.rest()
        again = ask(session)
        assert way(again) == "direct" and again.text == first.text and engine.resting
        assert ask(session, "Who is the baker?").tokens and not engine.resting


def test_the_identical_question_gets_the_stored_answer_and_is_told_so(session: Session) -> None:
    first, second = ask(session), ask(session)
    assert way(first) is None and first.refused is not None and "no earlier question is near enough" in first.refused
    assert second.text == first.text and second.tokens == first.tokens and second.finish_reason == first.finish_reason
    assert second.stored is not None and second.stored.way == "direct"
    assert second.stored.question == FERRY and second.stored.origin == "user"
    assert second.stored.similarity == pytest.approx(1, abs=2e-3)
    assert second.stored.saved_seconds is not None and second.stored.saved_seconds > 0
    assert abs(second.stored.made - time.time()) < 600
    assert [source.text for source in second.sources] == [BOATS] and second.reuse.computed == 0
    assert second.usage == Usage(0, 0, quoted_passages=1) and first.usage.completion_tokens == len(first.tokens)
    assert "stored answer of" in second.summary() and FERRY in second.summary()
    assert "stored answer of" in second._repr_html_()
    told = json.loads(json.dumps(second.as_dict()))
    assert told["stored"]["way"] == "direct" and told["stored"]["question"] == FERRY and told["refused"] is None
    assert ask(session, answers="off").text == first.text


def test_a_stored_answer_asks_nothing_of_the_model(session: Session) -> None:
    ask(session)

    def refuse(*_: object) -> list[Logits]:
        raise AssertionError("the model was asked")

    session.engine.step = refuse  # type: ignore[method-assign]
    stream = session.ask_stream(FERRY, **HOW)
    assert list(stream) == [stream.answer.text] and way(stream.answer) == "direct"
    assert [source.text for source in stream.sources] == [BOATS]


def test_a_checked_answer_is_the_models_own_and_is_told_so(session: Session) -> None:
    without = ask(session, answers="off")
    assert way(without) is None and session.answers.bank().counts()["questions"] == 0
    first, second = (ask(session, answers="verified") for _ in range(2))
    assert first.text == second.text == without.text and way(first) is None
    assert second.stored is not None and second.stored.way == "verified" and second.stored.saved_seconds is None
    assert second.usage.drafted_tokens > 6 and "checked against the answer of" in second.summary()
    assert second.as_dict()["stored"]["way"] == "verified" and second.refused is None
    other = ask(session, "Which ferry goes to Ormund, and for how many crowns?", answers="verified")
    assert other.text == ask(session, "Which ferry goes to Ormund, and for how many crowns?", answers="off").text


def test_greedy_questions_are_checked_by_default_and_others_are_not_kept(open_session: Callable[..., Session]) -> None:
    with open_session(answers="auto") as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        ask(session, temperature=0.8, seed=1)
        session.chat(FERRY, max_tokens=4)
        assert session.flush() and session.answers.bank().counts()["questions"] == 0
        alone = ask(session, answers="off")
        first, second = ask(session), ask(session)
        assert first.text == second.text == alone.text and first.tokens == alone.tokens
        assert way(first) is None and way(second) == "verified" and second.usage.drafted_tokens > 6
        assert session.chat(FERRY, max_tokens=4).usage.drafted_tokens == 0
    with open_session(answers="auto", deterministic=True) as session:  # which uses no drafts
        ask(session, "Who is the baker?")
        assert session.answers.bank().counts()["questions"] == 1


def test_the_first_documents_say_what_is_kept(open_session: Callable[..., Session]) -> None:
    with open_session(answers="auto") as session:
        assert session.ingest(documents=documents(LAMPS)).begun == 1
        assert session.ingest(documents=documents(BOATS)).begun == 0
        kept = session.knowledge.what_is_kept("here")
        assert kept is not None and all(part in kept for part in ("in here", "100MB", "answers=off", "answers rm"))
    for chosen in ("off", "verified", "direct"):
        with open_session(answers=chosen) as session:  # somebody who chose knows
            assert session.knowledge.what_is_kept("here") is None


def test_an_answer_that_is_not_given_says_why(open_session: Callable[..., Session]) -> None:
    with open_session(similarity_threshold=0.0) as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        ask(session)
        near = ask(session, "What does the ferry to Vesk cost?")
        assert way(near) != "direct" and near.refused is not None and FERRY in near.refused
        assert near.as_dict()["refused"] == near.refused
        assert near.text == ask(session, "What does the ferry to Vesk cost?", answers="off").text


def test_a_question_in_other_words_gets_the_stored_answer(open_session: Callable[..., Session]) -> None:
    with open_session(similarity_threshold=0.0) as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        first = ask(session)
        same = ask(session, "  What's the ferry to Ormund cost ")
        assert way(same) == "direct" and same.text == first.text
        history = [entry.question for entry in session.answers.bank().history(9)]
        assert history == [FERRY, "What's the ferry to Ormund cost"]  # to be answered truly when there is time
        assert [entry.question for entry in session.answers.bank().entries(where="state!='fresh'")] == [
            "What's the ferry to Ormund cost"
        ]
        assert session.answers.bank().counts()["uses"] == 1


def test_what_is_not_near_enough_is_not_given(open_session: Callable[..., Session]) -> None:
    with open_session(similarity_threshold=1.0) as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        ask(session)
        answer = ask(session, "What's the ferry to Ormund cost?")
        assert way(answer) != "direct" and answer.refused is not None and "similarity_threshold=1;" in answer.refused
        assert way(ask(session)) == "direct"  # the very same question needs no likeness


async def test_answers_can_be_awaited(session: Session) -> None:
    ask(session)
    answer = await session.aask(FERRY, **HOW)
    assert way(answer) == "direct"


def test_a_stream_that_is_left_keeps_nothing(session: Session) -> None:
    stream = session.ask_stream(FERRY, **HOW)
    next(stream)
    stream.close()
    session.flush()
    assert session.answers.bank().counts()["questions"] == 0


def test_a_stored_answer_can_be_read_after_the_session_was_closed(open_session: Callable[..., Session]) -> None:
    session = open_session()
    session.ingest(documents=documents(BOATS))
    first = ask(session)
    stream = session.ask_stream(FERRY, **HOW)
    session.close()
    assert stream.answer.text == first.text


def test_answers_are_there_after_a_restart(open_session: Callable[..., Session]) -> None:
    with open_session() as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        first = session.ask(FERRY, **HOW)
    with open_session() as session:
        assert way(ask(session)) == "direct" and ask(session).text == first.text


# -- what an answer depends on


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.5, "seed": 1},
        {"repetition_penalty": 1.1},
        {"instructions": "Answer in rhymes."},
        {"reuse": "quantized"},
        {"stop": ["\n"]},
        {"min_tokens": 3},
        {"adapter": "a0"},
        {"max_tokens": 12},
        {"max_tokens": 16, "min_tokens": 0},
    ],
    ids=str,
)
def test_an_answer_that_was_asked_for_otherwise_is_never_given(
    session: Session, other: dict[str, Any], tmp_path: Path
) -> None:
    session.adapters.load("a0", save_lora(tmp_path / "lora", fake_pairs(0)))
    ask(session)
    answer = ask(session, **other)
    assert way(answer) != "direct"
    assert way(ask(session)) == "direct"


def test_another_models_answer_is_never_given(open_session: Callable[..., Session]) -> None:
    with open_session() as session:
        session.ingest(documents=documents(LAMPS, BOATS, BREAD))
        first = ask(session)
    with open_session(Terse(seed=1)) as session:
        other = ask(session)
        assert way(other) != "direct" and other.text != first.text
        assert other.refused is not None and "another model" in other.refused
        assert ask(session, answers="off").text == other.text
    with open_session() as session:
        assert way(ask(session)) == "direct" and ask(session).text == first.text


def test_another_adapter_under_the_same_name_is_another_model(session: Session, tmp_path: Path) -> None:
    for number in range(2):
        session.adapters.load("writer", save_lora(tmp_path / f"lora{number}", fake_pairs(number)))
        assert way(ask(session, adapter="writer")) != "direct"
        assert way(ask(session, adapter="writer")) == "direct"
    assert way(ask(session)) != "direct"


def test_other_passages_make_it_another_question(session: Session) -> None:
    """The same words, but what is found by meaning is something else: the answer came from another passage."""
    ask(session)
    hits = session.knowledge.search(FERRY, 1, "embedding").hits
    answer = ask(session, retrieval="embedding")
    assert (way(answer) == "direct") == (hits[0].chunk.passage.text == BOATS)


def test_an_answer_that_was_cut_off_is_never_given(open_session: Callable[..., Session]) -> None:
    with open_session(FakeEngine(context_tokens=4000)) as session:
        session.ingest(documents=documents(BOATS))
        for count in (6, 6, 5, 7):
            answer = ask(session, max_tokens=count, min_tokens=0)
            assert answer.finish_reason == "length" and len(answer.tokens) == count and way(answer) != "direct"


def test_what_was_cut_off_says_so_and_is_still_a_draft(session: Session) -> None:
    first, second = (ask(session, max_tokens=12) for _ in range(2))
    assert first.finish_reason == second.finish_reason == "length" and second.text == first.text
    assert second.refused is not None and "cut off by a token limit" in second.refused
    assert way(second) == "verified" and second.usage.drafted_tokens > 6


def test_an_answer_that_ended_is_given_wherever_it_fits(session: Session) -> None:
    letter = ask(session, answers="off").text[5]
    free = {"min_tokens": 0, "stop": [letter]}
    first = ask(session, max_tokens=30, **free)
    assert first.finish_reason == "stop"
    count = len(first.tokens)
    assert way(ask(session, max_tokens=count, **free)) == way(ask(session, max_tokens=500, **free)) == "direct"
    shorter = ask(session, max_tokens=count - 1, **free)
    assert way(shorter) != "direct" and len(shorter.tokens) == count - 1


@pytest.mark.parametrize(
    "options",
    [
        {"answers": "off"},
        {"max_tokens": 0, "min_tokens": 0},
        {"logprobs": 1},
        {"grammar": Grammar("regex", "[a-z]{12}")},
        {"messages": [{"role": "user", "content": "And then?"}]},
    ],
    ids=str,
)
def test_what_is_no_plain_question_neither_gets_nor_leaves_an_answer(session: Session, options: dict[str, Any]) -> None:
    ask(session)
    before = session.answers.bank().counts()
    answer = ask(session, **options)
    assert answer.stored is None and answer.refused is None and session.answers.bank().counts() == before


def test_many_drafts_of_a_user_leave_no_room_and_no_error(session: Session) -> None:
    first = ask(session, answers="verified")
    again = ask(session, answers="verified", drafts=[[1, 2, 3]] * MAX_DRAFTS)
    assert again.text == first.text


def test_asking_where_nothing_is_known_makes_no_bank(open_session: Callable[..., Session]) -> None:
    with open_session() as session:
        with pytest.raises(NothingKnown):
            session.ask(FERRY, tenant="nobody")
        assert not session.knowledge.holds("nobody")


# -- whose they are


@pytest.mark.parametrize("whose", [{"tenant": "other"}, {"cache_salt": "salt"}], ids=str)
def test_nobody_gets_what_somebody_else_was_told(session: Session, whose: dict[str, str]) -> None:
    session.ingest(documents=documents(LAMPS, BOATS, BREAD), **whose)
    first = ask(session)
    theirs = ask(session, **whose)
    assert way(theirs) is None and theirs.usage.drafted_tokens == 0
    assert theirs.refused is not None and FERRY not in theirs.refused
    assert theirs.text == first.text and way(ask(session, **whose)) == "direct"
    session.forget("Boat", **whose)
    assert way(ask(session)) == "direct"


# -- documents that change


def test_a_changed_document_makes_the_model_answer_anew(session: Session) -> None:
    first = ask(session)
    session.ingest(documents=[{"text": BOATS.replace("eleven", "forty"), "source": "Boat"}])
    changed = ask(session)
    assert way(changed) is None and changed.refused is not None and changed.text != first.text
    assert way(ask(session)) == "direct" and ask(session).text == changed.text


def test_an_added_document_counts_only_where_it_is_found(session: Session) -> None:
    ask(session)
    session.ingest(documents=documents("Tea is served at five. The kettle stands on the left of the stove."))
    assert way(ask(session)) == "direct"
    session.ingest(
        documents=documents("Ferry to Ormund, cost: the ferry to Ormund does cost forty crowns. Ferry cost!")
    )
    answer = ask(session)
    assert way(answer) != "direct" and answer.sources[0].text.startswith("Ferry to Ormund")


def test_a_removed_document_takes_questions_and_answers_along(session: Session) -> None:
    ask(session)
    ask(session, "Who is the baker?")
    session.forget("Boat")
    assert [entry.question for entry in session.answers.bank().entries()] == ["Who is the baker?"]


def test_an_answer_whose_document_changed_meanwhile_is_given_and_not_kept(
    open_session: Callable[..., Session],
) -> None:
    engine = Waiting()
    with open_session(engine) as session:
        session.ingest(documents=documents(BOATS, BREAD))
        engine.go.clear()
        engine.entered.clear()
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(session.ask(FERRY, **HOW)))
        thread.start()
        assert engine.entered.wait(60)
        library, digest = session.knowledge.library(), session.knowledge.embedder().digest
        library.put([version_of(7, "Boat")], digest)
        engine.go.set()
        thread.join(60)
        session.flush()
        assert answers and session.answers.bank().counts()["questions"] == 0
        assert way(ask(session)) is None


_SAYS = b"page is version "


class Reading(FakeEngine):
    """An engine that answers every question with the number of the version that its prompt quotes."""

    def __init__(self) -> None:
        super().__init__(context_tokens=4000)
        self.read: dict[int, dict[int, int]] = {}

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        return [self._next(row) for row in rows]

    def _next(self, row: Row) -> Logits:
        known = self.read.setdefault(id(row.sequence), {})
        if int(row.positions[0]) == 0:
            known.clear()
        known.update(zip(map(int, row.positions), row.tokens, strict=True))
        row.sequence.set_length(max(known) + 1)  # type: ignore[attr-defined]
        wanted = list(map(int, row.positions))[0 if row.logits == "all" else -1 :]
        logits = np.zeros((len(wanted), VOCABULARY), np.float32)
        for place, position in enumerate(wanted):
            logits[place, self._after([known[at] for at in range(position + 1)])] = 9.0
        return logits

    def _after(self, tokens: list[int]) -> int:
        said = bytes(token if token < END else 0 for token in tokens)
        number = said.split(_SAYS, 1)[1].split(b".", 1)[0] if _SAYS in said else b""
        written = said.rsplit(b"assistant\n", 1)[-1] if said.count(b"assistant\n") else b""
        return number[len(written)] if len(written) < len(number) else END


def version_of(number: int, source: str = "page") -> SplitDocument:
    """A document that says which one it is."""
    text = f"The lighthouse page is version {number}."
    return SplitDocument(Document(source, source, (Section(text),)), [Passage(text)], [None], "as given")


@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_after_a_change_no_answer_from_before_is_ever_given(embedder: str, tmp_path: Path, rounds: int) -> None:
    """Many changes, each with a question at the same time, and now and then one right behind it."""
    question = "Which version is the lighthouse page?"
    rng = random.Random(0)
    how: dict[str, Any] = {"top_k": 1, "retrieval": "bm25", "max_tokens": 9}
    settings: dict[str, Any] = {"cache": "off", "library": tmp_path / "library", "embedder": embedder}
    asking, done = threading.Barrier(2), threading.Barrier(2)
    wrong: list[str] = []
    ways: list[str | None] = []
    with Session(Reading(), answers="direct", **settings) as session:
        library, digest = session.knowledge.library(), session.knowledge.embedder().digest
        library.put([version_of(0)], digest)

        def ask_beside() -> None:
            for number in range(1, rounds + 1):
                asking.wait(60)
                try:
                    answer = session.ask(question, **how)
                    ways.append(way(answer))
                    if answer.sources and int(answer.text) not in (number - 1, number):
                        wrong.append(f"{answer.text} beside change {number}: {way(answer)}")
                except Exception as error:  # noqa: BLE001  (shown below)
                    wrong.append(repr(error))
                done.wait(60)

        thread = threading.Thread(target=ask_beside, daemon=True)
        thread.start()
        for number in range(1, rounds + 1):
            asking.wait(60)
            time.sleep(rng.random() * 0.003)
            library.put([version_of(number)], digest)
            if number % 4 == 0:
                answer = session.ask(question, **how)
                ways.append(way(answer))
                if answer.text != str(number):
                    wrong.append(f"{answer.text} after change {number}: {way(answer)}")
            done.wait(60)
            if number % 10 == 0:
                session.flush()
                again = session.ask(question, **how)
                ways.append(way(again))
                if again.text != str(number):
                    wrong.append(f"{again.text} long after change {number}: {way(again)}")
        thread.join(60)
    assert wrong == []
    assert ways.count("direct") > rounds / 20  # so the law is not empty


# -- forgetting

SECRET = (
    "The combination of the safe is 83-14-27. Only Agneta Falkenrath knows it. She wrote it on the back of the "
    "photograph that hangs beside the barometer in the chartroom. On Sundays the xylographer comes."
)
ASKED = "Which combination opens the safe that Agneta Falkenrath keeps?"
FORESEEN = "Where does the photograph with the pencilled numbers hang, according to the xylographer?"
ABSTRACT = "A note about a locked strongbox and the person who remembers how it is opened."


def test_after_forgetting_no_byte_of_questions_answers_or_abstracts_is_left(
    open_session: Callable[..., Session], tmp_path: Path
) -> None:
    how = {**HOW, "max_tokens": 44, "min_tokens": 40}
    with open_session() as session:
        session.ingest(documents=[{"text": SECRET, "source": "safe"}, {"text": BREAD, "source": "bread"}])
        answer = session.ask(ASKED, **how)
        session.ask("Who is the baker?", **HOW)
        session.flush()
        foreseen = session.prepare(FORESEEN, **HOW)
        assert foreseen.consulted is not None
        bank = session.answers.bank()
        assert bank.keep(foreseen.consulted.question, None, "passage") is not None
        with bank.library.writing() as connection:
            (entry,) = bank.library.find("safe")
            connection.execute("INSERT INTO abstracts VALUES (?,?,?)", (entry.id, ABSTRACT, 1.0))
        session.ask(ASKED, **how)  # given from the bank
        session.flush()

    def everything() -> list[bytes]:
        texts = (ASKED, FORESEEN, ABSTRACT)
        forms = [form for text in texts for form in forms_of_text(text)]
        return [*forms, *forms_of_tokens(answer.tokens, 12), answer.text[:16].encode()]

    for trace in (ASKED, FORESEEN, ABSTRACT, answer.text):
        assert traces(tmp_path / "cache", [trace.encode()[:20]]), f"{trace!r} was never there"
    with open_session() as session:
        session.forget("safe")
        assert traces(tmp_path / "cache", everything()) == {}
        assert traces(tmp_path / "cache", [b"xylograph", b"falkenrath", b"Falkenrath", b"strongbox"]) == {}
        assert way(session.ask("Who is the baker?", **HOW)) == "direct"
    assert traces(tmp_path / "cache", everything()) == {}


def test_a_changed_document_leaves_no_byte_of_its_answers(open_session: Callable[..., Session], tmp_path: Path) -> None:
    how = {**HOW, "max_tokens": 44, "min_tokens": 40}
    with open_session() as session:
        session.ingest(documents=[{"text": SECRET, "source": "safe"}])
        answer = session.ask(ASKED, **how)
        session.flush()
        session.ingest(documents=[{"text": BREAD, "source": "safe"}])
        assert [entry.question for entry in session.answers.bank().entries(where="state!='fresh'")] == [ASKED]
    forms = [*forms_of_tokens(answer.tokens, 12), answer.text[:16].encode(), *forms_of_text(SECRET)]
    assert traces(tmp_path / "cache", forms) == {}


# -- chats with documents of their own


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": FERRY}]
GIVEN: dict[str, Any] = {"documents": [BOATS, BREAD], "max_tokens": 16, "min_tokens": 12}


def chat(session: Session, **options: Any) -> Any:
    reply = session.chat(CHAT, **{**GIVEN, **options})
    assert session.flush()
    return reply


def test_a_chat_with_documents_gives_and_keeps_answers_without_a_library(open_session: Callable[..., Session]) -> None:
    with open_session() as session:
        first, second = chat(session), chat(session)
        assert way(first) is None and way(second) == "direct" and second.text == first.text
        assert [source.text for source in second.sources] == [BOATS, BREAD] and second.reuse.computed == 0
        assert chat(session, answers="off").text == first.text
        verified = chat(session, answers="verified")
        assert way(verified) == "verified" and verified.text == first.text


@pytest.mark.parametrize(
    "other",
    [{"documents": [BOATS]}, {"documents": [BREAD, BOATS]}, {"tenant": "b"}, {"cache_salt": "x"}, {"top_p": 0.5}],
)
def test_other_documents_tenants_and_terms_are_another_question(
    open_session: Callable[..., Session], other: dict[str, Any]
) -> None:
    with open_session() as session:
        chat(session)
        assert way(chat(session)) == "direct" and way(chat(session, **other)) != "direct"


def test_the_library_has_no_part_in_answers_about_documents_of_a_chat(session: Session) -> None:
    first = chat(session)
    session.ingest(documents=documents("Another note about ferries."))  # changes every retrieval
    again = chat(session)
    assert way(again) == "direct" and again.text == first.text
    retrieve = session.answers.retrieving(None, None)
    assert session.answers.bank().mark_stale(retrieve) == 0
    assert way(ask(session)) != "direct"


def test_a_chat_with_documents_keeps_nothing_unless_somebody_chose(open_session: Callable[..., Session]) -> None:
    with open_session(answers="auto") as session:
        assert not isinstance(chat(session), Answer) and not session.knowledge.holds()


# -- the command


def test_the_command_tells_where_an_answer_came_from(tmp_path: Path, tiny_folder: Path, embedder: str) -> None:
    from rekindle.cli.main import app

    where = ["--cache", str(tmp_path / "cache"), "--embedder", embedder]
    file = tmp_path / "boats.txt"
    file.write_text(BOATS)
    assert CliRunner().invoke(app, ["ingest", str(file), *where]).exit_code == 0

    def told(*more: str) -> Any:
        command = [
            "ask",
            "ferry?",
            "--model",
            str(tiny_folder),
            "--max-tokens",
            "24",
            "--retrieval",
            "bm25",
            *where,
            *more,
        ]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, (result.exception, result.output)
        return result

    # An answer that the limit cut off is not given.
    letter = json.loads(told("--json", "--answers", "off").stdout)["text"][-1]
    off, first, second = (
        json.loads(told("--json", "--stop", letter, "--answers", how).stdout) for how in ("off", "direct", "direct")
    )
    assert off["stored"] is first["stored"] is None and second["stored"]["way"] == "direct"
    assert off["text"] == first["text"] == second["text"] and second["stored"]["question"] == "ferry?"
    verified = json.loads(told("--json", "--stop", letter, "--answers", "verified").stdout)
    assert verified["text"] == off["text"] and verified["stored"]["way"] == "verified"
    assert verified["usage"]["drafted_tokens"] > 0
    said = told("--stop", letter, "--answers", "direct").output
    assert "stored answer of" in said and "nothing computed" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("similarity_threshold", -0.1), ("similarity_threshold", 1.5), ("answers_limit", "many"),
    ],
)  # fmt: skip
def test_a_setting_that_makes_no_sense_is_refused_at_once(
    open_session: Callable[..., Session], name: str, value: object
) -> None:
    with pytest.raises(InvalidSetting):
        open_session(**{name: value})
