"""A cache, or some entries of it, as one archive: a tar of extents and a manifest with the digest of each.

An archive carries plain digests whatever key the cache has; importing computes every key anew from the tokens and
checks every byte before anything is kept. It carries exact KV alone: variants of chunks are listed anew when they are
computed, and what is loose stays where it is.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.codec.coder import is_near
from rekindle.codec.digest import PlainDigester
from rekindle.codec.extent import ExtentHeader, ExtentPlan, header_length, parse_header
from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, Namespace, NodeKey, Shelf, chain, layout_text, parse_layout
from rekindle.core.kv import Kv, Span
from rekindle.errors import BrokenArchive, InvalidSetting
from rekindle.store import catalog
from rekindle.store.disk import DiskStore
from rekindle.store.extents import ExtentFiles
from rekindle.store.files import Files
from rekindle.store.loose import is_loose
from rekindle.store.opened import Damaged, OpenExtent
from rekindle.store.tiered import Kept, TieredStore
from rekindle.store.variant_rows import loose_shelves

FORMAT = "rekindle-archive/1"
MANIFEST = "manifest.json"
_PART = "archive"
_LARGEST_MANIFEST_BYTES = 1 << 30
_SHELF_FIELDS = ("model", "identity", "tenant", "salt", "adapter", "codec")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Entry:
    """An extent in an archive."""

    name: str
    sha256: str
    size_bytes: int
    depth: int
    parent: str
    tokens: str
    model: str
    identity: str
    tenant: str
    salt: str
    adapter: str | None
    codec: str
    layout: str

    def __post_init__(self) -> None:
        texts = (self.name, self.sha256, self.parent, self.tokens, self.model, self.identity, self.tenant, self.salt)
        numbers = (self.size_bytes, self.depth)
        if not all(isinstance(text, str) for text in (*texts, self.codec, self.layout, self.adapter or "")):
            raise ValueError("an entry's field is no text")
        if not all(isinstance(number, int) and number >= 0 for number in numbers) or not self.tokens:
            raise ValueError("an entry's field is no number")
        if is_loose(self.codec):
            raise ValueError("an entry is loose")
        if not self.shelf.digest:  # also: every text can be encoded
            raise ValueError("an entry has no shelf")

    @property
    def member(self) -> str:
        """Its file in the archive."""
        return f"extents/{self.name}.kv"

    @property
    def shelf(self) -> Shelf:
        """Where it belongs."""
        namespace = Namespace(self.identity, self.tenant, self.salt)
        return Shelf(namespace, parse_layout(self.layout), self.adapter, self.codec, self.model)


@dataclass(frozen=True)
class Imported:
    """What became of an archive's entries."""

    kept: int
    known: int
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """What an archive holds, and how many entries could not be read."""

    entries: int
    left_out: int


def export(store: DiskStore, path: Path, names: Sequence[str] = (), progress: Progress | None = None) -> Exported:
    """Write entries, and what they hang on, into an archive at `path`. All, if none are named.

    The file appears when it is complete. Raises `EntryNotFound`; what cannot be read is left out.
    """
    with store.database.reading() as connection:
        apart = loose_shelves(connection)
    rows = _with_ancestors(store, [row for row in store.entries(names) if row.shelf not in apart])
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".rekindle-export-") as folder:
            written = _write(store, rows, Path(folder), progress)
            part = Path(folder) / _PART
            part.chmod(0o600)  # it holds the tokens of prompts
            part.replace(path)
    except OSError as error:
        raise InvalidSetting(f"The archive {path} cannot be written: {error}.") from error
    return Exported(written, len(rows) - written)


def _write(store: DiskStore, rows: Sequence[catalog.Extent], folder: Path, progress: Progress | None) -> int:
    copies = ExtentFiles(folder, store.files, PlainDigester())
    keys: set[tuple[int, bytes]] = set()
    written: list[_Entry] = []
    with tarfile.open(folder / _PART, "w") as tar:
        for number, row in enumerate(rows):
            entry = _copy_out(store, row, copies, keys)
            if entry is not None:
                file = copies.path(entry.name)
                tar.add(file, entry.member, filter=_anonymous)
                file.unlink()
                written.append(entry)
            if progress is not None:
                progress(number + 1, len(rows))
        manifest = folder / MANIFEST
        manifest.write_text(json.dumps({"format": FORMAT, "entries": [asdict(e) for e in written]}), "utf-8")
        tar.add(manifest, MANIFEST, filter=_anonymous)
    return len(written)


