"""Text while tokens arrive: the pieces are the text, and nothing is ever taken back."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from rekindle.engine.fake import ByteTokenizer
from rekindle.text.base import Tokenizer
from rekindle.text.detokenize import Detokenizer, StopChecker
from rekindle.text.tokenizer import vocabulary_bytes
from tests.text.test_tokenizer import sentencepiece_like
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


def byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer that spells what it does not know in bytes, as Llama 2 and Gemma do."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b"]
    model = models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


class Fallback(ByteTokenizer):
    backend = byte_fallback()

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.backend.decode(list(tokens))

    def pieces(self) -> list[bytes]:
        return vocabulary_bytes(self.backend, self.backend.get_vocab_size())


@given(st.text("ab 🙂é東", max_size=30))
def test_characters_spelled_in_bytes_come_out_whole(text: str) -> None:
    tokenizer = Fallback()
    assert "".join(pieces_of(tokenizer, tokenizer.encode(text))) == text


def test_half_a_character_at_the_end_spoils_nothing_before_it() -> None:
    tokenizer = Fallback()
    pieces = pieces_of(tokenizer, tokenizer.encode("a🙂🙂")[:-2])
    assert "".join(pieces).startswith("a🙂") and "".join(pieces).rstrip("\N{REPLACEMENT CHARACTER}") == "a🙂"


def test_a_continued_text_begins_with_its_space() -> None:
    class Marked(ByteTokenizer):
        backend = sentencepiece_like()

        def decode(self, tokens: Sequence[int]) -> str:
            return self.backend.decode(list(tokens)).removeprefix(" ")

    alone, after = Detokenizer(Marked()), Detokenizer(Marked(), context=[4, 5])
    assert alone.add(4) == "a" and after.add(4) == " a"


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
    watch = StopChecker(stop)
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
    watch = StopChecker(stop)
    shown = ""
    for piece in pieces:
        shown += watch.add(piece)
        assert not any(s in shown for s in stop)


def test_a_stop_that_never_ends_comes_out_at_the_end() -> None:
    out, found = watched(["He", "llo <st", "op"], ["<stop>"])
    assert out == ["He", "llo ", "", "<stop"] and found is None


def test_nothing_is_held_back_without_stops() -> None:
    assert watched(["a", "b"], []) == (["a", "b", ""], None)


@given(st.text(max_size=8), st.sampled_from("é€🙂"), st.integers(1, 3))
def test_where_a_reply_is_cut_half_a_character_is_left_out(text: str, last: str, kept: int) -> None:
    half = last.encode()[:kept]
    for tokenizer in (ByteTokenizer(), Fallback()):
        detokenizer = Detokenizer(tokenizer)
        pieces = [detokenizer.add(token) for token in (*tokenizer.encode(text), *tokenizer.encode(last)[:kept])]
        whole = last if len(half) == len(last.encode()) else ""
        assert "".join([*pieces, detokenizer.finish(cut=True)]) == text + whole
