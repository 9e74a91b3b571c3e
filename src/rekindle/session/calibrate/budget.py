"""How many tokens of reused passages a model must recompute to stay near the full computation.

The least budget is sought with which the distributions of the next tokens stay near enough (mean KL), on prompts whose
passages are known from other prompts: along the first tokens of the answer that the full computation gives. What is
found lies between the last that was too little and the first that was enough. ROUGE-L of the greedy answers is
measured, too, but decides nothing: one token that is chosen otherwise, of two that are equally likely, makes another
text of the rest.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rekindle.cache.cost import AlwaysReuse
from rekindle.cache.prefill import PrefillResult
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.chunks.select import OURS
from rekindle.core.chunk import PromptLayout
from rekindle.core.reply import Reuse
from rekindle.core.request import Request, ReuseLevel
from rekindle.engine.base import Engine, Logits, Row
from rekindle.session.calibrate.nearness import nearness, rouge_l
from rekindle.session.calibrate.prompts import PassagePrompt, PassageQuestion, distinct_prompts, donors_of
from rekindle.session.prompt import PromptTokens
from rekindle.session.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
EVERYTHING = 1.0  # where no budget that saves anything is enough
ANSWER_TOKENS = 28
KL_TOKENS = 16  # of an answer, along which distributions are compared; also behind its end
MAX_KL = 0.015  # nats: as for quantized KV
Advance = Callable[[str], None]  # called before each part, with what it is


@dataclass(frozen=True)
class TriedBudget:
    """One budget: how near its answers are, and what of the passages it computed, as means over the prompts."""

    budget: float
    rouge_l: float
    kl: float
    top1: float
    computed_share: float


@dataclass(frozen=True)
class FoundBudget:
    """What was found: `budget` is `EVERYTHING` where none that saves anything stays within `max_kl`."""

    recompute_policy: str
    budget: float
    max_kl: float
    reached: bool
    prompts: int
    tried: tuple[TriedBudget, ...]


def find_budget(
    engine: Engine, questions: Sequence[PassageQuestion], max_kl: float, prompts: int, advance: Advance
) -> FoundBudget | None:
    """The least budget whose mean KL from the full computation is at most `max_kl`.

    None if fewer than two prompts fit the model's context. The engine must be able to recompute tokens. Raises
    `InvalidSetting` if fewer than two questions have enough passages.
    """
    order, room = random.Random(0), engine.context_tokens - ANSWER_TOKENS
    drawn = [one for one in distinct_prompts(questions, order) if len(one.encode(engine).tokens) <= room][:prompts]
    if len(drawn) < 2:
        return None
    recompute_policy = "leading" if engine.capabilities.recompute == "leading" else OURS
    with BudgetTrials.opened(engine, drawn, donors_of(drawn, questions, order), advance) as trials:
        tried = trials.search(BUDGETS, max_kl, advance)
    budget = min_budget(tried, max_kl)
    return FoundBudget(recompute_policy, budget or EVERYTHING, max_kl, budget is not None, len(drawn), tuple(tried))


def min_budget(tried: Sequence[TriedBudget], max_kl: float) -> float | None:
    """The least budget within `max_kl`, between those that were tried (in increasing order); None if none is.

    More is never worse: where noise says otherwise, the least KL so far counts.
    """
    before: tuple[float, float] | None = None  # budget, KL
    for one in tried:
        reached = min(one.kl, before[1] if before else math.inf)
        if reached <= max_kl:
            if before is None or reached == before[1]:
                return one.budget
            return before[0] + (one.budget - before[0]) * (before[1] - max_kl) / (before[1] - reached)
        before = (one.budget, reached)
    return None


@dataclass(frozen=True)
class StartedPrompt:
    """A prompt that was started: what it took, and what of its passages was computed.

    recomputed      tokens of passages that were computed, over all tokens of passages
    computed_share  the same in token-layers: all passes count
    fallback        passages were known, and all of it was computed
    """

    result: PrefillResult
    reuse: Reuse
    seconds: float
    recomputed: float
    computed_share: float
    fallback: bool

    def end(self, cache: PrefixCache, *, keep: bool) -> None:
        """Give its context back; nothing of it is kept unless it shall be."""
        if not keep:
            self.result.context.passing = True
        cache.commit(self.result.context)


def start_prompt(
    cache: PrefixCache, engine: Engine, request: Request, prompt: PromptTokens, more_tokens: int
) -> StartedPrompt:
    """Prefill a prompt, with room for more; the clock runs until its first logits are there."""
    assert prompt.prompt_layout is not None
    began = time.perf_counter()
    prefill = cache.prepare(request, prompt.tokens, _never, None, prompt.prompt_layout)
    prefill.run(len(prompt.tokens) + more_tokens, _never)
    seconds, result = time.perf_counter() - began, prefill.result
    result.context.land()  # the next one begins with the same tokens, and would wait for it
    passages = prefill.lookup.passages
    usable = passages is not None and passages.knows_more_than(result.plan.reused)
    shares = _shares(prompt.prompt_layout, result, len(engine.layout.layers))
    return StartedPrompt(result, prefill.reuse, seconds, *shares, usable and result.plan.reuse_chunks is None)


def _shares(prompt_layout: PromptLayout, result: PrefillResult, layers: int) -> tuple[float, float]:
    tokens = sum(map(len, prompt_layout.chunks))
    whole = sum(  # tokens of passages that were not stored
        max(0, min(step.span.stop, span.stop) - max(step.span.start, span.start))
        for step in result.plan.computes
        for span in prompt_layout.chunks
    )
    return (len(result.recomputed_positions) + whole) / tokens, (result.cells + whole * layers) / (tokens * layers)


def _never() -> bool:
    return False


class PassageTrials:
    """A session in a folder of its own whose passages were all computed in donors. What is tried is never kept."""

    def __init__(self, session: Session) -> None:
        self.session, self.engine = session, session.engine

    @staticmethod
    @contextmanager
    def warmed(
        engine: Engine, donors: Sequence[PassagePrompt], advance: Advance, chunks: type[ChunkPrefill] = ChunkPrefill
    ) -> Iterator[Session]:
        """A session that computed the donors, each exactly, and kept them."""
        with (
            tempfile.TemporaryDirectory(prefix="rekindle-") as folder,
            Session(
                engine,
                cache=folder,
                reuse="approximate",
                memory_limit="2GB",
                disk_limit="90%",
                deterministic=False,  # and so on: whatever the user's own settings are
                origin="none",
                adapter="none",
                keep_alive="none",
            ) as session,
        ):
            session.cache.kv.costs = AlwaysReuse()  # a passage that is computed because it is faster shows no quality
            session.cache.chunks = chunks(session.cache.kv, session.settings)
            for number, donor in enumerate(donors, start=1):
                advance(f"compute earlier prompt {number} of {len(donors)}")
                session.warm(donor.request().prompt, documents=donor.quotes)
            session.cache.unpark()
            yield session

    def end(self, some: StartedPrompt) -> None:
        """Let it go."""
        some.end(self.session.cache, keep=False)


class BudgetTrials(PassageTrials):
    """The same prompts at one budget after the other, against what the full computation says."""

    def __init__(self, session: Session, prompts: Sequence[PassagePrompt], advance: Advance) -> None:
        super().__init__(session)
        self._exact = []  # prompt, tokens, the answer, the logits [first tokens, vocabulary] that it was drawn from
        for number, prompt in enumerate(prompts, start=1):
            advance(f"compute prompt {number} of {len(prompts)} in full")
            tokens = prompt.encode(self.engine)
            some = self._start(prompt, tokens, "off")
            self._exact.append((prompt, tokens, *self._greedy(some)))
            self.end(some)

    @classmethod
    @contextmanager
    def opened(
        cls, engine: Engine, prompts: Sequence[PassagePrompt], donors: Sequence[PassagePrompt], advance: Advance
    ) -> Iterator[Self]:
        """With the donors computed, and the prompts, too."""
        with cls.warmed(engine, donors, advance) as session:
            yield cls(session, prompts, advance)

    def search(self, budgets: Sequence[float], max_kl: float, advance: Advance) -> list[TriedBudget]:
        """Halve the range of budgets (in increasing order) until the least within `max_kl` is found.

        Returns those that were tried, in increasing order: two neighbours are among them, unless the least one is
        enough or none is.
        """
        tried: list[TriedBudget] = []
        low, high = 0, len(budgets)  # below low: too little; from high on: enough
        while low < high:
            middle = (low + high) // 2
            advance(f"a budget of {budgets[middle]:g}")
            tried.append(self._try(budgets[middle]))
            low, high = (low, middle) if tried[-1].kl <= max_kl else (middle + 1, high)
        return sorted(tried, key=lambda one: one.budget)

    def choose(self, budget: float) -> None:
        """Recompute this share of passages from now on."""
        settings = replace(self.session.settings, recompute_budget=budget)
        self.session.cache.chunks = ChunkPrefill(self.session.cache.kv, settings)

    def _try(self, budget: float) -> TriedBudget:
        self.choose(budget)
        rouge, near, shares = [], [], []
        for prompt, tokens, answer, logits in self._exact:
            some = self._start(prompt, tokens, "approximate")
            rouge.append(rouge_l(self._ended(answer), self._ended(self._greedy(some)[0])))
            near.append(nearness(logits, self._forced(some, answer[: len(logits)])))
            shares.append(some.computed_share)
            self.end(some)
        kl, top1 = [one.mean_kl for one in near], [one.top1 for one in near]
        return TriedBudget(budget, *map(statistics.fmean, (rouge, kl, top1, shares)))

    def _start(self, prompt: PassagePrompt, tokens: PromptTokens, reuse: ReuseLevel) -> StartedPrompt:
        """Start a prompt with room for an answer."""
        return start_prompt(self.session.cache, self.engine, prompt.request(reuse=reuse), tokens, ANSWER_TOKENS)

    def _greedy(self, some: StartedPrompt) -> tuple[list[int], Logits]:
        """The answer, also behind its end if it is short, and the logits of its first tokens.

        The sequence is as before."""
        sequence, logits = some.result.context.sequence, [some.result.logits[-1]]
        length, answer = sequence.length, [int(logits[0].argmax())]
        stops = self.engine.tokenizer.stop_ids
        while len(answer) < KL_TOKENS or (len(answer) < ANSWER_TOKENS and stops.isdisjoint(answer)):
            (found,) = self.engine.step([Row.following(sequence, answer[-1:])])
            logits.append(found[-1])
            answer.append(int(found[-1].argmax()))
        sequence.truncate(length)
        return answer, np.stack(logits[:KL_TOKENS])

    def _ended(self, answer: Sequence[int]) -> Sequence[int]:
        """The answer up to where the model ends it."""
        stops = self.engine.tokenizer.stop_ids
        return answer[: next((place + 1 for place, token in enumerate(answer) if token in stops), None)]

    def _forced(self, some: StartedPrompt, answer: Sequence[int]) -> Logits:
        """The logits `[answer, vocabulary]` along another answer."""
        if len(answer) == 1:
            return some.result.logits[-1:]
        sequence = some.result.context.sequence
        (found,) = self.engine.step([Row.following(sequence, answer[:-1], logits="all")])
        return np.concatenate([some.result.logits[-1:], found])
