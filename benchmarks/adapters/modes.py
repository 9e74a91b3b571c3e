"""The ways of serving adapters that `python -m benchmarks adapters` compares, each with a folder of its own.

All answer the same requests with the same loaded model, in turns. Nothing is held in memory and no context waits in the
engine: the folder is all there is, so what it takes is what a mode takes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.adapters.workload import AdapterRequest, AppWorkload, Kind
from benchmarks.base import Advance, folder_bytes, rotated
from benchmarks.baselines import mobilora, policies
from benchmarks.baselines.peft_generate import PeftGenerate
from rekindle.engine.base import Engine
from rekindle.errors import CacheUnusable, RekindleError
from rekindle.models.adapter_registry import RegisteredAdapter
from rekindle.session.session import Session
from rekindle.store.report import summary, used_bytes
from rekindle.store.tiered import TieredStore

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


PEFT, APART, PREFIX, LFU, MOBILORA = "peft", "apart", "prefix", "lfu", "mobilora"
EXACT, OURS, NONE, UTILITY = "exact", "ours", "none", "utility"
BASELINES = (PEFT, APART, PREFIX, LFU, MOBILORA)
MODES = (
    CacheMode(PEFT, "PEFT's own generate", {"reuse": "off"}, exact=False),  # another engine: it may round differently
    CacheMode(APART, "a cache for each adapter", {"reuse": "exact", "codec": "raw", "policy": "lru"}),
    CacheMode(PREFIX, "whole KV, lru", {"reuse": "exact", "codec": "raw", "policy": "lru"}),
    CacheMode(LFU, "whole KV, lfu", {"reuse": "exact", "codec": "raw", "policy": "lfu"}),
    CacheMode(MOBILORA, "as published", {"reuse": "quantized"}, exact=False),
    CacheMode(EXACT, "lossless deltas, lru", {"reuse": "exact", "codec": "auto", "policy": "lru"}),
    CacheMode(OURS, "deltas, lru", {"reuse": "quantized", "codec": "auto", "policy": "lru"}, exact=False),
    CacheMode(NONE, "our engine, no reuse", {"reuse": "off"}, everywhere=False),
    CacheMode(
        UTILITY,
        "deltas, utility",
        {"reuse": "quantized", "codec": "auto", "policy": "utility"},
        False,
        everywhere=False,
    ),
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
    peak_bytes: int = 0  # of the folder, so far
    accounted_bytes: int = 0  # the most that the stores themselves thought they take, with what was reserved
    bytes_per_token: float | None = None  # of what is kept
    lost: Mapping[str, int] = field(default_factory=dict)  # what went since the request before, or was not taken


Replies = dict[str, AdapterReply | str]  # to one request in each mode, or why a mode does not run


@dataclass
class ModeRun:
    """A mode with its sessions by adapter: one for all of them, or one each. `reason` says why it does not run."""

    mode: CacheMode
    folder: Path
    sessions: dict[str, Session] = field(default_factory=dict)
    peft: PeftGenerate | None = None
    reason: str | None = None
    peak_bytes: int = 0
    accounted_bytes: int = 0
    states_lost: int = 0
    _lost: Counter[str] = field(default_factory=Counter)

    @property
    def ready(self) -> bool:
        """Whether it can be asked."""
        return self.peft is not None or bool(self.sessions)

    def ask(self, ask: AdapterRequest) -> AdapterReply:
        """Let an app's request be answered, then wait until everything is kept."""
        if self.peft is not None:
            seconds, tokens = self.peft.generate(ask.adapter, ask.prompt, REPLY_TOKENS)
            return AdapterReply(ask.kind, seconds, len(ask.prompt), 0, tokens, 0, "off")
        session = self.sessions[ask.adapter]
        if self.mode.caches:
            self._set_app_states(ask)
        options: dict[str, Any] = {"adapter": ask.adapter, "app": ask.app, "app_state": "foreground"}
        reply = session.generate(ask.prompt, max_tokens=REPLY_TOKENS, **options)
        session.flush(_FLUSH_SECONDS)
        self.look()
        self.accounted_bytes = max(self.accounted_bytes, sum(used_bytes(store.disk) for store in self._stores()))
        ttft, used = reply.timings.first_token_seconds, folder_bytes(self.folder)
        answer = AdapterReply(ask.kind, ttft, len(ask.prompt), reply.reuse.reused, reply.tokens, used, reply.reuse.miss)
        return replace(answer, peak_bytes=self.peak_bytes, accounted_bytes=self.accounted_bytes, **self._kept())

    def _set_app_states(self, ask: AdapterRequest) -> None:
        for app, state in ask.changes:
            for session in set(self.sessions.values()):
                try:
                    session.apps.set(app, state)
                except CacheUnusable:  # there was no room to note it: as in use, it goes on without
                    self.states_lost += 1

    def _stores(self) -> list[TieredStore]:
        found = [session.cache.store for session in set(self.sessions.values())]
        return [store for store in found if store is not None]

    def look(self) -> None:
        """Look how much the folder takes now."""
        self.peak_bytes = max(self.peak_bytes, folder_bytes(self.folder))

    def _kept(self) -> dict[str, Any]:
        """What it holds now, and what went or was not taken since it was asked before."""
        held = [summary(store.disk) for store in self._stores()]
        tokens = sum(one["tokens"] for one in held)
        writers = [session.cache.writer for session in set(self.sessions.values())]
        lost = Counter(
            evicted_bytes=sum(sum(store.disk.room.evicted_bytes.values()) for store in self._stores()),
            refused=sum(writer.outcomes["refused"] for writer in writers if writer is not None),
            states_lost=self.states_lost,
        )
        since, self._lost = {name: lost[name] - self._lost[name] for name in lost}, lost
        return {"bytes_per_token": sum(one["bytes"] for one in held) / tokens if tokens else None, "lost": since}

    def open(self, engine: Engine, adapters: Sequence[RegisteredAdapter], limit_bytes: int) -> None:
        """Open its sessions, with the adapters loaded. Raises what sessions raise."""
        apart = self.mode.name == APART
        groups = [[adapter] for adapter in adapters] if apart else [list(adapters)]
        for own in groups:
            settings = {**_EVERYWHERE, **self.mode.settings, "disk_limit": limit_bytes // len(groups)}
            folder = self.folder / own[0].name if apart else self.folder
            session = (mobilora.opened if self.mode.name == MOBILORA else Session)(
                engine, cache=str(folder), **settings
            )
            self.sessions |= {adapter.name: session for adapter in own}
            for adapter in own:
                session.adapters.load(adapter.name, adapter.path, adapter.scale)

    def close(self) -> None:
        """Close its sessions. Idempotent."""
        for session in set(self.sessions.values()):
            session.close()
        self.sessions, self.peft = {}, None


@contextmanager
def open_runs(
    engine: Engine,
    peft: PeftGenerate | None,
    modes: Sequence[CacheMode],
    adapters: Sequence[RegisteredAdapter],
    folder: Path,
    limit_bytes: int,
) -> Iterator[list[ModeRun]]:
    """A run for each mode, with the adapters loaded. One that the engine or this version cannot do says why."""
    policies.install()
    runs: list[ModeRun] = []
    try:
        for mode in modes:
            runs.append(run := ModeRun(mode, folder / mode.name))
            if mode.name == PEFT:
                run.peft, run.reason = peft, None if peft else "PEFT computes with transformers: --engine hf"
                continue
            try:
                run.open(engine, adapters, limit_bytes)
            except RekindleError as error:
                run.reason = str(error)
                run.close()
        yield runs
    finally:
        for run in runs:
            run.close()


class Watch:
    """A thread that measures the folder of one run while it answers."""

    def __init__(self) -> None:
        self._watched: ModeRun | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rekindle-bench-watch", daemon=True)

    @contextmanager
    def over(self, run: ModeRun) -> Iterator[None]:
        """Look at this one inside the block."""
        self._watched = run
        try:
            yield
        finally:
            self._watched = None

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            run = self._watched
            if run is not None and run.mode.caches:
                run.look()

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def answer_all(runs: Sequence[ModeRun], workload: AppWorkload, number: int, watch: Watch, advance: Advance) -> Replies:
    """One request in every run, in turns, each time another one first.

    What fills the caches is not asked where nothing is kept.
    """
    replies: Replies = {run.mode.name: run.reason for run in runs if run.reason is not None}
    for run in rotated([run for run in runs if run.ready], number):
        if number >= workload.filling or run.mode.caches:
            advance(f"request {number + 1} of {len(workload.asks)}, {run.mode.name}")
            with watch.over(run):
                replies[run.mode.name] = run.ask(workload.asks[number])
    return replies
