"""Texts to measure with: a folder of JSON Lines, or the sample that the package ships."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from rekindle.errors import InvalidSetting


def texts(folder: Path | None) -> list[str]:
    """The passages of a data folder: every `text`, `document` or `content` in its `.jsonl` files, in order."""
    if folder is None:
        return [resources.files("rekindle.bench").joinpath("sample.txt").read_text("utf-8")]
    if not folder.is_dir():
        raise InvalidSetting(f"--data {folder} is not a folder. Give one with .jsonl files.")
    found = [text for path in sorted(folder.glob("*.jsonl")) for text in _texts_of_file(path)]
    if not found:
        raise InvalidSetting(f"--data {folder} has no texts in .jsonl files.")
    return found


def _texts_of_file(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InvalidSetting(f"{path}, line {number} is not JSON ({error}).") from error
        yield from _texts_of_record(record)


def _texts_of_record(record: Any) -> Iterator[str]:
    if isinstance(record, list):
        for item in record:
            yield from _texts_of_record(item)
    elif isinstance(record, dict):
        for key in ("text", "document", "content"):
            if isinstance(record.get(key), str):
                yield record[key]
        for key in ("contexts", "turns"):
            yield from _texts_of_record(record.get(key))
