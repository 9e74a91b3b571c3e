"""Damaged extent files: what they hold is computed again, never served wrong, and the folder heals."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rekindle.codec.digest import PlainDigester
from rekindle.codec.extent import ExtentHeader, digest_layer, header_length, parse_header
from rekindle.core.keys import BLOCK_TOKENS
from rekindle.core.kv import LayerKv, Span
from rekindle.errors import KvLost
from rekindle.store.check import check
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import (
    NO_MEMORY,
    WITH_MEMORY,
    copy,
    extent_of,
    fill,
    flip,
    heals,
    load_or_lose,
    problems,
    prompt,
)
from tests.kvs import KV_SPACE, SMALL, keep, load, make_kv

VICTIM, OTHER, LONGER = prompt(1, 96), prompt(2, 96), prompt(1, 150)
KEY = b"a secret of at least 16 bytes"
KEYED = StoreSettings(disk_limit="50MB", memory_limit=0, key=KEY)

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two prompts, the first in two extents. Do not change it: copy it."""
    folder = tmp_path_factory.mktemp("files") / "sound"
    fill(folder, [VICTIM, OTHER, LONGER])
    return folder


@pytest.fixture(scope="module")
def header(sound: Path) -> ExtentHeader:
    """The header of the first extent."""
    return parse_header(_header_bytes(extent_of(sound, VICTIM)))


def _header_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return data[: header_length(data, len(data))]


def _expect_healing(sound: Path, damage: Damage, settings: StoreSettings = NO_MEMORY) -> None:
    """Damage a copy's first extent: it is lost or right, found by a check, and repaired both ways."""
    folder = copy(sound, "served")
    damage(extent_of(folder, VICTIM))
    with TieredStore(folder, settings) as store:
        assert heals(store, LONGER), "the damage was not noticed"
        assert load(store, OTHER) == len(OTHER)
        store.disk.collect()
        assert check(store.disk).problems == ()
    folder = copy(sound, "checked")
    damage(extent_of(folder, VICTIM))
    assert problems(folder, fix=True) != ()
    assert problems(folder) == ()
    with TieredStore(folder, settings) as store:
        assert load(store, LONGER) == 0
        assert load(store, OTHER) == len(OTHER)
        assert keep(store, LONGER).outcome == "kept"
        assert load(store, LONGER) == len(LONGER)


def _truncate(size: int) -> Damage:
    return lambda path: os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def _flip_last(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _swap(path: Path) -> None:
    """Exchange a file with that of another prompt, of the same length."""
    other = extent_of(path.parents[1], OTHER)
    assert other.stat().st_size == path.stat().st_size
    aside = path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _stale(path: Path) -> None:
    """Put what an older extent of the very same tokens held under the new name."""
    older = path.read_bytes()
    with TieredStore(path.parents[1], NO_MEMORY) as store:
        store.disk.remove(store.disk.entries([path.stem]))
        assert [keep(store, tokens).outcome for tokens in (VICTIM, LONGER)] == ["kept", "kept"]
    newer = extent_of(path.parents[1], VICTIM)
    assert newer != path and newer.stat().st_size == len(older)
    newer.write_bytes(older)


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("foreign")


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1000, -1, -2, -100, -1000])
def test_a_truncated_file_is_recomputed_not_served(sound: Path, size: int) -> None:
    _expect_healing(sound, _truncate(size))


@pytest.mark.parametrize(
    "damage", [_append, _stale, Path.unlink, lambda path: path.write_bytes(os.urandom(path.stat().st_size))]
)
def test_a_file_longer_stale_missing_or_random_is_recomputed_not_served(sound: Path, damage: Damage) -> None:
    _expect_healing(sound, damage)


def test_files_swapped_with_each_other_are_both_recomputed_not_served(sound: Path) -> None:
    folder = copy(sound, "swapped")
    _swap(extent_of(folder, VICTIM))
    damaged = {problem.entry for problem in problems(folder) if problem.kind == "damaged"}
    assert len(damaged) == 2
    with TieredStore(folder, NO_MEMORY) as store:
        assert heals(store, LONGER)
        assert heals(store, OTHER)
    problems(folder, fix=True)
    assert problems(folder) == ()


def test_a_folder_in_place_of_a_file_is_recomputed_not_served(sound: Path) -> None:
    _expect_healing(sound, _folder_instead)


def test_a_link_in_place_of_a_file_that_leads_nowhere_is_recomputed_not_served(sound: Path) -> None:
    _expect_healing(sound, _link_to_itself)


