"""Variants of chunks under faults: known and right to the bit, or unknown; never a wrong number, never an error."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rekindle.core.chunk import chain_tokens, chunk_digest, nonprefix
from rekindle.core.keys import BLOCK_TOKENS, token_bytes
from rekindle.core.kv import Span
from rekindle.errors import KvLost
from rekindle.store.catalog import catalog
from rekindle.store.check import check
from rekindle.store.disk import CATALOG, Machine
from rekindle.store.files import Files
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NO_MEMORY, REPOSITORY, WITH_MEMORY, copy, flip, prompt
from tests.kvs import KV_SPACE, VariantCounts, keep, load, make_kv, variant_counts
from tests.store.scored import assert_gives, assert_loads, find, is_same, variant

PROMPT = prompt(1, 150)
SPAN = Span(40, 100)
CHUNK = PROMPT[SPAN.start : SPAN.stop]
OTHER = prompt(2, 90)
PART = Span(7, 80)
ALONE = OTHER[PART.start : PART.stop]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prompt, a variant of a part of it, and a non-prefix variant."""
    folder = tmp_path_factory.mktemp("variants") / "cache"
    with TieredStore(folder, NO_MEMORY) as store:
        keep(store, PROMPT)
        store.variants.keep(KV_SPACE, PROMPT, [variant(PROMPT, SPAN, 0.25)])
        store.variants.keep_nonprefix(KV_SPACE, ALONE, make_kv(OTHER, PART), variant(OTHER, PART, 0.5))
        assert variant_counts(store) == VariantCounts(2, 2, 1)
    return folder


def served(store: TieredStore) -> list[bool | None]:
    """For both chunks: True if its variant was served, right to the bit; None if it was found but lost; else False."""
    outcomes: list[bool | None] = []
    for chunk, tokens, span in ((CHUNK, PROMPT, SPAN), (ALONE, OTHER, PART)):
        found = find(store, chunk)
        if not found:
            outcomes.append(False)
            continue
        (known,) = found
        assert is_same(known.variant, variant(tokens, span, known.variant.drift))
        try:
            assert_gives(store, known, make_kv(tokens, span))
            outcomes.append(True)
        except KvLost:
            outcomes.append(None)
    return outcomes


@pytest.mark.parametrize("settings", [NO_MEMORY, WITH_MEMORY], ids=["disk", "memory"])
def test_a_flipped_bit_in_a_variants_blocks_is_found_and_the_extent_quarantined(
    sound: Path, settings: StoreSettings
) -> None:
    folder = copy(sound, "flipped")
    files = sorted((folder / "extents").iterdir())
    rng = random.Random(5)
    for path in files:
        for _ in range(8):
            folder = copy(sound, "flipped")
            target = folder / "extents" / path.name
            flip(target, rng.randrange(target.stat().st_size), rng.randrange(8))
            with TieredStore(folder, settings) as store:
                before = served(store)
                after = served(store)  # what was lost is not found again
                assert None not in after
                assert [was is None for was in before] == [not now for now in after]
                store.maintain()
                assert served(store) == after
                assert store.counts.quarantined == before.count(None)


