"""What the next step of an engine computes: which calls are in it, and how much of each. No threads, no clock.

A step is one of

    shared   the next token of every reply, and pieces of prompts that take as long as the replies may wait; the
             recomputed tokens of a prompt with reused passages are one piece, however long
    alone    one call that loads KV, whose failure would end the step of others too, or that looks inside the model;
             the next step is shared again, if replies wait

Calls are ranked: foreground before background, then the app for which fewest tokens were computed, then the earliest.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rekindle.engine.base import EngineSequence, Logits, Row, StayingFeed
from rekindle.engine.fairness import FairShare, Requester
from rekindle.engine.hooks import Positions

STALL_SECONDS = 0.25  # for which pieces of prompts may hold up replies
ALONE_SECONDS = 1.0  # for which they may hold up newcomers, while there is no reply
FIRST_PIECE_TOKENS = 64  # of a prompt, while no speed is known
MIN_PIECE_TOKENS = 16  # of a prompt; shorter pieces say nothing about the speed of prompts
TRY_SHARING_STEPS = 64  # steps of single tokens, after which sharing is tried again if it was slower
_NEWEST_WEIGHT = 0.3  # of a measurement in its average


@dataclass(eq=False)
class StepCall:
    """The rows that one caller wants computed, and how much of them is. Its thread waits until it is `woken`."""

    rows: Sequence[Row]
    requester: Requester
    cancelled: Callable[[], bool] | None = None
    abandoned: bool = False
    arrival: int = 0
    done: int = 0  # number of tokens computed
    logits: list[Logits] | None = None
    error: Exception | None = None
    woken: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.tokens = sum(len(row.tokens) for row in self.rows)
        self.start_length = self.rows[0].sequence.length if self.rows else 0
        row = self.rows[0] if len(self.rows) == 1 else None
        is_plain = row is not None and row.until is None and not (row.selector or row.probe or row.gaze)
        # The next token of a reply, which any shared step can include.
        self.is_next_token = is_plain and self.tokens == 1 and not self.rows[0].feeds
        in_part = is_plain and self.rows[0].logits != "all"
        # Whether it may be computed in pieces.
        self.divisible = in_part and not self.rows[0].spread and _is_contiguous(self.rows[0].positions)
        # Chosen tokens of reused passages, over KV that is in its buffers: a shared step can include all of it. It
        # changes KV that it also reads, so it cannot be computed a second time.
        present = all(isinstance(feed, StayingFeed) for row in self.rows for feed in row.feeds)
        self.recomputes = in_part and not self.divisible and not self.is_next_token and present

    @property
    def left(self) -> int:
        """Number of tokens still to compute."""
        return self.tokens - self.done

    @property
    def is_over(self) -> bool:
        """Whether it has its logits, or failed."""
        return self.logits is not None or self.error is not None

    @property
    def unwanted(self) -> bool:
        """Whether nobody wants the result any more."""
        return self.abandoned or (self.cancelled is not None and self.cancelled())

    @property
    def goes_alone(self) -> bool:
        """Whether its next piece must not share a step."""
        return not self.recomputes and (not self.divisible or (self.done == 0 and bool(self.rows[0].feeds)))

    def piece(self, tokens: int) -> StepPart:
        """Its next `tokens`."""
        start, stop = self.done, self.done + tokens
        if tokens == self.tokens:
            return StepPart(self, self.rows, tokens)
        (row,) = self.rows
        piece = replace(
            row,
            tokens=row.tokens[start:stop],
            positions=row.positions[start:stop],
            logits=row.logits if stop == self.tokens else "none",
            feeds=row.feeds if start == 0 else (),
        )
        return StepPart(self, [piece], tokens)


@dataclass(frozen=True)
class StepPart:
    """The rows of a call that a step computes."""

    call: StepCall
    rows: Sequence[Row]
    tokens: int


class StepScheduler:
    """The calls that wait, and the next step. Used by one thread.

    `returning` are the sequences of the last step that did not call again since. A reply does as soon as it has drawn
    its token, so it is worth waiting a moment for them before the next step.
    """

    def __init__(self, shares: FairShare, prefill_tokens: int, *, together: bool = True) -> None:
        """With `together=False` a step is one whole call, so that no request's arithmetic depends on others."""
        self.waiting: list[StepCall] = []
        self.returning: set[EngineSequence] = set()
        self._shares = shares
        self._prefill_tokens = prefill_tokens
        self._together = together
        self._arrivals = itertools.count()
        self._was_alone = False
        self._prompt_token_seconds: float | None = None
        self._single_seconds: float | None = None  # per token, of a step with one token
        self._shared_seconds: float | None = None  # per token, of a step with a token of several replies
        self._steps_since_shared = 0

    def add(self, call: StepCall) -> bool:
        """A call begins to wait. Returns whether it was one of `returning`."""
        call.arrival = next(self._arrivals)
        self.waiting.append(call)
        missing = len(self.returning)
        self.returning.difference_update(row.sequence for row in call.rows)
        return len(self.returning) < missing

    def remove(self, call: StepCall) -> None:
        """A call ended before all of it was computed."""
        self.waiting.remove(call)

    def next_step(self) -> list[StepPart]:
        """The next step; empty if nobody waits. `computed` or `remove` must follow."""
        ranked = sorted(self.waiting, key=self._rank)
        if not self._together:
            return [call.piece(call.tokens) for call in ranked[:1]]
        replies = [call for call in ranked if call.is_next_token]
        prompts = [call for call in ranked if not call.is_next_token]
        budget = self._budget(STALL_SECONDS if replies else ALONE_SECONDS)
        self._was_alone = bool(prompts) and prompts[0].goes_alone and not (replies and self._was_alone)
        if self._was_alone:
            return [_piece_within(budget, prompts[0])]
        if not prompts and not self._sharing_pays:
            replies = replies[:1]
        step = [call.piece(1) for call in replies]
        for call in prompts:
            fits = call.divisible or call.left <= budget or call is prompts[0]
            if budget > 0 and fits and not call.goes_alone:
                step.append(_piece_within(budget, call))
                budget -= step[-1].tokens
        return step

    def computed(self, step: Sequence[StepPart], seconds: float) -> None:
        """A step was computed in `seconds`. Calls with nothing `left` no longer wait."""
        self._measure(step, seconds)
        for part in step:
            part.call.done += part.tokens
            self._shares.serve(part.call.requester.app, part.tokens)
        self.waiting = [call for call in self.waiting if call.left]
        self.returning.clear()
        if self._sharing_pays:
            self.returning.update(row.sequence for part in step if not part.call.left for row in part.rows)

    def _rank(self, call: StepCall) -> tuple[bool, float, int]:
        return call.requester.background, self._shares.served(call.requester.app), call.arrival

    def _budget(self, seconds: float) -> int:
        """Number of prompt tokens that take that long."""
        speed = self._prompt_token_seconds
        tokens = FIRST_PIECE_TOKENS if speed is None else int(seconds / speed)
        return max(MIN_PIECE_TOKENS, min(tokens, self._prefill_tokens))

    @property
    def _sharing_pays(self) -> bool:
        """Whether shared steps are faster per token. They may not be where steps of one token are replayed."""
        single, shared = self._single_seconds, self._shared_seconds
        if single is None or shared is None or shared < single:
            return True
        return self._steps_since_shared >= TRY_SHARING_STEPS

    def _measure(self, step: Sequence[StepPart], seconds: float) -> None:
        prompt_tokens = sum(part.tokens for part in step if not part.call.is_next_token)
        if prompt_tokens:
            odd = any(part.call.goes_alone or part.call.recomputes for part in step)  # loads, or attends elsewhere
            if prompt_tokens >= MIN_PIECE_TOKENS and not odd:
                self._prompt_token_seconds = _averaged(self._prompt_token_seconds, seconds / prompt_tokens)
        elif len(step) == 1:
            self._single_seconds = _averaged(self._single_seconds, seconds)
            self._steps_since_shared += 1
        else:
            self._shared_seconds = _averaged(self._shared_seconds, seconds / len(step))
            self._steps_since_shared = 0


def _piece_within(budget: int, call: StepCall) -> StepPart:
    """As much of a call as fits, but never all tokens except one."""
    return call.piece(budget if call.divisible and call.left > budget + 1 else call.left)


def _is_contiguous(positions: Sequence[int] | Positions) -> bool:
    return len(positions) > 0 and int(positions[-1]) - int(positions[0]) + 1 == len(positions)


def _averaged(known: float | None, measured: float) -> float:
    return measured if known is None else known + _NEWEST_WEIGHT * (measured - known)
