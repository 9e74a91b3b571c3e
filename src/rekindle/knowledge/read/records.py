"""Records: JSON (an object or a list), JSON lines, and tables of comma- or tab-separated values."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath
from typing import Any, BinaryIO

from rekindle.core.document import Document, Section
from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.clean_text import (
    ReadProblem,
    RecordNames,
    clean,
    decode,
    first_words,
    join_lines,
    make_document,
    one_line,
    refusal_sentence,
)

MAX_LINE_BYTES = 32 << 20
MAX_PROBLEMS = 100  # reported one by one; the others are counted

_IDS = ("id", "doc_id", "_id")
_TITLES = ("title", "subject", "name")
_TEXTS = ("text", "content", "body", "document", "passage")
_MAX_DEPTH = 100
_BROKEN_AT_FIRST = 20  # broken lines before the first valid one: then it is no JSON lines file
_Pairs = list[tuple[str, Any]]


def read_json(source: str, data: bytes) -> Iterator[Document | ReadProblem]:
    """A document for each record of a list, a problem for each empty one; or a single document."""
    value = _parse(decode(data))
    if not (isinstance(value, list) and value and all(isinstance(record, dict | str) for record in value)):
        yield _document(source, value, PurePath(source).stem)
        return
    names, problems = RecordNames(source), _Problems(source)
    for number, record in enumerate(value, 1):
        try:
            yield _document(names.unique(_id(record), number), record)
        except UnreadableDocument as refused:
            yield from problems.add(number, str(refused))
    yield from problems.finish()


def read_json_lines(source: str, file: BinaryIO) -> Iterator[Document | ReadProblem]:
    """A document for each line, read lazily; a problem for each line that cannot be read."""
    names, problems = RecordNames(source), _Problems(source)
    whole = 0
    for number, line in _lines(file):
        try:
            if line is None:
                raise UnreadableDocument(f"is longer than {MAX_LINE_BYTES >> 20} MB: cut it into smaller records")
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
    """Number and bytes of each non-blank line; None for one that is too long."""
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


class _Problems:
    """Reports the first problems and counts the others: a file of another kind has a million."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.count = 0

    def add(self, number: int, reason: str) -> Iterator[ReadProblem]:
        self.count += 1
        if self.count <= MAX_PROBLEMS:
            own = f"{self._source}#{number}"
            yield ReadProblem(own, refusal_sentence(own, reason))

    def finish(self) -> Iterator[ReadProblem]:
        if self.count > MAX_PROBLEMS:
            more = f"has {self.count - MAX_PROBLEMS:,} more records that cannot be read"
            yield ReadProblem(self._source, refusal_sentence(self._source, more))


def _parse(text: str) -> Any:
    """Parse JSON, keeping numbers as written: no digit is lost, and long ones cost nothing."""
    if not text.strip():
        raise UnreadableDocument("is empty: it holds no text")
    try:
        return json.loads(text, parse_int=str, parse_float=str)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise UnreadableDocument(f"is not JSON: {error}") from error


def _too_deep() -> UnreadableDocument:
    return UnreadableDocument(f"nests more than {_MAX_DEPTH} levels: flatten it first")


def _id(record: Any) -> str | None:
    return _first(record, _IDS)


def _first(record: Any, keys: tuple[str, ...]) -> str | None:
    """The first of these fields with text."""
    if isinstance(record, dict):
        for key in keys:
            value = record.get(key)
            if isinstance(value, str) and value.strip():
                return value
    return None


def _document(source: str, record: Any, title: str | None = None) -> Document:
    text = record if isinstance(record, str) else _first(record, _TEXTS) or _joined(record)
    if text is None:
        text = join_lines(_flattened(record))
    return make_document(source, _first(record, _TITLES) or title or first_words(text), [Section(text)])


def _joined(record: Any) -> str | None:
    """A text given as a list of paragraphs."""
    for key in _TEXTS if isinstance(record, dict) else ():
        value = record.get(key)
        if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
            return join_lines(value)
    return None


def _flattened(record: Any) -> Iterator[str]:
    """A line `path.to.key: value` for each value."""
    waiting: list[tuple[str, Any, int]] = [("", record, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        if depth > _MAX_DEPTH:
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


_DELIMITERS = ",;\t|"
_SAMPLE_ROWS, _SAMPLE_CHARACTERS = 30, 64 << 10
_MAX_COLUMNS = 2000
_COLUMN_CHARACTERS = 80  # of a column name: it is repeated in each row
_FIELD_CHARACTERS = 100_000_000
_NUMBER = re.compile(r"[-+]?[\d.,:/ ]*\d[\d.,:/ %-]*")


def read_table(source: str, data: bytes) -> Iterator[Document]:
    """One document: the column names as headers, a line for each row."""
    text = clean(decode(data))
    # A limit of the whole process, 128 KB by default; a cell may hold a whole article.
    csv.field_size_limit(max(csv.field_size_limit(), _FIELD_CHARACTERS))
    delimiter = "\t" if source.lower().endswith(".tsv") else _delimiter(text)
    try:
        rows = (row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(map(str.strip, row)))
        first = next(rows, [])
        columns = _columns(first)
        lines = (_line(columns, row) for row in rows)
        body = join_lines(lines) if columns else join_lines([_line([], first), *lines])
    except csv.Error as error:
        raise UnreadableDocument(f"is not a table of separated values: {error}") from error
    headers = f"Columns: {', '.join(columns)}" if columns else ""
    # A table without rows still says what it would hold.
    yield make_document(source, PurePath(source).stem, [Section(body or headers)], headers)


def _delimiter(text: str) -> str:
    """The delimiter that gives the first rows equally many fields; of several, the one that gives most."""
    best, choice = (0.0, 0), ","
    sample = text[:_SAMPLE_CHARACTERS]
    for delimiter in _DELIMITERS:
        try:
            rows = islice(csv.reader(io.StringIO(sample), delimiter=delimiter), _SAMPLE_ROWS)
            widths = Counter(len(row) for row in rows if row)
        except csv.Error:
            continue
        if not widths:
            continue
        width, count = widths.most_common(1)[0]
        score = (count / widths.total(), width)
        if width > 1 and score > best:
            best, choice = score, delimiter
    return choice


def _columns(first: list[str]) -> list[str]:
    """The column names; none if the first row is data."""
    if len(first) > _MAX_COLUMNS:
        raise UnreadableDocument(f"has more than {_MAX_COLUMNS:,} columns: choose those that hold text")
    names = [one_line(name, _COLUMN_CHARACTERS) for name in first]
    if any(_NUMBER.fullmatch(name) for name in names):
        return []
    return [name or f"column {at}" for at, name in enumerate(names, 1)]


def _line(columns: list[str], row: list[str]) -> str:
    """A row as one line, without empty cells."""
    cells = [" ".join(cell.split()) for cell in row]
    named = [f"{name}: {cell}" for name, cell in zip(columns, cells, strict=False) if cell]
    return ", ".join(named + [cell for cell in cells[len(columns) :] if cell])
