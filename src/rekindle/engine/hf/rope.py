"""The model's rotary embedding: under a fixed regime, and for keys that move to other positions.

Most models rotate a key by its position alone. Longrope picks one of two sets of frequencies by the length of the
whole context, so a context has a *regime*: the same token at the same position has other keys under the other one.
transformers chooses by the largest position it is shown; a scattered or chunked prefill shows only some, so the
regime is fixed when a sequence is opened and forced here.

Moving a passage by `shift` positions rotates all its keys by the same angles, those at position `shift`:

    key      [x0 x1 x2 x3 | y0 y1 y2 y3 | as it is]    xi is rotated with yi, by angle i
             [x0 y0 x1 y1 x2 y2 x3 y3   | as it is]    other models: the same, side by side

Which numbers make a pair is not looked up by family: the survey at load runs two tokens at two places, and each layer
gets the known pairing that turns its keys of one place into those of the other, or none if it has no positions. If no
pairing fits a layer, the model's keys cannot be moved.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rekindle.core.kv import Span
from rekindle.engine.hf import kernels, kv_kernels
from rekindle.engine.hf.sequence import Slots

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
        """The regime of a context of this length."""
        if self._switch is None:
            return PLAIN
        return LONG if tokens > self._switch else SHORT

    @property
    def regimes(self) -> tuple[str, ...]:
        """The regimes a context can have."""
        return (PLAIN,) if self._switch is None else (SHORT, LONG)

    def limit(self, regime: str) -> int | None:
        """Largest context of this regime in tokens; None: no limit."""
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
        """The key of a layer in the result of `rotations`."""
        return _EVERY_LAYER if self._layer_types is None else self._layer_types[layer]


def _original_length(config: Any) -> int:
    parameters = config.rope_parameters
    if "original_max_position_embeddings" in parameters:
        return int(parameters["original_max_position_embeddings"])
    return int(config.original_max_position_embeddings)


SURVEY_SHIFT = 7  # distance of the two places of the survey: within the shortest possible regime

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of a number's size, on average


@dataclass(frozen=True)
class Pairing:
    """Number `first[i]` of a key is turned with number `second[i]`, by angle `angles[i]` of the rotary embedding."""

    first: slice
    second: slice
    angles: slice


def _pairings(rotation: Rotation, key_dim: int) -> tuple[Pairing, ...]:
    """The possible pairings for keys of `key_dim` numbers."""
    angles = rotation[0].shape[-1]
    half = angles // 2
    if angles > key_dim:
        return ()
    apart, beside = (slice(half), slice(half, angles)), (slice(0, angles, 2), slice(1, angles, 2))
    return (
        Pairing(*apart, slice(half)),  # the angles repeat as a whole: most models
        Pairing(*beside, slice(0, angles, 2)),  # each angle repeats: Cohere
        Pairing(*beside, slice(half)),  # GLM
    )


@dataclass(frozen=True, eq=False)
class _Angles:
    """How one layer's keys are rotated."""

    pairing: Pairing
    cos: Tensor  # [pairs], or [tokens, pairs] where each token has its own shift; float32
    sin: Tensor


_Layers = tuple[_Angles | None, ...]  # None: the layer's keys have no position


@dataclass(frozen=True, eq=False)
class RopeShift:
    """A rotation of all keys of a sequence that move, each by its shift."""

    parts: tuple[tuple[Slots, _Layers], ...]

    def apply(self, layer: int, keys: Tensor) -> None:
        """Turn keys `[kv_heads, capacity, key_dim]` of a layer, in place and on the device where they are."""
        for slots, layers in self.parts:
            angles = layers[layer]
            if angles is None:
                continue
            if isinstance(slots, slice):
                _turn(keys[:, slots], angles)
            elif kernels.are_available(keys.device):
                kv_kernels.rotate_keys(keys, slots, angles.cos, angles.sin, angles.pairing.first, angles.pairing.second)
            else:
                some = keys.index_select(1, slots)
                _turn(some, angles)
                keys.index_copy_(1, slots, some)


