"""Plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from rekindle.core.document import Document, Section
from rekindle.knowledge.read.text import assemble, clean, decode

_TITLE_CHARACTERS = 100
_RULE = re.compile(r"([=\-~*#^+])\1{2,}\s*")


def read_text(source: str, data: bytes) -> Iterator[Document]:
    """One document, one section."""
    text = clean(decode(data))
    yield assemble(source, _title(text) or PurePath(source).stem, [Section(text)])


def _title(text: str) -> str | None:
    """The first line, if it stands alone or over a rule, is short, and is no sentence."""
    lines = text[:1000].lstrip().split("\n")
    if _RULE.fullmatch(lines[0]):
        del lines[0]
    first = lines[0].strip() if lines else ""
    below = lines[1] if len(lines) > 1 else ""
    alone = len(lines) > 1 and (not below.strip() or _RULE.fullmatch(below))
    short = 0 < len(first) <= _TITLE_CHARACTERS and first[-1] not in ".,;:" and any(map(str.isalpha, first))
    return first if alone and short else None
