"""Sizes, counts and times as people write them: "512MB", "10%" of what is free, "1 passage", "12h"."""

from __future__ import annotations

import math
import re
import threading
from dataclasses import dataclass

from rekindle.errors import InvalidSetting

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*|%)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit in bytes, or a share of the space that is free or already ours."""

    size_bytes: int | None
    share: float | None = None

    def resolve(self, available_bytes: int) -> int:
        """The limit in bytes; `available_bytes` are free or already ours."""
        return self.size_bytes if self.size_bytes is not None else int((self.share or 0.0) * available_bytes)

    def __str__(self) -> str:
        if self.size_bytes is not None:
            return human_bytes(self.size_bytes)
        return f"{(self.share or 0.0) * 100:g} % of the free disk"


def parse_limit(text: str | int | Limit, setting: str = "") -> Limit:
    """Parse a limit. Raises `InvalidSetting`, which names the setting."""
    if isinstance(text, Limit):
        return text
    named = f"{setting}={text!r}" if setting else repr(text)
    if isinstance(text, int):
        if text < 0:
            raise InvalidSetting(f"A limit cannot be negative: {named}.")
        return Limit(text)
    found = _SIZE.fullmatch(text)
    unit = found[2].lower() if found else None
    if found is None or unit is None or (unit != "%" and unit not in _UNITS):
        raise InvalidSetting(f"{named} is not a size. Write bytes (1000000), 512MB, 1.5GiB, or 10% of the free space.")
    number = float(found[1])
    if unit == "%":
        if number > 100:
            raise InvalidSetting(f"{text!r} is too much. Use at most 100%.")
        return Limit(None, number / 100)
    return Limit(int(number * _UNITS[unit]))


def human_bytes(count: int) -> str:
    """1536000 -> 1.5 MB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def count_of(count: int, noun: str, plural: str | None = None) -> str:
    """1, "passage" -> "1 passage"; 1200, "entry", "entries" -> "1,200 entries"."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def parse_duration(text: str, setting: str = "") -> float:
    """Seconds of "90s", "30m", "12h", "7d", or a plain number of seconds. Raises `InvalidSetting`, which names the
    setting."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text)
    if found is None:
        named = f"{setting}={text!r}" if setting else repr(text)
        raise InvalidSetting(f"{named} is not a time. Write 90s, 30m, 12h or 7d.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def keep_alive_seconds(given: str | float) -> float | None:
    """keep_alive as Ollama has it: seconds, or "5m"; negative means for ever (None)."""
    try:
        seconds = parse_duration(given.strip().removeprefix("-")) if isinstance(given, str) else given
    except InvalidSetting:
        seconds = math.nan
    if not -math.inf < seconds < math.inf:
        raise InvalidSetting(
            f"keep_alive={given!r} is not a time. Use 30s, 5m, 0 to free the model at once, or -1 to keep it."
        )
    return None if str(given).strip().startswith("-") else float(min(seconds, threading.TIMEOUT_MAX))


def human_duration(seconds: float) -> str:
    """A duration for people, in its largest unit: "5 min"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def human_seconds(seconds: float) -> str:
    """A time in milliseconds, or in seconds if it is long."""
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"
