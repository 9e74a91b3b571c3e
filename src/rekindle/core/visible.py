"""Making the invisible visible: spaces, line ends, odd Unicode forms, so that people see why two texts differ."""

from __future__ import annotations

import unicodedata

_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # right to left, and back
_HIDDEN = {"Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Me", "Co", "Cs"}  # controls, formats, spaces, combining marks


def visible(text: str) -> str:
    """The text on one line, with a sign for every space and a name for every character that cannot be seen."""
    return "".join(_SIGNS.get(char) or (_named(char) if _is_hidden(char) else char) for char in text)


def printable(text: str) -> str:
    """Text of others as it may be shown: what would steer a terminal, or turn its lines around, is named instead."""
    return "".join(_named(char) if _steers(char) else char for char in text)


def likeness(a: str, b: str) -> str | None:
    """In what two beginnings that look alike differ: Unicode form, invisible characters, whitespace, case.

    None if in more than one of these, or in something else.
    """
    if not a or not b:
        return None
    folds = {
        "Unicode form": lambda text: unicodedata.normalize("NFKC", text),
        "invisible characters": lambda text: "".join(c for c in text if unicodedata.category(c) not in ("Cf", "Cc")),
        "whitespace": lambda text: "".join(text.split()),
        "case": str.casefold,
    }
    for word, fold in folds.items():
        first, second = fold(a), fold(b)
        shorter = min(len(first), len(second))
        if shorter and first[:shorter] == second[:shorter]:
            return word
    return None


def _steers(char: str) -> bool:
    return (unicodedata.category(char) == "Cc" and char not in "\n\t") or char in _TURNING


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in _HIDDEN


def _named(char: str) -> str:
    name = unicodedata.name(char, "")
    return f"⟨U+{ord(char):04X}{' ' if name else ''}{name}⟩"
