"""What `python -m benchmarks fleet` sends and makes of replies. vLLM is not needed."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.base import Report
from benchmarks.fleet.faults import flipped
from benchmarks.fleet.report import FaultRow, Pass, add_rows, pooled
from benchmarks.fleet.tier_servers import FaultyLink
from benchmarks.fleet.worker import VllmReply
from benchmarks.serve.workload import read_requests

WAIT_SECONDS = 60.0


def reply(seconds: float, cached: int = 0, error: str | None = None) -> VllmReply:
    return VllmReply(seconds, (1, 2), cached, error)


def passed(
    rival: str, *seconds: float, cached: int = 0, number: int = 0, phase: str = "cold", error: str | None = None
) -> Pass:
    replies = [(reply(one, cached, error), 0) for one in seconds]
    return Pass(rival, phase, number, [100] * len(seconds), replies, {"redis": 5}, 1.0)


def test_a_row_counts_what_failed_and_leaves_it_out_of_the_times() -> None:
    replies = [(reply(1.0, 50), 0), (reply(3.0, 100), 1), (reply(9.0, error="the worker ended"), 1)]
    (row, _) = pooled([
        Pass("rekindle", "cold", 0, [100, 100, 100], replies, {}, 1.0), passed("vllm", 1.0, 1.0, 1.0)
    ])  # fmt: skip
    assert (row.errors, row.retries, row.ttft_p50, row.hit_share, row.wrong_texts) == (1, 2, 2.0, 0.5, 0)
    assert row.ttft_s == [1.0, 3.0, None]
    assert row.ttft_interval == (1.0, 3.0)


def test_rivals_are_compared_request_by_request_over_all_rounds() -> None:
    report = Report("fleet")
    rows = [passed("rekindle", 1.0, 2.0, cached=80), passed("lmcache", 2.0, 4.0, cached=60), passed("vllm", 1.0, 1.0)]
    rows += [passed("vllm", 9.0, number=1), passed("lmcache", 9.0, cached=60, number=1)]
    rows += [passed("rekindle", 9.0, cached=80, number=1)]  # in another order: rivals take turns
    broken = [FaultRow.of("rekindle", "Redis killed", [100], [(reply(1.0), 0)], 0)]
    add_rows(report, rows, broken, {"other": "left out"})
    compared, _ = report.fields["vs"]
    assert (compared["rival"], compared["ttft_ratio"]) == ("lmcache", 0.5)
    assert compared["hit_share_diff"] == pytest.approx(0.2)
    assert (report.fields["errors"], report.fields["wrong_texts"]) == (0, 0)
    assert report.fields["not_measured"] == {"other": "left out"}
    assert report.rows[-1].baseline == "not measured"
    assert [row["moved_bytes"] for row in report.fields["rows"]] == [{"redis": 10}] * 3


def test_a_round_that_a_rival_has_not_run_is_left_out() -> None:
    rows = [passed(name, 1.0, number=number) for number in range(2) for name in ("vllm", "rekindle")]
    rows += [passed("vllm", 1.0, phase="restarted")]
    assert [(row.rival, row.phase, row.requests) for row in pooled(rows[:3])] == [
        ("rekindle", "cold", 1), ("vllm", "cold", 1)
    ]  # fmt: skip
    assert [(row.phase, row.requests) for row in pooled(rows)] == [("cold", 2)] * 2
    assert pooled(rows[:1])[0].rival == "vllm"


def test_a_text_that_differs_from_vllms_own_is_wrong() -> None:
    ours = passed("rekindle", 1.0, 1.0, 1.0)
    texts = [(1, 2), (1, 3), (1, 3)]
    replies = [(VllmReply(1.0, text, 0, error), 0) for text, error in zip(texts, (None, None, "late"), strict=True)]
    other = Pass("vllm", "cold", 0, ours.prompts, [(reply(1.0), 0)] * 3, {}, 1.0)
    rows = pooled([Pass("rekindle", "cold", 0, ours.prompts, replies, {}, 1.0), other])
    assert [row.wrong_texts for row in rows] == [1, 0]


def test_a_rival_without_replies_has_no_times() -> None:
    report = Report("fleet")
    failed = passed("lmcache", 1.0, error="no reply")
    add_rows(report, [passed("rekindle", 1.0), failed, passed("vllm", 1.0)], [], {})
    assert report.fields["vs"][0]["ttft_ratio"] is None
    assert report.fields["rows"][0]["ttft_p50"] is None


def test_arrivals_of_a_trace_are_read(tmp_path: Path) -> None:
    lines = [{"timestamp_ms": 1500, "hash_ids": [0, 1]}, {"hash_ids": [2]}]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [(one.arrival_seconds, one.blocks) for one in read_requests(tmp_path)] == [(1.5, (0, 1)), (0.0, (2,))]


def test_flipped_bytes_are_in_the_second_half() -> None:
    data = bytes(1000)
    assert flipped(data)[:500] == data[:500] and flipped(data) != data and flipped(flipped(data)) == data


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    def answer(client: socket.socket) -> None:
        with client:
            while data := client.recv(100):
                client.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_link_counts_what_passes_and_hangs_when_asked_to(echo: int) -> None:
    link = FaultyLink(echo)
    with socket.create_connection(("127.0.0.1", link.port), WAIT_SECONDS) as client:
        client.sendall(b"hello")
        assert client.recv(100) == b"hello"
        assert link.to_server_bytes == 5
        link.state = "hanging"
        client.sendall(b"anyone?")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(100)
        client.settimeout(WAIT_SECONDS)
        link.state = "open"
        assert client.recv(100) == b""  # what it dropped is missing there: the connection is closed
    with socket.create_connection(("127.0.0.1", link.port), WAIT_SECONDS) as client:
        client.sendall(b"hello again")
        assert client.recv(100) == b"hello again"
    assert link.to_server_bytes == 16
    link.close()
