"""The ways to start a prompt with known passages that `python -m benchmarks chunks` compares, and one such start."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.base import Advance, BenchOptions
from benchmarks.baselines import recompute_policies
from benchmarks.baselines.recompute_policies import CRAFTS, ScoredChunks
from rekindle.cache.prefix_cache import ChunkStrategy
from rekindle.chunks.select import OURS, SAFE_BUDGET
from rekindle.core.request import ReuseLevel
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.session.calibrate.budget import PassageTrials, StartedPrompt, start_prompt
from rekindle.session.calibrate.prompts import PASSAGES, PassagePrompt, PassageQuestion, distinct_prompts, donors_of
from rekindle.session.prompt import PromptTokens
from rekindle.session.session import Session

SHARE = 0.30  # of the passages' tokens, which rivals and signals get
BUDGETS = (0.1, 0.2, SHARE, SAFE_BUDGET)
PARTIAL_BUDGETS = (0.2, SHARE, SAFE_BUDGET)
QUICK_BUDGETS = (SHARE,)
SIGNALS = ("outside", "seen", "received", "lead", "deviation*seen")
RIVALS = ("random", "h2o", "leading", "cacheblend")
CRAFT, *OTHER_CRAFTS = CRAFTS
CRAFT_ALPHAS, QUICK_CRAFT_ALPHAS = (0.7, 1.0, 1.3), (0.6, 1.0)  # times the one that was tuned
_SEEN_ALONE = "this engine recomputes leading tokens only"


@dataclass(frozen=True)
class ChunkMode:
    """One mode. `budget` is the share of tokens recomputed, for cache-craft its alpha, None where there is none."""

    name: str
    reuse: ReuseLevel = "approximate"
    budget: float | None = None

    @property
    def recompute(self) -> bool:
        """Whether it takes passages from other prompts."""
        return self.reuse == "approximate"

    @property
    def label(self) -> str:
        """For people."""
        if self.name in SIGNALS:
            return f"{self.name} alone" if "*" not in self.name else self.name
        return self.name if self.name != OURS else f"{self.name} {self.budget:.0%}"


NONE, PREFIX = ChunkMode("none", "off"), ChunkMode("prefix", "exact")


def modes_of(engine: Engine, alphas: Mapping[str, float], *, quick: bool) -> list[ChunkMode]:
    """Those that an engine can do; `alphas` are those that were tuned for the ways of Cache-Craft.

    As published it comes with alphas around the tuned one: other prompts make it compute another share, and ours is
    compared with the one that computes as much.
    """
    if engine.capabilities.recompute == "leading":
        return [NONE, PREFIX, ChunkMode("full-cache"), ChunkMode("leading", budget=SHARE)]
    rivals = [ChunkMode(name, budget=SHARE) for name in RIVALS]
    ours = [ChunkMode(OURS, budget=budget) for budget in (QUICK_BUDGETS if quick else BUDGETS)]
    times = QUICK_CRAFT_ALPHAS if quick else CRAFT_ALPHAS
    crafts = [
        ChunkMode(name, budget=alpha * n) for name, alpha in alphas.items() for n in (times if name == CRAFT else [1])
    ]
    alone = [ChunkMode(name, budget=SHARE) for name in SIGNALS]
    if quick:
        rivals, alone = rivals[:2], []
    return [NONE, PREFIX, ChunkMode("set-cache"), ChunkMode("full-cache"), *rivals, *crafts, *ours, *alone]


def partial_modes(engine: Engine, alphas: Mapping[str, float]) -> list[ChunkMode]:
    """Those that are compared where only part of what came before a passage has changed."""
    name = "leading" if engine.capabilities.recompute == "leading" else OURS
    crafts = [ChunkMode(CRAFT, budget=alphas[CRAFT])] if alphas else []
    ours = [ChunkMode(name, budget=budget) for budget in PARTIAL_BUDGETS]
    return [NONE, PREFIX, ChunkMode("full-cache"), *crafts, *ours]


def impossible(engine: Engine) -> dict[str, str]:
    """The modes that an engine cannot do, with the reason."""
    if engine.capabilities.recompute != "leading":
        return {}
    return dict.fromkeys(("set-cache", "random", "h2o", "cacheblend", *CRAFTS, OURS), _SEEN_ALONE)


class ModeTrials(PassageTrials):
    """One session whose passages were all computed in donors, and every mode on it: the same store and engine."""

    def __init__(self, session: Session, options: BenchOptions) -> None:
        super().__init__(session)
        self.options = options
        self._modes: dict[ChunkMode, ChunkStrategy] = {}

    @classmethod
    @contextmanager
    def opened(
        cls, engine: Engine, options: BenchOptions, donors: Sequence[PassagePrompt], advance: Advance
    ) -> Iterator[ModeTrials]:
        """One in a folder of its own, where these donors were computed."""
        with cls.warmed(engine, donors, advance, ScoredChunks) as session:
            yield cls(session, options)

    def counts(self) -> object:
        """How much is kept now."""
        store = self.session.cache.store
        assert store is not None
        self.session.flush()
        rows = store.disk.entries()
        with store.disk.database.reading() as connection:
            variants = connection.execute("SELECT count(*), count(DISTINCT digest) FROM variants").fetchone()
        return variants, len(rows), sum(row.tokens for row in rows)

    def start(
        self, mode: ChunkMode, prompt: PassagePrompt, tokens: PromptTokens, more_tokens: int = 0
    ) -> StartedPrompt:
        """Start a prompt in a mode."""
        if mode.recompute:
            self._choose(mode)
        request = prompt.request(reuse=mode.reuse)
        return start_prompt(self.session.cache, self.engine, request, tokens, more_tokens)

    def _choose(self, mode: ChunkMode) -> None:
        if mode not in self._modes:
            recompute_policies.use(self.session, mode.name, mode.budget)
            self._modes[mode] = self.session.cache.chunks
        self.session.cache.chunks = self._modes[mode]


def require_chunk_reuse(engine: Engine) -> None:
    """Raises `InvalidSetting` for an engine that cannot reuse passages of other prompts."""
    if engine.capabilities.recompute == "none" or not engine.capabilities.spans:
        raise InvalidSetting(f"{engine.name} cannot reuse passages of other prompts: measure with another model.")


@dataclass(frozen=True)
class PromptSets:
    """Prompts to calibrate on, prompts to test on, and the donors of both. No passage is in two prompts."""

    calibration: tuple[PassagePrompt, ...]
    test: tuple[PassagePrompt, ...]
    donors: tuple[PassagePrompt, ...]


def held(
    questions: Sequence[PassageQuestion], calibration: int, test: int, seed: int, passages: int = PASSAGES
) -> PromptSets:
    """Draw prompts: calibration from one end of the shuffled questions, test from the other.

    Where there are too few for both, a quarter of them (at least one) is for calibration. Raises `InvalidSetting` if
    there are not even two.
    """
    order = random.Random(seed)
    drawn = distinct_prompts(questions, order, passages)
    if calibration + test > len(drawn):
        calibration = min(calibration, max(1, len(drawn) // 4)) if test else min(calibration, len(drawn))
    first = tuple(drawn[:calibration])
    last = tuple(drawn[max(calibration, len(drawn) - test) :]) if test else ()
    return PromptSets(first, last, donors_of((*first, *last), questions, order))


def partly_changed(prompts: Sequence[PassagePrompt], seed: int) -> tuple[PassagePrompt, ...]:
    """Donors with the passages of a prompt in its order, but for one before the last: that one stood in the donor of
    the next prompt, in place of the one which that prompt lacks there."""
    order = random.Random(seed)
    places = [order.randrange(len(prompt.quotes) - 1) for prompt in prompts]
    donors = []
    for number, prompt in enumerate(prompts):
        before, quotes = prompts[number - 1], list(prompt.quotes)
        quotes[places[number]] = before.quotes[places[number - 1]]
        donors.append(PassagePrompt(before.question, tuple(quotes)))
    return tuple(donors)
