"""S3, or any store that speaks its protocol, as a shared tier.

Access keys, the region and the endpoint are those of the environment (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
`AWS_REGION`, `AWS_ENDPOINT_URL`), as for other clients. S3 has no limit of its own and does not say what was used: the
limit is held by the time of writing, by the server that writes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from rekindle.core.plan import SharedTierName
from rekindle.errors import ExtraMissing, InvalidSetting
from rekindle.store.objects import MAX_SMALL_BYTES, Buffer, ByteRange, TierFailed

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import S3Store
except ImportError as error:  # pragma: no cover  (where the extra is not installed)
    raise ExtraMissing('The tier s3 needs: pip install "rekindle-llm[s3]"') from error

_CLAIM = ".claim"
_SWEEP_SHARE = 16  # all objects are listed again when this part of the limit was written
_LEFT_SHARE = 0.9  # of the limit, after others were removed
_WORKERS = 16
_ANSWER_SECONDS = 10
A = TypeVar("A")
T = TypeVar("T")


class S3Objects:
    """Objects under an address like `s3://bucket/prefix`. Thread-safe."""

    tier: SharedTierName = "s3"

    def __init__(self, url: str, limit_bytes: int, ttl_seconds: float | None = None) -> None:
        """Connects when it is first used. Raises `InvalidSetting` for a wrong address."""
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        if scheme != "s3" or not bucket:
            raise InvalidSetting(f"s3={url!r} is no address of a bucket. Use s3://BUCKET/PREFIX.")
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        config: Any = {} if endpoint is None else {"endpoint": endpoint}
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix.strip("/") or None,
                config=config,
                client_options={"timeout": f"{_ANSWER_SECONDS}s", "connect_timeout": "1s", "allow_http": True},
                retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=_ANSWER_SECONDS)},
            )
        except BaseError as error:
            raise InvalidSetting(f"The store {url} cannot be used: {error}.") from error
        self.limit_bytes = limit_bytes
        self._ttl_seconds = ttl_seconds
        self._workers = ThreadPoolExecutor(_WORKERS, "rekindle-s3")
        self._lock = threading.Lock()
        self._used_bytes: int | None = None  # by the last listing, and what was written since
        self._unlisted_bytes = 0

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        def fetch(key: str) -> bytes:
            found = obstore.get(self._store, key)  # its bytes come when they are asked for
            return bytes(found.bytes()) if found.meta["size"] <= MAX_SMALL_BYTES else b""

        return [data or None for data in self._in_parallel(fetch, keys)]

    def get_ranges(self, wanted: Sequence[ByteRange]) -> list[bytes | None]:
        by_key: dict[str, list[int]] = {}
        for number, one in enumerate(wanted):
            by_key.setdefault(one.key, []).append(number)

        def fetch(key: str) -> list[bytes]:
            own = [wanted[number] for number in by_key[key]]
            found = obstore.get_ranges(
                self._store, key, starts=[one.start for one in own], ends=[one.stop for one in own]
            )
            return [bytes(part) for part in found]

        answers: list[bytes | None] = [None] * len(wanted)
        for (_, numbers), found in zip(by_key.items(), self._in_parallel(fetch, list(by_key)), strict=True):
            for number, data in zip(numbers, found or (), strict=False):
                whole = len(data) == wanted[number].stop - wanted[number].start
                answers[number] = data if whole else None
        return answers

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return [found is not None for found in self._in_parallel(lambda key: obstore.head(self._store, key), keys)]

    def put(self, key: str, data: Buffer) -> bool:
        size_bytes = memoryview(data).nbytes
        if size_bytes > self.limit_bytes:
            return False
        with _failing():
            self._make_room(size_bytes)
            obstore.put(self._store, key, bytes(data))
        return True

    def claim(self, key: str, seconds: float) -> bool:
        with _failing():
            try:
                obstore.put(self._store, key + _CLAIM, b"", mode="create")
            except AlreadyExistsError:
                since = obstore.head(self._store, key + _CLAIM)["last_modified"].timestamp()
                if time.time() < since + seconds:
                    return False
                obstore.put(self._store, key + _CLAIM, b"")  # of a server that died
        return True

    def release(self, key: str) -> None:
        self.remove([key + _CLAIM])

    def remove(self, keys: Sequence[str]) -> None:
        with _failing():
            if keys:
                obstore.delete(self._store, list(keys))

    def remove_under(self, folder: str) -> int:
        with _failing():
            keys = [item["path"] for page in obstore.list(self._store, folder) for item in page]
        self.remove(keys)
        return len(keys)

    def used_bytes(self) -> int:
        with _failing():
            return sum(item["size"] for page in obstore.list(self._store) for item in page)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, size_bytes: int) -> None:
        """Hold the limit: the objects that were written first leave, and those that are too old."""
        with self._lock:
            self._unlisted_bytes += size_bytes
            listed = self._used_bytes is not None and self._unlisted_bytes < self.limit_bytes // _SWEEP_SHARE
            if listed and (self._used_bytes or 0) + self._unlisted_bytes <= self.limit_bytes:
                return
            items = [item for page in obstore.list(self._store) for item in page]
            items.sort(key=lambda item: item["last_modified"])
            used, now, leaving = sum(item["size"] for item in items), time.time(), []
            room = self.limit_bytes if used + size_bytes <= self.limit_bytes else self.limit_bytes * _LEFT_SHARE
            for item in items:
                age = now - item["last_modified"].timestamp()
                if used + size_bytes <= room and (self._ttl_seconds is None or age <= self._ttl_seconds):
                    break
                used -= item["size"]
                leaving.append(item["path"])
            self.remove(leaving)
            self._used_bytes, self._unlisted_bytes = used, size_bytes

    def _in_parallel(self, fetch: Callable[[A], T], wanted: Sequence[A]) -> list[T | None]:
        def one(key: A) -> T | None:
            with suppress(FileNotFoundError):
                return fetch(key)
            return None

        with _failing():
            return [one(wanted[0])] if len(wanted) == 1 else list(self._workers.map(one, wanted))


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError, RuntimeError) as error:  # RuntimeError: it was closed
        raise TierFailed(f"S3: {str(error).splitlines()[0]}") from error
