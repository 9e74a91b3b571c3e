"""Adapters on a running model: not merged into its weights, so several stay loaded and switching costs nothing.

A step's tokens are packed, and each portion of them belongs to one adapter, or to none. A linear layer that an adapter
changes computes all tokens as ever, then adds to each portion what its adapter says:

    packed    [ row a, adapter x | row b | row c, adapter y | row d, adapter x ]
    adds        up_x down_x h              up_y down_y h      up_x down_x h
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle.core.adapter import Lora
from rekindle.errors import AdapterRefused

Portions = Sequence[tuple[int, int, str | None]]  # of the packed tokens: start, stop, digest of the adapter
_ROUNDING = 2**-7  # of brain floats
_LAYER = re.compile(r"\.(\d+)\.")
# Layers of attention and MLP whose outputs are neither keys nor values of the same layer.
_AFTER_KV = frozenset(
    {"q_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc",
     "c_proj", "dense_h_to_4h", "dense_4h_to_h"}
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Part:
    down: Tensor  # [rank, inputs]
    up: Tensor  # [rank, outputs], scaled


class _Adapted:
    """Stands in for the forward of a linear layer that at least one adapter changes."""

    def __init__(self, layer: nn.Linear, portions: Callable[[], Portions]) -> None:
        self._layer = layer
        self._portions = portions
        self.parts: dict[str, _Part] = {}  # by the digest of the adapter
        self.asked = False  # whether a step ever came by with its tokens

    def __call__(self, hidden: Tensor) -> Tensor:
        portions = self._portions()
        self.asked = self.asked or (hidden.ndim == 3 and bool(portions) and hidden.shape[1] == portions[-1][1])
        out = functional.linear(hidden, self._layer.weight, self._layer.bias)
        for start, stop, adapter in portions:
            if adapter is not None and (part := self.parts.get(adapter)) is not None:
                low = functional.linear(hidden[0, start:stop], part.down)
                out[0, start:stop].addmm_(low, part.up)
        return out


class Adapters:
    """The adapters of one decoder."""

    def __init__(self, linears: Mapping[str, nn.Linear], portions: Callable[[], Portions]) -> None:
        """`linears` are the layers that can be changed, by name; `portions` tells whose the tokens of a step are."""
        self._linears = linears
        self._portions = portions
        self._adapted: dict[str, _Adapted] = {}
        self._loaded: set[str] = set()

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    @property
    def names(self) -> frozenset[str]:
        """The names of the layers that are changed now."""
        return frozenset(self._adapted)

    def check(self, lora: Lora) -> None:
        """Raises `AdapterRefused` for an adapter that is not for this model."""
        where = lora.source or "The adapter"
        if lora.file is not None:
            raise AdapterRefused(f"{where} is an adapter for llama.cpp. Use engine='llamacpp', or PEFT's own files.")
        for name, pair in lora.pairs.items():
            layer = self._linears.get(name)
            if layer is None:
                made = f" It was made for {lora.base}." if lora.base else ""
                raise AdapterRefused(f"{where} changes {name}, a linear layer that this model does not have.{made}")
            if (pair.up.shape[0], pair.down.shape[1]) != (layer.out_features, layer.in_features):
                made = f" It was made for {lora.base}." if lora.base else ""
                raise AdapterRefused(
                    f"{where} has matrices for {pair.down.shape[1]} inputs and {pair.up.shape[0]} outputs of {name}, "
                    f"which has {layer.in_features} and {layer.out_features} in this model.{made}"
                )
        for name, copy in lora.copies.items():
            layer = self._linears.get(name)
            if layer is None or not _same(torch.from_numpy(copy), layer.weight):
                raise AdapterRefused(f"{where} brings other weights for {name} than this model has: it is for another.")
        patterns = [re.compile(pattern) for pattern in lora.targets]
        for name in self._linears:
            if name not in lora.pairs and any(pattern.fullmatch(name) for pattern in patterns):
                raise AdapterRefused(f"{where} has no matrices for {name}, which it says it changes. Get it again.")

    def never_asked(self, digest: str) -> list[str]:
        """The layers that an adapter changes, but that no step asked for its tokens, in their order."""
        return sorted(name for name, adapted in self._adapted.items() if digest in adapted.parts and not adapted.asked)

    def load(self, lora: Lora) -> None:
        """Put an adapter on. Raises `AdapterRefused`; then nothing has changed."""
        self.check(lora)
        digest = lora.digest
        if digest in self._loaded:
            return
        for name, pair in lora.pairs.items():
            layer = self._linears[name]
            if name not in self._adapted:
                self._adapted[name] = _Adapted(layer, self._portions)
                layer.forward = self._adapted[name]  # type: ignore[method-assign, assignment]
            weight = layer.weight
            down = torch.from_numpy(pair.down).to(weight.device, weight.dtype)
            up = (torch.from_numpy(pair.up).T * pair.scale).to(weight.device, weight.dtype)
            self._adapted[name].parts[digest] = _Part(down.contiguous(), up.contiguous())
        self._loaded.add(digest)

    def unload(self, digest: str) -> None:
        """Take an adapter off; layers that no other changes are as they were. Nothing happens if it is not on."""
        self._loaded.discard(digest)
        for name in [name for name, adapted in self._adapted.items() if adapted.parts.pop(digest, None) is not None]:
            if not self._adapted[name].parts:
                del self._adapted[name]
                del self._linears[name].forward  # the class's own is found again


def _same(copy: Tensor, weight: Tensor) -> bool:
    """Whether a copy of weights is what they are, but for the rounding of another type."""
    if copy.shape != weight.shape:
        return False
    own = weight.detach().float().cpu()
    return bool((copy - own).abs().max() <= _ROUNDING * own.abs().max())


def merge_portions(portions: Iterable[tuple[int, int, str | None]]) -> Portions:
    """The same portions, with neighbours of one adapter joined."""
    merged: list[tuple[int, int, str | None]] = []
    for start, stop, adapter in portions:
        if merged and merged[-1][1:] == (start, adapter):
            start = merged.pop()[0]
        merged.append((start, stop, adapter))
    return merged


def same_layers(lora: Lora, layers: int) -> int:
    """How many first layers of a model have the same KV with the adapter and without it."""
    touched: dict[int, set[str]] = {}
    for name in lora.pairs:
        found = _LAYER.search(name)
        if found is not None:
            touched.setdefault(int(found[1]), set()).add(name.rpartition(".")[2])
        elif name != "lm_head":  # something before the layers, or unknown
            return 0
    if not touched:
        return layers
    lowest = min(touched)
    return min(layers, lowest + (touched[lowest] <= _AFTER_KV))
