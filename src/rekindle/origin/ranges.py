"""Ranges of bytes, as HTTP asks for them (RFC 9110, section 14)."""

from __future__ import annotations

import re

from rekindle.core.kv import Span

MOST_RANGES = 64
_RANGE = re.compile(r"[ \t]*(?:([0-9]{1,18})-([0-9]{1,18})?|-([0-9]{1,18}))[ \t]*")


class Unsatisfiable(Exception):
    """No byte that was asked for is there, or the same are asked for again and again."""


def wanted(header: str | None, size: int) -> list[Span] | None:
    """The ranges of a file of so many bytes that a `Range` header asks for, in its order.

    None if there is no header, or none that is understood: all of the file is wanted then. Raises `Unsatisfiable`.
    """
    unit, _, texts = (header or "").partition("=")
    if unit.strip().lower() != "bytes":
        return None
    parts = [text for text in texts.split(",") if text.strip()]
    if len(parts) > MOST_RANGES:
        raise Unsatisfiable
    found = []
    for text in parts:
        match = _RANGE.fullmatch(text)
        if match is None:
            return None
        first, last, suffix = match.groups()
        if first is None:
            span = Span(max(0, size - int(suffix)), size)
        elif last is not None and int(last) < int(first):
            return None
        else:
            start = min(int(first), size)
            span = Span(start, size if last is None else max(start, min(int(last) + 1, size)))
        found.append(span)
    spans = [span for span in found if len(span)]
    if not parts:
        return None
    if not spans or sum(map(len, spans)) > size:
        raise Unsatisfiable
    return spans
