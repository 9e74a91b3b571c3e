"""How documents are cut into passages."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.core.document import Document, Passage, Section
from rekindle.errors import InvalidSetting
from rekindle.knowledge.segment import count_words, split_sentences
from rekindle.knowledge.split import Splitting, split

pytestmark = pytest.mark.thorough


def document(text: str, *headings: str, headers: str = "") -> Document:
    return Document("a", "Title", (Section(text, headings),), headers)


def texts(text: str, size: int = 100, overlap: int = 0) -> list[str]:
    return [passage.text for passage in split(document(text), Splitting(size, overlap=overlap))]


def prose(count: int, length: int = 10, name: str = "w") -> str:
    """`count` sentences of `length` words, all different."""
    return " ".join(
        " ".join([f"S{name}{number}", *(f"{name}{number}x{word}" for word in range(length - 1))]) + "."
        for number in range(count)
    )


def bare(text: str) -> str:
    return "".join(text.split())


WORD = st.text(st.sampled_from("abcZ1.,:;!?'\"()-#*|`é"), min_size=1, max_size=30)
TEXT = st.lists(
    st.tuples(WORD, st.sampled_from([" ", " ", " ", "  ", "\n", "\n\n", "\n    ", "\t", "\r\n"])), max_size=120
).map(lambda pairs: "".join(word + gap for word, gap in pairs))
ANY_TEXT = st.lists(
    st.one_of(
        WORD, st.text(st.sampled_from("今日はいい。天気！ส"), max_size=40), st.text(max_size=20), st.just("\n\n")
    ),
    max_size=40,
).map(" ".join)
SIZES = st.integers(10, 60)


def letters(text: str) -> int:
    """A tokenizer that needs a token for every three characters."""
    return sum(-(-len(word) // 3) for word in text.split())


@given(TEXT, SIZES)
def test_without_overlap_every_word_is_in_exactly_one_passage_and_in_order(text: str, size: int) -> None:
    found = [word for passage in split(document(text), Splitting(size)) for word in passage.text.split()]
    assert found == text.split()


@given(ANY_TEXT, SIZES, st.sampled_from([None, letters]))
def test_in_any_script_no_character_is_lost_or_said_twice(
    text: str, size: int, count: Callable[[str], int] | None
) -> None:
    splitting = Splitting(size, "tokens" if count else "words")
    assert bare("".join(passage.text for passage in split(document(text), splitting, count))) == bare(text)


@given(ANY_TEXT, SIZES, st.integers(0, 29), st.sampled_from([None, letters]))
def test_no_passage_is_longer_than_a_quarter_over_the_size(
    text: str, size: int, overlap: int, count: Callable[[str], int] | None
) -> None:
    splitting = Splitting(size, "tokens" if count else "words", min(overlap, (size - 1) // 2))
    for passage in split(document(text), splitting, count):
        assert count_words(passage.text) <= 1.25 * size
        assert count is None or count(passage.text) <= 1.25 * size


SECTIONS = st.lists(
    st.tuples(st.lists(st.sampled_from("ABC"), max_size=3), st.lists(st.integers(1, 40), max_size=6)), max_size=8
)


@given(SECTIONS, SIZES)
def test_sections_lose_no_words_however_they_share_passages(plan: list[tuple[list[str], list[int]]], size: int) -> None:
    parts = tuple(
        Section(
            "\n\n".join(prose(1, length, f"p{number}q{place}") for place, length in enumerate(lengths)), tuple(path)
        )
        for number, (path, lengths) in enumerate(plan)
    )
    passages = split(Document("a", "T", parts), Splitting(size))
    assert [word for passage in passages for word in passage.text.split() if word.strip("ABC>")] == [
        word for part in parts for word in part.text.split()
    ]
    assert all(count_words(passage.text) <= 1.25 * size for passage in passages)


@given(ANY_TEXT, SIZES)
def test_the_same_document_is_always_cut_the_same(text: str, size: int) -> None:
    assert split(document(text), Splitting(size)) == split(document(text), Splitting(size))


@settings(max_examples=50)
@given(st.lists(st.integers(5, 40), min_size=1, max_size=6), st.lists(st.integers(5, 40), min_size=1, max_size=6))
def test_a_paragraph_of_half_a_passage_is_cut_the_same_wherever_it_stands(before: list[int], after: list[int]) -> None:
    shared = prose(13, 10, "shared")
    one = [prose(number, 10, f"b{place}") for place, number in enumerate(before)]
    two = [prose(number, 10, f"c{place}") for place, number in enumerate(after)]
    own = texts(shared)
    found = texts("\n\n".join([*one, shared, *two, shared, *one]))
    assert [text for text in found if "shared" in text] == own + own


def test_a_passage_ends_where_a_sentence_ends() -> None:
    found = texts(prose(40, 13))
    assert len(found) > 4
    assert all(text.endswith(".") and text.startswith("Sw") for text in found)


def test_a_sentence_longer_than_a_passage_is_cut_at_its_clauses() -> None:
    clauses = [" ".join(f"c{number}w{word}" for word in range(30)) for number in range(8)]
    found = texts("; ".join(clauses) + ".")
    assert [text[-1] for text in found] == [";", ";", "."]


def test_a_clause_longer_than_a_passage_is_cut_between_words() -> None:
    assert [count_words(text) for text in texts(" ".join(f"w{number}" for number in range(250)))] == [100, 100, 50]


def test_text_without_spaces_is_cut_by_its_sentences_then_by_its_characters() -> None:
    assert texts("天" * 60 + "。" + "気" * 60 + "！") == ["天" * 60 + "。", "気" * 60 + "！"]
    assert max(map(len, texts("今" * 1000))) <= 125


def test_lines_of_a_script_without_spaces_are_joined_without_one() -> None:
    assert texts("今日はいい天気です\nね。散歩に行きたいです") == ["今日はいい天気ですね。散歩に行きたいです"]


@pytest.mark.parametrize(
    "text",
    [
        "Dr. Brown met J. R. Vale at 5 p.m. today.",
        "It costs 3.14 crowns, see e.g. Fig. 3 or No. 7, i.e. the second.",
        "Version v1.2 of No. 12 came on Jan. 5.",
        "Wait... what is it?",
        'He cried "Stop!" and ran.',
        "Am 3. Mai kam er, z.B. mit Nr. 4 an.",
        "1. First of all this.",
    ],
)
def test_a_stop_inside_a_sentence_does_not_end_it(text: str) -> None:
    assert [part.text for part in split_sentences(text)] == [text]


@pytest.mark.parametrize(
    "parts",
    [
        ["He left at 5 p.m.", "Then it rained."],
        ["So did I.", "We went."],
        ['She said "Go on."', "He went."],
        ["(It was late.)", "“Is it?”", "Yes!", "¿Qué?", "42 came."],
        ["Did he?!", "He did...", "Well."],
        ["It was 1987.", "Use Python 3.11.", "See notes.txt.", "No.", "Never."],
    ],
)
def test_a_stop_before_something_that_can_begin_a_sentence_ends_one(parts: list[str]) -> None:
    assert [part.text for part in split_sentences(" ".join(parts))] == parts


def test_lines_that_were_wrapped_are_joined_and_lines_that_mean_something_are_not() -> None:
    wrapped = (
        "The workshop opens at nine in the morning and it\ncloses at six, but on Saturdays it is only open\ntill noon."
    )
    talk = "Ann: Shall we go?\nBen: Not yet. Wait a moment.\nAnn: Fine."
    items = "- one thing\n- another thing\n  that goes on\n3) third"
    table = "name: bolt, price: 3\nname: nut, price: 1"
    bill = "Bolts, 20 pieces at 9.40, 188.00\nChains, 6 pieces at 2.10, 12.60"
    assert texts("\n\n".join([wrapped, talk, items, table, bill])) == [
        "\n\n".join([wrapped.replace("\n", " "), talk, items.replace("\n  ", " "), table, bill])
    ]


def test_a_turn_of_a_talk_is_not_cut_in_two() -> None:
    turns = [f"Ann: {prose(3, 10, f't{number}')}" for number in range(20)]
    assert [line for text in texts("\n".join(turns)) for line in text.split("\n")] == turns


def test_code_keeps_its_lines_and_its_indentation() -> None:
    fenced = "```python\ndef f(x):\n    return x. Y\n```"
    indented = "    if a == b:\n        stop()"
    assert texts(f"Look:\n\n{fenced}\n\n{indented}") == [f"Look:\n\n{fenced}\n\n{indented}"]
    long = "```\n" + "\n".join(f"    call({number}, a b c)" for number in range(100)) + "\n```"
    assert "\n".join(texts(long)) == long


def test_a_fence_that_nothing_closes_does_not_make_the_rest_code() -> None:
    assert texts(f"```\n{prose(30)}")[0].endswith(".")


def test_a_short_rest_is_added_to_the_passage_before() -> None:
    assert [count_words(text) for text in texts(prose(11))] == [110]
    assert [count_words(text) for text in texts(prose(12))] == [100, 20]


def test_a_few_words_before_a_long_paragraph_go_with_it() -> None:
    assert texts(f"{prose(9)}\n\nIn short:\n\n{prose(8, 10, 'v')}") == [prose(9), f"In short:\n\n{prose(8, 10, 'v')}"]


def test_the_end_of_the_passage_before_is_said_again_in_whole_sentences() -> None:
    found = texts(prose(40), overlap=25)
    for before, after in pairwise(found):
        parts = [part.text for part in split_sentences(before)]
        assert after.startswith(" ".join(parts[-2:]))
        assert parts[-3] not in after


def test_a_heading_holds_the_headers_and_the_path_of_the_section_but_not_the_title() -> None:
    found = split(document(prose(3), "Rules", "Boats", headers="From: Ann\nDate: 1 May"), Splitting())
    assert [passage.heading for passage in found] == ["From: Ann\nDate: 1 May\nRules > Boats"]


@pytest.mark.parametrize("long", ["name " * 500, "名" * 500, "x" * 50_000])
def test_a_heading_never_grows_past_sixty_words(long: str) -> None:
    (passage,) = split(document("Text.", "Rules", long, headers=f"To: {long}\nCc: {long}\nBcc: {long}"), Splitting())
    assert count_words(passage.heading) <= 60
    assert "Rules" in passage.heading
    assert "Cc" in passage.heading


def test_sections_share_no_passage() -> None:
    parts = tuple(Section(prose(4, 10, name), ("Rules", name)) for name in "abc")
    found = split(Document("a", "T", parts), Splitting())
    assert found == [Passage(prose(4, 10, name), f"Rules > {name}") for name in "abc"]


def test_a_tiny_section_goes_with_the_next_and_each_keeps_its_heading() -> None:
    parts = (Section("Be kind.", ("Rules", "First")), Section(prose(4), ("Rules", "Second")))
    assert split(Document("a", "T", parts), Splitting()) == [
        Passage(f"First\nBe kind.\n\nSecond\n{prose(4)}", "Rules"),
    ]


def test_a_tiny_section_of_another_chapter_stays_alone() -> None:
    parts = (Section("Be kind.", ("Rules", "First")), Section(prose(4), ("Prices", "Boats")))
    assert [passage.heading for passage in split(Document("a", "T", parts), Splitting())] == [
        "Rules > First",
        "Prices > Boats",
    ]


def test_a_heading_without_text_is_not_lost() -> None:
    parts = (Section("", ("Rules",)), Section(prose(4), ("Rules", "Boats")), Section("", ("Closed now",)))
    found = split(Document("a", "T", parts), Splitting())
    assert [passage.shown for passage in found] == [
        f"Rules > Boats\n{prose(4)}",
        "Closed now\nClosed now",
    ]


@pytest.mark.parametrize("text", ["", " \n\n \t\n"])
def test_nothing_gives_no_passage(text: str) -> None:
    assert texts(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "a." * 125_000,
        "a. " * 75_000,
        "x" * 250_000,
        "." * 250_000,
        ".)" * 125_000,
        "a:" * 125_000,
        "\n" * 250_000,
    ],
)
def test_a_quarter_of_a_megabyte_that_has_no_sentences_is_cut_all_the_same(text: str) -> None:
    found = texts(text)
    assert bare("".join(found)) == bare(text)
    assert max(map(count_words, found), default=0) <= 125


@pytest.mark.parametrize(("size", "overlap"), [(9, 0), (2001, 0), (100, 50), (100, -1)])
def test_a_splitting_that_makes_no_sense_is_refused_with_advice(size: int, overlap: int) -> None:
    with pytest.raises(InvalidSetting, match="choose"):
        Splitting(size, overlap=overlap)
    with pytest.raises(InvalidSetting, match="choose"):
        Splitting(unit="letters")  # type: ignore[arg-type]


def test_tokens_cannot_be_counted_without_a_model() -> None:
    with pytest.raises(InvalidSetting, match="cut by words"):
        split(document("Text."), Splitting(unit="tokens"))


def test_splittings_that_differ_say_so() -> None:
    kinds = [Splitting(), Splitting(50), Splitting(unit="tokens"), Splitting(overlap=10)]
    assert len({kind.signature for kind in kinds}) == len(kinds)
    assert re.fullmatch(r"100 words, overlap 0, rules \d+", Splitting().signature)
