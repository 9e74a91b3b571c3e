"""`python -m benchmarks store`: KV on disk against plain files and diskcache. Needs no model and no engine.

The KV has the shape of SmolLM2-135M's, 1,000 tokens, and random numbers in it. The million rows are synthetic: a
catalog filled directly, without files, because a million real blocks would take more than a terabyte.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import (
    Advance,
    BenchOptions,
    Report,
    TableRow,
    Timing,
    drop_pages,
    interleave,
    paired_ratio,
    repeat,
    scratch,
    seconds_of,
)
from benchmarks.decoding import measure_decoding
from benchmarks.storm import storm
from benchmarks.wear import measure_wear
from rekindle.core.keys import BLOCK_BYTES, BLOCK_TOKENS, KvSpace, Namespace, NodeKey, chain, token_bytes
from rekindle.core.kv import Kv, KvLayout, LayerKv, LayerShape, Span
from rekindle.errors import EngineMissing
from rekindle.store.catalog import catalog
from rekindle.store.disk import Machine
from rekindle.store.files import Files, Handle
from rekindle.store.folder import CATALOG
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore

VOCABULARY = 50_000
BLOCKS_AN_EXTENT = 32


def fill_catalog(folder: Path, kv_space: KvSpace, rows: int, prompt_tokens: int, random: Any) -> list[int]:
    """A catalog of `rows` blocks, without files. Returns the one long prompt that is in it, kept in several turns."""
    with TieredStore(folder, StoreSettings(disk_limit="1TB", memory_limit=0)) as store:
        digest = store.disk.kv_space_digest(kv_space)
    prompt = [int(token) for token in random.integers(0, VOCABULARY, prompt_tokens)]
    connection = sqlite3.connect(folder / CATALOG, isolation_level=None)
    # Filled with the speed of a fresh table: indexes afterwards, in order.
    definitions = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type='index' AND tbl_name='blocks' AND sql IS NOT NULL"
    ).fetchall()
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA cache_size=-400000")
    connection.execute("BEGIN")
    for name, _ in definitions:
        connection.execute(f"DROP INDEX {name}")
    number = catalog.add_kv_space(connection, digest, kv_space)
    for extent, run in enumerate(_runs(rows, number, kv_space.namespace.root, prompt, random), start=1):
        connection.execute(
            "INSERT INTO extents (id, name, kv_space, state, bytes, writer, depth, blocks, live, tokens, kept, used) "
            "VALUES (?,?,?,'live',1000,'bench',?,?,?,?,1,1)",
            (extent, f"{extent:016x}", number, run.depth, len(run.keys), len(run.keys), len(run.tokens) // 4),
        )
        connection.executemany(
            "INSERT INTO blocks (extent, place, kv_space, key, parent, tokens, used) VALUES (?,?,?,?,?,?,?)",
            run.rows(extent, 1.0),
        )
    for _, definition in definitions:
        connection.execute(definition)
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()
    return prompt


def _runs(rows: int, kv_space: int, root: NodeKey, prompt: list[int], random: Any) -> Iterator[catalog.BlockRun]:
    data = token_bytes(prompt)
    keys = chain(root, data)
    for first in range(0, len(keys), BLOCKS_AN_EXTENT):
        stop = min(first + BLOCKS_AN_EXTENT, len(keys))
        parent = keys[first - 1] if first else root
        part = data[first * BLOCK_BYTES : stop * BLOCK_BYTES]
        yield catalog.BlockRun(kv_space, first, parent, keys[first:stop], part)
    for _ in range((rows - len(keys)) // BLOCKS_AN_EXTENT):
        tokens = random.integers(0, VOCABULARY, BLOCKS_AN_EXTENT * BLOCK_TOKENS, dtype=np.uint32).tobytes()
        names = random.bytes(16 * BLOCKS_AN_EXTENT)
        drawn = [NodeKey(names[place * 16 : place * 16 + 16]) for place in range(BLOCKS_AN_EXTENT)]
        yield catalog.BlockRun(kv_space, 0, root, drawn, tokens)


TOKENS = 1000
PROMPT = 8000
ROWS = {"1k": 1_000, "1m": 1_000_000}
KV_SPACE = KvSpace(
    Namespace("bench"), KvLayout("float32", tuple(LayerShape(3, 64, 64) for _ in range(30))), model="bench"
)
STORM_LIMIT_BYTES = 6_000_000


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything; see `docs/concepts/store.md` for what it means."""
    report = Report("store")
    report.fields |= {"device": "cpu", "shape": "SmolLM2-135M, float32", "tokens": TOKENS, "rounds": options.rounds(15)}
    with scratch() as folder:
        measure = _StoreMeasure(Path(folder), options)
        parts = measure.put, measure.get, measure.decode, measure.evict, measure.rows, measure.storm, measure.wear
        for part in parts:
            advance(part.__name__)
            part(report)
    return report


