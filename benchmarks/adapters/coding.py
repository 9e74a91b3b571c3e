"""How near a model's answers from coded KV are to those from exact KV, what that KV takes, and how fast it is coded."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.baselines.mobilora import PublishedCoder
from rekindle.codec.coder import Coder
from rekindle.codec.quantizer import BitPlan
from rekindle.session.calibrate.kv_trial import Layers, Trial, decode_layers, encode, fitted, size_bits
from rekindle.session.calibrate.nearness import Nearness


@dataclass(frozen=True)
class CodingResult:
    """One way of coding the KV of one prompt."""

    bits: float  # a number, all that is stored counted
    near: Nearness
    encode_mb_s: float  # of KV as the engine has it, on one core
    decode_mb_s: float


def measure(trial: Trial, coder: Coder, anchor: Layers | None) -> CodingResult:
    """What a coder makes of the KV of a trial: whole, or as a difference from an anchor."""
    dtype, layers = trial.layout.dtype, trial.kv.layers
    started = time.perf_counter()
    blobs = encode(coder, layers, anchor, dtype)
    coded = time.perf_counter()
    back = decode_layers(blobs, layers, anchor, dtype)
    ended = time.perf_counter()
    megabytes = len(trial.prompt) * trial.layout.token_bytes / 1e6
    near = trial.near(back)
    return CodingResult(size_bits(blobs, layers), near, megabytes / (coded - started), megabytes / (ended - coded))


def compare(trial: Trial, coder: Coder, anchor: Layers) -> dict[str, CodingResult]:
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
    found["mobilora"] = measure(trial, PublishedCoder(len(anchor)), anchor)
    return found


def plain_of(trial: Trial, bits: float) -> Coder:
    """The same bits everywhere, without an anchor: as many as the KV of this trial has room for."""
    dtype, layers = trial.layout.dtype, trial.kv.layers
    return fitted(
        lambda nominal: Coder(whole=BitPlan.uniform(len(layers), nominal)),
        bits,
        lambda other: size_bits(encode(other, layers, None, dtype), layers),
    )
