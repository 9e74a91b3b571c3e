"""The ways of serving adapters that `python -m benchmarks adapters` compares, each with a folder of its own.

All answer the same requests with the same loaded model, in turns. Nothing is held in memory and no context waits in the
engine: the folder is all there is, so what it takes is what a mode takes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.adapters.workload import AdapterRequest, AppWorkload, Kind
from benchmarks.base import Advance
from benchmarks.baselines import mobilora
from rekindle.engine.base import Engine
from rekindle.errors import CacheUnusable, RekindleError
from rekindle.models.adapter_registry import RegisteredAdapter
from rekindle.session.session import Session
from rekindle.store.report import summary, used_bytes

REPLY_TOKENS = 2  # of every request: the first one is what counts
_LOOK_SECONDS = 0.05
_FLUSH_SECONDS = 120.0


@dataclass(frozen=True)
class CacheMode:
    """One way: the settings of its session. `exact`: its texts must be those of the computation without a cache."""

    name: str
    title: str
    settings: Mapping[str, Any]
    exact: bool = True
    everywhere: bool = True  # whether it is measured in every scenario: what is only to compare with saves time

    @property
    def caches(self) -> bool:
        """Whether it keeps anything."""
        return self.settings.get("reuse") != "off"


PEFT, PREFIX, UTILITY, OURS = "peft", "prefix", "utility", "ours"
EXACT, MOBILORA = "exact", "mobilora"
MODES = (
    CacheMode(PEFT, "no reuse", {"reuse": "off"}),
    CacheMode(PREFIX, "whole KV, lru", {"reuse": "exact", "codec": "raw", "policy": "lru"}),
    CacheMode(UTILITY, "deltas, utility", {"reuse": "quantized", "codec": "auto", "policy": "utility"}, exact=False),
    CacheMode(OURS, "deltas, lru", {"reuse": "quantized", "codec": "auto", "policy": "lru"}, exact=False),
    CacheMode(EXACT, "lossless deltas, lru", {"reuse": "exact", "codec": "auto", "policy": "lru"}, everywhere=False),
    CacheMode(MOBILORA, "as published", {"reuse": "quantized"}, False, False),
)
_EVERYWHERE: Mapping[str, Any] = {
    "memory_limit": "0",
    # Killed apps' KV goes when room is needed: what is hours in a usage are moments here.
    "killed_ttl": "none",
}


@dataclass(frozen=True)
class AdapterReply:
    """The outcome of one request."""

    kind: Kind
    ttft_s: float
    prompt_tokens: int
    reused_tokens: int
    tokens: tuple[int, ...]  # of the reply
    used_bytes: int  # of the folder, afterwards
    miss: str | None = None  # why not more was reused, as `Reuse` has it


@dataclass
class ModeRun:
    """A mode with its session. `reason` says why it does not run."""

    mode: CacheMode
    folder: Path
    session: Session | None = None
    reason: str | None = None
    filled: list[AdapterReply] = field(default_factory=list)
    answers: list[AdapterReply] = field(default_factory=list)
    peak_bytes: int = 0
    accounted_bytes: int = 0  # the most that the store itself thought it takes, with what was reserved
    states_lost: int = 0

    def ask(self, ask: AdapterRequest, *, measured: bool) -> None:
        """Let an app's request be answered, then wait until everything is kept."""
        session = self.session
        assert session is not None
        if self.mode.caches:
            self._set_app_states(session, ask)
        options: dict[str, Any] = {"adapter": ask.adapter, "app": ask.app, "app_state": "foreground"}
        reply = session.generate(ask.prompt, max_tokens=REPLY_TOKENS, **options)
        session.flush(_FLUSH_SECONDS)
        self.look()
        if session.cache.store is not None:
            self.accounted_bytes = max(self.accounted_bytes, used_bytes(session.cache.store.disk))
        ttft, used = reply.timings.first_token_seconds, folder_bytes(self.folder)
        answer = AdapterReply(ask.kind, ttft, len(ask.prompt), reply.reuse.reused, reply.tokens, used, reply.reuse.miss)
        (self.answers if measured else self.filled).append(answer)

    def _set_app_states(self, session: Session, ask: AdapterRequest) -> None:
        for app, state in ask.changes:
            try:
                session.apps.set(app, state)
            except CacheUnusable:  # there was no room to note it: as in use, it goes on without
                self.states_lost += 1

    def look(self) -> None:
        """Look how much the folder takes now."""
        self.peak_bytes = max(self.peak_bytes, folder_bytes(self.folder))

    def kept(self) -> dict[str, Any]:
        """What it holds in the end, and what went or was not taken."""
        store = None if self.session is None else self.session.cache.store
        if store is None or self.session is None or self.session.cache.writer is None:
            return {"bytes_per_token": None, "evicted_bytes": 0, "refused": 0, "states_lost": 0}
        held = summary(store.disk)
        return {
            "bytes_per_token": held["bytes"] / held["tokens"] if held["tokens"] else None,
            "evicted_bytes": sum(store.disk.room.evicted_bytes.values()),
            "refused": self.session.cache.writer.outcomes["refused"],
            "states_lost": self.states_lost,
        }


@contextmanager
def open_lanes(
    engine: Engine, modes: Sequence[CacheMode], adapters: Sequence[RegisteredAdapter], folder: Path, limit_bytes: int
) -> Iterator[list[ModeRun]]:
    """A run for each mode, with the adapters loaded. One that the engine or this version cannot do says why."""
    runs: list[ModeRun] = []
    try:
        for mode in modes:
            runs.append(run := ModeRun(mode, folder / mode.name))
            try:
                settings = {**_EVERYWHERE, **mode.settings, "cache": str(run.folder), "disk_limit": limit_bytes}
                run.session = (mobilora.opened if mode.name == MOBILORA else Session)(engine, **settings)
                for adapter in adapters:
                    run.session.adapters.load(adapter.name, adapter.path, adapter.scale)
            except RekindleError as error:
                run.reason = str(error)
                _close(run)
        yield runs
    finally:
        for run in runs:
            _close(run)


def _close(run: ModeRun) -> None:
    if run.session is not None:
        run.session.close()
        run.session = None


class Watch:
    """A thread that measures the folder of one run while it answers."""

    def __init__(self) -> None:
        self._lane: ModeRun | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rekindle-bench-watch", daemon=True)

    @contextmanager
    def over(self, run: ModeRun) -> Iterator[None]:
        """Look at this one inside the block."""
        self._lane = run
        try:
            yield
        finally:
            self._lane = None

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            run = self._lane
            if run is not None and run.mode.caches:
                run.look()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def answer_all(runs: Sequence[ModeRun], workload: AppWorkload, watch: Watch, advance: Advance) -> float:
    """Every request in every run, the runs in turns, each time another one first; the seconds it took.

    What fills the caches is not asked where nothing is kept.
    """
    started = time.perf_counter()
    asks, filling = workload.asks, workload.filling
    ready = [run for run in runs if run.session is not None]
    for number, ask in enumerate(asks):
        first = number % len(ready) if ready else 0
        for run in (*ready[first:], *ready[:first]):
            if number >= filling or run.mode.caches:
                advance(f"request {number + 1} of {len(asks)}, {run.mode.name}")
                with watch.over(run):
                    run.ask(ask, measured=number >= filling)
    return time.perf_counter() - started


def folder_bytes(folder: Path) -> int:
    """What all files of a folder take; what goes meanwhile is passed over."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(place, name).stat().st_size
            except OSError:
                continue
    return total
