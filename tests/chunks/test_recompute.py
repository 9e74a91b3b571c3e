"""Selective recompute: `exact` never sees reused KV, stale KV is never kept as computed, every token is counted."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmarks.baselines import recompute_policies
from benchmarks.baselines.recompute_policies import CRAFTS, RECOMPUTE_POLICIES
from rekindle import Session
from rekindle.cache.cost import FREE, Costs
from rekindle.cache.miss_reason import MissEvidence, reason_of
from rekindle.core.chunk import chunk_digest
from rekindle.core.keys import token_bytes
from rekindle.core.kv import LayerKv, Span
from rekindle.core.request import Request, ReuseLevel
from rekindle.engine.base import Capabilities, Logits, Row
from rekindle.engine.fake import FakeEngine, _rotate
from rekindle.errors import Cancelled, InvalidSetting, KvLost
from rekindle.session.prompt import encode_prompt
from rekindle.store.feed import StoredFeed
from tests.chunks.chunk_reuse import (
    PASSAGES,
    asked,
    assert_is_exact,
    assert_store_is_exact,
    cancelling_after,
    cold,
    kv_space_of,
    prefill,
    same_kv,
    warmed,
)
from tests.kvs import variant_counts
from tests.parity.sessions import is_open, opened, watch
from tests.server.serving import eventually
from tests.server.soak import tiny_embedder
from tests.session.asking import Waiting, forms_of_tokens, traces

pytestmark = pytest.mark.thorough

A, B, C, A2, D, E = PASSAGES
LEVELS: tuple[ReuseLevel, ...] = ("approximate", "approximate", "exact")
APPROXIMATE: dict[str, Any] = {"reuse": "approximate", "recompute_budget": 0.3}


def reusing(folder: Path, engine: FakeEngine | None = None, **settings: Any) -> Session:
    """A session that reuses every chunk it can."""
    recompute_policy = settings.pop("recompute_policy", None)
    session = opened(engine or FakeEngine(), folder, **{**APPROXIMATE, **settings})
    if recompute_policy is not None:
        recompute_policies.use(
            session, recompute_policy, settings.get("recompute_budget", APPROXIMATE["recompute_budget"])
        )
    return session


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with reusing(tmp_path / "cache") as session:
        yield session


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


# -- exact is exact --------------------------------------------------------------------------------------------------


def test_exact_never_reuses_chunks_however_many_variants_are_stored(session: Session) -> None:
    warmed(session, [A, B, C], [C, B, A])
    question = asked([B, C, A])
    assert prefill(session, question).reuse.from_chunks > 0
    assert_is_exact(prefill(session, replace(question, reuse="exact")))
    assert prefill(session, asked([C, A, B])).reuse.from_chunks > 0
    assert_is_exact(prefill(session, asked([C, A, B], "Really?", reuse="exact")))


def test_an_exact_session_on_the_folder_of_an_approximate_one_answers_as_without_a_cache(tmp_path: Path) -> None:
    orders = ([A, B, C], [C, A, D], [B, D, A, C])
    with reusing(tmp_path / "cache") as session:
        for order in orders:
            session.chat("Why?", documents=order, max_tokens=4)
    with opened(FakeEngine(), tmp_path / "cache") as exact, Session(FakeEngine(), cache="off") as plain:
        for order in orders:
            ours, theirs = (one.chat("Why?", documents=order, max_tokens=6) for one in (exact, plain))
            assert ours.tokens == theirs.tokens and ours.reuse.level == "exact"
            assert ours.reuse.chunks == () and ours.reuse.from_chunks == 0


def test_prompts_without_passages_are_exact_where_chunk_reuse_is_allowed(session: Session) -> None:
    warmed(session, [A, B])
    for text in (A, f"{A}\n\n[2] {B}", "Why?"):
        assert_is_exact(prefill(session, Request.of([{"role": "user", "content": text}])))
        assert_is_exact(prefill(session, Request.of(text)))


def test_a_budget_of_all_tokens_plans_no_chunk_reuse(tmp_path: Path) -> None:
    with reusing(tmp_path / "cache", recompute_budget=1.0) as session:
        warmed(session, [A, B])
        assert_is_exact(prefill(session, asked([B, A])))


def test_a_passage_of_which_all_would_be_recomputed_is_computed_and_explain_says_why(tmp_path: Path) -> None:
    with reusing(tmp_path / "cache", recompute_budget=0.99) as session:
        warmed(session, [A, B, C])
        explained = str(session.explain_request(asked([D, B, A])))
        done = prefill(session, asked([D, B, A]))
        assert done.known.passages is not None
        known = [chunk for chunk in done.known.passages.picked if chunk.known is not None]
        most, least = sorted(known, key=lambda chunk: -chunk.dependence)
        shares = {chunk.start: (chunk.source == "reused", chunk.share) for chunk in done.reuse.chunks}
        assert shares[most.span.start] == (False, 1.0) and shares[least.span.start] == (True, pytest.approx(0.99))
        assert "all of it depends on text that has changed" in explained and "about 99% to recompute" in explained


@pytest.mark.parametrize(
    ("known", "order", "nonprefix"),
    [([A, B, C], [D, B, A], 0), ([A, B, C, E], [A, C, B], 1)],
    ids=["exact", "after a reused one"],
)
def test_a_passage_that_was_computed_although_it_is_known_is_a_variant_that_fits_the_next_time(
    tmp_path: Path, known: list[str], order: list[str], nonprefix: int
) -> None:
    with reusing(tmp_path / "cache", recompute_budget=0.99) as session:
        assert session.cache.store is not None
        warmed(session, known)
        before = variant_counts(session.cache.store)
        done = prefill(session, asked(order))
        assert done.known.passages is not None
        (computed,) = done.known.passages.computed_in(done.plan)
        after = variant_counts(session.cache.store)
        assert after.variants - before.variants == after.chunks - before.chunks + 1 and after.nonprefix == nonprefix
        earlier = done.known.passages.digests[: done.known.passages.digests.index(computed.digest)]
        again = prefill(session, asked([A2, *order], "Who says so?"))
        assert again.known.passages is not None
        (fits,) = [chunk for chunk in again.known.passages.picked if chunk.digest == computed.digest]
        assert fits.known is not None and fits.known.variant.before == earlier
        assert fits.known.variant.scores.outside.min() != fits.known.variant.scores.outside.max()  # it was measured


def test_nothing_is_scored_where_every_passage_is_stored(tmp_path: Path) -> None:
    """Reading attention costs time: only for passages that are new, even where nothing is reused."""

    class Probed(FakeEngine):
        probes: ClassVar[list[bool]] = []

        def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
            self.probes.append(rows[0].probe is not None)
            return super().step(rows, cancelled)

    with reusing(tmp_path / "cache", Probed(), recompute_budget=1.0) as session:
        warmed(session, [A, B])
        assert any(Probed.probes)
        for passages, scored in (([B, A], False), ([A, D], True)):
            Probed.probes.clear()
            assert_is_exact(prefill(session, asked(passages)))
            assert any(Probed.probes) == scored


@pytest.mark.parametrize("recompute_policy", ["rekindle", "leading", "random", "h2o", "deviation", "deviation*seen"])
def test_with_every_stale_token_recomputed_the_logits_are_exact(tmp_path: Path, recompute_policy: str) -> None:
    with reusing(tmp_path / "cache", recompute_policy=recompute_policy, recompute_budget=0.999) as session:
        warmed(session, [A, B, C])
        approximate = prefill(session, asked([C, A, B]))
        assert approximate.plan.reuse_chunks is not None
        assert (
            approximate.reuse.recomputed
            == approximate.reuse.from_chunks
            == sum(map(len, approximate.plan.reuse_chunks.spans))
        )
        logits, kv = cold(approximate.tokens)
        assert np.array_equal(approximate.logits, logits) and same_kv(approximate.kv, kv)


@pytest.mark.parametrize(
    "how", [{"recompute_policy": "full-cache", "recompute_budget": None}, {"recompute_budget": 0.0}]
)
def test_without_a_budget_the_logits_are_those_over_kv_turned_by_hand(tmp_path: Path, how: dict[str, Any]) -> None:
    with reusing(tmp_path / "cache", **how) as session:
        source = prefill(session, asked([A, B, C], "Who?"))
        approximate = prefill(session, asked([C, A, B]))
    assert approximate.reuse.recomputed == 0 and approximate.reuse.from_chunks > 0
    engine, tokens = FakeEngine(), approximate.tokens
    sequence = engine.open(len(tokens), "plain")
    head = approximate.result.plan.reused
    places = dict(zip((A, B, C), (used.span for used in source.prompt.quoted), strict=True))
    for layer, kv in enumerate(source.kv.layers):
        _put(sequence.buffer(layer, Span(0, head)), kv, 0, 0)
        for text, used in zip((C, A, B), approximate.prompt.quoted, strict=True):
            start = places[text].start
            _put(sequence.buffer(layer, used.span), kv, start, used.span.start - start)
    stale = {place for used in approximate.prompt.quoted for place in range(used.span.start, used.span.stop)}
    row = [place for place in range(head, len(tokens)) if place not in stale]
    sequence.set_length(approximate.prompt.quoted[-1].span.stop)
    (logits,) = engine.step([Row(sequence, [tokens[place] for place in row], row)])
    assert np.array_equal(approximate.logits, logits)


def _put(out: LayerKv, kv: LayerKv, start: int, shift: int) -> None:
    stop = start + out.keys.shape[1]
    keys = kv.keys[:, start:stop]
    out.keys[:] = _rotate(keys, np.full(stop - start, shift)) if shift else keys
    out.values[:] = kv.values[:, start:stop]


@pytest.mark.parametrize("recompute_policy", [*RECOMPUTE_POLICIES, "deviation", "outside*lead", "seen*deviation"])
def test_every_recompute_policy_chooses_within_its_budget(tmp_path: Path, recompute_policy: str) -> None:
    budget = None if recompute_policy in ("full-cache", "set-cache") else 0.5
    with reusing(tmp_path / "cache", recompute_policy=recompute_policy, recompute_budget=budget) as session:
        warmed(session, [A, B, C])
        done = prefill(session, asked([B, A, C, D]))
        assert done.reuse.recompute_policy == recompute_policy and done.reuse.from_chunks > 0
        if recompute_policy in ("full-cache", "set-cache"):
            assert done.reuse.recomputed == 0
        elif recompute_policy in CRAFTS:
            assert 0 < done.reuse.recomputed < done.reuse.from_chunks
        else:
            assert done.reuse.recomputed == round(0.5 * done.reuse.from_chunks)
        assert [chunk.source for chunk in done.reuse.chunks] == ["reused"] * 3 + ["computed"]


# -- what is stale is never kept as computed -------------------------------------------------------------------------


class Wanderer:
    """Asks a session at random: shared passages, other heads and orders, chats that go on, levels in turn."""

    def __init__(self, folder: Path, seed: int, **settings: Any) -> None:
        self.random = random.Random(seed)
        self.folder, self.settings = folder, settings
        self.session = reusing(folder, **settings)
        self.prompts: list[tuple[int, ...]] = []
        self.chats: list[tuple[list[dict[str, str]], list[str]]] = []
        self.levels: set[str] = set()

    def go(self, times: int) -> None:
        """So many requests; each exact one must be right to the last bit."""
        for _ in range(times):
            self._disturb()
            messages, documents = self._chat()
            level: ReuseLevel = self.random.choice(LEVELS)
            done = prefill(self.session, Request.of(messages, documents=documents, reuse=level))
            self.prompts.append(done.tokens)
            self.levels.add(done.reuse.level)
            if level == "exact" or done.reuse.level == "exact":
                assert_is_exact(done)
            self.chats = [*self.chats[-3:], (messages, documents)]

    def end(self) -> None:
        """Nothing that an exact lookup finds is anything but what computing gives."""
        assert_store_is_exact(self.session, kv_space_of(self.session), self.prompts)
        self.session.close()
        with opened(FakeEngine(), self.folder) as exact:
            assert_store_is_exact(exact, kv_space_of(exact), self.prompts)

    def _disturb(self) -> None:
        if self.random.random() < 0.15:
            self.session.cache.unpark()
        if self.random.random() < 0.05:
            self.session.close()
            self.session = reusing(self.folder, **self.settings)

    def _chat(self) -> tuple[list[dict[str, str]], list[str]]:
        if self.chats and self.random.random() < 0.5:
            return self._changed(*self.random.choice(self.chats))
        system = self.random.choice(["Be brief.", "Be brief, but kind."])
        documents = self.random.choices(PASSAGES, k=self.random.randint(1, 3))  # one may stand twice
        question = self.random.choice(["Why?", "Who was it?"])
        return [{"role": "system", "content": system}, {"role": "user", "content": question}], documents

    def _changed(self, messages: list[dict[str, str]], documents: list[str]) -> tuple[list[dict[str, str]], list[str]]:
        """The same chat: longer, again, ending otherwise, or with the same tokens for other passages."""
        how = self.random.choice(["on", "on", "again", "cut", "join", "paste"])
        if how == "on":
            answered = {"role": "assistant", "content": "Because."}
            return [*messages, answered, {"role": "user", "content": "And then?"}], documents
        if how == "cut" and documents:
            return messages, [*documents[:-1], documents[-1][:24] + self.random.choice(["!" * 9, " and so on."])]
        if how == "join" and len(documents) > 1:
            return messages, [*documents[:-2], f"{documents[-2]}\n\n[{len(documents)}] {documents[-1]}"]
        if how == "paste" and len(documents) > 1:
            first = {**messages[1], "content": f"[{len(documents)}] {documents[-1]}\n\n{messages[1]['content']}"}
            return [messages[0], first, *messages[2:]], documents[:-1]
        return messages, documents


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_of_levels_leaves_only_exact_kv_behind(tmp_path: Path, seed: int) -> None:
    wanderer = Wanderer(tmp_path / "cache", seed)
    wanderer.go(14)
    wanderer.end()
    assert wanderer.levels == {"exact", "approximate"}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 112))
def test_the_same_for_long_and_with_other_recompute_policies(tmp_path: Path, seed: int) -> None:
    ways: list[dict[str, Any]] = [
        {"recompute_policy": "deviation"},
        {"recompute_policy": "cache-craft"},
        {"memory_limit": "0"},
        {},
    ]
    wanderer = Wanderer(tmp_path / "cache", seed, **ways[seed % 4])
    wanderer.go(40)
    wanderer.end()


def test_passages_that_another_outline_hides_are_still_not_exact(session: Session) -> None:
    warmed(session, [B])
    approximate = prefill(session, asked([D, B], "Why so?"))  # D was computed, B is stale
    assert [chunk.source for chunk in approximate.reuse.chunks] == ["exact", "reused"]
    pasted = prefill(session, asked([D], f"[2] {B}\n\nWhy so?"))  # the same tokens, as if B were no passage
    assert pasted.tokens == approximate.tokens
    assert pasted.reuse.level == "approximate"
    joined = prefill(session, asked([f"{D}\n\n[2] {B}"], "Why so?"))
    assert joined.tokens == approximate.tokens
    assert joined.reuse.level == "approximate"
    assert_is_exact(prefill(session, asked([D, B], "Why so?", reuse="exact")))
    assert_store_is_exact(session, kv_space_of(session), [approximate.tokens])


def test_kv_computed_after_reused_passages_is_found_by_chunk_reuse_only(session: Session) -> None:
    assert session.cache.store is not None
    warmed(session, [A, B])
    done = prefill(session, asked([B, A, C]))
    assert done.reuse.chunks[2].source == "computed"
    assert variant_counts(session.cache.store).nonprefix == 1
    assert_store_is_exact(session, kv_space_of(session), [done.tokens])
    session.cache.unpark()
    with session.cache.peek(asked([B, A, C], reuse="exact"), done.tokens, done.prompt.prompt_layout) as peeked:
        known = peeked.lookup
    assert known.matches.length <= done.prompt.quoted[0].span.start + 1 and known.passages is None
    again = prefill(session, asked([C, B], "Who says so?"))
    assert [chunk.source for chunk in again.reuse.chunks] == ["reused", "reused"]
    assert again.reuse.chunks[0].drift and again.reuse.chunks[0].drift > 0
    assert_is_exact(prefill(session, asked([C, B], "Who says so?", reuse="exact")))


# -- contexts in the engine ------------------------------------------------------------------------------------------


def test_a_follow_up_continues_an_approximate_context_and_says_so(session: Session) -> None:
    warmed(session, [A, B])
    chat = [{"role": "user", "content": "Why?"}]
    once = session.chat(chat, documents=[B, A], max_tokens=4)
    assert once.reuse.level == "approximate"
    longer = [*chat, {"role": "assistant", "content": "So."}, {"role": "user", "content": "And then?"}]
    follow = prefill(session, Request.of(longer, documents=[B, A]))
    assert follow.plan.in_engine and follow.plan.reuse_chunks is None
    assert follow.planned.level == follow.reuse.level == "approximate"
    assert follow.reuse.from_chunks == once.reuse.from_chunks and follow.reuse.recomputed == 0
    assert [chunk.source for chunk in follow.reuse.chunks] == ["reused", "reused"]
    assert_is_exact(prefill(session, Request.of(longer, documents=[B, A], reuse="exact")))


def test_an_exact_follow_up_does_not_use_an_approximate_context_but_leaves_it(session: Session) -> None:
    warmed(session, [A, B])
    approximate = prefill(session, asked([B, A]))
    exact = prefill(session, asked([B, A], reuse="exact"))
    assert_is_exact(exact)
    assert exact.reuse.engine <= approximate.prompt.quoted[0].span.start + 1


def test_a_context_cut_inside_a_reused_passage_counts_what_stays(session: Session) -> None:
    long = "The baker of Vesk, whose oven stands behind the chapel, sells rye on Mondays, wheat on Fridays"
    warmed(session, [A, long])
    assert prefill(session, asked([long, A])).reuse.from_chunks > 0
    cut = prefill(session, asked([long[:88] + "."]))  # goes on from a context that ends inside the passage
    assert cut.plan.in_engine and cut.reuse.level == "approximate"
    (chunk,) = cut.reuse.chunks
    assert chunk.source == "reused" and cut.reuse.from_chunks == cut.plan.reused - chunk.start
    other = prefill(session, asked([long[:80] + "x" * 200, A], "Who?"))
    assert other.reuse.level in ("exact", "approximate")
    assert_store_is_exact(session, kv_space_of(session), [cut.tokens, other.tokens])


def test_continuing_an_approximate_context_may_reuse_more_chunks(session: Session) -> None:
    warmed(session, [A, B], [C, D])
    one = prefill(session, asked([B, A]))
    two = prefill(session, asked([B, A, C, D]))
    assert two.plan.in_engine and [chunk.source for chunk in two.reuse.chunks] == ["reused"] * 4
    assert two.reuse.from_chunks > one.reuse.from_chunks  # those that stand there already, too
    assert_is_exact(prefill(session, asked([B, A, C, D], reuse="exact")))


# -- what cannot be read ---------------------------------------------------------------------------------------------


def break_feeds(monkeypatch: pytest.MonkeyPatch, how: Callable[[int], None]) -> None:
    """Every fill of a stored feed asks first."""
    real = StoredFeed._fill

    def fill(self: StoredFeed, layer: int, out: LayerKv) -> None:
        how(layer)
        real(self, layer, out)

    monkeypatch.setattr(StoredFeed, "_fill", fill)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_damaged_variant_is_computed_and_the_reply_is_that_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    with reusing(tmp_path / "cache") as session:
        warmed(session, [A, B])
        sequences = watch(session.engine)

        def lose(at: int) -> None:
            if at == layer:
                raise KvLost("damaged")

        break_feeds(monkeypatch, lose)
        done = prefill(session, asked([B, A]))
        assert_is_exact(done)
        assert done.plan.reuse_chunks is not None and done.reuse.miss == "lost" and done.result.lost is not None
        monkeypatch.undo()
        again = prefill(session, asked([A, C, B]))
        assert again.reuse.level == "approximate"
        assert_scores_add_up(session, [A, B])
        session.cache.unpark()
        assert not any(map(is_open, sequences))


def assert_scores_add_up(session: Session, texts: Sequence[str]) -> None:
    """No token of a variant paid more or less than one."""
    prompt = encode_prompt(session.engine, asked(texts))
    assert prompt.prompt_layout is not None and session.cache.store is not None
    for span in prompt.prompt_layout.chunks:
        tokens = prompt.tokens[span.start : span.stop]
        found = session.cache.store.variants.find(kv_space_of(session), {chunk_digest(tokens): token_bytes(tokens)})
        for known in found[chunk_digest(tokens)]:
            scores = known.variant.scores
            paid = scores.intra + sum(one.mass for one in scores.earlier)
            assert 0 < paid <= len(span) * (1 + 1e-4)
            assert abs(scores.intra - (1 - scores.outside.astype(np.float64)).sum()) < 1e-2 * len(span)


def test_a_variant_whose_file_was_damaged_is_computed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with reusing(folder) as session:
        warmed(session, [A, B, C])
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]
    extents = [path for path in files if "catalog" not in path.name and path.suffix not in (".db", ".sqlite")]
    assert extents
    for path in extents:
        data = bytearray(path.read_bytes())
        for place in range(len(data) // 2, len(data), 64):
            data[place] ^= 0x5A
        path.write_bytes(data)
    with reusing(folder) as session:
        done = prefill(session, asked([C, A, B]))
        assert_is_exact(done)
        assert done.reuse.miss == "lost"


def test_a_variant_evicted_between_lookup_and_load_is_computed(tmp_path: Path) -> None:
    with reusing(tmp_path / "cache", memory_limit="0") as session:
        warmed(session, [A, B])
        request = asked([B, A])
        prompt = encode_prompt(session.engine, request)
        with session.cache.prepare(request, prompt.tokens, lambda: False, None, prompt.prompt_layout) as done:
            assert done.plan.reuse_chunks is not None and session.cache.store is not None
            disk = session.cache.store.disk
            disk.remove(disk.entries())
            disk.collect()
            assert np.array_equal(done.run(len(prompt.tokens) + 8, lambda: False), cold(prompt.tokens)[0])
            assert done.result.lost is not None and done.context.chunk_reuse[0].source == "exact"
            assert done.reuse.level == "exact"


def test_a_variant_that_comes_too_late_is_computed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    warmed(session, [A, B])
    monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 0.05)
    break_feeds(monkeypatch, lambda layer: time.sleep(0.2 if layer else 0.0))
    session.cache.kv.costs = costs = Costs(FREE)
    done = prefill(session, asked([B, A]))
    assert_is_exact(done)
    assert done.reuse.miss == "lost"
    ((*_, seconds, _),) = costs.as_json()["chunks"]
    assert seconds >= 0.05  # learned: it is not tried again every time


def test_feeds_that_open_too_late_are_closed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.cache.store is not None
    warmed(session, [A, B])
    monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 0.05)
    variants, feeds, go = session.cache.store.variants, list[StoredFeed](), threading.Event()
    real, closed = variants.load, list[StoredFeed]()

    def load(*args: Any) -> StoredFeed:
        assert go.wait(60)
        feeds.append(real(*args))
        return feeds[-1]

    real_close = StoredFeed.close
    monkeypatch.setattr(variants, "load", load)

    def close(self: StoredFeed) -> None:
        closed.append(self)
        real_close(self)

    monkeypatch.setattr(StoredFeed, "close", close)
    done = prefill_without_flush(session, asked([B, A]))
    assert done.lost is not None
    go.set()
    eventually(lambda: feeds and set(feeds) <= set(closed))


def prefill_without_flush(session: Session, request: Request) -> Any:
    prompt = encode_prompt(session.engine, request)
    with session.cache.prepare(request, prompt.tokens, lambda: False, None, prompt.prompt_layout) as done:
        done.run(len(prompt.tokens) + 8, lambda: False)
    return done.result


# -- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute_policy", ["rekindle", "deviation", "leading"])
def test_cancelling_in_any_pass_leaves_everything_usable(tmp_path: Path, recompute_policy: str) -> None:
    with reusing(tmp_path / "cache", recompute_policy=recompute_policy) as session:
        warmed(session, [A, B])
        sequences, looks = watch(session.engine), 0
        while True:
            try:
                done = prefill(session, asked([B, A, C], "Why?"), cancelling_after(looks))
                break
            except Cancelled:
                looks += 1
                session.cache.unpark()
                assert not any(map(is_open, sequences))
        assert looks >= (6 if recompute_policy == "rekindle" else 3)  # each of three layers, in each of its passes
        assert done.reuse.level == "approximate"
        assert_is_exact(prefill(session, asked([B, A, C], "Why?", reuse="exact")))
        session.cache.unpark()
        assert not any(map(is_open, sequences))


# -- whose variants --------------------------------------------------------------------------------------------------


def test_tenants_and_salts_never_share_variants(session: Session) -> None:
    warmed(session, [A, B], tenant="anna", cache_salt="x")
    for tenant, salt in (("bert", "x"), ("anna", "y"), (None, "x"), (None, None)):
        done = prefill(session, asked([B, A], tenant=tenant, cache_salt=salt))
        assert_is_exact(done)
        assert done.reuse.loaded == 0
    assert prefill(session, asked([B, A], tenant="anna", cache_salt="x")).reuse.from_chunks > 0


def test_a_passage_with_one_other_character_is_not_found(session: Session) -> None:
    warmed(session, [A, B])
    assert_is_exact(prefill(session, asked([C, A.replace("nine", "pine")])))
    done = prefill(session, asked([D, A.replace("nine", "five"), B]))
    assert [chunk.source for chunk in done.reuse.chunks] == ["exact", "exact", "reused"]


# -- forgetting ------------------------------------------------------------------------------------------------------

SECRET = "The combination of the safe is 83-14-27, and only Agneta Falkenrath ever knew of it."
TEA = "Tea is served at five o'clock; the kettle stands on the left of the stove."
CUPS = "The cups are in the cupboard, and whoever breaks one has to buy two of them."


def test_a_forgotten_document_leaves_no_variant_and_no_nonprefix_kv(tmp_path: Path, embedder: str) -> None:
    folder = tmp_path / "cache"
    secret = list(forms_of_tokens(FakeEngine().tokenizer.encode(SECRET), 24))[::4]
    with reusing(folder, embedder=embedder) as session:
        session.ingest(documents=[{"text": text, "source": text[:3]} for text in (TEA, CUPS)])
        session.ingest(documents=[{"text": SECRET, "source": "safe"}])
        for order in ([TEA, CUPS], [CUPS, TEA, SECRET], [SECRET, CUPS], [TEA, SECRET, CUPS]):
            session.answer(ordered(session, order)).reply  # noqa: B018
            session.flush()
        assert session.cache.store is not None and variant_counts(session.cache.store).nonprefix > 0
        assert traces(folder, secret)
        session.forget("safe")
        assert traces(folder, secret) == {}
        assert variants_of(session, SECRET) == []
        assert variant_counts(session.cache.store).variants > 0
        assert session.ask("tea at five", top_k=2, max_tokens=2).sources
    assert traces(folder, secret) == {}


def ordered(session: Session, texts: Sequence[str]) -> Request:
    """A question about passages of the library, in an order of one's own."""
    request = session.prepare("the tea, the cups and the safe", top_k=3, max_tokens=2).request
    quotes = {quote.text: quote for quote in request.quotes}
    return replace(request, quotes=tuple(quotes[text] for text in texts))


