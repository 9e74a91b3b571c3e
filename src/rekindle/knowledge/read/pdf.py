"""PDF: the text of its pages, with wrapped lines joined."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from rekindle.core.document import Document, Section
from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.clean_text import (
    MAX_CHARACTERS,
    ReadProblem,
    clean,
    make_document,
    one_line,
    parser_missing,
    refusal_sentence,
    too_long,
)

_PDFIUM = threading.Lock()  # PDFium is not thread-safe: one call at a time in the whole process
_MAX_PAGES = 50_000

# How PDFium marks a hyphen at the end of a line; it has already joined the lines.
_HYPHEN = re.compile("[\x02\xad\ufffe](?:\r?\n)?")
_ENDS = (".", "!", "?", ":", ";", ".”", ".)", "。")
_ITEM = re.compile(r"\s*(?:[-•*–·▪◦]|\(?\d{1,3}[.)]|\(?[a-z][.)])\s")
_FULL_LINE = 0.7  # of the longest line of a page: a longer line was wrapped
_UNTITLED = re.compile(r"(?:microsoft (?:word|powerpoint) - )?(?:untitled|document\d*|slide \d+|)\s*", re.IGNORECASE)


def read_pdf(source: str, data: bytes) -> Iterator[Document | ReadProblem]:
    """One document, a section for each page with text; then, if pages were damaged, a problem that names them."""
    with _PDFIUM:
        title, pages, damaged = _pages(data)
    texts = [joined(clean(_HYPHEN.sub(_dehyphenated, page))) for page in pages]
    if not any(text.strip() for text in texts):
        if damaged:
            raise UnreadableDocument("is a damaged PDF: none of its pages can be read")
        raise UnreadableDocument("has no text, only pictures; run OCR first")
    yield make_document(source, title or _first_line(texts) or PurePath(source).stem, [Section(text) for text in texts])
    if damaged:
        few = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        yield ReadProblem(source, refusal_sentence(source, f"has damaged pages, which were left out: {few}"))


def _pages(data: bytes) -> tuple[str, list[str], list[int]]:
    """Title, texts, and the numbers of the pages that cannot be read."""
    try:
        import pypdfium2
    except ImportError as error:
        raise parser_missing("PDF") from error
    try:
        opened = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise UnreadableDocument("is encrypted: save it without a password first") from error
        raise UnreadableDocument(f"is damaged, or not a PDF: {error}") from error
    try:
        if len(opened) > _MAX_PAGES:
            raise UnreadableDocument(f"has more than {_MAX_PAGES:,} pages: cut it into smaller files")
        texts, damaged, total = [], [], 0
        for number in range(len(opened)):
            try:
                texts.append(_page_text(opened, number))
            except pypdfium2.PdfiumError:
                damaged.append(number + 1)
                continue
            total += len(texts[-1])
            if total > MAX_CHARACTERS:
                raise too_long()
        title = one_line(opened.get_metadata_value("Title"))
        return "" if _UNTITLED.fullmatch(title) else title, texts, damaged
    finally:
        opened.close()


def _page_text(opened: Any, number: int) -> str:
    page = opened[number]
    try:
        text_page = page.get_textpage()
        try:
            return str(text_page.get_text_bounded())
        finally:
            text_page.close()
    finally:
        page.close()


def _dehyphenated(hyphen: re.Match[str]) -> str:
    return "" if hyphen.string[hyphen.end() : hyphen.end() + 1].islower() else "-"


def _first_line(texts: list[str]) -> str:
    lines = next((text.strip().split("\n") for text in texts if text.strip()), [""])
    return one_line(lines[0]) if len(lines[0]) <= 120 else ""


def joined(text: str) -> str:
    """`text` with hard-wrapped lines joined."""
    lines = [line.rstrip() for line in text.split("\n")]
    width = max(map(len, lines), default=0)
    kept: list[str] = []  # pieces of the text
    last = ""  # the previous line of the page
    for line in lines:
        if not (last and line) or _ITEM.match(line):
            kept += "\n", line
        elif last.endswith("-") and last[-2:-1].isalpha() and line[0].islower():
            kept[-1] = kept[-1][:-1]
            kept.append(line)
        elif not last.endswith(_ENDS) and (line[0].islower() or len(last) >= _FULL_LINE * width > 20):
            kept += " ", line.lstrip()
        else:
            kept += "\n", line
        last = line
    return "".join(kept[1:])
