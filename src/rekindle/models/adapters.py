"""The adapters that this machine knows by name: `rekindle adapters add NAME PATH`. Their files stay where they are.

Three small ones for SmolLM2 come with the package, to try things with.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rekindle.config import home_folder
from rekindle.errors import AdapterNotFound, InvalidSetting

_FILE = "adapters.json"
_PACKAGED = Path(__file__).parent.parent / "samples" / "adapters"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


@dataclass(frozen=True)
class KnownAdapter:
    """An adapter's name, where its folder is, and by how much its effect is scaled."""

    name: str
    path: str
    scale: float = 1.0
    packaged: bool = False  # it came with Rekindle


def parse(text: str) -> KnownAdapter:
    """`NAME=PATH` or `NAME=PATH,scale=0.5`, as given to a command. Raises `InvalidSetting`."""
    name, equals, rest = text.partition("=")
    path, comma, scale = rest.rpartition(",scale=")
    if not comma:
        path, scale = rest, "1"
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not equals or not path or not math.isfinite(number):
        raise InvalidSetting(f"{text!r} names no adapter. Use NAME=PATH, or NAME=PATH,scale=0.5.")
    return KnownAdapter(check_name(name), path, number)


def check_name(name: str) -> str:
    """The name. Raises `InvalidSetting` for one that could not be written on a command line or in a request."""
    if not _NAME.fullmatch(name):
        raise InvalidSetting(
            f"An adapter cannot be called {name!r}. Use up to 128 letters, digits and . _ - / : after a first letter."
        )
    return name


def entries() -> list[KnownAdapter]:
    """All that are known, by name. One that was added comes before a packaged one of that name."""
    packaged = [folder for folder in _PACKAGED.iterdir() if folder.is_dir()] if _PACKAGED.is_dir() else []
    known = {folder.name: KnownAdapter(folder.name, str(folder), packaged=True) for folder in packaged}
    known |= {entry.name: entry for entry in _added()}
    return sorted(known.values(), key=lambda entry: entry.name)


def _added() -> list[KnownAdapter]:
    try:
        found = json.loads(_path().read_text("utf-8"))
        return [KnownAdapter(str(e["name"]), str(e["path"]), float(e["scale"])) for e in found]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def lookup(name: str) -> KnownAdapter | None:
    """The one of that name."""
    return next((entry for entry in entries() if entry.name == name), None)


def add(name: str, path: str | Path, scale: float = 1.0) -> KnownAdapter:
    """Remember an adapter, in place of another one of that name."""
    entry = KnownAdapter(check_name(name), str(Path(path).expanduser().resolve()), scale)
    _write([*(other for other in _added() if other.name != name), entry])
    return entry


def remove(name: str) -> None:
    """Forget an adapter; its files stay. Raises `AdapterNotFound`."""
    known = _added()
    if all(entry.name != name for entry in known):
        came = "came with Rekindle and stays" if lookup(name) is not None else "is not known"
        raise AdapterNotFound(f"An adapter {name!r} {came}. `rekindle adapters ls` lists those that are known.")
    _write([entry for entry in known if entry.name != name])


def _path() -> Path:
    return home_folder() / _FILE


def _write(known: list[KnownAdapter]) -> None:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump([{"name": e.name, "path": e.path, "scale": e.scale} for e in known], file, indent=1)
    Path(draft).replace(path)
