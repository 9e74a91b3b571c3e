"""LoRA adapters: small matrices applied beside a model's weights."""

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
    """The addition to one linear layer of a model: `scale * up @ down @ x`."""

    down: Matrix  # [rank, inputs]
    up: Matrix  # [outputs, rank]
    scale: float

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])


@dataclass(frozen=True, eq=False)
class Lora:
    """An adapter as it was read, or a file of one.

    `pairs` are by layer name: `model.layers.0.self_attn.q_proj`. `base` is the model it was made for, by its files;
    `targets` are the layers it should have pairs for, as far as its files say.
    """

    pairs: Mapping[str, LoraPair]
    base: str = ""
    source: str = ""
    targets: tuple[str, ...] = ()  # patterns that match whole layer names
    file: Path | None = None  # a GGUF file that llama.cpp reads itself; then there are no pairs
    file_scale: float = 1.0
    copies: Mapping[str, Matrix] = field(default_factory=dict)  # base weights that PEFT saves, of heads

    @cached_property
    def digest(self) -> str:
        """Equal for equal matrices and scale, whatever its name and place."""
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
        """Bytes of its matrices as float32; of a GGUF file, its size."""
        if self.file is not None:
            return self.file.stat().st_size
        return sum(pair.down.nbytes + pair.up.nbytes for pair in self.pairs.values())

    @property
    def rank(self) -> int:
        """The largest rank of its pairs."""
        return max((pair.rank for pair in self.pairs.values()), default=0)


@dataclass(frozen=True)
class AdapterFit:
    """An adapter on a model.

    same_layers    number of first layers whose KV is the same as without it
    memory_bytes   what it takes in the engine
    """

    same_layers: int
    memory_bytes: int


@dataclass(frozen=True)
class Adapter(AdapterFit):
    """An adapter that can be used by its name; it is loaded when a request needs it."""

    name: str
    digest: str
    source: str
    scale: float
    rank: int
    size_bytes: int
