"""What the gain of streaming depends on: how long the context is, what else the machine does, how many ask at once.

The link is always alike, and as fast as computing would be if nothing disturbed it. How it depends on the bandwidth is
what the ratios of the bench say.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.stream.costs import LayerTimings
from benchmarks.stream.modes import LEVEL, StreamMode
from benchmarks.stream.site import ContextSetup, Site
from benchmarks.stream.traces import Trace, made_trace
from rekindle.core.cells import CHUNK_TOKENS

REQUESTS = (1, 2, 4)
_MIN_CHUNKS = 2
_LOCAL, _OURS = StreamMode("local"), StreamMode("ours", LEVEL)

Fields = dict[str, Any]


def jobs(
    site: Callable[[], Site], setting: ContextSetup, folder: Path, measured: LayerTimings, local_seconds: float
) -> dict[str, Callable[[], Fields]]:
    """What measures one row, for each value of each kind."""

    def together(mode: StreamMode, count: int) -> tuple[float, float]:
        return site().together(mode, count, _link(site(), local_seconds), local_seconds)

    def beside(busy: int) -> Fields:
        with _load(busy):
            return _gain("busy cores", busy, partial(together, count=1), local_seconds)

    def at_once(count: int) -> Fields:
        return _gain("requests", count, partial(together, count=count), count * local_seconds)

    lengths = {f"a context of {n} tokens": partial(_context, setting, n, folder, measured) for n in _lengths(setting)}
    cores = {f"{n} cores busy with something else": partial(beside, n) for n in range(_cores() + 1)}
    return {**lengths, **cores, **{f"{n} at once": partial(at_once, n) for n in REQUESTS}}


def _gain(what: str, value: int, run: Callable[[StreamMode], tuple[float, float]], link_seconds: float) -> Fields:
    """Means over those that ask at once; `link_seconds`: how long all of it takes to come.

    `overlap` is the time of both lanes at full speed, with what else the machine does, as a share of ours.
    """
    (local, _), (ours, share) = run(_LOCAL), run(_OURS)
    return {
        "what": what,
        "value": value,
        "local_s": local,
        "ours_s": ours,
        "gain": local / ours,
        "overlap": 1 / (1 / local + 1 / link_seconds) / ours,
        "streamed_share": share,
    }


def _context(setting: ContextSetup, tokens: int, folder: Path, measured: LayerTimings) -> Fields:
    """The same text, cut; the link as fast as computing that takes."""
    whole = len(setting.tokens) - setting.context_tokens
    short = ContextSetup(setting.engine, setting.tokens[: tokens + whole], tokens)
    with Site(short, folder / f"context-{tokens}", (LEVEL,)) as site:
        site.learn(measured)
        still = made_trace("constant", 1.0, 0)
        seconds, _ = site.together(_LOCAL, 1, still, 1.0)
        link = _link(site, seconds)
        return _gain("context tokens", tokens, lambda mode: site.together(mode, 1, link, seconds), seconds)


def _link(site: Site, local_seconds: float) -> Trace:
    size_bytes = float(site.sizes(LEVEL).sum())
    return made_trace("constant", local_seconds, 0).at_ratio(size_bytes, local_seconds, 1.0)


def _lengths(setting: ContextSetup) -> list[int]:
    """Half, a quarter, and so on, of the context, from the shortest."""
    chunks = setting.context_tokens // CHUNK_TOKENS
    found = []
    while chunks >= _MIN_CHUNKS:
        found.append(chunks * CHUNK_TOKENS)
        chunks //= 2
    return found[::-1]


def _cores() -> int:
    return min(2, os.cpu_count() or 1)


@contextmanager
def _load(cores: int) -> Iterator[None]:
    """Processes that compute all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
