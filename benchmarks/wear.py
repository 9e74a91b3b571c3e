"""What a cache writes in a day, and what the write budget makes of it: simulated with the store's own admission.

The KV is of an 8B model, 128 KiB a token. Nothing of it is written: only its bytes are counted, on a clock of its own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.base import Report, TableRow
from benchmarks.serve.workload import read_trace
from benchmarks.storm import prompt
from benchmarks.synthetic import KV_SPACE
from rekindle.core.keys import BLOCK_TOKENS, NodeKey, chain, token_bytes
from rekindle.settings import Settings
from rekindle.store.disk import DiskStore, Machine
from rekindle.store.limits import Refused
from rekindle.store.settings import StoreSettings

TOKEN_BYTES = 128 << 10
DAY_SECONDS, DAYS = 86_400, 3
START = 1_900_000_000.0
WARMED = 800  # passages
_TRACE_BLOCK = 512  # tokens of a block of the recorded trace


@dataclass(frozen=True)
class TimedPrompt:
    """A prompt, and when it is asked."""

    at: float
    tokens: Sequence[int]


@dataclass
class DiskWear:
    """What was written on each day, what was refused, and the share of tokens that were stored when they were asked."""

    written: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    tokens: int = 0
    hits: int = 0

    @property
    def hit_share(self) -> float:
        return self.hits / self.tokens

    @property
    def written_gb(self) -> float:
        return self.written.total() / 1e9


def simulate(folder: Path, asked: Iterable[TimedPrompt], settings: StoreSettings) -> DiskWear:
    """Keep every prompt in a store whose files are only counted."""
    now, wear, stored = START, DiskWear(), set[NodeKey]()
    disk = DiskStore(folder, settings, Machine(clock=lambda: now))
    for one in asked:
        now = START + one.at
        keys = chain(KV_SPACE.namespace.root, token_bytes(one.tokens))
        known = next((place for place, key in enumerate(keys) if key not in stored), len(keys))
        wear.tokens += len(one.tokens)
        wear.hits += min(known * BLOCK_TOKENS, len(one.tokens))
        new = keys[known:]
        size_bytes = (len(one.tokens) - known * BLOCK_TOKENS) * TOKEN_BYTES
        if not new:
            continue
        try:
            count = disk.admit(KV_SPACE, new, size_bytes)
        except Refused:
            wear.refused += 1
            continue
        stored.update(new[:count])
        part = min(size_bytes, count * BLOCK_TOKENS * TOKEN_BYTES)
        wear.written[int(one.at // DAY_SECONDS)] += part
        with disk.database.writing() as connection:
            disk.room.add_written(connection, part)
    disk.close()
    return wear


def agent(uses: int) -> Iterator[TimedPrompt]:
    """30,000 fresh tokens every five minutes, day and night, each prompt `uses` times."""
    rng, tokens = np.random.default_rng(0), list[int]()
    for number in range(DAYS * DAY_SECONDS // 300):
        tokens = rng.integers(0, 50_000, 30_000).tolist() if number % uses == 0 else tokens
        yield TimedPrompt(number * 300.0, tokens)


def ordinary() -> Iterator[TimedPrompt]:
    """Days of 20 chats of 3,000 tokens and 30 questions of 1,500; on the first, 800 passages of 200 are warmed."""
    rng = np.random.default_rng(0)
    for day in range(DAYS):
        begin = day * DAY_SECONDS + 8 * 3600.0
        if day == 0:
            yield from (TimedPrompt(begin, rng.integers(0, 50_000, 200).tolist()) for _ in range(WARMED))
        for number in range(20):
            chat = rng.integers(0, 50_000, 3000).tolist()
            yield from (TimedPrompt(begin + number * 1800 + turn * 60, chat[: turn * 500]) for turn in range(1, 7))
        yield from (TimedPrompt(begin + 10 * 3600 + n * 60, rng.integers(0, 50_000, 1500).tolist()) for n in range(30))


def recorded() -> Iterator[TimedPrompt]:
    """The trace of a real service."""
    for number, blocks in enumerate(read_trace(None)):
        yield TimedPrompt(number * 10.0, np.repeat(blocks, _TRACE_BLOCK).tolist())


def synthetic() -> Iterator[TimedPrompt]:
    """2,000 draws of 400 synthetic prompts with common beginnings."""
    rng = random.Random(0)
    yield from (TimedPrompt(number * 10.0, prompt(rng.randrange(400))) for number in range(2000))


def measure_wear(folder: Path, report: Report) -> None:
    """Agents and an ordinary user under the default budget; both admissions without one."""
    limited = StoreSettings(disk_limit="50GB", write_budget=Settings().write_budget)
    for name, what, asked in (
        ("agent", "agent, 30,000 fresh tokens of 8B every 5 min", agent(1)),
        ("agent_twice", "the same, each prompt asked twice", agent(2)),
        ("ordinary", "chats, questions, 800 passages warmed", ordinary()),
    ):
        wear = simulate(folder / name, asked, limited)
        days = [wear.written[day] / 1e9 for day in range(DAYS)]
        report.fields |= {f"wear_{name}_gb_a_day": days, f"wear_{name}_refused": wear.refused}
        shown = f"{' + '.join(f'{gb:.0f}' for gb in days)} GB, {wear.refused:,} refused"
        report.rows.append(TableRow(f"written on {DAYS} days: {what}", shown, bar="<= 40 GB a day"))
    for name, draw in (("trace", recorded), ("synthetic", synthetic)):
        always = simulate(folder / f"{name}-always", draw(), StoreSettings())
        second = simulate(folder / f"{name}-second", draw(), StoreSettings(admission="second-use"))
        report.fields |= {
            f"wear_{name}_hit_share": {"always": always.hit_share, "second-use": second.hit_share},
            f"wear_{name}_gb": {"always": always.written_gb, "second-use": second.written_gb},
        }
        ours, theirs = (f"{one.hit_share:.0%} found, {one.written_gb:.1f} GB" for one in (second, always))
        ratio = f"{second.written_gb / always.written_gb:.3f}"
        report.rows.append(TableRow(f"admission on second use, {name} prompts", ours, f"{theirs} always", ratio))
