"""Context sets: questions, each with the paragraphs that may answer it.

A folder with `.jsonl` files whose records have `question`, `contexts` [{title, text, is_supporting}] and `answers`, a
folder of such folders, or the sample that the package ships. Files with other records are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rekindle.core.document import Quote
from rekindle.errors import InvalidSetting

WORDS = 100  # of a paragraph, at most


@dataclass(frozen=True)
class Asked:
    """A question, the paragraphs that come with it (those that answer it first, if that is marked), and its answers."""

    question: str
    paragraphs: tuple[Quote, ...]
    answers: tuple[str, ...]


def contexts_of(folder: Path | None) -> list[Asked]:
    """All records of a folder, in the order of its files; none if it has no context set. Raises `InvalidSetting`."""
    if folder is None:
        text = resources.files("rekindle.bench").joinpath("sample_contexts.jsonl").read_text("utf-8")
        return list(_asked(json.loads(line) for line in text.splitlines()))
    if not folder.is_dir():
        raise InvalidSetting(f"--data {folder} is not a folder. Give one with .jsonl files.")
    paths = sorted(folder.glob("*.jsonl")) or sorted(folder.glob("*/*.jsonl"))
    return [one for path in paths for one in _asked(_records(path))]


def _asked(records: Iterable[Any]) -> Iterator[Asked]:
    for record in records:
        if not isinstance(record, Mapping) or not isinstance(record.get("contexts"), list):
            return  # a file of something else
        marked = sorted(record["contexts"], key=lambda one: not one.get("is_supporting"))  # stable
        quotes = [Quote(_cut(str(one["text"])), str(one.get("title", ""))) for one in marked if one.get("text")]
        yield Asked(str(record["question"]), tuple(dict.fromkeys(quotes)), tuple(map(str, record.get("answers") or ())))


def _cut(text: str) -> str:
    return " ".join(text.split()[:WORDS])


def _records(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise InvalidSetting(f"{path}, line {number} is not JSON ({error}).") from error
