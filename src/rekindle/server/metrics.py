"""Prometheus metrics. A test checks that docs/guide/server.md documents all names and units.

Metrics of a tenant carry its name as a label, and whether the request used another salt than the server's own: not
which, because there may be any number of them. A tenant sees its own lines only, without those of its salts; operators
see all lines, and those of the whole machine.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rekindle.core.reply import Reply
from rekindle.core.scope import Scope
from rekindle.server.admission_queue import AdmissionQueue
from rekindle.server.auth import Caller
from rekindle.server.job import Event, Finished
from rekindle.session.session import Session
from rekindle.store import report
from rekindle.store.tiered import TieredStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_SALTED = "no"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class MeasuredService(Protocol):
    """What metrics read of the service of a model."""

    model: str
    session: Session
    line: AdmissionQueue


class Metrics:
    def __init__(self, own_salt: str, models: Sequence[str], services: Callable[[], Sequence[MeasuredService]]) -> None:
        """`own_salt` is the server's own, `models` are the names of all, `services` returns those of the open ones."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the time a series began is unused, and doubles the lines
        self._own_salt = own_salt
        self._registry = CollectorRegistry()
        self._machine = CollectorRegistry()
        self._machine.register(_Machine(models, services))
        self._requests = self._counter(
            "rekindle_requests",
            "Requests, by how they ended: stop, length, timeout, disconnected, 4xx, 5xx.",
            "outcome",
        )
        self._prompt = self._counter("rekindle_prompt_tokens", "Prompt tokens, by the source of their KV.", "source")
        self._written = self._counter("rekindle_generated_tokens", "Tokens generated.")
        self._saved = self._counter("rekindle_saved_seconds", "Estimated prefill time saved by reuse.")
        self._misses = self._counter(
            "rekindle_misses", "Prompts that were computed in part, by reason; not those that only went on.", "reason"
        )
        self._first = self._histogram(
            "rekindle_first_token_seconds", "From the start of a request to its first token.", "start"
        )
        self._waited = self._histogram("rekindle_queue_seconds", "How long requests waited in the queue.")

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, ["tenant", "salted", *labels], registry=self._registry)

    def _histogram(self, name: str, help: str, *labels: str) -> Histogram:
        return Histogram(name, help, ["tenant", "salted", *labels], registry=self._registry, buckets=_SECONDS)

    def record(self, scope: Scope, event: Event, waited_seconds: float) -> None:
        """Count an event of a request."""
        if isinstance(event, Finished):
            self._waited.labels(*self._whose(scope)).observe(waited_seconds)
            self._count(scope, event.reply)

    def _whose(self, scope: Scope) -> tuple[str, str]:
        return scope.tenant, _NOT_SALTED if scope.salt == self._own_salt else "yes"

    def _count(self, scope: Scope, reply: Reply) -> None:
        reuse, whose = reply.reuse, self._whose(scope)
        self._requests.labels(*whose, reply.finish_reason).inc()
        for source in ("engine", "memory", "disk", "computed"):
            self._prompt.labels(*whose, source).inc(getattr(reuse, source))
        for tier, count in reuse.shared.items():
            self._prompt.labels(*whose, tier).inc(count)
        if reuse.streamed:
            self._prompt.labels(*whose, "streamed").inc(reuse.streamed)
        if reuse.from_chunks:
            self._prompt.labels(*whose, "chunks").inc(reuse.from_chunks - reuse.recomputed)
        self._written.labels(*whose).inc(reply.usage.completion_tokens)
        start = "warm" if reuse.reused > reuse.computed else "cold"
        self._first.labels(*whose, start).observe(reply.timings.first_token_seconds)
        if reuse.miss is not None:
            self._misses.labels(*whose, reuse.miss).inc()
        if reuse.cold_seconds is not None and reuse.predicted_seconds is not None and reuse.reused:
            self._saved.labels(*whose).inc(max(0.0, reuse.cold_seconds - reuse.predicted_seconds))

    def failed(self, scope: Scope, outcome: str) -> None:
        """Count a request that ended without a reply."""
        self._requests.labels(*self._whose(scope), outcome).inc()

    def text(self, caller: Caller) -> bytes:
        """All metrics for an operator, else the caller's own."""
        if caller.operator:
            return generate_latest(self._registry) + generate_latest(self._machine)
        return generate_latest(_OfTenant(self._registry, caller.tenant))


class _OfTenant:
    """The samples of a registry that a tenant may see."""

    def __init__(self, registry: CollectorRegistry, tenant: str) -> None:
        self._registry = registry
        self._tenant = tenant

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            seen = {"tenant": self._tenant, "salted": _NOT_SALTED}
            own = [sample for sample in family.samples if seen.items() <= sample.labels.items()]
            if own:
                visible = Metric(family.name, family.documentation, family.type)
                visible.samples = own
                yield visible


