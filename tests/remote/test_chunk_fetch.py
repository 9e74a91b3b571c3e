"""Passages that come from an origin: reused like local ones, marked as such, and no reply depends on them."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import Session
from rekindle.cache import cost
from rekindle.cache.explain import Explanation
from rekindle.chunks.scores import ChunkScorer
from rekindle.core.chunk import ChunkMatches, PromptLayout, chunk_digest
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.reply import Reply
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import FakeEngine
from rekindle.remote import remote_kv as streams
from rekindle.remote.connection import OriginFailed, Stop
from rekindle.remote.fetch import PassageOffer, RemoteChunkFetch, WantedPassage, unknown_passages
from rekindle.remote.latency import Bandwidth, TransferSample
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.schedule import count_computed
from rekindle.remote.signing import SigningKey
from rekindle.session.prompt import encode_prompt
from rekindle.session.publish import beginnings, computed, levels_of
from rekindle.store import history
from tests.chunks.chunk_reuse import asked, compute, same_kv
from tests.kvs import variant_counts
from tests.parity.engines import make
from tests.server.serving import eventually
from tests.server.soak import tiny_embedder

PASSAGES = [
    f"{name} keeps the log of the {place}. " + f"In the evening {name} writes down the wind, the tide and the oil. " * 2
    for name, place in (("Ada", "pier"), ("Bo", "tower"), ("Cy", "ferry"), ("Dot", "mill"), ("Ed", "bakery"))
]
QUESTION = "Who writes down the lamp oil?"
APPROXIMATE: dict[str, Any] = {"reuse": "approximate", "recompute_budget": 0.3}


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of these tests is small: as if its prompts were worth streaming."""
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)


@pytest.fixture(scope="module")
def key() -> SigningKey:
    return SigningKey.new()


