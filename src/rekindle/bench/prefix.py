"""`rekindle bench prefix`: first tokens with the cache against none, against transformers' own, and the floor.

Every prompt is a known prefix with an ending that was never asked. In turns, in one process: cold, from the engine
(same process, as a second request finds it), from the memory tier, transformers' cache in memory, the floor. Then in a
fresh process with its own floor: from disk, and from disk with dropped pages.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.bench.base import Advance, BenchOptions, Report, Row, Timing, paired_ratio
from rekindle.bench.fresh import ASKED_TOKENS, Floor
from rekindle.bench.models import load
from rekindle.bench.prompts import Prompt, prompts
from rekindle.bench.rivals import CopiedCache
from rekindle.core.request import Reply, Request
from rekindle.engine.base import Logits
from rekindle.engine.hf import HfEngine
from rekindle.run.cache import PIECE_TOKENS
from rekindle.run.session import Session

SIZES = (180, 1000)
ENDING = 20
SHARES = (0.25, 0.5, 0.75, 0.9)
BARS = {
    "over_floor_memory": "<= 1.05",
    "over_floor_disk": "<= 1.15",
    "speedup_disk": ">= 15",
    "load_share": "<= 0.03",
    "partial_recovery": ">= 0.95",
}


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything; see `docs/concepts/cache.md` for what it means."""
    advance("load the model")
    engine = load(options)
    report = Report("prefix")
    report.fields |= {"model": engine.name, "device": engine.device, "dtype": engine.placement.dtype_name}
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder:
        with Session(engine, cache=folder, memory_limit="4GB", disk_limit="90%") as session:
            measure = _Measure(session, engine, options, Path(folder))
            for size in SIZES:
                advance(f"{size} + {ENDING} tokens")
                measure.size(size)
            advance("partial matches")
            measure.partial()
            advance("lookup")
            measure.lookup()
            session.flush()
        advance("a fresh process")
        measure.fresh()
        advance("bit-equal")
        measure.deterministic()
    engine.close()
    measure.tell(report)
    report.plot = _plotter(report)
    return report


