"""Tables of comma- or tab-separated values."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import PurePath

from rekindle.core.document import Document, Section
from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.text import assemble, clean, decode, join, one_line

_DELIMITERS = ",;\t|"
_SAMPLE_ROWS, _SAMPLE_CHARACTERS = 30, 64 << 10
_MOST_COLUMNS = 2000
_COLUMN_CHARACTERS = 80  # of a name: it stands in each row
_FIELD_CHARACTERS = 100_000_000
_NUMBER = re.compile(r"[-+]?[\d.,:/ ]*\d[\d.,:/ %-]*")


def read_table(source: str, data: bytes) -> Iterator[Document]:
    """One document: the names of the columns above, a line for each row."""
    text = clean(decode(data))
    # One limit for the whole process, of 128 KB at first; a cell may hold a whole article.
    csv.field_size_limit(max(csv.field_size_limit(), _FIELD_CHARACTERS))
    delimiter = "\t" if source.lower().endswith(".tsv") else _delimiter(text)
    try:
        rows = (row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(map(str.strip, row)))
        first = next(rows, [])
        columns = _columns(first)
        lines = (_line(columns, row) for row in rows)
        body = join(lines) if columns else join([_line([], first), *lines])
    except csv.Error as error:
        raise UnreadableDocument(f"is not a table of separated values: {error}") from error
    headers = f"Columns: {', '.join(columns)}" if columns else ""
    # A table of names only is still a table: what it would hold is told.
    yield assemble(source, PurePath(source).stem, [Section(body or headers)], headers)


def _delimiter(text: str) -> str:
    """What cuts the first rows into equally many fields; of several the one that makes most of them."""
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
    """The names of the columns; none if the first row holds data already."""
    if len(first) > _MOST_COLUMNS:
        raise UnreadableDocument(f"has more than {_MOST_COLUMNS:,} columns: choose those that hold text")
    names = [one_line(name, _COLUMN_CHARACTERS) for name in first]
    if any(_NUMBER.fullmatch(name) for name in names):
        return []
    return [name or f"column {at}" for at, name in enumerate(names, 1)]


def _line(columns: list[str], row: list[str]) -> str:
    """The row on one line, its empty cells left out."""
    cells = [" ".join(cell.split()) for cell in row]
    named = [f"{name}: {cell}" for name, cell in zip(columns, cells, strict=False) if cell]
    return ", ".join(named + [cell for cell in cells[len(columns) :] if cell])
