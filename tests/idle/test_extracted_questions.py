"""Questions that are made of a document's own words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.idle.extracted_questions import base_of_past, extract_questions, questions_of, topic_words

NOTE = (
    "Maria moved to Lisbon in 2019. She rents a flat above a bakery. In May 2021, Maria opened a bookbinding "
    "workshop.\n\n"
    "The workshop sold forty notebooks last winter because a museum ordered them."
)
TALK = (
    "Nina: Hey Omar! I went to a pottery class yesterday and it was great.\n"
    "Omar: Lovely! I'm planning to visit my sister in Oslo next month.\n"
    "Nina: Say hello. I finally sold my sailing boat last week.\n"
    "Omar: The sailing boat? I thought you loved it."
)
MEETING = (
    "Chair: Um so the budget for the ferry timetable is is open.\n"
    "Clerk: The ferry timetable needs a winter version.\n"
    "Pilot: I think the ferry timetable should keep the night crossing.\n"
    "Chair: Right, we keep the night crossing."
)
MAIL = (
    "From: ann.lee@harbour.example\nTo: bob.stone@harbour.example\nDate: Mon, 3 Mar 2025 09:00:00 +0000\n"
    "Subject: Re: Crane inspection\n\nBob,\n\nplease send me the report on the crane. I attach the photos of the rusty "
    "cable.\n\nAnn"
)
REPORT = (
    "The survey counted 214 puffins on the northern cliffs in June 2022. Dr. Eva Holm led the survey. "
    "Fog delayed the survey of the southern cliffs."
)


@pytest.mark.parametrize(
    ("sentence", "wanted"),
    [
        ("Maria moved to Lisbon in 2019.", ["When did Maria move to Lisbon?", "Where did Maria move to?"]),
        ("Last week, Bob sold two boats.", ["When did Bob sell two boats?", "How many boats did Bob sell?"]),
        ("Dr. Eva Holm is the head of the station.", ["Who is Dr. Eva Holm?"]),
        ("The museum opened three rooms in May 2021.", ["When did the museum open three rooms?"]),
    ],
)
def test_a_sentence_answers_the_questions_made_of_it(sentence: str, wanted: list[str]) -> None:
    assert questions_of(sentence)[: len(wanted)] == wanted


def test_who_says_i_is_named() -> None:
    assert questions_of("I went to a pottery class yesterday!", "Nina")[0] == "When did Nina go to a pottery class?"
    assert (
        questions_of("I sold my boat to you last week.", "Nina", "Omar")[0] == "When did Nina sell their boat to Omar?"
    )
    assert questions_of("I went to a pottery class yesterday!") == []


@pytest.mark.parametrize("sentence", ["", "Yes.", "What a day!", "It rained.", "Thanks for everything", "1984", "I"])
def test_a_sentence_that_fits_no_pattern_gives_no_question(sentence: str) -> None:
    assert questions_of(sentence, "Nina") == []


@pytest.mark.parametrize(
    ("past", "verb"),
    [("moved", "move"), ("looked", "look"), ("planned", "plan"), ("tried", "try"), ("visited", "visit"),
     ("changed", "change"), ("created", "create"), ("called", "call"), ("passed", "pass"), ("went", "go")],
)  # fmt: skip
def test_the_verb_of_a_past_is_known(past: str, verb: str) -> None:
    assert base_of_past(past) == verb


@pytest.mark.parametrize("word", ["red", "bed", "speed", "house", "", "ed"])
def test_what_is_no_past_has_no_verb(word: str) -> None:
    assert base_of_past(word) is None


def test_a_note_is_asked_for_what_it_tells() -> None:
    found = extract_questions("Maria", NOTE, 12)
    assert "When did Maria move to Lisbon?" in found
    assert "When did Maria open a bookbinding workshop?" in found
    assert any(question.startswith("Why did the workshop sell") for question in found)


def test_a_talk_is_asked_for_what_its_speakers_did_and_said() -> None:
    found = extract_questions("Session 3, 9 May 2024", TALK, 12)
    assert "When did Nina go to a pottery class?" in found
    assert "When is Omar planning to visit their sister in Oslo?" in found
    assert any("say about sailing boat" in question for question in found)
    assert not any("Session" in question for question in found)


def test_a_meeting_is_asked_for_its_topics() -> None:
    found = extract_questions("Meeting 12", MEETING, 12)
    assert any(question.startswith("Summarize the discussion about") for question in found)
    assert "What did the group discuss about ferry timetable?" in found
    assert "What did the group discuss about night crossing?" in found


def test_an_email_is_asked_for_by_who_wrote_to_whom_about_what() -> None:
    found = extract_questions("Crane inspection", MAIL, 12)
    assert "What did Ann Lee write to Bob Stone about Crane inspection?" in found
    assert "When did Ann Lee write about Crane inspection?" in found
    assert "What is attached to the email about Crane inspection?" in found
    assert "What is the email address of Bob Stone?" in found


def test_a_report_is_asked_for_by_its_title_and_its_facts() -> None:
    found = extract_questions("Seabird survey 2022", REPORT, 12)
    assert "What is Seabird survey about?" in found
    assert "When did Dr. Eva Holm lead the survey?" in found
    assert any("puffins" in question for question in found)


def test_few_questions_are_spread_over_a_long_document() -> None:
    text = "\n\n".join(f"Person{letter} visited {letter}town in 2001." for letter in "ABCDEFGHIJ")
    found = extract_questions("", text, 5)
    assert len(found) == 5
    assert len({question.split("Person")[1][0] for question in found if "Person" in question}) >= 4


def test_a_phrase_that_is_rare_elsewhere_is_asked_for_first() -> None:
    text = "Some lines on gardening and some on falconry."
    common = {"gardening": 50, "falconry": 1, "lines": 50}
    other = {"gardening": 1, "falconry": 50, "lines": 50}
    assert "falconry" in extract_questions("", text, 1, common)[0]
    assert "gardening" in extract_questions("", text, 1, other)[0]


def test_words_that_say_nothing_are_not_counted() -> None:
    assert topic_words("Um, the ferry isn't really there, it's 3 pm") == {"ferry"}


@pytest.mark.parametrize("text", [NOTE, TALK, MEETING, MAIL, REPORT])
def test_the_same_document_always_gives_the_same_questions(text: str) -> None:
    first = extract_questions("Title", text, 8)
    assert first and first == extract_questions("Title", text, 8)
    assert len(set(first)) == len(first) <= 8


@given(st.text(max_size=60), st.text(max_size=400), st.integers(0, 6))
def test_no_text_is_too_odd(title: str, text: str, max_count: int) -> None:
    found = extract_questions(title, text, max_count)
    assert len(found) <= max_count and all(question.strip() for question in found)


@given(
    st.lists(
        st.sampled_from([*"\n\t .:?,-", "From: ", "To: a@b.c", "Ann: ", "I went ", "in May ", "the ", "two boats"])
    )
)
def test_no_half_of_a_form_is_too_odd(parts: list[str]) -> None:
    extract_questions("Re: ", "".join(parts), 4)
