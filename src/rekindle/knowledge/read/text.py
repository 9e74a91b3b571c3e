"""Plain text and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from rekindle.core.document import Document, Section
from rekindle.knowledge.read.clean_text import SectionBuilder, clean, decode, make_document

_TITLE_CHARACTERS = 100
_RULE = re.compile(r"([=\-~*#^+])\1{2,}\s*")


def read_text(source: str, data: bytes) -> Iterator[Document]:
    """One document, one section."""
    text = clean(decode(data))
    yield make_document(source, _title(text) or PurePath(source).stem, [Section(text)])


def _title(text: str) -> str | None:
    """The first line, if it is alone or underlined, short, and no sentence."""
    lines = text[:1000].lstrip().split("\n")
    if _RULE.fullmatch(lines[0]):
        del lines[0]
    first = lines[0].strip() if lines else ""
    below = lines[1] if len(lines) > 1 else ""
    alone = len(lines) > 1 and (not below.strip() or _RULE.fullmatch(below))
    short = 0 < len(first) <= _TITLE_CHARACTERS and first[-1] not in ".,;:" and any(map(str.isalpha, first))
    return first if alone and short else None


_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HASHES = re.compile(r" {0,3}(#{1,6})(?:[ \t]+|$)")
_TAIL = re.compile(r"[ \t]#+$")
_UNDERLINE = re.compile(r" {0,3}(?:=+|-+)[ \t]*")
_NO_PARAGRAPH = re.compile(r"\s{4}|\s*(?:[-*+>|<]|\d+[.)]\s|$)")
_LINK = re.compile(r"!?\[([^\[\]]{0,200})\]\([^()]{0,500}\)")
_HEADING_CHARACTERS = 1000  # a longer line is not a heading
_FRONT_LINES = 200


def read_markdown(source: str, data: bytes) -> Iterator[Document]:
    """One document, a section for each heading that has text."""
    lines = clean(decode(data)).split("\n")
    start, title = _front_matter(lines)
    builder = SectionBuilder()
    _add_sections(lines, start, builder)
    sections = builder.finish()
    yield make_document(source, title or builder.title or PurePath(source).stem, sections)


def _front_matter(lines: list[str]) -> tuple[int, str | None]:
    """The line where the text begins, and the title in the front matter."""
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


def _add_sections(lines: list[str], start: int, builder: SectionBuilder) -> None:
    fence = ""  # closes the code block we are in
    paragraph = _Paragraph(builder)
    fresh = True  # a paragraph may begin here
    for at in range(start, len(lines)):
        line = lines[at]
        mark = _FENCE.match(line)
        if fence or mark:
            paragraph.release()
            fence = _after(fence, mark, line)
            builder.line(line)
            fresh = True
        elif len(line) <= _HEADING_CHARACTERS and (hashes := _HASHES.match(line)):
            paragraph.release()
            builder.heading(len(hashes[1]), _bare(_TAIL.sub("", line[hashes.end() :].rstrip())))
            fresh = True
        elif paragraph.held is not None and _UNDERLINE.fullmatch(line):
            builder.heading(1 if "=" in line else 2, _bare(paragraph.held))
            paragraph.held, fresh = None, True
        else:
            paragraph.release()
            if fresh and len(line) <= _HEADING_CHARACTERS and not _NO_PARAGRAPH.match(line):
                paragraph.held = line
            else:
                builder.line(line)
            fresh = not line.strip()
    paragraph.release()


class _Paragraph:
    """Holds back the first line of a paragraph: it is a heading if the next line underlines it."""

    def __init__(self, builder: SectionBuilder) -> None:
        self._builder = builder
        self.held: str | None = None

    def release(self) -> None:
        if self.held is not None:
            self._builder.line(self.held)
            self.held = None


def _after(fence: str, mark: re.Match[str] | None, line: str) -> str:
    """The fence that is open after this line."""
    if not fence:
        return mark[1] if mark else ""
    closes = mark is not None and mark[1].startswith(fence) and not line[mark.end() :].strip()
    return "" if closes else fence


def _bare(heading: str) -> str:
    """A heading without link, code and emphasis markup."""
    return _LINK.sub(r"\1", heading).replace("**", "").replace("`", "").strip()
