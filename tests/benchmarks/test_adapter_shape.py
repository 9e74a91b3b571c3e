"""`bench adapters --shape` on a model of a few numbers."""

from __future__ import annotations

import pytest

from benchmarks import shapes
from benchmarks.adapters import shape as delta_shape
from benchmarks.base import BenchOptions


def test_a_shape_is_timed_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {**shapes.SHAPES["smollm2-135m"], "vocab_size": 320, "hidden_size": 48, "intermediate_size": 64}
    tiny |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny)
    parts: list[str] = []
    report = delta_shape.run_shape(BenchOptions(shape="tiny", device="cpu", quick=True, limit=1), parts.append)
    fields = report.fields
    assert (fields["shape"], fields["tokens"]) == ("tiny", delta_shape.QUICK_TOKENS)
    for name in ("compute_s", "delta_s", "whole_s", "raw_s", "delta_speedup"):
        assert fields[name] > 0
    assert set(fields["parts"]) == {"decompress_s", "copy_s", "unpack_s"}
    assert 2 < fields["delta_bits"] < fields["whole_bits"] < 8
    assert len(report.rows) == 3
    assert parts
