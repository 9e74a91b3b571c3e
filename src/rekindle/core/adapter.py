"""An adapter: small matrices that change what a model does, beside its weights (LoRA)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rekindle.core.identity import digest_of_fields

Matrix = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class LoraPair:
    """What is added to one linear layer of a model: `scale * up @ down @ x`."""

    down: Matrix  # [rank, inputs]
    up: Matrix  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        """How many numbers go from one to the other."""
        return int(self.down.shape[0])


@dataclass(frozen=True, eq=False)
class Lora:
    """An adapter as it was read, or a file of one.

    `pairs` are by the name of the layer in the model: `model.layers.0.self_attn.q_proj`. `base` is what its files call
    the model it was made for; `targets` tell which layers it should have pairs for, as far as its files say.
    """

    pairs: Mapping[str, LoraPair]
    base: str = ""
    source: str = ""
    targets: tuple[str, ...] = ()  # patterns that names of layers match wholly
    file: Path | None = None  # a GGUF file that llama.cpp reads itself; then there are no pairs
    file_scale: float = 1.0
    copies: Mapping[str, Matrix] = field(default_factory=dict)  # weights of the model itself, which PEFT saves of heads

    @cached_property
    def digest(self) -> str:
        """Of what it does: equal for equal numbers and scale, whatever it is called and wherever it lies."""
        if self.file is not None:
            return digest_of_fields("rekindle/adapter/gguf/1", self.file.read_bytes(), float(self.file_scale).hex())
        fields: list[str | bytes] = []
        for name in sorted(self.pairs):
            pair = self.pairs[name]
            fields += [name, repr(pair.down.shape), repr(pair.up.shape), float(pair.scale).hex()]
            fields += [np.ascontiguousarray(half, "<f4").tobytes() for half in (pair.down, pair.up)]
        return digest_of_fields("rekindle/adapter/1", *fields)

    @property
    def size_bytes(self) -> int:
        """What its numbers take, four bytes each; of a GGUF file, its size."""
        if self.file is not None:
            return self.file.stat().st_size
        return sum(pair.down.nbytes + pair.up.nbytes for pair in self.pairs.values())

    @property
    def rank(self) -> int:
        """The largest rank of its pairs."""
        return max((pair.rank for pair in self.pairs.values()), default=0)


@dataclass(frozen=True)
class Adapter:
    """An adapter that is loaded under a name.

    `same_layers`: so many of the model's first layers have the same KV as without it.
    """

    name: str
    digest: str
    source: str
    scale: float
    rank: int
    size_bytes: int
    same_layers: int
