"""E-mail: a message (.eml), or many in one file (.mbox).

Messages are parsed by Python's own parser under its oldest policy: the newer one parses headers by a grammar, which
raises on some malformed ones and needs minutes for thousands of recipients.
"""

from __future__ import annotations

import email
import io
import re
from collections.abc import Iterator
from email.errors import MessageError
from email.header import decode_header, make_header
from email.message import Message
from typing import BinaryIO

from rekindle.core.document import Document, Section
from rekindle.errors import ExtraMissing, UnreadableDocument
from rekindle.knowledge.read.clean_text import (
    ReadProblem,
    RecordNames,
    clean,
    decode,
    first_words,
    make_document,
    one_line,
    refusal_sentence,
)
from rekindle.knowledge.read.html import html_text

MAX_MAIL_BYTES = 32 << 20  # per message, without its attachments

_HEADERS = ("From", "To", "Date", "Subject")
_HEADER_CHARACTERS = 4000  # decoded of each; 200 are shown
_MAX_DEPTH = 50
_MAX_NAMES = 100
_MAX_PARTS = 50_000  # each takes as much memory as a page of text; also counts other lines that begin with --
_LINE_BYTES = 1 << 20
_ENCODED = re.compile(rb"[A-Za-z0-9+/]{60,}={0,2}\r?\n")
_ENCODED_LINES = 1000  # consecutive base64 lines; longer runs that are no text are attachments, which are skipped
# Python's parser takes quadratic time in their length.
_PART_HEADER = re.compile(rb"content-(?:type|disposition|transfer-encoding)[ \t]*:", re.IGNORECASE)
_PART_HEADER_BYTES = 8000
_FROM = re.compile(rb"From \S.{0,200}\d{1,2}:\d\d")
_QUOTED_FROM = re.compile(rb">+From ")


def read_mail(source: str, data: bytes) -> Iterator[Document]:
    """One document: the text of the message under its headers."""
    raw_message = _RawMessage()
    for line in io.BytesIO(data):
        raw_message.add(line)
    yield _document(source, raw_message.parse())


def read_mailbox(source: str, file: BinaryIO) -> Iterator[Document | ReadProblem]:
    """A document for each message, named by its Message-ID or else its number, read lazily.

    A message that cannot be read gives a problem, named by its number, and the next ones are read.
    """
    names = RecordNames(source)
    for number, raw_message in enumerate(_messages(file), 1):
        try:
            message = raw_message.parse()
            found: Document | ReadProblem = _document(
                names.unique(_header(message, "Message-ID").strip("<> "), number), message
            )
        except (UnreadableDocument, ExtraMissing) as refused:
            own = f"{source}#{number}"
            found = ReadProblem(
                own, refusal_sentence(own, refused) if isinstance(refused, UnreadableDocument) else str(refused)
            )
        yield found


class _RawMessage:
    """The lines of one message, without the bytes of its attachments."""

    def __init__(self) -> None:
        self._kept: list[bytes] = []
        self._size = 0
        self._parts = 0
        self._run = 0  # consecutive base64 lines
        self._header_left: int | None = None  # bytes left of the part header we are in
        self._is_text = True  # the part we are in, by its Content-Type

    def add(self, line: bytes) -> None:
        if _ENCODED.fullmatch(line):
            self._run += 1
            if self._run > _ENCODED_LINES and not self._is_text:
                return
        else:
            self._run = 0
            line = self._bounded(line)
            if line[:13].lower() == b"content-type:":
                kind = line[13:80].strip().lower()
                self._is_text = not kind or kind.startswith(b"text/")
        self._parts += line.startswith(b"--")
        self._size += len(line)
        if self._size <= MAX_MAIL_BYTES:
            self._kept.append(line)
        else:
            self._kept.clear()

    def _bounded(self, line: bytes) -> bytes:
        """The line, cut to what a part header may still have."""
        if _PART_HEADER.match(line):
            self._header_left = _PART_HEADER_BYTES
        elif not (self._header_left is not None and line[:1] in (b" ", b"\t")):
            self._header_left = None
        if self._header_left is None:
            return line
        kept = line if len(line) <= self._header_left else line[: self._header_left] + b"\n"
        kept = kept if self._header_left else b""
        self._header_left = max(0, self._header_left - len(line))
        return kept

    def parse(self) -> Message:
        """Raises `UnreadableDocument` for a message that is too large or nested too deeply."""
        if self._size > MAX_MAIL_BYTES:
            size = f"{MAX_MAIL_BYTES >> 20} MB"
            raise UnreadableDocument(f"has more than {size} of text: give its attachments as files of their own")
        if self._parts > _MAX_PARTS:
            raise UnreadableDocument(f"has more than {_MAX_PARTS:,} parts: it is damaged, or made to do harm")
        try:
            return email.message_from_bytes(b"".join(self._kept))
        except RecursionError as error:
            raise _too_deep() from error


