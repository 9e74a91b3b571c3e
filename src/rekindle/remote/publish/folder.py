"""The folder of an origin: plain files that any web server can serve.

Files appear only when complete: they are written elsewhere, then renamed. Slices come first, then the manifest that
names them, then the index that names the manifest; removal goes the other way round. A lock serializes publishers for
that last step. Files are world-readable because a web server must read them; encrypt what nobody else may read.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import EntryNotFound, InvalidSetting
from rekindle.remote.index import CONTEXT, CONTEXT_FOLDER, FILE, INDEX_FOLDER, MANIFEST, Index, context_path, index_path
from rekindle.remote.manifest import Header, SignedManifest
from rekindle.store.files import Files

_LOCK, _PARTS = ".lock", ".parts"
_PART_NAME = re.compile("[0-9a-f]{32}")
_LOCK_SECONDS = 60.0
_STALE_SECONDS = 86400.0  # an unfinished part this old was abandoned
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class PublishedContext:
    """A context in a folder. `manifest` is None if its file is damaged."""

    context: str
    size_bytes: int
    manifest: SignedManifest | None

    @property
    def header(self) -> Header | None:
        """The unencrypted header."""
        return None if self.manifest is None else self.manifest.header


class OriginFolder:
    """A folder that publishers write and web servers read."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises `InvalidSetting` if it is not a folder, or cannot be created."""
        self.path = path.expanduser()
        try:
            if create:
                for name in (INDEX_FOLDER, CONTEXT_FOLDER, _PARTS):
                    (self.path / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSetting(f"The folder {path} cannot be used: {error}.") from error
        if not (self.path / CONTEXT_FOLDER).is_dir():
            raise InvalidSetting(f"{path} is not the folder of an origin. `rekindle origin publish` makes one.")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock on manifests and indexes. Raises `InvalidSetting` if it is not free within a minute."""
        files, deadline = Files(), time.monotonic() + _LOCK_SECONDS
        while (handle := files.try_lock(self.path / _LOCK)) is None:
            if time.monotonic() > deadline:
                raise InvalidSetting(f"Another process has been writing to {self.path} for a minute. Try again later.")
            time.sleep(0.01)
        try:
            yield
        finally:
            files.close(handle)

    def new_part(self) -> PartFile:
        """A new temporary file."""
        return PartFile(self.path / _PARTS / secrets.token_hex(16))

    def place(self, part: PartFile, target: str) -> None:
        """Rename a finished part to `target`."""
        path = self.path / target
        path.parent.mkdir(parents=True, exist_ok=True)
        part.path.replace(path)

    def write(self, target: str, data: bytes) -> None:
        """Write or replace a small file."""
        part = self.new_part()
        try:
            part.write(data)
            part.finish()
            self.place(part, target)
        finally:
            part.discard()

    def read(self, target: str) -> bytes | None:
        """A small file; None if there is none."""
        try:
            return (self.path / target).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def manifest(self, context: str) -> SignedManifest | None:
        """The manifest of a context, not checked; None if there is none, or it is damaged."""
        data = self.read(context_path(context))
        try:
            return None if data is None else SignedManifest.from_bytes(data)
        except ValueError:
            return None

    def index(self, lookup: str) -> Index:
        """The index of a lookup; an empty one if there is none, or it is damaged."""
        data = self.read(index_path(lookup))
        try:
            return Index() if data is None else Index.from_bytes(data)
        except ValueError:
            return Index()

    def contexts(self) -> list[PublishedContext]:
        """All published contexts."""
        found = []
        for folder in sorted((self.path / CONTEXT_FOLDER).iterdir()):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # being removed
                if CONTEXT.fullmatch(folder.name) and (folder / MANIFEST).is_file():
                    size = sum(file.stat().st_size for file in folder.iterdir())
                    found.append(PublishedContext(folder.name, size, self.manifest(folder.name)))
        return found

    def remove(self, name: str) -> str:
        """Remove the context whose name starts with `name`; returns its full name. Raises `EntryNotFound`."""
        with self.locked():
            found = [one for one in self.contexts() if name and one.context.startswith(name)]
            if len(found) != 1:
                what = "no context begins" if not found else f"{len(found)} contexts begin"
                raise EntryNotFound(f"In {self.path} {what} with {name!r}. `rekindle origin ls` lists them.")
            header, context = found[0].header, found[0].context
            for lookup in self._lookups() if header is None else header.lookups:
                self._unlist(lookup, context)
            (self.path / context_path(context)).unlink()
            self.keep_only(context, frozenset())
        return context

    def keep_only(self, context: str, files: frozenset[str]) -> None:
        """Remove the other files of a context, and its folder if it is empty. Foreign files stay."""
        folder = self.path / CONTEXT_FOLDER / context
        for file in folder.iterdir():
            if FILE.fullmatch(file.name) and file.name not in files:
                Files().remove(file)
        if not files:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def sweep(self) -> None:
        """Remove abandoned parts."""
        now = time.time()
        for part in (self.path / _PARTS).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _PART_NAME.fullmatch(part.name) and now - part.lstat().st_mtime > _STALE_SECONDS:
                    Files().remove(part)

    def _lookups(self) -> list[str]:
        return [path.stem for path in (self.path / INDEX_FOLDER).glob("*.json")]

    def _unlist(self, lookup: str, context: str) -> None:
        before = self.index(lookup)
        after = before.without(context)
        if not after.entries:
            (self.path / index_path(lookup)).unlink(missing_ok=True)
        elif after != before:
            self.write(index_path(lookup), after.to_bytes())


class PartFile:
    """A world-readable file while it is written; see `OriginFolder.place`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _FLAGS, 0o644)

    def write(self, data: bytes) -> None:
        assert self._handle is not None, "it was finished"
        view = memoryview(data)
        while len(view):
            view = view[os.write(self._handle, view) :]

    def finish(self) -> None:
        """Sync it to disk and close it."""
        assert self._handle is not None, "it was finished"
        os.fsync(self._handle)
        self._close()

    def discard(self) -> None:
        """Close it, and remove it unless it was placed."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
