"""`rekindle bench chunks --calibrate`: the budget that a wanted quality takes, for this model, kept for later sessions.

Budgets are tried in increasing order on prompts that no test uses, until the answers are near enough to those of the
full computation; the budget that is kept lies between the last two.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.bench.base import Advance, BenchOptions, Report, Row
from rekindle.bench.chunk_modes import CRAFT, NONE, Kitchen, Mode
from rekindle.bench.chunk_prompts import ChunkPrompt, held
from rekindle.bench.chunk_quality import ANSWER_TOKENS, judge, require_rouge
from rekindle.bench.contexts import Asked
from rekindle.engine.base import Engine
from rekindle.reuse.mending import OURS
from rekindle.run.chunks import calibrate

PROMPTS, QUICK_PROMPTS = 24, 3
BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EVERYTHING = 1.0  # the budget where no budget that saves anything is enough


@dataclass(frozen=True)
class Tried:
    """One budget: how near its answers are, and what of the passages it computed."""

    budget: float
    rouge_l: float
    kl: float
    computed_share: float


def calibrated(tried: Sequence[Tried], quality: float) -> float | None:
    """The least budget that gives the quality, between those that were tried (in increasing order); None if none does.

    More is never worse: where noise says otherwise, the best quality so far counts.
    """
    before: tuple[float, float] | None = None  # budget, quality
    for one in tried:
        reached = max(one.rouge_l, before[1] if before else 0.0)
        if reached >= quality:
            if before is None or reached == before[1]:
                return one.budget
            return before[0] + (one.budget - before[0]) * (quality - before[1]) / (reached - before[1])
        before = (one.budget, reached)
    return None


def run(engine: Engine, asked: Sequence[Asked], options: BenchOptions, advance: Advance) -> Report:
    """Calibrate and remember. Raises `EngineMissing` without the package that measures quality."""
    require_rouge()
    assert options.quality is not None
    drawn = held(asked, options.rounds(PROMPTS, QUICK_PROMPTS), 0, options.seed)
    with Kitchen.opened(engine, options, drawn.donors, advance) as kitchen:
        ladder = _Ladder(kitchen, drawn.calibration, options.quality, advance)
        if engine.capabilities.mends == "leading":
            tried = {"leading": ladder.climb("leading", BUDGETS)}
        else:
            tried = {OURS: ladder.climb(OURS, BUDGETS), CRAFT: ladder.climb(CRAFT, ALPHAS)}
    found = {name: calibrated(some, options.quality) for name, some in tried.items()}
    stored = {name: budget for name, budget in found.items() if budget is not None}
    if found.get(OURS, found.get("leading")) is None:
        stored |= dict.fromkeys(found.keys() - {CRAFT}, EVERYTHING)
    if "leading" in stored:  # what an engine that mends by leading tokens does in place of ours
        stored[OURS] = stored["leading"]
    calibrate(engine, stored)
    return _report(options.quality, len(drawn.calibration), tried, found, stored)


class _Ladder:
    """The same prompts at one budget after the other."""

    def __init__(self, kitchen: Kitchen, prompts: Sequence[ChunkPrompt], quality: float, advance: Advance) -> None:
        self._kitchen, self._engine = kitchen, kitchen.engine
        self._prompts = prompts
        self._quality = quality
        self._advance = advance

    def climb(self, name: str, budgets: Sequence[float]) -> list[Tried]:
        """Each budget in turn, until the quality is reached."""
        tried: list[Tried] = []
        for budget in budgets:
            self._advance(f"{name} {budget:g}")
            tried.append(self._try(Mode(name, budget=budget)))
            if tried[-1].rouge_l >= self._quality:
                break
        return tried

    def _try(self, mode: Mode) -> Tried:
        rouge, kl, shares = [], [], []
        for prompt in self._prompts:
            tokens = prompt.encode(self._engine)
            starts = [self._kitchen.start(one, prompt, tokens, ANSWER_TOKENS) for one in (NONE, mode)]
            found = judge(self._engine, starts, prompt.answers)[1]
            assert found.rouge_l is not None
            rouge.append(found.rouge_l)
            kl.append(found.kl)
            shares.append(starts[1].computed_share)
            for some in starts:
                self._kitchen.end(some)
        return Tried(mode.budget or 0.0, *map(statistics.fmean, (rouge, kl, shares)))


def _report(
    quality: float,
    prompts: int,
    tried: Mapping[str, Sequence[Tried]],
    found: Mapping[str, float | None],
    stored: Mapping[str, float],
) -> Report:
    report = Report("chunks")
    told: dict[str, Any] = {}
    for name, some in tried.items():
        budget = found[name]
        told[name] = {
            "budget": stored.get(name),
            "reached": budget is not None,
            "best_rouge_l": max(one.rouge_l for one in some),
            "tried": [vars(one) for one in some],
        }
        if budget is None:
            least = f"up to {some[-1].budget:g} gives {max(one.rouge_l for one in some):.3f} at best"
            told[name]["reason"] = f"{least}; " + (
                "passages are computed whole" if name in stored else "nothing is kept"
            )
        for one in some:
            kept = f"kept: {stored[name]:.3g}" if one is some[-1] and name in stored else ""
            measure = f"{name} {one.budget:g}: ROUGE-L, KL, computed share"
            shown = f"{one.rouge_l:.3f}, {one.kl:.4f}, {one.computed_share:.3f}"
            report.rows.append(Row(measure, shown, kept, f"{one.rouge_l / quality:.2f}", f">= {quality:g}"))
    report.fields |= {"calibrated": told, "quality": quality, "prompts": prompts, "stored": dict(stored)}
    report.plot = lambda figure: _draw(figure, tried, quality)
    return report


def _draw(figure: Any, tried: Mapping[str, Sequence[Tried]], quality: float) -> None:
    axes = figure.subplots()
    for name, some in tried.items():
        axes.plot([one.computed_share for one in some], [one.rouge_l for one in some], "o-", label=name)
    axes.axhline(quality, linestyle=":", color="grey")
    axes.set_xlabel("computed share of the passages")
    axes.set_ylabel("ROUGE-L to the full computation")
    axes.legend()
