"""Removing every trace of runs of tokens from a cache folder: rows, KV, history, and what deleting leaves behind.

    chains     every block that has a token of a run goes, with its descendants      rows, a chunk at a time
    nonprefix  all non-prefix KV goes, and all opaque states: they do not record what they were computed after
    files      extents that lost blocks, now or earlier, are rewritten without them, or dropped if that fails
    keys       seen keys and fingerprints of those KV spaces go: with a text one could test whether it was there
    history    requests that had a run, or quote a text, are removed
    catalog    rewritten, its log emptied: pages keep copies of removed rows

Every step leaves the folder consistent and needs no memory of the steps before: after a crash, run it all again.
Readers find less meanwhile, never anything wrong.

`clear` removes everything; `remove_traces` removes what deleting leaves behind (unlisted files, unreferenced rows, old
pages and log), and returns when that is on the medium: power loss brings nothing back.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from rekindle.core.keys import BLOCK_TOKENS, TOKEN_BYTES, parse_layout
from rekindle.errors import CacheUnusable
from rekindle.store.catalog import app_rows, catalog, variant_rows
from rekindle.store.delta_base import reaching
from rekindle.store.disk import DiskStore
from rekindle.store.evict import blocks_a_transaction
from rekindle.store.extents import SUFFIX, Damaged
from rekindle.store.folder import EXTENTS
from rekindle.store.limits import Refused
from rekindle.store.prefix_index import BlockRef
from rekindle.store.purge_search import Chains, ExtentTokens, Segment, Snippets, TokenRun, TokenRuns

_WAIT_SECONDS, _PAUSE_SECONDS = 30.0, 0.02  # for a keep that is under way
_TABLES = ("requests", "identities", "apps", "app_uses", "seen_keys", "fingerprints", "bytes_written")


def clear(disk: DiskStore) -> int:
    """Remove everything that was stored when it was called, pinned or not; returns the number of files.

    What other processes keep meanwhile stays, unless it continues something removed. Raises `CacheUnusable` if it
    cannot be finished; what was done stays done, and running it again does the rest.

    Removing rows needs room for a log. On a full disk files go before their rows, which are misses then, and the
    catalog goes too if that is not enough.
    """
    count = 0
    for make_room in (None, partial(_remove_files, disk), disk.database.remove):
        try:
            count = count or len(disk.entries())
            if make_room is not None:
                make_room()
            return max(count, _clear(disk))
        except (CacheUnusable, OSError) as error:
            if not _is_full(disk, error):
                raise
    return count


def _is_full(disk: DiskStore, error: Exception) -> bool:
    reason = error.__cause__ or error
    no_space = isinstance(reason, OSError) and reason.errno in (errno.ENOSPC, errno.EDQUOT)
    return no_space or "disk is full" in str(reason) or not disk.files.has_room(disk.folder)


def _remove_files(disk: DiskStore) -> None:
    """Remove the files of all extents, but for those that are being written."""
    with disk.database.reading() as connection:
        writing = {f"{row.name}{SUFFIX}" for row in catalog.extents(connection, "state='writing'")}
    for name in disk.place.own_files(EXTENTS):
        if name not in writing:
            disk.place.remove(EXTENTS, name)


def _clear(disk: DiskStore) -> int:
    with removing(disk):
        started, going = disk.clock(), disk.entries()
        with disk.database.reading() as connection:
            (last,) = connection.execute("SELECT coalesce(max(id), 0) FROM extents").fetchone()
        disk.room.cut_all(going)
        writing = being_written(disk)  # computed before, or a copy of what was removed: later ones are not
        await_writers(lambda: writing & being_written(disk))
        late = [row for row in disk.entries() if row.id in writing or row.kept <= started]
        disk.room.cut_all(late)
        variant_rows.sweep(disk.database)
        with disk.database.writing() as connection:
            for table in _TABLES:
                connection.execute(f"DELETE FROM {table}")
            connection.execute("UPDATE totals SET cleared=?", (disk.clock(),))
            catalog.pin(connection, (), pinned=True)
        going_ids = {row.id for row in late} | writing
        remove_traces(disk, lambda row: row.id <= last or row.id in going_ids)
        return len(going) + len(late)


@contextmanager
def removing(disk: DiskStore) -> Iterator[None]:
    """Raises `CacheUnusable` for a folder that can only be read, and in place of what the system or SQLite raise."""
    disk.database.refuse_read_only()
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise CacheUnusable(f"Not everything could be removed from {disk.folder}: {error}. Run it again.") from error


def being_written(disk: DiskStore, kv_spaces: Container[int] | None = None) -> set[int]:
    """The extents, of these KV spaces or of all, that living processes are writing."""
    disk.room.recover()
    with disk.database.reading() as connection:
        rows = catalog.extents(connection, "state='writing' AND state<>'live'")
    return {row.id for row in rows if kv_spaces is None or row.kv_space in kv_spaces}


def await_writers(writing: Callable[[], Set[int]]) -> None:
    """Wait until `writing` returns nothing. Raises `CacheUnusable` if that takes too long."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while writing():
        if time.monotonic() > deadline:
            raise CacheUnusable("Another process has been writing to the cache for too long. Run it again.")
        time.sleep(_PAUSE_SECONDS)


