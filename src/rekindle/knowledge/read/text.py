"""Bytes to text, and text to a document: what the readers of all kinds share.

A reader's refusal is an `UnreadableDocument` whose sentence begins with its verb ("is empty: ..."); `read_file` puts
the path in front.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from rekindle.core.document import Document, Section
from rekindle.errors import UnreadableDocument

MOST_CHARACTERS = 200_000_000  # of one document: a table with long names of columns is longer as text than as file
LINE_CHARACTERS = 200  # of a title, a heading or a header

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Told apart by their letters. Others are rare, and with more of them short texts are taken for the wrong one.
_OLD = ("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256")
_ASIAN = ("cp932", "euc_jp", "gb18030", "big5", "euc_kr")
# Codecs of Python that no document is written in; some take time that grows with the square of the length.
_NO_CHARSETS = frozenset({"punycode", "idna", "undefined", "unicode-escape", "raw-unicode-escape", "mbcs", "oem"})
_SAMPLE_BYTES = 64 << 10
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\r\f\x1b")) + b"\x7f"
_MOST_NULS, _MOST_CONTROLS = 0.001, 0.3  # shares of a sample; compressed data has a NUL in 256 bytes

_COLOURS = re.compile("\x1b\\[[0-9;]{0,20}[mK]")
_BREAKS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_SURROGATES = re.compile("[\ud800-\udfff]")


def decode(data: bytes, charset: str | None = None) -> str:
    """The text of `data`. Raises `UnreadableDocument` if it is no text at all.

    A byte order mark decides; then UTF-8 if it can be that; then `charset`, what the document says of itself; then
    what its letters look like. A few broken bytes in UTF-8 are replaced and do not make it something else.
    """
    for mark, name in _BOMS:
        if data.startswith(mark):
            return data[len(mark) :].decode(name, "replace")
    _refuse_binary(data[:_SAMPLE_BYTES])
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        broken_at = error.start
    if (known := _known(charset)) is not None and known != "utf-8":
        try:
            return data.decode(known)
        except ValueError:  # it says what it is not
            pass
    text = data.decode("utf-8", "replace")
    broken = text.count("\N{REPLACEMENT CHARACTER}")
    if broken * 4 <= sum(map(len, re.findall("[^\x00-\x7f]+", text))) - broken:
        return text
    start = max(0, broken_at - _SAMPLE_BYTES // 2)
    return data.decode(_guess(data[start : start + _SAMPLE_BYTES]), "replace")


def _refuse_binary(sample: bytes) -> None:
    controls = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    if sample.count(0) > _MOST_NULS * len(sample) or controls > _MOST_CONTROLS * len(sample):
        raise UnreadableDocument("is binary, not text: convert it to text, or leave it out")


def _known(charset: str | None) -> str | None:
    """The codec of that name, if it is one for documents."""
    try:
        name = codecs.lookup(charset or "").name
    except (LookupError, ValueError):
        return None
    return None if name in _NO_CHARSETS else name


def _guess(sample: bytes) -> str:
    """The old encoding whose letters make most sense; the Western one where others make no more."""
    try:
        from charset_normalizer import from_bytes
    except ImportError:
        return "cp1252"
    matches = from_bytes(sample, cp_isolation=[*_OLD, *_ASIAN])
    best = matches.best()
    if best is None or str(best) == sample.decode("cp1252", "replace"):
        return "cp1252"
    western = [match for match in matches if match.encoding == "cp1252"]
    if western and western[0].chaos <= best.chaos + 0.02 and western[0].coherence >= best.coherence - 0.05:
        return "cp1252"
    return best.encoding


def clean(text: str) -> str:
    """`text` with lines that end in one way, and without what is no character: controls, halves of pairs."""
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    text = _CONTROLS.sub("", _BREAKS.sub("\n", text))
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text).lstrip("\ufeff")


def one_line(text: str, most: int = LINE_CHARACTERS) -> str:
    """`text` on one line, cut with an ellipsis where it is longer than `most` characters."""
    line = " ".join(clean(text[: 4 * most]).split())
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def opening(text: str) -> str:
    """The first words of `text`, to stand for a title."""
    words = clean(text[:400]).split()
    line = " ".join(words[:10])
    return one_line(line + "…" if len(words) > 10 else line, 80)


def join(lines: Iterable[str]) -> str:
    """The lines as one text. Raises `UnreadableDocument` as soon as it is too long."""
    kept, left = [], MOST_CHARACTERS
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            raise too_long()
        kept.append(line)
    return "\n".join(kept)


def too_long() -> UnreadableDocument:
    """The refusal of a document with too much text."""
    return UnreadableDocument(f"holds more than {MOST_CHARACTERS:,} characters of text: cut it into smaller files")


def assemble(source: str, title: str, sections: Iterable[Section], headers: str = "") -> Document:
    """A document of clean text. Raises `UnreadableDocument` if nothing is in it."""
    kept, total = [], 0
    for section in sections:
        text = clean(section.text).strip("\n").rstrip()
        total += len(text)
        if total > MOST_CHARACTERS:
            raise too_long()
        if text.strip():
            kept.append(Section(text, section.headings))
    if not kept:
        raise UnreadableDocument("is empty: it holds no text")
    return Document(source, one_line(title) or opening(kept[0].text), tuple(kept), clean(headers))
