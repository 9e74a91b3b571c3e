"""Prompts from files, as `rekindle warm` and `rekindle explain` take them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.cli.options import read_text
from rekindle.core.request import PromptLike
from rekindle.errors import InvalidPrompt


def read_prompts(path: Path, *, raw: bool, as_system: bool) -> list[PromptLike]:
    """The prompts of a file.

    .json    one prompt: a list of messages, `{"messages": [...]}`, or `{"prompt": "text"}`
    .jsonl   one such prompt a line
    others   a text: a user message, a system message, or as it is (`raw`)
    """
    text = read_text(path)
    if path.suffix == ".json":
        return [_parse(text, str(path))]
    if path.suffix == ".jsonl":
        return list(_parse_lines(text, path))
    if raw:
        return [text]
    return [[{"role": "system" if as_system else "user", "content": text}]]


def _parse_lines(text: str, path: Path) -> Iterator[PromptLike]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _parse(line, f"{path}, line {number}")


def _parse(text: str, where: str) -> PromptLike:
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise InvalidPrompt(f"{where} is not JSON ({error}).") from None
    if isinstance(value, dict):
        value = value.get("messages", value.get("prompt"))
    if not isinstance(value, (list, str)) or not value:
        raise InvalidPrompt(
            f'{where} is no prompt. Write a list of messages, {{"messages": ...}} or {{"prompt": ...}}.'
        )
    return value
