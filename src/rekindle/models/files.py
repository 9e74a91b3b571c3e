"""Where a model's files are; and looking at files that may be missing or unreadable, without raising."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PART = re.compile(r"-(\d{5})-of-(\d{5})(\.gguf)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model found on this machine.

    `folder` holds the files in Hugging Face form (config, safetensors, tokenizer). A model that came as GGUF has
    `gguf`; its `folder` may not exist yet and is where an engine writes the converted form, once. Of a model split
    into several GGUF files, `gguf` is the first.
    """

    name: str
    folder: Path
    gguf: Path | None = None

    @property
    def converted(self) -> bool:
        """Whether the Hugging Face form is there."""
        return (self.folder / "config.json").is_file()

    @property
    def parts(self) -> tuple[Path, ...]:
        """The GGUF files, in order: one, several if the model is split, none if it did not come as GGUF."""
        gguf = self.gguf
        return () if gguf is None else tuple(gguf.with_name(name) for name in part_names(gguf.name))


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of a split GGUF model, in order; of another, its own name.

    `x-00002-of-00003.gguf` is one of `x-00001-of-00003.gguf`, `x-00002-of-00003.gguf`, `x-00003-of-00003.gguf`.
    """
    found = _PART.search(name)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return (name,)
    begin = name[: found.start()]
    return tuple(f"{begin}-{number:05}-of-{found[2]}{found[3]}" for number in range(1, int(found[2]) + 1))


_LARGEST_TEXT_BYTES = 1 << 20


def find_paths(folder: Path, pattern: str) -> list[Path]:
    """Paths in the folder that match the pattern, sorted; none if it cannot be read."""
    try:
        return sorted(folder.glob(pattern))
    except (OSError, ValueError):  # ValueError: not a valid path
        return []


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def modified_seconds(path: Path) -> float:
    """Modification time in seconds since 1970; 0 if unknown."""
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return 0.0


def read_text(path: Path) -> str:
    """The text of a small file, or its first megabyte; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_TEXT_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def as_path(text: str) -> Path:
    """A path from settings, with `~` and `$NAME` expanded."""
    path = Path(os.path.expandvars(text))
    try:
        return path.expanduser()
    except RuntimeError:  # a user without a home
        return path
