"""`python -m benchmarks prefix`: first tokens with the cache against none, against what others have, and the floor.

Every prompt is a known prefix with an ending that was never asked. In turns, in one process: cold, from the engine
(same process, as a second request finds it), from the memory tier, the rivals in memory, the floor. Then in a fresh
process with its own floor: from disk, from disk with dropped pages, and the rivals that survive a restart.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, about, repeat, rotated, scratch
from benchmarks.models import load
from benchmarks.prefix.floor import Floor, Run, floor_engine
from benchmarks.prefix.fresh import ASKED_TOKENS
from benchmarks.prefix.report import DEVICE_SIZES, ENDING, SHARES, SIZES, PrefixResults, SizeResults, add_rows
from benchmarks.prefix.rivals import Rivals
from benchmarks.prompts import SharedPrefix, prompts
from rekindle.cache.cost import AlwaysReuse
from rekindle.cache.stored_kv import PIECE_TOKENS
from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.base import Engine, EngineWrapper, Logits, Row
from rekindle.engine.load import kind_of
from rekindle.session.session import Session


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything; see `docs/concepts/cache.md` for what it means."""
    advance("load the model")
    engine = load(options)
    report = Report("prefix")
    report.fields |= about(engine, options)
    with scratch() as folder, scratch() as theirs:
        sizes = SIZES if engine.device == "cpu" or options.quick else DEVICE_SIZES
        limit = "4GB" if sizes is SIZES else "16GB"
        with Session(engine, cache=folder, memory_limit=limit, disk_limit="90%") as session:
            session.cache.kv.costs = AlwaysReuse()  # also where computing is faster: `slower` measures what is chosen
            measure = _PrefixMeasure(session, options, Path(folder), Path(theirs))
            measure.found.token_bytes = engine.layout.token_bytes
            for size in (size for size in sizes if size + 2 * ENDING < engine.context_tokens):
                advance(f"{size} + {ENDING} tokens")
                measure.size(size)
            advance("partial matches")
            measure.partial()
            advance("lookup")
            measure.lookup()
            session.flush()
            measure.close()
        if engine.device != "cpu":
            measure.found.peak_device_bytes = _peak_device_bytes()
        advance("a fresh process")
        measure.fresh()
        advance("bit-equal")
        measure.deterministic()
    engine.close()
    add_rows(report, measure.found)
    return report


