"""A cache, or some entries of it, as one archive (`archive_file`).

An archive carries plain digests whatever key the cache has; importing recomputes every key from the tokens and checks
every byte before anything is kept. It carries exact KV only: variants of chunks are listed again when they are
computed, and non-prefix KV is left out.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.codec.coder import is_quantized
from rekindle.codec.digest import PlainDigester
from rekindle.codec.extent import ExtentPlan
from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, chain
from rekindle.core.kv import Kv, Span
from rekindle.errors import BrokenArchive, InvalidSetting
from rekindle.store.archive_file import (
    LARGEST_ENTRY_BYTES,
    MANIFEST,
    MANIFEST_BYTES,
    ArchivedExtent,
    ArchiveEntry,
    entry_member,
    extent_member,
    header_of,
    manifest_bytes,
    member_info,
    opened_archive,
    tar_writer,
)
from rekindle.store.catalog import catalog
from rekindle.store.catalog.variant_rows import nonprefix_kv_spaces
from rekindle.store.disk import DiskStore
from rekindle.store.extents import Damaged, ExtentFiles
from rekindle.store.tiered import Kept, TieredStore

_PART = "archive"
_KV_SPACE_FIELDS = ("model", "identity", "tenant", "salt", "adapter", "codec")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Imported:
    """The outcome of importing an archive."""

    kept: int
    known: int
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """The content of an archive, and the number of entries that could not be read."""

    entries: int
    left_out: int


def export(store: DiskStore, path: Path, names: Sequence[str] = (), progress: Progress | None = None) -> Exported:
    """Write entries, and the prefixes they continue, into an archive at `path`. All, if none are named.

    The file appears when it is complete. Raises `EntryNotFound`, and `InvalidSetting` if the path exists: nothing is
    overwritten. Unreadable entries are left out.
    """
    if os.path.lexists(path):
        raise InvalidSetting(f"{path} already exists. Choose another name for the archive, or remove it first.")
    with store.database.reading() as connection:
        apart = nonprefix_kv_spaces(connection)
    rows = _with_ancestors(store, [row for row in store.entries(names) if row.kv_space not in apart])
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".rekindle-export-") as folder:
            written = _write(store, rows, Path(folder), progress)
            part = Path(folder) / _PART
            part.chmod(0o600)  # it holds the tokens of prompts
            store.files.place(part, path)
    except OSError as error:
        raise InvalidSetting(f"The archive {path} cannot be written: {error}.") from error
    return Exported(written, len(rows) - written)


def _write(store: DiskStore, rows: Sequence[catalog.Extent], folder: Path, progress: Progress | None) -> int:
    copies = ExtentFiles(folder, store.files, PlainDigester())
    keys: set[tuple[int, bytes]] = set()
    written = 0
    with (folder / _PART).open("w+b") as file:
        with tar_writer(file) as tar:
            tar.addfile(member_info(MANIFEST, MANIFEST_BYTES), io.BytesIO(manifest_bytes(0)))
            for number, row in enumerate(rows):
                entry = _copy_out(store, row, copies, keys)
                if entry is not None:
                    path, about = copies.path(entry.name), entry.to_bytes()
                    tar.addfile(member_info(entry_member(entry.name), len(about)), io.BytesIO(about))
                    with path.open("rb") as extent:
                        tar.addfile(member_info(extent_member(entry.name), path.stat().st_size), extent)
                    path.unlink()
                    written += 1
                if progress is not None:
                    progress(number + 1, len(rows))
        file.seek(len(header_of(MANIFEST, MANIFEST_BYTES)))
        file.write(manifest_bytes(written))
    return written


def import_(
    open_store: Callable[[], TieredStore], path: Path, evict: bool, progress: Progress | None = None
) -> Imported:
    """Verify the whole archive; only then open the store and keep what is new. Raises `BrokenArchive`."""
    with opened_archive(path) as archive:
        count, steps = 0, 2 * archive.entries
        nodes: dict[bytes, _Node] = {}
        for found in archive.extents():
            found.verify()
            _place(found, nodes)
            count += 1
            if progress is not None:
                progress(count, steps)
        outcomes: list[Kept] = []
        with open_store() as store:
            for found in archive.extents():
                outcomes.append(_keep(store, found, nodes, evict))
                count += 1
                if progress is not None:
                    progress(count, steps)
    refused = tuple(kept.reason for kept in outcomes if kept.outcome in ("refused", "failed"))
    kept, known = (sum(o.outcome == name for o in outcomes) for name in ("kept", "known"))
    return Imported(kept, known, refused)


@dataclass(frozen=True, slots=True)
class _Node:
    """A block of an entry: the block above the entry, and the tokens of the entry up to and including this block."""

    above: _Node | None
    tokens: bytes
    size: int

    def prefix(self) -> bytes:
        """All tokens up to and including it."""
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
                "SELECT a.extent FROM blocks b JOIN blocks a ON a.key=b.parent AND a.kv_space=b.kv_space "
                "WHERE b.extent=? AND b.place=0",
                (row.id,),
            ).fetchone()
            if above is not None and above[0] not in chosen and (found := catalog.extent(connection, above[0])):
                chosen[found.id] = found
                todo.append(found)
    return sorted(chosen.values(), key=lambda row: (row.depth, row.id))


def _copy_out(
    store: DiskStore, row: catalog.Extent, copies: ExtentFiles, keys: set[tuple[int, bytes]]
) -> ArchiveEntry | None:
    """The live part of an extent as a separate file; None if it, or its prefix, can no longer be read."""
    with store.database.reading() as connection:
        kv_space = connection.execute(
            f"SELECT digest, {', '.join(_KV_SPACE_FIELDS)} FROM kv_spaces WHERE id=?", (row.kv_space,)
        ).fetchone()
        blocks = connection.execute(
            "SELECT tokens, key FROM blocks WHERE extent=? ORDER BY place", (row.id,)
        ).fetchall()
    tokens = b"".join(block[0] for block in blocks)
    if not tokens:
        return None
    try:
        extent = store.open(row, kv_space[0])
        try:
            old = extent.header.plan
            if row.depth and (row.kv_space, bytes(old.parent)) not in keys:
                return None
            digester = PlainDigester()
            plan = ExtentPlan(row.name, "", old.parent, old.layout, tokens, digester.name, digester.width)
            copies.write(plan, store.extents.layers(extent, plan.token_count))
        finally:
            store.extents.release(extent)
    except (OSError, Damaged):
        copies.path(row.name).unlink(missing_ok=True)
        return None
    entry = ArchiveEntry(
        name=row.name,
        sha256=_sha256(copies.path(row.name)),
        **{field: kv_space[number] for number, field in enumerate(_KV_SPACE_FIELDS, start=1)},
    )
    if len(entry.to_bytes()) > LARGEST_ENTRY_BYTES:  # a very long salt
        copies.path(row.name).unlink(missing_ok=True)
        return None
    keys |= {(row.kv_space, block[1]) for block in blocks}
    return entry


def _place(found: ArchivedExtent, nodes: dict[bytes, _Node]) -> None:
    """Record the nodes of an extent. Raises `BrokenArchive` if its parent is not in the archive."""
    plan, kv_space = found.plan, found.kv_space
    on = kv_space.digest.encode()
    above = nodes.get(on + plan.parent)
    if above is None and plan.parent != kv_space.namespace.root:
        raise BrokenArchive(f"{extent_member(plan.name)} in the archive depends on an entry that is not in it.")
    for number, key in enumerate(chain(plan.parent, plan.tokens), start=1):
        nodes[on + key] = _Node(above, plan.tokens, min(number * BLOCK_BYTES, len(plan.tokens)))


def _keep(store: TieredStore, found: ArchivedExtent, nodes: dict[bytes, _Node], evict: bool) -> Kept:
    kv_space, plan = found.kv_space, found.plan
    above = nodes.get(kv_space.digest.encode() + plan.parent)
    before = above.prefix() if above else b""
    tokens: Any = np.frombuffer(before + plan.tokens, "<u4")
    start = len(before) // TOKEN_BYTES
    kv = Kv(Span(start, start + plan.token_count), kv_space.layout, tuple(found.layers()))
    return store.keep(kv_space, tokens, kv, evict=evict, lossy=is_quantized(found.entry.codec))


def _sha256(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            state.update(data)
    return state.hexdigest()
