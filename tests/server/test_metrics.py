"""What Prometheus reads: every number is one that the replies told, too."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Serve
from tests.server.serving import Asking, Served, connected, eventually

LONG = "The keeper of the lighthouse wrote down the wind every morning, and the boats that he counted at night. "


def samples(served: Served, key: str | None = None) -> dict[tuple[str, ...], float]:
    """Every value, by name and labels; whose it is, is not told."""
    answer = served.get("/metrics", key)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation and family.name.startswith("rekindle_")
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name not in ("tenant", "salted")]
            found[(sample.name, *labels)] = sample.value
    return found


def test_tokens_are_counted_by_where_they_came_from(served: Served) -> None:
    replies = [served.chat(LONG), served.chat(LONG), served.chat(LONG + "Why?")]
    told = samples(served)
    sources = {"computed": sum(reply["rekindle"]["computed"] for reply in replies)}
    for source in ("engine", "memory", "disk"):
        sources[source] = sum(reply["rekindle"]["loaded_from"][source] for reply in replies)
    for source, count in sources.items():
        assert told["rekindle_prompt_tokens_total", source] == count
    assert sum(sources.values()) == sum(reply["usage"]["prompt_tokens"] for reply in replies)
    assert told["rekindle_generated_tokens_total",] == 12


def test_requests_are_counted_by_how_they_ended(served: Served) -> None:
    served.chat(LONG)
    served.chat(LONG, grammar='root ::= "yes"')
    served.post("/v1/chat/completions", messages=[])
    served.get("/v1/models/nothing")
    told = samples(served)
    assert told["rekindle_requests_total", "length"] == told["rekindle_requests_total", "stop"] == 1
    assert told["rekindle_requests_total", "4xx"] == 2


def test_clients_that_went_away_are_counted(served: Served) -> None:
    served.engine.go.clear()
    body: dict[str, Any] = {"prompt": "one", "max_tokens": 1000}
    for stream in (False, True):
        with connected(served, "/v1/completions", stream=stream, **body):
            eventually(lambda: served.service.admission.running == 1)
            if stream:
                served.engine.permits.release(4)
                eventually(lambda: served.engine.steps >= 4)
        eventually(lambda: served.service.admission.running == 0)
    eventually(lambda: samples(served).get(("rekindle_requests_total", "disconnected")) == 2)


def test_a_stream_that_fails_on_its_way_is_counted(served: Served) -> None:
    served.engine.go.clear()
    served.engine.permits.release(4)
    body: dict[str, Any] = {"prompt": "one", "max_tokens": 1000, "stream": True, "app_id": "mail"}
    asked = Asking(lambda: served.post("/v1/completions", **body))
    eventually(lambda: served.engine.steps >= 4)
    with served.http() as client:
        assert client.put("/v1/rekindle/apps/mail", json={"state": "killed"}).json()["stopped_requests"] == 1
    assert '"error"' in asked.result().text
    assert samples(served)["rekindle_requests_total", "5xx"] == 1


def test_first_tokens_are_measured_cold_and_warm(served: Served) -> None:
    for _ in range(3):
        served.chat(LONG)
    told = samples(served)
    assert told["rekindle_first_token_seconds_count", "cold"] == 1
    assert told["rekindle_first_token_seconds_count", "warm"] == 2
    assert told["rekindle_first_token_seconds_sum", "cold"] > 0
    assert told["rekindle_queue_seconds_count",] == 3
    assert told["rekindle_saved_seconds_total",] > 0


def test_what_was_written_to_disk_and_what_may_be_are_told(served: Served) -> None:
    full = samples(served)["rekindle_write_budget_left_bytes",]
    served.chat(LONG * 3)
    eventually(lambda: samples(served)["rekindle_written_bytes", "hour"] > 0)
    served.service.session.flush()
    told = samples(served)
    assert told["rekindle_written_bytes", "day"] == told["rekindle_written_bytes", "hour"]
    assert told["rekindle_write_budget_left_bytes",] == full - told["rekindle_written_bytes", "day"]
    stats = served.get("/v1/rekindle/stats").json()
    assert stats["written_day_bytes"] == told["rekindle_written_bytes", "day"]
    assert stats["write_budget_left_bytes"] == told["rekindle_write_budget_left_bytes",]


def test_misses_are_counted_by_reason(served: Served) -> None:
    served.chat(LONG)
    served.chat(LONG, cache_prompt=False)
    told = samples(served)
    assert told["rekindle_misses_total", "unknown"] == told["rekindle_misses_total", "off"] == 1


def test_the_line_is_told_as_it_is(serve: Serve) -> None:
    served = serve(session={"parallel": 1}, queue=1)
    served.engine.go.clear()
    line = served.service.admission
    asked = []
    for number in range(2):
        asked.append(Asking(lambda n=number: served.post("/v1/completions", prompt=f"{n}", max_tokens=2)))
        eventually(lambda n=number: line.running + line.waiting == n + 1)
    assert served.post("/v1/completions", prompt="three", max_tokens=2).status_code == 429
    told = samples(served)
    assert told["rekindle_running_requests",] == told["rekindle_queued_requests",] == 1
    assert told["rekindle_refused_requests_total",] == told["rekindle_requests_total", "4xx"] == 1
    served.engine.go.set()
    assert all(one.result().status_code == 200 for one in asked)
    told = samples(served)
    assert told["rekindle_running_requests",] == told["rekindle_queued_requests",] == 0


def test_tiers_are_told_with_their_limits(served: Served) -> None:
    served.chat(LONG)
    assert served.session.flush()
    told, stats = samples(served), served.get("/v1/rekindle/stats").json()["tiers"]
    for tier in ("memory", "disk"):
        assert 0 < told["rekindle_cache_bytes", tier] == stats[tier]["bytes"]
        assert told["rekindle_cache_limit_bytes", tier] == stats[tier]["limit_bytes"]
    assert told["rekindle_cache_limit_bytes", "disk"] == 200_000_000
    assert told["rekindle_write_backlog",] == 0 and told["rekindle_model_loaded", "fake-0"] == 1
    assert told["rekindle_quarantined_total",] == told["rekindle_cache_failures_total", "read"] == 0


def test_what_had_to_go_is_told(serve: Serve) -> None:
    served = serve(session={"disk_limit": "3MB", "memory_limit": "1MB"})
    for number in range(10):
        served.chat(f"{number} {LONG * 5}")
        assert served.session.flush()
    told = samples(served)
    assert sum(value for (name, *_), value in told.items() if name == "rekindle_evicted_bytes_total") > 0
    assert told["rekindle_cache_bytes", "disk"] <= told["rekindle_cache_limit_bytes", "disk"] == 3_000_000
