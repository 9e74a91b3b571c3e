"""Random requests and random goodbyes leave nothing behind. `make soak-server` does the same for half an hour.

SOAK_SECONDS   how long (20)
SOAK_MODEL     a model by name, in place of a tiny one
SOAK_SEED      which requests
SOAK_TRACE     1: print what grew, by the lines that allocated it
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rekindle.engine.base import Engine, EngineSequence
from rekindle.engine.load import EngineOptions, load_engine
from rekindle.server.auth import ApiKeys
from rekindle.server.serve import Server
from rekindle.session.session import Session
from rekindle.settings import ServerSettings, Settings
from rekindle.store.check import check
from tests.server.soak import KEYS, Soak, known_replies, tiny_embedder
from tests.tiny import tiny_engine

pytestmark = pytest.mark.exhaustive

SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))
MODEL = os.environ.get("SOAK_MODEL", "")
HOME = os.environ.get("REKINDLE_HOME")  # of whoever runs it: the models are there
SCALE = 32 if MODEL else 1
# What allocators, threads and SQLite may still take after the warm-up: a short one does not fill them.
GROWTH_BYTES = (64 if MODEL or SECONDS < 300 else 12) << 20
MEMORY_LIMIT, DISK_LIMIT = SCALE * 8 << 20, SCALE * 32 << 20
PARALLEL = 4
# So many of a kind there may be, started when they are needed; of all others no more than before.
THREADS = {"rekindle-answer": PARALLEL, "rekindle-side": 2, "rekindle-ask": PARALLEL + 2, "rekindle-read": 1}


class Counted:
    """Counts the sequences of an engine that were opened and not closed."""

    def __init__(self, engine: Engine) -> None:
        self.open: set[int] = set()
        self.opened = 0
        self._lock = threading.Lock()
        self._open = engine.open
        engine.open = self._counting  # type: ignore[method-assign]

    def _counting(self, capacity: int, regime: str, adapter: str | None = None) -> EngineSequence:
        sequence: Any = self._open(capacity, regime, adapter)
        close = sequence.close
        with self._lock:
            self.opened += 1
            number = self.opened
            self.open.add(number)

        def closing() -> None:
            with self._lock:
                self.open.discard(number)
            close()

        sequence.close = closing
        return sequence  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Held:
    """What a process holds while nobody asks anything."""

    files: int
    threads: dict[str, int]
    tasks: int
    rss_bytes: int


@dataclass
class Rig:
    """A server to be soaked, and what looks into it."""

    server: Server
    session: Session
    counted: Counted
    soak: Soak

    def rest(self) -> None:
        """Wait until nothing is going on."""
        service = self.server.host.services()[0]
        deadline = time.monotonic() + 60
        while service.admission.running or service.admission.waiting or self._connections():
            assert time.monotonic() < deadline, (
                service.admission.running,
                service.admission.waiting,
                self._connections(),
            )
            time.sleep(0.05)
        assert self.session.flush()

    def _connections(self) -> int:
        return len(self.server._uvicorn.server_state.connections)

    def held(self) -> Held:
        self.rest()
        gc.collect()
        process = psutil.Process()
        loop = self.server._uvicorn.servers[0].get_loop()
        tasks = len(asyncio.all_tasks(loop))
        threads = Counter(re.sub(r"[_-]?\d+( .*)?$", "", thread.name) for thread in threading.enumerate())
        return Held(process.num_fds(), dict(threads), tasks, process.memory_info().rss)

    def assert_nothing_is_left(self) -> None:
        """No request, place, job, flight or sequence but those that wait for their next request."""
        service, cache, engine = self.server.host.services()[0], self.session.cache, self.session.engine
        assert (service.admission.running, service.admission.waiting) == (0, 0)
        assert not service._jobs and not service._tasks
        assert not self.session.shares._here
        assert not cache._inflight._flying
        assert cache._memory_gate._running == cache._room._waiting == 0
        assert not engine._waiting and not engine._leading  # type: ignore[attr-defined]
        parked = cache._parked._parked
        assert len(self.counted.open) == len(parked) <= 8
        assert sum(context.size_bytes for context in parked) <= MEMORY_LIMIT
        cache.unpark()
        assert not self.counted.open
        store = cache.store
        assert store is not None and store.memory.size_bytes <= MEMORY_LIMIT
        assert check(store.disk).problems == ()
        assert sum(file.stat().st_size for file in store.disk.folder.rglob("*") if file.is_file()) < 2 * DISK_LIMIT


def _engine() -> Engine:
    if MODEL:
        return load_engine(MODEL, EngineOptions.of(Settings.load({})), None)
    return tiny_engine(max_position_embeddings=2048)


@pytest.fixture
def rig(tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if MODEL and HOME is not None:
        monkeypatch.setenv("REKINDLE_HOME", HOME)
    elif MODEL:
        monkeypatch.delenv("REKINDLE_HOME")
    seed = int(os.environ.get("SOAK_SEED", random.randrange(1 << 30)))
    print(f"seed {seed}")
    alone = _engine()
    with Session(alone, cache="off") as session:
        known = known_replies(session, 40, 30 if MODEL else 12, random.Random(seed))
    engine = _engine()
    counted = Counted(engine)
    session = Session(
        engine,
        cache=tmp_path / "cache",
        parallel=PARALLEL,
        memory_limit=MEMORY_LIMIT,
        disk_limit=DISK_LIMIT,
        embedder=tiny_embedder(tmp_path / "embedder"),
    )
    settings = ServerSettings(port=0, queue=16, client_timeout="5s")
    server = Server(session, settings, ApiKeys(KEYS[:2], KEYS[2:]))
    with server.running() as url:
        yield Rig(server, session, counted, Soak(url, known, embeds=True, seed=seed))


@pytest.mark.timeout(0)
def test_random_requests_and_goodbyes_leave_nothing_behind(rig: Rig) -> None:
    soak = rig.soak
    warm_seconds = min(60.0, SECONDS / 2)
    if os.environ.get("SOAK_TRACE"):
        tracemalloc.start(6)
    soak.run(warm_seconds)
    before = rig.held()
    traced = tracemalloc.take_snapshot() if tracemalloc.is_tracing() else None
    assert not soak.wrong, soak.wrong[:5]
    started, marks = time.monotonic(), []
    while (left := SECONDS - warm_seconds - (time.monotonic() - started)) > 0.1 and not soak.wrong:
        soak.run(min(60.0, left))
        marks.append(rig.held())
        print(f"{time.monotonic() - started:6.0f} s  {asdict(marks[-1])}  {dict(soak.counts)}", flush=True)
        if traced is not None:
            print(f"         of Python's own: {tracemalloc.get_traced_memory()[0]:,} bytes", flush=True)
    after = marks[-1]
    if traced is not None:
        for line in tracemalloc.take_snapshot().compare_to(traced, "traceback")[:12]:
            print(line, *line.traceback.format(), sep="\n")
    print(f"before {asdict(before)}\nafter  {asdict(after)}\nsequences opened {rig.counted.opened}")
    assert not soak.wrong, soak.wrong[:5]
    assert soak.counts["compared"] and soak.counts["left"]
    rig.assert_nothing_is_left()
    # A connection of SQLite's that was first needed now is up to three files; a leak would be one a request.
    assert after.files <= before.files + 3 and after.tasks <= before.tasks
    assert all(count <= max(before.threads.get(kind, 0), THREADS.get(kind, 0)) for kind, count in after.threads.items())
    assert after.rss_bytes - before.rss_bytes < GROWTH_BYTES
