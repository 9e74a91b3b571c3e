"""Showing spaces, line ends and odd Unicode forms, so that people see why two texts differ."""

from __future__ import annotations

import unicodedata

_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥", "\r": "␍"}
_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_HIDDEN = {"Cc", "Cf", "Zs", "Zl", "Zp", "Mn", "Me", "Co", "Cs"}  # controls, formats, spaces, combining marks


def visible(text: str) -> str:
    """The text on one line, with a sign for every space and a name for every invisible character."""
    return "".join(_SIGNS.get(char) or (_name(char) if _is_hidden(char) else char) for char in text)


def printable(text: str) -> str:
    """Untrusted text for a terminal: control characters and those that change its direction are named instead."""
    return "".join(_name(char) if _is_control(char) else char for char in text)


def escaped(json_text: str) -> str:
    """The same JSON with the control characters escaped that JSON allows in texts, but terminals obey."""
    return "".join(f"\\u{ord(char):04x}" if _is_control(char) else char for char in json_text)


def find_only_difference(a: str, b: str) -> str | None:
    """The one way in which two prefixes that look alike differ: Unicode form, invisible characters, whitespace, case.

    None if they differ in several of these, or otherwise.
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


def _is_control(char: str) -> bool:
    return (unicodedata.category(char) == "Cc" and char not in "\n\t") or char in _BIDIRECTIONAL


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in _HIDDEN


def _name(char: str) -> str:
    name = unicodedata.name(char, "")
    return f"⟨U+{ord(char):04X}{' ' if name else ''}{name}⟩"
