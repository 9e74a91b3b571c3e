"""The first part of `python -m benchmarks chunks`: single prompts whose passages are known from other prompts.

Every mode starts every prompt, in turns, on the same store. Nothing of a test prompt is ever kept, so no passage is
scored on the prompt it was computed in. In `rows` all that came before a passage has changed since its KV was computed;
in `partial` one of the passages before it, at most.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from benchmarks.base import BenchOptions, Units, known, mean, rotated
from benchmarks.baselines.cache_craft import preload_layers
from benchmarks.baselines.recompute_policies import CRAFTS
from benchmarks.chunks.modes import (
    CRAFT,
    NONE,
    PREFIX,
    SHARE,
    ChunkMode,
    ModeTrials,
    held,
    impossible,
    modes_of,
    partial_modes,
    partly_changed,
)
from benchmarks.quality import ANSWER_TOKENS, POSITIONS, Quality, judge
from rekindle.chunks.select import OURS
from rekindle.engine.base import Engine
from rekindle.session.calibrate.budget import StartedPrompt, start_prompt
from rekindle.session.calibrate.prompts import PASSAGES, PassagePrompt, PassageQuestion

PROMPTS, QUICK_PROMPTS = 24, 3
TUNING_PROMPTS = 24  # at most, and half as many as are tested
QUICK_PASSAGES = 3
MAX_RECOMPUTED, MAX_COMPUTED = 0.30, 0.37  # of the row that is called best
SAME_SHARE = 0.02  # two rows with so similar shares compute as much
_RESAMPLES = 10_000
_NOT_COMPARED = {"best_vs_cachecraft": None, "cachecraft_alpha": None, "preload_layers": None}
_FIRST_ALPHA = 3.0
_NEAR = 0.01  # to the wanted share: near enough for an alpha


@dataclass(frozen=True)
class Seen:
    """One prompt in one mode, when its context is gone."""

    seconds: float
    load_seconds: float
    computed_tokens: int
    recomputed: float
    computed_share: float
    fallback: bool
    quality: Quality | None


@dataclass(frozen=True)
class SeenPrompt:
    """One prompt in all modes, in their order."""

    tokens: int
    seen: tuple[Seen, ...]


def measure(engine: Engine, asked: Sequence[PassageQuestion], options: BenchOptions, units: Units) -> dict[str, Any]:
    """The fields of this part; none if no prompt was measured."""
    prompts = options.rounds(PROMPTS, QUICK_PROMPTS)
    tuning = min(TUNING_PROMPTS, max(2, prompts // 2))
    drawn = held(asked, tuning, prompts, options.seed, QUICK_PASSAGES if options.quick else PASSAGES)
    with ExitStack() as stack:
        opened = ModeTrials.opened(engine, options, drawn.donors, units.advance)
        whole = _ContextMeasure(engine, opened, stack, options, drawn.calibration, drawn.test, units)
        found = whole.fields()
    with ExitStack() as stack:
        opened = ModeTrials.opened(engine, options, partly_changed(drawn.test, options.seed), units.advance)
        part = _ContextMeasure(engine, opened, stack, options, (), drawn.test, units)
        rows = part.rows(partial_modes(engine, whole.alphas), "one passage before changed, prompt")
    if not found:
        return {}
    partial = {"prompts": part.prompts, "rows": rows} if rows else None
    return found | {"partial": partial, "partial_reason": None if rows else "the time was up"}


def tune_alpha(
    trials: ModeTrials, prompts: Sequence[PassagePrompt], target: float, tries: int, name: str = CRAFT
) -> float:
    """The alpha with which a way of Cache-Craft computes a share of `target` of the passages, on these prompts."""
    encoded = [(prompt, prompt.encode(trials.engine)) for prompt in prompts]
    low, high, alpha = (0.0, 0.0), None, _FIRST_ALPHA
    tried: dict[float, float] = {}
    for _ in range(tries):
        shares = []
        for prompt, tokens in encoded:
            some = trials.start(ChunkMode(name, budget=alpha), prompt, tokens)
            shares.append(some.computed_share)
            trials.end(some)
        share = tried[alpha] = statistics.fmean(shares)
        if abs(share - target) <= _NEAR:
            break
        if share < target:
            low = (alpha, share)
        else:
            high = (alpha, share)
        if high is None:
            alpha *= min(2.0, 1.1 * target / max(share, 1e-6))
        else:
            alpha = low[0] + (high[0] - low[0]) * (target - low[1]) / max(high[1] - low[1], 1e-6)
    return min(tried, key=lambda one: abs(tried[one] - target))


def bootstrap(values: Sequence[float], seed: int) -> dict[str, float]:
    """The mean, with an interval that holds it in 95 of 100 draws."""
    found = np.asarray(values)
    draws = np.random.default_rng(seed).integers(0, len(found), (_RESAMPLES, len(found)))
    low, high = np.percentile(found[draws].mean(axis=1), [2.5, 97.5])
    return {"mean": float(found.mean()), "low": float(low), "high": float(high)}


class _ContextMeasure:
    """Every mode on every prompt, and the results."""

    def __init__(
        self,
        engine: Engine,
        opened: AbstractContextManager[ModeTrials],
        stack: ExitStack,
        options: BenchOptions,
        calibration: Sequence[PassagePrompt],
        test: Sequence[PassagePrompt],
        units: Units,
    ) -> None:
        self._engine, self._opened, self._stack, self._options = engine, opened, stack, options
        self._calibration, self._test = calibration, test
        self._units = units
        self.alphas: dict[str, float] = {}
        self._judges = self._options.shape is None
        self._seen: dict[ChunkMode, list[Seen]] = {}
        self._tokens: list[int] = []
        self._warm = False

    @cached_property
    def _trials(self) -> ModeTrials:
        """Opened when the first unit needs it: passages are computed beforehand, which takes its time."""
        return self._stack.enter_context(self._opened)

    @property
    def prompts(self) -> int:
        """Number of prompts that were measured."""
        return len(self._tokens)

    def fields(self) -> dict[str, Any]:
        """Tune the rivals, then measure."""
        leads = self._engine.capabilities.recompute == "leading"
        if not leads:
            self.alphas = self._units.one("alphas", dict[str, float], self._tune, shared=True) or {}
        modes = modes_of(self._engine, self.alphas, quick=self._options.quick)
        rows = self.rows(modes, "prompt") if leads or self.alphas else []
        if not rows:
            return {}
        result: dict[str, Any] = {
            "prompts": self.prompts,
            "prompt_tokens": statistics.fmean(self._tokens),
            "calibration_prompts": len(self._calibration),
            "positions": POSITIONS * len(self._tokens) if self._judges else None,
            "answer_tokens": ANSWER_TOKENS,
            "cachecraft_alpha_tuned": self.alphas.get(CRAFT),
            "probe_cost": self._probe_cost(),
            "rows": rows + [_missing(name, why) for name, why in impossible(self._engine).items()],
        }
        if not self._judges:
            result["quality_reason"] = "random weights say nothing about quality"
        return result | self._best(modes, rows)

    def _tune(self) -> dict[str, float]:
        tries, found = 4 if self._options.quick else 7, {}
        for name in CRAFTS[: 1 if self._options.quick else None]:
            self._units.advance(f"tune {name}")
            found[name] = tune_alpha(self._trials, self._calibration, SHARE, tries, name)
        return found

    def rows(self, modes: Sequence[ChunkMode], title: str) -> list[dict[str, Any]]:
        """Every mode on every prompt, until the time is up; none if that is before the first."""
        for number, prompt in enumerate(self._test):
            job = partial(self._ask, prompt, modes, number)
            if (found := self._units.one(f"{title} {number + 1}", SeenPrompt, job)) is not None:
                self._tokens.append(found.tokens)
                for mode, seen in zip(modes, found.seen, strict=True):
                    self._seen.setdefault(mode, []).append(seen)
        if not self._tokens:
            return []
        return [self._row(mode) | self._against_ours(mode) for mode in modes]

    def _warm_up(self, modes: Sequence[ChunkMode]) -> None:
        """Every mode once, unmeasured, on a short prompt."""
        whole = self._test[0]
        short = PassagePrompt(whole.question, whole.quotes[:2])
        tokens = short.encode(self._engine)
        for mode in modes:
            self._trials.end(self._trials.start(mode, short, tokens))

    def _ask(self, prompt: PassagePrompt, modes: Sequence[ChunkMode], number: int) -> SeenPrompt:
        """One prompt in every mode, another one first each time."""
        if not self._warm:
            self._warm_up(modes)
            self._warm = True
        trials, tokens, before = self._trials, prompt.encode(self._engine), self._trials.counts()
        turned = rotated(modes, number)
        times: dict[ChunkMode, float] = {}
        if self._engine.capabilities.crowded:  # a sequence that waits to be judged would slow the others down
            for mode in turned:
                some = trials.start(mode, prompt, tokens)
                times[mode] = some.seconds
                trials.end(some)
        starts = {mode: trials.start(mode, prompt, tokens, ANSWER_TOKENS) for mode in turned}
        order = [NONE, *(mode for mode in turned if mode != NONE)]
        judged: list[Quality | None] = [None] * len(order)
        if self._judges:
            judged = [*judge(self._engine, [starts[mode] for mode in order], prompt.answers)]
        seen: dict[ChunkMode, Seen] = {}
        for mode, quality in zip(order, judged, strict=True):
            some = starts[mode]
            seen[mode] = _seen(some, times.get(mode, some.seconds), quality)
            trials.end(some)
        if trials.counts() != before:
            raise RuntimeError("a test prompt was kept")
        return SeenPrompt(len(tokens.tokens), tuple(seen[mode] for mode in modes))

    def _probe_cost(self) -> float | None:
        """What reading the scores adds to a prefill: with over without, in turns, nothing known in both."""
        if not self._engine.capabilities.probes:
            return None
        count = 1 if self._options.quick else 3
        jobs = {f"probes, prompt {n + 1}": partial(self._probe_ratio, n) for n in range(len(self._calibration))[:count]}
        ratios = known([self._units.one(name, float, job) for name, job in jobs.items()])
        return statistics.median(ratios) if ratios else None

    def _probe_ratio(self, number: int) -> float:
        prompt, cache = self._calibration[number], self._trials.session.cache
        tokens, seconds = prompt.encode(self._engine), {}
        requests = {"with": prompt.request(cache_salt="unknown"), "without": prompt.request(reuse="off")}
        for name in ("with", "without") if number % 2 else ("without", "with"):
            some = start_prompt(cache, self._engine, requests[name], tokens, 0)
            seconds[name] = some.seconds
            some.end(cache, keep=False)
        return seconds["with"] / seconds["without"]

    def _row(self, mode: ChunkMode) -> dict[str, Any]:
        seen = self._seen[mode]
        judged = [one.quality for one in seen if one.quality is not None]
        whole = len(judged) == len(seen)
        return {
            "mode": mode.name,
            "budget": mode.budget,
            "recomputed": round(statistics.fmean(one.recomputed for one in seen), 3),
            "computed_share": round(statistics.fmean(one.computed_share for one in seen), 3),
            "rouge_l": mean(one.rouge_l for one in judged) if whole else None,
            "kl": mean(one.kl for one in judged) if whole else None,
            "kl_median": statistics.median(one.kl for one in judged) if whole else None,
            "top1": mean(one.top1 for one in judged) if whole else None,
            "f1": mean(one.f1 for one in judged) if whole else None,
            "ttft_s": statistics.median(one.seconds for one in seen),
            "ttft_spread_s": [min(one.seconds for one in seen), max(one.seconds for one in seen)],
            "ttft_vs_none": self._sooner(mode, NONE),
            "ttft_vs_prefix": self._sooner(mode, PREFIX),
            "load_s": statistics.median(one.load_seconds for one in seen),
            "computed_tokens": statistics.fmean(one.computed_tokens for one in seen),
            "fallbacks": sum(one.fallback for one in seen),
        }

    def _against_ours(self, mode: ChunkMode) -> dict[str, Any]:
        """Ours at the share that rivals get less this mode, prompt by prompt."""
        pairs = [
            (own.quality, other.quality)
            for own, other in zip(self._seen.get(ChunkMode(OURS, budget=SHARE), []), self._seen[mode], strict=False)
            if own.quality is not None and other.quality is not None
        ]
        differences = {
            "ours_kl_diff": [own.kl - other.kl for own, other in pairs],
            "ours_top1_diff": [own.top1 - other.top1 for own, other in pairs],
        }
        return {name: bootstrap(some, self._options.seed) if some else None for name, some in differences.items()}

    def _sooner(self, mode: ChunkMode, than: ChunkMode) -> float:
        pairs = zip(self._seen[than], self._seen[mode], strict=True)
        return statistics.median(theirs.seconds / own.seconds for theirs, own in pairs)

    def _best(self, modes: Sequence[ChunkMode], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Our row that computes most within the bounds, and Cache-Craft beside it."""
        fits = [
            (row, mode)
            for row, mode in zip(rows, modes, strict=True)
            if mode.name == OURS and row["recomputed"] <= MAX_RECOMPUTED and row["computed_share"] <= MAX_COMPUTED
        ]
        if not fits:
            reason = impossible(self._engine).get(OURS, "no row of ours is within the bounds")
            return {"best": None, "best_reason": reason, **_NOT_COMPARED}
        best, mode = max(fits, key=lambda pair: pair[0]["computed_share"])
        computing = max(1e-6, best["ttft_s"] - best["load_s"])
        return {
            "best": best,
            **self._against_craft(best, mode, modes, rows),
            "preload_layers": preload_layers(len(self._engine.layout.layers), computing, best["load_s"]),
        }

    def _against_craft(
        self, best: dict[str, Any], ours: ChunkMode, modes: Sequence[ChunkMode], rows: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        """Cache-Craft where it computes as much as ours does; if no alpha gives that, where it computes more."""
        crafts = [(row, mode) for row, mode in zip(rows, modes, strict=True) if mode.name == CRAFT]
        enough = [pair for pair in crafts if pair[0]["computed_share"] >= best["computed_share"] - SAME_SHARE]
        craft, theirs = min(enough or crafts, key=lambda pair: abs(pair[0]["computed_share"] - best["computed_share"]))
        pairs = [(own.quality, other.quality) for own, other in zip(self._seen[ours], self._seen[theirs], strict=True)]
        differences = [
            a.rouge_l - b.rouge_l
            for a, b in pairs
            if a is not None and b is not None and a.rouge_l is not None and b.rouge_l is not None
        ]
        apart = best["computed_share"] - craft["computed_share"]
        result: dict[str, Any] = {"rouge_l_diff": None, "low": None, "high": None}
        if differences:
            found = bootstrap(differences, self._options.seed)
            result = {"rouge_l_diff": found["mean"], "low": found["low"], "high": found["high"]}
        result["kl_ratio"] = best["kl"] / craft["kl"] if best["kl"] is not None and craft["kl"] else None
        result["computed_share_diff"] = apart
        if abs(apart) > SAME_SHARE:
            shares = f"{craft['computed_share']:.3f}, ours {best['computed_share']:.3f}"
            result["computed_share_note"] = f"cache-craft computes {shares}"
        return {"best_vs_cachecraft": result, "cachecraft_alpha": theirs.budget}


def _seen(some: StartedPrompt, seconds: float, quality: Quality | None) -> Seen:
    return Seen(
        seconds,
        some.result.load_seconds,
        some.reuse.computed,
        some.recomputed,
        some.computed_share,
        some.fallback,
        quality,
    )


def _missing(name: str, why: str) -> dict[str, Any]:
    """The row of a mode that an engine cannot do."""
    empty = ("budget", "recomputed", "computed_share", "rouge_l", "kl", "kl_median", "top1", "f1", "ttft_s")
    more = (
        "ours_kl_diff",
        "ours_top1_diff",
        "ttft_spread_s",
        "ttft_vs_none",
        "ttft_vs_prefix",
        "load_s",
        "computed_tokens",
        "fallbacks",
    )
    return {"mode": name, **dict.fromkeys((*empty, *more)), "reason": why}
