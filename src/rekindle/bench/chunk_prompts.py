"""The prompts of `rekindle bench chunks`, and the earlier ones that their passages are known from.

test prompt    [a1][a2][a3][a4][a5] question a
donors         [c2][a1][b4][d5]     question x        every passage stands in exactly one donor, with passages of other
               [a2][d1][e3]         question y        prompts around it and another question behind it
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.bench.contexts import Asked
from rekindle.core.document import Quote
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.run.knowledge import asking
from rekindle.run.prompt import PromptTokens, encode_prompt

PASSAGES = 5  # of a prompt
DONOR_PASSAGES = (3, 5)  # from, to
_NO_QUESTION = "What do these passages tell?"


@dataclass(frozen=True)
class ChunkPrompt:
    """A question about passages, with the answers that are right."""

    question: str
    quotes: tuple[Quote, ...]
    answers: tuple[str, ...] = ()

    def request(self, **options: str) -> Request:
        """How it is asked."""
        return Request.of(asking(self.question), documents=self.quotes, max_tokens=1, **options)  # type: ignore[arg-type]

    def encode(self, engine: Engine) -> PromptTokens:
        """Its tokens."""
        return encode_prompt(engine, self.request())


@dataclass(frozen=True)
class Held:
    """Prompts to calibrate on, prompts to test on, and the donors of both. No passage is in two prompts."""

    calibration: tuple[ChunkPrompt, ...]
    test: tuple[ChunkPrompt, ...]
    donors: tuple[ChunkPrompt, ...]


def held(asked: Sequence[Asked], calibration: int, test: int, seed: int, passages: int = PASSAGES) -> Held:
    """Draw prompts: calibration from one end of the shuffled questions, test from the other.

    Where there are too few for both, a quarter of them (at least one) is for calibration. Raises `InvalidSetting` if
    there are not even two.
    """
    order = random.Random(seed)
    drawn = _distinct(asked, passages, order)
    if len(drawn) < 2:
        raise InvalidSetting(f"--data has fewer than two questions with {passages} passages of their own each.")
    if calibration + test > len(drawn):
        calibration = min(calibration, max(1, len(drawn) // 4)) if test else min(calibration, len(drawn))
    first = tuple(drawn[:calibration])
    last = tuple(drawn[max(calibration, len(drawn) - test) :]) if test else ()
    return Held(first, last, _Packing((*first, *last), asked, order).donors())


def _distinct(asked: Sequence[Asked], passages: int, order: random.Random) -> list[ChunkPrompt]:
    """Every question with its first passages, shuffled; a passage that another prompt has is left out."""
    taken: set[Quote] = set()
    prompts = []
    for one in order.sample(asked, len(asked)):
        quotes = [quote for quote in one.paragraphs if quote not in taken][:passages]
        if len(quotes) < passages:
            continue
        taken.update(quotes)
        prompts.append(ChunkPrompt(one.question, tuple(order.sample(quotes, len(quotes))), one.answers))
    return prompts


class _Packing:
    """Packs all passages into earlier prompts such that no two of one prompt meet again."""

    def __init__(self, prompts: Sequence[ChunkPrompt], asked: Sequence[Asked], order: random.Random) -> None:
        self._order = order
        self._prompts = prompts
        self._questions = [one.question for one in asked]
        self._number = {quote: number for number, prompt in enumerate(prompts) for quote in prompt.quotes}
        self._first = {prompt.quotes[0] for prompt in prompts}
        spare = [quote for one in asked for quote in one.paragraphs if quote not in self._number]
        self._spare = order.sample(spare, len(spare))  # passages of no prompt

    def donors(self) -> tuple[ChunkPrompt, ...]:
        """Each passage goes to an open donor that has none of its own prompt; donors are of different sizes."""
        growing: list[tuple[int, list[Quote]]] = []  # how many it takes, what it has
        done: list[list[Quote]] = []
        for quote in self._order.sample(list(self._number), len(self._number)):
            number = self._number[quote]
            free = [donor for donor in growing if all(number != self._number[other] for other in donor[1])]
            if free:
                donor = self._order.choice(free)
            else:
                donor = (self._order.randint(*DONOR_PASSAGES), [])
                growing.append(donor)
            donor[1].append(quote)
            if len(donor[1]) == donor[0]:
                growing.remove(donor)
                done.append(donor[1])
        return tuple(self._donor(quotes) for quotes in (*done, *(quotes for _, quotes in growing)))

    def _donor(self, quotes: list[Quote]) -> ChunkPrompt:
        """Filled up with passages of no prompt; none begins with a passage that its own prompt begins with."""
        while len(quotes) < DONOR_PASSAGES[0] and self._spare:
            quotes.append(self._spare.pop())
        quotes.sort(key=lambda quote: quote in self._first)  # stable
        if quotes[0] in self._first and self._spare:
            quotes.insert(0, self._spare.pop())
        own = {self._prompts[self._number[quote]].question for quote in quotes if quote in self._number}
        others = [question for question in self._questions if question not in own] or [_NO_QUESTION]
        return ChunkPrompt(self._order.choice(others), tuple(quotes))