def test_a_folder_in_place_of_a_file_does_not_stop_eviction(tmp_path: Path) -> None:
    settings = StoreSettings(disk_limit=(2 << 20) + 700_000, memory_limit=0)
    with TieredStore(tmp_path / "cache", settings) as store:
        assert keep(store, prompt(1)).outcome == "kept"
        (row,) = store.disk.entries()
        _folder_instead(store.disk.extents.path(row.name))
        assert load_or_lose(store, prompt(1)) is None
        outcomes = {keep(store, prompt(number, 1000)).outcome for number in range(2, 14)}
        assert outcomes == {"kept"}
        assert load(store, prompt(13, 1000)) == 1000


def test_every_flipped_bit_of_a_header_is_noticed(sound: Path, header: ExtentHeader) -> None:
    folder = copy(sound, "header")
    path = extent_of(folder, VICTIM)
    text = _header_bytes(path)
    fields = [
        text.index(word) for word in (b'"tokens":"', b'"digests":"', b'"parent":"', b'"layout":"', b'"kv_space":"')
    ]
    places = sorted({*range(8), *range(8, len(text), 11), *(start + 14 for start in fields), len(text) - 1})
    assert len(text) == header.plan.header_bytes
    rows = sqlite3.connect(folder / "catalog.sqlite")
    pristine = rows.execute("SELECT * FROM blocks").fetchall(), rows.execute("SELECT * FROM extents").fetchall()
    rows.close()
    for number, offset in enumerate(places):
        _lost_once(folder, path, offset, number % 8)
    rows = sqlite3.connect(folder / "catalog.sqlite")
    assert pristine == (
        rows.execute("SELECT * FROM blocks").fetchall(),
        rows.execute("SELECT * FROM extents").fetchall(),
    )
    rows.close()


def _lost_once(folder: Path, path: Path, offset: int, bit: int) -> None:
    """Flip a bit: the file's prompt is lost, the other is served. Then everything is as before."""
    catalog = (folder / "catalog.sqlite").read_bytes()
    data = path.read_bytes()
    flip(path, offset, bit)
    with TieredStore(folder, NO_MEMORY) as store:
        assert [problem.entry for problem in check(store.disk).problems] == [path.stem], f"byte {offset}"
        assert load_or_lose(store, VICTIM) is None, f"byte {offset}, bit {bit} was served"
        assert store.lookup(KV_SPACE, VICTIM).length == 0
        assert load(store, OTHER) == len(OTHER)
        assert store.counts.quarantined == 1
    path.write_bytes(data)
    (folder / "catalog.sqlite").write_bytes(catalog)


