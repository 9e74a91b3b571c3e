"""The second part of `python -m benchmarks adapters`: what differences take, and how near the answers from them are.

As in use: of several adapters that are asked about the same text, the first one's KV is the anchor, and is kept coded
as a whole; the others' is a difference from what is read back of it. Texts and adapters are others than those that the
bits were chosen by.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.adapters.coding import CodingResult, measure, plain_of
from benchmarks.base import Advance, Report, TableRow
from benchmarks.baselines.mobilora import PublishedCoder
from rekindle.cache.coders import default_coder, recall_coder, remember_coder
from rekindle.codec.coder import Coder
from rekindle.codec.quantizer import FLOAT_TYPES, BitPlan
from rekindle.core.adapter import Lora
from rekindle.engine.base import Engine
from rekindle.engine.lora_files import read_adapter
from rekindle.models.adapter_registry import entries
from rekindle.session.calibrate.bits import find_bits
from rekindle.session.calibrate.kv_trial import Trial, read_back
from rekindle.session.calibrate.prompts import read_texts

PROMPT_TOKENS, FORCED_TOKENS = 256, 64
POSITIONS, QUICK_POSITIONS = 512, 128
FIELDS = ("delta_bits_lossless", "delta_bits", "top1", "kl", "plain_kl", "mobilora_bits", "mobilora_kl", "decode_mb_s")


@dataclass
class _Found:
    """By adapter, the same ways each."""

    ours: dict[str, list[CodingResult]] = field(default_factory=dict)
    plain: dict[str, list[CodingResult]] = field(default_factory=dict)
    lossless: dict[str, list[CodingResult]] = field(default_factory=dict)
    mobilora: dict[str, list[CodingResult]] = field(default_factory=dict)
    whole: list[CodingResult] = field(default_factory=list)

    def add(self, name: str, trial: Trial, coder: Coder, read: Any, anchor: Any) -> None:
        ours = measure(trial, coder, read)
        self.ours.setdefault(name, []).append(ours)
        self.plain.setdefault(name, []).append(measure(trial, plain_of(trial, ours.bits), None))
        self.lossless.setdefault(name, []).append(measure(trial, Coder(delta="exact"), anchor))
        self.mobilora.setdefault(name, []).append(measure(trial, PublishedCoder(len(anchor)), anchor))


def unmeasured(reason: str) -> dict[str, Any]:
    """The fields where nothing can be measured."""
    return {**dict.fromkeys(FIELDS), "delta_reason": reason}


def coder_in_use(engine: Engine, advance: Advance, *, quick: bool) -> tuple[Coder, bool]:
    """The coder that sessions of this model use, and whether it was calibrated; it is now, unless it must be quick."""
    known = recall_coder(engine)
    if known is None and not quick:
        known = calibrate(engine, advance)
    return (known or default_coder(len(engine.layout.layers))), known is not None


def calibrate(engine: Engine, advance: Advance) -> Coder:
    """Find the bits for a model, with the adapters of the package, and keep them for all sessions."""
    advance("choose bits for this model")
    loras = [read_adapter(entry.path, entry.scale) for entry in entries() if entry.packaged]
    coder = find_bits(engine, read_texts(None), loras, advance).coder
    remember_coder(engine, coder)
    return coder


def report_calibration(engine: Engine, coder: Coder, seconds: float) -> Report:
    """What was chosen, for people and programs."""
    usual = default_coder(len(engine.layout.layers))
    report = Report("adapters")
    for name, chosen, before in (("whole", coder.whole, usual.whole), ("delta", coder.delta, usual.delta)):
        if isinstance(chosen, BitPlan) and isinstance(before, BitPlan):
            halves = [bits for layer in chosen.layers for bits in (layer.keys, layer.values)]
            spread = f"{chosen.mean_bits:.2f} ({min(halves):g} to {max(halves):g})"
            ratio = f"{chosen.mean_bits / before.mean_bits:.2f}"
            report.rows.append(TableRow(f"bits a number, {name}", spread, f"{before.mean_bits:.2f}", ratio))
            report.fields[f"{name}_plan"] = [[layer.keys, layer.values] for layer in chosen.layers]
    report.fields |= {"model": engine.name, "calibrated": True, "seconds": round(seconds, 1)}
    return report


def measure_deltas(
    engine: Engine, loras: dict[str, Lora], texts: Sequence[Sequence[int]], seed: int, advance: Advance, *, quick: bool
) -> dict[str, Any]:
    """The fields. `texts` are tokens, each as many as prompt and continuation have together."""
    if engine.layout.dtype not in FLOAT_TYPES:
        return unmeasured("this engine quantizes its KV itself")
    if len(loras) < 2:
        return unmeasured("a difference needs two adapters")
    coder, calibrated = coder_in_use(engine, advance, quick=quick)
    random = np.random.default_rng(seed)
    found = _Found()
    for lora in loras.values():
        engine.load_adapter(lora)
    rounds = -(-(QUICK_POSITIONS if quick else POSITIONS) // (FORCED_TOKENS * (_compared(loras, quick) - 1)))
    for number in range(rounds):
        order = [list(loras)[place] for place in random.permutation(len(loras))][: _compared(loras, quick)]
        _measure_text(engine, loras, order, texts[number % len(texts)], coder, found, advance)
    return {**_fields(found), "calibrated": calibrated, "anchors": "the first adapter asked, coded whole"}


def _compared(loras: dict[str, Lora], quick: bool) -> int:
    return min(len(loras), 3) if quick else len(loras)


def _measure_text(
    engine: Engine,
    loras: dict[str, Lora],
    order: Sequence[str],
    text: Sequence[int],
    coder: Coder,
    found: _Found,
    advance: Advance,
) -> None:
    """Adapters asked about one text in this order."""
    prompt, forced = text[:PROMPT_TOKENS], text[PROMPT_TOKENS : PROMPT_TOKENS + FORCED_TOKENS]
    dtype = engine.layout.dtype
    advance(f"anchor {order[0]}")
    with Trial(engine, prompt, forced, loras[order[0]].digest) as first:
        anchor = first.kv.layers
        whole = Coder(coder.whole)
        read = anchor if coder.whole is None else read_back(whole, anchor, None, dtype)
        if coder.whole is not None:
            found.whole.append(measure(first, whole, None))
    for name in order[1:]:
        advance(f"difference of {name}")
        with Trial(engine, prompt, forced, loras[name].digest) as trial:
            found.add(name, trial, coder, read, anchor)


def _fields(found: _Found) -> dict[str, Any]:
    every = [one for some in found.ours.values() for one in some]
    positions = sum(one.near.positions for one in every)
    return {
        "delta_bits_lossless": _bits(found.lossless),
        "delta_bits": _bits(found.ours),
        "top1": sum(one.near.top1 * one.near.positions for one in every) / positions,
        "kl": _middle_kl(found.ours),
        "plain_kl": _middle_kl(found.plain),
        "plain_bits": _bits(found.plain),
        "mobilora_bits": _bits(found.mobilora),
        "mobilora_kl": _middle_kl(found.mobilora),
        "decode_mb_s": statistics.median(one.decode_mb_s for one in every),
        "encode_mb_s": statistics.median(one.encode_mb_s for one in every),
        "decode_lossless_mb_s": statistics.median(one.decode_mb_s for some in found.lossless.values() for one in some),
        "positions": positions,
        "whole_bits": statistics.mean(one.bits for one in found.whole) if found.whole else None,
        "whole_kl": statistics.median(one.near.mean_kl for one in found.whole) if found.whole else None,
        "kl_by_adapter": {name: _kl(some) for name, some in sorted(found.ours.items())},
        "plain_kl_by_adapter": {name: _kl(some) for name, some in sorted(found.plain.items())},
    }


def _bits(found: dict[str, list[CodingResult]]) -> float:
    return statistics.mean(one.bits for some in found.values() for one in some)


def _middle_kl(found: dict[str, list[CodingResult]]) -> float:
    """The median over adapters."""
    return statistics.median(_kl(some) for some in found.values())


def _kl(some: Sequence[CodingResult]) -> float:
    return statistics.mean(one.near.mean_kl for one in some)
