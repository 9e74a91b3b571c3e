"""Prompts of an attached model that have text of earlier prompts: prefilled here, by an engine on the same weights."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedModel

from rekindle.cache.cost import remember_costs
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.stored_kv import StoredKv
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.core.kv import Kv, Span
from rekindle.core.reply import Reuse
from rekindle.core.request import Request
from rekindle.engine.hf.device import Placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.sequence import TORCH_TYPE, raw_view
from rekindle.engine.lora_manager import LoraManager
from rekindle.errors import RekindleError
from rekindle.integrations.model_facts import ModelFacts
from rekindle.integrations.tracked_cache import LayerTensors
from rekindle.settings import Settings
from rekindle.store.tiered import TieredStore
from rekindle.text.base import Tokenizer

log = logging.getLogger("rekindle.attach")


@dataclass(frozen=True, eq=False)
class MatchedText:
    """The KV of a prompt, of which some was computed in other prompts, and what was reused."""

    layers: tuple[LayerTensors, ...]
    reuse: Reuse


class TextMatcher:
    """Reuses text of earlier prompts for one model, as long as its weights stay. Thread-safe."""

    def __init__(self, model: PreTrainedModel, facts: ModelFacts, settings: Settings, store: TieredStore) -> None:
        self.facts = facts
        placement = Placement(model.device, model.dtype, "attached")
        tokenizer = cast(Tokenizer, None)  # prompts come as tokens
        self._engine = HfEngine(
            model, tokenizer, name=facts.family, placement=placement, fingerprint=lambda: facts.fingerprint
        )
        kv = StoredKv(self._engine, settings, store)
        self._cache = PrefixCache(kv, settings, LoraManager(self._engine), ChunkPrefill(kv, settings))
        self._lock = threading.Lock()

    def match(self, tokens: tuple[int, ...]) -> MatchedText | None:
        """Prefill a prompt with text that is found in it; None if there is none, or computing is faster."""
        try:
            with self._lock, self._cache.prepare(Request.of(list(tokens), max_tokens=1), tokens, _never) as prefill:
                if prefill.plan.reuse_chunks is None:
                    return None
                prefill.run(len(tokens), _never)
                kv = prefill.context.sequence.export(Span(0, len(tokens)))
                return MatchedText(_tensors(kv, self._engine.placement.device), prefill.reuse)
        except (RekindleError, torch.OutOfMemoryError) as error:
            log.info("computing instead: %s", error)
            return None

    def flush(self, timeout_seconds: float) -> bool:
        """Write everything; False if that takes longer."""
        return self._cache.flush(timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Write what is queued, and free the engine's memory; the store stays open, and the model as it is."""
        remember_costs(self._engine, self._cache.costs)
        if self._cache.writer is not None:
            self._cache.writer.close(timeout_seconds)
        self._cache.unpark()
        self._engine.close()


def _tensors(kv: Kv, device: torch.device) -> tuple[LayerTensors, ...]:
    """KV as a cache of transformers has it."""
    layers = []
    for layer in kv.layers:
        pair = []
        for array in (layer.keys, layer.values):
            tensor = torch.empty(1, *array.shape, dtype=TORCH_TYPE[kv.layout.dtype])
            raw_view(tensor[0])[...] = array
            pair.append(tensor.to(device))
        layers.append((pair[0], pair[1]))
    return tuple(layers)


def _never() -> bool:
    return False
