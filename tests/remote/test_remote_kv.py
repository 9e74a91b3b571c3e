"""Sessions with an origin: the reply is the one without it, it says what came from where, and nothing hangs on it."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache import cost
from rekindle.cache.explain import Explanation
from rekindle.cache.matches import Matches
from rekindle.core.cells import Cell
from rekindle.core.request import Request
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting
from rekindle.remote import remote_kv as streams
from rekindle.remote.chunked_prefill import PrefixPrefill
from rekindle.remote.latency import Bandwidth, TransferSample, recall_bandwidth
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey, make_secret
from rekindle.remote.transfer_queue import ArrivedKv, OriginSlices
from rekindle.session.publish import computed, levels_of
from rekindle.store import history
from tests.parity.engines import make
from tests.server.serving import eventually

PROMPT = "The keeper lights the lamp at dusk and writes the hour into the book. " * 6
LEVELS = "raw,q8"


@dataclass(frozen=True)
class Published:
    folder: Path
    key: SigningKey
    secret: Path | None


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(tmp_path_factory.mktemp("origin"), encrypted=False)


@pytest.fixture(scope="module", params=["plain", "encrypted"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(tmp_path_factory.mktemp("origin"), encrypted=request.param == "encrypted")


def publish(folder: Path, *, encrypted: bool) -> Published:
    key, secret = SigningKey.new(), folder / "secret" if encrypted else None
    made = None if secret is None else make_secret(secret)
    with Session(FakeEngine(), cache="off") as session, computed(session, Request.of(PROMPT)) as source:
        Publisher(folder / "files", key, secret=made).publish(source, levels_of(LEVELS, session))
    return Published(folder / "files", key, secret)


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of these tests is small: as if its prompts were worth streaming."""
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    monkeypatch.setattr(cost, "FREE", replace(cost.FREE, compute=(0.0, 1.0, 0.0)))


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    with OriginServer(folder, OriginSettings(port=0)).running() as url:
        yield url


def opened(published: Published, url: str, cache: Path, **more: Any) -> Session:
    secret = None if published.secret is None else str(published.secret)
    own = {"origin": url, "origin_keys": published.key.public, "origin_secret": secret, **more}
    return Session(FakeEngine(), cache=cache, **own)


@pytest.fixture
def alone() -> Any:
    with Session(FakeEngine(), cache="off") as session:
        return session.generate(PROMPT + "And then", max_tokens=8)


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("level", ["exact", "quantized"])
def test_a_prompt_comes_partly_from_the_origin(either: Published, alone: Any, level: str, tmp_path: Path) -> None:
    with serving(either.folder) as url, opened(either, url, tmp_path / "cache", reuse=level) as session:
        reply = session.generate(PROMPT + "And then", max_tokens=8)
        assert reply.reuse.streamed > 0
        assert reply.reuse.reused + reply.reuse.computed == reply.usage.prompt_tokens
        assert reply.reuse.level == level and (reply.reuse.quantized > 0) == (level == "quantized")
        assert level == "quantized" or reply.tokens == alone.tokens
        assert "streamed" in reply.summary()
        assert {event.lane for event in reply.reuse.timeline} == {"compute", "link"}
        session.flush()
        assert session.cache.store is not None
        (noted,) = history.last(session.cache.store.disk, 1)
        last = Explanation.from_dict(noted.record)
        assert last.reused == reply.reuse.reused and last.timeline == reply.reuse.timeline
        assert "  link " in str(last) and "streamed from the origin" in str(last)
        assert last.streamed_slices == reply.reuse.streamed_slices and "slices from the origin: " in str(last)
        session.flush()
        again = session.generate(PROMPT + "And then", max_tokens=8)  # from here now
        assert again.reuse.streamed == 0 and again.reuse.computed <= 1 and again.tokens == reply.tokens


SHARE = streams.MIN_SHARE


