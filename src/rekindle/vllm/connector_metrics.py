"""What the connector counts, in vLLM's log and at its /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "loads": "Requests whose KV was loaded.",
    "loaded_tokens": "Tokens whose KV was loaded.",
    "loaded_bytes": "Bytes of KV that were loaded.",
    "load_ms": "Milliseconds that loads took.",
    "failed_loads": "Loads that failed: their tokens were computed.",
    "refused_loads": "Lookups that found KV which is computed faster than it is loaded.",
    "saved_tokens": "Tokens whose KV was stored.",
    "dropped_saves": "Saves that were not stored.",
}


class ConnectorCounts(KVConnectorStats):
    """Counts since the last report, by name. Those of several workers are added up."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        names = {*self.data, *other.data}
        self.data = {name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in COUNTERS if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorCounters(KVConnectorPromMetrics):
    """The counts as counters `vllm:rekindle_NAME` with vLLM's own labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        counters = {
            name: self._counter_cls(name=f"vllm:rekindle_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._by_engine = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._by_engine[engine_idx][name].inc(count)
