"""A process that keeps, loads and evicts in one cache folder for some seconds, and compares every number it loads.

python -m benchmarks.storm FOLDER LIMIT_BYTES SEED SECONDS        prints what it did as JSON
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.base import folder_bytes
from benchmarks.synthetic import KV_SPACE, keep, load
from rekindle.core.scope import APP_STATES, AppRef, Scope
from rekindle.errors import KvLost
from rekindle.store.catalog import app_rows
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore

PROMPTS = 400
APPS = 5


@dataclass(frozen=True)
class Storm:
    """What was seen from outside while processes fought over a folder."""

    processes: list[dict[str, int]]
    samples: int
    peak_bytes: int
    limit_bytes: int


def prompt(number: int) -> list[int]:
    """Prompts that share beginnings of many lengths, the same in every process."""
    rng = random.Random(number % PROMPTS)
    family = number % 7
    shared = [family * 100 + place % 50 for place in range(rng.choice([0, 20, 64, 150, 400]))]
    return shared + [rng.randrange(1000) for _ in range(rng.choice([1, 33, 70, 200, 900]))]


def work(folder: Path, limit_bytes: int, rng: random.Random, seconds: float) -> dict[str, int]:
    """Keep, load, evict and reopen for `seconds`; raises `AssertionError` if a number is wrong."""
    done = {"kept": 0, "known": 0, "refused": 0, "failed": 0, "tokens": 0, "lost": 0}
    settings = StoreSettings(
        disk_limit=limit_bytes,
        memory_limit=rng.choice([0, 200_000]),
        policy=rng.choice(["utility", "lru"]),
        killed_ttl_seconds=0.1,
    )
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        with TieredStore(folder, settings) as store:
            for _ in range(rng.randrange(5, 60)):
                if time.monotonic() >= stop:
                    break
                tokens = prompt(rng.randrange(PROMPTS))
                try:
                    done["tokens"] += load(store, tokens)
                except KvLost:
                    done["lost"] += 1  # evicted by the other process between lookup and load
                app = rng.choice([None, AppRef("local", f"app-{rng.randrange(APPS)}")])
                done[keep(store, tokens, app=app).outcome] += 1
                store.record_request(KV_SPACE, tokens, app)
                store.record_use(store.lookup(KV_SPACE, tokens), saved_ms=1.0)
                if rng.random() < 0.05:
                    store.maintain()
                if rng.random() < 0.02:
                    store.disk.room.prune(limit_bytes // 2)
                if rng.random() < 0.05:
                    _say(store, f"app-{rng.randrange(APPS)}", rng)
            if store.counts.quarantined:
                raise AssertionError(f"something was damaged: {store.counts}")
    return done


def _say(store: TieredStore, app: str, rng: random.Random) -> None:
    with store.disk.database.writing() as connection:
        allows = store.disk.room.allows
        app_rows.set_state(connection, Scope("local"), app, rng.choice(APP_STATES), store.disk.clock(), allows)


def storm(folder: Path, limit_bytes: int, seconds: float) -> Storm:
    """Let two processes fight over a folder, and look all the time at what it takes."""
    command = [sys.executable, "-m", "benchmarks.storm", str(folder), str(limit_bytes)]
    running = [
        subprocess.Popen([*command, str(seed), str(seconds)], stdout=subprocess.PIPE, text=True) for seed in range(2)
    ]
    samples = peak = 0
    while any(process.poll() is None for process in running):
        peak = max(peak, folder_bytes(folder))
        samples += 1
        time.sleep(0.01)
    done = []
    for process in running:
        out, _ = process.communicate()
        if process.returncode:
            raise AssertionError("a process of the storm saw something wrong")
        done.append(json.loads(out))
    return Storm(done, samples, peak, limit_bytes)


if __name__ == "__main__":
    place, limit, seed, duration = sys.argv[1:]
    print(json.dumps(work(Path(place), int(limit), random.Random(int(seed)), float(duration))))
