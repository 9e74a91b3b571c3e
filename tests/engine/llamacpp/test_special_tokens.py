"""Texts with many special tokens: llama.cpp's own tokens, in a time that grows with the text and no faster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("xllamacpp")

from rekindle.core.request import Message, Request
from rekindle.engine.llamacpp import special_tokens
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.options import LlamaOptions
from rekindle.engine.llamacpp.tokenizer import GgufTokenizer
from rekindle.errors import Cancelled, Closed, ContextOverflow
from rekindle.models.sources import find
from rekindle.session.prompt import encode_prompt
from rekindle.text import chat_template
from rekindle.text.base import cancellable
from tests.engine.llamacpp.vocabularies import CONTROL, byte_level, sentencepiece
from tests.tiny_gguf import files_of

pytestmark = [pytest.mark.llamacpp]

CONTROLS = ("<|end|>", "<|turn|>", "<|stop|>")
DEFINED = ("\n\n", "\n\n\n", "\n\n\n\n", "ab", "bcd", "<a>", "<a><b>", "b><", "  ", "\t\t", "end|", "x<|turn")
PARTS = [
    *CONTROLS,
    *CONTROLS,
    *DEFINED,
    "a",
    "b",
    "c",
    "d",
    "<",
    ">",
    "|",
    " ",
    "\n",
    "\t",
    "é🙂",
    "</s>",
    "<s>",
    "hello",
]
TURNS = "{% for m in messages %}<|turn|>{{ m['content'] }}<|end|>{% endfor %}<|turn|>"


def write(folder: Path, kind: str) -> Path:
    if kind == "sentencepiece":
        vocabulary = sentencepiece(*DEFINED).add(CONTROL, *CONTROLS)
    else:
        vocabulary = byte_level(*DEFINED, control=CONTROLS)
    if kind == "takes whitespace":
        vocabulary.name = "Phi-3 tiny"  # llama.cpp knows by the name that its control tokens do
        vocabulary.add(CONTROL, "<unk>", "<s>", "</s>", "<|endoftext|>")
    vocabulary.template = TURNS
    return vocabulary.write(folder / "tiny.gguf")


VOCABULARIES = ["bytes", "sentencepiece", "takes whitespace", pytest.param("smollm2", marks=pytest.mark.real)]


@pytest.fixture(scope="module", params=VOCABULARIES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufTokenizer]:
    if request.param == "smollm2":
        request.applymarker(pytest.mark.real)
        files = find("smollm2")
    else:
        files = files_of(write(tmp_path_factory.mktemp("special"), request.param))
    engine = LlamaCppEngine(files, LlamaOptions(threads=1, device="cpu", context_tokens=256))
    yield engine.tokenizer
    engine.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special_tokens, "_MAX_SPECIAL_TOKENS", 2)


@given(parts=st.lists(st.sampled_from(PARTS), max_size=60), special=st.booleans())
@pytest.mark.usefixtures("small_pieces")
def test_in_pieces_a_text_has_the_tokens_of_the_whole(
    tokenizer: GgufTokenizer, parts: list[str], special: bool
) -> None:
    text = "".join(parts)
    whole = tokenizer._tokenize_piece(text, special=special) if text else []
    assert tokenizer._tokenize(text, special=special) == whole


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    file = write(tmp_path_factory.mktemp("engine"), "bytes")
    engine = LlamaCppEngine(files_of(file), LlamaOptions(threads=1, device="cpu", context_tokens=256))
    yield engine
    engine.close()


@pytest.mark.parametrize(("text", "special"), [("<|turn|>a<|end|>", True), ("\n" * 9, True), ("\n\na", False)])
def test_no_piece_has_many_special_tokens(
    text: str, special: bool, engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(engine.tokenizer, "_tokenize_piece", lambda piece, **_: pieces.append(piece) or [])
    engine.tokenizer._tokenize(text * 20_000, special=special)
    assert "".join(pieces) == text * 20_000
    assert max(map(len, pieces)) < 600 * len(text)


def test_a_chat_of_too_many_messages_is_refused_before_it_is_tokenized(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "_tokenize_piece", lambda *_, **__: pytest.fail("it was tokenized"))
    with pytest.raises(ContextOverflow):
        encode_prompt(engine, Request((Message("user", "a"),) * 200))


def test_a_request_that_is_cancelled_is_not_tokenized_further(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled, pieces = threading.Event(), []
    monkeypatch.setattr(
        engine.tokenizer, "_tokenize_piece", lambda piece, **_: pieces.append(piece) or cancelled.set() or []
    )
    with cancellable(cancelled.is_set), pytest.raises(Cancelled):
        engine.tokenizer._tokenize("<|turn|>a<|end|>" * 5000, special=True)
    assert len(pieces) == 1


def test_a_request_that_waits_for_anothers_rendering_can_be_cancelled(engine: LlamaCppEngine) -> None:
    with chat_template._lock, pytest.raises(Cancelled):
        encode_prompt(engine, Request((Message("user", "a"),)), cancelled=lambda: True)


def test_two_requests_are_tokenized_at_the_same_time_and_closing_waits_for_both(tmp_path: Path) -> None:
    engine = LlamaCppEngine(
        files_of(write(tmp_path, "bytes")), LlamaOptions(threads=1, device="cpu", context_tokens=64)
    )
    model = engine.tokenizer._model
    inside, leave, closed = threading.Barrier(3), threading.Event(), threading.Event()

    def use() -> None:
        with model.alive():
            inside.wait(60)
            assert leave.wait(60)
            assert not closed.is_set()

    def close() -> None:
        engine.close()
        closed.set()

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(60)
    closing = threading.Thread(target=close)
    closing.start()
    while True:  # until the engine begins to close
        try:
            engine.tokenizer.encode("a")
        except Closed:
            break
    leave.set()
    for thread in (*threads, closing):
        thread.join(60)
    assert closed.is_set()
