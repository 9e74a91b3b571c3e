"""Following files: what changed, a moment after it did."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rekindle.knowledge.read.file import kind_of
from rekindle.knowledge.walk import Found, walk

_LOOK_MILLISECONDS = 500  # how often it looks whether to stop


def changes(paths: Sequence[str], stop: threading.Event | None = None) -> Iterator[list[str]]:
    """What to ingest: everything as soon as it is watched, so that no change slips through before; then what changed,
    until `stop` is set.

    Single files where only such changed; everything where folders came, went or moved. Ends at once where there is
    nothing to watch. Raises `ImportError` without the library that watches, and `KeyboardInterrupt`.
    """
    import watchfiles

    found = walk(paths)
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


def _counts(path: Path, found: Found) -> bool:
    return path in found.named or (found.covers(path) and kind_of(path) is not None)


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
