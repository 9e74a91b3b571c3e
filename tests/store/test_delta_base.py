"""Differences from an anchor: what becomes one, what it stands on, and what happens when that must go."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from benchmarks.base import folder_bytes
from rekindle.codec.coder import Coder
from rekindle.codec.quantizer import BitPlan
from rekindle.core.keys import BLOCK_TOKENS, KvSpace, Namespace, token_bytes
from rekindle.core.kv import Kv, KvLayout, LayerKv, LayerShape, Span
from rekindle.errors import KvLost
from rekindle.store.catalog import catalog
from rekindle.store.catalog.catalog import Extent
from rekindle.store.check import CacheProblem, check
from rekindle.store.delta_base import bases_of
from rekindle.store.disk import Machine
from rekindle.store.files import Files, Handle
from rekindle.store.purge import TokenRun
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import Kept, TieredStore
from tests.kvs import KV_SPACE, make_kv
from tests.store.test_limits import Clock
from tests.store.test_purge import traces

pytestmark = pytest.mark.thorough

# -- KV of adapters: near the base's, and a pure function of tokens, place and adapter ---------------------------------

BASE = KV_SPACE
ONE, TWO, LATE = (replace(KV_SPACE, adapter=name) for name in ("one", "two", "late"))  # the last changes no first layer
KV_SPACES = (BASE, ONE, TWO)
NEAR_CODER = Coder(BitPlan.uniform(2, 8), BitPlan.uniform(2, 3))


def quantized(kv_space: KvSpace) -> KvSpace:
    """The KV space for KV that may lose something."""
    return replace(kv_space, codec="quantized")


def adapted(tokens: Sequence[int], span: Span, kv_space: KvSpace) -> Kv:
    """The KV of `span`: that of the base, with some low bits changed as the adapter says."""
    kv = make_kv(tokens, span, kv_space)
    if kv_space.adapter is None:
        return kv
    seed = sum(kv_space.adapter.encode())
    layers = [
        layer
        if kv_space.adapter == "late" and number == 0
        else LayerKv(*(_turned(half, span, seed) for half in (layer.keys, layer.values)))
        for number, layer in enumerate(kv.layers)
    ]
    return Kv(span, kv.layout, tuple(layers))


def _turned(half: NDArray[np.float16], span: Span, seed: int) -> NDArray[np.float16]:
    place = np.arange(span.start, span.stop, dtype=np.uint64)[None, :, None] * np.uint64(seed)
    mixed = (place + np.arange(half.shape[2], dtype=np.uint64)) * np.uint64(40503) >> np.uint64(5)
    return (half.view(np.uint16) ^ (mixed.astype(np.uint16) & np.uint16(15))).view(half.dtype)


def keep(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace) -> Kept:
    """Keep what is missing of a prompt."""
    gap = store.lookup(kv_space, tokens).gap()
    return Kept("known") if gap is None else store.keep(kv_space, tokens, adapted(tokens, gap, kv_space))


def fetch(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace) -> Kv:
    """What is known of a prompt. Raises `KvLost` if what was found cannot be read."""
    match = store.lookup(kv_space, tokens)
    kv = make_kv(tokens, Span(0, match.length), kv_space)
    layers = tuple(LayerKv(np.zeros_like(layer.keys), np.zeros_like(layer.values)) for layer in kv.layers)
    if match.length:
        with store.load(kv_space, match) as feed:
            for number, layer in enumerate(layers):
                feed.fill(number, layer)
    return Kv(kv.span, kv.layout, layers)


def load(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace) -> int:
    """Load what is known of a prompt and compare every bit; how many tokens that was. Raises `KvLost`."""
    found = fetch(store, tokens, kv_space)
    assert is_same(found, adapted(tokens, found.span, kv_space)), f"{found.span} is not what was kept"
    return len(found.span)


def load_or_lose(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace) -> int | None:
    """As `load`; None if it was found but lost."""
    try:
        return load(store, tokens, kv_space)
    except KvLost:
        return None


def is_same(one: Kv, other: Kv) -> bool:
    """Whether two KV are equal bit by bit."""
    return one.span == other.span and all(
        a.keys.tobytes() == b.keys.tobytes() and a.values.tobytes() == b.values.tobytes()
        for a, b in zip(one.layers, other.layers, strict=True)
    )


def furthest(one: Kv, other: Kv) -> float:
    """The largest difference of two numbers in the same place."""
    pairs = [
        (getattr(a, half), getattr(b, half))
        for a, b in zip(one.layers, other.layers, strict=True)
        for half in ("keys", "values")
    ]
    return max(float(np.abs(a.astype(np.float32) - b.astype(np.float32)).max(initial=0)) for a, b in pairs)


def rows_of(store: TieredStore, kv_space: KvSpace) -> list[Extent]:
    """The extents of a KV space, the first blocks of chains first."""
    with store.disk.database.reading() as connection:
        found = connection.execute(
            "SELECT id FROM kv_spaces WHERE digest=?", (store.disk.kv_space_digest(kv_space),)
        ).fetchone()
    rows = [row for row in store.disk.entries() if found is not None and row.kv_space == found[0]]
    return sorted(rows, key=lambda row: (row.depth, row.id))


def stands_on(store: TieredStore, row: Extent) -> list[int]:
    """The numbers of the extents that one is a difference from."""
    with store.disk.database.reading() as connection:
        return [part.base for part in bases_of(connection, row.id)]


def codings(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace) -> list[tuple[str, int]]:
    """How each piece of a prompt is coded, and its tokens."""
    return [(piece.coding, len(piece.span)) for piece in store.lookup(kv_space, tokens).pieces]


def problems(store: TieredStore) -> tuple[CacheProblem, ...]:
    """What a check finds."""
    return check(store.disk).problems


# -- stores ------------------------------------------------------------------------------------------------------------

ROOMY = StoreSettings(disk_limit="50MB", memory_limit=0, quantized=NEAR_CODER)
TIGHT = (2 << 20) + 500_000  # the catalog's log may take the first part
T = list(range(1000, 1200))
CLOSE = 0.01  # numbers here are below 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[TieredStore]:
    with TieredStore(tmp_path / "c", ROOMY, Machine(clock=clock)) as opened:
        yield opened


def prompt(number: int, tokens: int = 640) -> list[int]:
    return [number * 10_000 + place for place in range(tokens)]


def keep_all(store: TieredStore, tokens: list[int] = T, kv_spaces: tuple[KvSpace, ...] = KV_SPACES) -> None:
    for kv_space in kv_spaces:
        assert keep(store, tokens, kv_space).outcome == "kept"


def load_all(store: TieredStore, tokens: list[int] = T, kv_spaces: tuple[KvSpace, ...] = KV_SPACES) -> list[int]:
    return [load(store, tokens, kv_space) for kv_space in kv_spaces]


# -- what becomes a difference -----------------------------------------------------------------------------------------


def test_kv_of_an_adapter_stands_on_the_bases_and_is_smaller_and_the_same_to_the_bit(store: TieredStore) -> None:
    keep_all(store)
    (base,), (one,), (two,) = (rows_of(store, kv_space) for kv_space in KV_SPACES)
    assert (base.coding, one.coding, two.coding) == ("raw", "exact", "exact")
    assert stands_on(store, one) == stands_on(store, two) == [base.id]
    assert one.size_bytes < 0.6 * base.size_bytes
    assert load_all(store) == [200] * 3
    assert [load(store, T[:77], kv_space) for kv_space in KV_SPACES] == [77] * 3
    assert problems(store) == ()


def test_without_the_models_kv_another_adapters_whole_kv_is_the_delta_base(store: TieredStore) -> None:
    keep_all(store, kv_spaces=(ONE, TWO, BASE, LATE))
    (one,), (two,), (base,), (late,) = (rows_of(store, kv_space) for kv_space in (ONE, TWO, BASE, LATE))
    assert (one.coding, base.coding) == ("raw", "raw"), "the base is never a difference"
    assert (stands_on(store, two), stands_on(store, late)) == ([one.id], [base.id])
    assert load_all(store, kv_spaces=(*KV_SPACES, LATE)) == [200] * 4


def test_a_layer_that_the_adapter_does_not_change_takes_no_room(store: TieredStore) -> None:
    keep_all(store, kv_spaces=(BASE, LATE, ONE))
    sizes = {}
    for kv_space in (LATE, ONE):
        (row,) = rows_of(store, kv_space)
        extent = store.disk.open(row, store.disk.kv_space_digest(kv_space))
        coding = extent.header.plan.coding
        store.disk.extents.release(extent)
        assert coding is not None
        sizes[kv_space.adapter] = coding.sizes
    assert sizes["late"][0] == 4 < sizes["one"][0]
    assert load(store, T, LATE) == 200


def test_what_the_delta_base_does_not_cover_is_kept_whole(store: TieredStore) -> None:
    keep(store, T[:70], BASE)
    keep(store, T, ONE)
    assert codings(store, T, ONE) == [("exact", 64), ("raw", 136)]
    assert load(store, T, ONE) == 200 and problems(store) == ()


def test_a_delta_base_may_be_several_extents(store: TieredStore) -> None:
    for stop in (70, 130, 200):
        keep(store, T[:stop], BASE)
    keep(store, T, ONE)
    assert codings(store, T, ONE) == [("exact", 200)]
    (row,) = rows_of(store, ONE)
    assert len(stands_on(store, row)) == 3
    assert load(store, T, ONE) == 200 and problems(store) == ()


def test_the_middle_of_a_delta_base_is_enough(store: TieredStore) -> None:
    keep(store, T[:96], ONE)
    keep(store, T, BASE)
    keep(store, T, ONE)
    assert codings(store, T, ONE) == [("raw", 96), ("exact", 104)]
    assert load(store, T, ONE) == 200 and problems(store) == ()


@pytest.mark.parametrize(
    "other",
    [
        KvSpace(Namespace("synthetic", tenant="somebody else"), KV_SPACE.layout, "one"),
        KvSpace(Namespace("synthetic", salt="pepper"), KV_SPACE.layout, "one"),
        KvSpace(Namespace("another model"), KV_SPACE.layout, "one"),
        KvSpace(KV_SPACE.namespace, KvLayout("float16", (LayerShape(2, 4, 4),)), "one"),
        quantized(ONE),
    ],
    ids=["tenant", "salt", "model", "layout", "codec"],
)
def test_nothing_stands_on_kv_of_another_kind_or_owner(store: TieredStore, other: KvSpace) -> None:
    keep_all(store, kv_spaces=(BASE, other))
    (row,) = rows_of(store, other)
    assert stands_on(store, row) == []


def test_under_another_key_nothing_is_a_delta_base(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep(store, T, BASE)
    with TieredStore(tmp_path / "c", replace(ROOMY, key=bytes(32))) as store:
        keep(store, T, ONE)
        assert codings(store, T, ONE) == [("raw", 200)]


def test_without_a_coder_everything_is_whole(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", replace(ROOMY, exact=None)) as store:
        keep_all(store)
        assert {row.coding for row in store.disk.entries()} == {"raw"}
        assert load_all(store) == [200] * 3


def test_numbers_that_are_not_finite_come_back_bit_by_bit(store: TieredStore) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], np.float16)
    for exact, codec in ((True, "raw"), (False, "quantized")):
        base, one = replace(BASE, codec=codec), replace(ONE, codec=codec)
        keep(store, T, base)
        kv = adapted(T, Span(0, 200), one)
        kv.layers[1].values[0, :4, 0] = odd
        right = adapted(T, Span(0, 200), one)
        right.layers[1].values[0, :4, 0] = odd
        assert store.keep(one, T, kv).outcome == "kept"
        assert is_same(fetch(store, T, one), right)
        assert codings(store, T, one) == [("exact" if exact else "raw", 200)]


def test_differences_are_held_in_memory_and_served_from_there(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", replace(ROOMY, memory_limit="10MB")) as store:
        keep_all(store)
        assert all(store.memory.holds(row.name) for row in store.disk.entries())
        assert load_all(store) == [200] * 3
    with TieredStore(tmp_path / "c", replace(ROOMY, memory_limit="10MB")) as store:
        assert load_all(store) == [200] * 3
        store.maintain()
        assert all(store.memory.holds(row.name) for row in store.disk.entries())
        shutil.rmtree(tmp_path / "c" / "extents")
        assert load_all(store) == [200] * 3


# -- what may be lost --------------------------------------------------------------------------------------------------


def test_where_something_may_be_lost_kv_is_close_to_what_was_kept(store: TieredStore) -> None:
    for kv_space in map(quantized, KV_SPACES):
        keep(store, T, kv_space)
        assert codings(store, T, kv_space) == [("quantized", 200)]
        assert furthest(fetch(store, T, kv_space), adapted(T, Span(0, 200), kv_space)) < CLOSE
        part = adapted(T[:77], Span(0, 77), kv_space)
        assert furthest(fetch(store, T[:77], kv_space), part) < CLOSE
    assert problems(store) == ()


def test_a_delta_is_not_changed_when_its_quantized_base_is_rewritten(store: TieredStore) -> None:
    base, one = quantized(BASE), quantized(ONE)
    keep(store, [*T, *T, *T], base)
    keep(store, T[:160], one)
    before = fetch(store, T[:160], one)
    (anchor,) = rows_of(store, base)
    with store.disk.database.writing() as connection:
        catalog.cut(connection, anchor.id, 5)
    store.maintain()
    (left,) = rows_of(store, base)
    assert left.name == anchor.name, "compaction leaves alone what would have to be coded again"
    store.disk.room.rewrite(left, store.disk.kv_space_digest(base))  # as a purge does
    (after,) = rows_of(store, base)
    assert (after.blocks, after.coding) == (5, "quantized")  # uncoded, but what was lost is lost
    assert is_same(fetch(store, T[:160], one), before)


def test_quantized_kv_that_is_rewritten_again_and_again_stays_close(store: TieredStore) -> None:
    base, one, two = map(quantized, KV_SPACES)
    for kv_space in (base, one, two):
        keep(store, T, kv_space)
    for _ in range(10):
        for kv_space in (base, one, two):
            for row in rows_of(store, kv_space):
                store.disk.room.rewrite(row, store.disk.kv_space_digest(kv_space))
    for kv_space in (base, one, two):
        assert furthest(fetch(store, T, kv_space), adapted(T, Span(0, 200), kv_space)) < CLOSE


# -- an anchor goes ----------------------------------------------------------------------------------------------------


def test_when_a_delta_base_is_removed_what_was_used_last_becomes_whole_and_the_others_stand_on_it(
    store: TieredStore, clock: Clock
) -> None:
    keep_all(store, kv_spaces=(*KV_SPACES, LATE))
    clock.now += 60
    store.record_use(store.lookup(TWO, T))
    store.maintain()
    store.disk.remove(rows_of(store, BASE))
    (one,), (two,), (late,) = (rows_of(store, kv_space) for kv_space in (ONE, TWO, LATE))
    assert (one.coding, two.coding, late.coding) == ("exact", "raw", "exact")
    assert stands_on(store, one) == stands_on(store, late) == [two.id]
    assert load_all(store, kv_spaces=(*KV_SPACES, LATE)) == [0, 200, 200, 200]
    assert (two.hits, two.used) == (1, clock.now)
    assert problems(store) == ()


def test_when_a_delta_base_is_removed_deltas_of_its_descendants_bases_stay_too(store: TieredStore) -> None:
    """Removing an extent removes what hangs on it: that may be an anchor as well."""
    for stop in (96, 200):
        keep_all(store, T[:stop], (BASE, ONE))
    store.disk.remove(rows_of(store, BASE)[:1])
    assert rows_of(store, BASE) == []
    assert load(store, T, ONE) == 200
    assert problems(store) == ()


def test_when_a_delta_base_expires_its_differences_stay(tmp_path: Path, clock: Clock) -> None:
    with TieredStore(tmp_path / "c", replace(ROOMY, ttl_seconds=1000), Machine(clock=clock)) as store:
        keep(store, T, BASE)
        clock.now += 600
        keep_all(store, kv_spaces=(ONE, TWO))
        clock.now += 600
        assert load_all(store) == [0, 200, 200], "the anchor is not served, but can be read"
        store.maintain()
        assert rows_of(store, BASE) == []
        assert load_all(store) == [0, 200, 200]
        assert sorted(row.coding for row in store.disk.entries()) == ["exact", "raw"]
        clock.now += 600
        store.maintain()
        assert store.disk.entries() == [] and problems(store) == ()


def test_when_a_delta_base_expires_deltas_of_its_descendants_bases_stay_too(tmp_path: Path, clock: Clock) -> None:
    with TieredStore(tmp_path / "c", replace(ROOMY, ttl_seconds=1000), Machine(clock=clock)) as store:
        keep(store, T[:96], BASE)
        clock.now += 600
        keep(store, T[:96], ONE)
        keep(store, T, BASE)
        keep(store, T, ONE)
        clock.now += 600
        store.maintain()
        assert load(store, T, ONE) == 200
        assert problems(store) == ()


def test_what_expired_is_no_delta_base(tmp_path: Path, clock: Clock) -> None:
    with TieredStore(tmp_path / "c", replace(ROOMY, ttl_seconds=1000), Machine(clock=clock)) as store:
        keep(store, T, BASE)
        clock.now += 2000
        keep(store, T, ONE)
        assert codings(store, T, ONE) == [("raw", 200)]


def test_a_delta_base_that_stays_because_something_hangs_on_it_keeps_its_differences(store: TieredStore) -> None:
    keep_all(store, T[:96], (BASE, ONE))
    keep(store, T, BASE)
    head = rows_of(store, BASE)[0]
    assert store.disk.evict(lambda row: row.id == head.id) == 0
    assert codings(store, T[:96], ONE) == [("exact", 96)]


def test_a_delta_base_that_is_evicted_by_choice_leaves_its_differences(store: TieredStore) -> None:
    keep_all(store)
    (base,) = rows_of(store, BASE)
    assert store.disk.evict(lambda row: row.id == base.id) > 0
    assert load_all(store) == [0, 200, 200] and problems(store) == ()


@pytest.mark.parametrize("how", ["cut", "quarantine", "lose"])
def test_a_delta_base_that_is_lost_takes_its_differences_along(store: TieredStore, how: str) -> None:
    keep_all(store)
    keep(store, [*T, *T], ONE)
    keep(store, prompt(1), BASE)
    (base,) = [row for row in rows_of(store, BASE) if row.tokens == 200]
    with store.disk.database.writing() as connection:
        if how == "cut":
            catalog.cut(connection, base.id, 0)
        elif how == "quarantine":
            catalog.quarantine(connection, base.id, "a test")
    if how == "lose":
        store.disk.lose(base.name, FileNotFoundError("gone"))
    assert load_all(store, [*T, *T]) == [0, 0, 0]
    with store.disk.database.reading() as connection:
        assert connection.execute("SELECT count(*) FROM delta_bases").fetchone() == (0,)
    store.maintain()
    assert problems(store) == () and load(store, prompt(1), BASE) == 640
    keep_all(store)
    assert load_all(store) == [200] * 3


def test_a_delta_base_that_loses_its_last_blocks_takes_what_stands_on_these_along(store: TieredStore) -> None:
    keep(store, T, BASE)
    keep(store, T[:64], ONE)
    keep(store, T, TWO)
    (base,) = rows_of(store, BASE)
    with store.disk.database.writing() as connection:
        catalog.cut(connection, base.id, 3)
    assert load_all(store) == [96, 64, 0]
    store.disk.collect()
    assert problems(store) == ()


def test_there_is_no_room_to_become_whole_so_it_goes_along_and_the_limit_holds(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep_all(store, prompt(1, 3000), (BASE, ONE))
        used = sum(row.size_bytes for row in store.disk.entries())
    tight = (2 << 20) + used + 120_000
    with TieredStore(tmp_path / "c", replace(ROOMY, disk_limit=tight)) as store:
        store.disk.remove(rows_of(store, BASE))
        assert load(store, prompt(1, 3000), ONE) == 0
        assert folder_bytes(tmp_path / "c") <= tight
        assert problems(store) == ()


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_delta_base_is_never_evicted_before_what_stands_on_it(store: TieredStore, clock: Clock) -> None:
    keep_all(store)
    clock.now += 60
    store.record_use(store.lookup(TWO, T))  # the anchor itself is what was not used for longest
    store.maintain()
    seen = []
    while store.disk.entries():
        size = sum(row.size_bytes for row in store.disk.entries()) + store.disk.database.size_bytes()
        store.disk.room.prune(size - 1)
        assert problems(store) == ()
        seen.append([min(1, known) for known in load_all(store)])
    assert [1, 0, 1] in seen
    assert all(base for base, one, two in seen if one or two)


def test_of_a_delta_base_only_what_nothing_stands_on_is_evicted(store: TieredStore, clock: Clock) -> None:
    keep(store, prompt(1), BASE)
    clock.now += 60
    keep(store, prompt(1)[:64], ONE)
    store.disk.pin(rows_of(store, ONE))
    store.disk.pin(rows_of(store, ONE), pinned=False)
    before = sum(row.size_bytes for row in store.disk.entries())
    store.disk.room.prune(before // 2 + store.disk.database.size_bytes())
    assert [load(store, prompt(1), kv_space) for kv_space in (BASE, ONE)] in ([64, 64], [640, 0])
    assert problems(store) == ()


@pytest.mark.parametrize("policy", ["lru", "utility"])
def test_what_fits_is_kept_as_a_difference_or_whole_but_never_refused(
    tmp_path: Path, clock: Clock, policy: str
) -> None:
    """The oldest extent would go for it, and that is what it would stand on."""
    with TieredStore(tmp_path / "c", replace(ROOMY, disk_limit=TIGHT, policy=policy), Machine(clock=clock)) as store:
        for number in range(8):
            clock.now += 60
            assert keep(store, prompt(number, 700), BASE).outcome == "kept"
        kept = 0
        for number in range(8):
            if store.lookup(BASE, prompt(number, 700)).length == 700:
                clock.now += 60
                assert keep(store, prompt(number, 700), ONE).reason == ""
                assert load(store, prompt(number, 700), ONE) == 700
                kept += 1
        assert kept and problems(store) == ()
        assert folder_bytes(tmp_path / "c") <= TIGHT


def test_limits_hold_at_every_moment(tmp_path: Path, clock: Clock) -> None:
    folder, sizes = tmp_path / "c", []
    codings: set[str] = set()

    class Measuring(Files):
        def write_some(self, handle: Handle, offset: int, data: memoryview) -> int:
            done = super().write_some(handle, offset, data)
            sizes.append(folder_bytes(folder))
            return done

    with TieredStore(folder, replace(ROOMY, disk_limit=TIGHT), Machine(files=Measuring(), clock=clock)) as store:
        for number in range(30):
            clock.now += 60
            kv_space = (*KV_SPACES, quantized(BASE), quantized(ONE))[number % 5]
            keep(store, prompt(number // 3, 100 + number * 37 % 900), kv_space)
            if number % 4 == 3:
                store.disk.remove(rows_of(store, BASE)[:1])
            if number % 7 == 6:
                store.maintain()
            sizes.append(folder_bytes(folder))
            codings |= {row.coding for row in store.disk.entries()}
        assert "exact" in codings
        assert problems(store) == ()
    assert len(sizes) > 100 and max(sizes) <= TIGHT


def test_the_write_budget_counts_what_is_written_to_rebase(tmp_path: Path, clock: Clock) -> None:
    with TieredStore(tmp_path / "c", replace(ROOMY, write_budget=20_000), Machine(clock=clock)) as store:
        keep_all(store, kv_spaces=(BASE, ONE))
        store.disk.remove(rows_of(store, BASE))
        assert load(store, T, ONE) == 0, "becoming whole would have gone over the budget"
        assert problems(store) == ()


# -- partial blocks, pins ----------------------------------------------------------------------------------------------


def test_a_partial_block_stays_while_a_difference_stands_on_it(store: TieredStore) -> None:
    keep_all(store, T[:80], (BASE, ONE))
    assert codings(store, T[:80], ONE) == [("exact", 80)]
    keep(store, T, BASE)
    assert [load(store, T, kv_space) for kv_space in (BASE, ONE)] == [200, 80]
    assert problems(store) == ()
    keep(store, T, ONE)
    assert load(store, T, ONE) == 200 and problems(store) == ()
    keep(store, T, TWO)
    assert load(store, T, TWO) == 200 and problems(store) == ()
    store.disk.collect()
    assert load_all(store) == [200] * 3


def test_a_partial_block_that_nothing_stands_on_gives_way(store: TieredStore) -> None:
    keep(store, T[:80], BASE)
    keep(store, T[:64], ONE)
    assert keep(store, T, BASE).outcome == "kept"
    assert [row.live for row in rows_of(store, BASE)] == [2, 5]


def test_pins_carry_over_to_delta_bases(store: TieredStore) -> None:
    for stop in (96, 200):
        keep(store, T[:stop], BASE)
    keep_all(store, kv_spaces=(ONE, TWO))
    store.disk.pin(rows_of(store, ONE))
    assert [row.pinned for row in rows_of(store, BASE)] == [2, 2]
    store.disk.room.prune(0)
    assert load_all(store) == [200, 200, 0]
    store.disk.pin(rows_of(store, ONE), pinned=False)
    assert [row.pinned for row in rows_of(store, BASE)] == [0, 0]
    store.disk.room.prune(0)
    assert store.disk.entries() == []


def test_a_pinned_difference_that_is_rebased_pins_what_it_stands_on_then(store: TieredStore, clock: Clock) -> None:
    keep_all(store)
    store.disk.pin(rows_of(store, ONE))
    clock.now += 60
    store.record_use(store.lookup(TWO, T))
    store.maintain()
    store.disk.remove(rows_of(store, BASE))
    (one,), (two,) = rows_of(store, ONE), rows_of(store, TWO)
    assert (stands_on(store, one), one.pinned, two.pinned) == ([two.id], 1, 2)
    store.disk.room.prune(0)
    assert load_all(store) == [0, 200, 200]


# -- writing anew ------------------------------------------------------------------------------------------------------


def test_a_sparse_delta_base_is_rewritten_under_its_deltas(store: TieredStore) -> None:
    keep(store, prompt(1), BASE)
    keep(store, prompt(1)[:200], ONE)
    (base,) = rows_of(store, BASE)
    with store.disk.database.writing() as connection:
        catalog.cut(connection, base.id, 7)
    store.maintain()
    (anew,) = rows_of(store, BASE)
    assert (anew.blocks, anew.id != base.id) == (7, True)
    assert stands_on(store, rows_of(store, ONE)[0]) == [anew.id]
    assert [load(store, prompt(1), kv_space) for kv_space in (BASE, ONE)] == [224, 200]
    assert problems(store) == ()


def test_a_sparse_delta_is_rewritten_as_a_delta(store: TieredStore) -> None:
    keep_all(store, prompt(1), (BASE, ONE))
    (one,) = rows_of(store, ONE)
    with store.disk.database.writing() as connection:
        catalog.cut(connection, one.id, 7)
    store.maintain()
    (anew,) = rows_of(store, ONE)
    assert (anew.blocks, anew.coding) == (7, "exact") and anew.size_bytes < one.size_bytes
    assert load(store, prompt(1), ONE) == 224
    store.disk.room.prune(sum(r.size_bytes for r in store.disk.entries()) + store.disk.database.size_bytes() - 1)
    assert problems(store) == ()


# -- purge -------------------------------------------------------------------------------------------------------------

SECRET = [50_000 + 7 * place for place in range(70)]
ASKED = [*T[:100], *SECRET, *T[:100]]


def test_a_purge_removes_the_tokens_from_differences_too(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        keep_all(store, ASKED, (*KV_SPACES, *map(quantized, KV_SPACES)))
        keep_all(store, [*ASKED, *T])
        store.purge("local", "", [TokenRun("words", token_bytes(SECRET))])
        assert traces(tmp_path / "c", SECRET) == []
        assert all(known <= 96 for known in load_all(store, ASKED))
        assert problems(store) == ()
    assert traces(tmp_path / "c", SECRET) == []


def test_a_purge_leaves_what_is_before_the_tokens_in_every_kv_space(store: TieredStore) -> None:
    keep_all(store, ASKED)
    store.purge("local", "", [TokenRun("words", token_bytes(SECRET))])
    assert load_all(store, ASKED) == [96] * 3
    assert problems(store) == ()


# -- the law -----------------------------------------------------------------------------------------------------------


class AnchorMachine(RuleBasedStateMachine):
    """Keep, remove, evict, pin, load, expire nothing, crash and reopen, on the base's KV space and two adapters'.

    Whatever is served is right bit by bit, every promise of the catalog holds, and the limit does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="rekindle-anchors-"))
        self.ever: list[list[int]] = [[]]
        self.kept: set[tuple[KvSpace, tuple[int, ...]]] = set()

    @initialize(
        limit=st.sampled_from([TIGHT - 350_000, TIGHT - 250_000, 50_000_000]), memory=st.sampled_from([0, 20_000])
    )
    def open(self, limit: int, memory: int) -> None:
        self.settings = StoreSettings(disk_limit=limit, memory_limit=memory, policy="lru")
        self.limit = limit
        self.store = TieredStore(self.folder / "cache", self.settings)

    @rule(data=st.data(), kv_space=st.sampled_from(KV_SPACES), tail=st.integers(0, 3), count=st.integers(0, 130))
    def keep(self, data: st.DataObject, kv_space: KvSpace, tail: int, count: int) -> None:
        head = data.draw(st.sampled_from(self.ever), "begins like")
        head = head[: data.draw(st.integers(0, len(head)) | st.just(len(head)), "shared")]
        tokens = head + [5000 * (tail + 1) + place for place in range(count)]
        if not tokens:
            return
        outcome = keep(self.store, tokens, kv_space).outcome
        assert outcome in ("kept", "known", "refused")
        self.kept.add((kv_space, tuple(tokens)))
        self.ever.append(tokens)

    @rule(data=st.data(), kv_space=st.sampled_from(KV_SPACES))
    def keep_what_another_kv_space_has(self, data: st.DataObject, kv_space: KvSpace) -> None:
        tokens = data.draw(st.sampled_from(self.ever))
        if tokens:
            keep(self.store, tokens, kv_space)
            self.kept.add((kv_space, tuple(tokens)))

    @rule(data=st.data(), kv_space=st.sampled_from(KV_SPACES))
    def load(self, data: st.DataObject, kv_space: KvSpace) -> None:
        tokens = data.draw(st.sampled_from(self.ever))
        found = load(self.store, tokens, kv_space)
        assert any(on == kv_space and list(kept[:found]) == tokens[:found] for on, kept in self.kept) or not found
        self.store.record_use(self.store.lookup(kv_space, tokens), saved_ms=1.0)

    @precondition(lambda self: self.store.disk.entries())
    @rule(data=st.data(), how=st.sampled_from(["remove", "evict", "pin", "unpin", "cut", "quarantine"]))
    def touch_an_entry(self, data: st.DataObject, how: str) -> None:
        disk = self.store.disk
        row = data.draw(st.sampled_from(disk.entries()))
        if how == "remove":
            disk.remove([row])
        elif how == "evict":
            disk.evict(lambda other: other.id == row.id)
        elif how in ("pin", "unpin"):
            disk.pin([row], how == "pin")
        else:
            with disk.database.writing() as connection:
                if how == "cut":
                    catalog.cut(connection, row.id, data.draw(st.integers(0, row.live - 1), "place"))
                else:
                    catalog.quarantine(connection, row.id, "a test")
            disk.tidy()

    @rule(share=st.sampled_from([0.3, 0.7]))
    def evict(self, share: float) -> None:
        disk = self.store.disk
        pinned = [(row.name, row.live) for row in disk.entries() if row.pinned]
        size = sum(row.size_bytes for row in disk.entries())
        disk.room.prune(disk.database.size_bytes() + int(size * share))
        left = {row.name: row.live for row in disk.entries()}
        assert all(left.get(name) == live for name, live in pinned)

    @rule()
    def maintain(self) -> None:
        self.store.maintain()

    @rule()
    def crash_and_reopen(self) -> None:
        self.store = TieredStore(self.folder / "cache", self.settings)  # the old one is left as a killed process does

    @invariant()
    def every_promise_holds(self) -> None:
        if hasattr(self, "store"):
            assert folder_bytes(self.folder) <= self.limit
            assert problems(self.store) == ()
            assert all(len(stands_on(self.store, row)) == 0 for row in rows_of(self.store, BASE))
            assert self.store.counts.write_failures == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for kv_space, tokens in self.kept:
                load(self.store, tokens, kv_space)
            self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)


TestAnchors = AnchorMachine.TestCase
TestAnchors.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_blocks_of_a_delta_are_whole_blocks_of_its_base(store: TieredStore) -> None:
    for count in (31, 32, 33, 63, 64, 65):
        tokens = prompt(count, count)
        keep(store, tokens, BASE)
        keep(store, [*tokens, *T], ONE)
        covered = count // BLOCK_TOKENS * BLOCK_TOKENS
        (*differences, whole) = codings(store, [*tokens, *T], ONE)
        assert differences == ([("exact", covered)] if covered else [])
        assert whole == ("raw", count + 200 - covered)
        assert load(store, [*tokens, *T], ONE) == count + 200
    assert problems(store) == ()
