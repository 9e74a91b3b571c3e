"""The worker's side of the connector: KV between the store and vLLM's blocks.

Loads run on a thread of their own. Layers are read into memory of ours, checked, and only then copied to the blocks: a
read that comes too late touches nothing. Saves copy a layer at the end of its attention; the store's writer writes them
in the background.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rekindle.cache.deadline import DeadlineCaller, NoAnswer
from rekindle.cache.prefix_cache import CLOSE_SECONDS
from rekindle.cache.stored_kv import LOAD_SECONDS
from rekindle.cache.writer import BackgroundWriter, WriteJob
from rekindle.core.keys import BLOCK_TOKENS, KvSpace
from rekindle.core.kv import Kv, LayerKv, LayerShape
from rekindle.core.plan import SHARED_TIERS
from rekindle.engine.hf.sequence import TORCH_TYPE, raw_view
from rekindle.errors import CacheUnusable, KvLost
from rekindle.store.feed import StoredFeed
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore
from rekindle.vllm.block_planner import rank_space, tier_of
from rekindle.vllm.paged_kv import NULL_BLOCK, PagedLayer
from rekindle.vllm.served_model import ServedLayers
from rekindle.vllm.step_plan import BlockTransfer, StepPlan, WorkerReport

log = logging.getLogger("rekindle.vllm")

T = TypeVar("T")
_SLOWEST_BYTES = 100e6  # per second: a slower cache is not waited for
_TOGETHER_BYTES = 4 << 20  # of layers that are read at once: each question changes threads twice
_LOADERS = 2  # requests whose KV is loaded at the same time
_QUIET_STEPS = 4  # without saves after a load by layers failed: steps in flight computed with what it left


class _Loading:
    """A load under way: the first `layers` are in the blocks. After it has ended, `error` says why it failed, if so."""

    def __init__(self, plan: BlockTransfer) -> None:
        self.plan = plan
        self.error: str | None = "It has not ended."
        self.ended = False
        self._layers = 0
        self._changed = threading.Condition()

    def advance(self, layers: int) -> None:
        with self._changed:
            self._layers = layers
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def wait(self, layers: int | None = None) -> None:
        """Wait until that number of layers are there, or until it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self.ended or (layers is not None and self._layers >= layers))


