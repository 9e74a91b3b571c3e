"""Earlier answers with real weights: checked ones are the model's own, stored ones are told, near misses not given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.engine.base import Engine
from rekindle.engine.step_width import max_exact_step

pytestmark = pytest.mark.real

DOCUMENTS = [
    {
        "source": "boiler",
        "text": "Boiler service. Marit Solheim serviced the boiler on 14 March. The pressure was set to 1.5 bar, and "
        "the bill came to 240 euros. The next service is due in two years.",
    },
    {
        "source": "allotment",
        "text": "Allotment. Jonas planted 30 strawberry plants in April and built a compost box of larch wood. Water "
        "is turned off from November to March. The key hangs with Mrs. Okafor in number 12.",
    },
    {
        "source": "trip",
        "text": "Trip to Lisbon. The flight leaves on Friday at 7:40 from gate B22. The hotel is called Casa Azul, and "
        "breakfast is served until ten. Nadia booked the tram tickets.",
    },
]
QUESTIONS = [
    ("Who serviced the boiler?", "who serviced the boiler"),
    ("How much was the bill for the boiler service?", "How much was the boiler service bill?"),
    ("How many strawberry plants did Jonas plant?", "How many strawberry plants did Jonas plant in April?"),
    ("Where does the key to the allotment hang?", "Where is the key to the allotment?"),
    ("When does the flight to Lisbon leave?", "When does our flight to Lisbon leave?"),
    ("What is the hotel in Lisbon called?", "What's the hotel in Lisbon called?"),
]
MISSES = [
    ("How many strawberry plants did Jonas plant?", "How many strawberry plants did Nadia plant?"),
    ("When does the flight to Lisbon leave?", "When does the flight to Madrid leave?"),
    ("Is the next boiler service due in 2 years?", "Is the next boiler service due in 3 years?"),
]
HOW: dict[str, Any] = {"top_k": 2, "max_tokens": 10}
WHOLE: dict[str, Any] = {"top_k": 2, "max_tokens": 32}  # long enough for each of these answers to end


@pytest.fixture(scope="module")
def session(smollm2: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder: Path = tmp_path_factory.mktemp("answers")
    with Session(smollm2, cache=folder / "cache", library=folder / "library", similarity_threshold=0.85) as session:
        session.ingest(documents=DOCUMENTS)
        yield session


@pytest.mark.parametrize(
    "asked", [QUESTIONS[:1], pytest.param(QUESTIONS[1:], marks=pytest.mark.long)], ids=["one", "all"]
)
def test_checked_answers_are_those_of_the_model_alone(session: Session, asked: list[tuple[str, str]]) -> None:
    """Each question, then the same in other words: the second has the first one's answer as its draft."""
    drafted = 0
    for question, other in asked:
        for text in (question, other):
            alone = session.ask(text, **HOW, answers="off")
            checked = session.ask(text, **HOW)  # by default
            session.flush()
            assert checked.text == alone.text and checked.tokens == alone.tokens
            assert checked.stored is None or checked.stored.way == "verified"
            drafted += checked.usage.drafted_tokens
    assert drafted > 0


@pytest.mark.llamacpp
@pytest.mark.long
def test_llama_cpp_writes_what_it_would_have_written_without_a_draft(tmp_path: Path) -> None:
    """From the same KV: the last bits of its prefill depend on how that is cut.

    There are drafts where a step of several tokens rounds as a step of one does, which depends on the processor.
    """
    with Session("smollm2", engine="llamacpp", cache=tmp_path / "cache", library=tmp_path / "library") as session:
        session.ingest(documents=DOCUMENTS)
        drafted = 0
        for text in (text for pair in QUESTIONS for text in pair):
            session.ask(text, **HOW, answers="off")
            alone = session.ask(text, **HOW, answers="off")
            checked = session.ask(text, **HOW, answers="verified")
            session.flush()
            assert checked.tokens == alone.tokens
            drafted += checked.usage.drafted_tokens
        assert (drafted > 0) == (max_exact_step(session.engine) > 1)


def test_the_identical_question_gets_the_stored_answer(session: Session) -> None:
    for question, _ in QUESTIONS[1:2]:
        first = session.ask(question, **WHOLE, answers="verified")
        session.flush()
        again = session.ask(question, **WHOLE, answers="direct")
        assert again.text == first.text and again.reuse.computed == 0 == again.usage.total_tokens
        assert again.stored is not None and again.stored.way == "direct" and again.stored.question == question
        assert "stored answer of" in again.summary() and [s.source for s in again.sources] == [
            s.source for s in first.sources
        ]


@pytest.mark.parametrize(
    ("question", "miss"), [MISSES[0], *(pytest.param(*pair, marks=pytest.mark.long) for pair in MISSES[1:])]
)
def test_a_near_miss_is_answered_by_the_model(session: Session, question: str, miss: str) -> None:
    session.ask(question, **WHOLE, answers="verified")
    session.flush()
    answer = session.ask(miss, **WHOLE, answers="direct")
    assert answer.stored is None or answer.stored.way == "verified"
    assert answer.text == session.ask(miss, **WHOLE, answers="off").text
