"""HTML: its text as a reader sees it, without menus and scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from rekindle.core.document import Document
from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.clean_text import SectionBuilder, decode, make_document, parser_missing

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

_CHARSET = re.compile(rb"""(?:charset|encoding)\s{0,9}=\s{0,9}["']?\s{0,9}([\w.:-]{1,40})""", re.IGNORECASE)
_CHARSET_BYTES = 4096


def _tags(names: str) -> frozenset[str]:
    return frozenset(names.split())


_UNSEEN = _tags("head script style template noscript iframe object svg canvas math")
_BOILERPLATE = _tags("nav footer aside button select textarea dialog")
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.IGNORECASE)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_PARAGRAPHS = _tags("p blockquote pre ul ol dl table figure article section")
_BLOCKS = _PARAGRAPHS | _tags(
    "address body caption center dd details div dt fieldset figcaption form header hr html legend li main "
    "option summary tbody tfoot thead tr"
)

# The parser's time grows with the depth at each tag, and unclosed inline tags (<b>) are copied into each new paragraph:
# 30 KB of them can take a gigabyte. Both are bounded before parsing; real pages stay a hundred times below.
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9:-]{0,20})")
_FLAT = _tags(  # never left open: void, or closed implicitly
    "area base br col embed hr img input link meta param source track wbr "
    "p li dt dd tr td th thead tbody tfoot option optgroup colgroup html head body"
)
_MARKS = _tags("a b big code em font i nobr s small strike strong tt u")
_FEW_TAGS = 1000
_MAX_TAGS = 1_000_000  # they take 500 MB of memory and seconds; a page of a megabyte has 30,000
# The parser compares each attribute of a tag with all before it. Comments and scripts may hold what looks like a tag.
_LONG_TAG = 2000  # characters
_UNPARSED = re.compile(r"<(?:(!--)|(script|style|textarea|title)\b|[a-zA-Z])", re.IGNORECASE)
_INSIDE_TAG = re.compile(r"""(?:[^>=]+|=\s*(?:"[^"]*"|'[^']*')|=)*""")
_VALUE = re.compile(r"""=\s*(?:"[^"]*"|'[^']*'|[^\s>]+)""")
_MAX_COMPARED = 10_000_000  # pairs of attributes
_MAX_DEPTHS, _MAX_COPIES = 200_000_000, 5_000_000


def read_html(source: str, data: bytes) -> Iterator[Document]:
    """One document, a section for each heading that has text."""
    declared = _CHARSET.search(data[:_CHARSET_BYTES])
    page = _page(decode(data, declared[1].decode("ascii") if declared else None), headings=True)
    title = page.title or page.builder.title or PurePath(source).stem
    yield make_document(source, title, page.builder.finish())


def html_text(markup: str) -> str:
    """The text of a piece of HTML, with headings as lines."""
    return "\n".join(section.text for section in _page(markup, headings=False).builder.finish())


@dataclass(frozen=True, slots=True)
class _Page:
    title: str
    builder: SectionBuilder


def _page(markup: str, *, headings: bool) -> _Page:
    try:
        from selectolax.lexbor import LexborHTMLParser, SelectolaxError
    except ImportError as error:
        raise parser_missing("HTML") from error
    _refuse_depth(markup)
    _refuse_attributes(markup)
    try:
        tree = LexborHTMLParser(markup)
    except (SelectolaxError, ValueError) as error:
        raise UnreadableDocument(f"cannot be parsed as HTML: {error}") from error
    named = tree.head.css_first("title") if tree.head else None
    title = named.text() if named else ""
    root = tree.root
    if root is None:
        return _Page(title, SectionBuilder())
    for skipped in (_UNSEEN | _BOILERPLATE, _UNSEEN):
        writer = _Writer(headings)
        _walk(root, writer, skipped, hidden=skipped is _UNSEEN)
        if writer.written:  # else everything is in a menu or shown by a script: better that than nothing
            break
    return _Page(title, writer.builder)


def _refuse_attributes(markup: str) -> None:
    """Raise `UnreadableDocument` for tags whose attributes would take seconds to parse."""
    compared = at = 0
    while found := _UNPARSED.search(markup, at):
        ends = "-->" if found[1] else f"</{found[2]}" if found[2] else None
        inside = None if found[1] else _INSIDE_TAG.match(markup, found.end())
        at = found.end() if inside is None else inside.end()
        if inside is not None and len(inside[0]) >= _LONG_TAG:
            compared += len(re.split(r"[\s/]+", _VALUE.sub(" ", inside[0]))) ** 2
            if compared > _MAX_COMPARED:
                raise UnreadableDocument("has too many attributes in one tag: it is damaged, or made to do harm")
        if ends is not None:
            closed = re.compile(re.escape(ends), re.IGNORECASE).search(markup, at)
            if closed is None:
                return
            at = closed.end()


