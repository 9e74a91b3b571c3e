"""What every way to a first token is compared with: KV already in the engine."""

from __future__ import annotations

import time
from collections.abc import Callable

from benchmarks.base import BenchOptions
from benchmarks.models import load
from rekindle.core.request import Request
from rekindle.engine.base import Engine, Row
from rekindle.session.session import Session

Run = Callable[[list[int]], float]  # the ending of a prompt -> seconds to its first token


class Floor:
    """KV already in the engine, and nothing else to do than to compute the ending and take its likeliest token."""

    def __init__(self, session: Session, engine: Engine, prefix: list[int], ending: int) -> None:
        """The prefix must have been kept: its KV is brought from the store, which is quicker than computing it."""
        self._engine, store = engine, session.cache.store
        assert store is not None
        self.count = len(prefix)
        kv_space = session.cache.kv_spaces.of(Request.of(prefix), self.count + ending)
        self.sequence = self._engine.open(self.count + ending, self._engine.regime(self.count + ending))
        last = self.count - 1
        with store.load(kv_space, store.lookup(kv_space, prefix).until(last)) as feed:
            self._engine.step([Row(self.sequence, prefix[last:], range(last, self.count), "none", (feed,))])

    def run(self, ending: list[int]) -> float:
        """Seconds to the first token."""
        self.sequence.truncate(self.count)
        started = time.perf_counter()
        (logits,) = self._engine.step([Row.following(self.sequence, ending)])
        int(logits[-1].argmax())
        return time.perf_counter() - started

    def close(self) -> None:
        """Give the sequence back."""
        self.sequence.close()


def floor_engine(engine: Engine, options: BenchOptions) -> Engine:
    """Where floors are measured: another engine of the same model where sequences would be in each other's way."""
    return load(options) if engine.capabilities.crowded else engine
