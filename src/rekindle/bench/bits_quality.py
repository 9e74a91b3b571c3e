"""How near a model's answers from coded KV are to those from exact KV, what that KV takes, and how fast it is coded.

A trial is a prompt whose KV is exchanged for another, time and again, and a continuation that the model is made to
follow: only the KV of the prompt differs, never the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rekindle.bench.chunk_quality import log_softmax
from rekindle.codec.bits import FEWEST_BITS, MOST_BITS, BitPlan
from rekindle.codec.coder import Coder, decode
from rekindle.core.adapter import Lora
from rekindle.core.kv import Kv, KvLayout, KvType, LayerKv, Span
from rekindle.engine.base import Engine, Logits, Row

Layers = Sequence[LayerKv]  # of one prompt, every layer
_SEARCHES = 9  # halvings of the range of bits: to a hundredth of a bit


@dataclass(frozen=True)
class Nearness:
    """Distributions of next tokens against the right ones."""

    mean_kl: float  # nats
    median_kl: float
    top1: float  # share of positions with the same most likely token
    positions: int


@dataclass(frozen=True)
class Measured:
    """One way of coding the KV of one prompt."""

    bits: float  # a number, all that is stored counted
    near: Nearness
    encode_mb_s: float  # of KV as the engine has it, on one core
    decode_mb_s: float


@dataclass(frozen=True)
class HeldKv:
    """A feed (see `engine/base`) of KV in memory."""

    span: Span
    kv: Layers

    @property
    def layers(self) -> range:
        """All of them."""
        return range(len(self.kv))

    def fill(self, layer: int, out: LayerKv) -> None:
        """Copy a layer."""
        np.copyto(out.keys, self.kv[layer].keys)
        np.copyto(out.values, self.kv[layer].values)


class Trial:
    """A prompt under an adapter, or none: its exact KV, and what the model says after KV that stands in for it."""

    def __init__(self, engine: Engine, prompt: Sequence[int], forced: Sequence[int], lora: Lora | None = None) -> None:
        """Computes the prompt. The adapter is loaded already."""
        capacity = len(prompt) + len(forced)
        self._engine = engine
        digest = None if lora is None else lora.digest
        self._sequence = engine.open(capacity, engine.regime(capacity), adapter=digest)
        self.prompt, self.forced = tuple(prompt), tuple(forced)
        for start in range(0, len(prompt), engine.prefill_tokens):
            part = list(prompt[start : start + engine.prefill_tokens])
            engine.step([Row.following(self._sequence, part, logits="none")])
        self.kv: Kv = self._sequence.export(Span(0, len(prompt)))
        self.exact = self.after(self.kv.layers)

    @property
    def layout(self) -> KvLayout:
        """The shape and type of its KV."""
        return self.kv.layout

    def after(self, layers: Layers) -> Logits:
        """The logits `[forced tokens, vocabulary]` of the continuation, after this KV in place of the prompt's own."""
        length = len(self.prompt)
        self._sequence.truncate(0)
        positions = np.arange(length, length + len(self.forced), dtype=np.int64)
        feeds = (HeldKv(Span(0, length), layers),)
        (logits,) = self._engine.step([Row(self._sequence, self.forced, positions, "all", feeds, replay=False)])
        return logits

    def near(self, layers: Layers) -> Nearness:
        """How near that comes to what it says after its own KV."""
        return quality(self.exact, self.after(layers))

    def close(self) -> None:
        """Give the engine's memory back."""
        self._sequence.close()

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def size_bits(blobs: Sequence[bytes], layers: Layers) -> float:
    """Bits a number that coded layers take."""
    numbers = sum(layer.keys.size + layer.values.size for layer in layers)
    return 8 * sum(map(len, blobs)) / numbers


def quality(exact: Logits, other: Logits) -> Nearness:
    """How near distributions are to the right ones, position by position."""
    kl = divergences(exact, other)
    same = exact.argmax(axis=-1) == other.argmax(axis=-1)
    return Nearness(float(kl.mean()), float(np.median(kl)), float(same.mean()), len(kl))


