"""How many bits the keys and values of each layer of a model deserve, measured on the model itself.

One half of one layer is coded at a time, everything else exact: what that does to the next tokens is its effect. Each
is measured at one number of bits; how it falls with more of them is nearly the same everywhere. The plan is the best
one whose real size, with all that is stored counted, is what was asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from itertools import cycle

import numpy as np
from numpy.typing import NDArray

from rekindle.bench.base import Advance
from rekindle.bench.bits_quality import Layers, Trial, fitted, read_back, size_bits
from rekindle.bench.data import texts as sample_texts
from rekindle.codec.bits import FEWEST_BITS, MOST_BITS, BitPlan, allocate
from rekindle.codec.coder import Coder
from rekindle.codec.numbers import FLOAT_TYPES
from rekindle.core.adapter import Lora
from rekindle.core.kv import LayerKv
from rekindle.engine.adapters import read_adapter
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.models.adapters import entries
from rekindle.run.coders import default_coder

PROMPT_TOKENS, FORCED_TOKENS = 256, 16
LEVELS = tuple(float(bits) for bits in np.arange(FEWEST_BITS, MOST_BITS + 0.25, 0.25))
WHOLE_TRIED_BITS, DELTA_TRIED_BITS = 4.0, 3.0  # where effects are measured: near where plans will be
_FALL = 4.0  # of an effect, for each bit: the squared error falls so
_NOISE = 1e-12  # a KL below is rounding

Effects = NDArray[np.float64]  # [layers, 2], KL in nats; NaN where there is nothing to code


@dataclass(frozen=True, eq=False)
class Part:
    """The KV of a prompt that is to be coded, and what it is a difference from."""

    trial: Trial
    anchor: Layers | None = None  # as it is read back
    base: Layers | None = None  # the anchor as the model computed it

    def alike(self, layer: int) -> tuple[bool, bool]:
        """Whether the keys and the values of a layer are the anchor's own."""
        if self.base is None:
            return False, False
        mine, theirs = self.trial.kv.layers[layer], self.base[layer]
        return np.array_equal(mine.keys, theirs.keys), np.array_equal(mine.values, theirs.values)

    def sizes(self, coder: Coder) -> list[float]:
        """Bits a number of each layer, coded; NaN where all of it is the anchor's own."""
        own, dtype = self.trial.kv.layers, self.trial.layout.dtype
        anchors = [None] * len(own) if self.anchor is None else self.anchor
        return [
            math.nan if all(self.alike(at)) else size_bits([coder.encode(at, *pair, dtype)], own[at : at + 1])
            for at, pair in enumerate(zip(own, anchors, strict=True))
        ]


def calibrate_bits(
    engine: Engine,
    texts: Sequence[str],
    loras: Sequence[Lora],
    *,
    whole_bits: float,
    delta_bits: float,
    advance: Advance,
) -> Coder:
    """A coder for a model whose KV takes at most so many bits a number: whole, and as a difference under an adapter.

    Each text is one prompt; the adapters take turns with them. Without adapters, differences are coded as for a model
    that was not calibrated. The adapters stay loaded. Raises `InvalidSetting` for texts that are too short, and for an
    engine whose KV is no float or cannot be taken out.
    """
    if engine.layout.dtype not in FLOAT_TYPES or not engine.capabilities.spans:
        raise InvalidSetting("This engine gives no KV that could be coded with fewer bits: there are none to choose.")
    if not texts:
        raise InvalidSetting("Bits are chosen by texts: give at least one.")
    prompts = [_tokens(engine, text) for text in texts]
    with ExitStack() as opened:
        advance("prompts without adapters")
        bases = [Part(opened.enter_context(Trial(engine, *prompt))) for prompt in prompts]
        effects = []
        for number, base in enumerate(bases, start=1):
            advance(f"whole KV, text {number} of {len(bases)}")
            effects.append(part_effects(base, WHOLE_TRIED_BITS))
        whole = plan_of(effects, WHOLE_TRIED_BITS, whole_bits, bases)
        if not loras:
            return Coder(whole, default_coder(len(engine.layout.layers)).delta)
        parts, effects = [], []
        for number, (lora, base) in enumerate(zip(loras, cycle(bases)), start=1):
            advance(f"differences, adapter {number} of {len(loras)}")
            engine.load_adapter(lora)
            trial, own = base.trial, base.trial.kv.layers
            anchor = read_back(Coder(whole), own, None, engine.layout.dtype)
            adapted = opened.enter_context(Trial(engine, trial.prompt, trial.forced, lora))
            parts.append(Part(adapted, anchor, own))
            effects.append(part_effects(parts[-1], DELTA_TRIED_BITS))
        return Coder(whole, plan_of(effects, DELTA_TRIED_BITS, delta_bits, parts))


