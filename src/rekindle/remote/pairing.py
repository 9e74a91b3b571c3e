"""Which published model a model of another file form may take quantized KV from: decided by measurement, and kept.

A GGUF and the files it was made of have other digests, so neither finds the other's contexts. Somebody says that they
are the same model; `session/publish_pair` measures what the client's model says after published KV in place of its own;
what is near enough is kept with the measurement. Keys may be in another order of channels: llama.cpp rotates neighbours
in some models where transformers rotates halves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import get_args

from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.remote.index import KeyOrder, KvModel

MAX_KL = 0.03  # nats, the mean. A Q4 GGUF measured 0.005 with the KV of its files, LoRA fine-tunes of them 0.06 to 0.19
_REMEMBERED = 64


@dataclass(frozen=True)
class ModelPairing:
    """A published model and what was measured: the mean KL of next tokens over `positions` of `contexts` contexts.

    `levels` has it for every quantized level that was published; `kl` and `top1` are those of the nearest.
    """

    weights: str
    title: str
    key_order: KeyOrder
    levels: Mapping[str, float]
    kl: float
    top1: float
    positions: int
    contexts: int
    at: float

    @property
    def is_near(self) -> bool:
        return self.kl <= MAX_KL

    def __str__(self) -> str:
        return (
            f"{self.title}, measured: KL {self.kl:.4f}, the same first choice in {self.top1:.0%} of "
            f"{self.positions:,} positions"
        )

    def model(self, own: KvModel) -> KvModel:
        """The client's own model as one that finds what is published for the other."""
        return replace(own, weights=self.weights, key_order=self.key_order)


def remember_pairing(own: KvModel, pairing: ModelPairing) -> None:
    """Keep a pairing for later runs."""
    _pairings().keep(own.weights, asdict(pairing))


def recall_pairing(own: KvModel) -> ModelPairing | None:
    """The pairing of a model; None if there is none, or what was kept is damaged."""
    try:
        pairing = ModelPairing(**_pairings().recall(own.weights))
    except TypeError:
        return None
    if not isinstance(pairing.levels, dict):
        return None
    numbers = (pairing.kl, pairing.top1, pairing.at, *pairing.levels.values())
    fits = pairing.key_order in get_args(KeyOrder) and isinstance(pairing.weights, str)
    return pairing if fits and all(map(_is_number, numbers)) and pairing.is_near else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _pairings() -> JsonMemo:
    return JsonMemo(home_folder() / "pairings.json", _REMEMBERED)