def test_every_flipped_bit_of_a_row_makes_it_unknown_and_its_row_go(sound: Path) -> None:
    columns = ("parent", "tail", "outside", "received", "earlier", "seal", "digest", "start", "stop", "intra", "drift")
    for column in columns:
        folder = copy(sound, "row")
        with closing(sqlite3.connect(folder / CATALOG)) as connection, connection:
            for id, value in connection.execute(f"SELECT id, {column} FROM variants").fetchall():
                changed = bytes([value[0] ^ 1, *value[1:]]) if isinstance(value, bytes) and value else 0.125
                connection.execute(f"UPDATE variants SET {column}=? WHERE id=?", (changed, id))
        with TieredStore(folder, NO_MEMORY) as store:
            assert served(store) == [False, False], column
            assert store.counts.read_failures == 0
            store.maintain()
            assert load(store, PROMPT) == len(PROMPT)
            assert store.variants.keep(KV_SPACE, PROMPT, [variant(PROMPT, SPAN)]) in (0, 1)
            kv, given = make_kv(OTHER, PART), variant(OTHER, PART, 0.5)
            assert store.variants.keep_nonprefix(KV_SPACE, ALONE, kv, given).outcome == "kept"
            assert served(store) == [True, True], column
            assert check(store.disk).problems == ()


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xff" * 300, "text", "\u00e9" * 40, -1, 2**62, 1e300, float("inf")],
    ids=["nothing", "bytes", "text", "accents", "negative", "huge", "real", "infinite"],
)
def test_garbage_in_any_column_is_unknown_and_raises_nothing(sound: Path, garbage: object) -> None:
    columns = ("parent", "tail", "outside", "received", "earlier", "seal", "start", "stop", "intra", "drift", "used")
    for column in columns:
        folder = copy(sound, "garbage")
        with closing(sqlite3.connect(folder / CATALOG)) as connection, connection:
            connection.execute(f"UPDATE variants SET {column}=?", (garbage,))
        with TieredStore(folder, NO_MEMORY) as store:
            assert served(store) == ([True, True] if column == "used" else [False, False])
            store.maintain()
            assert variant_counts(store).variants <= 2
            assert (store.counts.read_failures, store.counts.write_failures) == (0, 0)
            assert load(store, PROMPT) == len(PROMPT)


def test_text_that_is_none_in_a_column_is_unknown(sound: Path) -> None:
    folder = copy(sound, "text")
    with closing(sqlite3.connect(folder / CATALOG)) as connection, connection:
        connection.execute("UPDATE variants SET outside=CAST(x'ff00fe' AS TEXT), start=CAST(x'ff00fe' AS TEXT)")
    with TieredStore(folder, NO_MEMORY) as store:
        assert served(store) == [False, False] and store.counts.read_failures == 0


def test_any_flipped_bit_of_the_catalog_gives_the_right_numbers_or_none(sound: Path) -> None:
    rng = random.Random(7)
    size = (sound / CATALOG).stat().st_size
    for _ in range(60):
        folder = copy(sound, "catalog")
        flip(folder / CATALOG, rng.randrange(100, size), rng.randrange(8))
        with TieredStore(folder, NO_MEMORY) as store:
            served(store)
            store.maintain()
            served(store)


@pytest.mark.parametrize("step", ["blocks", "rows", "nonprefix"])
def test_killed_between_keeping_blocks_and_listing_variants_leaves_a_sound_folder(tmp_path: Path, step: str) -> None:
    folder = tmp_path / "cache"
    script = f"""
import os, signal
from tests.faults.test_variants import *
from rekindle.store.catalog import variant_rows
step = {step!r}
add = variant_rows.add
def dying(*given):
    if step != "blocks":
        add(*given)
    os.kill(os.getpid(), signal.SIGKILL)
store = TieredStore({str(folder)!r}, NO_MEMORY)
keep(store, PROMPT)
variant_rows.add = dying
if step == "nonprefix":
    store.variants.keep_nonprefix(KV_SPACE, ALONE, make_kv(OTHER, PART), variant(OTHER, PART, 0.5))
store.variants.keep(KV_SPACE, PROMPT, [variant(PROMPT, SPAN)])
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with TieredStore(folder, NO_MEMORY) as store:
        assert served(store) == [False, False]
        assert load(store, PROMPT) == len(PROMPT)
        assert check(store.disk).problems == ()
        assert store.variants.keep(KV_SPACE, PROMPT, [variant(PROMPT, SPAN)]) == 1
        kv, given = make_kv(OTHER, PART), variant(OTHER, PART, 0.5)
        assert store.variants.keep_nonprefix(KV_SPACE, ALONE, kv, given).outcome == "kept"
        assert served(store) == [True, True]


def test_processes_that_keep_the_same_chunks_at_once_agree(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    script = f"""
import sys
from tests.faults.test_variants import *
number = int(sys.argv[1])
with TieredStore({str(folder)!r}, NO_MEMORY) as store:
    for turn in range(12):
        tokens = [*prompt(10 + turn % 3, 20 + turn), *CHUNK]
        span = Span(20 + turn, 80 + turn)
        keep(store, tokens)
        store.variants.keep(KV_SPACE, tokens, [variant(tokens, span)])
        own = [*prompt(100 + number, 30), *ALONE]
        store.variants.keep_nonprefix(KV_SPACE, ALONE, make_kv(own, Span(30, 103)), variant(own, Span(30, 103), number))
        for known in find(store, CHUNK):
            start = known.variant.span.start
            try:
                assert_loads(store, known, [*prompt(10 + (start - 20) % 3, start), *CHUNK])
            except KvLost:
                pass  # the other process removed it
        if turn % 4 == number:
            store.disk.remove(store.disk.entries()[-1:])
        for known in find(store, ALONE):
            try:
                own = [*prompt(100 + int(known.variant.drift), 30), *ALONE]
                assert_gives(store, known, make_kv(own, Span(30, 103)))
            except KvLost:
                pass  # the other process removed it
        store.maintain()
    assert store.counts.write_failures == 0, store.counts
