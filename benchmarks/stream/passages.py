"""Several contexts in one prompt: passages that an origin has, each published alone, reused with recompute.

computed   without an origin
fetched    all of them come first, then tokens are recomputed
ours       the first ones are computed while the last ones come

A ratio is how long all passages take to come, as a multiple of computing the prompt. They come without loss: all loss
comes from chunk reuse.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.base import Advance
from benchmarks.quality import ANSWER_TOKENS, Quality, judge
from benchmarks.stream.shaped_origin import ShapedOrigin
from benchmarks.stream.traces import made_trace
from rekindle.answers.ask_terms import asking
from rekindle.core.plan import RAW
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.remote.fetch import RemoteChunkFetch
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.remote_kv import RemoteKv
from rekindle.remote.signing import SigningKey
from rekindle.remote.slices import level_named
from rekindle.session.calibrate.budget import StartedPrompt, start_prompt
from rekindle.session.prompt import PromptTokens, encode_prompt
from rekindle.session.publish import computed
from rekindle.session.session import Session

RATIOS = (0.25, 1.0, 4.0)
PASSAGES = 5
_ROUNDS = 3
_WAYS = ("computed", "fetched", "ours")


@dataclass(frozen=True)
class _Run:
    seconds: float
    streamed: int  # tokens
    recomputed: int
    quality: Quality | None


@dataclass(frozen=True)
class Passages:
    """A question about a text, cut into passages."""

    engine: Engine
    tokens: Sequence[int]
    folder: Path
    advance: Advance
    _key: SigningKey = field(default_factory=SigningKey.new)
    _caches: Iterator[int] = field(default_factory=itertools.count)

    def measure(self) -> list[dict[str, Any]]:
        """One row for each ratio: medians of all ways, in turns."""
        self.advance("compute and publish passages")
        size_bytes = self._publish()
        with ShapedOrigin(self.folder / "passages") as origin, self._started("computed", origin.url) as (exact, _):
            seconds = min(self._run("computed", origin.url).seconds for _ in range(2))
            return [self._row(ratio, origin, size_bytes, seconds, exact) for ratio in RATIOS]

    def _row(
        self, ratio: float, origin: ShapedOrigin, size_bytes: float, seconds: float, exact: StartedPrompt
    ) -> dict[str, Any]:
        link = made_trace("constant", ratio * seconds, 0).at_ratio(size_bytes, seconds, ratio)
        runs: dict[str, list[_Run]] = {way: [] for way in _WAYS}
        for turn in range(_ROUNDS):
            for way in _WAYS:
                self.advance(f"{PASSAGES} passages, streaming takes {ratio:g} of computing: {way}, {turn + 1}")
                origin.begin(link)
                runs[way].append(self._run(way, origin.url, exact))
        times = {way: statistics.median(run.seconds for run in some) for way, some in runs.items()}
        ours = runs["ours"][-1]
        assert ours.quality is not None
        return {
            "ratio": ratio,
            **{f"{way}_s": times[way] for way in _WAYS},
            "vs_computed": times["computed"] / times["ours"],
            "vs_fetched": times["fetched"] / times["ours"],
            "passages": PASSAGES,
            "streamed_tokens": ours.streamed,
            "recomputed_tokens": ours.recomputed,
            "kl": ours.quality.kl,
            "top1": ours.quality.top1,
            "rouge_l": ours.quality.rouge_l,
        }

    @property
    def _request(self) -> Request:
        length = len(self.tokens) // PASSAGES
        pieces = [self.tokens[place : place + length] for place in range(0, length * PASSAGES, length)]
        return Request.of(asking("What was said?"), documents=[self.engine.tokenizer.decode(one) for one in pieces])

    def _publish(self) -> float:
        """Each passage alone, behind the same head. How many bytes they are."""
        sizes = []
        with Session(self.engine, cache="off") as session:
            for quote in self._request.quotes:
                alone = Request.of(asking(""), documents=[quote], max_tokens=0)
                (span,) = _prompt_layout(encode_prompt(self.engine, alone)).chunks
                with computed(session, alone) as source:
                    publisher = Publisher(self.folder / "passages", self._key)
                    done = publisher.publish(source, [level_named(RAW, self.engine.layout)])
                sizes.append(done.levels[0].size_bytes * len(span) / done.tokens)
        return sum(sizes)

    def _run(self, way: str, url: str, exact: StartedPrompt | None = None) -> _Run:
        with self._started(way, url) as (begun, seconds):
            quality = None if exact is None else judge(self.engine, [exact, begun], ())[1]
            came = sum(chunk.stop - chunk.start for chunk in begun.reuse.chunks if chunk.streamed)
            return _Run(seconds, came, begun.reuse.recomputed, quality)

    @contextmanager
    def _started(self, way: str, url: str) -> Iterator[tuple[StartedPrompt, float]]:
        """The prompt, started by a session that knows nothing, and what that took."""
        remote: dict[str, Any] = {} if way == "computed" else {"origin": url, "origin_keys": self._key.public}
        cache = self.folder / f"cache-{next(self._caches)}"
        with ExitStack() as stack:
            session = stack.enter_context(Session(self.engine, cache=cache, reuse="approximate", **remote))
            request, begun = self._request, time.perf_counter()
            if way == "fetched":
                self._fetch(session, request, stack)
            prompt = encode_prompt(self.engine, request)
            started = start_prompt(session.cache, self.engine, request, prompt, ANSWER_TOKENS)
            seconds = time.perf_counter() - begun
            stack.callback(started.end, session.cache, keep=False)
            yield started, seconds

    @staticmethod
    def _fetch(session: Session, request: Request, stack: ExitStack) -> None:
        """Wait until all passages have come."""
        ahead, remote = session.prefetch(request), session.cache.remote
        assert ahead is not None and isinstance(remote, RemoteKv)
        stack.callback(ahead.close)
        for coming in remote.ahead:
            while isinstance(coming, RemoteChunkFetch) and coming.left():
                coming.wait(1.0)


def _prompt_layout(prompt: PromptTokens) -> Any:
    assert prompt.prompt_layout is not None
    return prompt.prompt_layout
