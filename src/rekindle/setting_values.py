"""How the value of a setting is read: from Python, from a line of TOML, or from the text of a flag or variable.

A setting's type says what it may be; for some texts the name does: paths, sizes and times.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Kind:
    """How values of one setting are read; `read` gives None for a wrong one, `right` says what it should be."""

    read: Callable[[object], object]
    right: str
    optional: bool

    @property
    def is_path(self) -> bool:
        """Whether it names a file or folder."""
        return self.read is _read_path


_PATHS = {
    "cache": "the path of a folder, or off",
    "library": "the path of a folder",
    "key_file": "the path of a file",
    "origin_token": "the path of a file",
    "origin_secret": "the path of a file",
}
_AMOUNTS = {  # a plain number stands for its text
    "memory_limit": "a size (512MB, 10%)",
    "disk_limit": "a size (20GB, 10%)",
    "answers_limit": "a size (100MB)",
    "write_budget": "a size (10GB)",
    "ttl": "a time (12h, 7d)",
    "killed_ttl": "a time (30s, 5m)",
    "keep_alive": "a time (30s, 5m)",
}


def kind_of(name: str, hint: Any, default: object) -> Kind:
    """How the setting of this name, type and default is read."""
    members = get_args(hint)
    optional = NoneType in members
    if get_origin(hint) is Literal:
        return Kind(lambda value: value if value in members else None, _listed(members), optional)
    if hint is bool:
        return Kind(_read_bool, "true or false", optional)
    if hint is int or int in members:
        return Kind(_read_int, "a whole number", optional)
    if hint is float or float in members:
        return Kind(_read_number, "a number", optional)
    if name in _PATHS:
        return Kind(_read_path, _PATHS[name], optional)
    if name in _AMOUNTS:
        return Kind(_read_amount, _AMOUNTS[name], optional)
    # The default tells whether an empty text says something: no salt does, no engine does not.
    return Kind(_read_any_text if default == "" else _read_text, "a text", optional)


def _listed(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]])


def _read_bool(value: object) -> bool | None:
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _read_int(value: object) -> int | None:
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        return None
    try:
        return int(value)
    except ValueError:
        return None


def _read_number(value: object) -> float | None:
    if not isinstance(value, (int, float, str)) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_amount(value: object) -> str | None:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _read_text(value)


def _read_text(value: object) -> str | None:
    return _read_any_text(value) or None


def _read_any_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _read_path(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return expand(text) if isinstance(text, str) and text else None


def expand(text: str) -> str | None:
    """A path with `~` as the user's home; None where it is somebody's who is not known."""
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError:  # ~somebody who is not known here
        return None
