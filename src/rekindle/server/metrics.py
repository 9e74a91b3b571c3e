"""What Prometheus reads. Names and units are documented in docs/guide/server.md, by test.

What belongs to a tenant carries its name as a label. A tenant sees its own lines only; operators see all of them, and
those of the whole machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rekindle.core.reply import Reply
from rekindle.server.job import Event, Finished
from rekindle.server.keys import Caller
from rekindle.store import report

if TYPE_CHECKING:
    from rekindle.server.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One for each server."""

    def __init__(self, service: Service) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # nobody reads when a series began, and it doubles the lines
        self._registry = CollectorRegistry()
        self._machine = CollectorRegistry()
        self._machine.register(_Machine(service))
        self._requests = self._counter(
            "rekindle_requests", "Requests, by how they ended: stop, length, gone, 4xx, 5xx.", "outcome"
        )
        self._prompt = self._counter("rekindle_prompt_tokens", "Tokens of prompts, by where KV came from.", "source")
        self._written = self._counter("rekindle_generated_tokens", "Tokens of replies.")
        self._saved = self._counter("rekindle_saved_seconds", "Time that computing prompts would have taken, saved.")
        self._misses = self._counter("rekindle_misses", "Prompts that were not all known, by why.", "reason")
        self._first = self._histogram("rekindle_first_token_seconds", "From its turn to the first token.", "start")
        self._waited = self._histogram("rekindle_queue_seconds", "How long requests stood in line.")

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, ["tenant", *labels], registry=self._registry)

    def _histogram(self, name: str, help: str, *labels: str) -> Histogram:
        return Histogram(name, help, ["tenant", *labels], registry=self._registry, buckets=_SECONDS)

    def happened(self, tenant: str, event: Event, waited_seconds: float) -> None:
        """Count what happened to a request."""
        if isinstance(event, Finished):
            self._waited.labels(tenant).observe(waited_seconds)
            self._count(tenant, event.reply)

    def _count(self, tenant: str, reply: Reply) -> None:
        reuse = reply.reuse
        self._requests.labels(tenant, reply.finish_reason).inc()
        for source in ("engine", "memory", "disk", "computed"):
            self._prompt.labels(tenant, source).inc(getattr(reuse, source))
        if reuse.streamed:
            self._prompt.labels(tenant, "streamed").inc(reuse.streamed)
        if reuse.mended:
            self._prompt.labels(tenant, "mended").inc(reuse.mended - reuse.recomputed)
        self._written.labels(tenant).inc(reply.usage.completion_tokens)
        start = "warm" if reuse.reused > reuse.computed else "cold"
        self._first.labels(tenant, start).observe(reply.timings.first_token_seconds)
        if reuse.miss is not None:
            self._misses.labels(tenant, reuse.miss).inc()
        if reuse.cold_seconds is not None and reuse.predicted_seconds is not None and reuse.reused:
            self._saved.labels(tenant).inc(max(0.0, reuse.cold_seconds - reuse.predicted_seconds))

    def failed(self, tenant: str, outcome: str) -> None:
        """Count a request that ended otherwise."""
        self._requests.labels(tenant, outcome).inc()

    def text(self, caller: Caller) -> bytes:
        """All of it, or what belongs to the caller."""
        if caller.operator:
            return generate_latest(self._registry) + generate_latest(self._machine)
        return generate_latest(_OfTenant(self._registry, caller.tenant))


class _OfTenant:
    """The lines of a registry that belong to a tenant."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        self._registry = registry
        self._tenant = tenant

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            own = [sample for sample in family.samples if sample.labels.get("tenant") == self._tenant]
            if own:
                told = Metric(family.name, family.documentation, family.type)
                told.samples = own
                yield told


class _Machine:
    """What is measured when somebody looks: the cache, the line, the engine."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        """The families of the moment."""
        line, session = self._service.line, self._service.session
        yield _gauge("rekindle_running_requests", "Requests that are being answered.", line.running)
        yield _gauge("rekindle_queued_requests", "Requests that stand in line.", line.waiting)
        yield _counter("rekindle_refused_requests", "Requests refused because the line was full.", line.refused)
        yield _gauge("rekindle_model_loaded", "1 while the model is in memory, 0 while it rests.", not session.resting)
        keeper, store = session.cache.keeper, session.cache.store
        if keeper is not None:
            yield _gauge("rekindle_keep_backlog", "Jobs that wait to be written to the cache.", keeper.backlog)
            kept = CounterMetricFamily(
                "rekindle_keeps", "Jobs of the keeper, by what came of them.", labels=["outcome"]
            )
            for outcome, count in sorted(keeper.outcomes.items()):
                kept.add_metric([outcome], count)
            yield kept
        if store is None:
            return
        held = GaugeMetricFamily("rekindle_cache_bytes", "What a tier of the cache takes.", labels=["tier"])
        limits = GaugeMetricFamily("rekindle_cache_limit_bytes", "What a tier may take.", labels=["tier"])
        used = report.used_bytes(store.disk)
        for tier, size, limit in (
            ("memory", store.memory.size_bytes, store.memory.limit_bytes),
            ("disk", used, store.disk.room.limit_bytes(used)),
        ):
            held.add_metric([tier], size)
            limits.add_metric([tier], limit)
        evicted = CounterMetricFamily("rekindle_evicted_bytes", "Evicted from disk, by reason.", labels=["reason"])
        for reason in ("new", "limit", "expired", "killed"):
            evicted.add_metric([reason], store.disk.room.evicted_bytes[reason])
        yield from (held, limits, evicted)
        counts = store.counts
        yield _counter("rekindle_quarantined", "Entries set aside because they were damaged.", counts.quarantined)
        failures = CounterMetricFamily("rekindle_cache_failures", "Reads and writes that failed.", labels=["kind"])
        failures.add_metric(["read"], counts.read_failures)
        failures.add_metric(["write"], counts.write_failures)
        yield failures


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=float(value))


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=float(value))
