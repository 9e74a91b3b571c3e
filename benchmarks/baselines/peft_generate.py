"""PEFT itself: its own adapters on a copy of the model, and `generate` as its users call it."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rekindle.models.adapter_registry import RegisteredAdapter

if TYPE_CHECKING:
    from rekindle.engine.hf.engine import HfEngine


class PeftGenerate:
    """A PEFT model with several adapters, which switches between them and computes every prompt."""

    def __init__(self, engine: HfEngine, adapters: Sequence[RegisteredAdapter]) -> None:
        """Copies the model: before the engine has loaded adapters itself."""
        from peft import PeftModel

        model = copy.deepcopy(engine.model)
        first, *others = adapters
        self._model = PeftModel.from_pretrained(model, first.path, adapter_name=first.name)
        for adapter in others:
            self._model.load_adapter(adapter.path, adapter_name=adapter.name)
        self._model.eval()

    def generate(self, adapter: str, prompt: Sequence[int], count: int) -> tuple[float, tuple[int, ...]]:
        """Seconds to the first token, switching included, and `count` greedy tokens."""
        first = _FirstToken()
        started = time.perf_counter()
        self._model.set_adapter(adapter)
        tokens = torch.tensor([list(prompt)], device=self._model.device)
        found = self._model.generate(  # type: ignore[no-untyped-call]
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            streamer=first,
        )
        assert first.at is not None
        return first.at - started, tuple(found[0, len(prompt) :].tolist())


class _FirstToken:
    """A streamer that notes when the first token after the prompt came."""

    def __init__(self) -> None:
        self._prompt_given = False
        self.at: float | None = None

    def put(self, _value: Any) -> None:
        """Called with the prompt, then with each token."""
        if self._prompt_given and self.at is None:
            self.at = time.perf_counter()
        self._prompt_given = True

    def end(self) -> None:
        """Called after the last token."""
