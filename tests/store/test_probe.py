"""How fast a cache folder is read: asked once, without leaving anything, and fooled by nothing."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache.cost import recall_costs
from rekindle.engine.fake import FakeEngine
from rekindle.machine import home_folder
from rekindle.store import probe
from rekindle.store.disk import DiskStore
from rekindle.store.feed import StoredFeed
from rekindle.store.probe import ReadSpeeds, read_speeds
from rekindle.store.settings import StoreSettings


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    disk = DiskStore(tmp_path / "cache", StoreSettings(disk_limit="200MB"))
    yield disk
    disk.close()


def files(disk: DiskStore) -> set[str]:
    return {str(path) for path in disk.folder.rglob("*")}


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_probe", lambda _: pytest.fail("it was probed again"))


def test_a_folder_is_probed_once_and_nothing_stays_in_it(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(disk)
    found = read_speeds(disk)
    assert found is not None and 1e6 < found.memory < 1e12 and 1e6 < found.cached < 1e12
    assert found.disk is None or 1e4 < found.disk < 1e12
    assert files(disk) == before
    forbid(monkeypatch)
    assert read_speeds(disk) == found


def test_a_folder_that_moved_is_probed_again_and_so_is_one_whose_load_was_late(
    disk: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ReadSpeeds(1e9, 2e9, 3e9)
    monkeypatch.setattr(probe, "_probe", lambda _: first)
    assert read_speeds(disk) == first
    monkeypatch.setattr(probe, "_probe", lambda _: ReadSpeeds(4e9, 5e9, None))
    assert read_speeds(disk) == first
    assert read_speeds(disk, again=True) == read_speeds(disk) == ReadSpeeds(4e9, 5e9, None)
    monkeypatch.setattr(probe, "_probe", lambda _: first)
    moved = DiskStore(tmp_path / "elsewhere", StoreSettings(disk_limit="200MB"))
    assert read_speeds(moved) == first
    moved.close()


def test_a_folder_without_room_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskStore(tmp_path / "cache", StoreSettings(disk_limit="8MB"))
    monkeypatch.setattr(probe.tempfile, "TemporaryFile", lambda **_: pytest.fail("it was written to"))
    assert read_speeds(disk) is None
    disk.close()


@pytest.mark.parametrize("failing", ["write", "fsync", "urandom"])
def test_a_probe_that_fails_says_nothing(disk: DiskStore, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "no space left")

    if failing == "write":
        monkeypatch.setattr(probe.tempfile, "TemporaryFile", fail)
    else:
        monkeypatch.setattr(os, failing, fail)
    assert read_speeds(disk) is None


def test_a_machine_that_stands_still_meanwhile_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest piece counts, of three at least."""
    for stalled in range(3):
        clock = [0.0]

        def read(piece: int, clock: list[float] = clock, stalled: int = stalled) -> None:
            clock[0] += 30.0 if piece == stalled else 1e-3

        monkeypatch.setattr(probe.time, "perf_counter", lambda clock=clock: clock[0])
        monkeypatch.setattr(probe.time, "monotonic", lambda clock=clock: clock[0])
        assert probe._fastest(read) == pytest.approx(1e3 * (1 << 20))


@pytest.mark.parametrize(
    "rubbish", [[1.0], "x", [1e9, "a", 1.0], [None, 1e9, 1e9], [1e9, -1.0, 1e9], [1e400, 1e9, 1.0], {}]
)
def test_rubbish_among_what_is_remembered_is_probed_again(disk: DiskStore, rubbish: Any) -> None:
    found = read_speeds(disk)
    path = home_folder() / "probes.json"
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text("utf-8")), rubbish)), "utf-8")
    again = read_speeds(disk)
    assert found is not None and again is not None and again.memory > 1e6


@pytest.mark.measured_costs
def test_a_session_probes_its_folder_beside_its_requests_and_again_after_a_late_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, probed = list[bool](), threading.Semaphore(0)

    def speeds(disk: DiskStore, *, again: bool = False) -> ReadSpeeds:
        asked.append(again)
        probed.release()
        return ReadSpeeds(1e9, 1e9, 1e8 if again else 1e9)

    monkeypatch.setattr("rekindle.cache.stored_kv.read_speeds", speeds)
    monkeypatch.setattr("rekindle.cache.stored_kv.PROBE_SECONDS", 0.0)
    prompt = list(range(40, 240))
    with Session(FakeEngine(), cache=tmp_path / "cache", memory_limit="0") as session:
        assert probed.acquire(timeout=60)
        session.warm([prompt])
        session.flush()
        session.cache.unpark()
        monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 0.05)
        monkeypatch.setattr("rekindle.cache.stored_kv.MAX_LOAD_SECONDS", 0.05)
        real = StoredFeed._fill
        monkeypatch.setattr(StoredFeed, "_fill", lambda *args: (time.sleep(0.2), real(*args))[1])
        session.cache.kv.costs = recall_costs(session.engine)
        assert session.generate(prompt, max_tokens=1).reuse.miss == "lost"
        assert probed.acquire(timeout=60) and asked == [False, True]
