"""Word files (.docx): paragraphs, headings by style, tables row by row."""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from rekindle.core.document import Document
from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.clean_text import SectionBuilder, make_document, parser_missing

MAX_UNPACKED_BYTES = 64 << 20  # of all XML in the package; a book has 5 MB
MAX_PARTS = 5000
_MAX_ELEMENTS = 3_000_000  # of all XML: each takes a hundred bytes of memory; a book has 200,000
_MAX_RATIO, _FREE_BYTES = 200, 8 << 20  # below `_FREE_BYTES` any compression ratio is fine
_OLE = b"\xd0\xcf\x11\xe0"
_W = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"  # duplicates the text
_HEADING = re.compile(r"heading ([1-9])", re.IGNORECASE)
_BREAKS = {_W + "tab": "\t", _W + "br": "\n", _W + "cr": "\n", _W + "noBreakHyphen": "-"}


def read_word(source: str, data: bytes) -> Iterator[Document]:
    """One document, a section for each heading that has text."""
    try:
        import docx
        from docx.opc.exceptions import OpcError
        from docx.oxml.exceptions import XmlchemyError
        from lxml.etree import LxmlError
    except ImportError as error:
        raise parser_missing("Word files") from error
    package = _unpacked(data)
    try:
        opened = docx.Document(io.BytesIO(package))
        styles = _styles(opened)
        title = opened.core_properties.title
        builder = SectionBuilder()
        _add_sections(opened.element.body, styles, builder)
    # A broken package raises almost anything: python-docx has no exceptions of its own for most of it.
    except (OpcError, XmlchemyError, LxmlError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise UnreadableDocument(f"is damaged, or not a Word file: {error}") from error
    sections = builder.finish()
    yield make_document(source, title or builder.title or PurePath(source).stem, sections)


def _unpacked(data: bytes) -> bytes:
    """The package with its XML uncompressed and its pictures empty.

    A member's stated size may be a lie, so each is read piece by piece up to the limit, and python-docx gets the
    result.
    """
    if data.startswith(_OLE):
        raise UnreadableDocument("is encrypted, or in an older format of Word: save it as .docx without a password")
    result = io.BytesIO()
    left, elements = MAX_UNPACKED_BYTES, 0
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed, zipfile.ZipFile(result, "w") as plain:
            members = {member.filename: member for member in packed.infolist()}
            _refuse_bomb(list(members.values()))
            for name, member in members.items():
                content = _read(packed, member, left) if name.endswith((".xml", ".rels")) else b""
                left -= len(content)
                elements += content.count(b"<") - content.count(b"</")
                if elements > _MAX_ELEMENTS:
                    raise UnreadableDocument(f"has more than {_MAX_ELEMENTS:,} elements: cut it into smaller files")
                plain.writestr(zipfile.ZipInfo(name), content)
    # RuntimeError: encrypted; NotImplementedError: an unknown compression; the others: broken bytes.
    except (zipfile.BadZipFile, zlib.error, RuntimeError, OSError, EOFError, ValueError) as error:
        raise UnreadableDocument(f"is damaged, or not a Word file: {error}") from error
    return result.getvalue()


def _refuse_bomb(members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MAX_PARTS:
        raise UnreadableDocument(f"has more than {MAX_PARTS:,} parts: it is damaged, or made to do harm")
    unpacked = sum(member.file_size for member in members if member.filename.endswith((".xml", ".rels")))
    packed = sum(member.compress_size for member in members if member.filename.endswith((".xml", ".rels")))
    if unpacked > MAX_UNPACKED_BYTES or unpacked > max(_FREE_BYTES, _MAX_RATIO * packed):
        raise _bomb()


def _bomb() -> UnreadableDocument:
    return UnreadableDocument("unpacks to far more than a document holds (a zip bomb?): cut it into smaller files")


def _read(packed: zipfile.ZipFile, member: zipfile.ZipInfo, max_bytes: int) -> bytes:
    with packed.open(member) as file:
        content = bytearray()
        while piece := file.read(64 << 10):
            content += piece
            if len(content) > max_bytes:
                raise _bomb()
    return bytes(content)


def _styles(opened: Any) -> dict[str, int]:
    known: dict[str, tuple[str, str]] = {}
    for style in opened.styles.element.iterchildren(_W + "style"):
        name, base = (style.find(_W + tag) for tag in ("name", "basedOn"))
        values = ["" if tag is None else str(tag.get(_W + "val") or "") for tag in (name, base)]
        known[str(style.get(_W + "styleId"))] = values[0], values[1]
    return heading_levels(known)


def heading_levels(styles: Mapping[str, tuple[str, str]]) -> dict[str, int]:
    """The level of each style that is a heading or derives from one; `styles` has the name and the base of each."""
    levels: dict[str, int | None] = {}
    for style in styles:
        chain: list[str] = []
        at = style
        level = None
        while at in styles and at not in levels:
            levels[at] = None  # so that a circle ends
            chain.append(at)
            name, base = styles[at]
            if found := _HEADING.fullmatch(name):
                level = int(found[1])
                break
            at = base
        else:
            level = levels.get(at)
        levels |= dict.fromkeys(chain, level)
    return {style: level for style, level in levels.items() if level is not None}


def _add_sections(parent: Any, levels: dict[str, int], builder: SectionBuilder) -> None:
    """Add the lines and headings in `parent`; libxml2 refuses nesting deeper than 256."""
    for child in parent:
        if child.tag == _W + "p":
            text = "".join(_pieces(child))
            level = levels.get(child.style or "")
            if level is not None:
                builder.heading(level, text)
            elif text.strip():
                builder.line(f"- {text.strip()}" if _is_item(child) else text)
        elif child.tag == _W + "tbl":
            for row in child.iterchildren(_W + "tr"):
                builder.line(" | ".join(_cells(row)))
            builder.line("")
        elif child.tag in (_W + "sdt", _W + "sdtContent", _W + "customXml", _W + "ins"):
            _add_sections(child, levels, builder)


def _is_item(paragraph: Any) -> bool:
    return paragraph.find(f"{_W}pPr/{_W}numPr") is not None or "List" in (paragraph.style or "")


def _cells(row: Any) -> Iterator[str]:
    for cell in row.iter(_W + "tc"):
        if next(cell.iterancestors(_W + "tr")) is row:
            paragraphs = (
                one for one in cell.iter(_W + "p") if next(one.iterancestors(_W + "p", _W + "tc")).tag != one.tag
            )
            yield " ".join("".join(_pieces(paragraph)).strip() for paragraph in paragraphs).strip()


def _pieces(element: Any) -> Iterator[str]:
    waiting = [iter(element)]
    while waiting:
        child = next(waiting[-1], None)
        if child is None:
            waiting.pop()
        elif child.tag == _W + "t":
            yield child.text or ""
        elif child.tag in _BREAKS:
            yield _BREAKS[child.tag]
        elif child.tag not in (_FALLBACK, _W + "pPr", _W + "rPr"):
            if child.tag == _W + "p":  # of a text box
                yield "\n"
            waiting.append(iter(child))