def remove_traces(disk: DiskStore, must_go: Callable[[catalog.Extent], bool]) -> None:
    """Remove from files and catalog what removed extents and rows left there.

    Raises `CacheUnusable` if the file of an extent that must go cannot be removed now, or the log cannot be emptied.
    """
    room, database = disk.room, disk.database
    room.recover()
    room.sweep()
    room.remove_strays()
    with database.writing() as connection:
        catalog.sweep_kv_spaces(connection)
        app_rows.sweep(connection)
    longer = database.size_bytes() - database.log_limit_bytes
    if longer > 0:  # than the log's limit allows for anyway
        room.hold_limit(spare_bytes=longer)
    disk.files.sync_folder(disk.extents.folder)  # also for removals of others that were not synced
    database.scrub()
    with database.reading() as connection:
        left = catalog.extents(connection, "state IN ('dropping', 'quarantined') AND state<>'live'")
    if any(map(must_go, left)):
        raise CacheUnusable(
            f"Files of {disk.folder} cannot be removed: perhaps another process has them open. "
            "Run it again when that process is done."
        )


__all__ = ["Purged", "TokenRun", "purge"]

_BLOCKS_A_CHUNK = 16_384
_FILES_A_CHUNK = 256
_ATTEMPTS = 3  # to rewrite what others change
_ROUNDS = 20  # of checking what others kept meanwhile

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Purged:
    """What was removed: blocks, the files they were in (removed or rewritten), their bytes, and past requests."""

    blocks: int
    extents: int
    bytes: int
    requests: int


def purge(
    disk: DiskStore,
    tenant: str,
    salt: str,
    runs: Sequence[TokenRun],
    *,
    texts: Sequence[str] = (),
    progress: Progress | None = None,
) -> Purged:
    """Remove every trace of the runs from all KV spaces of that tenant and salt, and past requests that quote a text.

    A block goes if it has a token of a run, wherever the run is, also if only its first eight tokens or more are there
    because the stored chain ends before the run does. Its descendants go with it, pinned or not, and all non-prefix KV,
    which may have been computed after it. Variants go with their blocks, and all fingerprints of those KV spaces go.
    Earlier blocks stay, unless their file cannot be read, or cannot be rewritten without space or the key: then the
    whole file goes. A run counts in KV spaces of its tokenizer, and where the tokenizer was not recorded.

    The catalog briefly takes twice its size. Raises `CacheUnusable` if it cannot be finished, with what to do; what was
    done stays done, and running it again does the rest.
    """
    if not runs and not texts:
        return Purged(0, 0, 0, 0)
    with removing(disk):
        return _Purge(disk, tenant, salt, runs, progress).run(texts)


@dataclass(frozen=True)
class _Group:
    """KV spaces, by number with their digests, with the same runs to remove."""

    runs: TokenRuns
    kv_spaces: dict[int, str]


