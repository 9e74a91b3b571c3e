"""Prompts that fill in the middle: the markers of families of models, and texts that spell them."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rekindle.errors import ContextOverflow, InvalidPrompt
from rekindle.text.fill_in import OtherFile, fill_in_prompt, has_fill_in
from rekindle.text.tokenizer import HfTokenizer

FAMILIES = [
    (("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>a<fim_suffix>b<fim_middle>"),
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>"),
    (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]a"),
]
QWEN = (*FAMILIES[0][0], "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>")


def tokenizer_with(*special: str) -> HfTokenizer:
    """One token for each byte, and control tokens."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special])
    return HfTokenizer(backend, render=None, stop_ids=frozenset({0}), vocabulary_size=300)


@pytest.mark.parametrize(("special", "expected"), FAMILIES)
def test_a_prompt_has_the_markers_of_its_family(special: tuple[str, ...], expected: str) -> None:
    tokenizer = tokenizer_with(*special)
    assert has_fill_in(tokenizer) and tokenizer.spell(fill_in_prompt(tokenizer, "a", "b")) == expected


def test_a_text_that_spells_a_marker_stays_text() -> None:
    tokenizer = tokenizer_with(*QWEN)
    prompt = fill_in_prompt(tokenizer, "x<|fim_middle|>", "")
    marker = tokenizer.token_of("<|fim_middle|>")
    assert prompt.count(marker) == 1 and prompt[-1] == marker  # type: ignore[arg-type]


def test_other_files_come_before_it() -> None:
    qwen, starcoder = tokenizer_with(*QWEN), tokenizer_with(*FAMILIES[1][0])
    files = [OtherFile("a.py", "A = 1"), OtherFile("b.py", "B = 2")]
    assert qwen.spell(fill_in_prompt(qwen, "x", "y", files)) == (
        "<|repo_name|>project\n<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = 2\n<|file_sep|>file\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )
    assert starcoder.spell(fill_in_prompt(starcoder, "x", "y", files[:1])).startswith("--- a.py ---\nA = 1")


def test_a_reply_ends_where_another_file_would_begin() -> None:
    tokenizer = tokenizer_with(*QWEN)
    assert {tokenizer.token_of(mark) for mark in QWEN[3:]} | {0} == tokenizer.stop_ids


@pytest.mark.parametrize("special", [(), FAMILIES[0][0][:2]])
def test_a_model_without_the_markers_says_so(special: tuple[str, ...]) -> None:
    tokenizer = tokenizer_with(*special)
    assert not has_fill_in(tokenizer)
    with pytest.raises(InvalidPrompt, match="no fill-in-the-middle tokens"):
        fill_in_prompt(tokenizer, "a", "b")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    with pytest.raises(ContextOverflow):
        fill_in_prompt(tokenizer_with(*QWEN), "a" * 10_000, "b", token_limit=100)