@pytest.fixture(scope="module")
def origin(key: SigningKey, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every passage but the third, each published alone."""
    folder = tmp_path_factory.mktemp("origin") / "files"
    publish(FakeEngine(), folder, key, [PASSAGES[number] for number in (0, 1, 3, 4)])
    return folder


def publish(engine: Any, folder: Path, key: SigningKey, passages: Sequence[str], levels: str = "raw") -> None:
    with Session(engine, cache="off") as session:
        for passage in passages:
            with computed(session, asked([passage], "")) as source:
                Publisher(folder, key).publish(source, levels_of(levels, session))


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with OriginServer(folder, OriginSettings(port=0)).running() as url:
        yield url


def opened(url: str, key: SigningKey, cache: Path, engine: Any = None, **more: Any) -> Session:
    return Session(engine or FakeEngine(), cache=cache, origin=url, origin_keys=key.public, **{**APPROXIMATE, **more})


def ask(session: Session, passages: Sequence[str] = PASSAGES, **options: Any) -> Reply:
    return session.answer(asked(passages, QUESTION, max_tokens=4, **options)).reply


def without_origin(passages: Sequence[str] = PASSAGES) -> Reply:
    with Session(FakeEngine(), cache="off") as session:
        return ask(session, passages)


def came(reply: Reply) -> list[int | None]:
    return [chunk.number for chunk in reply.reuse.chunks if chunk.streamed]


@pytest.mark.usefixtures("origin_first")
def test_passages_come_and_are_reused(origin: Path, key: SigningKey, tmp_path: Path) -> None:
    with serving(origin) as url, opened(url, key, tmp_path / "cache") as session:
        reply = ask(session)
        assert came(reply) == [1, 2, 4, 5]  # the third is not there
        assert reply.reuse.level == "approximate" and reply.reuse.from_chunks > reply.reuse.recomputed > 0
        assert reply.reuse.reused + reply.reuse.computed == reply.usage.prompt_tokens
        assert {event.lane for event in reply.reuse.timeline} == {"compute", "link"}
        assert {event.chunk for event in reply.reuse.timeline if event.lane == "link"} >= set(came(reply))
        assert session.flush() and session.cache.store is not None
        (noted,) = history.last(session.cache.store.disk, 1)
        assert "fetched from the origin" in str(Explanation.from_dict(noted.record))
        assert reply.reuse.engine == 0  # what was computed a moment ago is not called known
    # They are known here now, wherever they stand.
    with Session(FakeEngine(), cache=tmp_path / "cache", **APPROXIMATE) as session:
        later = ask(session, [PASSAGES[1], PASSAGES[4]])
        assert [chunk.source for chunk in later.reuse.chunks] == ["reused", "reused"] and not came(later)


@pytest.mark.usefixtures("origin_first")
def test_what_comes_is_what_computing_gives_to_the_last_bit(origin: Path, key: SigningKey, tmp_path: Path) -> None:
    with serving(origin) as url, opened(url, key, tmp_path / "cache") as session:
        ask(session)
        request = asked(PASSAGES[3:], QUESTION, max_tokens=4)
        prompt = encode_prompt(session.engine, request)
        with session.cache.peek(request, prompt.tokens, prompt.prompt_layout) as peeked:
            known = peeked.lookup
        assert known.passages is not None and session.cache.store is not None
        last = known.passages.picked[-1].known
        alone = encode_prompt(session.engine, asked([PASSAGES[4]], ""))
        assert last is not None and alone.prompt_layout is not None
        (span,) = alone.prompt_layout.chunks
        assert last.variant.span == span
        feed = session.cache.store.variants.load(known.kv_space, last)  # type: ignore[arg-type]
        _, expected = compute(FakeEngine(), alone.tokens[: span.stop])
        got = taken(feed, expected, span)
        own = [LayerKv(layer.keys[:, span.start :], layer.values[:, span.start :]) for layer in expected.layers]
        assert same_kv(got, Kv(span, expected.layout, tuple(own)))


def taken(feed: Any, like: Kv, span: Span) -> Kv:
    layers = []
    for layer, shape in enumerate(like.layout.layers):
        dtype = like.layout.numpy_dtype
        out = LayerKv(
            np.empty((shape.kv_heads, len(span), shape.key_dim), dtype),
            np.empty((shape.kv_heads, len(span), shape.value_dim), dtype),
        )
        feed.fill(layer, out)
        layers.append(out)
    feed.close()
    return Kv(span, like.layout, tuple(layers))


@pytest.mark.parametrize("reuse", ["exact", "off"])
def test_exact_takes_no_passage(origin: Path, key: SigningKey, reuse: str, tmp_path: Path) -> None:
    with serving(origin) as url, opened(url, key, tmp_path / "cache") as session:
        reply = ask(session, reuse=reuse)
        assert not came(reply) and reply.reuse.from_chunks == 0 and reply.tokens == without_origin().tokens


@pytest.mark.parametrize("tenants", ["local", "someone, local", "*"])
def test_nothing_is_asked_for_tenants_that_are_local(
    origin: Path, key: SigningKey, tenants: str, tmp_path: Path
) -> None:
    with serving(origin) as url, opened(url, key, tmp_path / "cache", local_tenants=tenants) as session:
        reply = ask(session)
        assert not came(reply) and not reply.reuse.timeline and reply.tokens == without_origin().tokens


@pytest.mark.usefixtures("origin_first")
def test_another_key_is_not_trusted(origin: Path, tmp_path: Path) -> None:
    with serving(origin) as url, opened(url, SigningKey.new(), tmp_path / "cache") as session:
        reply = ask(session)
        assert not came(reply) and reply.tokens == without_origin().tokens


@pytest.mark.usefixtures("origin_first")
def test_passages_come_behind_another_system_prompt_with_their_scores(
    origin: Path, key: SigningKey, tmp_path: Path
) -> None:
    with serving(origin) as url:
        with opened(url, key, tmp_path / "same") as session:
            same = {chunk.number: chunk for chunk in ask(session).reuse.chunks if chunk.streamed}
        with opened(url, key, tmp_path / "other") as session:
            request = asked(PASSAGES, QUESTION, "Answer at length.", max_tokens=4)
            explained = session.explain_request(request)
            assert explained.origin is not None and explained.origin.tokens > 0 and explained.origin.level == "raw"
            reply = session.answer(request).reply
    assert came(reply) == [1, 2, 4, 5] == sorted(same) and reply.reuse.level == "approximate"
    for chunk in reply.reuse.chunks:
        if chunk.streamed and chunk.number is not None:
            assert chunk.impact == same[chunk.number].impact  # as it was measured there
            assert chunk.overlap == 0.0 and chunk.overhead == chunk.impact  # nothing that it attended to is before it
            assert same[chunk.number].overlap == 1.0 and same[chunk.number].overhead == 0.0
    assert len({chunk.impact for chunk in same.values()}) == 4  # of each passage its own


def test_scores_are_those_of_computing_the_passage_there(key: SigningKey, tmp_path: Path) -> None:
    """The probe sees what it would see if all of the prompt were computed under it."""
    with Session(FakeEngine(), cache="off") as session:
        request = asked([PASSAGES[0]], "")
        with computed(session, request) as source:
            assert source.passage is not None
            found, tokens = source.passage(), source.tokens
        prompt = encode_prompt(session.engine, request)
        assert prompt.prompt_layout is not None
        scorer = ChunkScorer(prompt.prompt_layout, len(tokens), len(session.engine.layout.layers))
        with closing(session.engine.open(len(tokens), session.engine.regime(len(tokens)))) as sequence:
            session.engine.step([replace(Row.following(sequence, tokens, logits="none"), probe=scorer.probe)])
        passages = ChunkMatches.of(prompt.prompt_layout, tokens)
        expected = scorer.variant(1, passages.digests)
    assert expected is not None and found.span == expected.span and found.digest == expected.digest
    assert np.allclose(found.scores.outside, expected.scores.outside, atol=1e-3)
    assert found.scores.intra == pytest.approx(expected.scores.intra, rel=1e-4)
    (mine,), (theirs,) = found.scores.earlier, expected.scores.earlier
    assert mine.digest == theirs.digest and mine.mass == pytest.approx(theirs.mass, rel=1e-4)


@pytest.mark.usefixtures("origin_first")
def test_of_two_heads_the_one_of_the_prompt_counts(key: SigningKey, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    with Session(FakeEngine(), cache="off") as session:
        for system in ("Be brief.", "Answer at length."):
            for passage in PASSAGES[:2]:
                with computed(session, asked([passage], "", system)) as source:
                    Publisher(folder, key).publish(source, levels_of("raw", session))
    with serving(folder) as url, opened(url, key, tmp_path / "cache") as session:
        reply = ask(session, PASSAGES[:2])
        assert came(reply) == [1, 2] and [chunk.overlap for chunk in reply.reuse.chunks] == [1.0, 1.0]


@pytest.mark.usefixtures("origin_first")
def test_a_passage_that_is_there_in_other_levels_says_so(key: SigningKey, tmp_path: Path) -> None:
    publish(FakeEngine(), tmp_path / "files", key, PASSAGES, levels="quantized")
    with serving(tmp_path / "files") as url:
        with opened(url, key, tmp_path / "exact") as session:
            assert ask(session).reuse.origin_miss == "level"
        with opened(url, key, tmp_path / "longer") as session:  # one that does not know the texts from its own prompts
            assert ask(session, [text + " And more." for text in PASSAGES]).reuse.origin_miss == "prompt"
        with opened(url, key, tmp_path / "coded", codec="q8") as session:
            reply = ask(session)
            assert came(reply) and reply.reuse.origin_miss is None
        with opened(url, SigningKey.new(), tmp_path / "stranger") as session:
            assert ask(session).reuse.origin_miss == "nothing"


SHARE = streams.MIN_SHARE


@pytest.mark.parametrize("brings", ["nothing", "slices"])
def test_until_an_unknown_link_brings_passages_the_prompt_is_computed_as_if_there_were_none(
    origin: Path, key: SigningKey, brings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MIN_SHARE", SHARE)
    monkeypatch.setattr(cost, "FREE", replace(cost.FREE, compute=(0.0, 1.0, 0.0)))  # a second a token
    come, fetch, compute_step = threading.Event(), PassageOffer.fetch, FakeEngine.step
    steps: list[int] = []

    def fetch_later(self: PassageOffer) -> Kv:
        assert come.wait(60)
        return fetch(self)

    def step(self: FakeEngine, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        steps.append(len(rows[0].tokens))
        if brings == "slices" and len(steps) == 1:  # while the first step is computed
            come.set()
            assert cancelled is not None
            eventually(cancelled)
        return compute_step(self, rows, cancelled)

    with monkeypatch.context() as watched:
        alone: list[int] = []
        watched.setattr(FakeEngine, "step", lambda *own: alone.append(len(own[1][0].tokens)) or compute_step(*own))
        expected = without_origin()
    monkeypatch.setattr(PassageOffer, "fetch", fetch_later)
    monkeypatch.setattr(FakeEngine, "step", step)
    with serving(origin) as url, opened(url, key, tmp_path / "cache") as session:
        reply = ask(session)
        come.set()
    if brings == "nothing":
        assert steps == alone and reply.tokens == expected.tokens
        assert reply.reuse.origin_miss in ("slow", "late") and not came(reply)
    else:
        assert came(reply) and reply.reuse.origin_miss is None


@pytest.mark.usefixtures("origin_first")
def test_a_link_known_to_be_slow_is_not_asked_for_passages(
    origin: Path, key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MIN_SHARE", SHARE)
    monkeypatch.setattr(cost, "FREE", replace(cost.FREE, compute=(0.0, 1.0, 0.0)))
    with serving(origin) as url, opened(url, key, tmp_path / "cache") as session:
        remote = session.cache.remote
        assert isinstance(remote, streams.RemoteKv)
        remote._bandwidth.add(TransferSample(1, 1.0, time.monotonic()))  # a byte a second
        slow = ask(session)
        assert slow.reuse.origin_miss == "slow" and not came(slow) and not slow.reuse.timeline
        session.cache.clear()
        remote._bandwidth = Bandwidth()
        remote._bandwidth.add(TransferSample(10**9, 1.0, time.monotonic()))
        assert came(ask(session))


def test_an_origin_that_is_not_there_costs_no_answer(key: SigningKey, tmp_path: Path) -> None:
    with opened("http://127.0.0.1:9", key, tmp_path / "cache") as session:
        reply = ask(session)
        assert not came(reply) and reply.tokens == without_origin().tokens
        assert ask(session, PASSAGES[::-1]).reuse.level == "approximate"  # all is known by now: nothing was broken


@pytest.mark.usefixtures("origin_first")
def test_damaged_passages_are_computed(origin: Path, key: SigningKey, tmp_path: Path) -> None:
    shutil.copytree(origin, tmp_path / "files")
    for file in (tmp_path / "files").rglob("*.kv"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :: 64] = bytes(len(data[len(data) // 2 :: 64]))
        file.write_bytes(data)
    with serving(tmp_path / "files") as url, opened(url, key, tmp_path / "cache") as session:
        reply = ask(session)
        assert not came(reply) and reply.tokens == without_origin().tokens


def test_an_origin_that_never_ends_is_not_waited_for(key: SigningKey, tmp_path: Path, monkeypatch: Any) -> None:
    release = threading.Event()

    def find(self: Any, passage: WantedPassage, stop: Stop) -> None:
        release.wait(60)

    monkeypatch.setattr("rekindle.remote.fetch.OriginPassages.find", find)
    with opened("http://127.0.0.1:9", key, tmp_path / "cache") as session:
        reply = ask(session)
        assert not came(reply) and reply.tokens == without_origin().tokens
    release.set()


@pytest.mark.usefixtures("origin_first")
def test_what_a_guard_forbids_is_not_kept(origin: Path, key: SigningKey, tmp_path: Path) -> None:
    class Forbids:
        allows = False

        def note(self) -> None:
            """It stays forbidden."""

        def present(self) -> bool:
            raise AssertionError("nothing was to be kept")

    with serving(origin) as url, opened(url, key, tmp_path / "cache") as session:
        request, cache = asked(PASSAGES, QUESTION, max_tokens=4), session.cache
        prompt = encode_prompt(session.engine, request)
        with cache.prepare(request, prompt.tokens, lambda: False, Forbids(), prompt.prompt_layout) as prefill:
            prefill.run(len(prompt.tokens) + 4, lambda: False)
            assert prefill.result.plan.reuse_chunks is None
        assert session.flush()
        with cache.peek(request, prompt.tokens, prompt.prompt_layout) as again:
            passages = again.lookup.passages
        assert passages is not None and all(chunk.known is None for chunk in passages.picked)


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("ahead", [False, True])
def test_passages_of_a_library_come_and_are_forgotten_with_it(key: SigningKey, tmp_path: Path, ahead: bool) -> None:
    embedder = tiny_embedder(tmp_path / "embedder")
    documents = [{"text": text, "source": f"{number}.txt", "title": "Log"} for number, text in enumerate(PASSAGES)]
    with Session(FakeEngine(), cache=tmp_path / "there", embedder=embedder) as session:
        session.ingest(documents=documents)
        for request in beginnings(session, 10)[1:]:
            with computed(session, request) as source:
                Publisher(tmp_path / "files", key).publish(source, levels_of("raw", session))
    with (
        serving(tmp_path / "files") as url,
        opened(url, key, tmp_path / "here", embedder=embedder) as session,
    ):
        session.ingest(documents=documents)
        prepared = session.prepare(QUESTION, max_tokens=4)
        assert session.cache.remote is not None and session.cache.store is not None
        waits = session.prefetch(prepared.request) if ahead else None
        for coming in session.cache.remote.ahead:
            while isinstance(coming, RemoteChunkFetch) and coming.left():
                coming.wait(0.1)
        reply = session.answer(prepared.request).reply
        if waits is not None:
            waits.close()
        assert came(reply) and session.flush()
        assert variant_counts(session.cache.store).variants > 0
        session.forget(*(document["source"] for document in documents))
        assert variant_counts(session.cache.store).variants == 0


def test_they_come_while_the_request_waits(origin: Path, key: SigningKey, tmp_path: Path) -> None:
    with serving(origin) as url, opened(url, key, tmp_path / "cache") as session:
        request = asked(PASSAGES, QUESTION, max_tokens=4)
        ahead = session.prefetch(request)
        assert ahead is not None and session.cache.remote is not None
        (coming,) = session.cache.remote.ahead
        assert isinstance(coming, RemoteChunkFetch)
        deadline = time.monotonic() + 30
        while coming.left() and time.monotonic() < deadline:
            coming.wait(0.1)
        reply = session.answer(request).reply
        ahead.close()
        sources = [chunk.source for chunk in reply.reuse.chunks]
        assert sources[1] == sources[3] == sources[4] == "reused"


@pytest.mark.parametrize("first", ["exact", "approximate"])
def test_the_same_prompt_under_another_level_does_not_take_what_waits(
    origin: Path, key: SigningKey, tmp_path: Path, first: str
) -> None:
    second = {"exact": "approximate", "approximate": "exact"}[first]
    with serving(origin) as url, opened(url, key, tmp_path / "cache") as session:
        ahead = session.prefetch(asked(PASSAGES, QUESTION, max_tokens=4, reuse=first))
        assert ahead is not None
        reply = ask(session, reuse=second)
        ahead.close()
        assert second == "approximate" or reply.tokens == without_origin().tokens


def test_a_model_of_layers_takes_passages_too(key: SigningKey, tmp_path: Path) -> None:
    with closing(make("hf")) as engine:
        publish(engine, tmp_path / "files", key, PASSAGES, levels="raw")
        with serving(tmp_path / "files") as url, opened(url, key, tmp_path / "cache", engine) as session:
            ahead = session.prefetch(asked(PASSAGES, QUESTION, max_tokens=4))
            assert ahead is not None and session.cache.remote is not None
            (coming,) = session.cache.remote.ahead
            while coming.left():  # type: ignore[union-attr]
                coming.wait(0.1)
            reply = ask(session)
            ahead.close()
            sources = [chunk.source for chunk in reply.reuse.chunks]  # as many as fit into its context
            assert len(sources) > 1 and set(sources) == {"reused"}
            assert reply.reuse.reused + reply.reuse.computed == reply.usage.prompt_tokens


# -- the parts alone -------------------------------------------------------------------------------------------------

OUTLINE = PromptLayout(10, (Span(12, 40), Span(42, 70), Span(72, 100), Span(102, 130)))


def wanted(known: Sequence[Span] = (), start: int = 0) -> list[WantedPassage]:
    return list(unknown_passages(OUTLINE, range(150), known, start))


def test_unknown_passages_are_wanted_in_turn() -> None:
    assert [passage.number for passage in wanted()] == [1, 2, 3, 4]
    assert [passage.number for passage in wanted([OUTLINE.chunks[2]])] == [1, 2, 4]
    assert [passage.number for passage in wanted(start=42)] == [2, 3, 4]
    assert [passage.number for passage in wanted(start=43)] == [3, 4]
    third = wanted()[2]
    assert third.tokens == tuple(range(72, 100)) and third.span == Span(72, 100)
    assert third.head == chunk_digest(range(10))


class Source:
    """Passages that come when the test says so."""

    def __init__(self, missing: Sequence[int] = (), fails: int | None = None) -> None:
        self.missing, self.fails = missing, fails
        self.gates = {number: threading.Event() for number in range(1, 9)}
        self.asked: list[int] = []
        self.cancelled: list[int] = []

    def find(self, passage: WantedPassage, stop: Stop) -> Any:
        self.asked.append(passage.number)
        if passage.number == self.fails:
            raise OriginFailed("it is damaged")
        return "prompt" if passage.number in self.missing else Offered(self, passage.number)


class Offered:
    left_bytes, variant = 1000, None

    def __init__(self, source: Source, number: int) -> None:
        self._source, self._number = source, number

    def fetch(self) -> Any:
        assert self._source.gates[self._number].wait(30)
        return self._number

    def cancel(self) -> None:
        self._source.cancelled.append(self._number)
        self._source.gates[self._number].set()


def starting(
    source: Source, keeps: bool = True, bandwidth: Bandwidth | None = None
) -> tuple[RemoteChunkFetch, list[int], list[str]]:
    kept: list[int] = []
    failed: list[str] = []

    def keep(passage: WantedPassage, variant: Any, kv: Any) -> bool:
        kept.append(passage.number)
        return keeps

    return RemoteChunkFetch(wanted()[1:], source, keep, failed.append, bandwidth or Bandwidth()), kept, failed


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def numbers(arrivals: RemoteChunkFetch) -> list[int]:
    return [passage.number for passage in arrivals.left()]


def test_the_last_comes_first_and_what_was_computed_does_not_come() -> None:
    source = Source()
    arrivals, kept, failed = starting(source)
    source.gates[4].set()
    until(lambda: arrivals.here == {4})
    assert kept == [4] and numbers(arrivals) == [2, 3]
    arrivals.skip(70)
    assert numbers(arrivals) == [3]
    source.gates[3].set()
    until(lambda: arrivals.here == {3, 4})
    source.gates[2].set()
    arrivals.close()
    assert source.asked == [4, 3, 2] and kept == [4, 3] and not failed
    assert [(event.lane, event.chunk) for event in arrivals.events(0.0, 2)] == [("link", 4), ("link", 3)]


def test_what_is_not_there_is_not_waited_for() -> None:
    source = Source(missing=[2, 4])
    arrivals, kept, _ = starting(source)
    source.gates[3].set()
    until(lambda: not arrivals.left())
    assert arrivals.here == {3} and kept == [3]
    arrivals.close()


def test_what_the_cache_does_not_take_has_not_come() -> None:
    source = Source()
    arrivals, kept, _ = starting(source, keeps=False)
    for gate in source.gates.values():
        gate.set()
    until(lambda: not arrivals.left())
    assert arrivals.here == frozenset() and kept == [4, 3, 2]
    arrivals.close()


def test_an_origin_that_fails_ends_it_and_is_told_once() -> None:
    source = Source(fails=3)
    arrivals, _, failed = starting(source)
    until(lambda: not arrivals.left())
    arrivals.wait(5)
    assert failed == ["it is damaged"]
    arrivals.close()


def test_closing_ends_a_transfer_and_nobody_is_told() -> None:
    source = Source()
    arrivals, kept, failed = starting(source)
    until(lambda: len(source.asked) == 3)
    arrivals.close()
    until(lambda: source.cancelled == [4])
    assert not arrivals.left() and not failed and set(kept) <= {4}


def test_how_long_the_rest_takes_is_known_once_something_came() -> None:
    source, bandwidth = Source(), Bandwidth()
    arrivals, _, _ = starting(source, bandwidth=bandwidth)
    until(lambda: len(source.asked) == 3)
    assert arrivals.expected() is None
    bandwidth.add(TransferSample(500, 1.0, 1.0))
    assert arrivals.expected() == {2: 2.0, 3: 2.0, 4: 2.0}
    arrivals.skip(70)
    assert arrivals.expected() == {3: 2.0, 4: 2.0}
    arrivals.close()


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=8))
def test_lanes_that_meet_between_passages(costs: list[tuple[float, float]]) -> None:
    computing, streaming = [a for a, _ in costs], [b for _, b in costs]
    count = count_computed(computing, streaming)
    assert 0 <= count <= len(costs)
    assert count == len(costs) or sum(streaming[count:]) <= sum(computing[:count]) + 1e-9
    assert count == 0 or sum(streaming[count - 1 :]) > sum(computing[: count - 1]) - 1e-9