@pytest.mark.usefixtures("origin_first")
def test_a_slow_link_is_left_alone_for_a_while(
    published: Published, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MIN_SHARE", SHARE)
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache") as session:
        remote = session.cache.remote
        assert isinstance(remote, streams.RemoteKv)
        assert session.generate(PROMPT + "And then", max_tokens=8).reuse.streamed > 0
        for age, is_slow in ((0.0, True), (streams.SLOW_SECONDS + 1, False)):
            session.cache.clear()
            remote._bandwidth = Bandwidth()
            remote._bandwidth.add(TransferSample(1, 1.0, time.monotonic() - age))  # a byte a second
            with session.cache.peek(Request.of(PROMPT, max_tokens=8), tuple(PROMPT.encode())) as peeked:
                found = remote.look(peeked.lookup, session.cache.plan(peeked.lookup))
            assert found is not None and (found.miss == "slow") == is_slow
        assert session.generate(PROMPT + "And then", max_tokens=8).tokens == alone.tokens


def test_where_even_a_fast_link_is_slower_than_computing_the_origin_is_not_asked(
    published: Published, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MIN_SHARE", SHARE)
    monkeypatch.setattr(streams, "FAST_LINK", 1.0)  # computing is faster than a byte a second
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache") as session:
        reply = session.generate(PROMPT + "And then", max_tokens=8)
        assert (reply.tokens, reply.reuse.streamed, reply.reuse.origin_miss) == (alone.tokens, 0, "slow")


@pytest.mark.parametrize("brings", ["nothing", "slices"])
def test_until_an_unknown_link_brings_slices_the_prompt_is_computed_as_if_there_were_none(
    published: Published, alone: Any, brings: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MIN_SHARE", SHARE)
    come, carry, compute = threading.Event(), OriginSlices.carry, FakeEngine.step
    steps: list[int] = []

    def carry_later(self: OriginSlices, cells: Sequence[Cell]) -> Iterator[tuple[Cell, ArrivedKv]]:
        assert come.wait(30)
        return carry(self, cells)

    def step(self: FakeEngine, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        if len(rows[0].tokens) > 1:
            steps.append(len(rows[0].tokens))
        if brings == "slices":  # while the first step is computed
            come.set()
            assert cancelled is not None
            if len(steps) == 1:
                eventually(cancelled)
        return compute(self, rows, cancelled)

    monkeypatch.setattr(OriginSlices, "carry", carry_later)
    monkeypatch.setattr(FakeEngine, "step", step)
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache") as session:
        reply = session.generate(PROMPT + "And then", max_tokens=8)
    come.set()
    assert reply.tokens == alone.tokens
    assert reply.reuse.reused + reply.reuse.computed == reply.usage.prompt_tokens
    if brings == "nothing":
        assert sum(steps) == reply.usage.prompt_tokens and not reply.reuse.streamed
        assert reply.reuse.origin_miss in ("slow", "late")
    else:
        assert reply.reuse.streamed > 0 and reply.reuse.origin_miss is None


def test_slices_of_what_was_computed_meanwhile_end_no_step(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The origin has less than half of the prompt: 420 tokens, a second each."""
    monkeypatch.setattr(streams, "MIN_SHARE", SHARE)
    come, carry, compute, start = threading.Event(), OriginSlices.carry, FakeEngine.step, streams.RemoteKv.start_fetch
    fetches, steps = list[Any](), list[int]()

    class BegunEarlier(PrefixPrefill):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.begun -= 400.0

    def carry_later(self: OriginSlices, cells: Sequence[Cell]) -> Iterator[tuple[Cell, ArrivedKv]]:
        assert come.wait(30)
        return carry(self, cells)

    def noted(*asked: Any) -> Any:
        fetches.append(start(*asked))
        return fetches[-1]

    def step(self: FakeEngine, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        come.set()
        eventually(lambda: fetches[0].arrived)
        if len(rows[0].tokens) > 1:
            steps.append(len(rows[0].tokens))
        return compute(self, rows, cancelled)

    monkeypatch.setattr(streams, "PrefixPrefill", BegunEarlier)
    monkeypatch.setattr(streams.RemoteKv, "start_fetch", noted)
    monkeypatch.setattr(OriginSlices, "carry", carry_later)
    monkeypatch.setattr(FakeEngine, "step", step)
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache") as session:
        reply = session.generate(PROMPT + OTHER, max_tokens=2)
    assert sum(steps) == reply.usage.prompt_tokens == reply.reuse.computed
    assert reply.reuse.origin_miss == "slow" and not reply.reuse.streamed


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("where", ["engine", "disk"])
@pytest.mark.parametrize("known", [100, 130, 256])
def test_what_is_known_here_does_not_come(
    published: Published, alone: Any, where: str, known: int, tmp_path: Path
) -> None:
    """Tokens are bytes here: the beginning comes from here, the rest from the origin or by computing."""
    with serving(published.folder) as url:
        with opened(published, url, tmp_path / "cache", local_tenants="*") as session:
            session.generate(PROMPT[:known], max_tokens=0)
            session.flush()
        with opened(published, url, tmp_path / "cache") as session:
            if where == "engine":
                session.cache.remote, streaming = None, session.cache.remote
                session.generate(PROMPT[:known], max_tokens=0)
                session.cache.remote = streaming
            reply = session.generate(PROMPT + "And then", max_tokens=8)
    assert reply.tokens == alone.tokens
    here = reply.reuse.engine if where == "engine" else reply.reuse.disk
    assert reply.reuse.streamed > 0 and here >= known - 32
    assert reply.reuse.reused + reply.reuse.computed == reply.usage.prompt_tokens
    first = min(event.chunk for event in reply.reuse.timeline if event.lane == "link")
    assert first >= known // 128


def test_what_does_not_begin_alike_is_computed(published: Published, tmp_path: Path) -> None:
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache") as session:
        reply = session.generate("Something else. " * 30, max_tokens=2)
        assert reply.reuse.streamed == 0


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("tenants", ["local", "a, local", "*"])
def test_nothing_is_asked_for_tenants_that_are_local(published: Published, tenants: str, tmp_path: Path) -> None:
    with serving(published.folder) as url:
        with opened(published, url, tmp_path / "cache", local_tenants=tenants) as session:
            assert session.generate(PROMPT, max_tokens=2).reuse.streamed == 0
        with opened(published, url, tmp_path / "other", local_tenants="b") as session:
            assert session.generate(PROMPT, max_tokens=2).reuse.streamed > 0


@pytest.mark.parametrize(
    "choice",
    [{"deterministic": True}, {"reuse": "off"}, {"origin_keys": SigningKey.new().public}],
    ids=["deterministic", "off", "another key"],
)
def test_what_may_not_be_streamed_is_computed(
    published: Published, alone: Any, choice: dict[str, Any], tmp_path: Path
) -> None:
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache", **choice) as session:
        reply = session.generate(PROMPT + "And then", max_tokens=8)
        assert reply.reuse.streamed == 0 and reply.tokens == alone.tokens


OTHER = "Something else. " * 30


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize(
    ("choice", "prompt", "miss", "words"),
    [
        ({}, OTHER, "prompt", "it has contexts for this model, but none that begins like this prompt"),
        ({"origin_keys": SigningKey.new().public}, PROMPT, "nothing", "signed by a key you named"),
        ({"deterministic": True}, PROMPT, "unable", "deterministic=True forbids it"),
        ({"local_tenants": "*"}, PROMPT, None, ""),
        ({"reuse": "off"}, PROMPT, None, ""),
        ({}, "short", None, ""),
        ({}, PROMPT, None, ""),
    ],
    ids=["another prompt", "another key", "deterministic", "local", "off", "short", "streamed"],
)
def test_every_reply_says_why_nothing_came(
    published: Published, choice: dict[str, Any], prompt: str, miss: str | None, words: str,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "rekindle.remote")
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache", **choice) as session:
        replies = [session.generate(prompt, max_tokens=2, cache_salt=salt) for salt in ("a", "b")]
    assert [reply.reuse.origin_miss for reply in replies] == [miss, miss]
    lines = [record.getMessage() for record in caplog.records if record.name == "rekindle.remote"]
    said = [line for line in lines if line.startswith("Nothing came from the origin: ") and words in line]
    assert len(said) == 2 * (miss is not None)
    assert all((words in str(reply.reuse)) == (words != "" or miss is None) for reply in replies)


@pytest.mark.usefixtures("origin_first")
def test_an_origin_with_other_levels_says_which_setting_allows_them(tmp_path: Path) -> None:
    key = SigningKey.new()
    with Session(FakeEngine(), cache="off") as session, computed(session, Request.of(PROMPT)) as source:
        Publisher(tmp_path / "files", key).publish(source, levels_of("q8", session))
    place = Published(tmp_path / "files", key, None)
    with serving(place.folder) as url, opened(place, url, tmp_path / "cache") as session:
        reuse = session.generate(PROMPT, max_tokens=2).reuse
    assert reuse.origin_miss == "level" and "reuse='quantized' allows" in str(reuse)


@pytest.mark.usefixtures("origin_first")
def test_an_origin_that_fails_is_one_line(
    published: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with opened(published, f"http://127.0.0.1:{port}", tmp_path / "cache") as session:
        replies = [session.generate(PROMPT, max_tokens=2, cache_salt=salt) for salt in ("a", "b")]
    assert [reply.reuse.origin_miss for reply in replies] == ["failed", "failed"]
    [line] = [record.getMessage() for record in caplog.records if record.name == "rekindle.remote"]
    assert line.startswith("The origin is not asked again for 30 s: ")


def test_an_origin_that_is_not_there_costs_no_answer(published: Published, alone: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with opened(published, f"http://127.0.0.1:{port}", tmp_path / "cache") as session:
        reply = session.generate(PROMPT + "And then", max_tokens=8)
        assert reply.tokens == alone.tokens and reply.reuse.streamed == 0


@pytest.mark.usefixtures("origin_first")
def test_an_origin_that_never_answers_is_left_alone(
    published: Published, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FIND_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with opened(published, url, tmp_path / "cache") as session:
            assert session.generate(PROMPT + "And then", max_tokens=8).tokens == alone.tokens
            silent.settimeout(5)
            silent.accept()[0].close()
            silent.settimeout(0.3)
            assert session.generate(PROMPT * 2, max_tokens=2).reuse.streamed == 0
            with pytest.raises(TimeoutError):  # nobody asked it again
                silent.accept()


def test_an_origin_that_is_silent_to_the_end_is_not_waited_for(
    published: Published, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FIND_SECONDS", 600.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with opened(published, f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "cache") as session:
            reply = session.generate(PROMPT + "And then", max_tokens=8)
            longer = session.generate(PROMPT * 3, max_tokens=2)
    assert reply.tokens == alone.tokens and reply.reuse.streamed == longer.reuse.streamed == 0
    assert reply.reuse.origin_miss == longer.reuse.origin_miss == "late"
    assert reply.reuse.computed == reply.usage.prompt_tokens


def test_what_became_known_meanwhile_does_not_come_as_well(published: Published, alone: Any, tmp_path: Path) -> None:
    request = Request.of(PROMPT + "And then", max_tokens=8)
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache") as session:
        own = session.cache.remote
        session.cache.remote = None
        session.generate(PROMPT + "And then", max_tokens=0)
        session.flush()
        session.cache.remote = own
        assert own is not None
        with session.cache.peek(request, tuple(PROMPT.encode() + b"And then")) as peeked:
            unknown = replace(peeked.lookup, parked=None, matches=Matches(len(peeked.lookup.tokens)))
        ahead = own.prefetch(unknown, session.cache.plan(unknown))
        assert ahead is not None and len(own.ahead) == 1
        reply = session.generate(PROMPT + "And then", max_tokens=8)
        assert reply.reuse.streamed == 0 and reply.reuse.computed <= 1 and not own.ahead
        ahead.close()
    assert reply.tokens == alone.tokens


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("share", [0.0, SHARE], ids=["tried", "unknown link"])
def test_slices_that_are_damaged_are_computed(
    either: Published, alone: Any, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MIN_SHARE", share)
    folder = tmp_path / "files"
    shutil.copytree(either.folder, folder)
    for path in folder.glob("contexts/*/*.kv"):
        path.write_bytes(bytes(path.stat().st_size))
    with serving(folder) as url, opened(either, url, tmp_path / "cache") as session:
        reply = session.generate(PROMPT + "And then", max_tokens=8)
        assert reply.tokens == alone.tokens and reply.reuse.streamed == 0 and reply.reuse.origin_miss == "failed"
        again = session.cache.remote
        assert again is not None and again._backoff_until > time.monotonic()


def test_an_origin_with_less_than_is_here_is_not_called_slow(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = streams.RemoteKv.start_fetch

    def looked_up(*asked: Any) -> Any:
        fetch = start(*asked)
        eventually(lambda: fetch is None or fetch.over)
        return fetch

    monkeypatch.setattr(streams, "MIN_SHARE", SHARE)
    monkeypatch.setattr(streams.RemoteKv, "start_fetch", looked_up)
    with serving(published.folder) as url:
        with opened(published, url, tmp_path / "cache", local_tenants="*") as session:
            session.generate(PROMPT, max_tokens=0)
            session.flush()
        with opened(published, url, tmp_path / "cache") as session:
            reuse = session.generate(PROMPT + OTHER, max_tokens=2).reuse
            assert session.cache.remote is not None and session.cache.remote.bytes_per_second is None
    assert reuse.origin_miss is None and reuse.streamed == 0 and reuse.disk > 384


@pytest.mark.usefixtures("origin_first")
def test_local_quantized_kv_is_reported_though_nothing_comes(published: Published, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    shutil.copytree(published.folder, folder)
    for path in folder.glob("contexts/*/*.kv"):
        path.write_bytes(bytes(path.stat().st_size))
    with serving(folder) as url:
        with opened(published, url, tmp_path / "cache", reuse="quantized", local_tenants="*") as session:
            session.generate(PROMPT[:200], max_tokens=0)
            session.flush()
        with opened(published, url, tmp_path / "cache", reuse="quantized") as session:
            reply = session.generate(PROMPT + "And then", max_tokens=2)
    assert reply.reuse.disk > 0 and not reply.reuse.streamed
    assert reply.reuse.level == "quantized" and 0 < reply.reuse.quantized <= reply.reuse.disk


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"origin_keys": None}, "public key"),
        ({"origin_keys": "zz"}, "zz"),
        ({"origin": "ftp://somewhere"}, "ftp"),
        ({"origin_secret": "/nowhere"}, "nowhere"),
        ({"origin_token": "/nowhere"}, "nowhere"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_used_are_refused(choice: dict[str, Any], says: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"origin": "http://127.0.0.1:1", "origin_keys": SigningKey.new().public, **choice}
    with pytest.raises(InvalidSetting, match=says):
        Session(FakeEngine(), cache=tmp_path / "cache", **own)


@pytest.mark.usefixtures("origin_first")
def test_several_requests_stream_at_once(published: Published, alone: Any, tmp_path: Path) -> None:
    replies: list[Any] = []
    with serving(published.folder) as url, opened(published, url, tmp_path / "cache", cache_salt="x") as session:
        threads = [
            threading.Thread(
                target=lambda salt=f"s{number}": replies.append(
                    session.generate(PROMPT + "And then", max_tokens=8, cache_salt=salt)
                )
            )
            for number in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [reply.tokens for reply in replies] == [alone.tokens] * 3
    assert any(reply.reuse.streamed for reply in replies)


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("kind", ["hf", "llamacpp", "llamacpp-q8", "llamacpp-sliding"])
def test_a_model_of_layers_streams_too(kind: str, tmp_path: Path) -> None:
    key = SigningKey.new()
    with closing(make(kind, context_tokens=1024)) as engine:
        with Session(engine, cache="off") as session, computed(session, Request.of(PROMPT)) as source:
            Publisher(tmp_path / "files", key).publish(source, levels_of("raw", session))
            expected = session.generate(PROMPT + "And then", max_tokens=8)
        with serving(tmp_path / "files") as url:
            own = {"origin": url, "origin_keys": key.public}
            with Session(engine, cache=tmp_path / "cache", **own) as session:
                reply = session.generate(PROMPT + "And then", max_tokens=8)
                assert reply.reuse.streamed > 0 and reply.tokens == expected.tokens
                session.flush()
            with Session(engine, cache=tmp_path / "cache") as session:  # what came was stored like what was computed
                again = session.generate(PROMPT + "And then", max_tokens=8)
                assert again.reuse.computed <= 16 and again.tokens == expected.tokens


def test_a_state_that_cannot_be_cut_is_neither_published_nor_streamed(published: Published, tmp_path: Path) -> None:
    with closing(make("llamacpp-hybrid", context_tokens=1024)) as engine:
        with (
            Session(engine, cache="off") as session,
            pytest.raises(InvalidSetting, match="hybrid"),
            computed(session, Request.of(PROMPT)),
        ):
            raise AssertionError("it was computed")
        own = {"origin": "http://127.0.0.1:9", "origin_keys": published.key.public}
        with Session(engine, cache=tmp_path / "cache", **own) as session:
            assert session.generate(PROMPT, max_tokens=2).reuse.origin_miss == "unable"


# -- levels -----------------------------------------------------------------------------------------------------------


def publish_levels(folder: Path, kls: dict[str, float]) -> Published:
    """A prompt at levels whose KL is given."""
    key = SigningKey.new()
    with Session(FakeEngine(), cache="off") as session, computed(session, Request.of(PROMPT)) as source:
        Publisher(folder, key).publish(replace(source, measure=lambda _: kls), levels_of(",".join(kls), session))
    return Published(folder, key, None)


@pytest.mark.usefixtures("origin_first")
def test_publishing_measures_what_each_level_does_to_the_next_tokens(tmp_path: Path) -> None:
    key = SigningKey.new()
    with Session(FakeEngine(), cache="off") as session, computed(session, Request.of(PROMPT)) as source:
        done = Publisher(tmp_path / "files", key).publish(source, levels_of("raw,q8,q2", session))
    kls = {level.name: level.kl for level in done.levels}
    assert kls["raw"] is None and kls["q8"] is not None and kls["q2"] is not None
    assert 0 <= kls["q8"] < kls["q2"]


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize(
    ("budget", "levels", "miss"), [(0.05, {"q3"}, None), (0.002, {"q8"}, None), (0.0001, set(), "budget")]
)
def test_what_comes_is_within_the_budget_and_the_reply_says_in_which_levels(
    budget: float, levels: set[str], miss: str | None, tmp_path: Path
) -> None:
    place = publish_levels(tmp_path / "files", {"q8": 0.001, "q3": 0.05})
    with serving(place.folder) as url:
        own = {"reuse": "quantized", "kl_budget": budget}
        with opened(place, url, tmp_path / "cache", **own) as session:
            reuse = session.generate(PROMPT + "And then", max_tokens=2).reuse
    assert reuse.origin_miss == miss and levels <= set(reuse.streamed_slices) <= {"q8", "q3"}
    assert (reuse.streamed > 0) == bool(levels) and (reuse.streamed_kl or 0.0) <= budget
    assert all(f"{count} {level}" in str(reuse) for level, count in reuse.streamed_slices.items())


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize(("level", "kept"), [("q8", True), ("q3", False)])
def test_kv_of_fewer_bits_than_are_stored_here_is_used_and_continued_but_not_stored(
    level: str, kept: bool, tmp_path: Path
) -> None:
    """Stored as what this session stores, it would pass for better than it is."""
    place = publish_levels(tmp_path / "files", {level: 0.0})
    own = {"reuse": "quantized", "cache_salt": "x"}
    with serving(place.folder) as url:
        with opened(place, url, tmp_path / "cache", **own) as session:
            first = session.generate(PROMPT + "And then", max_tokens=2).reuse
            assert first.streamed > 0
            again = session.generate(PROMPT + "And then", max_tokens=2).reuse
            assert again.streamed == 0 and again.engine > len(PROMPT) and again.quantized > 0
            session.flush()
        with opened(place, url, tmp_path / "cache", local_tenants="*", **own) as session:
            later = session.generate(PROMPT + "And then", max_tokens=2).reuse
    assert later.streamed == 0
    assert later.disk > first.computed if kept else later.disk <= first.computed  # that was computed here


@pytest.mark.usefixtures("origin_first")
def test_the_bandwidth_is_remembered_between_runs(published: Published, tmp_path: Path) -> None:
    with serving(published.folder) as url:
        with opened(published, url, tmp_path / "cache") as session:
            assert recall_bandwidth(url) is None
            assert session.generate(PROMPT, max_tokens=2).reuse.streamed > 0
        known = recall_bandwidth(url)
        assert known is not None and recall_bandwidth(url + "/other") is None
        with opened(published, url, tmp_path / "cache"):
            pass  # nothing was measured
        assert recall_bandwidth(url) == pytest.approx(known)


@pytest.mark.parametrize("budget", [-0.1, float("nan"), float("inf")])
def test_a_budget_that_makes_no_sense_is_refused(budget: float, published: Published, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="kl_budget"):
        opened(published, "http://127.0.0.1:1", tmp_path / "cache", kl_budget=budget)
