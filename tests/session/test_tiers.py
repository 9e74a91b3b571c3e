"""Sessions of several servers on one Redis: what one computed another loads, and no answer changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fleet.tier_servers import ACCESS, FaultyLink
from rekindle import Session
from rekindle.cache.cost import Costs
from rekindle.core.kv import Span
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting
from rekindle.remote.signing import make_secret
from tests.chunks.chunk_reuse import PASSAGES, asked, prefill, warmed
from tests.laws.test_plan_laws import PRIOR
from tests.lora import fake_pairs, save_lora
from tests.tier_servers import RedisServer, redis_server

pytestmark = pytest.mark.thorough

PROMPT = "Once there was a harbour with three cranes, and each of them had a name of its own. " * 5
TIERS = "memory > disk > redis"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


Opens = Callable[..., Session]


@pytest.fixture
def at(server: RedisServer, tmp_path: Path) -> Iterator[Opens]:
    """Opens the session of a server by name, each with a folder of its own."""
    opened: list[Session] = []

    def open_session(name: str, **settings: Any) -> Session:
        chosen = {"tiers": TIERS, "redis": server.url, "memory_limit": "0", **settings}
        opened.append(Session(FakeEngine(), cache=str(tmp_path / name), **chosen))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()


def ask(session: Session, **options: Any) -> Any:
    reply = session.generate(PROMPT, max_tokens=16, **options)
    assert session.flush()
    return reply


@pytest.fixture(scope="module")
def right() -> str:
    with Session(FakeEngine(), cache="off") as alone:
        return alone.generate(PROMPT, max_tokens=16).text


def test_what_one_server_computed_another_loads_and_then_has_itself(at: Opens, right: str) -> None:
    assert ask(at("a")).text == right
    b = at("b")
    first = ask(b)
    assert first.text == right
    assert first.reuse.shared == {"redis": len(PROMPT) - 1} and first.reuse.level == "exact"
    assert "from redis" in str(first.reuse)
    again = ask(b)
    assert again.text == right and again.reuse.disk == len(PROMPT) - 1 and not again.reuse.shared


def test_a_server_that_is_gone_changes_no_answer_and_fails_no_request(
    at: Opens, server: RedisServer, right: str
) -> None:
    ask(at("a"))
    b = at("b")
    server.stop()
    first = ask(b)
    assert first.text == right and first.reuse.reused == 0
    server.start()
    assert ask(at("c")).text == right


@pytest.fixture
def link(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyLink]:
    """The way to the server."""
    pytest.importorskip("obstore", reason='needs: pip install "rekindle-llm[s3]"')
    link = FaultyLink(server.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{link.port}")
    for name, value in ACCESS.items():
        monkeypatch.setenv(name, value)
    yield link
    link.close()


@pytest.mark.parametrize("tier", ["redis", "s3"])
def test_a_tier_that_takes_connections_and_never_answers_is_a_miss(
    at: Opens, link: FaultyLink, right: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sockets wait for an hour: what ends the wait is the session's own deadline."""
    monkeypatch.setattr("rekindle.store.redis._SOCKET_SECONDS", 3600.0)
    monkeypatch.setattr("rekindle.store.s3._ANSWER_SECONDS", 3600)
    monkeypatch.setattr("rekindle.cache.stored_kv.SHARED_LOOKUP_SECONDS", 0.5)
    link.state = "hanging"
    places = {"redis": f"redis://127.0.0.1:{link.port}/0", "s3": "s3://rekindle/kv"}
    session = at("a", tiers=f"memory > disk > {tier}", **{tier: places[tier]})
    first = session.generate(PROMPT, max_tokens=16)
    assert first.text == right and first.reuse.reused == 0
    assert session.generate(PROMPT, max_tokens=16).text == right
    link.close()


