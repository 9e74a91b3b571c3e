"""Documents into passages of about the requested size: whole sentences, under their headings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rekindle.core.document import Document, Passage, Section
from rekindle.errors import InvalidSetting
from rekindle.knowledge.segment import Block, break_up, count_words, split_blocks, split_sentences

Measure = Callable[[str], int]

_RULES = 1  # raise it when the same settings split a text differently: documents are then split again
_ALONE = 1 / 2  # of the size: a longer paragraph shares no passage, so it is the same wherever it occurs
_TINY_SECTION = 1 / 4  # of the size: shorter sections share a passage with the next
_TINY_PASSAGE = 1 / 5  # of the size: a shorter rest is added to the passage before
_MOST = 5 / 4  # of the size: no passage is longer
_HEADER_WORDS = 40
_HEADER_LINE_WORDS = 16
_HEADING_WORDS = 20


@dataclass(frozen=True)
class Splitting:
    """How documents are split.

    size     the length of a passage at most, except that a short rest may be added (never over 1.25 times)
    unit     what is counted: words, or tokens of a model
    overlap  how much of the passage before is repeated, in whole sentences

    Raises `InvalidSetting`.
    """

    size: int = 100
    unit: Literal["words", "tokens"] = "words"
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.unit not in ("words", "tokens"):
            raise InvalidSetting(f"Passages are cut by words or by tokens, not by {self.unit!r}: choose one of them.")
        if not 10 <= self.size <= 2000:
            raise InvalidSetting(
                f"A passage cannot have {self.size} {self.unit}: choose a size from 10 to 2000; 100 words suit most."
            )
        if not 0 <= self.overlap < self.size / 2:
            raise InvalidSetting(
                f"Passages of {self.size} {self.unit} cannot overlap by {self.overlap}: choose 0, or less than half "
                f"the size ({(self.size - 1) // 2} at most)."
            )

    @property
    def signature(self) -> str:
        """Identifies the rules: documents with the same signature were split the same way."""
        return f"{self.size} {self.unit}, overlap {self.overlap}, rules {_RULES}"


class _Piece(NamedTuple):
    """An atomic piece: a sentence, an item, lines of code; or a part of one that is too long."""

    text: str
    size: int
    gap: str  # what separates it from the piece before, unless it begins a passage
    section: int


def split(document: Document, splitting: Splitting, count: Measure | None = None) -> list[Passage]:
    """The passages of a document, in order. Deterministic.

    `count` counts the tokens of a text; needed if the unit is tokens, else `InvalidSetting`. Without overlap every
    word of the document's text is in exactly one passage.
    """
    cutter = _Cutter(document, splitting, _measure(splitting, count))
    return [cutter.passage(pieces) for run in cutter.runs() for pieces in cutter.overlapped(cutter.packed(run))]


def _measure(splitting: Splitting, count: Measure | None) -> Measure:
    if splitting.unit == "words":
        return count_words
    if count is None:
        raise InvalidSetting("To cut by tokens a model must count them: name one, or cut by words.")
    # Some tokenizers make a single unknown token of any long run of characters: it would never be split.
    return lambda text: max(count(text), count_words(text))


def _size(pieces: Sequence[_Piece]) -> int:
    return sum(piece.size for piece in pieces)


class _Cutter:
    """The steps from sections to passages: pieces, groups of pieces, runs of groups, passages.

    A group is a long paragraph or several short ones: its passages hold nothing else. A run is a section with the tiny
    ones before it: its passages are close enough to overlap.
    """

    def __init__(self, document: Document, splitting: Splitting, measure: Measure) -> None:
        self._sections = document.sections
        self._headers = _bounded_lines(document.headers)
        self._size = splitting.size
        self._overlap = splitting.overlap
        self._measure = measure

    def runs(self) -> Iterator[list[list[_Piece]]]:
        """The groups of each section that is long enough, with those of tiny sections before it."""
        waiting: list[_Piece] = []
        for number, section in enumerate(self._sections):
            groups = self._groups(number, section)
            if not groups:
                continue
            shares = bool(waiting) and self._may_share(waiting[-1].section, number)
            if shares:
                groups[0] = [*waiting, *self._headed(groups[0])]
            elif waiting:
                yield [waiting]
            waiting = []
            if len(groups) == 1 and _size(groups[0]) < _TINY_SECTION * self._size:
                waiting = groups[0] if shares else self._headed(groups[0])
            else:
                yield groups
        if waiting:
            yield [waiting]

    def _groups(self, number: int, section: Section) -> list[list[_Piece]]:
        """The pieces of a section by paragraphs: long ones alone, short ones together."""
        groups: list[list[_Piece]] = []
        was_long = True
        for block in split_blocks(section.text):
            pieces = list(self._pieces(block, number))
            is_long = _size(pieces) >= _ALONE * self._size
            # A few words between long paragraphs join the next one, which they usually introduce.
            leads = bool(groups) and _size(groups[-1]) < _TINY_PASSAGE * self._size
            if groups and (leads or not (is_long or was_long)):
                groups[-1] += pieces
            else:
                groups.append(pieces)
            was_long = is_long
        if len(groups) > 1 and _size(groups[-1]) < _TINY_PASSAGE * self._size:
            rest = groups.pop()
            groups[-1] += rest
        if not groups and section.headings and not self._opens_next(number):
            title = " ".join(section.headings[-1].split())
            groups = [list(self._fitting(title, "\n\n", number))]
        return [group for group in groups if group]

    def _pieces(self, block: Block, number: int) -> Iterator[_Piece]:
        gap = "\n\n"
        if block.code:
            whole = "\n".join(line.text for line in block.lines)
            if (size := self._measure(whole)) <= self._size:
                yield _Piece(whole, size, gap, number)
                return
        for line in block.lines:
            if block.code or (line.item and self._measure(line.text) <= self._size / 2):
                yield from self._fitting(line.text, gap, number)
            else:
                for part in split_sentences(line.text):
                    yield from self._fitting(part.text, gap if gap else " " * part.spaced, number)
                    gap = ""
            gap = "\n"

    def _fitting(self, text: str, gap: str, number: int) -> Iterator[_Piece]:
        """A text as one piece, or several if it is longer than a passage."""
        size = self._measure(text)
        if size <= self._size:
            yield _Piece(text, size, gap, number)
            return
        for part in break_up(text, self._measure, self._size):
            yield _Piece(part.text, self._measure(part.text), gap if gap else " " * part.spaced, number)
            gap = ""

    def _opens_next(self, number: int) -> bool:
        """Whether the next section is under all headings of this one."""
        headings = self._sections[number].headings
        following = self._sections[number + 1 : number + 2]
        return any(section.headings[: len(headings)] == headings for section in following)

    def _may_share(self, first: int, second: int) -> bool:
        """Whether two sections have the same parent, and headings short enough to be put into the text."""
        parent = self._sections[first].headings[:-1]
        siblings = self._sections[second].headings[: len(parent)] == parent
        return siblings and all(self._heading_size(number) <= self._size / 8 for number in (first, second))

    def _heading_size(self, number: int) -> int:
        return self._measure(" > ".join(self._sections[number].headings))

    def _headed(self, pieces: Sequence[_Piece]) -> list[_Piece]:
        """The pieces, with room for the headings that a shared passage contains."""
        first, *rest = pieces
        return [first._replace(size=first.size + self._heading_size(first.section)), *rest]

    def packed(self, run: Sequence[Sequence[_Piece]]) -> list[list[_Piece]]:
        """The pieces of each passage."""
        limit = self._size - self._overlap
        passages: list[list[_Piece]] = []
        for group in run:
            packed = [[group[0]]]
            size = group[0].size
            for piece in group[1:]:
                if size + piece.size > limit:
                    packed.append([])
                    size = 0
                packed[-1].append(piece)
                size += piece.size
            if len(packed) > 1 and size < _TINY_PASSAGE * limit:
                rest = packed.pop()
                packed[-1] += rest
            passages += packed
        return passages

    def overlapped(self, passages: Sequence[list[_Piece]]) -> Iterator[list[_Piece]]:
        """Each passage, preceded by as many of the last pieces of the one before as the overlap allows."""
        for number, passage in enumerate(passages):
            left = min(self._overlap, _MOST * self._size - _size(passage)) if number else 0
            before = list(passages[number - 1]) if left > 0 else []
            again: list[_Piece] = []
            while before and before[-1].size <= left:
                left -= before[-1].size
                again.insert(0, before.pop())
            yield [*again, *passage]

    def passage(self, pieces: Sequence[_Piece]) -> Passage:
        """The passage of these pieces. If they span several sections, each begins with its headings as a line."""
        numbers = dict.fromkeys(piece.section for piece in pieces)
        shared = _shared([self._sections[number].headings for number in numbers])
        text: list[str] = []
        section: int | None = None
        for piece in pieces:
            gap = piece.gap if text else ""
            if piece.section != section and len(numbers) > 1:
                own = " > ".join(self._sections[piece.section].headings[len(shared) :])
                gap = f"{gap}{own}\n" if own else gap
            section = piece.section
            text += gap, piece.text
        heading = _bounded(" > ".join(shared), _HEADING_WORDS)
        return Passage("".join(text), "\n".join(line for line in (self._headers, heading) if line))


def _shared(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The common prefix of heading paths."""
    first, *others = paths
    for depth, heading in enumerate(first):
        if any(len(other) <= depth or other[depth] != heading for other in others):
            return first[:depth]
    return first


def _bounded_lines(headers: str) -> str:
    """Headers, each line and all together cut so that the text has room."""
    lines = [_bounded(line, _HEADER_LINE_WORDS) for line in headers.splitlines() if line.strip()]
    left = _HEADER_WORDS
    kept = []
    for line in lines:
        if left <= 0:
            break
        kept.append(_bounded(line, left))
        left -= count_words(kept[-1])
    return "\n".join(kept)


def _bounded(line: str, limit: int) -> str:
    """A line, cut after `limit` words."""
    if count_words(line) <= limit:
        return " ".join(line.split())
    start = ""
    for part in break_up(" ".join(line.split()), count_words, 1):
        longer = f"{start} {part.text}" if start and part.spaced else start + part.text
        if count_words(longer) >= limit:
            break
        start = longer
    return f"{start} …"
