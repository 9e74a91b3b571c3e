"""What `rekindle top` shows in a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rekindle.cli.top import _view

SERVER = {
    "model": "qwen2.5-coder-1.5b-instruct-q4_k_m", "engine": "llamacpp", "device": "cpu", "running": 2, "waiting": 1,
    "parallel": 8, "memory": {"bytes": 10**9, "limit_bytes": 10**10},
}  # fmt: skip
ROW = {
    "at": 1.7e9, "app": "an-application-with-a-long-name", "model": "m", "tokens": 131072, "reused": 131072,
    "first_ms": 99_990.0, "cold_ms": 1_234_567.0, "rate": 123.4, "state": "done", "miss": "checkpoint",
    "spans": [(0, 65536, "disk"), (65536, 131072, "computed")], "present": 131072,
}  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_a_row_fits_the_terminal_and_nothing_of_it_is_cut(width: int) -> None:
    out = io.StringIO()
    rows = {number: {**ROW, "id": number, "state": state} for number, state in enumerate(("done", "cancelled"))}
    Console(file=out, width=width).print(_view(SERVER, rows, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in out.getvalue()
    (row,) = [line for line in lines if "checkpoint" in line]
    for cell in ("an-applicati", "█", "131,072", "100%", "99.99 s", "1,235 s", "123.4", "checkpoint"):
        assert cell in row