def test_a_bit_flipped_anywhere_in_the_numbers_is_recomputed_not_served(sound: Path, header: ExtentHeader) -> None:
    folder = copy(sound, "numbers")
    path = extent_of(folder, VICTIM)
    plan = header.plan
    starts = [plan.start(layer, half) for layer in range(len(SMALL.layers)) for half in ("keys", "values")]
    assert plan.file_bytes == path.stat().st_size
    ends = [*starts[1:], plan.file_bytes]
    for number, (start, stop) in enumerate(zip(starts, ends, strict=True)):
        for place in (start, (start + stop) // 2, stop - 1):
            _lost_once(folder, path, place, (3 * number + place) % 8)


def test_a_flipped_bit_is_noticed_by_all_who_read_its_block_and_by_none_who_read_far_less(
    sound: Path, header: ExtentHeader
) -> None:
    """Whoever reads most of an extent checks all of it."""
    folder = copy(sound, "blocks")
    path = extent_of(folder, VICTIM)
    plan = header.plan
    for block in range(plan.blocks):
        catalog, data = (folder / "catalog.sqlite").read_bytes(), path.read_bytes()
        flip(path, plan.start(1, "values") + plan.row_bytes(1, "values", block * BLOCK_TOKENS) + 1)
        with TieredStore(folder, NO_MEMORY) as store:
            for count in range(1, len(VICTIM) + 1, 7):
                tokens = VICTIM[:count]
                reads_it = count > block * BLOCK_TOKENS
                reads_little = not reads_it and 3 * count < plan.token_count
                loaded = load_or_lose(store, tokens)
                assert loaded == count or not reads_little
                assert loaded is None or not reads_it
                if loaded is None:
                    break
            else:
                raise AssertionError("the block was never read")
        path.write_bytes(data)
        (folder / "catalog.sqlite").write_bytes(catalog)


@pytest.mark.parametrize("damage", [_truncate(100), _append, _swap, Path.unlink, _flip_last])
def test_what_memory_holds_stays_right_while_its_file_is_damaged(sound: Path, damage: Damage) -> None:
    folder = copy(sound, "memory")
    path = extent_of(folder, VICTIM)
    with TieredStore(folder, WITH_MEMORY) as store:
        assert load(store, LONGER) == len(LONGER)
        store.maintain()
        assert len(store.memory) == 2
        damage(path)
        assert load(store, LONGER) == len(LONGER), "it is in memory, whole"
    with TieredStore(folder, WITH_MEMORY) as store:
        assert heals(store, LONGER)
        store.maintain()
        assert load(store, LONGER) == len(LONGER)


def test_a_file_damaged_between_reading_and_holding_never_enters_memory(sound: Path) -> None:
    folder = copy(sound, "held")
    with TieredStore(folder, WITH_MEMORY) as store:
        assert load(store, VICTIM) == len(VICTIM)
        _flip_last(extent_of(folder, VICTIM))
        store.maintain()
        assert load_or_lose(store, VICTIM) in (0, None, len(VICTIM))
        store.maintain()
        assert load(store, VICTIM) in (0, len(VICTIM))


def test_a_file_cut_or_changed_after_it_was_opened_is_lost_not_served(sound: Path) -> None:
    for damage in (_truncate(100), lambda path: path.write_bytes(bytes(path.stat().st_size))):
        folder = copy(sound, "opened")
        with TieredStore(folder, NO_MEMORY) as store:
            match = store.lookup(KV_SPACE, VICTIM)
            with store.load(KV_SPACE, match) as feed:
                damage(extent_of(folder, VICTIM))
                with pytest.raises(KvLost):
                    for layer in feed.layers:
                        feed.fill(layer, make_kv(VICTIM, Span(0, len(VICTIM))).layers[layer])
            assert store.lookup(KV_SPACE, VICTIM).length == 0


def test_a_file_removed_after_it_was_opened_is_still_served(sound: Path) -> None:
    folder = copy(sound, "removed")
    with TieredStore(folder, NO_MEMORY) as store:
        match = store.lookup(KV_SPACE, VICTIM)
        right = make_kv(VICTIM, Span(0, len(VICTIM)))
        with store.load(KV_SPACE, match) as feed:
            extent_of(folder, VICTIM).unlink()
            for layer in feed.layers:
                shape = SMALL.layers[layer]
                out = LayerKv(
                    np.zeros((shape.kv_heads, len(VICTIM), shape.key_dim), np.float16),
                    np.zeros((shape.kv_heads, len(VICTIM), shape.value_dim), np.float16),
                )
                feed.fill(layer, out)
                assert np.array_equal(out.keys, right.layers[layer].keys)
                assert np.array_equal(out.values, right.layers[layer].values)


def test_a_file_of_ours_that_no_entry_names_is_reported_and_fixed(sound: Path) -> None:
    folder = copy(sound, "stray")
    (folder / "extents" / "0123456789abcdef.kv").write_bytes(b"junk")
    assert [(problem.kind, problem.entry) for problem in problems(folder)] == [("stray", "0123456789abcdef.kv")]
    problems(folder, fix=True)
    assert problems(folder) == ()
    with TieredStore(folder, NO_MEMORY) as store:
        assert load(store, LONGER) == len(LONGER)


@pytest.mark.parametrize("name", ["junk", "junk.txt", ".hidden", "0123456789abcdef.kv.part", "0123456789ABCDEF.kv"])
def test_a_foreign_file_among_the_extents_is_told_and_left(sound: Path, name: str) -> None:
    folder = copy(sound, "foreign")
    (folder / "extents" / name).write_bytes(b"junk")
    with TieredStore(folder, NO_MEMORY) as store:
        for _ in range(2):
            checked = check(store.disk, fix=True)
            assert (checked.problems, checked.foreign) == ((), (name,))
        store.disk.collect()
        assert load(store, LONGER) == len(LONGER)
    assert (folder / "extents" / name).read_bytes() == b"junk"


def test_a_foreign_folder_among_the_extents_is_left_and_does_not_stop_the_fixing(sound: Path) -> None:
    folder = copy(sound, "foreign")
    (folder / "extents" / "0123456789abcdef.kv").mkdir()
    _flip_last(extent_of(folder, OTHER))
    assert {problem.kind for problem in problems(folder, fix=True)} == {"damaged"}
    assert problems(folder) == ()
    assert (folder / "extents" / "0123456789abcdef.kv").is_dir()


def test_files_that_others_may_read_are_reported_and_fixed(sound: Path) -> None:
    folder = copy(sound, "rights")
    path = extent_of(folder, OTHER)
    path.chmod(0o644)
    assert [(problem.kind, problem.entry) for problem in problems(folder, fix=True)] == [("rights", path.stem)]
    assert problems(folder) == ()
    assert path.stat().st_mode & 0o777 == 0o600


# -- with a key --------------------------------------------------------------------------------------------------------


def _forge(folder: Path, path: Path) -> None:
    """Rewrite an extent's numbers, its digests and its row, as somebody can who has the folder but not the key."""
    digester = PlainDigester()
    header = parse_header(_header_bytes(path))
    wrong = make_kv(OTHER, Span(0, len(OTHER)))
    digests = b"".join(digest_layer(digester, layer) for layer in wrong.layers)
    if header.plan.digest_width != digester.width:  # the widths must fit: pad each digest
        step = digester.width
        digests = b"".join(digests[at : at + step] * 2 for at in range(0, len(digests), step))
    text = header.plan.header(digests)
    numbers = b"".join(layer.keys.tobytes() + layer.values.tobytes() for layer in wrong.layers)
    assert len(text + numbers) == path.stat().st_size
    path.write_bytes(text + numbers)
    with sqlite3.connect(folder / "catalog.sqlite") as connection:
        connection.execute("UPDATE extents SET digest=? WHERE name=?", (digester.header(text), path.stem))
    connection.close()


def test_without_a_key_a_forger_is_inside_the_trust_boundary(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(folder, [VICTIM])
    _forge(folder, extent_of(folder, VICTIM))
    assert problems(folder) == ()  # so the forgery below is a good one
    with TieredStore(folder, NO_MEMORY) as store, pytest.raises(AssertionError):
        load(store, VICTIM)


@pytest.mark.parametrize("memory", [0, "10MB"])
def test_with_a_key_forged_numbers_digests_and_rows_are_not_served(tmp_path: Path, memory: int | str) -> None:
    folder = tmp_path / "cache"
    settings = StoreSettings(disk_limit="50MB", memory_limit=memory, key=KEY)
    fill(folder, [VICTIM, OTHER], settings)
    _forge(folder, extent_of(folder, VICTIM, settings))
    assert [problem.kind for problem in problems(folder, settings)] == ["damaged"]
    with TieredStore(folder, settings) as store:
        assert heals(store, VICTIM)
        store.maintain()
        assert load(store, VICTIM) == len(VICTIM)
        assert load(store, OTHER) == len(OTHER)


def test_with_a_key_an_extent_of_an_unkeyed_kv_space_cannot_be_passed_off_as_a_keyed_one(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    fill(folder, [VICTIM], KEYED)
    fill(folder, [VICTIM])
    keyed, plain = extent_of(folder, VICTIM, KEYED), extent_of(folder, VICTIM)
    _forge(folder, plain)
    with sqlite3.connect(folder / "catalog.sqlite") as connection:
        ids = dict(connection.execute("SELECT name, id FROM extents"))
        fields = ", ".join(f"{name}=(SELECT {name} FROM extents WHERE id=:plain)" for name in ("bytes", "digest"))
        connection.execute(
            f"UPDATE extents SET {fields} WHERE id=:keyed", {"plain": ids[plain.stem], "keyed": ids[keyed.stem]}
        )
    connection.close()
    shutil.copyfile(plain, keyed)
    with TieredStore(folder, KEYED) as store:
        assert heals(store, VICTIM)


@pytest.mark.parametrize("key", [None, b"another secret of enough bytes"])
def test_another_key_or_none_serves_nothing_and_destroys_nothing(tmp_path: Path, key: bytes | None) -> None:
    folder = tmp_path / "cache"
    fill(folder, [VICTIM, OTHER], KEYED)
    files = {path.name: path.read_bytes() for path in (folder / "extents").iterdir()}
    strange = StoreSettings(disk_limit="50MB", memory_limit=0, key=key)
    with TieredStore(folder, strange) as store:
        assert store.lookup(KV_SPACE, VICTIM).length == 0
        assert keep(store, VICTIM).outcome == "kept"
        assert load(store, VICTIM) == len(VICTIM)
        store.maintain()
        checked = check(store.disk, fix=True)
        assert checked.problems == ()
        assert checked.under_other_keys == 2
        store.disk.collect()
    assert files.items() <= {path.name: path.read_bytes() for path in (folder / "extents").iterdir()}.items()
    with TieredStore(folder, KEYED) as store:
        assert load(store, VICTIM) == len(VICTIM)
        assert load(store, OTHER) == len(OTHER)


def test_the_key_is_in_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with TieredStore(folder, KEYED) as store:
        keep(store, VICTIM)
        contents = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert KEY not in contents
    assert KEY.hex().encode() not in contents
    assert json.dumps(KEY.decode()).encode() not in contents
