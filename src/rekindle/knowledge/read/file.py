"""Any file to its documents: dispatch by the kind of file."""

from __future__ import annotations

import io
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO

from rekindle.core.document import Document
from rekindle.errors import UnreadableDocument, why_unreadable
from rekindle.knowledge.read.clean_text import ReadProblem, clean, decode, refusal_sentence
from rekindle.knowledge.read.docx import read_word
from rekindle.knowledge.read.html import read_html
from rekindle.knowledge.read.mail import read_mail, read_mailbox
from rekindle.knowledge.read.pdf import read_pdf
from rekindle.knowledge.read.records import read_json, read_json_lines, read_table
from rekindle.knowledge.read.text import read_markdown, read_text

__all__ = ["KINDS", "MAX_BYTES", "FileText", "kind_of", "read_bytes", "read_file", "read_file_text"]

MAX_BYTES = 100_000_000

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

_WHOLE: dict[str, Callable[[str, bytes], Iterator[Document | ReadProblem]]] = {
    "txt": read_text,
    "md": read_markdown,
    "html": read_html,
    "pdf": read_pdf,
    "eml": read_mail,
    "docx": read_word,
    "json": read_json,
    "csv": read_table,
}
_PIECEWISE: dict[str, Callable[[str, BinaryIO], Iterator[Document | ReadProblem]]] = {
    "mbox": read_mailbox,
    "jsonl": read_json_lines,
}
_TEXTS = frozenset({"txt", "md", "json", "jsonl", "csv"})  # whose source is what a reader wants to see


def kind_of(path: PurePath) -> str | None:
    """The kind of file by its suffix; None if that kind is not read."""
    return KINDS.get(path.suffix.lower())


@dataclass(frozen=True, slots=True)
class FileText:
    """The text of a file, and the parts that could not be read."""

    text: str
    problems: tuple[ReadProblem, ...] = ()


def read_file_text(path: Path) -> FileText:
    """The text of a file for one reader: of a PDF, a Word file, a web page or mails what they say, of others their
    source.

    Raises `UnreadableDocument` if there is none, and `ExtraMissing` if its parser is not installed.
    """
    if (kind_of(path) or "txt") in _TEXTS:
        return FileText(_source_text(path))
    found = list(read_file(path))
    problems = tuple(item for item in found if isinstance(item, ReadProblem))
    texts = [item.text for item in found if isinstance(item, Document)]
    if not texts:  # then each part has a problem
        raise UnreadableDocument(problems[0].reason)
    return FileText("\n\n".join(texts), problems)


def read_file(path: Path, *, max_bytes: int = MAX_BYTES) -> Iterator[Document | ReadProblem]:
    """The documents of a file, one after another; an unknown kind is read as text.

    A `ReadProblem` stands for a part that cannot be read while others can: a line of .jsonl, a record of .json, a
    message of .mbox, the damaged pages of a PDF. Raises `UnreadableDocument` if nothing more of the file can be read,
    and `ExtraMissing` if its parser is not installed; both may come after some documents.

    .jsonl and .mbox are streamed and may be of any size: their records are bounded. Other files may have `max_bytes`.
    """
    source, kind = str(path.absolute()), kind_of(path) or "txt"
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # opening a pipe would block
            raise UnreadableDocument(f"{path} is not a file: give the files in it, or a folder of them.")
        with path.open("rb") as file:
            if kind in _PIECEWISE:
                yield from _named(source, _PIECEWISE[kind](source, file))
                return
            data = file.read(max_bytes + 1) if about.st_size <= max_bytes else None
    except OSError as error:
        raise UnreadableDocument(why_unreadable(path, error)) from error
    if data is None or len(data) > max_bytes:
        raise UnreadableDocument(refusal_sentence(source, _too_large(max_bytes)))
    yield from _named(source, _WHOLE[kind](source, data))


def _source_text(path: Path) -> str:
    try:
        with path.open("rb") as file:  # a pipe, too: a shell makes one for --file <(command)
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UnreadableDocument(_too_large(MAX_BYTES))
        text = clean(decode(data))
    except OSError as error:
        raise UnreadableDocument(why_unreadable(path, error)) from error
    except UnreadableDocument as refused:
        raise UnreadableDocument(refusal_sentence(str(path), refused)) from refused
    if not text.strip():
        raise UnreadableDocument(f"{path} is empty: it holds no text.")
    return text


def read_bytes(name: str, data: bytes) -> Iterator[Document | ReadProblem]:
    """The documents of a file in memory: `name` gives its kind and becomes the source."""
    kind = kind_of(PurePath(name)) or "txt"
    if kind in _PIECEWISE:
        yield from _named(name, _PIECEWISE[kind](name, io.BytesIO(data)))
    else:
        yield from _named(name, _WHOLE[kind](name, data))


def _too_large(max_bytes: int) -> str:
    return f"is larger than {max_bytes / 1e6:,.0f} MB: cut it into smaller files, or convert it to .jsonl"


def _named(source: str, found: Iterator[Document | ReadProblem]) -> Iterator[Document | ReadProblem]:
    """Put the source in front of refusals, which readers begin with the verb."""
    try:
        yield from found
    except UnreadableDocument as refused:
        raise UnreadableDocument(refusal_sentence(source, refused)) from refused
