"""Documents as they are read, passages as they are retrieved, quotes as they stand in prompts."""

from __future__ import annotations

from dataclasses import dataclass

CUT_SHORT = " ..."  # how a title ends that is the beginning of a longer text


def title_above(title: str, text: str) -> str:
    """The title that a text needs above it: none where it begins with it anyway."""
    return "" if text.startswith(title.removesuffix(CUT_SHORT)) else title


@dataclass(frozen=True, slots=True)
class Section:
    """A run of text and the headings it stands under, the outermost first."""

    text: str
    headings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """What was read from one source: a file, a record of a file, or what somebody gave.

    source    where it is: an absolute path, path#record for one of several in a file, or any name
    title     for people, one line; a passage is found by it too
    sections  its text in order; rows of a table and turns of a talk stand on lines of their own
    headers   what belongs to every part of it, a line each: the From, To, Date and Subject of an e-mail, the names
              of the columns of a table
    """

    source: str
    title: str
    sections: tuple[Section, ...]
    headers: str = ""


@dataclass(frozen=True, slots=True)
class Quote:
    """A passage that stands in a prompt. `chunk` is its number in the library; None: it came with the request."""

    text: str
    title: str = ""
    chunk: int | None = None

    @property
    def shown(self) -> str:
        """What a model reads, with what parts it from the next one."""
        return f"{self.title}\n{self.text}\n\n" if self.title else f"{self.text}\n\n"


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document that is retrieved as a whole: its text, and what stands above it."""

    text: str
    heading: str = ""  # headers of the document and headings of the section, a line each

    @property
    def shown(self) -> str:
        """What a model reads."""
        return f"{self.heading}\n{self.text}" if self.heading else self.text
