"""Markdown: headings outside of code, and the title of its front matter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from rekindle.core.document import Document
from rekindle.knowledge.read.outline import Outline
from rekindle.knowledge.read.text import assemble, clean, decode

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HASHES = re.compile(r" {0,3}(#{1,6})(?:[ \t]+|$)")
_TAIL = re.compile(r"[ \t]#+$")
_UNDERLINE = re.compile(r" {0,3}(?:=+|-+)[ \t]*")
_NO_PARAGRAPH = re.compile(r"\s{4}|\s*(?:[-*+>|<]|\d+[.)]\s|$)")
_LINK = re.compile(r"!?\[([^\[\]]{0,200})\]\([^()]{0,500}\)")
_HEADING_CHARACTERS = 1000  # a longer line is no heading
_FRONT_LINES = 200


def read_markdown(source: str, data: bytes) -> Iterator[Document]:
    """One document, a section for each heading that has text."""
    lines = clean(decode(data)).split("\n")
    start, title = _front_matter(lines)
    outline = Outline()
    _outline(lines, start, outline)
    sections = outline.finish()
    yield assemble(source, title or outline.title or PurePath(source).stem, sections)


def _front_matter(lines: list[str]) -> tuple[int, str | None]:
    """The line where the text begins, and the title that stands before it."""
    if lines[0].rstrip() != "---":
        return 0, None
    for at, line in enumerate(lines[1:_FRONT_LINES], 1):
        if line.rstrip() in ("---", "..."):
            block = lines[1:at]
            if not any(re.match(r"[\w-]+\s*:", entry) for entry in block):
                return 0, None  # text between two rules
            titles = (entry.partition(":")[2] for entry in block if re.match(r"title\s*:", entry, re.IGNORECASE))
            return at + 1, next(titles, "").strip().strip("'\"") or None
    return 0, None


def _outline(lines: list[str], start: int, outline: Outline) -> None:
    fence = ""  # what closes the code we are in
    paragraph = _Paragraph(outline)
    fresh = True  # a paragraph may begin here
    for at in range(start, len(lines)):
        line = lines[at]
        mark = _FENCE.match(line)
        if fence or mark:
            paragraph.release()
            fence = _after(fence, mark, line)
            outline.line(line)
            fresh = True
        elif len(line) <= _HEADING_CHARACTERS and (hashes := _HASHES.match(line)):
            paragraph.release()
            outline.head(len(hashes[1]), _bare(_TAIL.sub("", line[hashes.end() :].rstrip())))
            fresh = True
        elif paragraph.held is not None and _UNDERLINE.fullmatch(line):
            outline.head(1 if "=" in line else 2, _bare(paragraph.held))
            paragraph.held, fresh = None, True
        else:
            paragraph.release()
            if fresh and len(line) <= _HEADING_CHARACTERS and not _NO_PARAGRAPH.match(line):
                paragraph.held = line
            else:
                outline.line(line)
            fresh = not line.strip()
    paragraph.release()


class _Paragraph:
    """Holds a paragraph's first line back: it is a heading, if the next one underlines it."""

    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self.held: str | None = None

    def release(self) -> None:
        if self.held is not None:
            self._outline.line(self.held)
            self.held = None


def _after(fence: str, mark: re.Match[str] | None, line: str) -> str:
    """The fence that is open after this line."""
    if not fence:
        return mark[1] if mark else ""
    closes = mark is not None and mark[1].startswith(fence) and not line[mark.end() :].strip()
    return "" if closes else fence


def _bare(heading: str) -> str:
    """A heading without marks of links, code and stress."""
    return _LINK.sub(r"\1", heading).replace("**", "").replace("`", "").strip()