def _too_deep() -> UnreadableDocument:
    return UnreadableDocument("has too many parts inside one another: it is damaged, or made to do harm")


def _messages(file: BinaryIO) -> Iterator[_RawMessage]:
    """The messages of a mailbox. Each begins with a `From ` line with a time, at the start or after an empty line."""
    raw_message: _RawMessage | None = None
    blank = whole = True  # the previous line: empty, and not cut
    while line := file.readline(_LINE_BYTES):
        if whole and blank and _FROM.match(line):
            if raw_message is not None:
                yield raw_message
            raw_message = _RawMessage()
        elif raw_message is None:
            if line.strip():
                raise UnreadableDocument("is not a mailbox: it does not begin with a line 'From ADDRESS DATE'")
        else:
            raw_message.add(line[1:] if whole and _QUOTED_FROM.match(line) else line)
        blank = whole and not line.strip()
        whole = line.endswith(b"\n")
    if raw_message is None:
        raise UnreadableDocument("is empty: it holds no message")
    yield raw_message


def _header(message: Message, name: str) -> str:
    """The header on one line, decoded; empty if there is none."""
    raw = next((str(value) for key, value in message.raw_items() if key.lower() == name.lower()), "")
    raw = raw[:_HEADER_CHARACTERS].replace("\0", "")
    if not raw.isascii():  # bytes that should have been encoded
        raw = decode(raw.encode("utf-8", "surrogateescape"))
    try:
        return one_line(str(make_header(decode_header(raw))))
    except (MessageError, LookupError, ValueError):  # an unknown charset, or broken base64
        return one_line(raw)


def _document(source: str, message: Message) -> Document:
    headers = {name: _header(message, name) for name in _HEADERS}
    texts: list[str] = []
    names: list[str] = []
    _gather(message, texts, names, _MAX_DEPTH)
    if names:
        texts.append(f"Attachments: {', '.join(names)}")
    subject = headers["Subject"]
    text = "\n\n".join(texts) or subject
    shown = "\n".join(f"{name}: {value}"[:200] for name, value in headers.items() if value)
    return make_document(source, subject or first_words(text), [Section(text)], shown)


def _gather(part: Message, texts: list[str], names: list[str], depth: int) -> None:
    """Collect the texts of a part in order, and the names of attachments."""
    if depth == 0:
        raise _too_deep()
    kind = part.get_content_type()
    name = part.get_filename()
    if name is not None or part.get_content_disposition() == "attachment" or kind == "message/rfc822":
        if len(names) < _MAX_NAMES:
            names.append(_file_name(name) or kind)
        return
    content = part.get_payload()
    if isinstance(content, list):
        children = [child for child in content if isinstance(child, Message)]
        if kind == "multipart/alternative":
            _choose(children, texts, names, depth)
            return
        for child in children:
            _gather(child, texts, names, depth - 1)
    elif kind in ("text/plain", "text/html"):
        text = _text(part, kind)
        if text.strip():
            texts.append(text)


def _choose(ways: list[Message], texts: list[str], names: list[str], depth: int) -> None:
    """The first alternative with text: plain text, then the others from the richest."""
    plain = [way for way in ways if way.get_content_type() == "text/plain"]
    for way in plain + [way for way in reversed(ways) if way not in plain]:
        before = len(texts)
        _gather(way, texts, names, depth - 1)
        if len(texts) > before:
            return


def _text(part: Message, kind: str) -> str:
    content = part.get_payload(decode=True)
    text = decode(content, _charset(part)) if isinstance(content, bytes) else ""
    return clean(html_text(text) if kind == "text/html" else text).strip("\n")


def _charset(part: Message) -> str | None:
    try:
        return part.get_content_charset()
    except (LookupError, ValueError):
        return None


def _file_name(name: str | None) -> str:
    try:
        return one_line(str(make_header(decode_header(name or ""))), 100)
    except (MessageError, LookupError, ValueError):
        return one_line(name or "", 100)