def variants_of(session: Session, text: str) -> list[Any]:
    assert session.cache.store is not None
    tokens = session.engine.tokenizer.encode(f"{text}\n\n")
    digest = chunk_digest(tokens)
    return session.cache.store.variants.find(kv_space_of(session), {digest: token_bytes(tokens)}).get(digest, [])


def test_a_question_under_way_does_not_bring_a_forgotten_document_back(tmp_path: Path, embedder: str) -> None:
    engine = Waiting()
    secret = list(forms_of_tokens(engine.tokenizer.encode(SECRET), 24))[::4]
    with reusing(tmp_path / "cache", engine, embedder=embedder) as session:
        session.ingest(documents=[{"text": text, "source": text[:3]} for text in (TEA, CUPS)])
        session.ingest(documents=[{"text": SECRET, "source": "safe"}])
        session.answer(ordered(session, [TEA, CUPS])).reply  # noqa: B018
        session.flush()
        request = ordered(session, [CUPS, TEA, SECRET])
        engine.entered.clear()
        engine.go.clear()
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(session.answer(request).reply))
        asking.start()
        assert engine.entered.wait(60)
        library = session.knowledge.library()
        library.remove([entry.id for entry in library.find("safe")])
        engine.go.set()
        asking.join(60)
        assert answers and answers[0].reuse.level == "approximate"
        session.flush()
        assert variants_of(session, SECRET) == []
        assert not {name for name in traces(tmp_path / "cache", secret) if "cache-library" not in name}


