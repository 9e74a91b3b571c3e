"""Origins in trouble: what they cost, compared with computing without any.

refused   nobody listens there
slow      a link fifty times slower than computing
dies      a link that is as fast as computing, and brings nothing more after a moment
damaged   every slice is wrong
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.base import Advance
from benchmarks.stream.costs import LayerTimings
from benchmarks.stream.modes import LEVEL, StreamMode
from benchmarks.stream.site import ContextSetup, Site
from benchmarks.stream.traces import Trace, made_trace

KINDS = ("refused", "slow", "dies", "damaged")
_SLOW, _ALIVE = 50.0, 0.15  # times computing takes; the share of it after which a link dies
_ROUNDS = 3
_LOCAL, _OURS = StreamMode("plain"), StreamMode("ours", LEVEL)


@dataclass(frozen=True)
class Trouble:
    """The same prompt over every kind of origin."""

    setting: ContextSetup
    site: Site
    folder: Path
    measured: LayerTimings
    local_seconds: float
    advance: Advance

    def row(self, kind: str) -> dict[str, Any]:
        """Medians of both ways, in turns."""
        local, ours = [], []
        with self._site(kind) as site:
            trace = self._trace(kind, site)
            for turn in range(_ROUNDS):
                self.advance(f"an origin in trouble ({kind}), {turn + 1} of {_ROUNDS}")
                local.append(site.run(_LOCAL, trace, self.local_seconds, self.local_seconds).ttft_s)
                ours.append(site.run(_OURS, trace, self.local_seconds, self.local_seconds).ttft_s)
        times = statistics.median(local), statistics.median(ours)
        return {"trouble": kind, "local_s": times[0], "ours_s": times[1], "vs_local": times[1] / times[0]}

    def _trace(self, kind: str, site: Site) -> Trace:
        size, seconds = float(site.sizes(LEVEL).sum()), self.local_seconds
        steady = made_trace("constant", seconds, 0).at_ratio(size, seconds, _SLOW if kind == "slow" else 1.0)
        if kind != "dies":
            return steady
        return Trace(kind, np.array([_ALIVE * seconds, 1e6]), np.array([steady.mean_rate, 0.0]))

    @contextmanager
    def _site(self, kind: str) -> Iterator[Site]:
        if kind == "refused":
            with self.site.elsewhere(f"http://127.0.0.1:{_free_port()}") as site:
                yield site
        elif kind == "damaged":
            folder = self.folder / kind
            with Site(self.setting, folder, (LEVEL,)) as site:
                site.learn(self.measured)
                for path in folder.glob("contexts/*/*.kv"):
                    path.write_bytes(bytes(path.stat().st_size))
                yield site
        else:
            yield self.site


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
