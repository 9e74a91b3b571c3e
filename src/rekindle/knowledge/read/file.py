"""Any file to its documents."""

from __future__ import annotations

import io
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import BinaryIO

from rekindle.core.document import Document
from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.html import read_html
from rekindle.knowledge.read.mail import read_mail, read_mailbox
from rekindle.knowledge.read.markdown import read_markdown
from rekindle.knowledge.read.pdf import read_pdf
from rekindle.knowledge.read.plain import read_text
from rekindle.knowledge.read.problem import Problem, sentence
from rekindle.knowledge.read.records import read_json, read_json_lines
from rekindle.knowledge.read.table import read_table
from rekindle.knowledge.read.word import read_word

__all__ = ["KINDS", "MOST_BYTES", "Problem", "kind_of", "read_bytes", "read_file"]

MOST_BYTES = 100_000_000

KINDS = {
    **dict.fromkeys((".txt", ".text", ".log", ".rst"), "txt"),
    **dict.fromkeys((".md", ".markdown"), "md"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    ".pdf": "pdf",
    ".eml": "eml",
    ".mbox": "mbox",
    ".docx": "docx",
    ".json": "json",
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}
"""The kind of file that each suffix stands for."""

_WHOLE: dict[str, Callable[[str, bytes], Iterator[Document | Problem]]] = {
    "txt": read_text,
    "md": read_markdown,
    "html": read_html,
    "pdf": read_pdf,
    "eml": read_mail,
    "docx": read_word,
    "json": read_json,
    "csv": read_table,
}
_PIECEWISE: dict[str, Callable[[str, BinaryIO], Iterator[Document | Problem]]] = {
    "mbox": read_mailbox,
    "jsonl": read_json_lines,
}


def kind_of(path: PurePath) -> str | None:
    """The kind of file by its name; None if it is none that we read."""
    return KINDS.get(path.suffix.lower())


def read_file(path: Path, *, most_bytes: int = MOST_BYTES) -> Iterator[Document | Problem]:
    """The documents of a file, one after another; a name that tells no kind is read as text.

    A `Problem` stands for a part that cannot be read while others can: a line of .jsonl, a record of .json, a message
    of .mbox, the damaged pages of a PDF. Raises `UnreadableDocument` for a file of which nothing more can be read,
    and `ExtraMissing` where its parser is not installed; both may come after documents were given.

    .jsonl and .mbox are read piece by piece and may be of any size: their records are bounded. Another file may have
    `most_bytes`.
    """
    path = path.absolute()
    kind = kind_of(path) or "txt"
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # opening a pipe would wait for its other end
            raise UnreadableDocument(f"{path} is not a file: give the files in it, or a folder of them.")
        with path.open("rb") as file:
            if kind in _PIECEWISE:
                yield from _named(str(path), _PIECEWISE[kind](str(path), file))
                return
            data = file.read(most_bytes + 1) if about.st_size <= most_bytes else None
    except OSError as error:
        raise UnreadableDocument(f"{path} cannot be read: {error.strerror or error}.") from error
    if data is None or len(data) > most_bytes:
        raise UnreadableDocument(
            f"{path} is larger than {most_bytes / 1e6:,.0f} MB: cut it into smaller files, or convert it to .jsonl."
        )
    yield from _named(str(path), _WHOLE[kind](str(path), data))


def read_bytes(name: str, data: bytes) -> Iterator[Document | Problem]:
    """The documents of a file that is at hand already: `name` tells its kind and becomes the source."""
    kind = kind_of(PurePath(name)) or "txt"
    if kind in _PIECEWISE:
        yield from _named(name, _PIECEWISE[kind](name, io.BytesIO(data)))
    else:
        yield from _named(name, _WHOLE[kind](name, data))


def _named(source: str, found: Iterator[Document | Problem]) -> Iterator[Document | Problem]:
    """The same, each refusal with the source in front: a reader's sentence begins with its verb."""
    try:
        yield from found
    except UnreadableDocument as refused:
        raise UnreadableDocument(sentence(source, refused)) from refused
