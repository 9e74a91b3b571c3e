"""The scheduler's side of the connector: which tokens of a request are stored, and what its workers load and save.

A request is looked up before its blocks are allocated. Its prompt is saved as it is computed: after a step up to its
last whole block, at the end of the prompt to its last token. When the request ends, what is new of its reply is saved
before its blocks are freed.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rekindle.cache.deadline import DeadlineCaller, NoAnswer
from rekindle.cache.stored_kv import SHARED_LOOKUP_SECONDS
from rekindle.core.keys import BLOCK_TOKENS, KvSpace, Namespace
from rekindle.core.kv import Span
from rekindle.core.plan import MARGIN, SHARED_TIERS, SharedTierName, Tier
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import CacheUnusable, RekindleError
from rekindle.settings import Settings
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore
from rekindle.vllm.served_model import VllmModel
from rekindle.vllm.step_plan import BlockIds, BlockTransfer, StepPlan, WorkerReport

log = logging.getLogger("rekindle.vllm")

# A shorter beginning that a shared tier has is saved with the rest of its prompt: prompts in pieces load slower.
_COPIED_TOKENS = 256


class VllmRequest(Protocol):
    """The part of vLLM's requests that is read here."""

    request_id: str
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    cache_salt: str | None
    lora_request: Any
    mm_features: Sequence[Any]
    prompt_embeds: Any


@dataclass
class _Tracked:
    """A request that may be loaded and saved.

    computed     tokens that vLLM had when it was looked up
    saved        tokens that are stored, or on their way to the store
    preemptions  how often it was preempted before its last load: a load that failed is not tried again
    """

    request: VllmRequest
    kv_space: KvSpace
    computed: int
    saved: int
    preemptions: int | None = None


