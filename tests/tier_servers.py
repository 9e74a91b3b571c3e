"""Real servers for the tests of shared tiers. A test is skipped where the server is not installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.fleet.tier_servers import RedisServer, S3Server
from rekindle.errors import InvalidSetting

__all__ = ["RedisServer", "redis_server", "s3_server"]


@contextmanager
def _started(server: RedisServer | S3Server) -> Iterator[None]:
    try:
        server.start()
    except InvalidSetting as error:
        pytest.skip(str(error))
    try:
        yield
    finally:
        server.stop()


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A Redis of Debian's package, without persistence."""
    pytest.importorskip("redis", reason='needs: pip install "rekindle-llm[redis]"')
    server = RedisServer(options)
    with _started(server):
        yield server


@contextmanager
def s3_server(folder: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a client of a SeaweedFS, which has one bucket: rekindle."""
    pytest.importorskip("obstore", reason='needs: pip install "rekindle-llm[s3]"')
    server = S3Server(folder)
    with _started(server):
        yield server.environment()
