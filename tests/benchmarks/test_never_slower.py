"""What `python -m benchmarks slower` calls slower."""

from __future__ import annotations

from itertools import cycle

import pytest

from benchmarks import never_slower
from benchmarks.base import BenchOptions
from benchmarks.never_slower import COMPUTING, Job, SlowerRow, _rows
from rekindle.engine.fake import FakeEngine


def taking(*seconds: float) -> Job:
    times = cycle(seconds)
    return lambda: (next(times), True)


def row_of(ours: tuple[float, ...], computing: tuple[float, ...]) -> SlowerRow:
    jobs = {COMPUTING: taking(*computing), "prefix from disk, later": taking(*ours)}
    (row,) = _rows(jobs, 64, BenchOptions(limit=16))
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
