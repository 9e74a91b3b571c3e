"""Several contexts in one prompt, measured: every way is run, and what came is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stream import passages as stream_passages
from benchmarks.stream.passages import Passages
from rekindle.engine.fake import FakeEngine
from rekindle.remote import remote_kv as streams

TEXT = "The keeper lights the lamp at dusk and writes the hour into the book. Then he waits for the boats to come in. "


def test_one_row_for_each_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    monkeypatch.setattr(stream_passages, "RATIOS", (0.01, 1.0))
    monkeypatch.setattr(stream_passages, "_ROUNDS", 1)
    engine, said = FakeEngine(), list[str]()
    rows = Passages(engine, list((TEXT * 4).encode()), tmp_path, said.append).measure()
    assert [row["ratio"] for row in rows] == [0.01, 1.0]
    for row in rows:
        assert row["vs_computed"] == pytest.approx(row["computed_s"] / row["ours_s"])
        assert row["vs_fetched"] == pytest.approx(row["fetched_s"] / row["ours_s"])
        assert 0 <= row["recomputed_tokens"] <= row["streamed_tokens"]
        assert row["kl"] >= 0 and 0 <= row["top1"] <= 1
    assert any("fetched" in line for line in said)
