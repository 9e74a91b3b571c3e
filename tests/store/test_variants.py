"""Variants of chunks: any part of any chain, found by its tokens alone, to the bit; and non-prefix ones, kept apart."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.codec.digest import PlainDigester
from rekindle.core.chunk import ChunkScores, Variant, chunk_digest, nonprefix
from rekindle.core.keys import KvSpace, Namespace, token_bytes
from rekindle.core.kv import Span
from rekindle.errors import Closed, InvalidSetting
from rekindle.store.catalog import catalog
from rekindle.store.catalog.variant_rows import listing
from rekindle.store.check import check
from rekindle.store.disk import Machine
from rekindle.store.purge import TokenRun
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, SMALL, VariantCounts, keep, load, make_kv, variant_counts
from tests.store.scored import assert_gives, assert_loads, find, is_same, variant
from tests.store.test_purge import numbers, traces

ON_DISK = StoreSettings(disk_limit="50MB", memory_limit=0)
IN_MEMORY = StoreSettings(disk_limit="50MB", memory_limit="10MB")
PROMPT = list(range(1000, 1150))
SPAN = Span(40, 100)
CHUNK = PROMPT[SPAN.start : SPAN.stop]


def listed(store: TieredStore, prompt: list[int] = PROMPT, span: Span = SPAN, kv_space: KvSpace = KV_SPACE) -> Variant:
    """Keep a prompt, and list a variant of a span of it."""
    keep(store, prompt, kv_space)
    given = variant(prompt, span)
    assert store.variants.keep(kv_space, prompt, [given]) == 1
    return given


def rows(store: TieredStore) -> int:
    with store.disk.database.reading() as connection:
        return int(connection.execute("SELECT count(*) FROM variants").fetchone()[0])


# -- views on chains ---------------------------------------------------------------------------------------------------


@st.composite
def kept_chains(draw: st.DrawFn) -> tuple[list[list[int]], list[int], Span]:
    """Prompts kept one after the other, each beginning like an older one; one of them, and any span of it."""
    prompts: list[list[int]] = []
    for number in range(draw(st.integers(1, 4))):
        head: list[int] = []
        if prompts and draw(st.booleans()):
            older = draw(st.sampled_from(prompts))
            head = older[: draw(st.integers(0, len(older)))]
        prompts.append(head + [number * 1000 + place for place in range(draw(st.integers(1, 100)))])
    chosen = draw(st.sampled_from(prompts))
    start = draw(st.integers(0, len(chosen) - 1))
    return prompts, chosen, Span(start, draw(st.integers(start + 1, len(chosen))))


@settings(max_examples=60)
@given(kept_chains(), st.sampled_from([ON_DISK, IN_MEMORY]), st.booleans())
def test_any_span_of_any_kept_chain_gives_exactly_what_was_kept(
    chains: tuple[list[list[int]], list[int], Span], tiers: StoreSettings, is_listed_last: bool
) -> None:
    prompts, chosen, span = chains
    given_variant = variant(chosen, span)
    with tempfile.TemporaryDirectory() as folder, TieredStore(Path(folder) / "c", tiers) as store:
        for prompt in prompts:
            keep(store, prompt)
            if not is_listed_last and prompt is chosen:
                assert store.variants.keep(KV_SPACE, chosen, [given_variant]) == 1
        if is_listed_last:
            assert store.variants.keep(KV_SPACE, chosen, [given_variant]) == 1
        (known,) = find(store, chosen[span.start : span.stop])
        assert is_same(known.variant, given_variant)
        assert known.tier == ("memory" if tiers is IN_MEMORY else "disk")
        assert known.size_bytes == len(span) * SMALL.token_bytes
        assert_loads(store, known, chosen)


def test_every_unaligned_span_is_read_right_from_a_long_extent(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        keep(store, PROMPT)
        for start in (0, 1, 31, 32, 33, 64, 140):
            for stop in (start + 1, 32, 33, 63, 64, 65, 96, 149, 150):
                if stop > start:
                    store.variants.keep(KV_SPACE, PROMPT, [variant(PROMPT, Span(start, stop))])
                    (known,) = find(store, PROMPT[start:stop])
                    assert_loads(store, known, PROMPT)


def test_a_variant_whose_last_block_was_superseded_is_still_found(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        listed(store, PROMPT[:75], Span(40, 75))
        before = store.lookup(KV_SPACE, PROMPT[:75]).pieces[-1].extent
        keep(store, PROMPT)
        assert store.lookup(KV_SPACE, PROMPT).pieces[-1].extent != before
        (known,) = find(store, PROMPT[40:75])
        assert len(known.pieces) == 2
        assert_loads(store, known, PROMPT)
        store.maintain()
        assert rows(store) == 1


def test_one_chunk_in_several_prompts_has_a_variant_of_each(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        prompts = [[*range(number * 100, number * 100 + 17 * number), *CHUNK, 7] for number in (1, 2, 3)]
        for prompt in prompts:
            listed(store, prompt, Span(len(prompt) - 61, len(prompt) - 1))
        found = {known.variant.span.start: known for known in find(store, CHUNK)}
        assert sorted(found) == [17, 34, 51]
        for prompt in prompts:
            assert_loads(store, found[len(prompt) - 61], prompt)
        assert variant_counts(store, KV_SPACE) == VariantCounts(chunks=1, variants=3, nonprefix=0)


def test_the_same_place_twice_is_one_row(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        listed(store)
        again = replace(variant(PROMPT, SPAN), drift=0.25)
        assert store.variants.keep(KV_SPACE, PROMPT, [again, again]) == 0
        (known,) = find(store, CHUNK)
        assert is_same(known.variant, again)


def test_only_what_is_kept_can_be_listed(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        keep(store, PROMPT[:64])
        given_variants = [variant(PROMPT, Span(10, 64)), variant(PROMPT, SPAN), variant(PROMPT, Span(64, 100))]
        assert store.variants.keep(KV_SPACE, PROMPT, given_variants) == 1
        assert [len(find(store, PROMPT[s.start : s.stop])) for s in (Span(10, 64), SPAN, Span(64, 100))] == [1, 0, 0]


def test_what_is_no_variant_of_the_tokens_is_refused_with_a_sentence(tmp_path: Path) -> None:
    sound = variant(PROMPT, SPAN)
    half = ChunkScores(sound.scores.outside[:-1], sound.scores.received, 1.0, ())
    wrong = [
        replace(sound, digest=chunk_digest([1])),
        replace(sound, span=Span(41, 101)),
        replace(sound, span=Span(140, 200)),
        replace(sound, scores=half),
        replace(sound, drift=float("nan")),
    ]
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        keep(store, PROMPT)
        for one in wrong:
            with pytest.raises(InvalidSetting, match=r"\.$"):
                store.variants.keep(KV_SPACE, PROMPT, [one])
        assert rows(store) == 0


def test_no_other_tenant_salt_adapter_codec_or_key_sees_a_variant(tmp_path: Path) -> None:
    others = [
        KvSpace(Namespace("synthetic", tenant="somebody else"), SMALL),
        KvSpace(Namespace("synthetic", salt="pepper"), SMALL),
        KvSpace(Namespace("another model"), SMALL),
        replace(KV_SPACE, adapter="a" * 32),
        replace(KV_SPACE, codec="raw/1"),
    ]
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        listed(store)
        store.variants.keep_nonprefix(KV_SPACE, CHUNK, make_kv(CHUNK, Span(0, 60)), variant(PROMPT, SPAN, 0.5))
        for other in others:
            assert find(store, CHUNK, other) == [] and variant_counts(store, other) == VariantCounts()
            keep(store, PROMPT, other)
            assert find(store, CHUNK, other) == []
            with pytest.raises(InvalidSetting):
                store.variants.load(other, find(store, CHUNK)[0])
        assert len(find(store, CHUNK)) == 2
    with TieredStore(tmp_path / "c", replace(ON_DISK, key=bytes(32))) as store:
        assert find(store, CHUNK) == []


# -- going -------------------------------------------------------------------------------------------------------------


def test_a_variant_is_unknown_once_its_chain_went_and_its_row_goes_when_it_is_tended(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        listed(store)
        with store.disk.database.writing() as connection:
            catalog.cut(connection, store.disk.entries()[0].id, 3)  # the last block it needs
        assert find(store, CHUNK) == [] and rows(store) == 1
        store.maintain()
        assert rows(store) == 0


def test_a_variant_whose_chain_comes_back_is_known_again(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        listed(store)
        with store.disk.database.writing() as connection:
            catalog.cut(connection, store.disk.entries()[0].id, 0)
        assert find(store, CHUNK) == []
        keep(store, PROMPT)
        (known,) = find(store, CHUNK)
        assert_loads(store, known, PROMPT)


def test_an_expired_variant_is_unknown(tmp_path: Path) -> None:
    now = [1_900_000_000.0]
    with TieredStore(tmp_path / "c", replace(ON_DISK, ttl_seconds=60), Machine(clock=lambda: now[0])) as store:
        listed(store)
        assert len(find(store, CHUNK)) == 1
        now[0] += 61
        assert find(store, CHUNK) == []
        store.maintain()
        assert rows(store) == 0


def test_removing_entries_removes_their_variants(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        listed(store)
        listed(store, CHUNK, Span(0, 60))
        store.disk.remove([row for row in store.disk.entries() if row.tokens == 150])
        assert rows(store) == 1
        store.disk.remove(store.disk.entries())
        store.disk.collect()
        assert rows(store) == 0 and variant_counts(store) == VariantCounts()


def test_what_is_used_least_goes_first_and_the_new_one_stays(tmp_path: Path) -> None:
    bounded = replace(ON_DISK, max_a_chunk=2, max_variants=3)
    with TieredStore(tmp_path / "c", bounded) as store:
        prompts = [[number, *CHUNK] for number in range(4)]
        listed(store, prompts[0], Span(1, 61))
        store.variants.record_use(find(store, CHUNK)[0], recomputed=0.5, saved_ms=1.0)
        store.maintain()
        for prompt in prompts[1:]:
            listed(store, prompt, Span(1, 61))
        frequencies = [known.frequency for known in find(store, CHUNK)]
        assert frequencies == [2.0, 0.0]
        assert_loads(store, find(store, CHUNK)[1], prompts[3])
        assert_loads(store, find(store, CHUNK)[0], prompts[0])
        for start in (0, 20, 40):
            listed(store, PROMPT, Span(start, start + 10))
        assert rows(store) == 3
        assert [known.frequency for known in find(store, CHUNK)] == [2.0]


def test_a_use_counts_more_the_less_was_recomputed_and_never_without_bound(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        listed(store)
        for recomputed in (0.5, 0.8, 0.0, 0.001):
            store.variants.record_use(find(store, CHUNK)[0], recomputed, saved_ms=3.0)
        assert find(store, CHUNK)[0].frequency == 0
        store.maintain()
        assert find(store, CHUNK)[0].frequency == pytest.approx(2 + 1.25 + 10 + 10)
        (row,) = store.disk.entries()
        assert row.hits == 4 and row.saved_ms == pytest.approx(12)


# -- non-prefix KV ----------------------------------------------------------------------------------------------------


def test_nonprefix_kv_comes_back_to_the_bit_and_no_exact_lookup_finds_it(tmp_path: Path) -> None:
    right = make_kv(PROMPT, SPAN)
    for number, tiers in enumerate((ON_DISK, IN_MEMORY)):
        with TieredStore(tmp_path / str(number), tiers) as store:
            given_variant = variant(PROMPT, SPAN, drift=0.4)
            assert store.variants.keep_nonprefix(KV_SPACE, CHUNK, right, given_variant).outcome == "kept"
            (known,) = find(store, CHUNK)
            assert known.nonprefix and is_same(known.variant, given_variant)
            assert_gives(store, known, right)
            assert store.lookup(KV_SPACE, CHUNK).length == 0 and store.lookup(KV_SPACE, PROMPT).length == 0
            assert find(store, CHUNK, nonprefix(KV_SPACE)) == []
            assert variant_counts(store) == VariantCounts(chunks=1, variants=1, nonprefix=1)
            assert check(store.disk).problems == ()


def test_of_nonprefix_variants_the_least_used_goes_with_its_bytes(tmp_path: Path) -> None:
    prompts = [[*range(40 * number, 40 * number + 40), *CHUNK] for number in range(4)]
    kvs, variants = [make_kv(one, SPAN) for one in prompts], [variant(one, SPAN, 0.5) for one in prompts]
    with TieredStore(tmp_path / "c", ON_DISK) as store:

        def keep(number: int) -> str:
            return store.variants.keep_nonprefix(KV_SPACE, CHUNK, kvs[number], variants[number]).outcome

        assert [keep(0), keep(1), keep(0)] == ["kept", "kept", "known"]
        used = next(known for known in find(store, CHUNK) if is_same(known.variant, variants[0]))
        store.variants.record_use(used, recomputed=0.5)
        store.maintain()
        assert [keep(2), keep(3)] == ["kept", "kept"]
        store.maintain()
        most_used, newest = find(store, CHUNK)
        assert is_same(most_used.variant, variants[0]) and is_same(newest.variant, variants[3])
        assert_gives(store, most_used, kvs[0])
        assert_gives(store, newest, kvs[3])
        assert len(store.disk.entries()) == 2 and check(store.disk).problems == ()


def test_nonprefix_kv_after_the_same_chunks_is_kept_once_unless_it_lost_its_end(tmp_path: Path) -> None:
    first, second = make_kv(PROMPT, SPAN), make_kv([*range(40, 80), *CHUNK], SPAN)
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        again = variant(PROMPT, SPAN)
        assert store.variants.keep_nonprefix(KV_SPACE, CHUNK, first, again).outcome == "kept"
        assert store.variants.keep_nonprefix(KV_SPACE, CHUNK, second, again).outcome == "known"
        with store.disk.database.writing() as connection:
            catalog.cut(connection, store.disk.entries()[0].id, 1)  # its head is left
        assert find(store, CHUNK) == []
        assert store.variants.keep_nonprefix(KV_SPACE, CHUNK, second, again).outcome == "kept"
        (known,) = find(store, CHUNK)
        assert is_same(known.variant, again)
        assert_gives(store, known, second)


def test_nonprefix_chunks_with_a_common_prefix_share_nothing(tmp_path: Path) -> None:
    spans = [Span(40, 40 + count) for count in (20, 40, 64, 90)]
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        for number, span in enumerate(spans):
            kv = make_kv([number] * 40 + PROMPT[40:], span)
            kept = store.variants.keep_nonprefix(KV_SPACE, PROMPT[40 : span.stop], kv, variant(PROMPT, span))
            assert kept.outcome == "kept"
        for number, span in enumerate(spans):
            (known,) = find(store, PROMPT[40 : span.stop])
            assert_gives(store, known, make_kv([number] * 40 + PROMPT[40:], span))


def test_what_is_left_of_nonprefix_kv_that_lost_its_end_goes(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        store.variants.keep_nonprefix(KV_SPACE, CHUNK, make_kv(PROMPT, SPAN), variant(PROMPT, SPAN))
        with store.disk.database.writing() as connection:
            catalog.cut(connection, store.disk.entries()[0].id, 1)
        store.maintain()
        assert store.disk.entries() == [] and rows(store) == 0


def test_nonprefix_kv_goes_with_its_row(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", replace(ON_DISK, max_variants=2)) as store:
        for start in (0, 30, 60):
            span = Span(start, start + 40)
            chunk = PROMPT[span.start : span.stop]
            store.variants.keep_nonprefix(KV_SPACE, chunk, make_kv(PROMPT, span), variant(PROMPT, span))
        assert rows(store) == 2 and len(store.disk.entries()) == 2
        assert find(store, PROMPT[:40]) == []


def test_nonprefix_kv_obeys_limit_and_admission_like_any_other(tmp_path: Path) -> None:
    kv, given_variant = make_kv(PROMPT, SPAN), variant(PROMPT, SPAN)
    with TieredStore(tmp_path / "a", replace(ON_DISK, admission="second-use")) as store:
        assert store.variants.keep_nonprefix(KV_SPACE, CHUNK, kv, given_variant).outcome == "refused"
        assert store.variants.keep_nonprefix(KV_SPACE, CHUNK, kv, given_variant).outcome == "kept"
    with TieredStore(tmp_path / "b", replace(ON_DISK, disk_limit=100_000)) as store:
        kept = store.variants.keep_nonprefix(KV_SPACE, CHUNK, kv, given_variant)
        assert kept.outcome == "refused" and "limit" in kept.reason
        assert find(store, CHUNK) == []


# -- purge, check, versions --------------------------------------------------------------------------------------------


def test_after_a_purge_no_trace_of_the_tokens_is_left_in_rows_nor_in_nonprefix_kv(tmp_path: Path) -> None:
    head, secret, other = numbers(1, 45), numbers(2, 50), numbers(3, 50)
    prompt = [*head, *secret, *other]
    folder = tmp_path / "c"
    spans = [Span(0, 45), Span(45, 95), Span(95, 145)]
    with TieredStore(folder, IN_MEMORY) as store:
        keep(store, prompt)
        store.variants.keep(KV_SPACE, prompt, [variant(prompt, span) for span in spans])
        for span in spans:
            chunk = prompt[span.start : span.stop]
            store.variants.keep_nonprefix(KV_SPACE, chunk, make_kv(prompt, span), variant(prompt, span, 0.1))
        assert variant_counts(store, KV_SPACE) == VariantCounts(chunks=3, variants=6, nonprefix=3)
        assert traces(folder, secret)
        store.purge("local", "", [TokenRun("words", token_bytes(secret))])
        assert traces(folder, secret) == []
        assert [len(find(store, prompt[span.start : span.stop])) for span in spans] == [0, 0, 0]
        assert rows(store) == 0 and load(store, prompt) == 32
        assert check(store.disk).problems == ()
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    gone = [chunk_digest(secret), chunk_digest(prompt[:95]), chunk_digest(other), token_bytes(secret[:2])]
    kv = make_kv(prompt, spans[1]).layers[0].values[0, :8].tobytes()
    assert not any(part in data for data in files for part in (*gone, *(one.hex().encode() for one in gone), kv))


def test_a_purge_leaves_the_variants_of_others_and_those_before_the_run(tmp_path: Path) -> None:
    other = KvSpace(Namespace("synthetic", tenant="somebody else"), SMALL)
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        for kv_space in (KV_SPACE, other):
            listed(store, PROMPT, SPAN, kv_space)
            listed(store, PROMPT, Span(3, 60), kv_space)
            store.variants.keep_nonprefix(kv_space, CHUNK, make_kv(PROMPT, SPAN, kv_space), variant(PROMPT, SPAN))
        store.purge("local", "", [TokenRun("words", token_bytes(PROMPT[64:90]))])
        assert find(store, CHUNK) == []
        assert_loads(store, find(store, PROMPT[3:60])[0], PROMPT)
        assert len(find(store, CHUNK, other)) == 2 and len(find(store, PROMPT[3:60], other)) == 1


def test_a_check_finds_nothing_wrong_with_rows_whose_blocks_went(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        listed(store)
        store.variants.keep_nonprefix(KV_SPACE, CHUNK, make_kv(PROMPT, SPAN), variant(PROMPT, SPAN))
        with store.disk.database.writing() as connection:
            catalog.cut(connection, store.disk.entries()[0].id, 1)
        assert check(store.disk, fix=True).problems == ()
        (known,) = find(store, CHUNK)
        assert known.nonprefix and rows(store) == 1


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = TieredStore(tmp_path / "c", ON_DISK)
    listed(store)
    (known,) = find(store, CHUNK)
    store.close()
    for ask in (
        lambda: find(store, CHUNK),
        lambda: store.variants.load(KV_SPACE, known),
        lambda: store.variants.keep(KV_SPACE, PROMPT, [known.variant]),
        lambda: store.variants.keep_nonprefix(KV_SPACE, CHUNK, make_kv(PROMPT, SPAN), known.variant),
    ):
        with pytest.raises(Closed):
            ask()


def test_scores_are_what_was_given_whatever_bits_they_have(tmp_path: Path) -> None:
    odd = np.array([np.nan, np.inf, -0.0, 6e-8] * 15, np.float16)
    given_variant = replace(variant(PROMPT, SPAN), scores=ChunkScores(odd, odd[::-1], -1e300, ()))
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        keep(store, PROMPT)
        store.variants.keep(KV_SPACE, PROMPT, [given_variant])
        assert is_same(find(store, CHUNK)[0].variant, given_variant)


def test_looking_variants_up_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with TieredStore(folder, ON_DISK) as store:
        listed(store)
        with store.disk.database.writing() as connection:
            connection.execute("UPDATE variants SET seal=x'00'")
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
        assert find(store, CHUNK) == [] and variant_counts(store).variants == 1
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}
        differing = {path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        assert differing <= {"catalog.sqlite-shm"}  # where readers are noted


def test_a_row_that_was_sealed_without_the_key_is_not_believed(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", replace(ON_DISK, key=bytes(range(32)))) as store:
        given_variant = listed(store)
        (known,) = find(store, CHUNK)
        assert_loads(store, known, PROMPT)
        forged = listing(PlainDigester(), known.kv_space, known.location, replace(given_variant, drift=0.75))
        with store.disk.database.writing() as connection:
            connection.execute("UPDATE variants SET drift=0.75, seal=?", (forged.seal,))
        assert find(store, CHUNK) == []


def test_nonprefix_and_exact_kv_of_one_chunk_are_never_taken_for_each_other(tmp_path: Path) -> None:
    """Keeping the chunk itself, exactly, beside its non-prefix KV: neither is taken for the other."""
    with TieredStore(tmp_path / "c", ON_DISK) as store:
        approximate = make_kv([9] * 40 + PROMPT[40:], SPAN)
        store.variants.keep_nonprefix(KV_SPACE, CHUNK, approximate, variant(PROMPT, SPAN, 0.5))
        assert load(store, CHUNK) == 0
        listed(store, CHUNK, Span(0, 60))
        assert load(store, CHUNK) == 60
        exact, inexact = sorted(find(store, CHUNK), key=lambda known: known.nonprefix)
        assert_loads(store, exact, CHUNK)
        assert_gives(store, inexact, approximate)
