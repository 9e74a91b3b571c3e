"""Fill in the middle: prompts for models that were trained to write what goes between two texts.

    prefix, suffix, middle   <PRE> def add(a, b): <SUF> print(add(1, 2)) <MID>, then the model writes the middle
    suffix first             [SUFFIX] print(add(1, 2)) [PREFIX] def add(a, b):

The markers are control tokens of the model; text of users never becomes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rekindle.errors import InvalidPrompt
from rekindle.text.base import Tokenizer


@dataclass(frozen=True, slots=True)
class FillInStyle:
    """The markers of a family of models. Without `middle`, the suffix goes first."""

    prefix: str
    suffix: str
    middle: str | None


_STYLES = (
    FillInStyle("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    FillInStyle("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillInStyle("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInStyle("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FillInStyle("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    FillInStyle("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FillInStyle("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
_FILE, _REPOSITORY = "<|file_sep|>", "<|repo_name|>"
ENDS = ("<|fim_pad|>", _FILE, _REPOSITORY)  # what such models write behind the middle; llama.cpp ends there too


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file that the model may look at."""

    name: str
    text: str


def has_fill_in(tokenizer: Tokenizer) -> bool:
    """Whether the model can fill in the middle."""
    return _markers(tokenizer) is not None


def fill_in_prompt(
    tokenizer: Tokenizer, prefix: str, suffix: str, files: Sequence[OtherFile] = (), *, token_limit: int | None = None
) -> list[int]:
    """The tokens of a prompt whose reply goes between `prefix` and `suffix`.

    Raises `InvalidPrompt` for a model without the markers, and `ContextOverflow` as `Tokenizer.encode` does.
    """
    markers = _markers(tokenizer)
    if markers is None:
        raise InvalidPrompt(
            "This model has no fill-in-the-middle tokens, so it cannot write what goes before a suffix. Leave the "
            "suffix out, or use a model for code that has them, as Qwen2.5-Coder."
        )
    before, after, middle = markers
    lead = tokenizer.encode("")  # what the model wants at the start of a text

    def text(part: str) -> list[int]:
        return tokenizer.encode(part, token_limit=token_limit)[len(lead) :] if part else []

    begins, ends = [before, *text(prefix)], [after, *text(suffix)]
    context = _context(tokenizer, files, text)
    return [*lead, *context, *(ends + begins if middle is None else [*begins, *ends, middle])]


def _markers(tokenizer: Tokenizer) -> tuple[int, int, int | None] | None:
    """The tokens before the prefix, before the suffix and behind both; None if the model lacks one."""
    for style in _STYLES:
        before, after = tokenizer.token_of(style.prefix), tokenizer.token_of(style.suffix)
        middle = None if style.middle is None else tokenizer.token_of(style.middle)
        if before is not None and after is not None and (middle is None) == (style.middle is None):
            return before, after, middle
    return None


def _context(tokenizer: Tokenizer, files: Sequence[OtherFile], text: Callable[[str], list[int]]) -> list[int]:
    """Other files, as models for whole repositories read them; for others, as text."""
    if not files:
        return []
    separator, repository = tokenizer.token_of(_FILE), tokenizer.token_of(_REPOSITORY)
    if separator is None:
        return text("".join(f"--- {file.name} ---\n{file.text}\n\n" for file in files))
    tokens = [] if repository is None else [repository, *text("project\n")]
    for file in files:
        tokens += [separator, *text(f"{file.name}\n{file.text}\n")]
    return [*tokens, separator, *text("file\n")]
