"""What every object store promises, on real servers: Redis, S3 (SeaweedFS), and both encrypted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from rekindle.codec.cipher import Secret
from rekindle.core.kv import LayerKv, Span
from rekindle.errors import InvalidSetting
from rekindle.store.objects import MAX_SMALL_BYTES, ByteRange, ObjectStore, TierFailed
from rekindle.store.prefix_index import Match
from rekindle.store.sealed import SealedObjects
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep, make_kv
from tests.tier_servers import RedisServer, redis_server, s3_server

pytestmark = pytest.mark.thorough

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def redis_alone() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


def s3_objects(request: pytest.FixtureRequest, limit: int = LIMIT, **options: float) -> ObjectStore:
    """Objects in a folder of their own of the one bucket."""
    for name, value in request.getfixturevalue("bucket").items():
        request.getfixturevalue("monkeypatch").setenv(name, value)
    from rekindle.store.s3 import S3Objects

    return S3Objects(f"s3://rekindle/{time.monotonic_ns()}", limit, **options)


def redis_objects(request: pytest.FixtureRequest, limit: int = LIMIT, **options: float) -> ObjectStore:
    url = request.getfixturevalue("redis_alone").url
    from rekindle.store.redis import RedisObjects

    return RedisObjects(url, limit, prefix=f"{time.monotonic_ns()}/", **options)


@pytest.fixture(params=["redis", "s3", "redis sealed", "s3 sealed"])
def objects(request: pytest.FixtureRequest) -> Iterator[ObjectStore]:
    made = redis_objects(request) if "redis" in request.param else s3_objects(request)
    store = SealedObjects(made, Secret.new()) if "sealed" in request.param else made
    yield store
    store.close()


def test_an_object_is_read_whole_and_in_parts(objects: ObjectStore) -> None:
    data = bytes(range(256)) * 200
    assert objects.put("kv/a/x", data)
    assert objects.get_many(["kv/a/x", "kv/a/y"]) == [data, None]
    wanted = [(0, 1), (100, 40_000), (51_199, 51_200), (16_370, 16_390)]
    assert objects.get_ranges([ByteRange("kv/a/x", *one) for one in wanted]) == [data[a:b] for a, b in wanted]
    beyond = [ByteRange("kv/a/x", 51_000, 200_000), ByteRange("kv/a/y", 0, 1)]
    assert objects.get_ranges(beyond) == [None, None]
    assert objects.contains(["kv/a/x", "kv/a/y"]) == [True, False]


def test_of_a_small_object_that_is_too_large_nothing_comes(request: pytest.FixtureRequest) -> None:
    for store in (redis_objects(request, 1 << 26), s3_objects(request, 1 << 26)):
        for key, size in (("kv/a/small", MAX_SMALL_BYTES), ("kv/a/large", MAX_SMALL_BYTES + 1)):
            assert store.put(key, bytes(size))
        found = store.get_many(["kv/a/small", "kv/a/large", "kv/a/none"])
        assert [data and len(data) for data in found] == [MAX_SMALL_BYTES, None, None]
        store.close()


def test_of_a_huge_value_no_more_than_the_limit_comes_over_the_network(
    request: pytest.FixtureRequest,
) -> None:
    store = redis_objects(request, 1 << 26)
    assert store.put("kv/a/large", bytes(20 << 20))
    before = _sent_bytes(store)
    assert store.get_many(["kv/a/large"]) == [None]
    assert _sent_bytes(store) - before < 2 * MAX_SMALL_BYTES


def _sent_bytes(store: ObjectStore) -> int:
    return int(store._client.info("stats")["total_net_output_bytes"])  # type: ignore[attr-defined]


def test_removing_a_folder_leaves_others_alone(objects: ObjectStore) -> None:
    for key in ("kv/a/x", "kv/a/y", "kv/ab/x"):
        assert objects.put(key, b"1")
    assert objects.remove_under("kv/a") == 2
    assert objects.contains(["kv/a/x", "kv/a/y", "kv/ab/x"]) == [False, False, True]
    objects.remove(["kv/ab/x", "kv/never"])
    assert objects.used_bytes() == 0


def test_a_folder_is_removed_also_where_redis_evicted_the_index(request: pytest.FixtureRequest) -> None:
    store = redis_objects(request)
    assert store.put("kv/a/x", b"1")
    store._client.delete(*store._index)  # type: ignore[attr-defined]
    assert store.remove_under("kv/a") == 1
    assert store.contains(["kv/a/x"]) == [False]


def test_one_of_several_claims_a_key_until_it_is_released(objects: ObjectStore) -> None:
    assert objects.claim("kv/a/x", 60.0)
    assert not objects.claim("kv/a/x", 60.0)
    objects.release("kv/a/x")
    assert objects.claim("kv/a/x", 60.0)


@pytest.mark.parametrize("kind", [redis_objects, s3_objects])
def test_a_claim_of_a_server_that_died_ends(kind: object, request: pytest.FixtureRequest) -> None:
    store = kind(request)  # type: ignore[operator]
    assert store.claim("kv/a/x", 0.001)
    deadline = time.monotonic() + 60.0
    while not store.claim("kv/a/x", 0.001):
        assert time.monotonic() < deadline
    store.close()


@pytest.mark.parametrize("kind", [redis_objects, s3_objects])
def test_the_limit_holds_and_the_oldest_leave(kind: object, request: pytest.FixtureRequest) -> None:
    store = kind(request, 10_000)  # type: ignore[operator]
    for number in range(8):
        assert store.put(f"kv/a/{number}", bytes(3000))
    assert 3000 <= store.used_bytes() <= 10_000
    if store.tier == "redis":  # S3 has times in whole seconds
        assert store.contains(["kv/a/0", "kv/a/7"]) == [False, True]
    assert not store.put("kv/a/large", bytes(10_001))
    store.close()


def test_what_was_used_stays_longer(request: pytest.FixtureRequest) -> None:
    store = redis_objects(request, 10_000)
    for number in range(3):
        assert store.put(f"kv/a/{number}", bytes(3000))
    assert store.get_ranges([ByteRange("kv/a/0", 0, 9)]) == [bytes(9)]
    assert store.put("kv/a/3", bytes(3000))
    assert store.contains([f"kv/a/{number}" for number in range(4)]) == [True, False, True, True]


def test_a_large_object_has_several_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    store = redis_objects(request)
    monkeypatch.setattr("rekindle.store.redis._PART_BYTES", 1000)
    data = bytes(range(250)) * 14
    assert store.put("kv/a/x", data)
    assert store.get_ranges([ByteRange("kv/a/x", 990, 3010), ByteRange("kv/a/x", 3400, 3501)]) == [data[990:3010], None]
    store.remove(["kv/a/x"])
    assert store.get_ranges([ByteRange("kv/a/x", 2000, 2001)]) == [None]


def test_what_expired_on_redis_is_gone(request: pytest.FixtureRequest) -> None:
    store = redis_objects(request, ttl_seconds=0.001)
    assert store.put("kv/a/x", b"1")
    deadline = time.monotonic() + 60.0
    while store.contains(["kv/a/x"]) == [True]:
        assert time.monotonic() < deadline


@pytest.mark.parametrize(("policy", "is_kept"), [("noeviction", False), ("allkeys-lru", True)])
def test_the_memory_limit_of_the_server_is_respected(policy: str, is_kept: bool) -> None:
    from rekindle.store.redis import RedisObjects

    with redis_server("--maxmemory", "8mb", "--maxmemory-policy", policy) as server:
        store = RedisObjects(server.url, 1 << 30)
        outcomes = [store.put(f"kv/a/{number}", bytes(1 << 20)) for number in range(16)]
        assert outcomes[-1] == is_kept
        assert sum(store.contains([f"kv/a/{number}" for number in range(16)])) < 8
        store.close()


def test_a_server_that_is_gone_fails_and_comes_back() -> None:
    from rekindle.store.redis import RedisObjects

    with redis_server() as server:
        store = RedisObjects(server.url, LIMIT)
        assert store.put("kv/a/x", b"1")
        server.stop()
        for ask in (store.used_bytes, lambda: store.get_many(["x"]), lambda: store.put("x", b"")):
            with pytest.raises(TierFailed):
                ask()
        server.start()
        assert store.contains(["kv/a/x"]) == [False]


def test_a_bucket_that_does_not_exist_fails(request: pytest.FixtureRequest) -> None:
    s3_objects(request).close()
    from rekindle.store.s3 import S3Objects

    store = S3Objects("s3://no-such-bucket/x", LIMIT)
    with pytest.raises(TierFailed):
        store.used_bytes()
    with pytest.raises(InvalidSetting, match="s3://BUCKET"):
        S3Objects("http://elsewhere", LIMIT)


def test_nothing_is_read_with_another_secret_or_after_a_change(request: pytest.FixtureRequest) -> None:
    plain, secret = redis_objects(request), Secret.new()
    sealed = SealedObjects(plain, secret)
    sealed.put("kv/a/x", b"the words of a prompt")
    (name,) = _names(plain)
    stored = plain.get_many([name])[0]
    assert stored is not None and b"words" not in stored and "x" not in name.rpartition("/")[2][:1]
    assert SealedObjects(plain, Secret.new()).get_many(["kv/a/x"]) == [None]
    plain.put(name, stored[:-1] + bytes([stored[-1] ^ 1]))
    assert sealed.get_many(["kv/a/x"]) == sealed.get_ranges([ByteRange("kv/a/x", 0, 5)]) == [None]
    plain.put(name.replace("kv/a/", "kv/b/"), stored)  # moved to another tenant
    assert sealed.get_many(["kv/b/x"]) == [None]


def _names(store: ObjectStore) -> list[str]:
    client, prefix = store._client, store._prefix  # type: ignore[attr-defined]
    return [name.decode().removeprefix(prefix) for name in client.hkeys(f"{prefix}.sizes")]


def test_what_one_server_wrote_to_s3_another_loads_and_promotes_to_redis(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = f"s3://rekindle/{time.monotonic_ns()}"
    s3_objects(request).close()
    from rekindle.store.s3 import S3Objects

    def opened(name: str, *objects: ObjectStore) -> TieredStore:
        return TieredStore(tmp_path / name, StoreSettings(), shared=objects)

    tokens = list(range(1000))
    with (
        opened("a", S3Objects(url, LIMIT)) as a,
        opened("b", redis_objects(request), S3Objects(url, LIMIT)) as b,
        opened("c", *(tier.objects for tier in b.shared.tiers[:1])) as c,
    ):
        keep(a, tokens)
        assert [a.shared.share(KV_SPACE, tokens), a.shared.share(KV_SPACE, tokens)] == ["kept", "known"]
        match = b.shared.extend(KV_SPACE, b.lookup(KV_SPACE, tokens), {"redis", "s3"})
        assert [(piece.tier, len(piece.span)) for piece in match.pieces] == [("s3", 1000)]
        assert_right(b, tokens, match)
        keep(b, tokens)  # as the cache does with what it loaded
        b.shared.share(KV_SPACE, tokens)
        match = c.shared.extend(KV_SPACE, c.lookup(KV_SPACE, tokens), {"redis"})
        assert [(piece.tier, len(piece.span)) for piece in match.pieces] == [("redis", 1000)]
        assert_right(c, tokens, match)


def assert_right(store: TieredStore, tokens: list[int], match: Match) -> None:
    """What is loaded is what was kept, number by number."""
    right = make_kv(tokens, Span(0, match.length))
    with store.load(KV_SPACE, match) as feed:
        for layer, kv in enumerate(right.layers):
            out = LayerKv(np.zeros_like(kv.keys), np.zeros_like(kv.values))
            feed.fill(layer, out)
            assert np.array_equal(out.keys, kv.keys) and np.array_equal(out.values, kv.values)
