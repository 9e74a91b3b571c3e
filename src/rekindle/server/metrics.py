"""Prometheus metrics. A test checks that docs/guide/server.md documents all names and units.

Metrics of a tenant carry its name as a label, and whether the request used another salt than the server's own: not
which, because there may be any number of them. A tenant sees its own lines only, without those of its salts; operators
see all lines, and those of the whole machine.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rekindle.core.reply import Reply
from rekindle.core.scope import Scope
from rekindle.server.admission_queue import AdmissionQueue
from rekindle.server.auth import Caller
from rekindle.server.job import Event, Finished
from rekindle.session.session import Session
from rekindle.store import report

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_SALTED = "no"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    def __init__(self, session: Session, line: AdmissionQueue) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the time a series began is unused, and doubles the lines
        self._own_salt = session.settings.cache_salt
        self._registry = CollectorRegistry()
        self._machine = CollectorRegistry()
        self._machine.register(_Machine(session, line))
        self._requests = self._counter(
            "rekindle_requests", "Requests, by how they ended: stop, length, disconnected, 4xx, 5xx.", "outcome"
        )
        self._prompt = self._counter("rekindle_prompt_tokens", "Prompt tokens, by the source of their KV.", "source")
        self._written = self._counter("rekindle_generated_tokens", "Tokens generated.")
        self._saved = self._counter("rekindle_saved_seconds", "Estimated prefill time saved by reuse.")
        self._misses = self._counter("rekindle_misses", "Prompts that were not fully cached, by reason.", "reason")
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
    """Metrics read at scrape time: the cache, the queue, the engine."""

    def __init__(self, session: Session, line: AdmissionQueue) -> None:
        self._session, self._line = session, line

    def collect(self) -> Iterable[Metric]:
        line, session = self._line, self._session
        yield _gauge("rekindle_running_requests", "Requests being answered.", line.running)
        yield _gauge("rekindle_queued_requests", "Requests waiting in the queue.", line.waiting)
        yield _counter("rekindle_refused_requests", "Requests refused because the queue was full.", line.refused)
        yield _gauge(
            "rekindle_model_loaded", "1 while the model is in memory, 0 while it is unloaded.", not session.resting
        )
        writer, store = session.cache.writer, session.cache.store
        if writer is not None:
            yield _gauge("rekindle_write_backlog", "Jobs waiting to be written to the cache.", writer.backlog)
            kept = CounterMetricFamily("rekindle_write_jobs", "Write jobs, by outcome.", labels=["outcome"])
            for outcome, count in sorted(writer.outcomes.items()):
                kept.add_metric([outcome], count)
            yield kept
        if store is None:
            return
        held = GaugeMetricFamily("rekindle_cache_bytes", "Size of a tier of the cache.", labels=["tier"])
        limits = GaugeMetricFamily("rekindle_cache_limit_bytes", "Limit of a tier of the cache.", labels=["tier"])
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
        lately = report.written(store.disk, store.settings.write_budget_bytes)
        written = GaugeMetricFamily("rekindle_written_bytes", "Written to disk lately.", labels=["window"])
        written.add_metric(["hour"], lately["written_hour_bytes"])
        written.add_metric(["day"], lately["written_day_bytes"])
        yield written
        if lately["write_budget_left_bytes"] is not None:
            left = lately["write_budget_left_bytes"]
            yield _gauge("rekindle_write_budget_left_bytes", "What may be written to disk now.", left)
        if store.shared.tiers:
            up = GaugeMetricFamily("rekindle_tier_up", "1 if a shared tier answered the last time.", labels=["tier"])
            failed = CounterMetricFamily("rekindle_tier_failures", "Questions without an answer.", labels=["tier"])
            put = CounterMetricFamily("rekindle_tier_written_bytes", "Written to a shared tier.", labels=["tier"])
            for shared in store.shared.tiers:
                up.add_metric([shared.name], float(shared.answers))
                failed.add_metric([shared.name], shared.counts.failures)
                put.add_metric([shared.name], shared.counts.written_bytes)
            yield from (up, failed, put)
        counts = store.counts
        yield _counter("rekindle_quarantined", "Entries quarantined because they were damaged.", counts.quarantined)
        failures = CounterMetricFamily("rekindle_cache_failures", "Reads and writes that failed.", labels=["kind"])
        failures.add_metric(["read"], counts.read_failures)
        failures.add_metric(["write"], counts.write_failures)
        yield failures


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help, value=float(value))


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(name, help, value=float(value))
