"""What `python -m benchmarks slower` calls slower."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle
from pathlib import Path

import pytest

from benchmarks import never_slower
from benchmarks.base import BenchOptions
from benchmarks.never_slower import COMPUTING, Job, SlowerRow, _rows
from benchmarks.stream.traces import Trace
from rekindle.engine.fake import FakeEngine
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from tests.lora import fake_pairs, save_lora


def taking(*seconds: float) -> Job:
    times = cycle(seconds)
    return lambda: (next(times), True)


def row_of(ours: tuple[float, ...], computing: tuple[float, ...]) -> SlowerRow:
    jobs = {COMPUTING: taking(*computing), "prefix from disk, later": taking(*ours)}
    (row,) = _rows([{name: job() for name, job in jobs.items()} for _ in range(16)], 64, BenchOptions())
    return row


def test_a_row_fails_where_a_loss_is_certain_and_matters() -> None:
    assert row_of((0.12,), (0.1,)).fails
    assert not row_of((0.104,), (0.1,)).fails, "within the ratio"
    assert not row_of((0.002,), (0.001,)).fails, "within the loss"
    assert not row_of((0.05, 0.06, 0.2, 0.12), (0.1,)).fails, "not certain"


def test_a_row_says_what_was_measured() -> None:
    row = row_of((0.05,), (0.1,))
    assert (row.mechanism, row.request, row.tokens, row.pairs) == ("prefix from disk", "later", 64, 16)
    assert row.ratio == pytest.approx(0.5) and row.loss_ms == pytest.approx(-50) and row.reused == 1.0
    assert row.interval == pytest.approx((0.5, 0.5))


def test_every_mechanism_is_measured_first_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(never_slower, "load", lambda options: FakeEngine())
    monkeypatch.setattr(never_slower, "QUICK_SIZES", (64,))
    report = never_slower.run(BenchOptions(quick=True, limit=1), lambda part: None)
    prefixes = ("prefix from memory", "prefix from disk", "quantized prefix from disk")
    mechanisms = (*prefixes, "chunks", "right drafts", "wrong drafts")
    assert [(row["mechanism"], row["request"]) for row in report.fields["rows"]] == [
        (mechanism, request) for mechanism in mechanisms for request in ("first", "later")
    ]
    assert len(report.rows) == len(report.fields["rows"]) and report.fields["failures"] >= 0


class OriginHere(ExitStack):
    """An origin in this process, whatever the link."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.url = self.enter_context(OriginServer(folder, OriginSettings(port=0)).running())

    def begin(self, trace: Trace) -> None:
        assert trace.mean_rate > 0


def test_a_full_run_measures_deltas_and_remote_kv_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_lora(tmp_path / "one", fake_pairs(0))
    monkeypatch.setattr(never_slower, "load", lambda options: FakeEngine())
    monkeypatch.setattr(never_slower, "SIZES", (64, 160, 4096))
    monkeypatch.setattr(never_slower, "ShapedOrigin", OriginHere)
    report = never_slower.run(BenchOptions(limit=1, tokens=160, adapters=tmp_path), lambda part: None)
    found = {size: {row["mechanism"] for row in report.fields["rows"] if row["tokens"] == size} for size in (64, 160)}
    remote = {"remote KV", "quantized remote KV", "remote KV, slow link"}
    assert {"lossless delta", "quantized delta", "chunks"} <= found[64] and found[64].isdisjoint(remote)
    assert found[160] - found[64] == remote, "less than a chunk is never published"
    assert report.fields["largest_tokens"] == 160
