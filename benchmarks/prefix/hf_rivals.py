"""transformers' own way to reuse a prefix."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from transformers import DynamicCache

from benchmarks.base import seconds_of
from benchmarks.prefix.floor import Floor, Run
from benchmarks.prefix.rivals import Rivals
from rekindle.engine.base import Engine
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.sequence import TorchSequence


class HfRivals(Rivals):
    """A cache in memory, copied for each request."""

    titles: ClassVar = {"transformers_memory": "transformers in memory"}

    def __init__(self, engine: Engine) -> None:
        assert isinstance(engine, HfEngine)
        self._engine = engine

    def prepare(self, number: int, prefix: list[int], floor: Floor) -> dict[str, Run]:  # noqa: ARG002
        """Its cache is made from the KV of the floor's sequence."""
        sequence = floor.sequence
        assert isinstance(sequence, TorchSequence)
        cache = DynamicCache()
        for layer in range(len(self._engine.layout.layers)):
            keys, values = sequence.keys(layer), sequence.values(layer)
            cache.update(keys[:, :, : floor.count].clone(), values[:, :, : floor.count].clone(), layer)

        def run(ending: list[int]) -> float:
            return seconds_of(lambda: int(self._forward(ending, copy.deepcopy(cache)).argmax()))

        return {"transformers_memory": run}

    def _forward(self, tokens: list[int], cache: DynamicCache) -> Any:
        model = self._engine.model
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=model.device)
            return model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].float().cpu().numpy()
