"""An engine that can let go of its model and load it again when it is needed.

Nothing changes for whoever uses it: KV that was kept outside fits the reloaded model, because its identity is the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from rekindle.core.adapter import Lora
from rekindle.core.identity import Identity
from rekindle.core.request import Sampling
from rekindle.engine.base import Engine, EngineSequence, Logits, Row, Tokenizer, TokenSampler
from rekindle.errors import Closed, ModelError

log = logging.getLogger("rekindle")


class RestingEngine:
    """See `Engine` for the contract. `load` gives the same model each time."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._engine: Engine | None = load()
        self._closed = False
        awake = self._engine
        self.name, self.device, self.arithmetic = awake.name, awake.device, awake.arithmetic
        self.capabilities, self.layout = awake.capabilities, awake.layout
        self.context_tokens, self.prefill_tokens = awake.context_tokens, awake.prefill_tokens
        self.parameters, self.attention = awake.parameters, awake.attention
        self._identities: dict[str, Identity] = {}
        self._adapters: dict[str, Lora] = {}

    @property
    def resting(self) -> bool:
        """Whether the model is out of memory now."""
        return self._engine is None

    @property
    def awake(self) -> Engine:
        """The engine underneath, loaded if it must be. Raises as loading does."""
        with self._lock:
            if self._closed:
                raise Closed("The engine was closed. Load the model again.")
            if self._engine is None:
                engine = self._load()
                for lora in self._adapters.values():
                    try:
                        engine.load_adapter(lora)
                    except ModelError as error:  # its requests are refused then; others are answered
                        log.warning("An adapter could not be loaded again: %s", error)
                self._engine = engine
            return self._engine

    def rest(self) -> None:
        """Free the model until somebody needs it. Not while a sequence is open."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.awake.tokenizer

    def regime(self, tokens: int) -> str:
        """The rotary regime of a context of so many tokens."""
        return self.awake.regime(tokens)

    def identity(self, regime: str) -> Identity:
        """What makes its KV interchangeable with another's."""
        if regime not in self._identities:
            self._identities[regime] = self.awake.identity(regime)
        return self._identities[regime]

    def load_adapter(self, lora: Lora) -> int:
        """Put an adapter on; it is put on again with every load."""
        same = self.awake.load_adapter(lora)
        with self._lock:
            self._adapters[lora.digest] = lora
        return same

    def unload_adapter(self, digest: str) -> None:
        """Take it off."""
        with self._lock:
            self._adapters.pop(digest, None)
            if self._engine is not None:
                self._engine.unload_adapter(digest)

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> EngineSequence:
        """An empty sequence with room for `capacity` tokens."""
        return self.awake.open(capacity, regime, adapter)

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> TokenSampler:
        """What draws the tokens of a reply."""
        return self.awake.sampler(sampling, context)

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows in one pass."""
        return self.awake.step(rows, cancelled)

    def close(self) -> None:
        """Free the model for good. Idempotent."""
        self._closed = True
        self.rest()