class _Machine:
    """Metrics read at scrape time: the cache, the queues, the engines."""

    def __init__(self, models: Sequence[str], services: Callable[[], Sequence[MeasuredService]]) -> None:
        self._models, self._services = models, services

    def collect(self) -> Iterable[Metric]:
        services = self._services()
        lines, caches = [service.line for service in services], [service.session.cache for service in services]
        running, waiting = sum(line.running for line in lines), sum(line.waiting for line in lines)
        refused = sum(line.refused for line in lines)
        yield _gauge("rekindle_running_requests", "Requests being answered.", running)
        yield _gauge("rekindle_queued_requests", "Requests waiting in the queue.", waiting)
        yield _counter("rekindle_refused_requests", "Requests refused because the queue was full.", refused)
        loaded = GaugeMetricFamily("rekindle_model_loaded", "1 while a model is in memory, else 0.", labels=["model"])
        in_memory = {service.model for service in services if not service.session.resting}
        for name in self._models:
            loaded.add_metric([name], float(name in in_memory))
        yield loaded
        writers = [cache.writer for cache in caches if cache.writer is not None]
        if writers:
            backlog = sum(writer.backlog for writer in writers)
            yield _gauge("rekindle_write_backlog", "Jobs waiting to be written to the cache.", backlog)
            kept = CounterMetricFamily("rekindle_write_jobs", "Write jobs, by outcome.", labels=["outcome"])
            outcomes: Counts[str] = sum((Counts(writer.outcomes) for writer in writers), Counts())
            for outcome, count in sorted(outcomes.items()):
                kept.add_metric([outcome], count)
            yield kept
        if stores := [cache.store for cache in caches if cache.store is not None]:
            yield from _of_stores(stores)


def _of_stores(stores: Sequence[TieredStore]) -> Iterable[Metric]:
    """Those of the cache: one folder, which each model's store opens with memory of its own."""
    disk, used = stores[0].disk, report.used_bytes(stores[0].disk)
    memory = sum(store.memory.size_bytes for store in stores), sum(store.memory.limit_bytes for store in stores)
    held = GaugeMetricFamily("rekindle_cache_bytes", "Size of a tier of the cache.", labels=["tier"])
    limits = GaugeMetricFamily("rekindle_cache_limit_bytes", "Limit of a tier of the cache.", labels=["tier"])
    for tier, size, limit in (("memory", *memory), ("disk", used, disk.room.limit_bytes(used))):
        held.add_metric([tier], size)
        limits.add_metric([tier], limit)
    evicted = CounterMetricFamily("rekindle_evicted_bytes", "Evicted from disk, by reason.", labels=["reason"])
    for reason in ("new", "limit", "expired", "killed"):
        evicted.add_metric([reason], sum(store.disk.room.evicted_bytes[reason] for store in stores))
    yield from (held, limits, evicted)
    lately = report.written(disk, stores[0].settings.write_budget_bytes)
    written = GaugeMetricFamily("rekindle_written_bytes", "Written to disk lately.", labels=["window"])
    written.add_metric(["hour"], lately["written_hour_bytes"])
    written.add_metric(["day"], lately["written_day_bytes"])
    yield written
    if lately["write_budget_left_bytes"] is not None:
        left = lately["write_budget_left_bytes"]
        yield _gauge("rekindle_write_budget_left_bytes", "What may be written to disk now.", left)
    yield from _of_shared(stores)
    quarantined = sum(store.counts.quarantined for store in stores)
    yield _counter("rekindle_quarantined", "Entries quarantined because they were damaged.", quarantined)
    failures = CounterMetricFamily("rekindle_cache_failures", "Reads and writes that failed.", labels=["kind"])
    failures.add_metric(["read"], sum(store.counts.read_failures for store in stores))
    failures.add_metric(["write"], sum(store.counts.write_failures for store in stores))
    yield failures


def _of_shared(stores: Sequence[TieredStore]) -> Iterable[Metric]:
    """Those of the shared tiers, which each model's store asks for itself."""
    if not stores[0].shared.tiers:
        return
    up = GaugeMetricFamily("rekindle_tier_up", "1 if a shared tier answered the last time.", labels=["tier"])
    failed = CounterMetricFamily("rekindle_tier_failures", "Questions without an answer.", labels=["tier"])
    put = CounterMetricFamily("rekindle_tier_written_bytes", "Written to a shared tier.", labels=["tier"])
    for same in zip(*(store.shared.tiers for store in stores), strict=True):
        up.add_metric([same[0].name], float(all(tier.answers for tier in same)))
        failed.add_metric([same[0].name], sum(tier.counts.failures for tier in same))
        put.add_metric([same[0].name], sum(tier.counts.written_bytes for tier in same))
    yield from (up, failed, put)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=float(value))


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=float(value))
