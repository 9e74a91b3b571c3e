"""Small facts worth remembering between runs, each kind in one JSON file. Losing one costs time, never an answer."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


class Remembered:
    """Values by name in one file, the most recently kept last; the oldest go when there are more than `most`."""

    def __init__(self, path: Path, most: int) -> None:
        self._path = path
        self._most = most

    def recall(self, name: str) -> Any:
        """What was kept under that name; None if nothing was, or the file is gone or damaged."""
        return self._load().get(name)

    def keep(self, name: str, value: Any) -> None:
        """Remember a value that JSON can hold. A folder that cannot be written is no reason to fail."""
        known = self._load()
        known.pop(name, None)
        known[name] = value
        kept = dict(list(known.items())[-self._most :])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file)
            Path(draft).replace(self._path)

    def _load(self) -> dict[str, Any]:
        try:
            known = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}
