"""`python -m benchmarks chunks --workload endurance`, and a part of `chunks`: a long run over shared passages must not
decay.

The questions of one person come again and again, each time with their passages in another order, the last of them
changed for one that was met before. Recomputed KV stays in the cache, as in use. Every few questions the
same prompt is computed exactly, of which nothing is kept: it is what speed and quality are measured against.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, TableRow, TimeIsUp, Units, about, mean, scratch
from benchmarks.chunks.modes import require_chunk_reuse
from benchmarks.chunks.streams import PreparedPrompt, Streams, shuffled
from benchmarks.models import load
from benchmarks.personal import PersonalSet, personal_sets
from benchmarks.quality import POSITIONS, compare
from rekindle.engine.base import Engine
from rekindle.session.calibrate.budget import start_prompt
from rekindle.session.session import Session

LONG, QUESTIONS, QUICK_QUESTIONS = 1000, 300, 12  # alone, as a part of chunks, quick
WINDOWS, QUICK_WINDOWS = 10, 3
EVERY, QUICK_EVERY = 5, 2  # questions, one is computed exactly as well
DIFFERENT, QUICK_DIFFERENT = 30, 4
TOP_K, QUICK_TOP_K = 3, 2
_RESAMPLES = 2_000
_NAME = "endurance"  # of the unit


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


def run(options: BenchOptions, advance: Advance) -> Report:
    """A long run alone: `--limit` questions."""
    some = personal_sets(options.data)[0]
    advance("load the model")
    engine = load(options)
    require_chunk_reuse(engine)
    units = Units("endurance", options, about(engine, options), advance)
    with scratch() as name:
        streams = Streams(engine, Path(name), options)
        try:
            found = measure(engine, some, streams, options, units, options.rounds(LONG, QUICK_QUESTIONS))
        finally:
            streams.close()
    engine.close()
    report = units.report()
    report.fields |= found
    for one in found.get("windows", ()):
        report.rows.append(_table_row(one))
    return report


def _table_row(one: Mapping[str, Any]) -> TableRow:
    last = one["first"] + one["questions"]
    quality = "not judged" if one["kl"] is None else f"KL {one['kl']:.4f}, top-1 {one['top1']:.3f}"
    speed = "" if one["ttft_vs_prefix"] is None else f"{one['ttft_vs_prefix']:.2f} times as soon as prefix caching"
    return TableRow(
        f"questions {one['first'] + 1} to {last}", quality, f"computed share {one['computed_share']:.3f}", speed
    )


def measure(
    engine: Engine, some: PersonalSet, streams: Streams, options: BenchOptions, units: Units, count: int
) -> dict[str, Any]:
    """The fields of `count` questions, or of those within the time; `streams` has the library."""

    @contextmanager
    def questions() -> Iterator[Callable[[int], _Point]]:
        """Asks one after the other; a run that goes on has the KV that the ones before left."""
        person = max(some.people, key=lambda one: len(one.questions))
        limits = (QUICK_DIFFERENT, QUICK_TOP_K) if options.quick else (DIFFERENT, TOP_K)
        different = streams.prepare(f"{some.name}/endurance", person, *limits)
        if not different:
            raise TimeIsUp  # it will never come
        asked = list(islice(_asked(different, random.Random(options.seed), engine), count))
        with (
            units.kept(_NAME) as folder,
            Session(engine, cache=folder, reuse="approximate", disk_limit="90%") as session,
        ):
            yield lambda number: _ask(session, engine, asked[number], number, options)

    points = units.steps(_NAME, _Point, count, questions)
    if not points:
        reason = "no question has passages that are long enough to be found again, or the time was up"
        return {"questions": 0, "reason": reason}
    return _fields(points, max(1, count // (QUICK_WINDOWS if options.quick else WINDOWS)), options.seed)


def _asked(different: Sequence[PreparedPrompt], order: random.Random, engine: Engine) -> Iterator[PreparedPrompt]:
    """The questions again and again, each round in another order."""
    while True:
        for one in order.sample(different, len(different)):
            yield _changed(one, different, order, engine)


def _changed(
    one: PreparedPrompt, all_of: Sequence[PreparedPrompt], order: random.Random, engine: Engine
) -> PreparedPrompt:
    """Its passages in another order; in place of the last one of another question."""
    quotes = list(one.request.quotes)
    other = order.choice([quote for prepared in all_of for quote in prepared.request.quotes])
    kept = [quote for quote in quotes[:-1] if quote != other]
    return shuffled(one, order.sample([*kept, other], len(kept) + 1), engine)


def _ask(session: Session, engine: Engine, one: PreparedPrompt, number: int, options: BenchOptions) -> _Point:
    every = QUICK_EVERY if options.quick else EVERY
    if number % every == 0:
        first = number // every % 2 == 0
        return _ask_both(session, engine, one, exact_first=first, judges=options.shape is None)
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
    windows = [_window(points, first, window) for first in range(0, len(points), window)]
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


def _window(points: Sequence[_Point], first: int, window: int) -> dict[str, Any]:
    """The means of some questions in a row."""
    some = points[first : first + window]
    compared = [one for one in some if one.speedup is not None]
    return {
        "first": first,
        "questions": len(some),
        "compared": len(compared),
        "ttft_s": statistics.fmean(one.seconds for one in some),
        "ttft_vs_prefix": mean(one.speedup for one in compared),
        "computed_share": statistics.fmean(one.computed_share for one in some),
        "kl": mean(one.kl for one in compared),
        "top1": mean(one.top1 for one in compared),
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