# -- who can recompute -------------------------------------------------------------------------------------------------


def test_deterministic_and_approximate_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="deterministic"):
        Session(FakeEngine(), cache=tmp_path / "cache", reuse="approximate", deterministic=True)


def test_a_deterministic_session_reuses_no_chunks_whatever_a_request_asks_for(tmp_path: Path) -> None:
    with opened(FakeEngine(), tmp_path / "cache", deterministic=True) as session:
        warmed(session, [A, B])
        assert_is_exact(prefill(session, asked([B, A], reuse="approximate")))


class Plain(FakeEngine):
    """An engine that cannot recompute parts of a context."""

    capabilities = Capabilities(layer_feeds=True, recompute="none", probes=False)


def test_with_an_engine_that_cannot_recompute_everything_is_computed(tmp_path: Path) -> None:
    with reusing(tmp_path / "cache", Plain()) as session:
        warmed(session, [A, B])
        assert_is_exact(prefill(session, asked([B, A])))
        assert session.cache.store is not None and variant_counts(session.cache.store).variants == 0


class Silent(FakeEngine):
    """An engine that recomputes, but has no probes to score variants with."""

    capabilities = replace(FakeEngine.capabilities, probes=False)


def test_variants_without_scores_are_reused_too(tmp_path: Path) -> None:
    with reusing(tmp_path / "cache", Silent(), recompute_policy="leading") as session:
        warmed(session, [A, B])
        done = prefill(session, asked([B, A]))
        assert done.reuse.from_chunks > 0 and done.reuse.recomputed == round(0.3 * done.reuse.from_chunks)


