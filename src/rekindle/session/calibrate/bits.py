"""How many bits the keys and values of each layer of a model deserve, measured on the model itself.

One half of one layer is coded at a time, everything else exact: what that does to the next tokens is its effect. Each
is measured at one number of bits; how it falls with more of them is nearly the same everywhere. A plan is the best one
whose real size, with all that is stored counted, is what was asked for. The smallest plan is taken whose KV says nearly
the same on other parts of the texts than those it was made by.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rekindle.cache.coders import default_coder, recall_coder
from rekindle.codec.coder import Coder
from rekindle.codec.quantizer import FLOAT_TYPES, MAX_BITS, MIN_BITS, BitPlan, allocate
from rekindle.core.adapter import Lora
from rekindle.core.kv import LayerKv
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.session.calibrate.kv_trial import Layers, Trial, fitted, read_back, size_bits

PROMPT_TOKENS, FORCED_TOKENS = 256, 16
CHECKED_TOKENS = 64  # of a continuation, along which a plan is checked
TEXTS = 2  # that a plan is made by, and as many that it is checked on
WHOLE_BITS = (5.0, 6.0, 7.0, 8.0)  # a number, tried in this order
DELTA_BITS = (2.7, 3.5, 4.5)
NEAR_KL = 0.003  # nats: the mean divergence that is near enough; with it 98 of 100 first choices are the same
LEVELS = tuple(float(bits) for bits in np.arange(MIN_BITS, MAX_BITS + 0.25, 0.25))
WHOLE_TRIED_BITS, DELTA_TRIED_BITS = 4.0, 3.0  # where effects are measured: near where plans will be
_FALL = 4.0  # of an effect, for each bit: the squared error falls so
_NOISE = 1e-12  # a KL below is rounding

Advance = Callable[[str], None]  # called before each part, with what it is
Effects = NDArray[np.float64]  # [layers, 2], KL in nats; NaN where there is nothing to code
Form = Literal["whole", "difference"]
_Piece = tuple[list[int], list[int]]  # a prompt, and what follows it


@dataclass(frozen=True)
class TriedBits:
    """One plan: what KV takes with it, and how near what the model says then is."""

    form: Form
    plan: Literal["default", "by effect"]
    bits: float  # a number, all that is stored counted
    kl: float
    top1: float

    @property
    def near(self) -> bool:
        """Whether that is near enough."""
        return self.kl <= NEAR_KL


@dataclass(frozen=True)
class FoundBits:
    """A coder for a model, and what was tried. Differences are measured with adapters only."""

    coder: Coder
    tried: tuple[TriedBits, ...]

    def kept(self, form: Form) -> TriedBits | None:
        """The plan that the coder has; None where it is the one of before."""
        return next((one for one in reversed(self.tried) if one.form == form and one.plan == "by effect"), None)


def find_bits(
    engine: Engine,
    texts: Sequence[str],
    loras: Sequence[Lora],
    advance: Advance,
    *,
    whole_bits: Sequence[float] = WHOLE_BITS,
    delta_bits: Sequence[float] = DELTA_BITS,
) -> FoundBits:
    """A coder for a model: the first numbers of bits that are near enough, else the last.

    The adapters take turns with the texts. Without any, differences are coded as before. Raises
    `InvalidSetting` for texts that are too short, and for an engine whose KV is no float or cannot be taken out.
    """
    if not codes_kv(engine):
        raise InvalidSetting("The KV of this engine cannot be quantized further: there are no bits to choose.")
    made_by, checked_on = _cut(engine, texts)
    with ExitStack() as opened:
        advance("compute the texts")
        bases = [CodedPrompt(opened.enter_context(Trial(engine, *prompt))) for prompt in made_by]
        checks = [CodedPrompt(opened.enter_context(Trial(engine, *prompt))) for prompt in checked_on]
        usual = default_coder(len(engine.layout.layers))
        search = _Search("whole", WHOLE_TRIED_BITS, advance)
        whole = search.plan(bases, checks, whole_bits, usual)
        if not loras:
            known = recall_coder(engine) or usual
            return FoundBits(Coder(whole, known.delta), tuple(search.tried))
        for lora in loras:
            engine.load_adapter(lora)
            opened.callback(engine.unload_adapter, lora.digest)

        def adapted(some: Sequence[CodedPrompt]) -> list[CodedPrompt]:
            parts = []
            for lora, base in zip(loras, cycle(some)):
                own = base.trial.kv.layers
                anchor = read_back(Coder(whole), own, None, engine.layout.dtype)
                trial = opened.enter_context(Trial(engine, base.trial.prompt, base.trial.forced, lora.digest))
                parts.append(CodedPrompt(trial, anchor, own))
            return parts

        advance("compute the texts with adapters")
        differences = _Search("difference", DELTA_TRIED_BITS, advance)
        delta = differences.plan(adapted(bases), adapted(checks), delta_bits, usual)
        return FoundBits(Coder(whole, delta), (*search.tried, *differences.tried))


def codes_kv(engine: Engine) -> bool:
    """Whether an engine gives KV that can be coded with fewer bits."""
    return engine.layout.dtype in FLOAT_TYPES and engine.capabilities.spans


class _Search:
    """Effects are measured once, then plans of more and more bits are checked."""

    def __init__(self, form: Form, tried_bits: float, advance: Advance) -> None:
        self._form, self._tried_bits, self._advance = form, tried_bits, advance
        self.tried: list[TriedBits] = []

    def plan(
        self, made_by: Sequence[CodedPrompt], checks: Sequence[CodedPrompt], ladder: Sequence[float], usual: Coder
    ) -> BitPlan:
        """The first plan that is near enough, else the last."""
        effects = []
        for number, part in enumerate(made_by, start=1):
            self._advance(f"bits of {self._form} KV, layer by layer, text {number} of {len(made_by)}")
            effects.append(part_effects(part, self._tried_bits))
        self._check("default", usual, checks)
        for bits in ladder:
            self._advance(f"{self._form} KV with {bits:g} bits a number")
            plan = plan_of(effects, self._tried_bits, bits, made_by)
            if self._check("by effect", Coder(plan, plan), checks).near:
                break
        return plan

    def _check(self, name: Literal["default", "by effect"], coder: Coder, checks: Sequence[CodedPrompt]) -> TriedBits:
        found = []
        for part in checks:
            own, dtype = part.trial.kv.layers, part.trial.layout.dtype
            found.append(part.trial.near(read_back(coder, own, part.anchor, dtype)))
        kl, top1 = statistics.fmean(one.mean_kl for one in found), statistics.fmean(one.top1 for one in found)
        self.tried.append(TriedBits(self._form, name, _mean_size(checks)(coder), kl, top1))
        return self.tried[-1]


@dataclass(frozen=True, eq=False)
class CodedPrompt:
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


def part_effects(part: CodedPrompt, bits: float) -> Effects:
    """The effect of coding each half of each layer alone."""
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


def plan_of(effects: Sequence[Effects], tried_bits: float, max_bits: float, parts: Sequence[CodedPrompt]) -> BitPlan:
    """The plan with the least effect whose size, on these parts, is at most that many bits a number."""
    falls = _FALL ** (tried_bits - np.array(LEVELS))
    harms = combined(effects)[:, :, None] * falls  # [layers, 2, levels]
    whole = parts[0].anchor is None

    def coder(mean_bits: float) -> Coder:
        plan = allocate(harms, LEVELS, mean_bits)
        return Coder(plan) if whole else Coder(delta=plan)

    found = fitted(coder, max_bits, _mean_size(parts))
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


def _mean_size(parts: Sequence[CodedPrompt]) -> Callable[[Coder], float]:
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


def _cut(engine: Engine, texts: Sequence[str]) -> tuple[list[_Piece], list[_Piece]]:
    """Prompts with what follows them: the first of each text to make a plan by, the next to check it on."""
    made_by, checked_on = [], []
    for text in texts:
        tokens = engine.tokenizer.encode(text)
        first, rest = tokens[: PROMPT_TOKENS + FORCED_TOKENS], tokens[PROMPT_TOKENS + FORCED_TOKENS :]
        if len(first) > FORCED_TOKENS:
            made_by.append((first[:-FORCED_TOKENS], first[-FORCED_TOKENS:]))
        if len(rest) >= PROMPT_TOKENS + CHECKED_TOKENS:
            checked_on.append((rest[:PROMPT_TOKENS], rest[PROMPT_TOKENS : PROMPT_TOKENS + CHECKED_TOKENS]))
    if not made_by:
        raise InvalidSetting(f"Choosing bits needs a text of more than {FORCED_TOKENS} tokens, better 600: give one.")
    return made_by[:TEXTS], (checked_on or made_by)[:TEXTS]
