"""Laws of a shared tier: several stores on one Redis, each with a folder of its own."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("redis", reason='needs: pip install "rekindle-llm[redis]"')

from rekindle.codec.cipher import Secret
from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.kv import LayerKv, Span
from rekindle.errors import CacheUnusable, KvLost
from rekindle.store.objects import ByteRange, ObjectStore
from rekindle.store.redis import RedisObjects
from rekindle.store.sealed import SealedObjects
from rekindle.store.settings import StoreSettings
from rekindle.store.shared_record import (
    MAX_A_CHUNK,
    MAX_RECORD_BYTES,
    ChainRecord,
    ChunkRecord,
    SharedExtent,
    parse_chain,
    parse_chunks,
    write_chunks,
)
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep, make_kv
from tests.tier_servers import RedisServer, redis_server

pytestmark = pytest.mark.thorough

TOKENS = np.random.default_rng(1).integers(0, 1000, 1500).tolist()
OTHER = [*TOKENS[:700], *np.random.default_rng(2).integers(0, 1000, 900).tolist()]
NAMES = {"redis"}


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


Node = Callable[..., TieredStore]


@pytest.fixture
def node(server: RedisServer, tmp_path: Path) -> Iterator[Node]:
    """Opens stores by name, each in a folder of its own, on the same server."""
    opened: list[TieredStore] = []

    def open_node(name: str, objects: ObjectStore | None = None, **settings: Any) -> TieredStore:
        shared = objects or RedisObjects(server.url, 1 << 30)
        opened.append(TieredStore(tmp_path / name, StoreSettings(**settings), shared=[shared]))
        return opened[-1]

    yield open_node
    for store in opened:
        store.close()


def loaded(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace = KV_SPACE) -> int:
    """Find a prompt everywhere, load it, compare every number; returns how many tokens a shared tier brought."""
    match = store.shared.extend(kv_space, store.lookup(kv_space, tokens), NAMES)
    if not match.length:
        return 0
    right = make_kv(tokens, Span(0, match.length), kv_space)
    with store.load(kv_space, match) as feed:
        for layer in feed.layers:
            out = LayerKv(np.zeros_like(right.layers[layer].keys), np.zeros_like(right.layers[layer].values))
            feed.fill(layer, out)
            assert np.array_equal(out.keys, right.layers[layer].keys)
            assert np.array_equal(out.values, right.layers[layer].values)
    return sum(len(piece.span) for piece in match.pieces if piece.tier is not None)


def share(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace = KV_SPACE) -> str:
    keep(store, tokens, kv_space)
    return store.shared.share(kv_space, tokens)


def names_on(server: RedisServer, ending: str) -> list[str]:
    client = RedisObjects(server.url, 1)._client
    found = [name.decode() for name in client.hkeys("rekindle/.sizes")]
    return [name for name in found if name.endswith(ending)]


def test_what_one_server_kept_another_loads(node: Node) -> None:
    a, b = node("a"), node("b")
    keep(a, TOKENS[:900])
    assert share(a, TOKENS) == "kept"
    assert share(a, TOKENS) == "known"
    assert loaded(b, TOKENS) == 1500
    assert loaded(b, OTHER) == 700  # token by token, inside an extent
    keep(b, OTHER[:333])
    assert loaded(b, OTHER) == 700 - 320  # its own whole blocks first


def test_a_short_beginning_of_another_prompt_is_found(node: Node) -> None:
    share(node("a"), TOKENS[:190])
    b = node("b")
    for count in (33, 100, 170):
        assert loaded(b, [*TOKENS[:count], *OTHER[-200:]]) == count


def test_small_layers_are_fetched_with_one_request(node: Node, server: RedisServer) -> None:
    class Counting(RedisObjects):
        asked = 0

        def get_ranges(self, wanted: Sequence[ByteRange]) -> list[bytes | None]:
            Counting.asked += 1
            return super().get_ranges(wanted)

    share(node("a"), TOKENS)
    b = node("b", Counting(server.url, 1 << 30))
    match = b.shared.extend(KV_SPACE, b.lookup(KV_SPACE, TOKENS), NAMES)
    headers = Counting.asked
    right = make_kv(TOKENS, Span(0, 1500))
    with b.load(KV_SPACE, match) as feed:
        for layer in feed.layers:
            out = LayerKv(np.zeros_like(right.layers[layer].keys), np.zeros_like(right.layers[layer].values))
            feed.fill(layer, out)
            assert np.array_equal(out.keys, right.layers[layer].keys)
    assert len(feed.layers) > 1 and Counting.asked == headers + 1


def test_a_continued_prompt_adds_only_what_is_new(node: Node, server: RedisServer) -> None:
    a, b = node("a"), node("b")
    assert share(a, TOKENS[:1000]) == "kept"
    before = len(names_on(server, ".kv"))
    keep(b, TOKENS[:992])  # what it loaded from the tier, in an extent of its own
    assert share(b, TOKENS) == "kept"
    assert len(names_on(server, ".kv")) == before + 1
    assert loaded(node("c"), TOKENS) == 1500


def test_tenants_salts_and_keys_never_meet(node: Node) -> None:
    share(node("a"), TOKENS)
    for namespace in (Namespace("synthetic", "alice"), Namespace("synthetic", salt="s"), Namespace("another")):
        assert loaded(node(f"b{namespace}"), TOKENS, replace(KV_SPACE, namespace=namespace)) == 0
    assert loaded(node("keyed", key=b"0" * 16), TOKENS) == 0


def test_encrypted_kv_needs_the_secret(node: Node, server: RedisServer) -> None:
    secret = Secret.new()

    def sealed(with_secret: Secret) -> ObjectStore:
        return SealedObjects(RedisObjects(server.url, 1 << 30), with_secret)

    assert share(node("a", sealed(secret)), TOKENS) == "kept"
    assert loaded(node("b", sealed(secret)), TOKENS) == 1500
    assert loaded(node("c", sealed(Secret.new())), TOKENS) == 0
    assert loaded(node("d"), TOKENS) == 0


def test_flipped_bytes_are_never_served_and_are_written_again(node: Node, server: RedisServer) -> None:
    a = node("a")
    share(a, TOKENS)
    client = RedisObjects(server.url, 1)._client
    (name,) = names_on(server, ".kv")
    size = client.strlen(f"{name}#0")
    for place in (size - 5, size // 2, 100):  # data, data, header
        b = node(f"b{place}")
        byte = client.getrange(f"{name}#0", place, place)
        client.setrange(f"{name}#0", place, bytes([byte[0] ^ 1]))
        with suppress(KvLost):
            assert loaded(b, TOKENS) == 0
        assert loaded(b, TOKENS) == 0  # it was removed
        assert share(a, TOKENS) == "kept"
        assert loaded(b, TOKENS) == 1500


@pytest.mark.parametrize("calls", range(13))
def test_a_server_that_dies_while_it_writes_leaves_nothing_that_is_wrong(
    node: Node, server: RedisServer, calls: int
) -> None:
    class Dying(RedisObjects):
        left = calls

        def put(self, key: str, data: Any) -> bool:
            if self.left == 0:
                raise SystemExit
            self.left -= 1
            return super().put(key, data)

        def release(self, key: str) -> None:
            """It is dead."""

    a = node("a", Dying(server.url, 1 << 30))
    keep(a, TOKENS[:600])
    keep(a, TOKENS)
    with pytest.raises(SystemExit) if calls < 11 else pytest.MonkeyPatch.context():
        share(a, TOKENS)
    b = node("b")
    assert loaded(b, TOKENS) in (0, 576, 600, 1500)
    RedisObjects(server.url, 1)._client.delete(*[f"{n}" for n in _claims(server)] or ["none"])  # they expire
    assert share(b, TOKENS) in ("kept", "known")
    assert loaded(node("c"), TOKENS) == 1500


def _claims(server: RedisServer) -> list[str]:
    return [name.decode() for name in RedisObjects(server.url, 1)._client.scan_iter("*?") if name.endswith(b"?")]


def test_a_missing_extent_shortens_the_prefix(node: Node, server: RedisServer) -> None:
    a, b = node("a"), node("b")
    keep(a, TOKENS[:600])
    share(a, TOKENS)
    client = RedisObjects(server.url, 1)._client
    sizes = {name: client.strlen(f"{name}#0") for name in names_on(server, ".kv")}
    client.delete(f"{max(sizes, key=lambda name: sizes[name])}#0")  # the second
    assert loaded(b, TOKENS) == 600
    assert share(b, TOKENS) == "kept"
    assert loaded(node("c"), TOKENS) == 1500


def test_servers_that_write_the_same_do_it_once(node: Node, server: RedisServer) -> None:
    stores = [node(f"n{number}") for number in range(6)]
    for store in stores:
        keep(store, TOKENS)
    start, outcomes = threading.Barrier(len(stores)), list[str]()

    def write(store: TieredStore) -> None:
        start.wait(60)
        outcomes.append(store.shared.share(KV_SPACE, TOKENS))

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(set(outcomes)) in (["claimed", "kept"], ["claimed", "kept", "known"], ["kept", "known"])
    assert outcomes.count("kept") == 1
    assert len(names_on(server, ".kv")) == 1


def test_records_are_not_trusted(node: Node, server: RedisServer) -> None:
    a, b = node("a"), node("b")
    share(a, TOKENS)
    client = RedisObjects(server.url, 1)._client
    records = {name: client.get(f"{name}#0") for name in names_on(server, ".chain")}
    for bad in (b"", b"{", b"[]", b'{"format":"rekindle-shared/1"}', b"\x00" * 100):
        for name in records:
            client.set(f"{name}#0", bad)
        assert loaded(b, TOKENS) == 0
    for name, data in records.items():
        client.set(f"{name}#0", data.replace(b'"depth":0', b'"depth":1'))
    assert loaded(b, TOKENS) == 0


def test_a_record_makes_nobody_read_more_than_headers_can_be(node: Node, server: RedisServer) -> None:
    asked: list[int] = []

    class Measured(RedisObjects):
        def get_ranges(self, wanted: Sequence[ByteRange]) -> list[bytes | None]:
            asked.append(sum(one.stop - one.start for one in wanted))
            return [None] * len(wanted)

    share(node("a"), TOKENS)
    client = RedisObjects(server.url, 1)._client
    for name in names_on(server, ".chain"):
        data = client.get(f"{name}#0")
        client.set(f"{name}#0", re.sub(rb'"header_bytes":\d+', b'"header_bytes":%d' % (1 << 40), data))
    assert loaded(node("b", Measured(server.url, 1 << 30)), TOKENS) == 0
    assert asked and max(asked) <= 64 << 20


def test_a_record_that_would_be_too_large_is_neither_written_nor_read(
    node: Node, monkeypatch: pytest.MonkeyPatch, server: RedisServer
) -> None:
    monkeypatch.setattr("rekindle.store.shared_tier.MAX_RECORD_BYTES", 100)
    assert share(node("a"), TOKENS) == "refused"
    assert names_on(server, ".kv") == []
    record = ChainRecord(1.0, 1, (SharedExtent("x" * MAX_RECORD_BYTES, "k", "00", 1, 1, 0, 1),))
    assert parse_chain(record.to_bytes()) is None
    short = replace(record, extents=(replace(record.extents[0], name="x"),))
    assert parse_chain(short.to_bytes()) == short
    variants = write_chunks([ChunkRecord(False, (), short)] * (2 * MAX_A_CHUNK))
    assert len(parse_chunks(variants)) == MAX_A_CHUNK


def test_a_tier_that_is_gone_is_a_miss_and_is_left_alone_for_a_while(node: Node, server: RedisServer) -> None:
    a = node("a")
    share(a, TOKENS)
    b = node("b")
    keep(b, TOKENS[:320])
    server.stop()
    assert loaded(b, TOKENS) == 0
    (tier,) = b.shared.tiers
    assert not tier.answers and tier.counts.failures == 1
    assert loaded(b, TOKENS) == 0 and tier.counts.failures == 1  # it was not asked again
    assert b.shared.share(KV_SPACE, TOKENS[:320]) == "failed"
    with pytest.raises(CacheUnusable, match="Run it again"):
        b.clear()


def test_what_is_removed_here_is_removed_there(node: Node) -> None:
    a, b = node("a"), node("b")
    alice = replace(KV_SPACE, namespace=Namespace("synthetic", "alice"))
    share(a, TOKENS)
    share(a, TOKENS, alice)
    a.remove_all("local", "")
    assert loaded(b, TOKENS) == 0
    assert loaded(b, TOKENS, alice) == 1500
    a.clear()
    assert loaded(b, TOKENS, alice) == 0


def test_what_is_too_old_is_not_served(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    share(node("a"), TOKENS)
    b = node("b", ttl_seconds=3600.0)
    assert loaded(b, TOKENS) == 1500
    later = time.time() + 7200
    monkeypatch.setattr("rekindle.store.shared_tier.time.time", lambda: later)
    assert loaded(b, TOKENS) == 0


def test_kv_of_a_source_that_is_gone_is_not_shared(node: Node, server: RedisServer) -> None:
    a = node("a")
    keep(a, TOKENS)
    assert a.shared.share(KV_SPACE, TOKENS, lambda: False) == "barred"
    assert names_on(server, "") == []


def test_only_what_is_worth_it_is_written(node: Node, server: RedisServer) -> None:
    a = node("a")
    a.shared.worth = lambda *_: ()
    assert share(a, TOKENS) == "unshared"
    assert names_on(server, "") == []
