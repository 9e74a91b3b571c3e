"""Documents as read, passages as retrieved, quotes as placed in prompts."""

from __future__ import annotations

from dataclasses import dataclass

CUT_SHORT = " ..."  # how a title ends that is the beginning of a longer text


def title_above(title: str, text: str) -> str:
    """The title to put above a text; empty if the text begins with it."""
    return "" if text.startswith(title.removesuffix(CUT_SHORT)) else title


@dataclass(frozen=True, slots=True)
class Section:
    """A run of text and its headings, the outermost first."""

    text: str
    headings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A document read from one source: a file, a record of a file, or text that was passed in.

    source    where it is: an absolute path, path#record for one of several in a file, or any name
    title     one line; passages are also found by it
    sections  its text in order; each row of a table and each turn of a dialogue is a line
    headers   lines that belong to every part: From, To, Date and Subject of an e-mail, the column names of a table
    """

    source: str
    title: str
    sections: tuple[Section, ...]
    headers: str = ""

    @property
    def text(self) -> str:
        """All of it for a reader: the headers, then each section under those of its headings that are new."""
        parts = [self.headers] if self.headers else []
        above: tuple[str, ...] = ()
        for section in self.sections:
            new = [*section.headings]
            for heading in above:
                if new[:1] != [heading]:
                    break
                del new[0]
            parts.append("\n".join([*new, section.text]))
            above = section.headings
        return "\n\n".join(parts)


@dataclass(frozen=True, slots=True)
class Quote:
    """A passage in a prompt. `chunk` is its number in the library; None: it came with the request."""

    text: str
    title: str = ""
    chunk: int | None = None

    @property
    def shown(self) -> str:
        """What the model reads, with the separator to the next one."""
        return f"{self.title}\n{self.text}\n\n" if self.title else f"{self.text}\n\n"


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document that is retrieved as a whole: its text, and the lines above it."""

    text: str
    heading: str = ""  # the document's headers and the section's headings, a line each

    @property
    def shown(self) -> str:
        """What the model reads."""
        return f"{self.heading}\n{self.text}" if self.heading else self.text