def divergences(exact: Logits, other: Logits) -> NDArray[np.float64]:
    """The KL of each position, in nats."""
    right, found = log_softmax(exact), log_softmax(other)
    kl: NDArray[np.float64] = (np.exp(right) * (right - found)).sum(axis=-1)
    return np.maximum(kl, 0.0)  # rounding alone makes it negative


def encode(coder: Coder, layers: Layers, anchor: Layers | None, dtype: KvType) -> list[bytes]:
    """Every layer, coded; whole without an anchor."""
    anchors = [None] * len(layers) if anchor is None else anchor
    return [coder.encode(at, *pair, dtype) for at, pair in enumerate(zip(layers, anchors, strict=True))]


def read_back(coder: Coder, layers: Layers, anchor: Layers | None, dtype: KvType) -> list[LayerKv]:
    """The KV as it is after it was coded."""
    return _decode(encode(coder, layers, anchor, dtype), anchor, dtype)


def fitted(make: Callable[[float], Coder], most_bits: float, size: Callable[[Coder], float]) -> Coder:
    """The coder of the most nominal bits whose real size is at most so many bits a number, to a hundredth of a bit.

    The smallest one if even that is larger.
    """
    low, high = FEWEST_BITS, MOST_BITS
    if size(make(high)) <= most_bits:
        return make(high)
    for _ in range(_SEARCHES):
        middle = (low + high) / 2
        low, high = (middle, high) if size(make(middle)) <= most_bits else (low, middle)
    return make(low)


def measure(trial: Trial, coder: Coder, anchor: Layers | None) -> Measured:
    """What a coder makes of the KV of a trial: whole, or as a difference from an anchor."""
    dtype, layers = trial.layout.dtype, trial.kv.layers
    started = time.perf_counter()
    blobs = encode(coder, layers, anchor, dtype)
    coded = time.perf_counter()
    back = _decode(blobs, anchor, dtype)
    ended = time.perf_counter()
    megabytes = len(trial.prompt) * trial.layout.token_bytes / 1e6
    near = trial.near(back)
    return Measured(size_bits(blobs, layers), near, megabytes / (coded - started), megabytes / (ended - coded))


def compare(trial: Trial, coder: Coder, anchor: Layers) -> dict[str, Measured]:
    """A coder's differences against other ways of coding the same KV.

    by_effect   the coder's own
    uniform     a difference of that size, with the same bits everywhere
    plain       no difference at all, of that size, with the same bits everywhere
    exact       a difference without loss
    mobilora    a difference as published
    """
    dtype, layers = trial.layout.dtype, trial.kv.layers
    found = {"by_effect": measure(trial, coder, anchor)}
    count, bits = len(layers), found["by_effect"].bits
    uniform = fitted(
        lambda nominal: Coder(delta=BitPlan.uniform(count, nominal)),
        bits,
        lambda other: size_bits(encode(other, layers, anchor, dtype), layers),
    )
    found["uniform"] = measure(trial, uniform, anchor)
    found["plain"] = measure(trial, plain_of(trial, bits), None)
    found["exact"] = measure(trial, Coder(delta="exact"), anchor)
    found["mobilora"] = measure(trial, Coder(delta="mobilora"), anchor)
    return found


def plain_of(trial: Trial, bits: float) -> Coder:
    """The same bits everywhere, without an anchor: as many as the KV of this trial has room for."""
    dtype, layers = trial.layout.dtype, trial.kv.layers
    return fitted(
        lambda nominal: Coder(whole=BitPlan.uniform(len(layers), nominal)),
        bits,
        lambda other: size_bits(encode(other, layers, None, dtype), layers),
    )


def _decode(blobs: Sequence[bytes], anchor: Layers | None, dtype: KvType) -> list[LayerKv]:
    anchors = [None] * len(blobs) if anchor is None else anchor
    return [decode(blob, dtype, one) for blob, one in zip(blobs, anchors, strict=True)]
