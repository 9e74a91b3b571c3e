"""Following files: what changed, a moment after it did."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rekindle.knowledge.read.file import kind_of
from rekindle.knowledge.walk import walk


def changes(paths: Sequence[str], stop: threading.Event | None = None) -> Iterator[list[str]]:
    """What to ingest again, each time that something under the paths changed, until `stop` is set.

    Single files where only such changed; everything where folders came, went or moved. Raises `ImportError` without
    the library that watches, and `KeyboardInterrupt`.
    """
    import watchfiles

    found = walk(paths)
    roots = {*found.folders, *(path.parent for path in found.named), *_beginnings(found.patterns)}
    there = [root for root in roots if root.is_dir()]
    for batch in watchfiles.watch(*there, stop_event=stop, raise_interrupt=True):
        changed = sorted({Path(path) for _, path in batch})
        covered = [path for path in changed if found.covers(path) and not _hidden(path, roots)]
        if any(path.is_dir() or (kind_of(path) is None and not path.exists()) for path in changed):
            yield list(paths)
        elif files := [str(path) for path in covered if kind_of(path) is not None or path in found.named]:
            yield files


def _beginnings(patterns: Sequence[str]) -> Iterator[Path]:
    """The folders in which patterns begin."""
    for pattern in patterns:
        path = Path(pattern)
        while not path.is_dir():
            path = path.parent
        yield path


def _hidden(path: Path, roots: set[Path]) -> bool:
    root = max((root for root in roots if root in path.parents), key=lambda root: len(root.parts), default=path.parent)
    return any(part.startswith(".") for part in path.relative_to(root).parts)