class _PrefixMeasure:
    """The parts of the bench, on one session."""

    def __init__(self, session: Session, options: BenchOptions, folder: Path, theirs: Path) -> None:
        self._session, self._engine = session, session.engine
        self._options, self._folder = options, folder
        self._rounds = options.rounds(3, quick=1)  # of each prompt
        self._floors = floor_engine(self._engine, options)
        self._rivals = _rivals_of(self._engine, theirs)
        prompts = 2 if self._engine.device != "cpu" else 3 if options.quick else 5
        self.found = PrefixResults(prompts, self._rounds, random_weights=options.shape is not None)
        self.found.titles = dict(self._rivals.titles)
        self._turns = 0
        self._prefixes = 0

    def close(self) -> None:
        """Free the rivals: a fresh process shall have the machine for itself."""
        self.found.sizes_on_disk = self._rivals.sizes()
        self._restart = self._rivals.restart()
        self._rivals.close()
        if self._floors is not self._engine:
            self._floors.close()

    def size(self, size: int) -> None:
        """Everything that is measured in this process."""
        session = self._session
        found = SizeResults(prompts(self._engine, self._options, self.found.prompts, size, ENDING))
        self.found.sizes[size] = found
        session.generate(found.prompts[0].next(), max_tokens=1, reuse="off")  # the first of its kind is always slower
        for prompt in found.prompts:
            session.warm(prompt.prefix)
            floor = Floor(session, self._floors, prompt.prefix, ENDING)
            theirs = self._rivals.prepare(self._prefixes, prompt.prefix, floor)
            self._prefixes += 1
            self._warm_up(prompt, floor, theirs)
            found.asked.append([])
            for _ in range(self._rounds):
                self._turn(found, prompt, floor, theirs)
                self._turns += 1
            floor.close()

    def _warm_up(self, prompt: SharedPrefix, floor: Floor, theirs: dict[str, Run]) -> None:
        self._ask(prompt.next())
        for run in (floor.run, *theirs.values()):
            run(prompt.next()[-ENDING:])

    def _turn(self, found: SizeResults, prompt: SharedPrefix, floor: Floor, theirs: dict[str, Run]) -> None:
        size = len(prompt.prefix)

        asked = prompt.next()

        def cold() -> float:
            reply = self._ask(asked, max_tokens=ASKED_TOKENS, reuse="off")
            found.texts.setdefault("cold", []).append(list(reply.tokens))
            return reply.timings.first_token_seconds

        def from_engine() -> float:
            self._ask(prompt.next())  # as a request before leaves it
            reply = self._ask(prompt.next())
            self.found.exactly &= reply.reuse.engine == size
            return reply.timings.first_token_seconds

        def from_memory() -> float:
            self._session.cache.unpark()
            reply = self._ask(prompt.next())
            self.found.exactly &= reply.reuse.memory == size
            return reply.timings.first_token_seconds

        jobs: dict[str, Callable[[], float]] = {
            "cold": cold,
            "engine": from_engine,
            "floor": lambda: floor.run(prompt.next()[-ENDING:]),
            "memory": from_memory,
        }
        jobs |= {name: functools.partial(_ending, run, prompt) for name, run in theirs.items()}
        jobs |= {name: functools.partial(run, asked) for name, run in self._rivals.cold().items()}
        for name in rotated(list(jobs), self._turns):
            found.add(name, jobs[name]())
        found.asked[-1].append(asked[-ENDING:])
        found.texts.setdefault("warm", []).append(list(self._ask(asked, max_tokens=ASKED_TOKENS).tokens))
        if (said := self._rivals.reply(asked, ASKED_TOKENS)) is not None:
            found.texts.setdefault("rival", []).append(said)

    def _ask(self, tokens: list[int], *, max_tokens: int = 1, **options: Any) -> Reply:
        """One request, when nothing else is going on."""
        reply = self._session.generate(tokens, max_tokens=max_tokens, **options)
        self._session.flush()
        return reply

    def partial(self) -> None:
        """Prompts that share only a part with what is kept: how much of the gain is left."""
        size, large = max(self.found.sizes), self.found.largest
        gains: dict[float, list[float]] = {share: [] for share in SHARES}
        for prompt, other in zip(large.prompts, large.prompts[1:] + large.prompts[:1], strict=True):
            floor = Floor(self._session, self._floors, prompt.prefix, ENDING)
            cold = self._ask(prompt.next(), reuse="off").timings.first_token_seconds
            for share in SHARES:
                matched = int((size + ENDING) * share)
                tail = other.next()  # another text behind the match
                asked = prompt.prefix[:matched] + tail[matched - size - ENDING :]
                self._session.cache.unpark()
                reply = self._ask(asked)
                self.found.exactly &= matched <= reply.reuse.memory <= matched + 1
                bare = floor.run(prompt.next()[-ENDING:])
                gains[share].append((cold - reply.timings.first_token_seconds) / (cold - bare) / share)
            floor.close()
        self.found.recovery = {share: statistics.median(found) for share, found in gains.items()}

    def lookup(self) -> None:
        """Finding a prompt of the large size among everything stored, and what a token takes on disk."""
        store = self._session.cache.store
        assert store is not None
        prompt = self.found.largest.prompts[0].next()
        kv_space = self._session.cache.kv_spaces.of(Request.of(prompt), len(prompt))
        self.found.lookup = repeat(functools.partial(store.lookup, kv_space, prompt), 50)
        matches = [store.lookup(kv_space, prompt.prefix) for prompt in self.found.largest.prompts]
        names = {piece.name for match in matches for piece in match.pieces}
        rows = [row for row in store.disk.entries() if row.name in names]
        self.found.bytes_per_token = sum(row.size_bytes for row in rows) / sum(row.tokens for row in rows)

    def fresh(self) -> None:
        """From disk, in a process of its own."""
        task: dict[str, Any] = {"folder": str(self._folder), "sizes": {}, "rivals": self._restart}
        task["options"] = {**asdict(self._options), "data": None}
        for size, found in self.found.sizes.items():
            task["sizes"][size] = [
                {
                    "prefix": prompt.prefix,
                    "endings": [prompt.next()[-ENDING:] for _ in range((3 + len(self._rivals.titles)) * self._rounds)],
                    "asked": asked,
                }
                for prompt, asked in zip(found.prompts, found.asked, strict=True)
            ]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.prefix.fresh"],
            input=json.dumps(task),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for size, result in json.loads(done.stdout)["sizes"].items():
            found = self.found.sizes[int(size)]
            found.texts["restarted"] = result.pop("texts")
            self.found.exactly &= result.pop("exactly")
            for name, times in result.items():
                found.times["fresh_floor" if name == "floor" else name] = times

    def deterministic(self) -> None:
        """Logits of cold and warm prefills, cut into the same pieces, to the last bit."""
        seen: list[Logits] = []
        watched = _Watched(self._engine, seen)
        with scratch() as folder:
            session = Session(watched, cache=folder, deterministic=True, disk_limit="90%")
            equal, hits = True, 0
            for prompt in self.found.largest.prompts[:3]:
                known = prompt.prefix[: 2 * PIECE_TOKENS + ENDING]
                session.warm(known)
                tokens = known + prompt.next()[-ENDING:]
                for reuse in ("off", "exact"):
                    reply = session.generate(tokens, max_tokens=1, reuse=reuse)
                hits += reply.reuse.reused > 0
                equal &= np.array_equal(seen[-1], seen[-2])
            self.found.bit_equal = equal and hits == min(3, len(self.found.largest.prompts))
            session.cache.close()


def _rivals_of(engine: Engine, folder: Path) -> Rivals:
    """Those that drive the same kind of model. They may write into `folder`."""
    if kind_of(engine) == "llamacpp":
        from benchmarks.prefix.llama_rivals import LlamaRivals

        return LlamaRivals(engine, folder)
    from benchmarks.prefix.hf_rivals import HfRivals

    return HfRivals(engine)


def _peak_device_bytes() -> int | None:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def _ending(run: Run, prompt: SharedPrefix) -> float:
    return run(prompt.next()[-ENDING:])


class _Watched(EngineWrapper):
    """An engine whose logits are noted."""

    def __init__(self, engine: Engine, seen: list[Logits]) -> None:
        super().__init__(engine)
        self._seen = seen

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """As the engine, and noted."""
        logits = super().step(rows, cancelled)
        self._seen.extend(found for found in logits if len(found))
        return logits
