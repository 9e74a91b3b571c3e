"""Differences and what they stand on: KV of the same tokens under the base model, or under another adapter.

    shelf of the base   [block][block][block][block]      whole: the anchor
    shelf of an adapter [  difference  ][ whole ...]      what the anchor covers, and the rest

All adapters of a namespace have the same nodes, so an anchor is found by the keys of its blocks. An anchor is always
whole: to read a difference, one other extent is read at each place, never a chain of them. While a difference stands on
an extent, eviction leaves the extent alone; where it must go all the same, the difference is re-based before, or goes
along (`catalog.cut` sees to that whatever happens).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from rekindle.codec.coder import Coder
from rekindle.codec.extent import ExtentPlan
from rekindle.core.keys import NodeKey, chain
from rekindle.core.kv import KvLayout, LayerKv
from rekindle.store import anchor_rows, catalog
from rekindle.store.anchor_rows import Anchoring
from rekindle.store.catalog import Extent, Fresh
from rekindle.store.database import Database
from rekindle.store.extents import ExtentFiles
from rekindle.store.opened import AnchorFile, CodedExtent, OpenAnchor, OpenExtent


@dataclass(frozen=True)
class Anchor:
    """A shelf, by its digest, and which of its extents cover the first `blocks` blocks of a run."""

    shelf: str
    parts: tuple[Anchoring, ...]

    @property
    def blocks(self) -> int:
        """How many blocks of the run it covers, from the first on."""
        return self.parts[-1].at + self.parts[-1].blocks if self.parts else 0

    def until(self, blocks: int) -> Anchor:
        """The same for the first `blocks` blocks alone."""
        parts = [replace(p, blocks=min(p.blocks, blocks - p.at)) for p in self.parts if p.at < blocks]
        return Anchor(self.shelf, tuple(parts))


def find(
    connection: sqlite3.Connection,
    shelf: str,
    codec: str,
    layout: KvLayout,
    keys: Sequence[NodeKey],
    fresh: Fresh,
    without: Container[int] = (),
) -> Anchor | None:
    """What the run of blocks with these keys, on the shelf of that digest, could be a difference from; None: nothing.

    The base model's KV before an adapter's, and of adapters what was there first, unless another covers more.
    """
    best: Anchor | None = None
    for number, digest in anchor_rows.kindred(connection, shelf, codec, layout, keys[0]):
        found = Anchor(digest, _cover(connection, number, keys, fresh, without))
        if found.blocks > (best.blocks if best else 0):
            best = found
    return best


def anchor_of_copy(
    connection: sqlite3.Connection,
    row: Extent,
    plan: ExtentPlan,
    tokens: bytes,
    fresh: Fresh,
    without: Container[int] | None,
) -> Anchor | None:
    """What a copy of an extent's live tokens stands on: the same as before, unless that is about to go."""
    if plan.coding is None or plan.coding.anchor is None or not tokens:
        return None
    keys = chain(plan.parent, tokens)
    if without is None:
        return Anchor(plan.coding.anchor, anchor_rows.of(connection, row.id)).until(len(keys))
    (codec,) = connection.execute("SELECT codec FROM shelves WHERE id=?", (row.shelf,)).fetchone()
    found = find(connection, plan.shelf, codec, plan.layout, keys, fresh, without)
    return found if found is not None and found.blocks == len(keys) else None


def encode(
    database: Database,
    extents: ExtentFiles,
    plan: ExtentPlan,
    layers: Callable[[], Iterable[LayerKv]],
    coder: Coder,
    anchor: Anchor | None,
) -> CodedExtent | None:
    """KV as it will be written; None if it stays as it is, because that is the way, or it cannot be coded.

    Raises as reading does if the anchor cannot be read.
    """
    if anchor is None:
        if coder.whole is None:
            return None
        opened: tuple[OpenAnchor, ...] = ()
    else:
        with database.reading() as connection:
            files = anchor_files(connection, anchor.parts)
        opened = extents.open_anchors(files, plan)
    try:
        return extents.encode(plan, layers(), coder, None if anchor is None else anchor.shelf, opened)
    except ValueError:  # numbers that are not finite
        return None
    finally:
        for part in opened:
            extents.release(part.extent)


def _cover(
    connection: sqlite3.Connection, shelf: int, keys: Sequence[NodeKey], fresh: Fresh, without: Container[int]
) -> tuple[Anchoring, ...]:
    """The extents that hold the first of these blocks, as far as they are whole, may be used, and have no gap."""
    parts: list[Anchoring] = []
    at = 0
    while at < len(keys):
        found = anchor_rows.whole_run(connection, shelf, keys[at:], fresh)
        if found is None or found.anchor in without:
            break
        parts.append(Anchoring(found.anchor, at, found.place, found.blocks))
        at += found.blocks
    return tuple(parts)


def open_extent(
    database: Database, extents: ExtentFiles, row: Extent, shelf_digest: str, *, fresh: bool = False
) -> OpenExtent:
    """An extent, with what it stands on, ready to be read. Release it. Raises `Damaged` or `OSError`."""
    if row.coding == "raw":
        return extents.open(row, shelf_digest, fresh=fresh)
    for last in (False, True):
        with database.reading() as connection:
            stands_on = anchor_files(connection, anchor_rows.of(connection, row.id))
        try:
            return extents.open(row, shelf_digest, stands_on, fresh=fresh)
        except FileNotFoundError:  # what it stands on may have been written anew meanwhile
            if last:
                raise
    raise AssertionError("it was opened, or could not be")


def anchor_files(connection: sqlite3.Connection, parts: Sequence[Anchoring]) -> list[AnchorFile]:
    """The files behind parts of an anchor. Raises `FileNotFoundError` if one is not listed any more."""
    files = []
    for part in parts:
        row = catalog.extent(connection, part.anchor)
        if row is None or row.state != "live" or row.live < part.place + part.blocks:
            raise FileNotFoundError("what it is a difference from was evicted meanwhile")
        (digest,) = connection.execute("SELECT digest FROM shelves WHERE id=?", (row.shelf,)).fetchone()
        files.append(AnchorFile(row, digest, part.at, part.place, part.blocks))
    return files
