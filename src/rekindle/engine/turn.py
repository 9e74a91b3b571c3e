"""Keys that move: a key turned by the difference of two positions is the key of the other one.

A rotary embedding turns pairs of a key's numbers by angles that grow with its position, so all keys of a passage that
moves by `shift` positions are turned by the same angles, those at position `shift`.

    key      [x0 x1 x2 x3 | y0 y1 y2 y3 | as it is]    xi is turned with yi, by angle i
             [x0 y0 x1 y1 x2 y2 x3 y3   | as it is]    other models: the same, side by side

Which numbers make a pair is not looked up by family. Two tokens run through the model at two places at once, in the
survey at load, and of a few known pairings each layer has the one that makes its keys here from those there. A layer
may have none at all, being without positions; a model with a layer that fits nothing cannot have its keys moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.core.kv import Span
from rekindle.engine import kernels
from rekindle.engine.rope import Rope, Rotation
from rekindle.engine.sequence import Slots

SURVEY_SHIFT = 7  # how far apart the two places of the survey are: within the shortest regime there may be

_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of a number's size, on average


@dataclass(frozen=True)
class Pairing:
    """Number `first[i]` of a key is turned with number `second[i]`, by angle `angles[i]` of the rotary embedding."""

    first: slice
    second: slice
    angles: slice


def _pairings(rotation: Rotation, key_dim: int) -> tuple[Pairing, ...]:
    """The pairings there are, for keys of so many numbers."""
    angles = rotation[0].shape[-1]
    half = angles // 2
    if angles > key_dim:
        return ()
    apart, beside = (slice(half), slice(half, angles)), (slice(0, angles, 2), slice(1, angles, 2))
    return (
        Pairing(*apart, slice(half)),  # angles come twice over: most models
        Pairing(*beside, slice(0, angles, 2)),  # each angle comes twice: Cohere
        Pairing(*beside, slice(half)),  # GLM
    )


@dataclass(frozen=True, eq=False)
class _Angles:
    """How one layer's keys are turned."""

    pairing: Pairing
    cos: Tensor  # [pairs], or [tokens, pairs] where each token has its own shift; float32
    sin: Tensor


_Layers = tuple[_Angles | None, ...]  # None: a layer whose keys have no position


@dataclass(frozen=True, eq=False)
class Turn:
    """All keys of a sequence that move, each by its shift."""

    parts: tuple[tuple[Slots, _Layers], ...]

    def apply(self, layer: int, keys: Tensor) -> None:
        """Turn keys `[kv_heads, capacity, key_dim]` of a layer, in place and on the device where they are."""
        for slots, layers in self.parts:
            angles = layers[layer]
            if angles is None:
                continue
            if isinstance(slots, slice):
                _turn(keys[:, slots], angles)
            elif kernels.works(keys.device):
                kernels.turn(keys, slots, angles.cos, angles.sin, angles.pairing.first, angles.pairing.second)
            else:
                some = keys.index_select(1, slots)
                _turn(some, angles)
                keys.index_copy_(1, slots, some)


class Turner:
    """Makes turns for one model. `pairings` has one for each layer, None where keys have no position."""

    def __init__(self, rope: Rope, pairings: Sequence[Pairing | None]) -> None:
        self._rope = rope
        self._pairings = tuple(pairings)

    @classmethod
    def surveyed(cls, rope: Rope, keys: Sequence[Tensor], regime: str) -> Turner | None:
        """From what each layer made of the same hidden states at two places, the second `SURVEY_SHIFT` behind the
        first: `[2, kv_heads, tokens, key_dim]`. None where they are not each other's turned form.
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

    def turn(self, moves: Sequence[tuple[Span, int]], regime: str, device: torch.device) -> Turn:
        """The turn of spans by their shifts, where several lie over each other by the last one's; 0 is a shift too.

        For a sequence of this regime; made on the stream that is current.
        """
        shifts = np.zeros(max((span.stop for span, _ in moves), default=0), dtype=np.int64)  # by position
        for span, shift in moves:
            shifts[span.start : span.stop] = shift
        moving = np.flatnonzero(shifts)
        if not len(moving):
            return Turn(())
        known, which = np.unique(shifts[moving], return_inverse=True)
        rotations = _rotations(self._rope, known.tolist(), regime, device)
        if device.type != "cpu":
            # All at once: for 16 passages of 512 tokens, one by one took 1.2 ms a layer on an H200, to launch kernels.
            slots, each = (torch.from_numpy(numbers).to(device, non_blocking=True) for numbers in (moving, which))
            return Turn(((slots, self._layers(rotations, each)),))
        # Run by run, in place: on a CPU that is twice as fast as to gather what moves.
        by_shift = [self._layers(rotations, index) for index in range(len(known))]
        cuts = np.flatnonzero((np.diff(moving) != 1) | (np.diff(which) != 0)) + 1
        runs = np.split(np.arange(len(moving)), cuts)
        return Turn(tuple((slice(moving[r[0]], moving[r[-1]] + 1), by_shift[which[r[0]]]) for r in runs))

    def _layers(self, rotations: dict[str, Rotation] | None, index: int | Tensor) -> _Layers:
        made: dict[tuple[str, int], _Angles] = {}  # layers alike share what they need
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
    """Cosines and sines at the shifts, `[shifts, angles]` each, without the factor that some models put on them."""
    # No position is above 0, so no rope that goes by the largest position it sees leaves the regime it is given.
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
    """How far `[layers, kv_heads, tokens, key_dim]` are apart, as a share of each number's size: `[layers]`.

    Each number of a key counts alike: in some models a few are so large that the others would not show.
    """
    off = (got - expected).square().sum(dim=(1, 2))  # [layers, key_dim]
    size = expected.square().sum(dim=(1, 2))
    return (off / size.clamp_min(1e-12)).clamp_max(1.0).sqrt().mean(dim=-1)
