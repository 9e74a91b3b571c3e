"""Long texts: refused by their length where that is certain, tokenized beside other threads, and nothing stays."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import unicodedata
from functools import cache

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from rekindle.core.request import Message
from rekindle.errors import ContextOverflow
from rekindle.text.chat_template import match_any
from rekindle.text.tokenizer import HfTokenizer, encode_text

_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_MERGES = [("-", "-"), ("--", "--"), ("----", "----"), ("a", "b"), ("Ġ", "Ġ")]
texts = st.text(max_size=60) | st.lists(
    st.sampled_from(["-" * 40, "ab", "  ", "\x04", "é", unicodedata.normalize("NFD", "ΰǖ각"), "🙂", "▁▁", "<|end|>"]),
    max_size=12,
).map("".join)


def _by_bytes(*missing: str) -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and SmolLM2 have it; some bytes may have no token."""
    names = [letter for letter in _LETTERS if letter not in missing]
    names += ["".join(pair) for pair in _MERGES]
    backend = tokenizers.Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, _MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return backend


def _composing() -> tokenizers.Tokenizer:
    """As Qwen has it."""
    backend = _by_bytes()
    backend.normalizer = normalizers.NFC()
    return backend


def _falling_back() -> tokenizers.Tokenizer:
    """As Llama 2 and Gemma have it."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "a", "b", "ab"]
    vocabulary = {name: at for at, name in enumerate(names)}
    merges = [("▁", "▁"), ("a", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


@cache
def _tokenizer(make: str) -> HfTokenizer:
    backends = {
        "bytes": _by_bytes,
        "without some bytes": lambda: _by_bytes("Ą", "ñ"),  # 0x04 and 0xF1
        "composing": _composing,
        "falling back": _falling_back,
    }
    backend = backends[make]()
    return HfTokenizer(backend, render=_render, stop_ids=frozenset(), vocabulary_size=backend.get_vocab_size())


def _render(messages: list[dict[str, str]], tools: object = None) -> str:
    return "".join(f"{message['content']}<|end|>" for message in messages)


_KINDS = ["bytes", "without some bytes", "composing", "falling back"]


@pytest.mark.parametrize("kind", _KINDS)
@given(text=texts)
@example(text="-" * 5000)
@example(text="\x04" * 5000)
@example(text=unicodedata.normalize("NFD", "ΰ") * 500)
@example(text="▁" * 999)
def test_no_text_has_fewer_tokens_than_its_length_tells(kind: str, text: str) -> None:
    tokenizer = _tokenizer(kind)
    assert tokenizer.token_length is not None
    tokens = tokenizer.encode(text)
    assert tokenizer.min_token_count(text) <= len(tokens)
    assert tokenizer.encode(text, token_limit=len(tokens)) == tokens
    chat = [Message("user", text)]
    told = tokenizer.encode_chat(chat)
    assert tokenizer.encode_chat(chat, token_limit=len(told)) == told


def test_nothing_is_said_where_text_may_go_untold() -> None:
    words = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    bare, strips, holes = _by_bytes(), _by_bytes(), _by_bytes()
    bare.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    strips.add_special_tokens([AddedToken("<|strips|>", rstrip=True)])
    holes.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    no_continuing = _by_bytes("Ģ")  # 0x80
    for backend in (words, bare, strips, holes, no_continuing):
        size = backend.get_vocab_size()
        tokenizer = HfTokenizer(backend, render=_render, stop_ids=frozenset(), vocabulary_size=size)
        assert tokenizer.min_token_count("x" * 10_000) == 0
        assert tokenizer.encode("a" * 2000, token_limit=1) == tokenizer.encode("a" * 2000)


class _Untouchable:
    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"the text was tokenized ({name})")


def test_what_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = _tokenizer("bytes")
    assert tokenizer.token_length is not None
    text = "word " * 100_000
    monkeypatch.setattr(tokenizer, "_backend", _Untouchable())
    for encode in (
        lambda: tokenizer.encode(text, token_limit=8192),
        lambda: tokenizer.encode_chat([Message("user", text)], token_limit=8192),
        lambda: tokenizer.encode_quoting([Message("user", text)], ["a"], token_limit=8192),
    ):
        with pytest.raises(ContextOverflow, match="at least") as raised:
            encode()
        assert raised.value.prompt_tokens >= len(text) / tokenizer.token_length.characters


def test_of_a_quote_that_cannot_fit_only_the_beginning_is_tokenized() -> None:
    tokenizer, chat = _tokenizer("bytes"), [Message("user", "what?")]
    text = "word " * 10_000
    cut, whole = tokenizer.encode_quoting(chat, [text], token_limit=50), tokenizer.encode_quoting(chat, [text])
    (some,), (all_of_it,) = cut.quotes, whole.quotes
    assert 50 < len(some) < 1000 and list(some) == list(all_of_it[: len(some)])
    assert (cut.before, cut.after) == (whole.before, whole.after)


@pytest.mark.parametrize("kind", _KINDS)
def test_long_texts_have_the_tokens_that_short_ones_have(kind: str) -> None:
    backend = _tokenizer(kind)._backend
    text = "Grüße aus 東京 🙂 ab  ---- 123 <|end|>\n" * 1000
    for special in (False, True):
        assert encode_text(backend, text, add_special_tokens=special) == backend.encode(text, None, False, special).ids


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer, ended = _tokenizer("bytes"), threading.Event()
    text = "word " * 100_000
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        while not ended.wait(0.001):
            ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    before = ticks
    tokens = tokenizer._plain(text)
    during = ticks - before
    ended.set()
    ticking.join()
    assert len(tokens) == len(text)
    assert during >= 10, "it takes a while; where others have to wait, they run once before and once after it"


_REPEATS = """
import sys, threading, psutil, tokenizers
from tokenizers import models, pre_tokenizers
from rekindle.text import tokenizer as module
if sys.argv[1] == "untrimmed":
    module.trim_heap = lambda: None
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = tokenizers.Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = module.HfTokenizer(backend, render=None, stop_ids=frozenset(), vocabulary_size=256)
text = "word " * 100_000
def ask():
    assert len(tokenizer.encode(text)) == len(text)
def rss():
    return psutil.Process().memory_info().rss
tokenizer.encode("word " * 10)
before, at_once = rss(), []
for _ in range(3):  # each in a thread of its own, as a server does it
    at_once = [threading.Thread(target=ask) for _ in range(2)]
    [one.start() for one in at_once], [one.join() for one in at_once]
ask()  # alone: of two at once, one may free memory after the other has given back what was free
print(rss() - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back by glibc's malloc_trim")
def test_tokenizing_long_texts_again_and_again_leaves_no_memory_behind() -> None:
    def left(trimmed: str) -> int:
        command = [sys.executable, "-c", _REPEATS, trimmed]
        return int(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)

    # How much malloc keeps depends on the machine (huge pages, number of arenas): compare with not giving it back.
    assert left("trimmed") < left("untrimmed") / 2


def test_what_any_of_many_spellings_finds_is_the_longest_one_at_the_first_place() -> None:
    chosen = random.Random(7)
    spellings = ["".join(chosen.choices("<|ab>.", k=chosen.randrange(1, 6))) for _ in range(60)]
    spellings += [f"<SPECIAL_{number}>" for number in range(200)]
    one_by_one = re.compile("|".join(map(re.escape, sorted(spellings, key=len, reverse=True))))
    for _ in range(300):
        text = "".join(chosen.choices("<|ab>.x", k=40)) + chosen.choice(spellings)
        assert match_any(spellings).findall(text) == one_by_one.findall(text)
    assert match_any([]).search("anything") is None
