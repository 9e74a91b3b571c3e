"""Processes that die, and processes that fight. `make soak` does the same for much longer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.base import folder_bytes
from benchmarks.storm import PROMPTS, prompt, storm
from rekindle.store.check import check
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import load

LIMIT_BYTES = 6_000_000
KILLS = int(os.environ.get("SOAK_KILLS", "60"))
STORM_SECONDS = float(os.environ.get("SOAK_SECONDS", "10"))
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.storm
@pytest.mark.timeout(0)
def test_after_kill_9_at_any_moment_the_store_is_sound_and_serves_what_was_computed(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.randrange(1 << 30)))
    print(f"seed {seed}")
    folder = tmp_path / "cache"
    rng = random.Random(seed)
    served = 0
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.writer", str(folder), str(LIMIT_BYTES), str(seed)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as nursery:
        assert nursery.stdin is not None and nursery.stdout is not None
        for kill in range(KILLS):
            nursery.stdin.write(f"{rng.uniform(1, 120)}\n")
            nursery.stdin.flush()
            assert nursery.stdout.readline().strip() == "killed", f"seed {seed}, kill {kill}: the writer failed"
            with TieredStore(folder, StoreSettings(disk_limit=LIMIT_BYTES, memory_limit=0)) as store:
                found = check(store.disk)
                assert found.problems == (), f"seed {seed}, kill {kill}: {found.problems}"
                for number in rng.sample(range(PROMPTS), 8):
                    served += load(store, prompt(number))
            assert folder_bytes(folder) <= LIMIT_BYTES, f"seed {seed}, kill {kill}"
        nursery.stdin.close()
    assert served > 0


@pytest.mark.storm
@pytest.mark.timeout(0)
def test_two_processes_that_write_evict_and_read_never_see_a_wrong_byte_nor_exceed_the_limit(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    seen = storm(folder, LIMIT_BYTES, STORM_SECONDS)
    assert 0 < seen.peak_bytes <= LIMIT_BYTES, seen
    assert all(process["kept"] and process["tokens"] for process in seen.processes), seen
    assert all(not process["failed"] for process in seen.processes), seen
    with TieredStore(folder, StoreSettings(disk_limit=LIMIT_BYTES, memory_limit=0)) as store:
        assert check(store.disk).problems == ()
