"""Small JSON files: written atomically, and memos of facts between runs, whose loss costs only time."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rekindle.machine import make_private_folder


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Replace a file atomically, with one that only its owner can read, and make its folder. Raises `OSError`."""
    make_private_folder(path.parent)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=indent)
    Path(draft).replace(path)


class JsonMemo:
    """Values by name in one file, at most `max_entries` of them: the oldest go first."""

    def __init__(self, path: Path, max_entries: int) -> None:
        self._path = path
        self._max_entries = max_entries

    def recall(self, name: str) -> Any:
        """The value of that name; None if there is none, or the file is gone or damaged."""
        return self._load().get(name)

    def keep(self, name: str, value: Any) -> None:
        """Keep a JSON value. If the file cannot be written, nothing happens."""
        known = self._load()
        known.pop(name, None)
        known[name] = value
        self._save(dict(list(known.items())[-self._max_entries :]))

    def forget(self, name: str) -> None:
        self._save({other: value for other, value in self._load().items() if other != name})

    def names(self) -> list[str]:
        """All names, the oldest first."""
        return list(self._load())

    def _save(self, kept: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            write_json(self._path, kept)

    def _load(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}
