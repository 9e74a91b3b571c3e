"""`python -m benchmarks text`: the index of text (store/text_index) with a million places. Needs no model.

What it takes on disk, in memory, and in time. The places are synthetic, without the KV that they would lead to.
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.base import Advance, BenchOptions, Report, TableRow, repeat, scratch
from benchmarks.synthetic import KV_SPACE, keep
from rekindle.core.keys import token_bytes
from rekindle.core.kv import Span
from rekindle.store.folder import CATALOG
from rekindle.store.settings import StoreSettings
from rekindle.store.text_index import Fingerprints
from rekindle.store.tiered import TieredStore

PLACES, PROMPT = 1_000_000, 32_768
_ROUNDS = 5
_SETTINGS = StoreSettings(disk_limit="20GB", memory_limit=0, max_fingerprints=PLACES)


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure it, with as many places as are listed at most."""
    advance("a million places")
    with scratch() as folder:
        places = PLACES // 100 if options.quick else PLACES
        index = measure_text(Path(folder) / "cache", np.random.default_rng(options.seed), places)
    searched = f"{index['find_ms']:.1f} ms, {index['miss_ms']:.1f} ms where nothing is found"
    name = f"{index['tokens']:,} tokens among {index['places']:,} places"
    size = f"{index['bytes_a_place']:.0f} bytes a place, {index['memory_mb']:.0f} MB of memory"
    rows = [
        TableRow(f"search {name}", searched, bar=""),
        TableRow(f"list {name}", f"{index['record_ms']:.0f} ms, in the background", bar=""),
        TableRow("size of the index", size, bar=""),
    ]
    return Report("text", rows, {"device": "cpu", **index})


def measure_text(folder: Path, random: Any, places: int = PLACES, prompt: int = PROMPT) -> dict[str, float]:
    """Find and list prompts of `prompt` tokens among `places` places.

    Raises `AssertionError` if text that is stored is not found to the token.
    """

    def some(count: int) -> list[int]:
        return [int(token) for token in random.integers(0, 50_000, count)]

    stored = some(prompt)
    with TieredStore(folder, _SETTINGS) as store:
        keep(store, stored)
        before = _catalog_bytes(folder)
    _fill(folder, places, random)
    size_bytes = _catalog_bytes(folder) - before
    process = psutil.Process()
    with TieredStore(folder, _SETTINGS) as store:
        started, memory = time.perf_counter(), process.memory_info().rss
        store.text.record(KV_SPACE, stored)
        record_seconds = time.perf_counter() - started
        head, text = some(777), stored[100 : prompt // 2]
        asked = [*head, *text, *some(prompt - len(head) - len(text))]
        found = store.text.find(KV_SPACE, asked, [Span(0, prompt)])
        if [one.span for one in found] != [Span(777, 777 + len(text))]:
            raise AssertionError(f"found {[one.span for one in found]}")
        unknown = some(prompt)
        times = {
            "cut_ms": 1e3 * repeat(lambda: Fingerprints.of(token_bytes(asked)), _ROUNDS).median,
            "find_ms": 1e3 * repeat(lambda: store.text.find(KV_SPACE, asked, [Span(0, prompt)]), _ROUNDS).median,
            "miss_ms": 1e3 * repeat(lambda: store.text.find(KV_SPACE, unknown, [Span(0, prompt)]), _ROUNDS).median,
        }
        memory = max(0, process.memory_info().rss - memory)
        with store.disk.database.reading() as connection:
            rows = connection.execute("SELECT count(*) FROM fingerprints").fetchone()[0]
    return {
        "places": rows,
        "tokens": prompt,
        "bytes_a_place": size_bytes / places,
        "memory_mb": memory / 1e6,
        "record_ms": record_seconds * 1e3,
        **times,
    }


def _fill(folder: Path, places: int, random: Any) -> None:
    """List places of other prompts, without their blocks."""
    connection = sqlite3.connect(folder / CATALOG, isolation_level=None)
    connection.execute("PRAGMA synchronous=OFF")
    (kv_space,) = connection.execute("SELECT id FROM kv_spaces").fetchone()
    connection.execute("BEGIN")
    for first in range(0, places, 10_000):
        count = min(10_000, places - first)
        keys = random.integers(-(1 << 63), 1 << 63, count, dtype=np.int64).tolist()
        names = random.bytes(24 * count)
        rows = [
            (kv_space, key, names[place * 24 : place * 24 + 16], 100 + place, names[place * 24 + 16 : place * 24 + 24])
            for place, key in enumerate(keys)
        ]
        connection.executemany(
            "INSERT INTO fingerprints (kv_space, key, parent, stop, moved, drift, seal) VALUES (?,?,?,?,0,0.0,?)", rows
        )
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def _catalog_bytes(folder: Path) -> int:
    return (folder / CATALOG).stat().st_size