class BlockStore:
    """Called by the worker's thread. `unusable` says why nothing is loaded or saved, if that is so."""

    def __init__(self, store: TieredStore, layers: ServedLayers, rank: int, ranks: int) -> None:
        self._store, self._layers, self._rank, self._ranks = store, layers, rank, ranks
        self._numbers = {layer.name: number for number, layer in enumerate(layers.layers)}
        self._paged: Mapping[str, PagedLayer] = {}
        self.unusable: str | None = "its KV was not registered"
        self._counts: Counter[str] = Counter()
        self._deadlines = {False: DeadlineCaller(), True: DeadlineCaller()}  # of the folder, and of shared tiers
        self._writer = BackgroundWriter(store)
        self._loader = ThreadPoolExecutor(_LOADERS, "rekindle-load")
        self._lock = threading.Lock()  # of the next two, which threads fill
        self._report = WorkerReport()
        self._loading: dict[str, _Loading] = {}
        self._by_layer: list[_Loading] = []  # of this step
        self._copies: dict[int, dict[int, LayerKv]] = {}  # by the number of a save, by layer
        self._failed_blocks: set[int] = set()
        self._quiet_steps = 0

    def register(self, paged: Mapping[str, PagedLayer | None]) -> None:
        """vLLM's memory, by layer. None: its layout is unknown."""
        unknown = [name for name in self._numbers if paged.get(name) is None]
        self.unusable = f"the layout of vLLM's KV in {unknown[0]} is unknown." if unknown else None
        self._report.unusable = self.unusable
        self._paged = {name: layer for name, layer in paged.items() if layer is not None}

    def shape(self, name: str) -> LayerShape | None:
        """The shape of a layer's KV; None for a layer without."""
        return self._layers.layers[self._numbers[name]].shape if name in self._numbers else None

    # -- loads ---------------------------------------------------------------------------------------------------

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the loads of a step."""
        if plan.reset is not None:
            self._reset(*plan.reset)
        self._by_layer = []
        for load in plan.loads:
            loading = _Loading(load)
            if plan.by_layer:
                self._by_layer.append(loading)
            self._loading[load.request_id] = loading
            self._loader.submit(self._load, loading)

    def wait_for_layer(self, name: str) -> None:
        """Wait until the loads that this step needs have brought a layer, or failed."""
        for loading in self._by_layer if name in self._numbers else ():
            loading.wait(self._numbers[name] + 1)

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """The requests whose loads have ended since the last call, and those of them whose loads failed.

        Failed blocks of both kinds of loads are then in `take_failed_blocks`.
        """
        ended = {request_id: loading for request_id, loading in self._loading.items() if loading.ended}
        for request_id in ended:
            del self._loading[request_id]
        failed = {request_id for request_id, loading in ended.items() if loading.error is not None}
        for request_id in failed:
            self._failed_blocks |= self._blocks(ended[request_id].plan) - {NULL_BLOCK}
        by_layer = {loading.plan.request_id for loading in self._by_layer}
        return {*ended} - by_layer, failed - by_layer

    def take_failed_blocks(self) -> set[int]:
        """The blocks that failed loads have not filled."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _blocks(self, plan: BlockTransfer) -> set[int]:
        """The blocks with tokens of the span, of all groups."""
        pairs = zip(plan.block_ids, self._layers.group_tokens, strict=True)
        return {i for ids, size in pairs for i in ids[plan.span.start // size : -(-plan.span.stop // size)]}

    def _load(self, loading: _Loading) -> None:
        began, size_bytes = time.monotonic(), len(loading.plan.span) * loading.plan.kv_space.layout.token_bytes
        try:
            match = self._fill(loading)
            seconds = time.monotonic() - began
            with self._lock:
                self._report.load_times.append((tier_of(match), size_bytes, seconds))
                self._counts.update(loads=1, loaded_tokens=len(loading.plan.span), loaded_bytes=size_bytes)
                self._counts["load_ms"] += round(seconds * 1000)
            loading.error = None
        except (NoAnswer, KvLost) as error:
            loading.error = str(error)
            log.info("computing instead: %s", error)
        finally:
            if loading.error is not None:
                with self._lock:
                    self._counts["failed_loads"] += 1
            loading.end()

    def _fill(self, loading: _Loading) -> Match:
        """Read every layer and copy it to the blocks; returns what was read. Raises `NoAnswer`, `KvLost`."""
        plan = loading.plan
        if self.unusable is not None:
            raise KvLost(self.unusable)
        kv_space = rank_space(plan.kv_space, self._rank, self._ranks)
        start = plan.span.start - plan.span.start % BLOCK_TOKENS
        match = self._ask(lambda: self._store.lookup(kv_space, plan.tokens))
        if match.length < plan.span.stop:
            match = self._ask(lambda: self._store.shared.extend(kv_space, match, SHARED_TIERS), shared=True)
        if match.length < plan.span.stop:
            raise KvLost("It was evicted meanwhile.")
        match = match.since(start)
        shared = any(piece.tier is not None for piece in match.pieces)
        copies: list[LayerKv] = []
        try:
            with self._ask(lambda: self._store.load(kv_space, match), shared=shared) as feed:
                layers, size_bytes = self._layers.layers, len(feed.span) * kv_space.layout.token_bytes
                together = max(1, _TOGETHER_BYTES * len(layers) // size_bytes)
                for first in range(0, len(layers), together):
                    some = layers[first : first + together]
                    staged = [self._staged(layer.shape, len(feed.span)) for layer in some]
                    out = [LayerKv(raw_view(keys), raw_view(values)) for keys, values in staged]
                    fill = partial(_fill_layers, feed, first, out)
                    self._ask(fill, size_bytes * len(some) // len(layers), shared=shared)
                    for layer, (keys, values) in zip(some, staged, strict=True):
                        place = plan.block_ids[layer.group], self._layers.group_tokens[layer.group], plan.span
                        skip = plan.span.start - start
                        self._paged[layer.name].write(*place, keys[:, skip:], values[:, skip:])
                    copies += out if shared else []
                    loading.advance(first + len(some))
        except NoAnswer:
            with suppress(NoAnswer):  # the catalog learns what is damaged before the scheduler looks again
                self._ask(self._store.maintain)
            raise
        self._store.record_use(match)
        if shared and plan.copied:
            self._keep(kv_space, plan.tokens, Kv(feed.span, kv_space.layout, tuple(copies)))
        return match

    def _keep(self, kv_space: KvSpace, tokens: tuple[int, ...], kv: Kv) -> None:
        """Copy what came from a shared tier to the folder, where it is found next time."""
        job = WriteJob(kv_space, tokens, lambda _: kv, known=kv.span.start)
        job.detach()
        job.shared_tokens = kv.span.stop
        self._writer.offer(job)

    def _ask(self, question: Callable[[], T], size_bytes: int = 0, *, shared: bool = False) -> T:
        """Ask the folder, or a shared tier: while one hangs, the other is asked."""
        return self._deadlines[shared].ask(question, LOAD_SECONDS + size_bytes / _SLOWEST_BYTES)

    def _staged(self, shape: LayerShape, tokens: int) -> tuple[Tensor, Tensor]:
        dtype = TORCH_TYPE[self._layers.dtype]
        keys = torch.empty(shape.kv_heads, tokens, shape.key_dim, dtype=dtype)
        return keys, torch.empty(shape.kv_heads, tokens, shape.value_dim, dtype=dtype)

    # -- saves ---------------------------------------------------------------------------------------------------

    def copy_layer(self, name: str, saves: Sequence[BlockTransfer]) -> None:
        """Copy a layer's KV for the saves of this step: its attention has just written it."""
        number = self._numbers.get(name)
        if number is None or self.unusable is not None:
            return
        group = self._layers.layers[number].group
        for save in saves:
            if number not in (copies := self._copies.setdefault(save.number, {})):
                place = save.block_ids[group], self._layers.group_tokens[group], save.span
                copies[number] = self._paged[name].read(*place)

    def finish_saves(self, saves: Sequence[BlockTransfer]) -> set[str]:
        """Queue the saves of this step for writing; returns the requests that are over, whose blocks may go."""
        for name in self._numbers if saves else ():
            self.copy_layer(name, saves)  # what no attention has announced: steps without tokens, CUDA graphs
        self._quiet_steps = max(0, self._quiet_steps - 1)
        for loading in self._by_layer:
            loading.wait()
            self._quiet_steps = self._quiet_steps if loading.error is None else _QUIET_STEPS
        for save in saves:
            copies = self._copies.pop(save.number, {})
            if self._quiet_steps or self.unusable is not None or NULL_BLOCK in self._blocks(save):
                self._note_written(save, kept=False)
                continue
            layers = tuple(copies[number] for number in range(len(self._numbers)))
            self._write(save, Kv(save.span, save.kv_space.layout, layers))
        return {save.request_id for save in saves if save.ended}

    def _write(self, save: BlockTransfer, kv: Kv) -> None:
        kv_space = rank_space(save.kv_space, self._rank, self._ranks)
        job = WriteJob(kv_space, save.tokens, lambda _: kv, known=save.span.start)
        job.detach()

        def written() -> None:
            self._note_written(save, kept=job.kept)
            if job.kept:
                self._store.shared.later(partial(self._store.shared.share, kv_space, save.tokens))

        job.then = written
        if not self._writer.offer(job):
            self._note_written(save, kept=False)

    def _note_written(self, save: BlockTransfer, *, kept: bool) -> None:
        with self._lock:
            if kept:
                self._report.saved[save.number] += 1
                self._counts["saved_tokens"] += len(save.span)
            else:
                self._report.dropped.add(save.number)
                self._counts["dropped_saves"] += 1

    def _reset(self, identity: str, tenant: str) -> None:
        """Remove a model's KV once more, after all that was queued before the scheduler removed it."""
        try:
            self.flush(CLOSE_SECONDS)
            self._store.remove_model(identity, tenant)
        except CacheUnusable as error:
            log.warning("%s", error)

    # -- the rest ------------------------------------------------------------------------------------------------

    def take_report(self) -> WorkerReport:
        """What happened since the last report."""
        with self._lock:
            report, self._report = self._report, WorkerReport(unusable=self.unusable)
        return report

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        with self._lock:
            counts = dict(self._counts)
            self._counts.clear()
        return counts

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything saved is written, to shared tiers too; False if that takes longer."""
        deadline = time.monotonic() + timeout_seconds
        return self._writer.flush(timeout_seconds) and self._store.shared.flush(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Write what is queued, within a time limit, and close the store."""
        self._loader.shutdown(cancel_futures=True)
        for deadline in self._deadlines.values():
            deadline.close()
        if self._writer.close(CLOSE_SECONDS):
            self._store.shared.flush(CLOSE_SECONDS)
            self._store.close()


def _fill_layers(feed: StoredFeed, first: int, out: Sequence[LayerKv]) -> None:
    for number, kv in enumerate(out, first):
        feed.fill(number, kv)