def import_(
    open_store: Callable[[], TieredStore], path: Path, evict: bool, progress: Progress | None = None
) -> Imported:
    """Verify an archive, all of it; only then open the store and keep what is new. Raises `BrokenArchive`."""
    with _opened(path) as tar, tempfile.TemporaryDirectory(prefix="rekindle-import-") as folder:
        entries = _manifest(tar, path)
        steps = 2 * len(entries)
        nodes: dict[tuple[str, str], _Node] = {}
        for number, entry in enumerate(entries):
            with _extracted(tar, entry, Path(folder)) as (files, extent):
                _verify(files, extent, entry)
            _place(entry, nodes)
            if progress is not None:
                progress(number + 1, steps)
        outcomes: list[Kept] = []
        with open_store() as store:
            for number, entry in enumerate(entries, start=len(entries)):
                with _extracted(tar, entry, Path(folder)) as (files, extent):
                    outcomes.append(_keep(store, files, extent, entry, nodes, evict))
                if progress is not None:
                    progress(number + 1, steps)
    refused = tuple(kept.reason for kept in outcomes if kept.outcome in ("refused", "failed"))
    kept, known = (sum(o.outcome == name for o in outcomes) for name in ("kept", "known"))
    return Imported(kept, known, refused)


@dataclass(frozen=True)
class _Node:
    """A block of an entry: what is above the entry, and how much of the entry comes before and with the block."""

    above: _Node | None
    tokens: bytes
    size: int

    def prefix(self) -> bytes:
        """All tokens up to and with it."""
        parts = [self.tokens[: self.size]]
        above = self.above
        while above is not None:
            parts.append(above.tokens[: above.size])
            above = above.above
        return b"".join(reversed(parts))


def _with_ancestors(store: DiskStore, rows: Sequence[catalog.Extent]) -> list[catalog.Extent]:
    chosen = {row.id: row for row in rows}
    todo = list(rows)
    with store.database.reading() as connection:
        while todo:
            row = todo.pop()
            above = connection.execute(
                "SELECT a.extent FROM blocks b JOIN blocks a ON a.key=b.parent AND a.shelf=b.shelf "
                "WHERE b.extent=? AND b.place=0",
                (row.id,),
            ).fetchone()
            if above is not None and above[0] not in chosen and (found := catalog.extent(connection, above[0])):
                chosen[found.id] = found
                todo.append(found)
    return sorted(chosen.values(), key=lambda row: (row.depth, row.id))


def _copy_out(
    store: DiskStore, row: catalog.Extent, copies: ExtentFiles, keys: set[tuple[int, bytes]]
) -> _Entry | None:
    """The live part of an extent as a file of its own; None if it, or what it hangs on, cannot be read any more."""
    with store.database.reading() as connection:
        shelf = connection.execute(
            f"SELECT digest, {', '.join(_SHELF_FIELDS)} FROM shelves WHERE id=?", (row.shelf,)
        ).fetchone()
        blocks = connection.execute(
            "SELECT tokens, key FROM blocks WHERE extent=? ORDER BY place", (row.id,)
        ).fetchall()
    tokens = b"".join(block[0] for block in blocks)
    if not tokens:
        return None
    try:
        extent = store.open(row, shelf[0])
        try:
            old = extent.header.plan
            if row.depth and (row.shelf, bytes(old.parent)) not in keys:
                return None
            digester = PlainDigester()
            plan = ExtentPlan(row.name, "", old.parent, old.layout, tokens, digester.name, digester.width)
            copies.write(plan, store.extents.layers(extent, plan.token_count))
        finally:
            store.extents.release(extent)
    except (OSError, Damaged):
        copies.path(row.name).unlink(missing_ok=True)
        return None
    keys |= {(row.shelf, block[1]) for block in blocks}
    return _Entry(
        name=row.name,
        sha256=_sha256(copies.path(row.name)),
        size_bytes=plan.file_bytes,
        depth=row.depth,
        parent=old.parent.hex(),
        tokens=tokens.hex(),
        layout=layout_text(old.layout),
        **{field: shelf[number] for number, field in enumerate(_SHELF_FIELDS, start=1)},
    )


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the names and rights of this machine's users."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o600
    return info


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path, "r:") as tar:
            yield tar
    except (tarfile.TarError, EOFError) as error:
        raise BrokenArchive(f"{path} is not an archive of a cache, or is cut off ({error}).") from error
    except OSError as error:
        raise BrokenArchive(f"{path} cannot be read: {error}.") from error