class CountingFiles(Files):
    """Files that count their fsyncs."""

    syncs = 0

    def sync(self, handle: Handle) -> None:
        """Return when the file's bytes are on the medium."""
        CountingFiles.syncs += 1
        super().sync(handle)


class _StoreMeasure:
    """The parts of the bench, in one folder."""

    def __init__(self, folder: Path, options: BenchOptions) -> None:
        self.folder = folder
        self.rounds = options.rounds(15)
        self._quick = options.quick
        self._random = np.random.default_rng(options.seed)
        self._kv = self._make_kv()
        self._bytes = TOKENS * KV_SPACE.layout.token_bytes

    def put(self, report: Report) -> None:
        """Keep 1,000 tokens: ours, a plain file with fsync, diskcache."""
        diskcache = _diskcache()
        settings = StoreSettings(disk_limit="20GB", memory_limit=0)
        number = iter(range(1_000_000))
        blob = b"".join(half.tobytes() for layer in self._kv.layers for half in (layer.keys, layer.values))
        keeps = 0
        with _folder(self.folder / "put") as folder, TieredStore(folder / "ours", settings, _machine()) as store:
            CountingFiles.syncs = 0  # that of the new folder's marker does not count
            theirs = diskcache.Cache(folder / "diskcache", size_limit=20 << 30)

            def ours() -> None:
                nonlocal keeps
                tokens = self._tokens(next(number))
                if store.keep(KV_SPACE, tokens, self._kv).outcome != "kept":
                    raise AssertionError("a keep was refused")
                keeps += 1

            def plain() -> None:
                path = folder / f"plain-{next(number)}"
                with path.open("wb", buffering=0) as file:
                    file.write(blob)
                    os.fsync(file.fileno())

            jobs = {"ours": ours, "plain": plain, "diskcache": lambda: theirs.set(next(number), blob)}
            times = interleave(jobs, self.rounds, lambda: None)
            theirs.close()
        report.fields |= {
            "put_mb_s": self._speed(times["ours"]),
            "file_put_mb_s": self._speed(times["plain"]),
            "diskcache_put_mb_s": self._speed(times["diskcache"]),
            "fsyncs_per_keep": CountingFiles.syncs / keeps,
        }
        _compare(report, "keep 1,000 tokens", times, "plain", "")
        _compare(report, "keep, against diskcache (no fsync)", times, "diskcache", "")
        report.rows.append(TableRow("fsyncs a keep", f"{report.fields['fsyncs_per_keep']:g}", bar="1"))

    def get(self, report: Report) -> None:
        """Load 1,000 tokens into buffers that are there: from warm pages, from dropped ones, from memory."""
        diskcache = _diskcache()
        settings = StoreSettings(disk_limit="20GB", memory_limit=0)
        tokens = self._tokens(0)
        with _folder(self.folder / "get") as folder:
            with TieredStore(folder / "ours", settings) as store:
                store.keep(KV_SPACE, tokens, self._kv)
                (extent,) = (store.disk.extents.folder).iterdir()
            theirs = diskcache.Cache(folder / "diskcache", size_limit=20 << 30)
            theirs.set("kv", extent.read_bytes())
            copy = folder / "plain"
            shutil.copyfile(extent, copy)
            # Both read into one large buffer that was written before: what differs is how, not where to.
            ours_out, plain_out = (np.ones(2 * self._bytes, np.uint8) for _ in range(2))
            layers = self._layers(ours_out)
            with (
                TieredStore(folder / "ours", settings) as store,
                TieredStore(folder / "ours", StoreSettings(memory_limit="200MB")) as held,
            ):
                jobs = {
                    "ours": lambda: self._load(store, tokens, layers),
                    "plain": lambda: _read(copy, plain_out),
                    "diskcache": lambda: theirs.get("kv"),
                    "memory": lambda: self._load(held, tokens, layers),
                }
                self._load(held, tokens, layers)
                held.maintain()
                times = interleave(jobs, 2 * self.rounds, lambda: None)
                for layer, right in zip(layers, self._kv.layers, strict=True):
                    if not np.array_equal(layer.keys, right.keys) or not np.array_equal(layer.values, right.values):
                        raise AssertionError("what was loaded is not what was kept")
                cold = interleave(
                    {name: jobs[name] for name in ("ours", "plain")}, self.rounds, lambda: drop_pages(extent, copy)
                )
            theirs.close()
        report.fields |= {
            "get_mb_s": self._speed(times["ours"]),
            "file_get_mb_s": self._speed(times["plain"]),
            "diskcache_get_mb_s": self._speed(times["diskcache"]),
            "memory_get_mb_s": self._speed(times["memory"]),
            "get_vs_file": 1 / paired_ratio(times["ours"], times["plain"]),
            "get_mb_s_cold_pages": self._speed(cold["ours"]),
            "file_get_mb_s_cold_pages": self._speed(cold["plain"]),
            "get_vs_file_cold_pages": 1 / paired_ratio(cold["ours"], cold["plain"]),
        }
        _compare(report, "load 1,000 tokens, warm pages", times, "plain", ">= 0.8")
        _compare(report, "load, against diskcache", times, "diskcache", "")
        _compare(report, "load 1,000 tokens, pages dropped", cold, "plain", ">= 0.8")
        memory = {"ours": times["memory"], "plain": times["plain"]}
        _compare(report, "load 1,000 tokens, from memory", memory, "plain", "")

    def decode(self, report: Report) -> None:
        """Restore coded KV, against the bare zstd decoder."""
        measure_decoding(self._kv, self.rounds, report)

    def evict(self, report: Report) -> None:
        """Evict real, small entries one after the other."""
        from benchmarks.synthetic import keep

        with (
            _folder(self.folder / "evict") as folder,
            TieredStore(folder / "c", StoreSettings(disk_limit="1GB", memory_limit=0)) as store,
        ):
            count = 200
            for number in range(count):
                keep(store, [number] * 64)
            report.fields["evict_us"] = seconds_of(lambda: store.disk.room.prune(0)) / count * 1e6
        report.rows.append(TableRow("evict one of 200 entries", f"{report.fields['evict_us']:,.0f} us"))

    def rows(self, report: Report) -> None:
        """Look 8,000 tokens up among 1,000 and among 1,000,000 rows; reopen; evict; memory."""
        for name, count in ROWS.items():
            with _folder(self.folder / name) as folder:
                prompt = fill_catalog(folder, KV_SPACE, count, PROMPT, self._random)
                known = TieredStore(folder, StoreSettings(disk_limit="1TB", memory_limit=0))
                unknown = [VOCABULARY] * PROMPT
                half = [*prompt[: PROMPT // 2 + 5], *unknown[: PROMPT // 2]]
                jobs = [partial(known.lookup, KV_SPACE, tokens) for tokens in (prompt, half, unknown)]
                times = [repeat(job, 50).median * 1e6 for job in jobs]
                found = [job().length for job in jobs]
                known.close()
                if found != [PROMPT, PROMPT // 2 + 5, 0]:
                    raise AssertionError(f"the lookup found {found}")
                report.fields[f"lookup_us_{name}"] = max(times)
                report.fields[f"index_memory_mb_{name}"] = _index_memory(folder)
                bar = "<= 2 ms" if name == "1m" else ""
                shown = f"{max(times):,.0f} us"
                report.rows.append(TableRow(f"look up 8,000 tokens, {count:,} rows (synthetic)", shown, bar=bar))
                if name == "1m":
                    self._at_a_million(report, folder, prompt)
        memory = [report.fields[f"index_memory_mb_{name}"] for name in ROWS]
        report.rows.append(TableRow("memory of the index", f"{memory[1]:.1f} MB", f"{memory[0]:.1f} MB at 1,000 rows"))

    def _at_a_million(self, report: Report, folder: Path, prompt: list[int]) -> None:
        settings = StoreSettings(disk_limit="1TB", memory_limit=0)

        def reopen() -> None:
            with TieredStore(folder, settings) as store:
                store.lookup(KV_SPACE, prompt)

        report.fields["reopen_s_1m"] = repeat(reopen, 5).median
        shown = f"{report.fields['reopen_s_1m']:.3f} s"
        report.rows.append(TableRow("reopen and look up, 1,000,000 rows", shown, bar="<= 0.5 s"))
        with TieredStore(folder, settings) as store:
            with store.disk.database.reading() as connection:
                used = catalog.total_bytes(connection) + store.disk.database.size_bytes()
            before = len(store.disk.entries())
            elapsed = seconds_of(lambda: store.disk.room.prune(used - 60 * 1000))
            report.fields["evict_us_1m"] = elapsed / max(1, before - len(store.disk.entries())) * 1e6
        shown = f"{report.fields['evict_us_1m']:,.0f} us"
        report.rows.append(TableRow("evict 60 entries among 1,000,000 rows, each", shown))

    def storm(self, report: Report) -> None:
        """Two processes write, evict and read one folder, with every byte verified, while a third watches its size."""
        seconds = 15 if self._quick else 600
        with _folder(self.folder / "storm") as folder:
            seen = storm(folder / "cache", STORM_LIMIT_BYTES, seconds)
        share = seen.peak_bytes / seen.limit_bytes
        report.fields |= {
            "storm_seconds": seconds,
            "storm_samples": seen.samples,
            "storm_peak_share": share,
            "storm_keeps": sum(process["kept"] for process in seen.processes),
            "storm_verified_tokens": sum(process["tokens"] for process in seen.processes),
        }
        shown = f"{share:.3f} of the limit, {seen.samples:,} samples"
        report.rows.append(TableRow(f"storm of {seconds} s: most bytes seen", shown, bar="<= 1"))

    def wear(self, report: Report) -> None:
        """What agents and people make the disk write, simulated by the day."""
        with _folder(self.folder / "wear") as folder:
            measure_wear(folder, report)

    def _make_kv(self) -> Kv:
        def half(heads: int, dim: int) -> Any:
            return self._random.standard_normal((heads, TOKENS, dim), dtype=np.float32)

        shapes = KV_SPACE.layout.layers
        layers = tuple(LayerKv(half(s.kv_heads, s.key_dim), half(s.kv_heads, s.value_dim)) for s in shapes)
        return Kv(Span(0, TOKENS), KV_SPACE.layout, layers)

    def _tokens(self, number: int) -> list[int]:
        return [number, *range(TOKENS - 1)]

    def _speed(self, timing: Timing) -> float:
        return self._bytes / timing.median / 1e6

    def _layers(self, out: Any) -> list[LayerKv]:
        """The buffers of a sequence with room for some more tokens, all in one piece of memory."""
        numbers = out.view(np.float32)
        capacity = TOKENS + 24
        layers = []
        for index in range(2 * len(KV_SPACE.layout.layers)):
            size = 3 * capacity * 64
            layers.append(numbers[index * size : (index + 1) * size].reshape(3, capacity, 64)[:, :TOKENS])
        return [LayerKv(keys, values) for keys, values in zip(layers[::2], layers[1::2], strict=True)]

    def _load(self, store: TieredStore, tokens: list[int], layers: list[LayerKv]) -> None:
        with store.load(KV_SPACE, store.lookup(KV_SPACE, tokens)) as feed:
            for layer in feed.layers:
                feed.fill(layer, layers[layer])


def _index_memory(folder: Path) -> float:
    """What a process grows by when it opens the store and looks many prompts up."""
    script = (
        "import json, sys, psutil, random\n"
        "from benchmarks.store import KV_SPACE, StoreSettings, TieredStore\n"
        "own = psutil.Process()\n"
        "before = own.memory_info().rss\n"
        "store = TieredStore(sys.argv[1], StoreSettings(disk_limit='1TB', memory_limit=0))\n"
        "for seed in range(300):\n"
        "    store.lookup(KV_SPACE, [random.randrange(50000) for _ in range(2000)])\n"
        "print(own.memory_info().rss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(folder)], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)) / 1e6


def _diskcache() -> Any:
    try:
        import diskcache
    except ImportError as error:
        raise EngineMissing("This bench compares with diskcache: pip install 'rekindle-llm[bench]'") from error
    return diskcache


def _machine() -> Machine:
    return Machine(files=CountingFiles())


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _read(path: Path, out: Any) -> None:
    with path.open("rb", buffering=0) as file:
        file.readinto(out)


def _compare(report: Report, measure: str, times: dict[str, Timing], baseline: str, bar: str) -> None:
    """A row whose ratio is a speed: theirs over ours, in time."""
    ratio = 1 / paired_ratio(times["ours"], times[baseline])
    name = f"{times[baseline]} {baseline}"
    report.rows.append(TableRow(measure, str(times["ours"]), name, f"{ratio:.3f}", bar))
