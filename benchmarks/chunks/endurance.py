"""The third part of `python -m benchmarks chunks`: a long run with chunk reuse over shared passages must not decay.

The questions of one person come again and again, each time with their passages in another order, the last of them
changed for one that was met before. Recomputed KV stays in the cache, as in use. Every few questions the
same prompt is computed exactly, of which nothing is kept: it is what speed and quality are measured against.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Advance, BenchOptions, mean
from benchmarks.chunks.streams import PreparedPrompt, Streams, shuffled
from benchmarks.personal import PersonalSet
from benchmarks.quality import POSITIONS, compare
from rekindle.engine.base import Engine
from rekindle.session.calibrate.budget import start_prompt
from rekindle.session.session import Session

QUESTIONS, QUICK_QUESTIONS = 300, 12
WINDOW, QUICK_WINDOW = 30, 4
EVERY, QUICK_EVERY = 5, 2  # questions, one is computed exactly as well
DIFFERENT, QUICK_DIFFERENT = 30, 4
TOP_K, QUICK_TOP_K = 3, 2
_RESAMPLES = 2_000


@dataclass(frozen=True)
class _Point:
    """One question: what it took and, where it was computed exactly too, how far it is from that."""

    seconds: float
    computed_share: float
    exact_seconds: float | None = None
    kl: float | None = None
    top1: float | None = None

    @property
    def speedup(self) -> float | None:
        """Against computing exactly."""
        return None if self.exact_seconds is None else self.exact_seconds / self.seconds


def measure(
    engine: Engine, some: PersonalSet, streams: Streams, folder: Path, options: BenchOptions, advance: Advance
) -> dict[str, Any]:
    """The fields of this part; `streams` has the library."""
    quick = options.quick
    person = max(some.people, key=lambda one: len(one.questions))
    tenant = f"{some.name}/endurance"
    different = streams.prepare(
        tenant, person, QUICK_DIFFERENT if quick else DIFFERENT, QUICK_TOP_K if quick else TOP_K
    )
    if not different:
        return {"questions": 0, "reason": "no question has passages that are long enough to be found again"}
    order = random.Random(options.seed)
    every = QUICK_EVERY if quick else EVERY
    points = []
    with Session(engine, cache=str(folder), reuse="approximate", disk_limit="90%") as session:
        for number in range(QUICK_QUESTIONS if quick else QUESTIONS):
            if number % 10 == 0:
                advance(f"question {number + 1} of a long run")
            if number % len(different) == 0:
                round_of = order.sample(different, len(different))
            one = _changed(round_of[number % len(different)], different, order, engine)
            if number % every:
                points.append(_ask(session, engine, one))
            else:
                first = number // every % 2 == 0
                points.append(_ask_both(session, engine, one, exact_first=first, judges=options.shape is None))
    return _fields(points, QUICK_WINDOW if quick else WINDOW, options.seed)


def _changed(
    one: PreparedPrompt, all_of: Sequence[PreparedPrompt], order: random.Random, engine: Engine
) -> PreparedPrompt:
    """Its passages in another order; in place of the last one of another question."""
    quotes = list(one.request.quotes)
    other = order.choice([quote for prepared in all_of for quote in prepared.request.quotes])
    kept = [quote for quote in quotes[:-1] if quote != other]
    return shuffled(one, order.sample([*kept, other], len(kept) + 1), engine)


def _ask(session: Session, engine: Engine, one: PreparedPrompt) -> _Point:
    approximate = start_prompt(session.cache, engine, one.request, one.tokens, 0)
    approximate.end(session.cache, keep=True)
    session.flush()
    return _Point(approximate.seconds, approximate.computed_share)


def _ask_both(session: Session, engine: Engine, one: PreparedPrompt, *, exact_first: bool, judges: bool) -> _Point:
    """Approximate and exact, on the same store; only the KV of the approximate run is kept."""
    cache, exactly = session.cache, replace(one.request, reuse="exact")
    first = start_prompt(cache, engine, exactly if exact_first else one.request, one.tokens, POSITIONS)
    second = start_prompt(cache, engine, one.request if exact_first else exactly, one.tokens, POSITIONS)
    exact, approximate = (first, second) if exact_first else (second, first)
    kl, top1 = compare(engine, exact, [approximate])[0] if judges else (None, None)
    exact.end(cache, keep=False)
    approximate.end(cache, keep=True)
    session.flush()
    return _Point(approximate.seconds, approximate.computed_share, exact.seconds, kl, top1)


def _fields(points: Sequence[_Point], window: int, seed: int) -> dict[str, Any]:
    windows = []
    for first in range(0, len(points), window):
        some = points[first : first + window]
        compared = [one for one in some if one.speedup is not None]
        windows.append(
            {
                "first": first,
                "questions": len(some),
                "compared": len(compared),
                "ttft_vs_prefix": mean(one.speedup for one in compared),
                "computed_share": statistics.fmean(one.computed_share for one in some),
                "kl": mean(one.kl for one in compared),
                "top1": mean(one.top1 for one in compared),
            }
        )
    # At first nothing is stored, and nothing can be reused: decay is what comes after that.
    settled = [(number, one) for number, one in enumerate(points) if number >= min(window, len(points) // 2)]
    speed = slope([(number, one.speedup) for number, one in settled if one.speedup is not None], seed)
    worse = slope([(number, one.kl) for number, one in settled if one.kl is not None], seed)
    return {
        "questions": len(points),
        "window": window,
        "windows": windows,
        "kl": mean(one.kl for _, one in settled if one.speedup is not None),
        "ttft_vs_prefix": mean(one.speedup for _, one in settled if one.speedup is not None),
        "kl_slope": worse,
        "ttft_vs_prefix_slope": speed,
        "flat": None if worse is None or speed is None else worse["low"] <= 0.0 <= speed["high"],
    }


def slope(points: Sequence[tuple[int, float]], seed: int) -> dict[str, float] | None:
    """The change per 100 questions, with an interval that holds it in 95 of 100 draws; None for fewer than three."""
    if len(points) < 3:
        return None
    found = np.asarray(points, dtype=np.float64)
    generator = np.random.default_rng(seed)
    draws = [found[generator.integers(0, len(found), len(found))] for _ in range(_RESAMPLES)]
    slopes = [_slope(draw) for draw in draws if len(set(draw[:, 0])) > 1]
    low, high = np.percentile(slopes, [2.5, 97.5])
    return {"per_100": _slope(found), "low": float(low), "high": float(high)}


def _slope(points: np.ndarray) -> float:
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0] * 100)
