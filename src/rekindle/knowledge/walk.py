"""The files that somebody means by paths: files, folders with all that is in them, and patterns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from re import compile as compile_pattern

from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.file import Problem, kind_of

_MAGIC = frozenset("*?[")


@dataclass
class Found:
    """The files, each once and in order; the folders and patterns they were found by;
    and     what is not there or cannot be entered.
    """

    files: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    named: list[Path] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def covers(self, path: Path) -> bool:
        """Whether a file at that path would have been found."""
        if path in self.named or any(folder in path.parents for folder in self.folders):
            return True
        return any(compile_pattern(translate(pattern)).match(str(path)) for pattern in self.patterns)


def walk(paths: Sequence[str | Path]) -> Found:
    """Everything that is meant. Hidden files and folders are left out unless they are named themselves.

    In folders, files of kinds that are not read are passed over. Raises `UnreadableDocument` if nothing at all was
    named.
    """
    if not paths:
        raise UnreadableDocument("Name files, folders or patterns to ingest.")
    found = Found()
    for given in paths:
        text = os.fspath(given)
        path = Path(os.path.abspath(Path(text).expanduser()))  # noqa: PTH100  (resolve would follow links)
        if path.is_dir():
            found.folders.append(path)
            found.files += _inside(path, found.problems)
        elif path.exists():
            found.named.append(path)
            found.files.append(path)
        elif _MAGIC & set(text):
            found.patterns.append(str(path))
            matches = sorted(_matching(path))
            found.files += [match for match in matches if match.is_file()]
        else:
            found.named.append(path)
            found.missing.append(path)
    found.files = list(dict.fromkeys(found.files))
    return found


def _inside(folder: Path, problems: list[Problem]) -> Iterator[Path]:
    def failed(error: OSError) -> None:
        problems.append(Problem(str(error.filename), f"{error.filename} cannot be entered ({error.strerror})."))

    for parent, folders, files in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent) / name
            if not name.startswith(".") and kind_of(path) is not None and path.is_file():
                yield path


def _matching(pattern: Path) -> Iterator[Path]:
    """Files of a pattern; the folder in which it begins is the longest part without any."""
    parts = pattern.parts
    first = next(at for at, part in enumerate(parts) if _MAGIC & set(part))
    yield from Path(*parts[:first]).glob(str(Path(*parts[first:])))
