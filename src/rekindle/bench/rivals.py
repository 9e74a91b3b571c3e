"""What others do, as a bench runs it beside ours."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from transformers import DynamicCache

from rekindle.bench.fresh import Floor
from rekindle.engine.hf import HfEngine
from rekindle.engine.sequence import TorchSequence


class CopiedCache:
    """transformers' own way to reuse a prefix: a cache in memory, copied for each request."""

    def __init__(self, engine: HfEngine, floor: Floor) -> None:
        self._model = engine.model
        self._cache = DynamicCache()
        sequence = floor.sequence
        assert isinstance(sequence, TorchSequence)
        for layer in range(len(engine.layout.layers)):
            keys, values = sequence.keys(layer), sequence.values(layer)
            self._cache.update(keys[:, :, : floor.count].clone(), values[:, :, : floor.count].clone(), layer)

    def run(self, ending: list[int]) -> float:
        """Seconds to the first token."""
        started = time.perf_counter()
        logits = self._forward(ending, copy.deepcopy(self._cache))
        int(logits.argmax())
        return time.perf_counter() - started

    def _forward(self, tokens: list[int], cache: DynamicCache) -> Any:
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self._model.device)
            return self._model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].float().cpu().numpy()
