"""The files that paths, folders and patterns name, and the changes among them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from pathlib import Path
from re import compile as compile_pattern

from rekindle.errors import UnreadableDocument
from rekindle.knowledge.read.clean_text import ReadProblem
from rekindle.knowledge.read.file import kind_of

_MAGIC = frozenset("*?[")


@dataclass
class FoundFiles:
    """The files, each once and in order; the folders and patterns they were found by; missing paths and problems.

    `skipped` are files in folders whose kind is not read.
    """

    files: list[Path] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    named: list[Path] = field(default_factory=list)
    missing: list[Path] = field(default_factory=list)
    problems: list[ReadProblem] = field(default_factory=list)
    skipped: list[Path] = field(default_factory=list)

    def covers(self, path: Path) -> bool:
        """Whether a file at that path would have been found."""
        # A missing path may have been a folder.
        if path in self.named or any(folder in path.parents for folder in (*self.folders, *self.missing)):
            return True
        # `**/` also stands for no folder at all.
        forms = {form for pattern in self.patterns for form in (pattern, pattern.replace("**/", ""))}
        return any(compile_pattern(translate(form)).match(str(path)) for form in forms)


def find_files(paths: Sequence[str | Path]) -> FoundFiles:
    """Find the files that paths name. Hidden files and folders are skipped unless they are named themselves.

    In folders, files of unknown kinds are skipped. Raises `UnreadableDocument` if no path is given.
    """
    if not paths:
        raise UnreadableDocument("Name files, folders or patterns to ingest.")
    found = FoundFiles()
    for given in paths:
        text = os.fspath(given)
        path = absolute(text)
        if is_there(path) and path.is_dir():
            found.folders.append(path)
            found.files += _inside(path, found)
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
    """The absolute path of what a user typed; links are not followed."""
    return Path(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111  (resolve would follow links)


def is_there(path: Path) -> bool:
    """Whether the path exists and can be read."""
    try:
        path.stat()
    except (OSError, ValueError):  # too long, in a folder that cannot be entered, with a NUL
        return False
    return True


def _is_text(path: Path, problems: list[ReadProblem]) -> bool:
    """Whether a file name is valid text; some systems allow others."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = str(path).encode(errors="replace").decode()
        problems.append(ReadProblem(shown, f"{shown} has a name that is not UTF-8: rename it."))
        return False
    return True


def _inside(folder: Path, found: FoundFiles) -> Iterator[Path]:
    def failed(error: OSError) -> None:
        found.problems.append(
            ReadProblem(str(error.filename), f"{error.filename} cannot be entered ({error.strerror}).")
        )

    for parent, folders, files in os.walk(folder, onerror=failed):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent) / name
            if name.startswith(".") or not (is_there(path) and path.is_file()):
                continue
            if kind_of(path) is None:
                found.skipped.append(path)
            else:
                yield path


def _matching(pattern: Path) -> Iterator[Path]:
    """The files that match a pattern, searched from its longest prefix without wildcards."""
    parts = pattern.parts
    first = next(at for at, part in enumerate(parts) if _MAGIC & set(part))
    hidden = any(part.startswith(".") for part in parts[first:])  # then hidden files are wanted
    for match in Path(*parts[:first]).glob(str(Path(*parts[first:]))):
        if hidden or not any(part.startswith(".") for part in match.parts[first:]):
            yield match


_LOOK_MILLISECONDS = 500  # between two checks of `stop`


def watch_changes(paths: Sequence[str], stop: threading.Event | None = None) -> Iterator[list[str]]:
    """Yield what to ingest: everything once watching has begun, so that no change is missed; then what changed, until
    `stop` is set.

    Single files if only files changed; everything if folders were added, removed or moved. Ends at once if there is
    nothing to watch. Raises `ImportError` without watchfiles, and `KeyboardInterrupt`.
    """
    import watchfiles

    found = find_files(paths)
    roots = {*found.folders, *(path.parent for path in found.named), *_beginnings(found.patterns)}
    there = [root for root in roots if root.is_dir()]
    if not there:
        yield list(paths)
        return
    watched = watchfiles.watch(
        *there, stop_event=stop, raise_interrupt=True, yield_on_timeout=True, rust_timeout=_LOOK_MILLISECONDS
    )
    next(watched, None)
    yield list(paths)
    for batch in watched:
        changed = [path for path in sorted({Path(path) for _, path in batch}) if not _hidden(path, roots)]
        if any(path.is_dir() or (kind_of(path) is None and not path.exists()) for path in changed):
            yield list(paths)
        elif files := [str(path) for path in changed if _counts(path, found)]:
            yield files


def _counts(path: Path, found: FoundFiles) -> bool:
    return path in found.named or (found.covers(path) and kind_of(path) is not None)


def _beginnings(patterns: Sequence[str]) -> Iterator[Path]:
    """The existing folder at the start of each pattern."""
    for pattern in patterns:
        path = Path(pattern)
        while not path.is_dir():
            path = path.parent
        yield path


def _hidden(path: Path, roots: set[Path]) -> bool:
    root = max((root for root in roots if root in path.parents), key=lambda root: len(root.parts), default=path.parent)
    return any(part.startswith(".") for part in path.relative_to(root).parts)
