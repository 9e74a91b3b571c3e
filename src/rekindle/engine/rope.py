"""The model's own rotary embedding, under a regime that the caller fixes.

Most models rotate a key by its position alone. Longrope picks one of two sets of frequencies by the length of the
whole context, so a context has a *regime*: the same token at the same position has other keys under the other one.
transformers chooses by the largest position it is shown; a scattered or chunked prefill shows only some, so the
regime is fixed when a sequence is opened and forced here.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

PLAIN, SHORT, LONG = "plain", "short", "long"  # regimes
_EVERY_LAYER = "every layer"

Rotation = tuple[Tensor, Tensor]  # cos, sin: each [1, tokens, rotary_dim]


class Rope:
    """Rotations for the layers of one model; `None` for a model without a rotary embedding."""

    def __init__(self, rotary: nn.Module | None, config: Any) -> None:
        self._rotary = rotary
        types = getattr(rotary, "rope_type", "default")
        self._types = set(types.values()) if isinstance(types, dict) else {types}
        self._layer_types: list[str] | None = None
        if rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters:
            self._layer_types = list(config.layer_types)
        self._switch = _original_length(config) if "longrope" in self._types else None
        self.fixed_length: int | None = None
        if any("dynamic" in kind for kind in self._types):
            # Past this length its frequencies change with every token: no KV stays valid.
            self.fixed_length = int(config.max_position_embeddings)

    def regime(self, tokens: int) -> str:
        """The regime of a context of so many tokens."""
        if self._switch is None:
            return PLAIN
        return LONG if tokens > self._switch else SHORT

    @property
    def regimes(self) -> tuple[str, ...]:
        """The regimes a context can have."""
        return (PLAIN,) if self._switch is None else (SHORT, LONG)

    def limit(self, regime: str) -> int | None:
        """How many tokens a context of this regime may have; None: any number."""
        return self._switch if regime == SHORT else None

    def rotations(self, hidden: Tensor, positions: Tensor, regime: str) -> dict[str, Rotation] | None:
        """The rotations at `positions` [1, tokens], by layer type."""
        if self._rotary is None:
            return None
        tokens = positions.shape[1]
        if regime == LONG:
            switch = torch.full((1, 1), int(self._switch or 0), dtype=positions.dtype, device=positions.device)
            positions = torch.cat([positions, switch], dim=1)
        kinds = [_EVERY_LAYER] if self._layer_types is None else sorted(set(self._layer_types))
        result = {}
        for kind in kinds:
            named = {} if self._layer_types is None else {"layer_type": kind}
            cos, sin = self._rotary(hidden, positions, **named)
            result[kind] = (cos[:, :tokens], sin[:, :tokens])
        return result

    def kind(self, layer: int) -> str:
        """The key of a layer in what `rotations` gives."""
        return _EVERY_LAYER if self._layer_types is None else self._layer_types[layer]


def _original_length(config: Any) -> int:
    parameters = config.rope_parameters
    if "original_max_position_embeddings" in parameters:
        return int(parameters["original_max_position_embeddings"])
    return int(config.original_max_position_embeddings)
