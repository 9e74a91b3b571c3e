"""The chunk cache with every engine: exact where it must be, recomputed as far as the engine can, never in the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.chunks.match import calibration_of, remember_budgets
from rekindle.core.kv import LayerKv, Span
from rekindle.engine.fake import FakeEngine
from rekindle.errors import Cancelled, KvLost
from rekindle.store.feed import StoredFeed
from tests.chunks.chunk_reuse import PASSAGES, Outcome, asked, cancelling_after, compute, prefill, warmed
from tests.kvs import variant_counts
from tests.parity.engines import KINDS, assert_same, each, make, needs
from tests.parity.sessions import is_open, opened, uncached, watch

pytestmark = pytest.mark.thorough

A, B, C, A2, D, E = PASSAGES
SPANS = ("fake", "hf", "llamacpp", "llamacpp-f32")


@pytest.fixture(autouse=True)
def _quick(one_thread: None) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def reusing(kind: str, folder: Path, **settings: Any) -> Session:
    return opened(kind, folder, **{"reuse": "approximate", "recompute_budget": 0.3, **settings})


def assert_right(kind: str, outcome: Outcome) -> None:
    """The logits are those without a cache, as far as the engine promises that."""
    assert outcome.reuse.level == "exact" and outcome.reuse.from_chunks == 0
    assert_same(kind, outcome.logits, compute(uncached(kind).engine, outcome.tokens)[0])


@each(*SPANS)
def test_exact_answers_between_approximate_ones_are_those_without_a_cache(kind: str, folder: Path) -> None:
    with reusing(kind, folder) as session:
        warmed(session, [A, B, C])
        approximate = prefill(session, asked([C, D, A]))
        assert [chunk.source for chunk in approximate.reuse.chunks] == ["reused", "computed", "reused"]
        assert approximate.reuse.recomputed == round(0.3 * approximate.reuse.from_chunks)
        assert_right(kind, prefill(session, asked([C, D, A], reuse="exact")))
        again = prefill(session, asked([D, C], "Who?"))
        assert again.reuse.chunks[0].source == "reused"  # computed after reused ones
        assert_right(kind, prefill(session, asked([D, C], "Who?", reuse="exact")))
    with opened(kind, folder) as exact:
        for order in ([C, D, A], [A, B, C], [D, C]):
            assert_right(kind, prefill(exact, asked(order)))


@each(*SPANS)
def test_where_every_token_is_recomputed_the_logits_are_right(kind: str, folder: Path) -> None:
    with reusing(kind, folder, recompute_budget=0.999) as session:
        warmed(session, [A, B])
        done = prefill(session, asked([B, A]))
        assert done.reuse.level == "approximate" and done.reuse.recomputed == done.reuse.from_chunks
        assert_same(kind, done.logits, compute(uncached(kind).engine, done.tokens)[0])


@each(*SPANS)
def test_reused_passages_are_closer_to_the_right_logits_than_no_passages(kind: str, folder: Path) -> None:
    """Keys that were not turned, or put in the wrong place, would show."""
    with reusing(kind, folder, recompute_budget=0.0) as session:
        warmed(session, [A, B])
        done = prefill(session, asked([B, A]))
        right, wrong = compute(uncached(kind).engine, done.tokens)[1], done.kv
        for used in done.prompt.quoted:
            # The first layer sees tokens and places only: there, turned KV is the right one.
            ours, theirs = (kv.layers[0].keys[:, used.span.start : used.span.stop] for kv in (wrong, right))
            ours, theirs = ours.astype(np.float32), theirs.astype(np.float32)
            assert np.abs(ours - theirs).max() <= 4 * max(KINDS[kind].tolerance, 1e-5) * np.abs(theirs).max()


@each(*SPANS)
def test_a_beginning_that_ends_inside_a_passage_is_the_same_from_the_store_and_the_engine(
    kind: str, folder: Path
) -> None:
    """With no budget, no token leads from what is loaded to the passage behind it."""
    with reusing(kind, folder, recompute_budget=0.0) as session:
        warmed(session, [C, A2], [A, B])  # A begins as A2 does
        session.cache.unpark()
        stored = prefill(session, asked([A2, C]))
        assert stored.plan.reuse_chunks is not None and not stored.plan.in_engine
        assert stored.plan.reused == stored.plan.reuse_chunks.spans[0].start
        assert stored.result.lost is None and stored.reuse.level == "approximate"
        right = compute(uncached(kind).engine, stored.tokens)[1]
        for layer, (ours, theirs) in enumerate(zip(stored.kv.layers, right.layers, strict=True)):
            assert_same(kind, ours.keys[:, : stored.plan.reused], theirs.keys[:, : stored.plan.reused])
            assert layer or np.isfinite(ours.keys.astype(np.float32)).all()


def break_feeds(monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    real = StoredFeed._fill

    def fill(self: StoredFeed, layer: int, out: LayerKv) -> None:
        how(self, layer)
        real(self, layer, out)

    monkeypatch.setattr(StoredFeed, "_fill", fill)


@each(*SPANS)
def test_kv_that_is_lost_or_hangs_is_computed(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    with reusing(kind, folder) as session:
        warmed(session, [A, B])

        def lose(feed: StoredFeed, layer: int) -> None:
            if layer and feed.span.start:
                raise KvLost("gone")

        with monkeypatch.context() as patch:
            break_feeds(patch, lose)
            lost = prefill(session, asked([B, A]))
            assert_right(kind, lost)
            assert lost.plan.reuse_chunks is not None and lost.reuse.miss == "lost"
        if kind == "fake":  # which fills on the thread that computes
            return
        with monkeypatch.context() as patch:
            patch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 0.1)
            break_feeds(patch, lambda feed, layer: go.wait(60) and None if feed.span.start else None)
            hanging = prefill(session, asked([A2, B, A]))
            assert_right(kind, hanging)
            assert hanging.plan.reuse_chunks is not None and hanging.reuse.miss == "lost"
            go.set()


def until_loaded(session: Session) -> None:
    """Wait for the thread of a load that nobody waits for: until it ends, requests are computed."""
    deadline = time.monotonic() + 60
    while (slow := session.cache.kv._slow) is not None and slow.filling:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@each(*SPANS)
def test_cancelling_anywhere_leaves_no_sequence_open(kind: str, folder: Path) -> None:
    with reusing(kind, folder) as session:
        warmed(session, [A, B])
        sequences, looks = watch(session.engine), 0
        while True:
            try:
                done = prefill(session, asked([B, A]), cancelling_after(looks))
                break
            except Cancelled:
                session.cache.unpark()
                assert not any(map(is_open, sequences))
                looks += 1
            until_loaded(session)
            assert looks < 1000
        assert looks > 0 and done.reuse.level == "approximate"
        assert_right(kind, prefill(session, asked([B, A], reuse="exact")))


@needs("llamacpp-opaque")
def test_an_engine_whose_state_cannot_be_taken_apart_computes(folder: Path) -> None:
    with reusing("llamacpp-opaque", folder) as session:
        for order in ([A, B], [B, A]):
            reply = session.chat("Why?", documents=order, max_tokens=2)
            assert reply.reuse.level == "exact" and reply.reuse.from_chunks == 0 and reply.reuse.chunks == ()


@needs("llamacpp")
def test_an_engine_that_can_only_lead_leads(folder: Path) -> None:
    with reusing("llamacpp", folder) as session:
        warmed(session, [A, B])
        done = prefill(session, asked([B, A]))
        assert done.reuse.recompute_policy == "leading" and done.reuse.budget == 0.3
        for chunk in done.reuse.chunks:
            assert chunk.recomputed_positions == tuple(range(chunk.start, chunk.start + chunk.recomputed))


# -- what was calibrated ---------------------------------------------------------------------------------------------


@pytest.fixture
def fake() -> Iterator[FakeEngine]:
    engine = make("fake")
    assert isinstance(engine, FakeEngine)
    yield engine
    engine.close()


def test_a_calibrated_budget_is_used_and_told_and_another_model_has_none(fake: FakeEngine, folder: Path) -> None:
    assert calibration_of(fake) is None
    remember_budgets(fake, {"rekindle": 0.25, "leading": 0.5})
    assert calibration_of(fake) == 0.25 and calibration_of(FakeEngine(seed=1)) is None
    for settings, budget, calibrated in (({}, 0.25, True), ({"recompute_budget": 0.75}, 0.75, False)):
        with opened(fake, folder, reuse="approximate", **settings) as session:
            warmed(session, [A, B])
            done = prefill(session, asked([B, A], f"Why {budget}?"))
            assert (done.reuse.budget, done.reuse.calibrated) == (budget, calibrated)
            assert done.reuse.recomputed == round(budget * done.reuse.from_chunks)


def test_a_variant_is_a_view_on_what_is_kept_and_takes_no_second_copy(fake: FakeEngine, tmp_path: Path) -> None:
    sizes = []
    for level in ("exact", "approximate"):
        with opened(fake, tmp_path / level, reuse=level) as session:
            prefill(session, asked([A, B, C]))
            assert session.cache.store is not None
            sizes.append(sum(entry.size_bytes for entry in session.cache.store.disk.entries()))
            assert variant_counts(session.cache.store).variants == (3 if level == "approximate" else 0)
    assert sizes[0] == sizes[1] > 0


def test_a_chunk_that_is_quoted_twice_is_reused_twice(fake: FakeEngine, folder: Path) -> None:
    with opened(fake, folder, reuse="approximate", recompute_budget=0.0) as session:
        warmed(session, [A, B])
        done = prefill(session, asked([B, A, B]))
        assert [chunk.source for chunk in done.reuse.chunks] == ["reused"] * 3
        first, last = (done.prompt.quoted[at].span for at in (0, 2))
        values = done.kv.layers[-1].values
        assert np.array_equal(values[:, first.start : first.stop], values[:, last.start : last.stop])
        assert done.kv.span == Span(0, len(done.tokens))


@each("fake", "hf")
def test_a_passage_that_begins_as_a_known_one_does_is_known_as_well(kind: str, folder: Path) -> None:
    with reusing(kind, folder) as session:
        warmed(session, [A], [A2])  # the second finds its first tokens in the first's place
        assert session.cache.store is not None and variant_counts(session.cache.store).variants == 2
        assert [chunk.source for chunk in prefill(session, asked([B, A2])).reuse.chunks] == ["exact", "reused"]


@each("fake", "hf")
def test_a_passage_of_exact_prompts_is_known_once_an_approximate_one_has_met_it(kind: str, folder: Path) -> None:
    with reusing(kind, folder) as session:
        warmed(session, [A, B], reuse="exact")
        assert prefill(session, asked([B, A])).reuse.from_chunks == 0
        prefill(session, asked([A, B], "When?"))  # loads both
        moved = prefill(session, asked([C, B], "What?"))
        assert [chunk.source for chunk in moved.reuse.chunks] == ["exact", "reused"]


def test_passages_have_the_numbers_of_the_prompt(folder: Path) -> None:
    with reusing("fake", folder) as session:
        warmed(session, [A, B])
        told = prefill(session, asked(["Short.", B, A], "Which?")).reuse.chunks
        assert [(chunk.number, chunk.source) for chunk in told] == [(2, "reused"), (3, "reused")]