def _manifest(tar: tarfile.TarFile, path: Path) -> list[_Entry]:
    try:
        info = tar.getmember(MANIFEST)
        file = tar.extractfile(info) if info.isreg() else None
        if file is None or info.size > _LARGEST_MANIFEST_BYTES:
            raise ValueError("its manifest is no file")
        content = json.loads(file.read())
        if content["format"] != FORMAT:
            raise ValueError(f"unknown format {content['format']!r}")
        return [_Entry(**fields) for fields in content["entries"]]
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise BrokenArchive(f"{path} is not an archive of a cache: {error}.") from error


@contextmanager
def _extracted(tar: tarfile.TarFile, entry: _Entry, folder: Path) -> Iterator[tuple[ExtentFiles, OpenExtent]]:
    """An entry as a file of its own, its digest checked."""
    files = ExtentFiles(folder, Files(), PlainDigester())
    path = folder / "extent.kv"
    try:
        info = tar.getmember(entry.member)
        source = tar.extractfile(info) if info.isreg() else None
        if source is None:
            raise BrokenArchive(f"{entry.member} in the archive is no file.")
        with path.open("wb") as target:
            while data := source.read(1 << 20):
                target.write(data)
        if path.stat().st_size != entry.size_bytes or _sha256(path) != entry.sha256:
            raise BrokenArchive(f"{entry.member} in the archive is damaged: its digest is another.")
        header = _header(path)
        handle = files.files.open(path)
        try:
            yield files, OpenExtent(handle, header)
        finally:
            files.files.close(handle)
    except KeyError as error:
        raise BrokenArchive(f"The archive lacks {entry.member}.") from error
    except (ValueError, TypeError, AttributeError, Damaged) as error:
        raise BrokenArchive(f"{entry.member} in the archive is damaged: {error}.") from error
    finally:
        files.close()
        path.unlink(missing_ok=True)


def _header(path: Path) -> ExtentHeader:
    with path.open("rb") as file:
        first = file.read(8)
        return parse_header(first + file.read(header_length(first) - 8))


def _verify(files: ExtentFiles, extent: OpenExtent, entry: _Entry) -> None:
    plan = extent.header.plan
    same = plan.parent.hex() == entry.parent and plan.tokens.hex() == entry.tokens and plan.name == entry.name
    if not same or plan.layout != entry.shelf.layout or plan.file_bytes != entry.size_bytes:
        raise Damaged("it is not what the manifest says")
    for _ in files.layers(extent, plan.token_count):
        pass  # reading checks


def _place(entry: _Entry, nodes: dict[tuple[str, str], _Node]) -> None:
    """Note the nodes of an entry. Raises `BrokenArchive` if it hangs on nothing."""
    shelf, root = entry.shelf, entry.shelf.namespace.root
    parent, tokens = NodeKey(bytes.fromhex(entry.parent)), bytes.fromhex(entry.tokens)
    above = nodes.get((shelf.digest, entry.parent))
    if above is None and parent != root:
        raise BrokenArchive(f"{entry.member} in the archive hangs on nothing.")
    for number, key in enumerate(chain(parent, tokens), start=1):
        nodes[shelf.digest, key.hex()] = _Node(above, tokens, min(number * BLOCK_BYTES, len(tokens)))


def _keep(
    store: TieredStore,
    files: ExtentFiles,
    extent: OpenExtent,
    entry: _Entry,
    nodes: dict[tuple[str, str], _Node],
    evict: bool,
) -> Kept:
    shelf, plan = entry.shelf, extent.header.plan
    above = nodes.get((shelf.digest, entry.parent))
    before = above.prefix() if above else b""
    tokens: Any = np.frombuffer(before + plan.tokens, "<u4")
    start = len(before) // TOKEN_BYTES
    layers = tuple(files.layers(extent, plan.token_count))
    kv = Kv(Span(start, start + plan.token_count), shelf.layout, layers)
    return store.keep(shelf, tokens, kv, evict=evict, lossy=is_near(entry.codec))


def _sha256(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            state.update(data)
    return state.hexdigest()
