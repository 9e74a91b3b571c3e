"""What the scheduler's process and the workers tell each other, once a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.core.plan import Tier

BlockIds = tuple[tuple[int, ...], ...]  # of a request, by group of layers


@dataclass(frozen=True)
class BlockTransfer:
    """The KV of `span` of a request's `tokens`, between the store and the request's blocks."""

    request_id: str
    kv_space: KvSpace
    tokens: tuple[int, ...]
    span: Span
    block_ids: BlockIds
    number: int = 0  # of a save, to report it
    copied: bool = True  # of a load: what comes from a shared tier is copied to the folder
    ended: bool = False  # of a save: its request is over, and its blocks are free after it


@dataclass
class StepPlan:
    """What a worker has to do besides a step.

    loads     before the step if `by_layer`, else beside this step and later ones
    saves     what is in the blocks after the step
    reset     the model and the tenant whose KV is removed, first
    """

    loads: list[BlockTransfer] = field(default_factory=list)
    saves: list[BlockTransfer] = field(default_factory=list)
    by_layer: bool = False
    reset: tuple[str, str] | None = None


@dataclass
class WorkerReport:
    """What a worker did since the last report. Reports of several workers are added up.

    saved      the numbers of saves that are in the store, with the number of workers
    dropped    the numbers of saves that some worker has not stored
    load_times (tier, bytes, seconds) of each load
    unusable   why this worker neither loads nor saves
    """

    saved: Counter[int] = field(default_factory=Counter)
    dropped: set[int] = field(default_factory=set)
    load_times: list[tuple[Tier, int, float]] = field(default_factory=list)
    unusable: str | None = None

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Both reports as one."""
        return WorkerReport(
            self.saved + other.saved,
            self.dropped | other.dropped,
            self.load_times + other.load_times,
            self.unusable or other.unusable,
        )
