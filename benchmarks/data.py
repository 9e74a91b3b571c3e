"""Texts to measure with: a folder of JSON Lines, or the sample that the package ships."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.errors import InvalidSetting
from rekindle.session.calibrate.prompts import sample_text


def texts(folder: Path | None) -> list[str]:
    """The passages of a data folder: every `text`, `document` or `content` in its `.jsonl` files, in order."""
    if folder is None:
        return [sample_text()]
    if not folder.is_dir():
        raise InvalidSetting(f"--data {folder} is not a folder. Give one with .jsonl files.")
    found = [
        text
        for path in sorted(folder.glob("*.jsonl"))
        for record in read_jsonl(path)
        for text in _texts_of_record(record)
    ]
    if not found:
        raise InvalidSetting(f"--data {folder} has no texts in .jsonl files.")
    return found


def read_jsonl(path: Path) -> Iterator[Any]:
    """The records of a file, line by line; empty lines count for nothing. Raises `InvalidSetting`."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _record(path, number, line)
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be read ({error}).") from error


def _record(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidSetting(f"{path}, line {number} is not JSON ({error}).") from error


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
