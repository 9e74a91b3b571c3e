"""Text while tokens arrive: the pieces are the text, and nothing is ever taken back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.base import Tokenizer
from rekindle.engine.fake import ByteTokenizer
from rekindle.run.text import Detokenizer, StopWatch
from tests.engine.test_tokenizer import sentencepiece_like
from tests.tiny import byte_tokenizer

stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def pieces_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@given(st.text(max_size=60))
def test_the_pieces_are_the_text(text: str) -> None:
    for tokenizer in (ByteTokenizer(), byte_tokenizer()):
        pieces = pieces_of(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == text


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_come_out_as_in_the_whole(tokens: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_a_character_of_several_tokens_comes_in_one_piece() -> None:
    tokenizer = ByteTokenizer()
    assert pieces_of(tokenizer, tokenizer.encode("aé🙂")) == ["a", "", "é", "", "", "", "🙂", ""]


@given(st.lists(st.sampled_from([3, 4, 5, 6, 7]), max_size=20))
def test_spaces_stand_where_the_whole_text_has_them(tokens: list[int]) -> None:
    """Tokenizers that mark words with a prefix drop it at the beginning of a text, and only there."""

    class Marked(ByteTokenizer):
        backend = sentencepiece_like()

        def decode(self, tokens: Sequence[int]) -> str:
            return self.backend.decode(list(tokens)).removeprefix(" ")

    tokenizer = Marked()
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


def watched(pieces: list[str], stop: list[str]) -> tuple[list[str], str | None]:
    watch = StopWatch(stop)
    return [*(watch.add(piece) for piece in pieces), watch.finish()], watch.found


@given(st.lists(st.text("abc", max_size=5), max_size=8), stops)
def test_the_text_ends_right_before_the_first_stop(pieces: list[str], stop: list[str]) -> None:
    out, found = watched(pieces, stop)
    text = "".join(pieces)
    # Where a stop first becomes complete, reading piece by piece.
    seen = ""
    for piece in pieces:
        seen += piece
        hits = [seen.find(s) for s in stop if s in seen]
        if hits:
            assert "".join(out) == seen[: min(hits)] and found is not None
            return
    assert "".join(out) == text and found is None


@given(st.lists(st.text("abc", max_size=3), max_size=8), stops)
def test_what_is_given_out_never_begins_a_stop(pieces: list[str], stop: list[str]) -> None:
    watch = StopWatch(stop)
    shown = ""
    for piece in pieces:
        shown += watch.add(piece)
        assert not any(s in shown for s in stop)


def test_a_stop_that_never_ends_comes_out_at_the_end() -> None:
    out, found = watched(["He", "llo <st", "op"], ["<stop>"])
    assert out == ["He", "llo ", "", "<stop"] and found is None


def test_nothing_is_held_back_without_stops() -> None:
    assert watched(["a", "b"], []) == (["a", "b", ""], None)
