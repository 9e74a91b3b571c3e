"""Text found by its tokens: to the token and to the bit, within a bound, and without a trace when it is purged."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.text_places import measure_text
from rekindle.core.chunk import chunk_digest
from rekindle.core.keys import KvSpace, Namespace, token_bytes
from rekindle.core.kv import Span
from rekindle.store.catalog import catalog
from rekindle.store.folder import CATALOG
from rekindle.store.purge import TokenRun
from rekindle.store.settings import StoreSettings
from rekindle.store.text_index import GRAM_TOKENS, SHARED_TOKENS, SINK_TOKENS, WINDOW_GRAMS, Fingerprints, FoundText
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, SMALL, keep, make_kv
from tests.store.scored import assert_gives, variant

ON_DISK = StoreSettings(disk_limit="50MB", memory_limit=0)
OTHER_TENANT = KvSpace(Namespace("synthetic", tenant="somebody else"), SMALL)


def some(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 50_000, count)]


TEXT = some(400, 1)
PROMPT = [*some(77, 2), *TEXT, *some(90, 3)]
ASKED = [*some(13, 4), *TEXT, *some(200, 5)]


def kept(store: TieredStore, prompt: list[int], kv_space: KvSpace = KV_SPACE) -> None:
    keep(store, prompt, kv_space)
    store.text.record(kv_space, prompt)


def find(store: TieredStore, tokens: list[int], kv_space: KvSpace = KV_SPACE) -> list[FoundText]:
    return store.text.find(kv_space, tokens, [Span(0, len(tokens))])


def keys(store: TieredStore) -> set[int]:
    with store.disk.database.reading() as connection:
        return {key for (key,) in connection.execute("SELECT key FROM fingerprints").fetchall()}


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 1 << 30))
def test_two_prompts_with_a_text_in_common_share_a_fingerprint_inside_it(before: int, after: int, seed: int) -> None:
    text = some(SHARED_TOKENS, seed)
    prints = [
        Fingerprints.of(token_bytes([*some(count, seed + count + 1), *text, *some(50, seed + count + 2)]))
        for count in (before, after)
    ]
    inside = []
    for one, count in zip(prints, (before, after), strict=True):
        ends = (one.ends >= count + GRAM_TOKENS) & (one.ends <= count + SHARED_TOKENS)
        inside.append(set(zip((one.ends[ends] - count).tolist(), one.keys[ends].tolist(), strict=True)))
    assert inside[0] & inside[1]


def test_few_tokens_end_a_fingerprint_and_a_gap_between_two_is_no_longer_than_a_window() -> None:
    prints = Fingerprints.of(token_bytes(some(20_000, 7)))
    assert 500 < len(prints.ends) < 800 and len(set(prints.keys.tolist())) == len(prints.keys)
    assert np.diff(prints.ends).max() <= WINDOW_GRAMS


def test_text_is_found_to_the_token_and_gives_the_kv_it_was_kept_with(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        kept(store, PROMPT)
        (found,) = find(store, ASKED)
        assert found.span == Span(13, 413) and found.stored.variant.span == Span(77, 477)
        assert found.stored.variant.digest == chunk_digest(TEXT)
        assert_gives(store, found.stored, make_kv(PROMPT, Span(77, 477)))


def test_text_kept_in_several_turns_is_found_as_one(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        for stop in (150, 333, len(PROMPT)):
            kept(store, PROMPT[:stop])
        (found,) = find(store, ASKED)
        assert found.span == Span(13, 413)
        assert_gives(store, found.stored, make_kv(PROMPT, Span(77, 477)))


def test_non_prefix_kv_is_found_with_the_position_it_was_computed_at(tmp_path: Path) -> None:
    given_variant = variant(PROMPT, Span(77, 477), 0.25)
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        kv = make_kv(PROMPT, Span(77, 477))
        store.variants.keep_nonprefix(KV_SPACE, TEXT, kv, given_variant)
        store.text.record_nonprefix(KV_SPACE, TEXT, given_variant)
        part = [*some(40, 9), *TEXT[50:300], *some(40, 10)]
        (found,) = find(store, part)
        assert found.span == Span(40, 290) and found.stored.nonprefix
        assert found.stored.variant.span == Span(127, 377) and found.stored.variant.drift == 0.25
        assert_gives(store, found.stored, make_kv(PROMPT, Span(127, 377)))


def test_text_at_the_very_start_of_a_prompt_is_found_but_for_its_first_tokens(tmp_path: Path) -> None:
    for count in (100, 400):
        with TieredStore(tmp_path / str(count), ON_DISK) as store:
            kept(store, [*TEXT[:count], *some(90, 3)])
            (found,) = find(store, [*some(13, 4), *TEXT[:count], *some(200, 5)])
            assert found.span == Span(13 + SINK_TOKENS, 13 + count) and store.counts.read_failures == 0


def test_other_tenants_find_nothing(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        kept(store, PROMPT, OTHER_TENANT)
        assert find(store, ASKED) == [] and len(find(store, ASKED, OTHER_TENANT)) == 1


def test_what_was_never_kept_is_not_listed(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        keep(store, PROMPT[:128])
        store.text.record(KV_SPACE, PROMPT)
        assert find(store, ASKED) == [] and len(keys(store)) < len(Fingerprints.of(token_bytes(PROMPT)).keys)


def test_evicted_text_is_not_found_and_its_rows_go(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        kept(store, PROMPT)
        with store.disk.database.writing() as connection:
            catalog.cut(connection, store.disk.entries()[0].id, 0)
        assert find(store, ASKED) == [] and keys(store)
        store.maintain()
        assert not keys(store)


def test_text_whose_rows_lead_nowhere_is_listed_again_where_it_is(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        kept(store, PROMPT)
        with store.disk.database.writing() as connection:
            catalog.cut(connection, store.disk.entries()[0].id, 0)
        other = [*some(5, 20), *TEXT]
        kept(store, other)
        (found,) = find(store, ASKED)
        assert found.stored.variant.span == Span(5, 405)


def test_the_number_of_places_is_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", replace(ON_DISK, max_fingerprints=10)) as store:
        kept(store, some(2000, 30))
        kept(store, PROMPT)
        assert len(keys(store)) == 10
        assert len(find(store, ASKED)) == 1 and find(store, [*some(9, 31), *some(2000, 30)[:500]]) == []


def test_after_a_purge_no_fingerprint_of_the_tenant_is_left_and_those_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with TieredStore(folder, ON_DISK) as store:
        kept(store, PROMPT)
        kept(store, some(300, 40), OTHER_TENANT)
        others = set(Fingerprints.of(token_bytes(some(300, 40))).keys.tolist())
        gone = keys(store) - others
        store.purge("local", "", [TokenRun("words", token_bytes(TEXT[100:150]))])
        assert gone and keys(store) == others and find(store, ASKED) == []
        store.text.record(KV_SPACE, PROMPT)  # a job that was late
        assert not any(stop > 177 for stop in _stops(store, gone))
    data = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    left = set(Fingerprints.of(token_bytes(PROMPT)).keys[1:].tolist()) - _listed(folder)
    assert left and not any(key.to_bytes(8, "big", signed=True) in data for key in left)


def _stops(store: TieredStore, wanted: set[int]) -> list[int]:
    with store.disk.database.reading() as connection:
        rows = connection.execute("SELECT key, stop FROM fingerprints").fetchall()
    return [stop for key, stop in rows if key in wanted]


def _listed(folder: Path) -> set[int]:
    with sqlite3.connect(folder / CATALOG) as connection:
        return {key for (key,) in connection.execute("SELECT key FROM fingerprints").fetchall()}


@pytest.mark.parametrize("change", ["parent=x'00'", "stop=stop+1", "moved=5", "drift=0.5", "seal=x'00'", "stop='x'"])
def test_a_damaged_row_is_ignored(tmp_path: Path, change: str) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        kept(store, PROMPT)
        with store.disk.database.writing() as connection:
            connection.execute(f"UPDATE fingerprints SET {change}")
        assert find(store, ASKED) == []


def test_a_cleared_store_lists_nothing(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        kept(store, PROMPT)
        store.clear()
        assert not keys(store)


@pytest.mark.parametrize("places", [10_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
def test_a_million_places_take_little_and_text_is_found_among_them(tmp_path: Path, places: int) -> None:
    """See docs/concepts/chunks.md: bytes and memory are bounded; times are in `bench store`."""
    found = measure_text(tmp_path / "c", np.random.default_rng(0), places)
    assert found["places"] >= places
    assert found["bytes_a_place"] < 128 and found["memory_mb"] < 64
