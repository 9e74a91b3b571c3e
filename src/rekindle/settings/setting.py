"""One setting: what is said about it once, and how its value is read from Python, TOML, a flag or a variable."""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rekindle.errors import InvalidSetting

PREFIX = "REKINDLE_"
_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Kind:
    """How values are read.

    read     gives None for a wrong value
    right    what a value should be, for the sentence that refuses a wrong one
    accepts  what Python code may pass beside the setting's own type
    """

    read: Callable[[object], object]
    right: str
    accepts: str = ""


def a_path(what: str) -> Kind:
    """The path of a file or folder. A relative one in a file starts from the file's folder."""
    return Kind(_read_path, f"the path of {what}", "os.PathLike[str]")


def a_size(examples: str) -> Kind:
    """A size as text; a plain number is a number of bytes. The part that uses it parses it."""
    return Kind(_read_amount, f"a size ({examples})", "int")


def a_time(examples: str) -> Kind:
    """A duration as text; a plain number is a number of seconds. The part that uses it parses it."""
    return Kind(_read_amount, f"a time ({examples})", "int")


def tier_order(*orders: str) -> Kind:
    """One of these orders of tiers (memory > disk), with or without spaces."""
    written = {order.replace(" ", ""): order for order in orders}
    return Kind(lambda value: written.get(str(value).replace(" ", "")), " or ".join(orders))


def setting(group: str, default: object, doc: str, *, kind: Kind | None = None) -> Any:
    """Declare a field of a settings class. Without a `kind`, it follows from the type."""
    return field(default=default, metadata={"group": group, "doc": doc, "kind": kind})


@dataclass(frozen=True)
class Setting:
    """A declared setting. `hint` is its type, `type` without None and without choices."""

    name: str
    group: str
    default: object
    doc: str
    kind: Kind
    hint: Any

    @property
    def optional(self) -> bool:
        """Whether None is a value."""
        return NoneType in get_args(self.hint)

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values there are; empty if there are others."""
        return get_args(self.hint) if get_origin(self.hint) is Literal else ()

    @property
    def type(self) -> Any:
        """bool, int, float, str, or list for several texts."""
        return _plain_type(self.hint)

    @property
    def is_path(self) -> bool:
        """Whether it is the path of a file or folder."""
        return self.kind.read is _read_path

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The option of commands that sets it."""
        return "--" + self.name.replace("_", "-")

    def parse(self, value: object, where: str, folder: Path | None = None) -> object:
        """The value as this setting's type. Raises `InvalidSetting`, which names `where` the value was found.

        `folder` is what a relative path starts from.
        """
        if self.optional and isinstance(value, str) and value.strip().lower() == "none":
            return None
        parsed = self.kind.read(value)
        if parsed is None:
            right = f"{self.kind.right}{', or none' if self.optional else ''}"
            raise InvalidSetting(f"{where} is {_shown(value)}. Use {right}.")
        if folder is not None and self.is_path and parsed != "off":
            return str(folder / str(parsed))
        return parsed


def settings_of(cls: type) -> dict[str, Setting]:
    """The settings that a class declares, by name."""
    hints = get_type_hints(cls)
    found = {}
    for one in fields(cls):
        about = dict(one.metadata)
        about["kind"] = about["kind"] or _kind_of(hints[one.name], one.default)
        found[one.name] = Setting(one.name, default=one.default, hint=hints[one.name], **about)
    return found


def expand(text: str) -> str | None:
    """A path with `~` as the user's home; None if it is the home of an unknown user."""
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except (RuntimeError, ValueError):  # ~somebody who is not known here, or whom no system can know
        return None


def _plain_type(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return str
    if get_origin(hint) is tuple:
        return list
    return next((member for member in get_args(hint) if member is not NoneType), hint)


def _kind_of(hint: Any, default: object) -> Kind:
    plain = _plain_type(hint)
    if get_origin(hint) is Literal:
        words = get_args(hint)
        return Kind(lambda value: value if value in words else None, _listed(words))
    if plain is str:
        # The default tells whether an empty text says something: no salt does, no engine does not.
        return Kind(_read_any_text if default == "" else _read_text, "a text")
    return {
        bool: Kind(_read_bool, "true or false"),
        int: Kind(_read_int, "a whole number"),
        float: Kind(_read_number, "a number"),
        list: Kind(_read_texts, "texts, with commas between"),
    }[plain]


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
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_amount(value: object) -> str | None:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else _read_text(value)


def _read_text(value: object) -> str | None:
    return _read_any_text(value) or None


def _read_any_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _read_texts(value: object) -> tuple[str, ...] | None:
    given = value if isinstance(value, (list, tuple)) else (value,)
    if not all(isinstance(text, str) for text in given):
        return None
    return tuple(text.strip() for text in ",".join(given).split(",") if text.strip())


def _read_path(value: object) -> str | None:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return expand(text) if isinstance(text, str) and text and "\0" not in text else None


def _shown(value: object) -> str:
    """A value for people: not all of one that is endless or nested without end."""
    return reprlib.repr(value) if isinstance(value, (list, dict)) else repr(value)[:200]
