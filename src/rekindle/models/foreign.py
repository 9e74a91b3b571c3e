"""Files of other tools, looked at from outside: what is missing or may not be read is as good as not there."""

from __future__ import annotations

import os
from pathlib import Path

_LARGEST_TEXT_BYTES = 1 << 20


def find_paths(folder: Path, pattern: str) -> list[Path]:
    """What matches the pattern below the folder, sorted."""
    try:
        return sorted(folder.glob(pattern))
    except (OSError, ValueError):  # ValueError: a path that no disk can have
        return []


def is_file(path: Path) -> bool:
    """Whether there is a file that can be seen."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether there is a folder that can be seen."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def modified_seconds(path: Path) -> float:
    """When it was changed last, in seconds since 1970; 0 if that cannot be told."""
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return 0.0


def read_text(path: Path) -> str:
    """The text of a small file, or its beginning; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_TEXT_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def as_path(text: str) -> Path:
    """A path as people write it into settings, with `~` and `$NAME`."""
    path = Path(os.path.expandvars(text))
    try:
        return path.expanduser()
    except RuntimeError:  # a user without a home: nothing is there
        return path
