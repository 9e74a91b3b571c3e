"""A reply that only names passages says nothing: it is not kept, and the sentence that it names is shown."""

from __future__ import annotations

import pytest

from rekindle.answers.citations import only_cites, quote_under
from rekindle.core.document import Passage
from rekindle.core.reply import AnswerSource
from rekindle.knowledge.sentence import best_sentence

DEPOT = "The depot is older than the town hall.\n\nOn weekdays it opens at nine; on Sundays it is closed."
MUSEUM = "Dr. Adeyemi runs the museum. It opens at eleven."


@pytest.mark.parametrize(
    "reply",
    ["[1]", " [1].", "[1], [2]", "[1, 2]", "[2]\n", "The answer is: \\[1\\]", "See source [3].", "[1] [1"],
)
def test_numbers_of_passages_alone_are_no_answer(reply: str) -> None:
    assert only_cites(reply)


@pytest.mark.parametrize(
    "reply",
    ["", "Nine [1].", "1", "(1)", "In 1987 [1]", "No [2].", "[1] opens at nine", "九時 [1]", "The answer is 9."],
)
def test_a_word_or_a_figure_beside_them_is_an_answer(reply: str) -> None:
    assert not only_cites(reply)


def test_the_sentence_under_a_reply_is_of_the_best_source_or_of_the_cited_one() -> None:
    sources = [AnswerSource(1, "a", "a", "Depot", DEPOT, 1.0), AnswerSource(2, "b", "b", "Museum", MUSEUM, 0.5)]
    question = "When does the depot open?"
    for reply in ("At nine.", "At eleven [2].", "[1]", "[9]"):
        quote = quote_under(reply, question, sources)
        assert quote is not None and quote.number == 1
        assert quote.text == "On weekdays it opens at nine; on Sundays it is closed."
    cited = quote_under("[2]", question, sources)
    assert cited is not None and (cited.number, cited.text) == (2, "It opens at eleven.")
    assert quote_under("[1]", question, []) is None


@pytest.mark.parametrize(
    ("question", "text", "sentence"),
    [
        ("Who runs the museum?", MUSEUM, "Dr. Adeyemi runs the museum."),
        ("Wann öffnet das Lager?", "Die Halle ist alt. Das Lager öffnet um neun.", "Das Lager öffnet um neun."),
        ("図書館はいつ閉まりますか", "蜂蜜は高い。図書館は月曜日に閉まります。", "図書館は月曜日に閉まります。"),
        ("Anything else?", "One. Two. Three.", "One."),
        ("?", "  \n", ""),
    ],
)
def test_the_sentence_with_the_words_of_the_question_is_chosen(question: str, text: str, sentence: str) -> None:
    assert best_sentence(question, Passage(text)) == sentence


def test_headings_are_not_quoted_and_their_words_count_half() -> None:
    heading = "Limits\nHow much the cache takes on disk"
    text = f"{heading}\nThe cache is a folder. Ten percent of the disk is the default."
    source = AnswerSource(1, "a", "a", "Limits", text, 1.0, heading=heading)
    quote = quote_under("", "How much does the cache take on disk by default?", [source])
    assert quote is not None and quote.text == "Ten percent of the disk is the default."


def test_a_long_line_is_shown_in_part() -> None:
    shown = best_sentence("word", Passage("word " * 1000))
    assert len(shown) < 500 and shown.endswith("...")
