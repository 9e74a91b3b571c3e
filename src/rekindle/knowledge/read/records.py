"""JSON: one object, a list of records, or a record on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any, BinaryIO

from rekindle.core.document import Document, Section
from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.name import Names
from rekindle.knowledge.read.problem import Problem, sentence
from rekindle.knowledge.read.text import assemble, decode, join, one_line, opening

MOST_LINE_BYTES = 32 << 20
MOST_PROBLEMS = 100  # told one by one; the others are counted

_IDS = ("id", "doc_id", "_id")
_TITLES = ("title", "subject", "name")
_TEXTS = ("text", "content", "body", "document", "passage")
_MOST_DEPTH = 100
_BROKEN_AT_FIRST = 20  # lines that are broken before one is whole: then it is something else
_Pairs = list[tuple[str, Any]]


def read_json(source: str, data: bytes) -> Iterator[Document | Problem]:
    """A document for each record of a list, a problem for each that holds nothing; or one document."""
    value = _parse(decode(data))
    if not (isinstance(value, list) and value and all(isinstance(record, dict | str) for record in value)):
        yield _document(source, value, PurePath(source).stem)
        return
    names, problems = Names(source), _Problems(source)
    for number, record in enumerate(value, 1):
        try:
            yield _document(names.unique(_id(record), number), record)
        except UnreadableDocument as refused:
            yield from problems.add(number, str(refused))
    yield from problems.finish()


def read_json_lines(source: str, file: BinaryIO) -> Iterator[Document | Problem]:
    """A document for each line, read when it is asked for; a problem for each line that cannot be read."""
    names, problems = Names(source), _Problems(source)
    whole = 0
    for number, line in _lines(file):
        try:
            if line is None:
                raise UnreadableDocument(f"is longer than {MOST_LINE_BYTES >> 20} MB: cut it into smaller records")
            record = _parse(decode(line))
            document = _document(names.unique(_id(record), number), record)
        except UnreadableDocument as refused:
            if not whole and problems.count == _BROKEN_AT_FIRST:
                raise UnreadableDocument(f"is not JSON lines: line {number} {refused}") from refused
            yield from problems.add(number, str(refused))
            continue
        whole += 1
        yield document
    if not whole and not problems.count:
        raise UnreadableDocument("is empty: it holds no record")
    yield from problems.finish()


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """The number and bytes of each line that is not blank; no bytes for one that is too long."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES):
        number += 1
        if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


class _Problems:
    """Tells the first ones, and counts the others: a file of another kind has a million."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.count = 0

    def add(self, number: int, reason: str) -> Iterator[Problem]:
        self.count += 1
        if self.count <= MOST_PROBLEMS:
            own = f"{self._source}#{number}"
            yield Problem(own, sentence(own, reason))

    def finish(self) -> Iterator[Problem]:
        if self.count > MOST_PROBLEMS:
            more = f"has {self.count - MOST_PROBLEMS:,} more records that cannot be read"
            yield Problem(self._source, sentence(self._source, more))


def _parse(text: str) -> Any:
    """Numbers stay as they are written: no digit is lost, and a long one costs nothing."""
    if not text.strip():
        raise UnreadableDocument("is empty: it holds no text")
    try:
        return json.loads(text, parse_int=str, parse_float=str)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise UnreadableDocument(f"is not JSON: {error}") from error


def _too_deep() -> UnreadableDocument:
    return UnreadableDocument(f"nests more than {_MOST_DEPTH} levels: flatten it first")


def _id(record: Any) -> str | None:
    return _first(record, _IDS)


def _first(record: Any, keys: tuple[str, ...]) -> str | None:
    """The first of these fields that has text."""
    if isinstance(record, dict):
        for key in keys:
            value = record.get(key)
            if isinstance(value, str) and value.strip():
                return value
    return None


def _document(source: str, record: Any, title: str | None = None) -> Document:
    text = record if isinstance(record, str) else _first(record, _TEXTS) or _joined(record)
    if text is None:
        text = join(_told(record))
    return assemble(source, _first(record, _TITLES) or title or opening(text), [Section(text)])


def _joined(record: Any) -> str | None:
    """A text that is given as a list of its paragraphs."""
    for key in _TEXTS if isinstance(record, dict) else ():
        value = record.get(key)
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            return join(value)
    return None


def _told(record: Any) -> Iterator[str]:
    """A line `key: value` for each value; the keys above it stand before its own, with dots."""
    waiting: list[tuple[str, Any, int]] = [("", record, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        if depth > _MOST_DEPTH:
            raise _too_deep()
        pairs: _Pairs
        if isinstance(value, dict):
            pairs = list(value.items())
        elif isinstance(value, list) and any(isinstance(entry, dict | list) for entry in value):
            pairs = [(str(at), entry) for at, entry in enumerate(value)]
        else:
            shown = _shown(value)
            if shown:
                yield f"{path}: {shown}" if path else shown
            continue
        for key, inner in reversed(pairs):
            waiting.append((one_line(f"{path}.{key}" if path else key), inner, depth + 1))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(filter(None, map(_shown, value)))
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)
