"""The ways to get a context that an origin has: ours, and those of others.

All of them but `plain` run on the executor of sessions (`remote/hybrid_prefill`, `baselines/streaming`); they differ in
who decides what is computed and what is streamed.

local            everything is computed, chunk by chunk
plain            everything is computed, in the pieces that the engine likes best, without the executor
stream LEVEL     everything is streamed, at one level; q2 is what KIVI does: a step a channel of keys, a token of values
cachegen         everything is streamed, at the best level with which the rest comes within the time of computing all
                 (CacheGen's ladder, without its last resort, text)
sparkv           the greedy schedule of the source by the mean bandwidth of the trace, changed while it runs
fixed            whole chunks in front are computed: as many as the mean bandwidth of the trace suggests
fixed-window     the same, from the mean of just the time in which the context comes, which nobody can know
bidirectional    whole chunks, computed from the front and streamed from the back, until both meet
ours LEVEL       see `remote/schedule`, at one level
ours             the same, at the levels that `remote/ladder` chooses within the default KL budget
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.baselines.streaming import Steering, all_compute, all_stream, fixed
from benchmarks.stream.traces import Trace
from benchmarks.waiting.published import published
from benchmarks.waiting.revise import revise
from benchmarks.waiting.schedule import bidirectional
from benchmarks.waiting.timeline import LinkCosts, order_of, start
from rekindle.core.cells import Cell, Progress, Schedule, Split
from rekindle.remote.latency import MIN_BANDWIDTH
from rekindle.settings import Settings

Kind = Literal["local", "plain", "stream", "cachegen", "sparkv", "fixed", "fixed-window", "bidirectional", "ours"]
LEVEL = "q5"  # of all rivals that both compute and stream, and of what a ratio means
LEVELS = ("raw", "q8", LEVEL, "q4", "q3", "q2")
QUICK_LEVELS = (LEVEL, "q3")
KL_BUDGET = Settings().kl_budget


@dataclass(frozen=True)
class StreamMode:
    """One way."""

    kind: Kind
    level: str | None = None  # None: nothing is streamed, or in several

    @property
    def name(self) -> str:
        """Its name in the report."""
        return f"{self.kind} {self.level}" if self.kind in ("stream", "ours") and self.level else self.kind


MODES = (
    StreamMode("local"),
    StreamMode("plain"),
    *(StreamMode("stream", level) for level in LEVELS),
    StreamMode("cachegen"),
    StreamMode("sparkv", LEVEL),
    StreamMode("fixed", LEVEL),
    StreamMode("fixed-window", LEVEL),
    StreamMode("bidirectional", LEVEL),
    StreamMode("ours", LEVEL),
    StreamMode("ours"),
)
_OURS = tuple(mode for mode in MODES if mode.kind == "ours")
_RIVALS = ("local", "plain", "fixed", "bidirectional")
MODE_SETS = {  # a unit each: ours is in all of them, for all that is compared is measured in turns
    "hybrids": tuple(m for m in MODES if m.kind in _RIVALS or (m.kind == "stream" and m.level == LEVEL)) + _OURS,
    "levels": tuple(mode for mode in MODES if mode.kind == "stream" and mode.level != LEVEL) + _OURS[-1:],
    "schedules": tuple(mode for mode in MODES if mode.kind in ("cachegen", "sparkv", "fixed-window")) + _OURS,
}
SIMULATED_MODES = tuple(mode for mode in MODES if mode.kind not in ("plain", "fixed-window"))
_FULL_ONLY = ("cachegen", "sparkv", "fixed-window")
QUICK_MODES = tuple(mode for mode in MODES if mode.kind not in _FULL_ONLY and mode.level in (None, LEVEL))
QUICK_SETS = {"hybrids": QUICK_MODES}


class Given:
    """A schedule that is not changed. Only when the link is dead the rest is computed, or it would never end."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def begin(self, costs: LinkCosts, progress: Progress) -> Schedule:  # noqa: ARG002
        """As given."""
        return self._schedule

    def revise(self, schedule: Schedule, progress: Progress, costs: LinkCosts) -> Schedule:
        """As it was."""
        return all_compute(costs, progress) if costs.bandwidth <= MIN_BANDWIDTH else schedule


class Sparkv(Given):
    """The schedule of the source, whose controller moves work between the lanes when one is about to run dry."""

    def __init__(self, costs: LinkCosts) -> None:
        """`costs` at the mean bandwidth."""
        super().__init__(published(costs, bidirectional(costs).seconds))

    def revise(self, schedule: Schedule, progress: Progress, costs: LinkCosts) -> Schedule:
        """As the controller says."""
        return revise(schedule, progress, costs)


class Meeting(Given):
    """Whole chunks from both ends: a lane that is free takes the next one that the other has not begun."""

    def __init__(self, costs: LinkCosts) -> None:
        self._schedule = self._now(start(costs.chunks), costs)

    def revise(self, schedule: Schedule, progress: Progress, costs: LinkCosts) -> Schedule:  # noqa: ARG002
        """What both do next."""
        return all_compute(costs, progress) if costs.bandwidth <= MIN_BANDWIDTH else self._now(progress, costs)

    @staticmethod
    def _now(progress: Progress, costs: LinkCosts) -> Schedule:
        chunks, layers = costs.chunks, costs.layers
        begun = progress.brought(layers)
        front = next((chunk for chunk, done in enumerate(progress.computed) if done < layers), chunks)
        if front < chunks and not begun[front].any():
            front += 1
        split = Split(layers, (layers,) * front + (0,) * (chunks - front))
        back = [Cell(chunk, layer) for chunk in reversed(range(front, chunks)) for layer in range(layers)]
        order = order_of(layers, [cell for cell in back if not begun[cell]])
        return Schedule(split, order, float("nan"))  # nobody asks how long


def steering_of(mode: StreamMode, costs: LinkCosts, trace: Trace, window_seconds: float) -> Steering | None:
    """Who decides in this way, None: as sessions do; `window_seconds` is how long the context would take to come."""
    if mode.kind == "ours":
        return None
    if mode.kind == "sparkv":
        return Sparkv(costs.at(max(trace.mean_rate, MIN_BANDWIDTH)))
    if mode.kind == "bidirectional":
        return Meeting(costs)
    if mode.kind == "local":
        return Given(all_compute(costs))
    if mode.kind in ("stream", "cachegen"):
        return Given(all_stream(costs))
    mean = trace.carried(0.0, window_seconds) / window_seconds if mode.kind == "fixed-window" else trace.mean_rate
    return Given(fixed(costs, max(mean, MIN_BANDWIDTH)))