class RopeShifter:
    """Makes `RopeShift`s for one model. `pairings`: one for each layer, None where keys have no position."""

    def __init__(self, rope: Rope, pairings: Sequence[Pairing | None]) -> None:
        self._rope = rope
        self._pairings = tuple(pairings)

    @classmethod
    def surveyed(cls, rope: Rope, keys: Sequence[Tensor], regime: str) -> RopeShifter | None:
        """From the keys each layer made of the same hidden states at two places, `SURVEY_SHIFT` apart:
        `[2, kv_heads, tokens, key_dim]`. None if no rotation maps one onto the other.
        """
        found: dict[int, Pairing | None] = {}
        rotations = _rotations(rope, [SURVEY_SHIFT], regime, keys[0].device) or {}
        alike: dict[tuple[str, torch.Size], list[int]] = {}
        for layer, own in enumerate(keys):
            alike.setdefault((rope.kind(layer), own.shape), []).append(layer)
        for (kind, _), layers in alike.items():
            here, there = torch.stack([keys[layer] for layer in layers], dim=1).unbind(0)
            candidates: list[Pairing | None] = [None]
            errors = [_error(here.float(), there.float())]
            for pairing in _pairings(rotations[kind], here.shape[-1]) if rotations else ():
                turned = here.to(torch.float32, copy=True)
                _turn(turned, _angles(rotations[kind], 0, pairing))
                candidates.append(pairing)
                errors.append(_error(turned, there.float()))
            least, best = torch.stack(errors).min(dim=0)
            if not bool((least <= _TOLERANCE[here.dtype]).all()):
                return None
            found |= {layer: candidates[choice] for layer, choice in zip(layers, best.tolist(), strict=True)}
        return cls(rope, [found[layer] for layer in range(len(keys))])

    def turn(self, moves: Sequence[tuple[Span, int]], regime: str, device: torch.device) -> RopeShift:
        """The rotation of spans by their shifts; where spans overlap, the last one counts, also if its shift is 0.

        For a sequence of this regime; made on the current stream.
        """
        shifts = np.zeros(max((span.stop for span, _ in moves), default=0), dtype=np.int64)  # by position
        for span, shift in moves:
            shifts[span.start : span.stop] = shift
        moving = np.flatnonzero(shifts)
        if not len(moving):
            return RopeShift(())
        known, which = np.unique(shifts[moving], return_inverse=True)
        rotations = _rotations(self._rope, known.tolist(), regime, device)
        if device.type != "cpu":
            # All at once: for 16 passages of 512 tokens, one by one took 1.2 ms a layer on an H200, to launch kernels.
            slots, each = (torch.from_numpy(numbers).to(device, non_blocking=True) for numbers in (moving, which))
            return RopeShift(((slots, self._layers(rotations, each)),))
        # Run by run, in place: on a CPU that is twice as fast as gathering.
        by_shift = [self._layers(rotations, index) for index in range(len(known))]
        cuts = np.flatnonzero((np.diff(moving) != 1) | (np.diff(which) != 0)) + 1
        runs = np.split(np.arange(len(moving)), cuts)
        return RopeShift(tuple((slice(moving[r[0]], moving[r[-1]] + 1), by_shift[which[r[0]]]) for r in runs))

    def _layers(self, rotations: dict[str, Rotation] | None, index: int | Tensor) -> _Layers:
        made: dict[tuple[str, int], _Angles] = {}  # shared by layers alike
        layers: list[_Angles | None] = []
        for layer, pairing in enumerate(self._pairings):
            if pairing is None or rotations is None:
                layers.append(None)
                continue
            kind = self._rope.kind(layer)
            if (kind, id(pairing)) not in made:
                made[kind, id(pairing)] = _angles(rotations[kind], index, pairing)
            layers.append(made[kind, id(pairing)])
        return tuple(layers)


def _rotations(rope: Rope, shifts: Sequence[int], regime: str, device: torch.device) -> dict[str, Rotation] | None:
    """Cosines and sines at the shifts, `[shifts, angles]` each, without the scaling factor of some models."""
    # No position is above 0, so a rope that goes by the largest position it sees keeps the given regime.
    signs = [-1.0 if shift > 0 else 1.0 for shift in shifts]
    positions = torch.tensor([[*(-abs(shift) for shift in shifts), 0]]).to(device, non_blocking=True)
    found = rope.rotations(torch.empty(0, device=device, dtype=torch.float32), positions, regime)
    if found is None:
        return None
    mirror = torch.tensor(signs).to(device, non_blocking=True)[:, None]
    return {kind: (cos[0, :-1] / cos[0, -1:], sin[0, :-1] / cos[0, -1:] * mirror) for kind, (cos, sin) in found.items()}


def _angles(rotation: Rotation, index: int | Tensor, pairing: Pairing) -> _Angles:
    cos, sin = (numbers[:, pairing.angles][index].contiguous() for numbers in rotation)
    return _Angles(pairing, cos, sin)


def _turn(keys: Tensor, angles: _Angles) -> None:
    # In place, in float32: 700 tokens of a layer of SmolLM2 take a third of the time of the model's own function.
    wide = keys.float()
    first, second = wide[..., angles.pairing.first], wide[..., angles.pairing.second]
    before = first.clone()
    first.mul_(angles.cos).addcmul_(second, angles.sin, value=-1)
    second.mul_(angles.cos).addcmul_(before, angles.sin)
    if wide is not keys:
        keys.copy_(wide)


def _error(got: Tensor, expected: Tensor) -> Tensor:
    """Relative error of keys `[layers, kv_heads, tokens, key_dim]`: `[layers]`.

    Each number of a key has equal weight: in some models a few are so large that the others would not show.
    """
    off = (got - expected).square().sum(dim=(1, 2))  # [layers, key_dim]
    size = expected.square().sum(dim=(1, 2))
    return (off / size.clamp_min(1e-12)).clamp_max(1.0).sqrt().mean(dim=-1)
