"""Sections from lines and headings, in the order in which they are met."""

from __future__ import annotations

from rekindle.core.document import Section
from rekindle.knowledge.read.text import one_line

MOST_SECTIONS = 200_000  # past them a heading is a line like others: each section costs far more than its text


class Outline:
    """Collects lines under nested headings."""

    def __init__(self) -> None:
        self.title: str | None = None  # the first heading
        self._sections: list[Section] = []
        self._path: list[tuple[int, str]] = []  # level and text of the headings above
        self._lines: list[str] = []
        self._bare = False  # nothing stood under the last heading yet

    def head(self, level: int, text: str) -> None:
        """A heading: it ends those of its own level and below."""
        if len(self._sections) >= MOST_SECTIONS:
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
        """A line of text; an empty one ends a paragraph."""
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
            # A heading over nothing says something itself: a list of points may be written so.
            self._sections.append(Section(headings[-1], headings[:-1]))
        self._bare = False
