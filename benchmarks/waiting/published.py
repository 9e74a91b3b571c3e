"""The greedy schedule of the source: cells taken by priority, stage by stage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.waiting.timeline import LinkCosts, SearchTask
from rekindle.core.cells import Schedule

STAGES = (0.02, 0.1, 0.25, 0.5, 1.0)  # lengths of a stage, as shares of the time of meeting in the middle


def published(costs: LinkCosts, meeting_seconds: float) -> Schedule:
    """The schedule by the priorities of the source, with the stages that are best for them.

    In a stage computing takes ready cells, the highest priority first, until its time is used up; then streaming takes
    cells that are left. Priority: what a side does in a second, and so each cell that it makes ready to compute. A cell
    is ready when the one below it was computed, and the KV of its layer of all chunks before it is there; in the top
    layer that is not needed. A stage lasts as long as the longer side, or both go on in the order of need if sooner.
    """
    found = []
    for share in STAGES:
        stages = _Stages(costs)
        seconds = stages.run(share * meeting_seconds) + float(costs.question_seconds.sum())
        schedule = SearchTask.of(costs, None).schedule(stages.depths)
        found.append(replace(schedule, seconds=min(seconds, schedule.seconds)))
    return min(found, key=lambda schedule: schedule.seconds)


class _Stages:
    """Cells taken by priority, stage by stage."""

    def __init__(self, costs: LinkCosts) -> None:
        self._work = costs.compute_seconds.copy()  # [chunks, layers]
        self._work[:, -1] = costs.top_seconds[:, -1]
        self._link = costs.link_seconds
        self._there = np.zeros(self._work.shape, bool)
        self.depths = np.zeros(len(self._work), np.int64)  # [chunks] computed layers
        self._front = np.zeros(costs.layers, np.int64)  # [layers] the first chunk whose cell is not there

    def run(self, stage_seconds: float) -> float:
        """Until every cell is there. Returns the seconds of all stages."""
        total = 0.0
        while not self._there.all():
            computing = streaming = 0.0
            while computing < stage_seconds and (cell := self._next_computed()) is not None:
                computing += float(self._work[cell])
                self.depths[cell[0]] += 1
                self._arrive(*cell)
            while streaming < stage_seconds and not self._there.all():
                cell = self._next_streamed()
                streaming += float(self._link[cell])
                self._arrive(*cell)
            total += max(computing, streaming)
        return total

    def _arrive(self, chunk: int, layer: int) -> None:
        self._there[chunk, layer] = True
        if chunk == self._front[layer]:
            self._front[layer] = self._front_after(chunk, layer)

    def _next_computed(self) -> tuple[int, int] | None:
        best, highest = None, 0.0
        for chunk, layer in enumerate(self.depths.tolist()):
            if self._ready(chunk, layer):
                priority = 1 / self._work[chunk, layer] + self._unlocked(chunk, layer)
                if self._ready(chunk, layer + 1):
                    priority += 1 / self._work[chunk, layer + 1]
                if priority > highest:
                    best, highest = (chunk, layer), priority
        return best

    def _next_streamed(self) -> tuple[int, int]:
        priority = 1 / self._link
        for layer, chunk in enumerate(self._front.tolist()):
            if chunk < len(self._there):
                priority[chunk, layer] += self._unlocked(chunk, layer)
        best = int(np.where(self._there, -1.0, priority).argmax())
        return divmod(best, int(priority.shape[1]))

    def _ready(self, chunk: int, layer: int) -> bool:
        """Whether a cell can be computed once those below it are."""
        last = len(self._front) - 1
        return layer <= last and not self._there[chunk, layer] and (layer == last or self._front[layer] >= chunk)

    def _unlocked(self, chunk: int, layer: int) -> float:
        """What a cell makes ready in its own layer."""
        if layer == len(self._front) - 1 or self._front[layer] != chunk:
            return 0.0
        after = self._front_after(chunk, layer)
        ready = after < len(self._there) and self.depths[after] == layer
        return 1 / float(self._work[after, layer]) if ready else 0.0

    def _front_after(self, chunk: int, layer: int) -> int:
        missing = ~self._there[chunk + 1 :, layer]
        return chunk + 1 + (int(missing.argmax()) if missing.any() else len(missing))
