"""Prometheus metrics. A test checks that docs/guide/server.md documents all names and units.

Metrics of a tenant carry its name as a label, and whether the request used another salt than the server's own: not
which, because there may be any number of them. A tenant sees its own lines only, without those of its salts; operators
see all lines, and those of the whole machine.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    admission: AdmissionQueue


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
        queues, caches = [service.admission for service in services], [service.session.cache for service in services]
        running, waiting = sum(queue.running for queue in queues), sum(queue.waiting for queue in queues)
        refused = sum(queue.refused for queue in queues)
        yield _gauge("rekindle_running_requests", "Requests being answered.", running)
        yield _gauge("rekindle_queued_requests", "Requests waiting in the queue.", waiting)
        yield _counter("rekindle_refused_requests", "Requests refused because the queue was full.", refused)
        in_memory = {service.model for service in services if not service.session.resting}
        loaded = {name: float(name in in_memory) for name in self._models}
        yield _gauges("rekindle_model_loaded", "1 while a model is in memory, else 0.", "model", loaded)
        writers = [cache.writer for cache in caches if cache.writer is not None]
        if writers:
            backlog = sum(writer.backlog for writer in writers)
            yield _gauge("rekindle_write_backlog", "Jobs waiting to be written to the cache.", backlog)
            outcomes: Counts[str] = sum((Counts(writer.outcomes) for writer in writers), Counts())
            yield _counters("rekindle_write_jobs", "Write jobs, by outcome.", "outcome", dict(sorted(outcomes.items())))
        if stores := [cache.store for cache in caches if cache.store is not None]:
            yield from _of_stores(stores)


def _of_stores(stores: Sequence[TieredStore]) -> Iterable[Metric]:
    """Those of the cache: one folder, which each model's store opens with memory of its own."""
    disk, used = stores[0].disk, report.used_bytes(stores[0].disk)
    held = {"memory": sum(store.memory.size_bytes for store in stores), "disk": used}
    limits = {"memory": sum(store.memory.limit_bytes for store in stores), "disk": disk.room.limit_bytes(used)}
    yield _gauges("rekindle_cache_bytes", "Size of a tier of the cache.", "tier", held)
    yield _gauges("rekindle_cache_limit_bytes", "Limit of a tier of the cache.", "tier", limits)
    reasons = ("new", "limit", "expired", "killed")
    evicted = {reason: sum(store.disk.room.evicted_bytes[reason] for store in stores) for reason in reasons}
    yield _counters("rekindle_evicted_bytes", "Evicted from disk, by reason.", "reason", evicted)
    lately = report.written(disk, stores[0].settings.write_budget_bytes)
    written = {window: lately[f"written_{window}_bytes"] for window in ("hour", "day")}
    yield _gauges("rekindle_written_bytes", "Written to disk lately.", "window", written)
    if lately["write_budget_left_bytes"] is not None:
        left = lately["write_budget_left_bytes"]
        yield _gauge("rekindle_write_budget_left_bytes", "What may be written to disk now.", left)
    yield from _of_shared(stores)
    quarantined = sum(store.counts.quarantined for store in stores)
    yield _counter("rekindle_quarantined", "Entries quarantined because they were damaged.", quarantined)
    reads, writes = ([getattr(store.counts, name) for store in stores] for name in ("read_failures", "write_failures"))
    failures = {"read": sum(reads), "write": sum(writes)}
    yield _counters("rekindle_cache_failures", "Reads and writes that failed.", "kind", failures)


def _of_shared(stores: Sequence[TieredStore]) -> Iterable[Metric]:
    """Those of the shared tiers, which each model's store asks for itself."""
    tiers = {same[0].name: same for same in zip(*(store.shared.tiers for store in stores), strict=True)}
    if not tiers:
        return
    up = {name: float(all(tier.answers for tier in same)) for name, same in tiers.items()}
    yield _gauges("rekindle_tier_up", "1 if a shared tier answered the last time.", "tier", up)
    failed = {name: sum(tier.counts.failures for tier in same) for name, same in tiers.items()}
    yield _counters("rekindle_tier_failures", "Questions without an answer.", "tier", failed)
    put = {name: sum(tier.counts.written_bytes for tier in same) for name, same in tiers.items()}
    yield _counters("rekindle_tier_written_bytes", "Written to a shared tier.", "tier", put)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=float(value))


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=float(value))


def _gauges(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(GaugeMetricFamily(name, help, labels=[label]), values)


def _counters(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(CounterMetricFamily(name, help, labels=[label]), values)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key], value)
    return family
