"""An engine that can free its model and load it again when needed.

Stored KV fits the reloaded model, because its identity is the same. Its adapters have to be loaded again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache

from rekindle.core.identity import Identity
from rekindle.engine.base import Engine, EngineWrapper
from rekindle.engine.threaded_job import ThreadedJob
from rekindle.errors import Cancelled, Closed
from rekindle.text.base import Tokenizer

_REMEMBERED = 1024  # regimes, so that closing a model that rests does not load it


class ReloadableEngine(EngineWrapper):
    """See `Engine` for the contract. `load` must return the same model each time."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        super().__init__(load())
        self._load = load
        self._lock = threading.Lock()
        self._closed = False
        self._identities: dict[str, Identity] = {}
        self._tokenizer: Tokenizer | None = None
        self._regime_of = lru_cache(_REMEMBERED)(super().regime)

    @property
    def resting(self) -> bool:
        """Whether the model is out of memory now."""
        return self._engine is None

    @property
    def inner(self) -> Engine:
        """The engine underneath, loaded if it must be. Raises as loading does."""
        with self._lock:
            if self._closed:
                raise Closed("The engine was closed. Load the model again.")
            if self._engine is None:
                self._engine = self._load()
            return self._engine

    def wake(self, cancelled: Callable[[], bool] | None) -> None:
        """Load the model if it rests. Raises `Cancelled`; then the load goes on for the next who needs it."""

        def load() -> None:
            self.inner  # noqa: B018  (loads it)

        if self.resting and not ThreadedJob(load).done(cancelled):
            raise Cancelled("The request was cancelled.")

    def rest(self) -> None:
        """Free the model until somebody needs it. Not while a sequence is open."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """Stays while the model rests, unless it is a part of the model."""
        if self._tokenizer is not None and not self._closed:
            return self._tokenizer
        found = super().tokenizer
        if not found.needs_model:
            self._tokenizer = found
        return found

    def regime(self, tokens: int) -> str:
        return self._regime_of(tokens)

    def identity(self, regime: str) -> Identity:
        if regime not in self._identities:
            self._identities[regime] = super().identity(regime)
        return self._identities[regime]

    def close(self) -> None:
        """Free the model for good. Idempotent."""
        self._closed = True
        self.rest()
