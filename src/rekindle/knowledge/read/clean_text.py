"""What the readers of all kinds share: bytes to clean text, lines to sections, sections to a document.

A reader's refusal is an `UnreadableDocument` whose sentence begins with its verb ("is empty: ..."); `read_file` puts
the path in front.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.core.document import Document, Section
from rekindle.errors import ExtraMissing, UnreadableDocument


@dataclass(frozen=True, slots=True)
class ReadProblem:
    """A part of a file that could not be read, while the rest could.

    source  the record, mail or file, named like the source of a `Document`
    reason  a complete sentence for people that names the source
    """

    source: str
    reason: str


def refusal_sentence(source: str, clause: object) -> str:
    """A reader's clause, which begins with its verb, as a complete sentence about the source."""
    return f"{source} {str(clause).rstrip('.')}."


def parser_missing(what: str) -> ExtraMissing:
    """The error to raise if the parser of `what` is not installed."""
    return ExtraMissing(f'Reading {what} needs parsers that are not installed: pip install "rekindle-llm[knowledge]"')


MAX_CHARACTERS = 200_000_000  # per document: a table with long column names is longer as text than as a file
LINE_CHARACTERS = 200  # of a title, a heading or a header

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark is its prefix
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Detected by their letters. With more candidates, short texts are taken for the wrong one.
_OLD = ("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256")
_ASIAN = ("cp932", "euc_jp", "gb18030", "big5", "euc_kr")
# Codecs of Python that no document uses; some take quadratic time.
_NO_CHARSETS = frozenset({"punycode", "idna", "undefined", "unicode-escape", "raw-unicode-escape", "mbcs", "oem"})
_SAMPLE_BYTES = 64 << 10
_CONTROL_BYTES = bytes(set(range(32)) - set(b"\t\n\r\f\x1b")) + b"\x7f"
_MAX_NULS, _MAX_CONTROLS = 0.001, 0.3  # shares of a sample; compressed data has a NUL in 256 bytes

_COLOURS = re.compile("\x1b\\[[0-9;]{0,20}[mK]")
_BREAKS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_SURROGATES = re.compile("[\ud800-\udfff]")


def decode(data: bytes, charset: str | None = None) -> str:
    """The text of `data`. Raises `UnreadableDocument` if it is binary.

    Tried in this order: the byte order mark, UTF-8, the declared `charset`, detection by its letters. A few broken
    bytes in UTF-8 are replaced.
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
        except ValueError:  # the declaration is wrong
            pass
    text = data.decode("utf-8", "replace")
    broken = text.count("\N{REPLACEMENT CHARACTER}")
    if broken * 4 <= sum(map(len, re.findall("[^\x00-\x7f]+", text))) - broken:
        return text
    start = max(0, broken_at - _SAMPLE_BYTES // 2)
    return data.decode(_guess(data[start : start + _SAMPLE_BYTES]), "replace")


def _refuse_binary(sample: bytes) -> None:
    controls = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    if sample.count(0) > _MAX_NULS * len(sample) or controls > _MAX_CONTROLS * len(sample):
        raise UnreadableDocument("is binary, not text: convert it to text, or leave it out")


def _known(charset: str | None) -> str | None:
    """The codec of that name, if documents may use it."""
    try:
        name = codecs.lookup(charset or "").name
    except (LookupError, ValueError):
        return None
    return None if name in _NO_CHARSETS else name


def _guess(sample: bytes) -> str:
    """The likeliest legacy encoding; Western unless another one is clearly better."""
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
    """`text` with uniform line ends, without control characters and surrogates."""
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    text = _CONTROLS.sub("", _BREAKS.sub("\n", text))
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text).lstrip("\ufeff")


def one_line(text: str, max_characters: int = LINE_CHARACTERS) -> str:
    """`text` on one line, cut with an ellipsis after `max_characters` characters."""
    line = " ".join(clean(text[: 4 * max_characters]).split())
    return line if len(line) <= max_characters else line[: max_characters - 1].rstrip() + "…"


def first_words(text: str) -> str:
    """The first words of `text`, as a title."""
    words = clean(text[:400]).split()
    line = " ".join(words[:10])
    return one_line(line + "…" if len(words) > 10 else line, 80)


def join_lines(lines: Iterable[str]) -> str:
    """Join lines. Raises `UnreadableDocument` as soon as the text is too long."""
    kept, left = [], MAX_CHARACTERS
    for line in lines:
        left -= len(line) + 1
        if left < 0:
            raise too_long()
        kept.append(line)
    return "\n".join(kept)


def too_long() -> UnreadableDocument:
    return UnreadableDocument(f"holds more than {MAX_CHARACTERS:,} characters of text: cut it into smaller files")


def make_document(source: str, title: str, sections: Iterable[Section], headers: str = "") -> Document:
    """A document of clean text. Raises `UnreadableDocument` if it is empty."""
    kept, total = [], 0
    for section in sections:
        text = clean(section.text).strip("\n").rstrip()
        total += len(text)
        if total > MAX_CHARACTERS:
            raise too_long()
        if text.strip():
            kept.append(Section(text, section.headings))
    if not kept:
        raise UnreadableDocument("is empty: it holds no text")
    return Document(source, one_line(title) or first_words(kept[0].text), tuple(kept), clean(headers))


MAX_SECTIONS = 200_000  # further headings become lines: a section costs far more than its text


class SectionBuilder:
    """Collects lines under nested headings into sections."""

    def __init__(self) -> None:
        self.title: str | None = None  # the first heading
        self._sections: list[Section] = []
        self._path: list[tuple[int, str]] = []  # level and text of the headings above
        self._lines: list[str] = []
        self._bare = False  # nothing is under the last heading yet

    def heading(self, level: int, text: str) -> None:
        """Add a heading; it ends those of its own level and below."""
        if len(self._sections) >= MAX_SECTIONS:
            self.line(text.strip())
            return
        text = one_line(text)
        if not text:
            return
        self._close(level)
        self.title = self.title or text
        while self._path and self._path[-1][0] >= level:
            self._path.pop()
        self._path.append((level, text))
        self._bare = True

    def line(self, text: str) -> None:
        """Add a line; an empty one ends a paragraph."""
        if text or (self._lines and self._lines[-1]):
            self._lines.append(text)

    def finish(self) -> list[Section]:
        """The sections. Nothing can be added afterwards."""
        self._close(0)
        return self._sections

    def _close(self, next_level: int) -> None:
        text = "\n".join(self._lines).strip("\n")
        headings = tuple(heading for _, heading in self._path)
        self._lines = []
        if text.strip():
            self._sections.append(Section(text, headings))
        elif self._bare and next_level <= self._path[-1][0]:
            # A heading without text is content itself: some people write lists of points like that.
            self._sections.append(Section(headings[-1], headings[:-1]))
        self._bare = False


class RecordNames:
    """Gives each record of a file a unique name."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._taken: set[str] = set()

    def unique(self, own: str | None, number: int) -> str:
        """`source#own`, or `source#number` for a record without a name, with a suffix if that is taken."""
        wanted = name = one_line(own or "") or str(number)
        again = 1
        while name in self._taken:
            # The number first: otherwise a thousand records of one name would take a million tries.
            name = f"{wanted}~{number}" if again == 1 else f"{wanted}~{number}~{again}"
            again += 1
        self._taken.add(name)
        return f"{self._source}#{name}"
