"""Redis or Valkey as a shared tier.

The server's own rules hold: what it evicts or expires is a miss, and what it refuses for lack of memory is not kept.
The limit below is for this cache alone, so that other users of the server keep their share: one sorted set has the time
of the last use of each object, and a script, which no other client interrupts, makes room before an object is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from rekindle.addresses import is_loopback
from rekindle.core.plan import SharedTierName
from rekindle.errors import ExtraMissing, InvalidSetting
from rekindle.store.objects import MAX_SMALL_BYTES, Buffer, ByteRange, TierFailed

try:
    import redis
except ImportError as error:  # pragma: no cover  (where the extra is not installed)
    raise ExtraMissing('The tier redis needs: pip install "rekindle-llm[redis]"') from error

_CONNECT_SECONDS, _SOCKET_SECONDS = 0.5, 2.0
_PART_BYTES = 32 << 20  # a value has 512 MB at most, and a large one holds up other clients
_A_SCAN = 1000

# KEYS: times of use, sizes, sum of sizes. ARGV: object, its size, now, limit, size of a part. 0: it does not fit.
_RESERVE = """
local size, limit = tonumber(ARGV[2]), tonumber(ARGV[4])
if size > limit then return 0 end
local total = tonumber(redis.call('GET', KEYS[3]) or '0') - tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
redis.call('ZREM', KEYS[1], ARGV[1])
while total + size > limit do
  local oldest = redis.call('ZPOPMIN', KEYS[1])
  if not oldest[1] then total = 0 break end
  local bytes = tonumber(redis.call('HGET', KEYS[2], oldest[1]) or '0')
  for part = 0, math.floor(math.max(bytes - 1, 0) / tonumber(ARGV[5])) do
    redis.call('UNLINK', oldest[1] .. '#' .. part)
  end
  redis.call('HDEL', KEYS[2], oldest[1])
  total = total - bytes
end
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], size)
redis.call('SET', KEYS[3], total + size)
return 1
"""


class RedisObjects:
    """Objects in one database of a server, under `prefix`. A large object has several values. Thread-safe."""

    tier: SharedTierName = "redis"

    def __init__(self, url: str, limit_bytes: int, ttl_seconds: float | None = None, prefix: str = "rekindle/") -> None:
        """Connects when it is first used. Raises `InvalidSetting` for a wrong address."""
        address = urlsplit(url)
        if address.password and address.scheme == "redis" and not is_loopback(address.hostname or ""):
            raise InvalidSetting(
                f"The password of Redis is not sent to {address.hostname} without TLS, where others could read it. Use "
                "rediss://, or a tunnel that ends on localhost."
            )
        try:
            self._client = redis.Redis.from_url(
                url, socket_connect_timeout=_CONNECT_SECONDS, socket_timeout=_SOCKET_SECONDS
            )
        except ValueError as error:
            raise InvalidSetting(f"No address of a Redis server: {error}.") from error
        self.limit_bytes = limit_bytes
        self._ttl_ms = None if ttl_seconds is None else max(1, int(ttl_seconds * 1000))
        self._prefix = prefix
        self._index = [f"{prefix}.{name}" for name in ("used", "sizes", "bytes")]
        self._reserve = self._client.register_script(_RESERVE)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with _failing(), self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.getrange(self._value(key, 0), 0, MAX_SMALL_BYTES)
            found: list[bytes] = pipeline.execute()
        return [data if 0 < len(data) <= MAX_SMALL_BYTES else None for data in found]

    def get_ranges(self, wanted: Sequence[ByteRange]) -> list[bytes | None]:
        with _failing(), self._client.pipeline(transaction=False) as pipeline:
            counts = []
            for one in wanted:
                parts = list(_parts(one))
                counts.append(len(parts))
                for part, start, stop in parts:
                    pipeline.getrange(self._value(one.key, part), start, stop - 1)
            for key in {one.key for one in wanted}:
                pipeline.zadd(self._index[0], {self._name(key): time.time()}, xx=True)
            answers = iter(pipeline.execute())
        found = [b"".join(next(answers) for _ in range(count)) for count in counts]
        return [data if len(data) == one.stop - one.start else None for data, one in zip(found, wanted, strict=True)]

    def contains(self, keys: Sequence[str]) -> list[bool]:
        with _failing(), self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(self._value(key, 0))
            return [bool(answer) for answer in pipeline.execute()]

    def put(self, key: str, data: Buffer) -> bool:
        view = memoryview(data).cast("B")
        with _failing():
            try:
                if not self._reserve(
                    keys=self._index, args=[self._name(key), len(view), time.time(), self.limit_bytes, _PART_BYTES]
                ):
                    return False
                # The first part last: an object whose writer died does not exist.
                for start in reversed(range(0, len(view), _PART_BYTES)):
                    value = bytes(view[start : start + _PART_BYTES])
                    self._client.set(self._value(key, start // _PART_BYTES), value, px=self._ttl_ms)
            except redis.exceptions.OutOfMemoryError:  # the server's own limit, if it evicts nothing
                return False
        return True

    def claim(self, key: str, seconds: float) -> bool:
        with _failing():
            return bool(self._client.set(f"{self._name(key)}?", b"", nx=True, px=max(1, int(seconds * 1000))))

    def release(self, key: str) -> None:
        with _failing():
            self._client.delete(f"{self._name(key)}?")

    def remove(self, keys: Sequence[str]) -> None:
        names = [self._name(key) for key in keys]
        with _failing():
            sizes = self._client.hmget(self._index[1], names) if names else []
            with self._client.pipeline(transaction=True) as pipeline:
                for name, size in zip(names, sizes, strict=True):
                    pipeline.unlink(*(f"{name}#{part}" for part in range(-(-int(size or 1) // _PART_BYTES))))
                    pipeline.zrem(self._index[0], name)
                    pipeline.hdel(self._index[1], name)
                    pipeline.decrby(self._index[2], int(size or 0))
                pipeline.execute()

    def remove_under(self, folder: str) -> int:
        pattern = "".join(f"\\{letter}" if letter in "*?[]\\" else letter for letter in self._name(folder))
        values: list[str] = []
        with _failing():  # the index is not asked: the server may have evicted it
            values += [name.decode() for name in self._client.scan_iter(f"{pattern}/*", _A_SCAN)]
            for first in range(0, len(values), _A_SCAN):
                self._client.unlink(*values[first : first + _A_SCAN])
        keys = sorted({name.removeprefix(self._prefix).rpartition("#")[0] for name in values if "#" in name})
        for first in range(0, len(keys), _A_SCAN):
            self.remove(keys[first : first + _A_SCAN])
        return len(keys)

    def used_bytes(self) -> int:
        with _failing():
            return int(self._client.get(self._index[2]) or 0)

    def close(self) -> None:
        self._client.close()

    def _name(self, key: str) -> str:
        return f"{self._prefix}{key}"

    def _value(self, key: str, part: int) -> str:
        return f"{self._name(key)}#{part}"


def _parts(wanted: ByteRange) -> Iterator[tuple[int, int, int]]:
    """The parts of an object that hold a range, each with the bytes of it that are meant."""
    for part in range(wanted.start // _PART_BYTES, -(-wanted.stop // _PART_BYTES)):
        first = part * _PART_BYTES
        yield part, max(wanted.start - first, 0), min(wanted.stop - first, _PART_BYTES)


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except redis.exceptions.RedisError as error:
        raise TierFailed(f"Redis: {error}") from error
