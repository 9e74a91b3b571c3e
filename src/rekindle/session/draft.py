"""Drafts: what a reply may well say, checked by the model several tokens at a time.

A stored answer, an earlier reply to the same prompt, or a passage that is quoted often says what comes next. The model
computes the guessed tokens in one step, and each is taken only if it is the one that would have been drawn there:

    guess     the  lamp  was  lit  at  noon
    drawn     the  lamp  was  lit  at  dusk      five tokens for one step, and the text is the model's own

So a draft may be wrong, old, or another question's: it can cost a little time, never change a reply. It is checked only
where that is expected to be sooner: by what a step of several tokens costs, and by how many were right so far.

Some engines use other kernels for larger steps, which round quantized weights differently: a draft that is verified in
too large a step may be accepted where the model alone would have written something else. For such an engine the largest
step in which each token gets the logits that it would get alone is measured once for a model and a machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, cycle, islice, takewhile

import numpy as np

from rekindle.cache.cost import Costs
from rekindle.cache.lookup import CacheLookup
from rekindle.core.identity import digest_of_fields
from rekindle.core.kv import Span
from rekindle.core.request import Request
from rekindle.engine.base import Engine, EngineSequence, Logits, Row
from rekindle.errors import OutOfMemory, StepRefused
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.text.base import Tokenizer

log = logging.getLogger("rekindle.session")

MIN_RUN = 2  # number of tokens of a draft that must have been written before it is followed from there
_MIN_QUOTED_RUN = 3  # the same for the prompt, which is longer and less to the point
_FEWEST, _MOST = 7, 63  # tokens guessed at once: with the one before them, a step has 8 to 64
_MAX_CHARACTERS = 1 << 18  # of a draft are read: replies are shorter, and longer texts take seconds
_MARGIN = 1.75  # what a guess must be expected to gain: neither its time nor its tokens are certain
_PLAIN_STEPS = 8  # of a reply are timed: more would take the place of those with a guess

ANY = 64  # no draft is verified in larger steps
_SIZES = (16, 8, 4, 2)  # of steps that are tried
_BEFORE = 24  # tokens of context, then
_LAST_DIGITS = 1e-3
_MODELS = 64
_TEXT = "The lamp was lit at dusk, and people on the road by the river could see it from the other side. "


class Drafts:
    """What may come next in one reply."""

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        prompt: Sequence[int] = (),
        room: Callable[[], int] | None = None,
        costs: Costs | None = None,
    ) -> None:
        """`texts` are whole replies, the likeliest first; `prompt` may be quoted.

        `room` returns how many tokens may be guessed in one step; None: any number. Without `costs` every guess pays.
        """
        self._costs, self._rates = costs, None if costs is None else costs.rates
        self._plain_steps = 0
        self._room = room
        self._texts = [tuple(text) for text in texts if text]
        self._places = _runs(self._texts, MIN_RUN)
        self._prompt = tuple(prompt)
        self._quoted = _runs([self._prompt], _MIN_QUOTED_RUN)
        self._most, self._most_quoted = _FEWEST, _FEWEST
        self._right = {False: (3, 3), True: (3, 4)}  # tokens of how many, by `_from_prompt`; at first an assumption
        self._from_prompt = False
        self.taken = self.refused = 0
        self.trial_seconds = 0.0  # it took to measure the largest step

    def guess(self, written: Sequence[int]) -> Sequence[int]:
        """The tokens that may follow what was written so far; none if no draft continues it."""
        found = self._guess(written)
        if not found or self._room is None:
            return found
        started = time.perf_counter()
        room = self._room()
        self.trial_seconds += time.perf_counter() - started
        return found[:room]

    def _guess(self, written: Sequence[int]) -> Sequence[int]:
        self._from_prompt = False
        for text in self._texts:
            if text[: len(written)] == tuple(written):
                return text[len(written) : len(written) + self._most]
        place = self._places.get(tuple(written[-MIN_RUN:]))
        if place is not None:
            text, stop = self._texts[place[0]], place[1]
            return text[stop : stop + self._most]
        place = self._quoted.get(tuple(written[-_MIN_QUOTED_RUN:]))
        if place is None:
            return ()
        self._from_prompt = True
        return self._prompt[place[1] : place[1] + self._most_quoted]

    def pays(self, guessed: int, at: int) -> bool:
        """Whether checking the last guess, of `guessed` tokens, is sooner than decoding as many as will be right."""
        if self._rates is None:
            return True
        right, tried = self._right[self._from_prompt]
        expected = sum((right / tried) ** count for count in range(1 + guessed))  # and the one that is drawn
        together, alone = (self._rates.step_seconds(Span(at, at + count)) for count in (1 + guessed, 1))
        return _MARGIN * together <= alone * expected

    def stepped(self, span: Span, seconds: float) -> None:
        """Note how long a step of the reply took."""
        self._plain_steps += len(span) == 1
        if self._costs is not None and (len(span) > 1 or self._plain_steps <= _PLAIN_STEPS):
            self._costs.stepped(span, seconds)

    def checked(self, guessed: int, taken: int) -> None:
        """Note how many guessed tokens were right, and guess more or fewer next time."""
        self.taken += taken
        self.refused += guessed - taken
        longer, (right, tried) = taken == guessed, self._right[self._from_prompt]
        self._right[self._from_prompt] = right + taken, tried + taken + (not longer)
        if self._costs is not None and not longer:
            self._rates = self._costs.rates
        if self._from_prompt:
            self._most_quoted = _next(self._most_quoted, longer=longer)
        else:
            self._most = _next(self._most, longer=longer)


def _next(most: int, *, longer: bool) -> int:
    return min(2 * most + 1, _MOST) if longer else max(most // 2, _FEWEST)


def _runs(texts: Sequence[Sequence[int]], length: int) -> dict[tuple[int, ...], tuple[int, int]]:
    """Where each run of that many tokens ends: the text and the place, of the first text and its last place."""
    return dict(chain.from_iterable(_of(number, texts[number], length) for number in reversed(range(len(texts)))))


def _of(number: int, text: Sequence[int], length: int) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    for stop in range(length, len(text)):  # what nothing follows is of no use
        yield tuple(text[stop - length : stop]), (number, stop)


def drafts_for(request: Request, lookup: CacheLookup, engine: Engine, costs: Costs) -> Drafts | None:
    """The drafts of a request whose `answers` is settled: those it came with, and what followed its prompt before.

    None if there may be none.
    """
    own = [_encoded(draft, engine.tokenizer) for draft in request.drafts]
    if not request.drafted_tokens:
        return Drafts(own, room=_room(engine), costs=costs) if own else None
    return Drafts([*own, _earlier(lookup)], lookup.tokens, _room(engine), costs)


def _room(engine: Engine) -> Callable[[], int]:
    """How many guessed tokens a step may have, measured with the first guess."""
    return cache(lambda: max_exact_step(engine) - 1)


def _earlier(lookup: CacheLookup) -> Sequence[int]:
    """What came after this very prompt before."""
    parked, count = lookup.parked, len(lookup.tokens)
    if parked is not None and len(parked.tokens) > count and parked.tokens[:count] == tuple(lookup.tokens):
        return parked.tokens[count:]
    return lookup.matches.goes_on


def _encoded(draft: str | Sequence[int], tokenizer: Tokenizer) -> Sequence[int]:
    if not isinstance(draft, str):
        size = tokenizer.vocabulary_size
        return list(takewhile(lambda token: token < size, draft))  # the tokens of another model mean nothing
    begins = len(tokenizer.encode(""))  # what a text begins with is no part of a reply
    return tokenizer.encode(draft[:_MAX_CHARACTERS])[begins:]


def max_exact_step(engine: Engine) -> int:
    """The largest step, 1 if each token must be computed alone; `ANY` if there is no limit."""
    if engine.capabilities.steady:
        return ANY
    memory = JsonMemo(home_folder() / "step_width.json", _MODELS)
    name = digest_of_fields("rekindle/step_width/1", engine.identity(engine.regime(1)).digest, engine.arithmetic)
    known = memory.recall(name)
    if isinstance(known, int) and 1 <= known <= ANY:
        return known
    found = measure_step_width(engine)
    if found == 1:  # said once for a model and a machine
        log.warning(
            "Drafts are not used with %s: here it rounds differently if several tokens share a step.", engine.name
        )
    memory.keep(name, found)
    return found


def measure_step_width(engine: Engine) -> int:
    """Measure the largest step in which each token gets the logits it gets alone."""
    most = _SIZES[0]
    tokens = list(islice(cycle(engine.tokenizer.encode(_TEXT)), _BEFORE + most))
    try:
        sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    except (OutOfMemory, StepRefused):
        return 1
    try:
        _step(engine, sequence, tokens[:_BEFORE])
        alone = np.concatenate([_step(engine, sequence, [token]) for token in tokens[_BEFORE:]])
        for size in _SIZES:
            sequence.truncate(_BEFORE)
            found = _step(engine, sequence, tokens[_BEFORE : _BEFORE + size])
            if np.abs(found - alone[:size]).max() <= _LAST_DIGITS * max(1.0, float(np.abs(alone).max())):
                return ANY if size == most else size
    finally:
        sequence.close()
    return 1


def _step(engine: Engine, sequence: EngineSequence, tokens: list[int]) -> Logits:
    return engine.step([Row.following(sequence, tokens, logits="all")])[0]