def test_a_tier_that_hangs_while_kv_is_loaded_from_it_is_a_miss(
    at: Opens, link: FaultyLink, right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that loads in the step that computes waits as long as a socket does."""
    monkeypatch.setattr("rekindle.store.redis._SOCKET_SECONDS", 1.0)
    ask(at("a"))
    session = at("b", redis=f"redis://127.0.0.1:{link.port}/0")
    store = session.cache.store
    assert store is not None
    load = store.load

    def load_from_nobody(*args: Any) -> Any:
        link.state = "hanging"
        return load(*args)

    monkeypatch.setattr(store, "load", load_from_nobody)
    reply = session.generate(PROMPT, max_tokens=16)
    assert link.state == "hanging"  # so it was found there
    assert reply.text == right and reply.reuse.reused == 0
    link.close()


def test_quantized_kv_is_shared_says_so_and_is_not_quantized_twice(at: Opens) -> None:
    level: dict[str, Any] = {"reuse": "quantized", "codec": "q4"}
    ask(at("a", **level))
    local = ask(at("a", **level))
    assert local.reuse.level == "quantized"
    b = at("b", **level)
    shared = ask(b)
    assert shared.reuse.level == "quantized" and shared.reuse.shared["redis"] == shared.reuse.quantized > 0
    assert shared.text == local.text
    assert ask(b).text == local.text  # now from its own disk
    assert b.cache.store is not None
    match = b.cache.store.lookup(b.cache.kv_spaces.of(b_request(), len(PROMPT)), b.engine.tokenizer.encode(PROMPT))
    assert {piece.coding for piece in match.pieces[:1]} == {"quantized"}
    assert ask(at("exact")).reuse.reused == 0  # exact requests never meet it


def b_request() -> Any:
    from rekindle.core.request import Request

    return Request.of(PROMPT)


def test_kv_of_adapters_is_shared_as_differences(at: Opens, tmp_path: Path) -> None:
    folder = save_lora(tmp_path / "lora", fake_pairs(1))
    with Session(FakeEngine(), cache="off") as alone:
        alone.adapters.load("writer", folder)
        right = alone.generate(PROMPT, max_tokens=16, adapter="writer").text
    a, b = at("a"), at("b")
    for session in (a, b):
        session.adapters.load("writer", folder)
    ask(a)
    ask(a, adapter="writer")
    assert a.cache.store is not None
    assert {row.coding for row in a.cache.store.disk.entries()} == {"raw", "exact"}
    found = ask(b, adapter="writer")
    assert found.text == right and found.reuse.shared == {"redis": len(PROMPT) - 1}


def test_chunks_are_shared(at: Opens) -> None:
    long = [passage * 8 for passage in PASSAGES[:3]]
    level: dict[str, Any] = {"reuse": "approximate", "recompute_budget": 0.3}
    a = at("a", **level)
    warmed(a, long)
    known = prefill(a, asked([long[2], long[0]])).reuse
    assert known.from_chunks > 0
    b = at("b", **level)
    found = prefill(b, asked([long[2], long[0]])).reuse
    assert found.from_chunks == known.from_chunks and found.level == "approximate"
    assert [chunk.source for chunk in found.chunks] == ["reused", "reused"]


def test_nonprefix_chunks_are_shared(at: Opens) -> None:
    first, second, third, fourth = (passage * 8 for passage in PASSAGES[:4])
    level: dict[str, Any] = {"reuse": "approximate", "recompute_budget": 0.3}
    a = at("a", **level)
    warmed(a, [first, second])
    prefill(a, asked([second, fourth]))  # the fourth is computed behind a reused one
    b = at("b", **level)
    found = prefill(b, asked([third, fourth])).reuse
    assert found.chunks[1].source == "reused"


def test_encrypted_tiers_serve_those_with_the_secret(at: Opens, tmp_path: Path, right: str) -> None:
    make_secret(tmp_path / "secret")
    make_secret(tmp_path / "other")
    ask(at("a", tier_secret=tmp_path / "secret"))
    assert ask(at("b", tier_secret=tmp_path / "secret")).reuse.shared
    for settings in ({"tier_secret": tmp_path / "other"}, {}):
        other = ask(at(f"c{len(settings)}", **settings))
        assert other.text == right and not other.reuse.shared


def test_a_tier_that_loads_slower_than_computing_is_not_asked_nor_written(at: Opens, right: str) -> None:
    a, b = at("a"), at("b")
    for session in (a, b):
        session.cache.kv.costs = Costs(PRIOR_WITH_TIERS)
        session.cache.kv.costs.computed(Span(0, 1000), 1.0)
        for size_bytes in [1 << binary for binary in range(10, 40)] * 3:
            session.cache.kv.costs.loaded("redis", size_bytes, 1000.0)
    assert ask(a).text == right
    assert a.cache.store is not None
    assert set(a.cache.store.shared.outcomes) == {"unshared"}
    b.cache.store.shared.tiers[0].extend = None  # type: ignore[union-attr, method-assign, assignment]  (it would fail)
    assert ask(b).reuse.reused == 0


PRIOR_WITH_TIERS = type(PRIOR)(PRIOR.compute, {**PRIOR.load, "redis": (1e-3, 1e-9), "s3": (1e-1, 1e-8)})


def test_bandwidth_is_measured(at: Opens) -> None:
    ask(at("a"))
    b = at("b")
    b.cache.kv.costs = costs = Costs(PRIOR_WITH_TIERS)
    costs.computed(Span(0, 400), 4000.0)  # so slow that everything is loaded
    assert ask(b).reuse.shared
    assert [len(rows) for kind, rows in costs.as_json().items() if kind == "redis"] == [1]


@pytest.mark.parametrize(
    "settings",
    [
        {"tiers": "memory"},
        {"tiers": "memory > disk > tape"},
        {"tiers": "memory > disk > s3 > redis"},
        {"tiers": "memory > disk > s3"},
        {"redis_limit": "10%", "tiers": TIERS},
        {"redis": "http://elsewhere", "tiers": TIERS},
        {"redis": "redis://:secret@cache.example:6379", "tiers": TIERS},
        {"s3": "bucket", "tiers": "memory > disk > s3"},
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, settings: Any) -> None:
    pytest.importorskip("redis")
    with pytest.raises(InvalidSetting):
        Session(FakeEngine(), cache=str(tmp_path / "cache"), **settings)