@dataclass
class _Size:
    """What was measured at one size."""

    prompts: list[Prompt]
    times: dict[str, list[float]] = field(default_factory=dict)
    asked: list[list[list[int]]] = field(default_factory=list)  # endings whose greedy texts are compared, by prompt
    texts: dict[str, list[list[int]]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.times.setdefault(name, []).append(seconds)

    def timing(self, name: str) -> Timing:
        return Timing(tuple(self.times[name]))


class _Measure:
    """The parts of the bench, on one session."""

    def __init__(self, session: Session, engine: HfEngine, options: BenchOptions, folder: Path) -> None:
        self._session, self._engine = session, engine
        self._options, self._folder = options, folder
        self._count = 3 if options.quick else 5  # prompts
        self._rounds = options.rounds(3, quick=1)  # of each prompt
        self._sizes: dict[int, _Size] = {}
        self._recovery: dict[float, float] = {}
        self._lookup = Timing((0.0,))
        self._bytes_per_token = 0.0
        self._bit_equal: bool | None = None
        self._exactly = True
        self._turns = 0

    def size(self, size: int) -> None:
        """Everything that is measured in this process."""
        session = self._session
        found = _Size(prompts(self._engine, self._options, self._count, size, ENDING))
        self._sizes[size] = found
        session.generate(found.prompts[0].next(), max_tokens=1, reuse="off")  # the first of its kind is always slower
        for prompt in found.prompts:
            session.warm(prompt.prefix)
            floor = Floor(session, prompt.prefix, ENDING)
            theirs = CopiedCache(self._engine, floor)
            self._warm_up(prompt, floor, theirs)
            found.asked.append([])
            for _ in range(self._rounds):
                self._turn(found, prompt, floor, theirs)
                self._turns += 1
            floor.close()

    def _warm_up(self, prompt: Prompt, floor: Floor, theirs: CopiedCache) -> None:
        self._ask(prompt.next())
        floor.run(prompt.next()[-ENDING:])
        theirs.run(prompt.next()[-ENDING:])

    def _turn(self, found: _Size, prompt: Prompt, floor: Floor, theirs: CopiedCache) -> None:
        size = len(prompt.prefix)

        asked = prompt.next()

        def cold() -> float:
            reply = self._ask(asked, max_tokens=ASKED_TOKENS, reuse="off")
            found.texts.setdefault("cold", []).append(list(reply.tokens))
            return reply.timings.first_token_seconds

        def from_engine() -> float:
            reply = self._ask(prompt.next())
            self._exactly &= reply.reuse.engine == size
            return reply.timings.first_token_seconds

        def from_memory() -> float:
            self._session.cache.unpark()
            reply = self._ask(prompt.next())
            self._exactly &= reply.reuse.memory == size
            return reply.timings.first_token_seconds

        jobs: dict[str, Callable[[], float]] = {
            "cold": cold,
            "engine": from_engine,
            "floor": lambda: floor.run(prompt.next()[-ENDING:]),
            "memory": from_memory,
            "transformers": lambda: theirs.run(prompt.next()[-ENDING:]),
        }
        # Another one first each time: what comes after a long prefill finds a slower processor.
        names = list(jobs)
        shift = self._turns % len(names)
        for name in names[shift:] + names[:shift]:
            found.add(name, jobs[name]())
        found.asked[-1].append(asked[-ENDING:])
        found.texts.setdefault("warm", []).append(list(self._ask(asked, max_tokens=ASKED_TOKENS).tokens))

    def _ask(self, tokens: list[int], *, max_tokens: int = 1, **options: Any) -> Reply:
        """One request, when nothing else is going on."""
        reply = self._session.generate(tokens, max_tokens=max_tokens, **options)
        self._session.flush()
        return reply

    def partial(self) -> None:
        """Prompts that share only a part with what is kept: how much of the gain is left."""
        size, large = SIZES[-1], self._sizes[SIZES[-1]]
        gains: dict[float, list[float]] = {share: [] for share in SHARES}
        for prompt, other in zip(large.prompts, large.prompts[1:] + large.prompts[:1], strict=True):
            floor = Floor(self._session, prompt.prefix, ENDING)
            cold = self._ask(prompt.next(), reuse="off").timings.first_token_seconds
            for share in SHARES:
                matched = int((size + ENDING) * share)
                tail = other.next()  # another text behind the match
                asked = prompt.prefix[:matched] + tail[matched - size - ENDING :]
                self._session.cache.unpark()
                reply = self._ask(asked)
                self._exactly &= matched <= reply.reuse.memory <= matched + 1
                bare = floor.run(prompt.next()[-ENDING:])
                gains[share].append((cold - reply.timings.first_token_seconds) / (cold - bare) / share)
            floor.close()
        self._recovery = {share: statistics.median(found) for share, found in gains.items()}

    def lookup(self) -> None:
        """Finding a prompt of the large size among everything kept by now, and what a token takes on disk."""
        store = self._session.cache.store
        assert store is not None
        prompt = self._sizes[SIZES[-1]].prompts[0].next()
        shelf = self._session.cache.shelf(Request.of(prompt), len(prompt))
        times = []
        for _ in range(50):
            started = time.perf_counter()
            store.lookup(shelf, prompt)
            times.append(time.perf_counter() - started)
        self._lookup = Timing(tuple(times))
        rows = store.disk.entries()
        self._bytes_per_token = sum(row.size_bytes for row in rows) / sum(row.tokens for row in rows)

    def fresh(self) -> None:
        """From disk, in a process of its own."""
        task: dict[str, Any] = {"folder": str(self._folder), "sizes": {}}
        task["options"] = {**asdict(self._options), "data": None}
        for size, found in self._sizes.items():
            task["sizes"][size] = [
                {
                    "prefix": prompt.prefix,
                    "endings": [prompt.next()[-ENDING:] for _ in range(3 * self._rounds)],
                    "asked": asked,
                }
                for prompt, asked in zip(found.prompts, found.asked, strict=True)
            ]
        done = subprocess.run(
            [sys.executable, "-m", "rekindle.bench.fresh"],
            input=json.dumps(task),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for size, result in json.loads(done.stdout)["sizes"].items():
            found = self._sizes[int(size)]
            found.texts["restarted"] = result.pop("texts")
            self._exactly &= result.pop("exactly")
            for name, times in result.items():
                found.times["fresh_floor" if name == "floor" else name] = times

    def deterministic(self) -> None:
        """Logits of cold and warm prefills, cut into the same pieces, to the last bit."""
        seen: list[Logits] = []
        watched = _Watched(self._engine, seen)
        with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder:
            session = Session(watched, cache=folder, deterministic=True, disk_limit="90%")
            equal, hits = True, 0
            for prompt in self._sizes[SIZES[-1]].prompts[:3]:
                known = prompt.prefix[: 2 * PIECE_TOKENS + ENDING]
                session.warm(known)
                tokens = known + prompt.next()[-ENDING:]
                for reuse in ("off", "exact"):
                    reply = session.generate(tokens, max_tokens=1, reuse=reuse)
                hits += reply.reuse.reused > 0
                equal &= np.array_equal(seen[-1], seen[-2])
            self._bit_equal = equal and hits == min(3, len(self._sizes[SIZES[-1]].prompts))
            session.cache.close()

    def tell(self, report: Report) -> None:
        """Fields and rows."""
        report.fields |= {"prompts": self._count, "rounds": self._rounds, "exact_matches": self._exactly}
        sizes = {f"{size}+{ENDING}": self._fields_of(found) for size, found in self._sizes.items()}
        report.fields["sizes"] = sizes
        report.fields |= {name: value for name, value in sizes[f"{SIZES[-1]}+{ENDING}"].items() if name != "spread"}
        report.fields["partial"] = {f"{share:.2f}": value for share, value in self._recovery.items()}
        report.fields["partial_recovery"] = statistics.mean(self._recovery.values())
        if self._options.shape is None:
            report.fields["greedy_equal"] = self._greedy_equal()
        else:
            report.fields |= {"greedy_equal": None, "greedy_equal_reason": "random weights have no likeliest token"}
        report.fields["bit_equal_deterministic"] = self._bit_equal
        report.fields["lookup_us"] = self._lookup.median * 1e6
        report.fields["bytes_per_token"] = self._bytes_per_token
        for size, found in self._sizes.items():
            report.rows += self._rows_of(size, found, sizes[f"{size}+{ENDING}"])
        report.rows += [
            Row("partial matches keep", f"{report.fields['partial_recovery']:.3f}", "", "", BARS["partial_recovery"]),
            Row("same greedy text", str(report.fields["greedy_equal"]), "", "", "1.0"),
            Row("bit-equal with deterministic", str(self._bit_equal), "", "", "True"),
            Row("lookup", f"{self._lookup.median * 1e6:.0f} us", "", "", ""),
        ]

    def _greedy_equal(self) -> float:
        pairs = [
            cold == warm == restarted
            for found in self._sizes.values()
            for cold, warm, restarted in zip(
                found.texts["cold"], found.texts["warm"], found.texts["restarted"], strict=True
            )
        ]
        return sum(pairs) / len(pairs)

    def _fields_of(self, found: _Size) -> dict[str, Any]:
        timing = found.timing
        disk = timing("disk").median
        return {
            "cold_ttft_s": timing("cold").median,
            "warm_memory_ttft_s": timing("engine").median,
            "warm_memory_tier_ttft_s": timing("memory").median,
            "warm_disk_ttft_s": disk,
            **_cold_pages(found),
            "transformers_memory_ttft_s": timing("transformers").median,
            "floor_ttft_s": timing("floor").median,
            "floor_fresh_ttft_s": timing("fresh_floor").median,
            "speedup_memory": timing("cold").median / timing("engine").median,
            "speedup_disk": timing("cold").median / disk,
            "speedup_floor": timing("cold").median / timing("floor").median,
            "over_floor_memory": paired_ratio(timing("engine"), timing("floor")),
            "over_floor_memory_tier": paired_ratio(timing("memory"), timing("floor")),
            "over_floor_disk": paired_ratio(timing("disk"), timing("fresh_floor")),
            "load_s": timing("load").median,
            "load_share": timing("load").median / timing("cold").median,
            "spread": {name: timing(name).as_json() for name, times in found.times.items() if times},
        }

    def _rows_of(self, size: int, found: _Size, fields: dict[str, Any]) -> list[Row]:
        timing, name = found.timing, f"{size}+{ENDING}"
        floor, fresh = str(timing("floor")), str(timing("fresh_floor"))
        large = size == SIZES[-1]
        dropped = [ratio for ratio in (fields["over_floor_disk_cold_pages"],) if ratio is not None]

        def row(what: str, ours: str, baseline: str, ratio: float, bar: str = "") -> Row:
            return Row(f"{name}, {what}", str(timing(ours)), baseline, f"{ratio:.3f}", bar)

        cold = str(timing("cold"))
        return [
            row("same process / floor", "engine", floor, fields["over_floor_memory"], BARS["over_floor_memory"]),
            row("memory tier / floor", "memory", floor, fields["over_floor_memory_tier"]),
            row("new process, disk / floor", "disk", fresh, fields["over_floor_disk"], BARS["over_floor_disk"]),
            *(row("disk, pages dropped / floor", "cold_pages", fresh, ratio) for ratio in dropped),
            row("cold / disk", "disk", cold, fields["speedup_disk"], BARS["speedup_disk"] if large else ""),
            row("cold / floor", "floor", cold, fields["speedup_floor"]),
            row(
                "transformers in memory / floor",
                "transformers",
                floor,
                paired_ratio(timing("transformers"), timing("floor")),
            ),
            row("load alone / cold", "load", cold, fields["load_share"], BARS["load_share"] if large else ""),
        ]


def _cold_pages(found: _Size) -> dict[str, Any]:
    """First tokens from dropped pages; null where the system cannot be asked to drop them."""
    names = ("warm_disk_cold_pages_ttft_s", "over_floor_disk_cold_pages")
    if not found.times["cold_pages"]:
        return {**dict.fromkeys(names), "cold_pages_reason": "this system cannot be asked to drop pages"}
    timing = found.timing("cold_pages")
    return dict(zip(names, (timing.median, paired_ratio(timing, found.timing("fresh_floor"))), strict=True))


class _Watched:
    """An engine whose logits are noted."""

    def __init__(self, engine: HfEngine, seen: list[Logits]) -> None:
        self._engine, self._seen = engine, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, rows: Any, cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """As the engine, and noted."""
        logits = self._engine.step(rows, cancelled)
        self._seen.extend(found for found in logits if len(found))
        return logits


def _plotter(report: Report) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        bars = {
            "cold": "cold_ttft_s",
            "new process, pages dropped": "warm_disk_cold_pages_ttft_s",
            "new process, disk": "warm_disk_ttft_s",
            "memory tier": "warm_memory_tier_ttft_s",
            "same process": "warm_memory_ttft_s",
            "floor": "floor_ttft_s",
            "transformers in memory": "transformers_memory_ttft_s",
        }
        for axes, (size, fields) in zip(figure.subplots(1, len(SIZES)), report.fields["sizes"].items(), strict=True):
            known = {label: fields[name] for label, name in bars.items() if fields[name] is not None}
            seconds = list(known.values())
            axes.barh(list(known), seconds)
            axes.bar_label(axes.containers[0], labels=[f" {s * 1e3:,.0f} ms" for s in seconds])
            axes.set_xlim(0, max(seconds) * 1.25)
            axes.invert_yaxis()
            axes.set_xlabel("seconds to the first token")
            axes.set_title(f"{size} tokens")

    return draw
