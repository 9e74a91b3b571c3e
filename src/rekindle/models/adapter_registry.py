"""The adapters registered on this machine: `rekindle adapters add NAME PATH`. Their files stay where they are.

Three small ones for SmolLM2 come with the package.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import AdapterNotFound, InvalidSetting
from rekindle.json_file import write_json
from rekindle.machine import home_folder

_FILE = "adapters.json"
_PACKAGED = Path(__file__).parent.parent / "samples" / "adapters"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


@dataclass(frozen=True)
class RegisteredAdapter:
    """An adapter's name, folder and scale."""

    name: str
    path: str
    scale: float = 1.0
    packaged: bool = False  # came with Rekindle


def parse(text: str) -> RegisteredAdapter:
    """Parse `NAME=PATH` or `NAME=PATH,scale=0.5` from a command line. Raises `InvalidSetting`."""
    name, equals, rest = text.partition("=")
    path, comma, scale = rest.rpartition(",scale=")
    if not comma:
        path, scale = rest, "1"
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not equals or not path or not math.isfinite(number):
        raise InvalidSetting(f"{text!r} does not name an adapter. Use NAME=PATH, or NAME=PATH,scale=0.5.")
    return RegisteredAdapter(check_name(name), path, number)


def check_name(name: str) -> str:
    """The name. Raises `InvalidSetting` if it would not work on a command line or in a request."""
    if not _NAME.fullmatch(name):
        raise InvalidSetting(
            f"An adapter cannot be called {name!r}. Use up to 128 letters, digits and . _ - / : after a first letter."
        )
    return name


def entries() -> list[RegisteredAdapter]:
    """All adapters, by name. An added one hides a packaged one of the same name."""
    packaged = [folder for folder in _PACKAGED.iterdir() if folder.is_dir()] if _PACKAGED.is_dir() else []
    known = {folder.name: RegisteredAdapter(folder.name, str(folder), packaged=True) for folder in packaged}
    known |= {entry.name: entry for entry in _added()}
    return sorted(known.values(), key=lambda entry: entry.name)


def _added() -> list[RegisteredAdapter]:
    try:
        found = json.loads(_path().read_text("utf-8"))
        return [RegisteredAdapter(str(e["name"]), str(e["path"]), float(e["scale"])) for e in found]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def lookup(name: str) -> RegisteredAdapter | None:
    return next((entry for entry in entries() if entry.name == name), None)


def add(name: str, path: str | Path, scale: float = 1.0) -> RegisteredAdapter:
    """Register an adapter, replacing one of the same name."""
    entry = RegisteredAdapter(check_name(name), str(Path(path).expanduser().resolve()), scale)
    _save([*(other for other in _added() if other.name != name), entry])
    return entry


def remove(name: str) -> None:
    """Forget an adapter; its files stay. Raises `AdapterNotFound`."""
    known = _added()
    if all(entry.name != name for entry in known):
        came = "came with Rekindle and stays" if lookup(name) is not None else "is not known"
        raise AdapterNotFound(f"An adapter {name!r} {came}. `rekindle adapters ls` lists those that are known.")
    _save([entry for entry in known if entry.name != name])


def _path() -> Path:
    return home_folder() / _FILE


def _save(known: list[RegisteredAdapter]) -> None:
    write_json(_path(), [{"name": e.name, "path": e.path, "scale": e.scale} for e in known], indent=1)
