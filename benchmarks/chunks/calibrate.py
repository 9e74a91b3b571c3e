"""`python -m benchmarks chunks --calibrate`: what `rekindle calibrate` finds, for ours and for Cache-Craft's alpha."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.base import Advance, BenchOptions, Report, TableRow
from benchmarks.baselines import recompute_policies
from benchmarks.chunks.modes import CRAFT, held
from rekindle.chunks.match import remember_budgets
from rekindle.chunks.select import OURS
from rekindle.engine.base import Engine
from rekindle.session.calibrate.budget import BUDGETS, EVERYTHING, BudgetTrials, TriedBudget, min_budget
from rekindle.session.calibrate.prompts import PassageQuestion

PROMPTS, QUICK_PROMPTS = 24, 3
ALPHAS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _PolicyTrials(BudgetTrials):
    """Budgets of any recompute policy."""

    recompute_policy = OURS

    def choose(self, budget: float) -> None:
        """Use this recompute policy from now on."""
        recompute_policies.use(self.session, self.recompute_policy, budget)


def run(engine: Engine, questions: Sequence[PassageQuestion], options: BenchOptions, advance: Advance) -> Report:
    """Calibrate and remember."""
    assert options.kl is not None
    drawn = held(questions, options.rounds(PROMPTS, QUICK_PROMPTS), 0, options.seed)
    ladders = {"leading": BUDGETS} if engine.capabilities.recompute == "leading" else {OURS: BUDGETS, CRAFT: ALPHAS}
    tried = {}
    with _PolicyTrials.opened(engine, drawn.calibration, drawn.donors, advance) as trials:
        for name, some in ladders.items():
            trials.recompute_policy = name
            tried[name] = trials.search(some, options.kl, advance)
    found = {name: min_budget(some, options.kl) for name, some in tried.items()}
    stored = {name: budget for name, budget in found.items() if budget is not None}
    if found.get(OURS, found.get("leading")) is None:
        stored |= dict.fromkeys(found.keys() - {CRAFT}, EVERYTHING)
    if "leading" in stored:  # the policy of an engine that recomputes leading tokens only
        stored[OURS] = stored["leading"]
    remember_budgets(engine, stored)
    return _report(options.kl, len(drawn.calibration), tried, found, stored)


def _report(
    max_kl: float,
    prompts: int,
    tried: Mapping[str, Sequence[TriedBudget]],
    found: Mapping[str, float | None],
    stored: Mapping[str, float],
) -> Report:
    report = Report("chunks")
    by_policy: dict[str, Any] = {}
    for name, some in tried.items():
        best = min(one.kl for one in some)
        by_policy[name] = {
            "budget": stored.get(name),
            "reached": found[name] is not None,
            "best_kl": best,
            "tried": [vars(one) for one in some],
        }
        if found[name] is None:
            outcome = "passages are computed whole" if name in stored else "nothing is kept"
            by_policy[name]["reason"] = f"up to {some[-1].budget:g} gives a KL of {best:.4f} at best; {outcome}"
        for one in some:
            kept = f"kept: {stored[name]:.3g}" if one is some[-1] and name in stored else ""
            measure = f"{name} {one.budget:g}: KL, ROUGE-L, computed share"
            shown = f"{one.kl:.4f}, {one.rouge_l:.3f}, {one.computed_share:.3f}"
            report.rows.append(TableRow(measure, shown, kept, f"{one.kl / max_kl:.2f}", f"<= {max_kl:g}"))
    report.fields |= {"calibrated": by_policy, "max_kl": max_kl, "prompts": prompts, "stored": dict(stored)}
    return report