def _refuse_depth(markup: str) -> None:
    tags = markup.count("<")
    if tags > _MAX_TAGS:
        raise UnreadableDocument(f"has more than {_MAX_TAGS:,} tags: cut it into smaller files")
    if tags < _FEW_TAGS:
        return
    depth = marks = depths = copies = 0
    for found in _TAG.finditer(markup):
        name = found[2].lower()
        if name not in _FLAT:
            step = -1 if found[1] else 1
            depth = max(0, depth + step)
            if name in _MARKS:
                marks = max(0, marks + step)
        depths += depth
        copies += marks
    if depths > _MAX_DEPTHS or copies > _MAX_COPIES:
        raise UnreadableDocument("has too many elements inside one another: it is damaged, or made to do harm")


def _walk(root: LexborNode, writer: _Writer, skipped: frozenset[str], *, hidden: bool) -> None:
    """Visit the nodes in order, without recursion: a page may be deeper than Python's stack."""
    waiting: list[tuple[LexborNode, bool]] = [(root, False)]
    while waiting:
        node, left = waiting.pop()
        tag = node.tag or ""
        if left:
            writer.leave(tag)
        elif tag == "-text":
            writer.text(node.text_content or "")
        elif not (tag in skipped or tag.startswith("-") or (not hidden and _is_hidden(node))):
            children = list(node.iter(include_text=True))
            writer.enter(tag, sum(child.tag in ("td", "th") for child in children) if tag == "tr" else 0)
            waiting.append((node, True))
            waiting.extend((child, False) for child in reversed(children))


def _is_hidden(node: LexborNode) -> bool:
    attributes = node.attributes
    if not attributes:
        return False
    return (
        "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or attributes.get("role") == "navigation"
        or _HIDDEN.search((attributes.get("style") or "")[:1000]) is not None
    )


@dataclass(slots=True)
class _Row:
    joined: bool  # its cells go on one line; else the table only lays out the page
    cells: int = 0


class _Writer:
    """Elements and text to lines and headings."""

    def __init__(self, headings: bool) -> None:
        self.builder = SectionBuilder()
        self.written = False
        self._headings = headings
        self._pieces: list[str] = []
        self._rows: list[_Row] = []
        self._pre = 0

    def text(self, text: str) -> None:
        if self._pre:
            *lines, last = text.replace("\r\n", "\n").split("\n")
            for line in lines:
                self._pieces.append(line)
                self._break()
            self._pieces.append(last)
        else:
            self._pieces.append(re.sub(r"\s+", " ", text))

    def enter(self, tag: str, cells: int) -> None:
        if tag == "table" and self._rows:
            self._rows[-1].joined = False
        if tag in _BLOCKS or tag in _HEADINGS or tag == "br":
            self._break()
        if tag == "tr":
            self._rows.append(_Row(joined=cells > 1))
        elif tag in ("td", "th"):
            self._cell()
        elif tag == "li":
            self._pieces.append("- ")
        elif tag == "pre":
            self._pre += 1

    def leave(self, tag: str) -> None:
        if tag in _HEADINGS and self._headings and not self._joined:
            heading, self._pieces = "".join(self._pieces), []
            self.written = self.written or bool(heading.strip())
            self.builder.heading(_HEADINGS[tag], heading)
            return
        if tag == "tr" and self._rows:
            self._rows[-1].joined = False
        if tag in _BLOCKS or tag in _HEADINGS:
            self._break()
        if tag in _PARAGRAPHS and not self._joined:
            self.builder.line("")
        if tag == "tr" and self._rows:
            self._rows.pop()
        elif tag == "pre":
            self._pre -= 1

    @property
    def _joined(self) -> bool:
        return bool(self._rows) and self._rows[-1].joined

    def _cell(self) -> None:
        if not self._joined:
            self._break()
            return
        self._rows[-1].cells += 1
        if self._rows[-1].cells > 1:
            self._pieces.append(" | ")

    def _break(self) -> None:
        if self._joined:
            self._pieces.append(" ")
            return
        line = "".join(self._pieces)
        line = line.rstrip() if self._pre else re.sub(r"  +", " ", line).strip()
        self._pieces = []
        if line and line != "-":
            self.written = True
            self.builder.line(line)
