"""The connector that vLLM loads: its interface over `BlockPlanner` in the scheduler, `BlockStore` in each worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor
from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from rekindle.cache.open_store import open_store
from rekindle.core.kv import Span
from rekindle.errors import InvalidSetting, ModelError, nearest
from rekindle.settings import Settings
from rekindle.settings.keywords import CacheSettings
from rekindle.vllm.block_planner import BlockPlanner
from rekindle.vllm.block_store import BlockStore
from rekindle.vllm.connector_metrics import ConnectorCounters, ConnectorCounts
from rekindle.vllm.paged_kv import paged_layer
from rekindle.vllm.served_model import ServedLayers, served_layers, served_model
from rekindle.vllm.step_plan import StepPlan

log = logging.getLogger("rekindle.vllm")

_LOADS = ("async", "layers")


class RekindleConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV of vLLM in Rekindle's store. Its extra config are the settings of a cache, and `load`.

    What it cannot keep (a Mamba layer, say) it leaves to vLLM, and says so in the log once: requests never fail because
    of it.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # vLLM's default fails a request whose load fails. It reads this after the connector is made.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        settings, load = _settings(self._kv_transfer_config.kv_connector_extra_config)
        self._planner: BlockPlanner | None = None
        self._blocks: BlockStore | None = None
        self._events: list[KVCacheEvent] = []
        self._ended: set[str] = set()  # requests whose saves are copied
        self._plan = StepPlan()
        self._group_tokens: tuple[int, ...] = ()
        try:
            layers = served_layers(kv_cache_config)
            self._group_tokens = layers.group_tokens
            if role == KVConnectorRole.SCHEDULER:
                self._planner = self._make_planner(layers, settings, load)
            else:
                self._blocks = self._make_blocks(layers, settings)
        except ModelError as error:
            log.warning("vLLM computes everything: %s", error)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not saved is computed again

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return extra_config.get("load") == "layers"

    def _make_planner(self, layers: ServedLayers, settings: Settings, load: str) -> BlockPlanner | None:
        config = self._vllm_config
        model = served_model(config, layers)
        store = open_store(settings, share=0.0)  # memory is for the workers, who read
        if store is None:
            return None
        hybrid = len(layers.group_tokens) > 1  # whose loads can fail as a whole only, and end with a block
        events = config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events
        return BlockPlanner(
            store,
            model,
            settings,
            by_layer=load == "layers" and not hybrid,
            whole=max(layers.group_tokens) if hybrid else 1,
            on_stored=self._note_stored if events else None,
        )

    def _make_blocks(self, layers: ServedLayers, settings: Settings) -> BlockStore | None:
        parallel = self._vllm_config.parallel_config
        ranks = parallel.tensor_parallel_size
        store = open_store(settings, share=1.0 / ranks)
        return None if store is None else BlockStore(store, layers, parallel.rank % ranks, ranks)

    # -- the scheduler's side ------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if self._planner is None:
            return 0, False
        count = self._planner.matched(request, num_computed_tokens)
        wanted = count > 0 and self._kv_transfer_config.is_kv_consumer
        return (count, not self._planner.by_layer) if wanted else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._planner is not None:
            self._planner.admitted(request, _tuples(blocks.get_block_ids()), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        if self._planner is None:
            return StepPlan()
        table = scheduler_output.kv_connector_block_state
        plan = self._planner.step(
            scheduler_output.num_scheduled_tokens, lambda request_id: _tuples(table.get_block_ids(request_id))
        )
        if not self._kv_transfer_config.is_kv_producer:
            plan.saves.clear()
        return plan

    def update_connector_output(self, connector_output: Any) -> None:
        if self._planner is not None:
            self._planner.report(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._planner is None or not self._kv_transfer_config.is_kv_producer:
            return False, None
        return self._planner.finished(request, _tuples(block_ids)), None

    def take_events(self) -> Iterable[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def has_pending_push_work(self) -> bool:
        return self._planner is not None and self._planner.writing

    def reset_cache(self) -> bool | None:
        return None if self._planner is None else self._planner.reset()

    def _note_stored(self, request: Any, span: Span) -> None:
        """Announce the blocks of vLLM's that the store now has as a whole."""
        size = self._kv_cache_config.hash_block_size or self._group_tokens[0]
        first, last = span.start // size, span.stop // size
        hashes = [maybe_convert_block_hash(block_hash) for block_hash in request.block_hashes[:last]]
        if first >= len(hashes):
            return
        lora = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=hashes[first:],
                parent_block_hash=hashes[first - 1] if first else None,
                token_ids=list(request.all_token_ids[first * size : len(hashes) * size]),
                block_size=size,
                lora_id=None if lora is None else lora.adapter_id,
                medium=MEDIUM_STORAGE,
                lora_name=None if lora is None else lora.name,
            )
        )

    # -- the worker's side ---------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        if self._blocks is None:
            return
        modules = self._vllm_config.compilation_config.static_forward_context
        paged = {}
        for name, layer in kv_caches.items():
            write = getattr(getattr(modules.get(name), "impl", None), "do_kv_cache_update", None)
            shape = self._blocks.shape(name)
            if write is not None and shape is not None:
                put = partial(_write_slots, write, modules[name], layer)
                paged[name] = paged_layer(layer, shape.key_dim, put)
        self._blocks.register(paged)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._plan = connector_metadata

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        if self._blocks is not None:
            self._blocks.start_loads(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._blocks is not None:
            self._blocks.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **_: Any) -> None:
        if self._blocks is not None:
            self._blocks.copy_layer(layer_name, self._plan.saves)

    def wait_for_save(self) -> None:
        if self._blocks is not None:
            self._ended |= self._blocks.finish_saves(self._plan.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended, self._ended = self._ended, set()
        if self._blocks is None:
            return KVConnectorTransferResults(finished_sending=ended)
        loaded, failed = self._blocks.finished_loads()
        hybrid = len(self._group_tokens) > 1
        return KVConnectorTransferResults(ended, loaded, failed if hybrid else set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = set() if self._blocks is None else self._blocks.take_failed_blocks()
        return failed if len(self._group_tokens) == 1 else set()

    def build_connector_worker_meta(self) -> Any:
        return None if self._blocks is None else self._blocks.take_report()

    # -- both ----------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        side = self._planner or self._blocks
        counts = {} if side is None else side.take_counts()
        return ConnectorCounts(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return ConnectorCounts(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics:
        return ConnectorCounters(*args)

    def shutdown(self) -> None:
        for side in (self._planner, self._blocks):
            if side is not None:
                side.close()


def _settings(extra: dict[str, Any]) -> tuple[Settings, str]:
    """The settings of the store, and how KV is loaded. Raises `InvalidSetting`."""
    given = dict(extra)
    load = given.pop("load", "async")
    if load not in _LOADS:
        raise InvalidSetting(f"load={load!r} is unknown. Use {' or '.join(_LOADS)}.")
    for name in given:
        if name not in CacheSettings.__annotations__:
            known = [*CacheSettings.__annotations__, "load"]
            raise InvalidSetting(f"Unknown setting {name!r} in kv_connector_extra_config.{nearest(name, known)}")
    settings = Settings.load(given)
    if settings.reuse in ("quantized", "approximate"):
        raise InvalidSetting(
            f"reuse={settings.reuse!r} may change a text, and vLLM's replies cannot say so. Leave it out."
        )
    return settings, load


def _tuples(block_ids: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, block_ids))


def _write_slots(write: Any, module: Any, layer: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    write(module, keys, values, layer, slots)
