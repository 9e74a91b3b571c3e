"""A machine that stands still for a while, at any moment of any request: the next identical prompt is reused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.cache.cost import recall_costs
from rekindle.core.kv import Span
from rekindle.core.reply import Reuse
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import FakeEngine

pytestmark = pytest.mark.measured_costs
REPOSITORY = Path(__file__).parents[2]
STALL_SECONDS = 300.0  # longer than any deadline of these tests
TOKENS = 200


class SlowEngine(FakeEngine):
    """Computes 4,000 tokens a second: loading is faster on any machine."""

    def step(self, rows: Sequence[Row], *rest: Any) -> Sequence[Logits]:
        time.sleep(sum(len(row.tokens) for row in rows) / 4000)
        return super().step(rows, *rest)


class StallingClocks:
    """The monotonic clocks, which jump ahead at one of the times that they are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._gone = 0.0
        self.at, self.reads, self.finished = -1, 0, False
        for name in ("perf_counter", "monotonic"):
            monkeypatch.setattr(time, name, self._read_by(getattr(time, name)))

    def _read_by(self, real: Any) -> Any:
        def read() -> float:
            with self._lock:
                self.reads += 1
                self._gone += STALL_SECONDS if self.reads == self.at else 0.0
                return float(real()) + self._gone

        return read

    @contextmanager
    def stall(self, at: int) -> Iterator[None]:
        """Jump at the `at`-th read meanwhile."""
        with self._lock:
            self.at, self.reads = at, 0
        yield
        with self._lock:
            self.at, self.finished = -1, self.reads < at


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> StallingClocks:
    return StallingClocks(monkeypatch)


@pytest.fixture(params=["1GB", "0"], ids=["memory", "disk"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    with Session(SlowEngine(), cache=tmp_path / "cache", memory_limit=request.param) as session:
        yield session


def prompt_of(seed: int) -> list[int]:
    return list(np.random.default_rng(seed).integers(0, 256, TOKENS).tolist())


def ask(session: Session, prompt: list[int]) -> Reuse:
    """One request to an engine that holds no context."""
    session.flush()
    session.cache.unpark()
    return session.generate(prompt, max_tokens=2, min_tokens=2).reuse


def stalls(session: Session, clocks: StallingClocks) -> Iterator[int]:
    """Each read of a clock, with costs of which nothing was measured, until a request has no more reads."""
    at = 1
    while True:
        session.cache.kv.costs = recall_costs(session.engine)
        yield at
        if clocks.finished:
            return
        at += 1


def test_a_stall_while_a_prompt_is_computed_and_kept(session: Session, clocks: StallingClocks) -> None:
    for at in stalls(session, clocks):
        prompt = prompt_of(at)
        with clocks.stall(at):
            ask(session, prompt)
            session.flush()
        reuse = ask(session, prompt)
        assert (reuse.reused, reuse.miss) == (TOKENS - 1, None), f"after a stall at read {at}"


def test_a_stall_while_a_prompt_is_found_and_loaded(session: Session, clocks: StallingClocks) -> None:
    prompt = prompt_of(0)
    ask(session, prompt)
    for at in stalls(session, clocks):
        session.cache.kv.costs.computed(Span(0, TOKENS), TOKENS / 4000)
        ask(session, prompt)  # a load that was measured
        with clocks.stall(at):
            ask(session, prompt)
            session.flush()
        for _ in range(3):
            reuse = ask(session, prompt)
            assert (reuse.reused, reuse.miss) == (TOKENS - 1, None), f"after a stall at read {at}"


PROGRAM = """
import sys
from rekindle import Session
from tests.cache.test_stalls import SlowEngine, ask, prompt_of
import rekindle.cache.stored_kv as stored_kv
stored_kv.LOOKUP_SECONDS = stored_kv.LOAD_SECONDS = 120.0
with Session(SlowEngine(), cache=sys.argv[1], memory_limit="0") as session:
    for _ in range(60):
        print(ask(session, prompt_of(0)).reused, flush=True)
"""


@pytest.mark.skipif(os.name != "posix", reason="stops a process")
def test_a_process_that_is_stopped_again_and_again_goes_on_reusing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = []
        for number, line in enumerate(child.stdout):
            said.append(int(line))
            if number % 4 == 1:
                time.sleep(0.002 * (number % 11))  # another moment of a request
                child.send_signal(signal.SIGSTOP)
                time.sleep(0.5)
                child.send_signal(signal.SIGCONT)
    assert child.returncode == 0 and said == [0] + 59 * [TOKENS - 1]
