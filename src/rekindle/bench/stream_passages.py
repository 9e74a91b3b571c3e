"""Several contexts in one prompt: passages that an origin has, each published alone, mended where they stand.

computed   without an origin
fetched    all of them come first, then they are mended
ours       the first ones are computed while the last ones come

A ratio is how long all passages but the first take to come, as a multiple of computing the prompt.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.bench.base import Advance
from rekindle.bench.chunk_quality import divergence, log_softmax
from rekindle.bench.shaped_origin import ShapedOrigin
from rekindle.bench.traces import made_trace
from rekindle.core.kv import Span
from rekindle.core.reply import Reuse
from rekindle.core.request import Request
from rekindle.engine.base import Engine, Logits
from rekindle.origin.publish import Publisher
from rekindle.origin.signing import SigningKey
from rekindle.origin.slices import RAW, level_named
from rekindle.run.arrivals import Arrivals
from rekindle.run.knowledge import asking
from rekindle.run.prompt import encode_prompt
from rekindle.run.publishing import computed
from rekindle.run.session import Session

RATIOS = (0.25, 1.0, 4.0)
PASSAGES = 5
_ROUNDS = 2
_WAYS = ("computed", "fetched", "ours")


@dataclass(frozen=True)
class _Run:
    seconds: float
    logits: Logits
    reuse: Reuse


@dataclass
class Passages:
    """A question about passages of a text. `tokens` is the text, cut into as many passages as there are."""

    engine: Engine
    tokens: Sequence[int]
    folder: Path
    advance: Advance
    _key: SigningKey = field(default_factory=SigningKey.new)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def measure(self) -> list[dict[str, Any]]:
        """One row for each ratio: medians of all ways, in turns."""
        self.advance("compute and publish passages")
        size_bytes = self._publish()
        with ShapedOrigin(self.folder / "passages") as origin:
            origin.begin(made_trace("constant", 1.0, 0).at_ratio(1.0, 1.0, 1e-12))
            seconds = min(self._run("computed", origin.url).seconds for _ in range(2))
            rows = []
            for ratio in RATIOS:
                link = made_trace("constant", ratio * seconds, 0).at_ratio(size_bytes, seconds, ratio)
                runs: dict[str, list[_Run]] = {way: [] for way in _WAYS}
                for turn in range(_ROUNDS):
                    for way in _WAYS:
                        self.advance(f"{PASSAGES} passages, {ratio:g} of computing, {way}, {turn + 1} of {_ROUNDS}")
                        origin.begin(link)
                        runs[way].append(self._run(way, origin.url))
                rows.append(_row(ratio, runs))
        return rows

    @property
    def _request(self) -> Request:
        length = len(self.tokens) // PASSAGES
        pieces = [self.tokens[start : start + length] for start in range(0, length * PASSAGES, length)]
        return Request.of(asking("What was said?"), documents=[self.engine.tokenizer.decode(one) for one in pieces])

    def _publish(self) -> float:
        """Each passage alone, behind the same head. How many bytes all but the first are."""
        size_bytes = 0
        with Session(self.engine, cache="off") as session:
            for number, quote in enumerate(self._request.quotes):
                with computed(session, Request.of(asking(""), documents=[quote], max_tokens=0)) as source:
                    level = level_named(RAW, self.engine.layout)
                    done = Publisher(self.folder / "passages", self._key).publish(source, [level])
                head = done.tokens - len(self.tokens) // PASSAGES  # which does not come
                size_bytes += 0 if number == 0 else done.levels[0].size_bytes * (done.tokens - head) // done.tokens
        return float(size_bytes)

    @contextmanager
    def _session(self, way: str, url: str) -> Iterator[Session]:
        """One that knows nothing."""
        cache = self.folder / f"cache-{next(self._numbers)}"
        remote: dict[str, Any] = {} if way == "computed" else {"origin": url, "origin_keys": self._key.public}
        with Session(self.engine, cache=cache, reuse="approximate", **remote) as session:
            yield session

    def _run(self, way: str, url: str) -> _Run:
        request = self._request
        with self._session(way, url) as session:
            cache, begun = session.cache, time.perf_counter()
            ahead = session.prefetch(request) if way == "fetched" else None
            if ahead is not None and cache.streams is not None:
                for coming in cache.streams.ahead:
                    while isinstance(coming, Arrivals) and coming.left():
                        coming.wait(1.0)
            prompt = encode_prompt(self.engine, request)
            known = cache.lookup(request, prompt.tokens, lambda: False, None, prompt.outline)
            plan = cache.plan(known)
            filled = cache.fill(known, plan, len(prompt.tokens) + 1, lambda: False)
            seconds = time.perf_counter() - begun
            run = _Run(seconds, np.array(filled.logits, np.float32), cache.reuse(known, plan, filled))
            cache.keep(filled.context)
            if ahead is not None:
                ahead.close()
        return run


def _row(ratio: float, runs: dict[str, list[_Run]]) -> dict[str, Any]:
    seconds = {way: statistics.median(run.seconds for run in some) for way, some in runs.items()}
    ours, exact = runs["ours"][-1], runs["computed"][-1]
    came = [chunk for chunk in ours.reuse.chunks if chunk.streamed]
    kl, top1 = divergence(log_softmax(exact.logits), log_softmax(ours.logits))
    return {
        "ratio": ratio,
        **{f"{way}_s": seconds[way] for way in _WAYS},
        "vs_computed": seconds["computed"] / seconds["ours"],
        "vs_fetched": seconds["fetched"] / seconds["ours"],
        "passages": PASSAGES,
        "streamed_passages": len(came),
        "streamed_tokens": sum(len(Span(chunk.start, chunk.stop)) for chunk in came),
        "recomputed_tokens": ours.reuse.recomputed,
        "kl": kl,
        "top1": top1,
    }
