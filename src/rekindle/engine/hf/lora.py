"""Adapters on a running model: not merged into its weights, so several can be loaded and switching costs nothing.

A step's tokens are packed, and each span of them uses one adapter, or none. A linear layer that an adapter changes
computes all tokens as usual, then adds to each span the product of its adapter's matrices:

    packed    [ row a, adapter x | row b | row c, adapter y | row d, adapter x ]
    adds        up_x down_x h              up_y down_y h      up_x down_x h
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from rekindle.core.adapter import AdapterFit, Lora, LoraPair
from rekindle.engine.lora_files import name_pattern
from rekindle.errors import AdapterRefused

AdapterSpans = Sequence[tuple[int, int, str | None]]  # of packed tokens: start, stop, digest of the adapter
_ROUNDING = 2**-7  # of brain floats
_LAYER = re.compile(r"\.(\d+)\.")
# Layers of attention and MLP whose outputs are neither keys nor values of the same layer.
_AFTER_KV = frozenset(
    {"q_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "fc1", "fc2", "c_fc",
     "c_proj", "dense_h_to_4h", "dense_4h_to_h"}
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _LoraMatrices:
    down: Tensor  # [rank, inputs]
    up: Tensor  # [rank, outputs], scaled


class _Adapted:
    """Replaces the forward of a linear layer that at least one adapter changes."""

    def __init__(self, layer: nn.Linear, adapter_spans: Callable[[], AdapterSpans]) -> None:
        self._layer = layer
        self._adapter_spans = adapter_spans
        self.parts: dict[str, _LoraMatrices] = {}  # by the digest of the adapter

    def __call__(self, hidden: Tensor) -> Tensor:
        out = type(self._layer).forward(self._layer, hidden)
        for start, stop, adapter in self._adapter_spans():
            if adapter is not None and (part := self.parts.get(adapter)) is not None:
                low = functional.linear(hidden[0, start:stop], part.down)
                out[0, start:stop].addmm_(low, part.up)
        return out


class LoraAdapters:
    """The adapters of one decoder."""

    def __init__(
        self, linears: Mapping[str, nn.Linear], called: Set[str], adapter_spans: Callable[[], AdapterSpans]
    ) -> None:
        """`linears`: the linear layers by name, `called`: those that a step calls with its tokens; `adapter_spans`:
        which adapter a step's tokens use."""
        self._linears, self._called = linears, called
        self._adapter_spans = adapter_spans
        self._adapted: dict[str, _Adapted] = {}
        self._loaded: Counter[str] = Counter()  # how often

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    @property
    def names(self) -> frozenset[str]:
        """Names of the layers that are changed now."""
        return frozenset(self._adapted)

    def check(self, lora: Lora, layers: int) -> AdapterFit:
        """An adapter on this model of that many layers. Raises `AdapterRefused` for one of another model."""
        self._check(lora)
        sizes = [
            (p.down.size + p.up.size) * self._linears[name].weight.element_size() for name, p in lora.pairs.items()
        ]
        return AdapterFit(count_same_layers(lora, layers), sum(sizes))

    def _check(self, lora: Lora) -> None:
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
            if name not in self._called:
                raise AdapterRefused(f"{where} changes {name}, which this model does not use as a layer.")
        for name, copy in lora.copies.items():
            layer = self._linears.get(name)
            if layer is None or not _same(torch.from_numpy(copy), layer.weight):
                raise AdapterRefused(f"{where} brings other weights for {name} than this model has: it is for another.")
        patterns = [name_pattern(pattern) for pattern in lora.targets]
        for name in self._linears:
            if name not in lora.pairs and any(pattern.matches(name) for pattern in patterns):
                raise AdapterRefused(f"{where} has no matrices for {name}, which it says it changes. Get it again.")

    def load(self, lora: Lora) -> None:
        """Load an adapter. Raises `AdapterRefused` and torch's `OutOfMemoryError`; then nothing has changed."""
        self._check(lora)
        if lora.digest in self._loaded:
            self._loaded[lora.digest] += 1
            return
        matrices = {name: self._matrices(pair, self._linears[name].weight) for name, pair in lora.pairs.items()}
        for name, own in matrices.items():
            layer = self._linears[name]
            if name not in self._adapted:
                self._adapted[name] = _Adapted(layer, self._adapter_spans)
                layer.forward = self._adapted[name]  # type: ignore[method-assign, assignment]
            self._adapted[name].parts[lora.digest] = own
        self._loaded[lora.digest] = 1

    def _matrices(self, pair: LoraPair, weight: Tensor) -> _LoraMatrices:
        down = torch.from_numpy(pair.down).to(weight.device, weight.dtype)
        up = (torch.from_numpy(pair.up).T * pair.scale).to(weight.device, weight.dtype)
        return _LoraMatrices(down.contiguous(), up.contiguous())

    def unload(self, digest: str) -> None:
        """Unload an adapter; layers that no other changes are as before. No effect if it is not loaded."""
        if self._loaded[digest] > 1:
            self._loaded[digest] -= 1
            return
        del self._loaded[digest]
        for name in [name for name, adapted in self._adapted.items() if adapted.parts.pop(digest, None) is not None]:
            if not self._adapted[name].parts:
                del self._adapted[name]
                del self._linears[name].forward  # the class's own is found again


def _same(copy: Tensor, weight: Tensor) -> bool:
    """Whether a copy of weights equals them, up to the rounding of another dtype."""
    if copy.shape != weight.shape:
        return False
    own = weight.detach().float().cpu()
    return bool((copy - own).abs().max() <= _ROUNDING * own.abs().max())


def merge_adapter_spans(spans: Iterable[tuple[int, int, str | None]]) -> AdapterSpans:
    """Join neighbouring spans of the same adapter."""
    merged: list[tuple[int, int, str | None]] = []
    for start, stop, adapter in spans:
        if merged and merged[-1][1:] == (start, adapter):
            start = merged.pop()[0]
        merged.append((start, stop, adapter))
    return merged


def count_same_layers(lora: Lora, layers: int) -> int:
    """How many first layers of a model have the same KV with the adapter and without it."""
    touched: dict[int, set[str]] = {}
    for name in lora.pairs:
        found = _LAYER.search(name)
        if found is not None:
            touched.setdefault(int(found[1]), set()).add(name.rpartition(".")[2])
        elif name != "lm_head":  # before the layers, or unknown
            return 0
    if not touched:
        return layers
    lowest = min(touched)
    return min(layers, lowest + (touched[lowest] <= _AFTER_KV))
