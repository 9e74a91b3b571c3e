"""The ways to start a prompt with known passages that `rekindle bench chunks` compares, and one such start."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rekindle.bench.base import Advance, BenchOptions
from rekindle.bench.chunk_prompts import ChunkPrompt
from rekindle.core.chunk import Outline
from rekindle.core.reply import Reuse
from rekindle.core.request import Request, ReuseLevel
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.reuse.mending import OURS
from rekindle.run.cache import PrefixCache
from rekindle.run.chunks import Chunks
from rekindle.run.prefill import Filled
from rekindle.run.prompt import PromptTokens
from rekindle.run.session import Session

SHARE = 0.30  # of the passages' tokens, which rivals and signals get
BUDGETS = (0.1, 0.2, SHARE, 0.5)
QUICK_BUDGETS = (SHARE,)
SIGNALS = ("outside", "seen", "deviation", "received", "lead", "deviation*seen")
RIVALS = ("random", "h2o", "leading")
CRAFT = "cache-craft"
CRAFT_ALPHAS, QUICK_CRAFT_ALPHAS = (0.7, 1.0, 1.3), (0.6, 1.0)  # times the one that was tuned
_SEEN_ALONE = "this engine mends by leading tokens only"


@dataclass(frozen=True)
class Mode:
    """One way. `budget` is the share of tokens computed anew, for cache-craft its alpha, None where there is none."""

    name: str
    reuse: ReuseLevel = "approximate"
    budget: float | None = None

    @property
    def mends(self) -> bool:
        """Whether it takes passages from other prompts."""
        return self.reuse == "approximate"

    @property
    def label(self) -> str:
        """For people."""
        if self.name in SIGNALS:
            return f"{self.name} alone" if "*" not in self.name else self.name
        return self.name if self.name != OURS else f"{self.name} {self.budget:.0%}"


NONE, PREFIX = Mode("none", "off"), Mode("prefix", "exact")


def modes_of(engine: Engine, alpha: float, *, quick: bool) -> list[Mode]:
    """Those that an engine can do.

    Cache-Craft comes with alphas around the one that was tuned: other prompts make it compute another share, and ours
    is compared with the one that computes as much.
    """
    if engine.capabilities.mends == "leading":
        return [NONE, PREFIX, Mode("full-cache"), Mode("leading", budget=SHARE)]
    rivals = [Mode(name, budget=SHARE) for name in RIVALS]
    ours = [Mode(OURS, budget=budget) for budget in (QUICK_BUDGETS if quick else BUDGETS)]
    crafts = [Mode(CRAFT, budget=alpha * times) for times in (QUICK_CRAFT_ALPHAS if quick else CRAFT_ALPHAS)]
    alone = [Mode(name, budget=SHARE) for name in SIGNALS]
    if quick:
        rivals, alone = rivals[:2], []
    return [NONE, PREFIX, Mode("set-cache"), Mode("full-cache"), *rivals, *crafts, *ours, *alone]


def impossible(engine: Engine) -> dict[str, str]:
    """The modes that an engine cannot do, with the reason."""
    if engine.capabilities.mends != "leading":
        return {}
    return dict.fromkeys(("set-cache", "random", "h2o", CRAFT, OURS), _SEEN_ALONE)


@dataclass(frozen=True)
class Start:
    """A prompt that was started: what it took, and what of its passages was computed.

    recomputed      tokens of passages that were computed, over all tokens of passages
    computed_share  the same in token-layers: all passes count
    fallback        passages were known, and all of it was computed
    """

    filled: Filled
    reuse: Reuse
    seconds: float
    recomputed: float
    computed_share: float
    fallback: bool

    def end(self, cache: PrefixCache, *, keep: bool) -> None:
        """Give its context back; nothing of it is kept unless it shall be."""
        if not keep:
            self.filled.context.passing = True
        cache.keep(self.filled.context)


def start(cache: PrefixCache, engine: Engine, request: Request, prompt: PromptTokens, more_tokens: int) -> Start:
    """Look a prompt up, plan and fill, with room for more; the clock runs until its first logits are there."""
    assert prompt.outline is not None
    began = time.perf_counter()
    known = cache.lookup(request, prompt.tokens, _never, None, prompt.outline)
    plan = cache.plan(known)
    filled = cache.fill(known, plan, len(prompt.tokens) + more_tokens, _never)
    seconds = time.perf_counter() - began
    filled.context.land()  # the next mode begins with the same tokens, and would wait for it
    picked = () if known.passages is None else known.passages.picked
    usable = any(chunk.known is not None and chunk.span.stop > filled.plan.reused for chunk in picked)
    shares = _shares(prompt.outline, filled, len(engine.layout.layers))
    return Start(filled, cache.reuse(known, plan, filled), seconds, *shares, usable and filled.plan.mend is None)


def _shares(outline: Outline, filled: Filled, layers: int) -> tuple[float, float]:
    tokens = sum(map(len, outline.chunks))
    whole = sum(  # tokens of passages that nothing was known of
        max(0, min(step.span.stop, span.stop) - max(step.span.start, span.start))
        for step in filled.plan.computes
        for span in outline.chunks
    )
    return (len(filled.anew) + whole) / tokens, (filled.cells + whole * layers) / (tokens * layers)


def _never() -> bool:
    return False


class Kitchen:
    """One session whose passages were all computed in donors, and every mode on it: one store, one memory, one engine.

    What is tested is never kept.
    """

    def __init__(self, session: Session, options: BenchOptions) -> None:
        self.session, self.engine = session, session.engine
        self.options = options
        self._chunks: dict[Mode, Chunks] = {}

    @classmethod
    @contextmanager
    def opened(
        cls, engine: Engine, options: BenchOptions, donors: Sequence[ChunkPrompt], advance: Advance
    ) -> Iterator[Kitchen]:
        """One in a folder of its own, where these donors were computed."""
        with (
            tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder,
            Session(engine, cache=folder, reuse="approximate", memory_limit="2GB", disk_limit="90%") as session,
        ):
            kitchen = cls(session, options)
            advance(f"compute {len(donors)} earlier prompts")
            kitchen.cook(donors)
            yield kitchen

    def cook(self, donors: Sequence[ChunkPrompt]) -> None:
        """Compute the donors, each exactly, and keep them."""
        for donor in donors:
            self.session.warm(donor.request().prompt, documents=donor.quotes)
        self.session.cache.unpark()

    def counts(self) -> object:
        """How much is kept now."""
        store = self.session.cache.store
        assert store is not None
        self.session.flush()
        rows = store.disk.entries()
        return store.variants.stats(), len(rows), sum(row.tokens for row in rows)

    def start(self, mode: Mode, prompt: ChunkPrompt, tokens: PromptTokens, more_tokens: int = 0) -> Start:
        """Start a prompt in a mode."""
        if mode.mends:
            self._choose(mode)
        return start(self.session.cache, self.engine, prompt.request(reuse=mode.reuse), tokens, more_tokens)

    def end(self, some: Start) -> None:
        """Let it go."""
        some.end(self.session.cache, keep=False)

    def _choose(self, mode: Mode) -> None:
        if mode not in self._chunks:
            settings = replace(self.session.settings, mender=mode.name, mend_budget=mode.budget)
            self._chunks[mode] = Chunks(self.engine, settings)
        self.session.cache.chunks = self._chunks[mode]


def require_mending(engine: Engine) -> None:
    """Raises `InvalidSetting` for an engine that cannot reuse passages of other prompts."""
    if engine.capabilities.mends == "none" or not engine.capabilities.spans:
        raise InvalidSetting(f"{engine.name} cannot reuse passages of other prompts: measure with another model.")
