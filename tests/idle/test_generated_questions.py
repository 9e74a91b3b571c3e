"""What a model is asked for guesses, what is read out of its replies, and which guesses stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.idle.generated_questions import (
    PredictedQuestion,
    is_answerable,
    parse_questions,
    pick_novel,
    prompt_for_questions,
    prompt_from_history,
    summary_prompt,
)

ANN, BOAT = "Who is Ann?", "Where is the boat now?"
UNTIDY = {
    "numbers": (f"1. {ANN}\n2. {BOAT}", [ANN, BOAT]),
    "numbers in brackets": (f"(1) {ANN}\n(2) {BOAT}", [ANN, BOAT]),
    "numbers with brackets": (f"1) {ANN}\n2) {BOAT}", [ANN, BOAT]),
    "bullets": (f"- {ANN}\n* {BOAT}", [ANN, BOAT]),
    "round bullets": (f"• {ANN}\n• {BOAT}", [ANN, BOAT]),
    "letters": (f"a) {ANN}\nb) {BOAT}", [ANN, BOAT]),
    "labels": (f"Q: {ANN}\nQ: {BOAT}", [ANN, BOAT]),
    "numbered labels": (f"Question 1: {ANN}\nQuestion 2: {BOAT}", [ANN, BOAT]),
    "numbers and labels": (f"1. Q: {ANN}\n2. Q: {BOAT}", [ANN, BOAT]),
    "quotes": (f'1. "{ANN}"\n2. “{BOAT}”', [ANN, BOAT]),
    "semicolons": (f"1. {ANN}; 2. {BOAT}; 3. When did", [ANN, BOAT]),
    "one line": (f"1. {ANN} 2. {BOAT}", [ANN, BOAT]),
    "no space": (f"1. {ANN}2. {BOAT}", [ANN, BOAT]),
    "cut off": (f"1. {ANN}\n2. {BOAT}\n3. What did the harbour master say about the", [ANN, BOAT]),
    "cut off at once": ("1. What did the harbour master", []),
    "repeated": (f"1. {ANN}\n2. {ANN}\n3. who is ann?\n4. {BOAT}", [ANN, BOAT]),
    "bold": (f"1. **{ANN}**\n2. **{BOAT}**", [ANN, BOAT]),
    "heading": (f"### Questions\n\n{ANN}\n{BOAT}", [ANN, BOAT]),
    "preamble": (f"Sure! Here are two questions:\n\n1. {ANN}\n2. {BOAT}\n\nI hope this helps!", [ANN, BOAT]),
    "preamble on the line": (f"Sure, here it is: {ANN}", [ANN]),
    "no question mark": ("1. who is Ann\n2. Where is the boat now.\n", [ANN, BOAT]),
    "answers below": (f"1. {ANN}\n- Ann is the harbour master.\n2. {BOAT}\n- It is in Horta.", [ANN, BOAT]),
    "labelled answers": (f"Q: {ANN}\nA: Who knows?\nQ: {BOAT}\nAnswer: In Horta.", [ANN, BOAT]),
    "answers beside": (f"1. {ANN} Ann is the harbour master.\n2. {BOAT} In Horta.", [ANN, BOAT]),
    "too long": (f"1. What {'and then ' * 40}happened?\n2. {BOAT}", [BOAT]),
    "too short": (f"1. Why?\n2. {BOAT}", [BOAT]),
    "a list of JSON": (f'["{ANN}", "{BOAT}"]', [ANN, BOAT]),
    "a table": (f"| {ANN} |\n| {BOAT} |", [ANN, BOAT]),
    "several marks": ("Who is Ann???\nWhere is the boat now ?", [ANN, BOAT]),
    "wide marks": ("Who is Ann？\nWhere is the boat now？", [ANN, BOAT]),
    "a title with a stop": ("1. What did Dr. Lee say?\n", ["What did Dr. Lee say?"]),
    "requests": ("1. Summarize the talk about the boat.\n", ["Summarize the talk about the boat?"]),
    "only prose": ("The boat is in Horta. Ann looks after it.", []),
    "nothing": ("", []),
    "line ends of others": (f"1. {ANN}\r\n2. {BOAT}\r\n", [ANN, BOAT]),
}


@pytest.mark.parametrize("name", UNTIDY)
def test_questions_are_read_out_of_an_untidy_list(name: str) -> None:
    text, wanted = UNTIDY[name]
    assert parse_questions(text, 5) == wanted


@given(
    st.lists(st.sampled_from([ANN, BOAT, "1. ", "- ", "Q: ", "A: ", "\n", " ", ";", '"', "**", "what", "?", "."]))
    .map("".join)
    .flatmap(lambda text: st.text(max_size=40).map(lambda more: text + more)),
    st.integers(0, 6),
)
def test_whatever_a_model_writes_there_are_only_questions_each_once(text: str, max_count: int) -> None:
    found = parse_questions(text, max_count)
    assert len(found) <= max_count
    assert all(question.endswith("?") and "\n" not in question for question in found)
    assert len({question.casefold() for question in found}) == len(found)


def predicted(*texts: str) -> list[PredictedQuestion]:
    return [PredictedQuestion(text, "abstract", (1,)) for text in texts]


def unit(*rows: list[float]) -> np.ndarray:
    vectors = np.array(rows, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


NONE = np.zeros((0, 3), np.float32)


def test_candidates_near_each_other_or_near_known_questions_are_left_out() -> None:
    vectors = unit([1, 0, 0], [1, 0.01, 0], [0, 1, 0], [0, 0, 1])
    candidates = predicted("Who is Ann?", "Who was Ann?", "Where is it?", "When was it?")
    assert pick_novel(candidates, vectors, NONE, 5) == [0, 2, 3]
    assert pick_novel(candidates, vectors, unit([0, 1, 0.01]), 5) == [0, 3]
    assert pick_novel(candidates, vectors, NONE, 2) == [0, 2]
    assert pick_novel(candidates, vectors, NONE, 5, limit=1.1) == [0, 1, 2, 3]


def test_equal_texts_count_once_whatever_their_vectors_are() -> None:
    assert pick_novel(predicted("Who is Ann?", "who is Ann"), unit([1, 0, 0], [0, 1, 0]), NONE, 5) == [0]


def test_no_candidates_are_no_problem_and_missing_vectors_are_one() -> None:
    assert pick_novel([], NONE, NONE, 5) == []
    assert pick_novel(predicted("Who is Ann?"), unit([1, 0, 0]), np.zeros((0,), np.float32), 5) == [0]
    with pytest.raises(ValueError, match="1 candidates have 0 vectors"):
        pick_novel(predicted("Who is Ann?"), NONE, NONE, 5)


HARBOUR = [("Ann Lee repaired the old ferry in Horta last spring. She paid 300 euros for the paint.", 0.6)]


@pytest.mark.parametrize(
    "question",
    [
        "What did the group decide about the ferry?",
        "When did Ann Lee repair the ferry?",
        "How much did the paint cost Ann?",
        "Who repaired the old ferry?",
    ],
)
def test_what_the_passages_speak_of_is_answerable(question: str) -> None:
    assert is_answerable(question, HARBOUR)


@pytest.mark.parametrize(
    "question",
    [
        "When did Boris repair the ferry?",  # a name that is nowhere
        "What happened in Lisbon?",
        "What is the capital of the neighbouring country?",
        "What did the user mention about the ferry?",
        "What is the main topic of this text?",
        "What did Ann do on XXX?",
        "What did Ann pay for [item]?",
        "What did you think of the ferry?",
        "What is it about?",
        "Who ...?",
    ],
)
def test_what_nobody_asks_and_what_the_passages_do_not_speak_of_is_not(question: str) -> None:
    assert not is_answerable(question, HARBOUR)


def test_nothing_is_answerable_without_passages_or_with_far_ones() -> None:
    assert not is_answerable("When did Ann Lee repair the ferry?", [])
    assert not is_answerable("When did somebody repair a ferry with strangers?", [(HARBOUR[0][0], 0.1)])


def test_a_chat_holds_what_it_is_about_and_how_many_are_wanted() -> None:
    (summary,) = summary_prompt(["Ann left.", "Bob came."], max_words=25)
    assert "Ann left.\n\nBob came." in summary.content and "25 words" in summary.content
    (guess,) = prompt_for_questions([], ["Ann left\nHorta.", "Bob came."], 4)
    assert "- Ann left Horta.\n- Bob came." in guess.content and "4" in guess.content
    (more,) = prompt_from_history([ANN, BOAT], 3)
    assert f"- {ANN}\n- {BOAT}" in more.content and "3" in more.content


@given(st.lists(st.text("abc ", min_size=1), min_size=1, max_size=6), st.permutations(["x?", "y?", "z?"]))
def test_the_order_of_later_questions_changes_nothing(earlier: list[str], later: list[str]) -> None:
    stream = [*earlier, *later]
    now = len(earlier)
    assert prompt_from_history(stream[:now], 5) == prompt_from_history([*earlier, "x?", "y?", "z?"][:now], 5)
