"""The part of `bench prefix` that needs a fresh process: KV comes from disk, the model is loaded, nothing is warm.

Reads a task as JSON from standard input, writes what it measured as JSON to standard output. The floor is measured in
turns with it: ratios stay within one process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import BenchOptions, drop_pages
from benchmarks.models import load
from benchmarks.prefix.floor import Floor, Run, floor_engine
from rekindle.cache.cost import AlwaysReuse
from rekindle.core.kv import LayerKv
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.session.session import Session

ASKED_TOKENS = 16  # of a reply whose text is compared


class Loading:
    """KV from the store into buffers, with no computing beside it."""

    def __init__(self, session: Session, count: int) -> None:
        assert session.cache.store is not None
        self._cache, self._store, self._count = session.cache, session.cache.store, count
        layout = session.engine.layout
        self._buffers = [
            LayerKv(
                np.ones((shape.kv_heads, count, shape.key_dim), layout.numpy_dtype),  # zeros have no pages yet
                np.ones((shape.kv_heads, count, shape.value_dim), layout.numpy_dtype),
            )
            for shape in layout.layers
        ]

    def run(self, prompt: list[int]) -> float:
        """Seconds from the tokens of a prompt to the KV of its prefix."""
        kv_space = self._cache.kv_spaces.of(Request.of(prompt), len(prompt))
        started = time.perf_counter()
        with self._store.load(kv_space, self._store.lookup(kv_space, prompt).until(self._count)) as feed:
            for layer in feed.layers:
                feed.fill(layer, self._buffers[layer])
        return time.perf_counter() - started


_Round = tuple[dict[str, Any], dict[str, Callable[[list[int]], float]]]  # a prompt, and how the rivals answer it


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """First tokens from disk with warm pages and with dropped ones, the floor, and the rivals, in turns."""
    options = BenchOptions(**{**task["options"], "data": None})
    engine = load(options)
    folder = Path(task["folder"])
    found: dict[str, Any] = {"sizes": {}}
    with Session(engine, cache=str(folder), memory_limit=0, disk_limit="90%") as session:
        session.cache.kv.costs = AlwaysReuse()
        numbers, floors = count(), floor_engine(engine, options)
        rivals = _restarted(engine, task["rivals"])
        for size, rounds in task["sizes"].items():
            prompts = [(prompt, rivals(next(numbers))) for prompt in rounds]
            found["sizes"][size] = _measure_size(session, floors, folder, prompts)
    return found


def _restarted(engine: Engine, task: dict[str, Any]) -> Callable[[int], dict[str, Run]]:
    """How the rivals that survive a restart answer prompts of a prefix, by its number."""
    if not task:
        return lambda _: {}
    from benchmarks.prefix.llama_rivals import Restarted

    return Restarted(engine, task).prepare


def _measure_size(session: Session, floors: Engine, folder: Path, rounds: list[_Round]) -> dict[str, Any]:
    times: dict[str, list[float]] = {"disk": [], "cold_pages": [], "floor": [], "load": []}
    texts: list[list[int]] = []
    reused: list[int] = []
    for prompt, rivals in rounds:
        prefix, endings = prompt["prefix"], iter(prompt["endings"])
        floor, loading = Floor(session, floors, prefix, len(prompt["endings"][0])), Loading(session, len(prefix))

        def ask(name: str, ending: list[int], prefix: list[int] = prefix) -> None:
            reply = session.generate(prefix + ending, max_tokens=1)
            times[name].append(reply.timings.first_token_seconds)
            reused.append(reply.reuse.disk - len(prefix))
            session.flush()

        for turn in range(len(prompt["asked"])):
            if turn % 2:  # in turns the one or the other first
                times["floor"].append(floor.run(next(endings)))
            ask("disk", next(endings))
            if not turn % 2:
                times["floor"].append(floor.run(next(endings)))
            for name, run in rivals.items():
                times.setdefault(name, []).append(run(prefix + next(endings)))
            if drop_pages(*(folder / "extents").glob("*.kv")):
                ask("cold_pages", next(endings))
            times["load"].append(loading.run(prefix + prompt["asked"][turn]))
        floor.close()
        texts += [list(session.generate(prefix + ending, max_tokens=ASKED_TOKENS).tokens) for ending in prompt["asked"]]
    return {**times, "texts": texts, "exactly": all(extra == 0 for extra in reused)}


def main() -> None:
    """One task."""
    json.dump(measure(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    main()
