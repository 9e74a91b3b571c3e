"""When the answer to an earlier question may be served for a new one."""

from __future__ import annotations

import json
import string
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.answers.guard import disagreement, same_evidence
from rekindle.answers.question import parse_question
from rekindle.answers.words import OPPOSITES, stem

_TEXT = resources.files("benchmarks").joinpath("sample_pairs.jsonl").read_text("utf-8")
_SHIPPED = [json.loads(line) for line in _TEXT.splitlines()]
SAME = [(pair["a"], pair["b"]) for pair in _SHIPPED if pair["paraphrase"]]
OTHER = [(pair["a"], pair["b"]) for pair in _SHIPPED if not pair["paraphrase"]]


def test_there_are_pairs_of_both_kinds() -> None:
    assert len(SAME) >= 30 and len(OTHER) >= 50


@pytest.mark.parametrize(("asked", "stored"), SAME)
def test_the_same_question_in_other_words_agrees(asked: str, stored: str) -> None:
    assert disagreement(asked, stored) is None
    assert disagreement(stored, asked) is None


@pytest.mark.parametrize(("asked", "stored"), OTHER)
def test_another_question_in_almost_the_same_words_disagrees(asked: str, stored: str) -> None:
    assert disagreement(asked, stored) is not None
    assert disagreement(stored, asked) is not None


@pytest.mark.parametrize(
    ("asked", "stored", "reason"),
    [
        ("Who came?", "Who did not come?", "only one of them denies something"),
        ("What costs 5 euros?", "What costs 6 euros?", "other numbers: 5, 6"),
        ("Who sat next to Nora?", "Who sat next to Omar?", "a name in only one: nora, omar"),
        ("Where is the key?", "When is the key?", "other kinds of question: when, where"),
        ("Who paints boats?", "Who paints fences?", "said in only one: boats, fences"),
        ("Did Nora call Omar?", "Did Omar call Nora?", "who does what to whom"),
    ],
)
def test_a_reason_says_what_differs(asked: str, stored: str, reason: str) -> None:
    assert disagreement(asked, stored) == reason


_pairs = [*SAME, *OTHER]
_own = st.sampled_from([text for pair in _pairs for text in pair])
_letters = st.text(string.ascii_letters + string.digits + " .,?!'-\"$%:;()éüñ")
_any = st.one_of(_own, _letters, st.text())


@given(_any)
def test_a_question_always_agrees_with_itself(text: str) -> None:
    assert disagreement(text, text) is None


@given(_any, _any)
def test_no_text_makes_it_raise_and_the_order_does_not_matter(asked: str, stored: str) -> None:
    assert (disagreement(asked, stored) is None) == (disagreement(stored, asked) is None)


@given(st.one_of(_own, _letters))
def test_case_does_not_matter(text: str) -> None:
    assert disagreement(text, text.lower()) is None
    assert disagreement(text.upper(), text) is None


@given(_own, st.sampled_from(["", "?", "??", ".", " ?", "!", " "]))
def test_punctuation_at_the_end_does_not_matter(text: str, end: str) -> None:
    assert disagreement(text.rstrip("?.") + end, text) is None


@given(_own, _own, st.sampled_from([str.lower, str.upper]))
def test_case_of_both_does_not_turn_a_disagreement_into_a_hit(asked: str, stored: str, case: object) -> None:
    assert callable(case)
    if disagreement(case(asked), case(stored)) is None:
        assert disagreement(asked, stored) is None


@given(_own, st.sampled_from(["Zelda", "1999", "August", "never", "submarine"]))
def test_one_more_fact_is_another_question(text: str, more: str) -> None:
    assert disagreement(f"{text.rstrip('?')} {more}?", text) is not None


def test_very_long_texts_are_compared_as_well() -> None:
    words = " ".join(f"to word{number} from" for number in range(3_000))
    for text in ("a.b'c\"1,2:" * 5_000, "x" * 50_000, words, f"did {words}"):
        assert disagreement(text, f"why {words}") is not None


def test_evidence_is_the_same_if_two_of_five_passages_are() -> None:
    assert same_evidence([1, 2, 3, 4, 5], [5, 9, 8, 7, 1])
    assert not same_evidence([1, 2, 3, 4, 5], [1, 9, 8, 7, 6])
    assert same_evidence([1], [1])
    assert not same_evidence([1], [2])


def test_nothing_found_is_the_same_evidence_only_as_nothing_found() -> None:
    assert same_evidence([], [])
    assert not same_evidence([], [1])
    assert not same_evidence([1], [])


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8))
def test_evidence_is_the_same_in_either_order(asked: list[int], stored: list[int]) -> None:
    assert same_evidence(asked, asked)
    assert same_evidence(asked, stored) == same_evidence(stored, asked)


def test_forms_of_a_word_have_one_stem() -> None:
    for forms in (
        "bake bakes baked baking",
        "stop stops stopped stopping",
        "city cities town",
        "go goes went gone going",
        "easy easily",
        "die dies died",
        "site sites website",
    ):
        assert len({stem(form) for form in forms.split()}) == 1, forms
    assert len({stem(word) for word in ("universe", "university", "unit", "unity")}) == 4


def test_no_word_is_its_own_opposite() -> None:
    assert not [word for word, others in OPPOSITES.items() if word in others]


def test_a_question_is_taken_apart() -> None:
    question = parse_question("When did Anna buy her second car in May 2021?")
    assert question.kind.name == "when"
    assert [(word.text, word.name) for word in question.words] == [("anna", True), ("buy", False), ("car", False)]
    assert question.figures == {"2", "2021"}
    assert question.dates == {"may"}
    assert question.negations == 0