"""
    workers = [
        subprocess.Popen([sys.executable, "-c", script, str(number)], cwd=REPOSITORY, stderr=subprocess.PIPE)
        for number in range(2)
    ]
    for worker in workers:
        _, complaint = worker.communicate(timeout=120)
        assert worker.returncode == 0, complaint.decode()
    with TieredStore(folder, NO_MEMORY) as store:
        assert check(store.disk).problems == ()
        assert len(find(store, ALONE)) <= 2  # one of each process: they came after other text


def test_eviction_under_a_variant_never_gives_wrong_numbers_nor_exceeds_the_limit(tmp_path: Path) -> None:
    limit = 3_000_000
    rng = random.Random(3)
    known_once = 0
    with TieredStore(tmp_path / "cache", StoreSettings(disk_limit=limit, memory_limit=0)) as store:
        for number in range(60):
            tokens = prompt(number % 40, rng.randrange(60, 400))
            keep(store, tokens)
            start = rng.randrange(len(tokens) - 20)
            span = Span(start, rng.randrange(start + 1, len(tokens) + 1))
            store.variants.keep(KV_SPACE, tokens, [variant(tokens, span)])
            if known := find(store, tokens[span.start : span.stop]):
                known_once += 1
                assert_loads(store, known[0], tokens)
            if number % 3 == 0:
                chunk = tokens[span.start : span.stop]
                store.variants.keep_nonprefix(KV_SPACE, chunk, make_kv(tokens, span), variant(tokens, span, 0.5))
            total = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
            assert total <= limit
        assert known_once > 30
        assert check(store.disk).problems == ()


class _Failing(Files):
    """Files that cannot be read or written once `on` is set."""

    on = False

    def _fail(self) -> None:
        if self.on:
            raise OSError(5, "the disk is gone")

    def open(self, path):  # type: ignore[no-untyped-def]
        self._fail()
        return super().open(path)

    def create(self, path):  # type: ignore[no-untyped-def]
        self._fail()
        return super().create(path)


def test_a_store_in_trouble_knows_nothing_and_raises_nothing_but_kv_lost(sound: Path) -> None:
    folder = copy(sound, "trouble")
    files = _Failing()
    with TieredStore(folder, NO_MEMORY, Machine(files=files, write_timeout_seconds=0.05)) as store:
        (known,) = find(store, CHUNK)
        files.on = True
        with pytest.raises(KvLost):
            store.variants.load(KV_SPACE, known)
        other = prompt(3, 50)
        kept = store.variants.keep_nonprefix(KV_SPACE, other, make_kv(other, Span(0, 50)), variant(other, Span(0, 50)))
        assert kept.outcome == "failed" and find(store, other) == []
        files.on = False
        assert served(store) == [True, True]
        with closing(sqlite3.connect(folder / CATALOG, isolation_level=None)) as holder:
            holder.execute("BEGIN IMMEDIATE")
            assert store.variants.keep(KV_SPACE, PROMPT, [variant(PROMPT, Span(0, 9))]) == 0
            store.variants.record_use(known, 0.5)
            store.maintain()
            assert served(store) == [True, True]
            holder.execute("ROLLBACK")
        store.maintain()
        assert find(store, CHUNK)[0].frequency == 2.0


def test_kv_in_the_place_of_another_is_not_served(sound: Path) -> None:
    """The catalog is made to say that a variant's KV is where another prompt's is."""
    folder = copy(sound, "swapped")
    with TieredStore(folder, NO_MEMORY) as store:
        keep(store, [*prompt(5, 40), *CHUNK, *prompt(6, 50)])
    with closing(sqlite3.connect(folder / CATALOG)) as connection, connection:
        first, second = (
            connection.execute("SELECT extent FROM blocks WHERE tokens=?", (tokens,)).fetchone()[0]
            for tokens in _first_blocks(PROMPT, prompt(5, 40))
        )
        name, size, digest = connection.execute(
            "SELECT name, bytes, digest FROM extents WHERE id=?", (second,)
        ).fetchone()
        connection.execute("UPDATE extents SET name='x' WHERE id=?", (second,))
        connection.execute("UPDATE extents SET name=?, bytes=?, digest=? WHERE id=?", (name, size, digest, first))
    with TieredStore(folder, NO_MEMORY) as store:
        assert served(store)[0] is None
        assert served(store)[0] is False


def _first_blocks(*prompts: list[int]) -> list[bytes]:
    return [token_bytes(tokens[:BLOCK_TOKENS]) for tokens in prompts]


def test_a_folder_that_can_only_be_read_serves_variants_and_lists_none(sound: Path, monkeypatch) -> None:
    folder = copy(sound, "read-only")
    access: Callable[..., bool] = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    with TieredStore(folder, NO_MEMORY) as store:
        assert store.disk.database.read_only
        assert served(store) == [True, True]
        assert store.variants.keep(KV_SPACE, PROMPT, [variant(PROMPT, Span(0, 9))]) == 0
        kept = store.variants.keep_nonprefix(KV_SPACE, CHUNK, make_kv(PROMPT, SPAN), variant(PROMPT, SPAN))
        assert kept.outcome == "failed"
        store.maintain()
        assert find(store, PROMPT[:9]) == []


def test_other_tokens_under_the_same_digest_are_given_no_kv(sound: Path) -> None:
    with TieredStore(copy(sound, "collision"), NO_MEMORY) as store:
        other = token_bytes([5, *CHUNK[1:]])
        (known,) = store.variants.find(KV_SPACE, {chunk_digest(CHUNK): other})[chunk_digest(CHUNK)]
        with pytest.raises(KvLost):
            store.variants.load(KV_SPACE, known)


@pytest.mark.parametrize("depth", [-1, 1, 100])
def test_an_extent_that_is_said_to_stand_elsewhere_makes_its_variants_unknown(sound: Path, depth: int) -> None:
    folder = copy(sound, "depth")
    with closing(sqlite3.connect(folder / CATALOG)) as connection, connection:
        connection.execute("UPDATE extents SET depth=?", (depth,))
    with TieredStore(folder, NO_MEMORY) as store:
        assert served(store) == [False, False] and store.counts.read_failures == 0


def test_nonprefix_kv_of_two_computations_is_not_taken_for_one(sound: Path) -> None:
    with TieredStore(copy(sound, "mixed"), NO_MEMORY) as store:
        chain = np.frombuffer(chain_tokens(variant(OTHER, PART, 0.5), token_bytes(ALONE)), "<u4").tolist()
        match = store.lookup(nonprefix(KV_SPACE), chain)
        assert match.length == len(chain)
        with store.disk.database.writing() as connection:
            catalog.cut(connection, match.pieces[0].extent, 1)
        assert keep(store, chain, nonprefix(KV_SPACE)).outcome == "kept"  # as an import of old could
        assert store.lookup(nonprefix(KV_SPACE), chain).length == len(chain)
        assert find(store, ALONE) == []