@dataclass(frozen=True)
class _TokenPlace:
    """A token: `start` tokens after the beginning of an extent, or before it if negative."""

    stretch: ExtentTokens
    start: int

    def spot(self, connection: sqlite3.Connection, chains: Chains) -> BlockRef | None:
        """The block that has it; None if it was removed."""
        if self.start >= 0:
            return BlockRef(self.stretch.extent, self.start // BLOCK_TOKENS)
        return chains.above(connection, self.stretch, -(self.start // BLOCK_TOKENS))


class _Purge:
    """One purge: what it processes, and what it has removed so far."""

    def __init__(
        self, disk: DiskStore, tenant: str, salt: str, runs: Sequence[TokenRun], progress: Progress | None
    ) -> None:
        self._disk = disk
        self._database = disk.database
        self._room = disk.room
        self._progress = progress
        self._groups = self._group(tenant, salt, runs)
        self._blocks = self._bytes = 0
        self._names: set[str] = set()  # of removed files
        self._shorter: set[int] = set()  # extents that lost their last blocks
        self._done = self._total = 0

    def run(self, texts: Sequence[str]) -> Purged:
        self._room.recover()
        self._room.sweep()
        groups = [group for group in self._groups if group.runs]
        with self._database.scanning() as connection:
            self._total = sum(Chains(list(group.kv_spaces)).count(connection) for group in groups)
        for group in groups:
            self._purge_chains(group)
            self._purge_nonprefix(group)
            for row in self._holding(group):
                self._rewrite(row, group.kv_spaces[row.kv_space])
        requests = self._purge_requests(Snippets(texts))
        kv_spaces = {kv_space for group in self._groups for kv_space in group.kv_spaces}
        with self._database.writing() as connection:
            catalog.pin(connection, (), pinned=True)
            # A key reveals nothing by itself, but with a text one can test whether it was asked.
            for table in ("seen_keys", "fingerprints"):
                connection.executemany(f"DELETE FROM {table} WHERE kv_space=?", [(kv_space,) for kv_space in kv_spaces])
        variant_rows.sweep(self._database)
        remove_traces(self._disk, lambda row: row.kv_space in kv_spaces)
        return Purged(self._blocks, len(self._names), self._bytes, requests)

    def _group(self, tenant: str, salt: str, runs: Sequence[TokenRun]) -> list[_Group]:
        select = (
            "SELECT s.id, s.digest, i.fields FROM kv_spaces s LEFT JOIN identities i ON i.digest=s.identity "
            "WHERE s.tenant=? AND s.salt=?"
        )
        with self._database.reading() as connection:
            rows = connection.execute(select, (tenant, salt)).fetchall()
        kv_spaces: dict[str | None, dict[int, str]] = {}
        for id, digest, fields in rows:
            kv_spaces.setdefault(_tokenizer(fields), {})[id] = digest
        return [
            _Group(TokenRuns(run.tokens for run in runs if tokenizer in (None, run.tokenizer)), found)
            for tokenizer, found in kv_spaces.items()
        ]

    # -- chains ----------------------------------------------------------------------------------------------------

    def _purge_chains(self, group: _Group) -> None:
        """Cut every chain before its first run; then check what others were keeping, until nobody is."""
        chains = Chains(list(group.kv_spaces))
        last = 0
        for _ in range(_ROUNDS):
            while stretches := self._cut_next(chains, group, last):
                last = stretches[-1].extent
                self._done += sum(-(-len(s.tokens) // (BLOCK_TOKENS * TOKEN_BYTES)) for s in stretches)
                if self._progress is not None:
                    self._total = max(self._total, self._done)
                    self._progress(self._done, self._total)
            writing = being_written(self._disk, group.kv_spaces)
            if not writing:
                return
            await_writers(partial(self._still_written, group, writing))
            last = min(writing) - 1

    def _cut_next(self, chains: Chains, group: _Group, last: int) -> Sequence[ExtentTokens]:
        """Cut the next chains and return them."""
        with self._database.scanning() as connection:
            stretches = chains.after(connection, last, _BLOCKS_A_CHUNK)
            found, below = self._find(connection, chains, group.runs, stretches)
        while found:
            for row in below:
                self._blocks += row.live
                self._count_file(row)
            self._shorten(chains, group, found)
            self._room.cut_all(below)
            shorter = self._cut(chains, found)
            self._room.sweep()
            with self._database.scanning() as connection:  # where they end now, another run may begin
                again = [chains.read(connection, id, fresh=True) for id in shorter]
                found, below = self._find(connection, chains, group.runs, [one for one in again if one is not None])
        return stretches

    def _find(
        self, connection: sqlite3.Connection, chains: Chains, runs: TokenRuns, stretches: Sequence[ExtentTokens]
    ) -> tuple[list[_TokenPlace], list[catalog.Extent]]:
        """Where the first runs in stretches begin, and the extents that continue those places."""
        segments = []
        for stretch in stretches:
            before = chains.before(connection, stretch, runs.longest - 1)
            segments.append(Segment(before + stretch.tokens, len(before) // TOKEN_BYTES))
        found = [
            _TokenPlace(stretch, start - segment.own)
            for stretch, segment, start in zip(stretches, segments, runs.first(segments), strict=True)
            if start is not None
        ]
        return found, self._below(connection, filter(None, [place.spot(connection, chains) for place in found]))

    def _below(self, connection: sqlite3.Connection, spots: Iterator[BlockRef]) -> list[catalog.Extent]:
        """The extents that continue these blocks or later ones, the deepest first, which keeps transactions short."""
        todo = deque((spot.extent, spot.place) for spot in spots)
        found: dict[int, None] = {}
        while todo:
            children = connection.execute(
                "SELECT DISTINCT c.extent FROM blocks b JOIN blocks c ON c.parent=b.key AND c.kv_space=b.kv_space "
                "WHERE b.extent=? AND b.place>=? AND c.extent<>b.extent",
                todo.popleft(),
            ).fetchall()
            new = [id for (id,) in children if id not in found]
            found.update(dict.fromkeys(new))
            todo.extend((id, 0) for id in new)
        return [row for id in reversed(found) if (row := catalog.extent(connection, id)) is not None]

    def _shorten(self, chains: Chains, group: _Group, found: Sequence[_TokenPlace]) -> None:
        """Remove the runs from deltas of blocks that are about to go: otherwise the whole deltas would go too."""
        with self._database.scanning() as connection:
            spots = [spot for place in found if (spot := place.spot(connection, chains)) is not None]
            first: dict[int, int] = {}  # of each delta, the first block that goes
            for spot in spots:
                for id, place in reaching(connection, spot.extent, spot.place).items():
                    first[id] = min(place, first.get(id, place))
        for id, place in first.items():
            if place == 0:
                continue  # it goes too
            with self._database.writing() as connection:
                row = catalog.extent(connection, id)
                if row is None or row.state != "live" or row.kv_space not in group.kv_spaces:
                    continue
                if row.live > place:
                    catalog.cut(connection, id, place)
                    self._blocks += row.live - place
            self._rewrite(row, group.kv_spaces[row.kv_space])

    def _cut(self, chains: Chains, found: Sequence[_TokenPlace]) -> set[int]:
        """Cut where runs begin, as the rows are now: what moved to another extent meanwhile is cut later.

        Returns the extents that became shorter.
        """
        shorter: set[int] = set()
        todo = deque(found)
        while todo:
            blocks = blocks_a_transaction(self._database)
            with self._database.writing() as connection:
                while todo and blocks > 0:
                    spot = todo.popleft().spot(connection, chains)
                    row = None if spot is None else catalog.extent(connection, spot.extent)
                    if spot is None or row is None or row.live <= spot.place:
                        continue
                    catalog.cut(connection, row.id, spot.place)
                    self._blocks += row.live - spot.place
                    blocks -= row.live - spot.place
                    if spot.place == 0:
                        self._count_file(row)
                    else:
                        shorter.add(row.id)
        self._shorter |= shorter
        return shorter

    def _still_written(self, group: _Group, ids: set[int]) -> set[int]:
        return ids & being_written(self._disk, group.kv_spaces)

    def _purge_nonprefix(self, group: _Group) -> None:
        with self._database.scanning() as connection:
            kv_spaces = (
                variant_rows.nonprefix_kv_spaces(connection) | _state_kv_spaces(connection)
            ) & group.kv_spaces.keys()
            rows = [row for row in catalog.extents(connection, "state='live'") if row.kv_space in kv_spaces]
        for row in rows:
            self._blocks += row.live
            self._count_file(row)
        self._room.cut_all(rows)

    # -- files -----------------------------------------------------------------------------------------------------

    def _holding(self, group: _Group) -> list[catalog.Extent]:
        """The extents whose files still hold a run after their live blocks, or cannot be read there."""
        chains = Chains(list(group.kv_spaces))
        with self._database.scanning() as connection:
            rows = catalog.extents(connection, "state='live' AND live<blocks ORDER BY id")
        rows = [row for row in rows if row.kv_space in group.kv_spaces]
        holding: list[catalog.Extent] = []
        for first in range(0, len(rows), _FILES_A_CHUNK):
            looked_at, segments = [], []
            for row in rows[first : first + _FILES_A_CHUNK]:
                segment = None if row.id in self._shorter else self._behind(chains, row, group.runs)
                if segment is None:
                    holding.append(row)
                else:
                    looked_at.append(row)
                    segments.append(segment)
            found = group.runs.first(segments)
            holding += [row for row, start in zip(looked_at, found, strict=True) if start is not None]
        return holding

    def _behind(self, chains: Chains, row: catalog.Extent, runs: TokenRuns) -> Segment | None:
        """The tokens in an extent's file after its live blocks; None if they are unknown."""
        with self._database.scanning() as connection:
            stretch = chains.read(connection, row.id)
            if stretch is None:
                return Segment(b"", 0)  # it was removed meanwhile
            before = chains.before(connection, stretch, runs.longest - 1)
        try:
            tokens = self._disk.extents.tokens(row)
        except (OSError, Damaged):
            return None
        if not tokens.startswith(stretch.tokens):
            return None
        return Segment(before + tokens, (len(before) + len(stretch.tokens)) // TOKEN_BYTES)

    def _rewrite(self, row: catalog.Extent, kv_space_digest: str) -> None:
        """Rewrite an extent without the blocks that are not live; drop it if that fails."""
        with self._database.scanning() as connection:
            key = connection.execute("SELECT key FROM blocks WHERE extent=? AND place=0", (row.id,)).fetchone()
        own_key = kv_space_digest.endswith(f":{self._disk.digester.name}")
        if not own_key or not any(self._is_rewritten(row, kv_space_digest) for _ in range(_ATTEMPTS)):
            self._room.cut_all([row])
        select = "SELECT e.bytes FROM blocks b JOIN extents e ON e.id=b.extent WHERE b.key=? AND b.kv_space=?"
        with self._database.scanning() as connection:
            left = None if key is None else connection.execute(select, (*key, row.kv_space)).fetchone()
        self._count_file(row, 0 if left is None else left[0])

    def _is_rewritten(self, row: catalog.Extent, kv_space_digest: str) -> bool:
        """Try once; True also if there is nothing left to rewrite."""
        with self._database.scanning() as connection:
            now = catalog.extent(connection, row.id)
        if now is None or now.name != row.name or now.state != "live":
            return True
        try:
            return self._room.rewrite(now, kv_space_digest, evict=True)
        except Refused:
            return False  # no space, or it changed meanwhile

    def _count_file(self, row: catalog.Extent, left_bytes: int = 0) -> None:
        self._names.add(row.name)
        self._bytes += row.size_bytes - left_bytes

    # -- history ---------------------------------------------------------------------------------------------------

    def _purge_requests(self, snippets: Snippets) -> int:
        """Remove the past requests that had a run or quote a text; returns how many."""
        runs = {kv_space: group.runs for group in self._groups for kv_space in group.kv_spaces}
        with self._database.writing() as connection:  # after any writer that saw the text and is about to record it
            rows = connection.execute("SELECT id, kv_space, tokens, record FROM requests").fetchall()
            rows = [row for row in rows if row[1] in runs]
            quoted = snippets.quoted([row[3] for row in rows])
            ids = [
                (id,)
                for (id, kv_space, tokens, _), quotes in zip(rows, quoted, strict=True)
                if quotes or tokens in runs[kv_space]
            ]
            connection.executemany("DELETE FROM requests WHERE id=?", ids)
        return len(ids)


def _tokenizer(fields: str | None) -> str | None:
    """The tokenizer among the fields of an identity; None if they were not recorded, or are damaged."""
    try:
        found = None if fields is None else json.loads(fields)["tokenizer"]
    except (ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _state_kv_spaces(connection: sqlite3.Connection) -> set[int]:
    """The numbers of all KV spaces that hold opaque states of models: these are found by name, not by tokens."""
    states = set()
    for id, text in connection.execute("SELECT id, layout FROM kv_spaces").fetchall():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged row, from which nothing can be loaded
            layout = parse_layout(text)
            if layout.dtype == "uint8" and len(layout.layers) == 1:
                states.add(id)
    return states