class BlockPlanner:
    """Used by the scheduler's thread alone. Nothing here raises because of the store.

    by_layer    workers load during the step that needs the KV, layer by layer, instead of before it
    whole       only multiples of this number of tokens are loaded
    on_stored   called with a request and a span of its tokens when all workers have stored it
    """

    def __init__(
        self,
        store: TieredStore,
        model: VllmModel,
        settings: Settings,
        *,
        by_layer: bool = False,
        whole: int = 1,
        on_stored: Callable[[VllmRequest, Span], None] | None = None,
    ) -> None:
        self._store, self._model, self._settings = store, model, settings
        self.by_layer, self._whole, self._on_stored = by_layer, whole, on_stored
        self.unusable: str | None = None  # why workers neither load nor save
        self._deadline = DeadlineCaller()
        self._refused_loads = 0
        self._adapters: dict[tuple[int, str], str | None] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._plan = StepPlan(by_layer=by_layer)  # of the next step
        self._writing: dict[int, tuple[VllmRequest, Span]] = {}
        self._written: Counter[int] = Counter()  # by how many workers
        self._numbers = 0
        self._steps_in_flight = 0
        self._timed: tuple[Span, float] | None = None  # a step that computes one prompt alone, and when it began

    def matched(self, request: VllmRequest, computed: int) -> int:
        """The number of tokens after the first `computed` that are stored, and loaded faster than computed."""
        kv_space = self._kv_space(request)
        if kv_space is None:
            return 0
        match = self._lookup(kv_space, request.all_token_ids[:-1])
        known, here = self._tracked.get(request.request_id), _in_folder(match)
        if known is None:
            known = self._tracked[request.request_id] = _Tracked(request, kv_space, computed, here)
        known.computed, known.saved = computed, min(known.saved, here)  # less, if what was loaded was damaged
        stop = match.length - match.length % self._whole
        if stop <= computed or known.preemptions == request.num_preemptions:
            return 0
        worth = self._worth_loading(match.until(stop), computed, len(request.all_token_ids))
        return stop - computed if worth else 0

    def admitted(self, request: VllmRequest, block_ids: BlockIds, external: int) -> None:
        """A request got blocks, and `external` tokens after those computed are to be loaded."""
        known = self._tracked.get(request.request_id)
        if known is None or not external:
            return
        known.preemptions = request.num_preemptions
        span = Span(known.computed, known.computed + external)
        copied = span.stop >= _COPIED_TOKENS or self._whole > 1  # else vLLM may have dropped what lies before a window
        if copied:
            known.saved = max(known.saved, span.stop)
        tokens = tuple(request.all_token_ids[: span.stop])
        load = BlockTransfer(request.request_id, known.kv_space, tokens, span, block_ids, copied=copied)
        self._plan.loads.append(load)

    def step(self, scheduled: Mapping[str, int], block_ids: Callable[[str], BlockIds]) -> StepPlan:
        """The plan of a step that computes these numbers of tokens of requests."""
        plan, self._plan = self._plan, StepPlan(by_layer=self.by_layer)
        for request_id, count in scheduled.items():
            known = self._tracked.get(request_id)
            if known is None:
                continue
            prompt = known.request.num_prompt_tokens
            stop = known.request.num_computed_tokens + count
            stop = prompt if stop >= prompt else stop - stop % BLOCK_TOKENS
            if stop > known.saved:
                plan.saves.append(self._save(known, stop, block_ids(request_id)))
        self._time(scheduled, loads=bool(plan.loads))
        return plan

    def finished(self, request: VllmRequest, block_ids: BlockIds) -> bool:
        """A request is over. Whether its blocks must stay until a worker reports it as saved."""
        known = self._tracked.pop(request.request_id, None)
        stop = len(request.all_token_ids) - 1  # the last token was never computed
        if known is None or self.unusable is not None or stop < request.num_prompt_tokens:
            return False
        if stop - known.saved < BLOCK_TOKENS or request.num_computed_tokens < stop or not all(block_ids):
            return False
        self._plan.saves.append(replace(self._save(known, stop, block_ids), ended=True))
        return True

    def _save(self, known: _Tracked, stop: int, block_ids: BlockIds) -> BlockTransfer:
        """A save from the last whole stored block on."""
        span = Span(known.saved - known.saved % BLOCK_TOKENS, stop)
        known.saved = stop
        self._numbers += 1
        if self._on_stored is not None:
            self._writing[self._numbers] = known.request, span
        tokens = tuple(known.request.all_token_ids[:stop])
        return BlockTransfer(known.request.request_id, known.kv_space, tokens, span, block_ids, self._numbers)

    def report(self, report: WorkerReport | None) -> None:
        """The workers have ended a step."""
        self._steps_in_flight = max(0, self._steps_in_flight - 1)
        if self._timed is not None:
            (span, began), self._timed = self._timed, None
            self._model.costs.computed(span, time.monotonic() - began)
        if report is None:
            return
        if report.unusable is not None and self.unusable is None:
            self.unusable = report.unusable
            log.warning("vLLM computes everything: %s", report.unusable)
        for tier, size_bytes, seconds in report.load_times:
            self._model.costs.loaded(tier, size_bytes, seconds)
        for number in report.dropped:
            self._writing.pop(number, None)
            self._written.pop(number, None)
        for number, workers in report.saved.items():
            if number in self._writing:
                self._note_written(number, workers)

    def _note_written(self, number: int, workers: int) -> None:
        self._written[number] += workers
        if self._written[number] >= self._model.ranks and self._on_stored is not None:
            del self._written[number]
            self._on_stored(*self._writing.pop(number))

    @property
    def writing(self) -> bool:
        """Whether somebody waits to be notified of what is being stored."""
        return bool(self._writing)

    def reset(self) -> bool:
        """Remove all KV of the model, and what its workers have queued; False if not all could be removed."""
        self._plan.reset = self._model.identity, self._settings.tenant
        self._writing.clear()
        self._tracked.clear()  # what requests have computed so far is not stored either
        nothing = [replace(save, span=Span(save.span.stop, save.span.stop)) for save in self._plan.saves]
        self._plan.saves = nothing  # their blocks still have to be freed
        try:
            self._store.remove_model(*self._plan.reset)
        except CacheUnusable as error:
            log.warning("%s", error)
            return False
        return True

    def take_counts(self) -> dict[str, int]:
        """What was counted since the last call."""
        count, self._refused_loads = self._refused_loads, 0
        return {"refused_loads": count} if count else {}

    def close(self) -> None:
        """Close the store."""
        self._deadline.close()
        self._store.close()

    def _time(self, scheduled: Mapping[str, int], *, loads: bool) -> None:
        """Measure a step if it computes part of one prompt, nothing is loaded, and no other step runs."""
        self._steps_in_flight += 1
        if self._steps_in_flight == 1 and len(scheduled) == 1 and not loads:
            ((request_id, count),) = scheduled.items()
            known = self._tracked.get(request_id)
            start = 0 if known is None else known.request.num_computed_tokens
            if known is not None and start + count <= known.request.num_prompt_tokens:
                self._timed = Span(start, start + count), time.monotonic()

    def _kv_space(self, request: VllmRequest) -> KvSpace | None:
        """The KV space of a request; None if its tokens and its adapter do not determine its KV."""
        if self.unusable is not None or request.mm_features or request.prompt_embeds is not None:
            return None
        adapter = None if request.lora_request is None else self._adapter(request.lora_request)
        if request.lora_request is not None and adapter is None:
            return None
        salt = self._settings.cache_salt if request.cache_salt is None else request.cache_salt
        namespace = Namespace(self._model.identity, self._settings.tenant, salt)
        return KvSpace(namespace, self._model.layout, adapter, model=self._model.name)

    def _adapter(self, lora: Any) -> str | None:
        """The digest of an adapter's matrices, read once; None if it cannot be read."""
        key = (lora.lora_int_id, lora.lora_path)
        if key not in self._adapters:
            try:
                self._adapters[key] = read_adapter(lora.lora_path).digest
            except (RekindleError, OSError) as error:
                log.warning("Nothing is reused or kept with the adapter %s: %s", lora.lora_name, error)
                self._adapters[key] = None
        return self._adapters[key]

    def _lookup(self, kv_space: KvSpace, tokens: Sequence[int]) -> Match:
        """The longest prefix that every worker finds, on shared tiers too where they are expected to be worth it."""
        spaces = [rank_space(kv_space, rank, self._model.ranks) for rank in range(self._model.ranks)]
        found = [self._store.lookup(space, tokens) for space in spaces]
        names = self._tiers_to_ask(Span(min(match.length for match in found), len(tokens)))
        if names:
            extend = self._store.shared.extend
            with suppress(NoAnswer):  # then without them
                found = self._deadline.ask(
                    lambda: [extend(*pair, names) for pair in zip(spaces, found, strict=True)], SHARED_LOOKUP_SECONDS
                )
        return min(found, key=lambda match: match.length)

    def _tiers_to_ask(self, missing: Span) -> list[SharedTierName]:
        rates, size_bytes = self._model.costs.rates, len(missing) * self._model.layout.token_bytes
        limit = rates.compute_seconds(missing) if missing else 0.0
        tiers = [tier.name for tier in self._store.shared.tiers if tier.answers]
        return [name for name in tiers if rates.load_seconds(name, size_bytes) < limit]

    def _worth_loading(self, match: Match, computed: int, count: int) -> bool:
        """Whether a prompt of `count` tokens ends sooner if what is stored after `computed` is loaded."""
        tier, rates = tier_of(match), self._model.costs.rates
        size_bytes = (match.length - computed) * self._model.layout.token_bytes
        saved_seconds = rates.compute_seconds(Span(computed, count)) - rates.compute_seconds(Span(match.length, count))
        if rates.certain_seconds([(tier, size_bytes)]) <= MARGIN * saved_seconds:
            return True
        self._refused_loads += 1
        return False


def _in_folder(match: Match) -> int:
    """The number of its tokens before the first that a shared tier has."""
    return next((piece.span.start for piece in match.pieces if piece.tier is not None), match.length)


def tier_of(match: Match) -> Tier:
    """Where the pieces of a match are, for what loading them costs: the slowest of their tiers."""
    shared = [piece.tier for piece in match.pieces if piece.tier is not None]
    if shared:
        return max(shared, key=SHARED_TIERS.index)
    return "disk" if all(piece.coding == "raw" for piece in match.pieces) else "coded"


def rank_space(kv_space: KvSpace, rank: int, ranks: int) -> KvSpace:
    """The KV space of one of several workers that hold a part of the heads each."""
    return kv_space if ranks == 1 else replace(kv_space, codec=f"{kv_space.codec}/rank {rank} of {ranks}")