def test_a_request_may_ask_for_chunk_reuse_on_an_exact_session_and_may_refuse_it(tmp_path: Path) -> None:
    with opened(FakeEngine(), tmp_path / "cache") as session:
        warmed(session, [A, B], reuse="approximate")
        assert_is_exact(prefill(session, asked([B, C])))
        assert prefill(session, asked([D, B, A], reuse="approximate")).reuse.from_chunks > 0
        off = session.chat("How?", documents=[A, B], max_tokens=1, reuse="off")
        assert off.reuse.level == "off" and off.reuse.chunks == ()


@pytest.mark.measured_costs
def test_passages_that_took_longer_than_computing_are_computed_until_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reusing(tmp_path / "cache") as session:
        warmed(session, [A, B])
        costs = session.cache.kv.costs = Costs(replace(FREE, compute=(0.0, 1e-3, 0.0), chunks=(0.0, 1.0)))
        for exponent in [*range(-40, 10)] * 3:
            costs.reused_chunks(2.0**exponent, 100.0)
        costs.computed(Span(0, 100), 0.1)
        done = prefill(session, asked([B, A]))
        assert_is_exact(done)
        refused = done.reuse.refused_chunks
        assert done.reuse.miss == "slower" and refused is not None
        assert 0 < refused.tokens < len(done.tokens) and refused.seconds > refused.computing_seconds
        said = f"{refused.tokens:,} tokens stand in an earlier prompt; moving them would take "
        assert f"computed ({said}" in str(done.reuse)
        evidence = MissEvidence(len(done.tokens), 0, goes_on=True, miss="slower", refused=refused)
        assert reason_of(evidence).sentence == f"{refused}."
        with monkeypatch.context() as patch:  # ten minutes later it is forgotten
            patch.setattr("rekindle.cache.cost._is_young", lambda *_: False)
            assert prefill(session, asked([C, B])).reuse.from_chunks > 0


@pytest.mark.measured_costs
def test_the_time_that_chunk_reuse_took_is_learned(tmp_path: Path) -> None:
    with reusing(tmp_path / "cache") as session:
        warmed(session, [A, B])
        costs = session.cache.kv.costs = Costs(FREE)
        assert prefill(session, asked([B, A])).reuse.from_chunks > 0
        assert len(costs.as_json()["chunks"]) == 1


def test_measured_costs_never_make_chunk_reuse_fail(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache=tmp_path / "cache", disk_limit="200MB", **APPROXIMATE) as session:  # type: ignore[arg-type]
        for order in ([A, B], [B, A], [B, A, C], [C, A], [A, C, B]):
            prefill(session, asked(order))