def packaged_texts() -> list[str]:
    """Texts to calibrate with that come with the package: a story, and what people have on their machines."""
    file = resources.files("rekindle.bench").joinpath("sample_corpus").joinpath("corpus.jsonl")
    documents = [json.loads(line)["text"] for line in file.read_text("utf-8").splitlines()]
    return [*sample_texts(None), "\n\n".join(documents)]


def packaged_loras() -> list[Lora]:
    """The adapters that come with the package."""
    return [read_adapter(entry.path, entry.scale) for entry in entries() if entry.packaged]


def part_effects(part: Part, bits: float) -> Effects:
    """The effect of coding each half of each layer alone with so many bits."""
    trial, own = part.trial, part.trial.kv.layers
    plan = BitPlan.uniform(len(own), bits)
    back = read_back(Coder(plan, plan), own, part.anchor, trial.layout.dtype)
    effects = np.full((len(own), 2), np.nan)
    for at, (mine, coded) in enumerate(zip(own, back, strict=True)):
        swapped = LayerKv(coded.keys, mine.values), LayerKv(mine.keys, coded.values)
        for half, (layer, alike) in enumerate(zip(swapped, part.alike(at), strict=True)):
            if not alike:
                effects[at, half] = trial.near([*own[:at], layer, *own[at + 1 :]]).mean_kl
    return effects


def plan_of(effects: Sequence[Effects], tried_bits: float, most_bits: float, parts: Sequence[Part]) -> BitPlan:
    """The plan with the least effect whose size, on these parts, is at most so many bits a number."""
    falls = _FALL ** (tried_bits - np.array(LEVELS))
    harms = combined(effects)[:, :, None] * falls  # [layers, 2, levels]
    whole = parts[0].anchor is None

    def coder(mean_bits: float) -> Coder:
        plan = allocate(harms, LEVELS, mean_bits)
        return Coder(plan) if whole else Coder(delta=plan)

    found = fitted(coder, most_bits, _mean_size(parts))
    plan = found.whole if whole else found.delta
    assert isinstance(plan, BitPlan)
    return plan


def combined(effects: Sequence[Effects]) -> Effects:
    """Effects under several prompts as one, none counting more than another because all of its effects are larger.

    Where no prompt had anything to code, the middle of the others stands in: another adapter may have something there.
    """
    logs = np.log(np.maximum(np.stack(effects), _NOISE))  # [prompts, layers, 2]; NaN stays
    shared = np.isfinite(logs).all(0)
    if shared.any():
        logs -= logs[:, shared].mean(1)[:, None, None]
    known = np.isfinite(logs)
    means = np.where(known, logs, 0.0).sum(0) / np.maximum(known.sum(0), 1)
    if known.any():
        means[~known.any(0)] = np.median(means[known.any(0)])
    return np.asarray(np.exp(means), np.float64)


def _mean_size(parts: Sequence[Part]) -> Callable[[Coder], float]:
    """What gives the mean size of these parts in bits a number.

    Layer by layer, over the parts that have something to code there: a layer that an adapter leaves as it is says
    nothing about its size under another.
    """
    weights = np.array([layer.keys.size + layer.values.size for layer in parts[0].trial.kv.layers])

    def size(coder: Coder) -> float:
        sizes = np.array([part.sizes(coder) for part in parts])  # [parts, layers]
        known = np.isfinite(sizes)
        means = np.where(known, sizes, 0.0).sum(0) / np.maximum(known.sum(0), 1)
        counted = weights * known.any(0)
        return float((means * counted).sum() / max(1, counted.sum()))

    return size


def _tokens(engine: Engine, text: str) -> tuple[list[int], list[int]]:
    """A prompt and what follows it."""
    tokens = engine.tokenizer.encode(text)[: PROMPT_TOKENS + FORCED_TOKENS]
    if len(tokens) <= FORCED_TOKENS:
        raise InvalidSetting(f"A text to calibrate with needs more than {FORCED_TOKENS} tokens, better 300.")
    return tokens[:-FORCED_TOKENS], tokens[-FORCED_TOKENS:]
