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
    """The files, each once and in order; the folders and patterns they were found by; and what is not there or cannot
    be entered.
    """

    files: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    named: list[Path] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def covers(self, path: Path) -> bool:
        """Whether a file at that path would have been found."""
        # What is not there any more may have been a folder.
        if path in self.named or any(folder in path.parents for folder in (*self.folders, *self.missing)):
            return True
        # `**/` also stands for no folder at all.
        forms = {form for pattern in self.patterns for form in (pattern, pattern.replace("**/", ""))}
        return any(compile_pattern(translate(form)).match(str(path)) for form in forms)


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
        path = absolute(text)
        if is_there(path) and path.is_dir():
            found.folders.append(path)
            found.files += _inside(path, found.problems)
        elif is_there(path):
            found.named.append(path)
            found.files.append(path)
        elif _MAGIC & set(text):
            found.patterns.append(str(path))
            matches = sorted(match for match in _matching(path) if is_there(match) and match.is_file())
            found.files += matches
            if not matches:
                found.missing.append(path)
        else:
            found.named.append(path)
            found.missing.append(path)
    found.files = [path for path in dict.fromkeys(found.files) if _is_text(path, found.problems)]
    return found


def absolute(text: str) -> Path:
    """Where a path that somebody wrote points to; links are not followed."""
    return Path(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111  (resolve would follow links)


def is_there(path: Path) -> bool:
    """Whether there is something that can be looked at."""
    try:
        path.stat()
    except (OSError, ValueError):  # too long, in a folder that cannot be entered, with a NUL
        return False
    return True


def _is_text(path: Path, problems: list[Problem]) -> bool:
    """Whether a file can be named at all: some systems allow names that are no text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = str(path).encode(errors="replace").decode()
        problems.append(Problem(shown, f"{shown} has a name that is not UTF-8: rename it."))
        return False
    return True


def _inside(folder: Path, problems: list[Problem]) -> Iterator[Path]:
    def failed(error: OSError) -> None:
        problems.append(Problem(str(error.filename), f"{error.filename} cannot be entered ({error.strerror})."))

    for parent, folders, files in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent) / name
            if not name.startswith(".") and kind_of(path) is not None and is_there(path) and path.is_file():
                yield path


def _matching(pattern: Path) -> Iterator[Path]:
    """Files of a pattern; the folder in which it begins is the longest part without any."""
    parts = pattern.parts
    first = next(at for at, part in enumerate(parts) if _MAGIC & set(part))
    hidden = any(part.startswith(".") for part in parts[first:])  # then such are meant
    for match in Path(*parts[:first]).glob(str(Path(*parts[first:]))):
        if hidden or not any(part.startswith(".") for part in match.parts[first:]):
            yield match
