"""Several requests in one step of the engine.

Each request runs in a thread of its own and asks for its next row. Whoever comes first leads: it waits a moment for
those that were in the last step, computes all rows together, and hands out the results.

    thread a   ... row ----+                    +-> logits, draws a token, comes back with the next row
    thread b   ... row ----+--> one step -------+-> logits
    thread c   ... prompt -+   (a piece of it)  +-> waits: the next piece goes with the next step

So a request joins and leaves at any token. A long prompt is cut into pieces that take as long as a reader does not
mind; what stands in the same step goes on meanwhile.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rekindle.core.adapter import Lora
from rekindle.core.identity import Identity
from rekindle.core.kv import KvLayout
from rekindle.core.request import Sampling
from rekindle.engine.base import Capabilities, Engine, EngineSequence, Logits, Row, Tokenizer, TokenSampler
from rekindle.errors import Cancelled
from rekindle.run.turn import CURRENT, FairShare, Turn

_STALL_SECONDS = 0.25  # how long a piece of a prompt may hold up replies that are being written
_ALONE_SECONDS = 1.0  # and how long whoever comes next, while no reply is
_FIRST_TOKENS = 64  # of a piece, while nothing was measured
_LEAST_TOKENS = 16
_WHOLE_TOKENS = 8  # fewer say nothing about how long a prompt takes
_COMPANY_SHARE = 0.25  # of the last step: so long it is worth to wait for company
_COMPANY_SECONDS = 0.025  # and no longer
_DRAW_SECONDS = 0.001  # or so long for each that is expected: threads draw their tokens one after the other
_TRY_AGAIN = 64  # steps, after sharing was found slower
_MEASURES = 0.3  # the weight of the newest


@dataclass(eq=False)
class _Call:
    """A row that somebody waits for, and how far it has come."""

    row: Row
    cancelled: Callable[[], bool] | None
    turn: Turn
    arrival: int
    length: int  # of its sequence, before
    done: int = 0
    over: bool = False
    logits: Logits | None = None
    error: BaseException | None = None

    @property
    def left(self) -> int:
        """How many tokens are still to be computed."""
        return len(self.row.tokens) - self.done

    @property
    def joins(self) -> bool:
        """Whether it is one token, which any step takes along."""
        return len(self.row.tokens) == 1 and not self.row.feeds

    @property
    def divisible(self) -> bool:
        """Whether it may be computed in pieces."""
        first, last = int(self.row.positions[0]), int(self.row.positions[-1])
        return self.row.logits != "all" and last - first + 1 == len(self.row.positions)

    @property
    def unwanted(self) -> bool:
        """Whether nobody wants it any more."""
        return self.cancelled is not None and self.cancelled()

    def piece(self, tokens: int) -> Row:
        """The next `tokens` of it."""
        start, stop = self.done, self.done + tokens
        if start == 0 and stop == len(self.row.tokens):
            return self.row
        last = stop == len(self.row.tokens)
        return replace(
            self.row,
            tokens=self.row.tokens[start:stop],
            positions=self.row.positions[start:stop],
            logits=self.row.logits if last else "none",
            feeds=self.row.feeds if start == 0 else (),
        )


@dataclass(frozen=True)
class _Part:
    """What a step takes of a call."""

    call: _Call
    row: Row

    @property
    def tokens(self) -> int:
        return len(self.row.tokens)


class BatchingEngine:
    """See `Engine` for the contract. With `together=False` rows take turns and are computed one by one, in pieces that
    nobody else's company changes: the same bits whoever else is here.
    """

    def __init__(self, engine: Engine, shares: FairShare | None = None, *, together: bool = True) -> None:
        self.inner = engine
        self.shares = shares or FairShare()
        self._together = together
        self._changed = threading.Condition()
        self._waiting: list[_Call] = []
        self._leading = False
        self._expected: set[EngineSequence] = set()
        self._was_alone = False
        self._step_seconds = 0.0
        self._alone_seconds: float | None = None  # a token, of a step that it has for itself
        self._shared_seconds: float | None = None  # a token, of a step that several share
        self._since_shared = 0
        self._token_seconds: float | None = None
        self._arrivals = itertools.count()

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows; a single one together with those that other threads ask for."""
        if len(rows) != 1 or any((rows[0].selector, rows[0].probe, rows[0].gaze)) or rows[0].until is not None:
            self.shares.serve(CURRENT.get().app, sum(len(row.tokens) for row in rows))
            return self.inner.step(rows, cancelled)
        row = rows[0]
        call = _Call(row, cancelled, CURRENT.get(), next(self._arrivals), row.sequence.length)
        with self._changed:
            self._waiting.append(call)
            self._expected.discard(row.sequence)
            self._changed.notify_all()
            while not call.over and self._leading:
                self._changed.wait()
            leads = not call.over
            self._leading = self._leading or leads
        if leads:
            self._lead(call)
        if call.error is not None:
            raise call.error
        assert call.logits is not None
        return [call.logits]

    def _lead(self, own: _Call) -> None:
        """Compute steps until one's own call is over; then somebody else leads."""
        try:
            while not own.over:
                with self._changed:
                    self._wait_for_company()
                    self._dismiss_unwanted()
                    parts = self._choose()
                if parts:
                    self._compute(parts)
                with self._changed:
                    self._waiting = [call for call in self._waiting if not call.over]
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._leading = False
                if own in self._waiting:  # interrupted: nobody waits for it any more
                    self._waiting.remove(own)
                self._changed.notify_all()

    def _wait_for_company(self) -> None:
        """Those that were in the last step come back in a moment; who does not is not waited for again."""
        if not self._pays:
            self._expected.clear()
        patience = max(_COMPANY_SHARE * self._step_seconds, _DRAW_SECONDS * len(self._expected))
        deadline = time.monotonic() + min(patience, _COMPANY_SECONDS)
        while self._expected and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)
        self._expected.clear()

    def _dismiss_unwanted(self) -> None:
        for call in self._waiting:
            if call.unwanted:
                self._fail(call, Cancelled("The request was cancelled."))
        self._waiting = [call for call in self._waiting if not call.over]

    def _choose(self) -> list[_Part]:
        """What the next step computes: every reply's next token, and of the prompts as much as time allows."""
        ordered = sorted(self._waiting, key=self._rank)
        if not self._together:
            return [_Part(ordered[0], ordered[0].row)] if ordered else []
        singles = [call for call in ordered if call.joins]
        prompts = [call for call in ordered if not call.joins]
        if prompts and (_goes_alone(prompts[0]) and not (singles and self._was_alone)):
            self._was_alone = True
            return [self._part(prompts[0], self._budget(bool(singles)))]
        self._was_alone = False
        if not prompts and not self._pays:
            singles = singles[:1]
        parts = [_Part(call, call.row) for call in singles]
        budget = self._budget(bool(singles))
        for call in prompts:
            if budget > 0 and not _goes_alone(call):
                parts.append(self._part(call, budget))
                budget -= parts[-1].tokens
        return parts

    @property
    def _pays(self) -> bool:
        """Whether tokens come sooner from shared steps. It does not where single ones are replayed from a recording."""
        alone, shared = self._alone_seconds, self._shared_seconds
        return alone is None or shared is None or shared < alone or self._since_shared >= _TRY_AGAIN

    def _rank(self, call: _Call) -> tuple[object, ...]:
        return call.turn.background, self.shares.served(call.turn.app), call.arrival

    def _part(self, call: _Call, budget: int) -> _Part:
        tokens = call.left if not call.divisible or call.left <= budget + 1 else budget  # a last one is not left alone
        return _Part(call, call.piece(tokens))

    def _budget(self, others: bool) -> int:
        """How many tokens of prompts the next step takes."""
        seconds = _STALL_SECONDS if others else _ALONE_SECONDS
        tokens = _FIRST_TOKENS if self._token_seconds is None else int(seconds / self._token_seconds)
        return max(_LEAST_TOKENS, min(tokens, self.inner.prefill_tokens))

    def _compute(self, parts: Sequence[_Part]) -> None:
        started = time.perf_counter()
        try:
            results = self.inner.step([part.row for part in parts], lambda: all(part.call.unwanted for part in parts))
        except Exception as error:  # noqa: BLE001  (raised again by whoever asked for the row)
            self._go_separate_ways(parts, error)
            return
        self._measure(parts, time.perf_counter() - started)
        for part, logits in zip(parts, results, strict=True):
            self._advance(part, logits)
        self._expected = {part.call.row.sequence for part in parts if part.call.over}

    def _advance(self, part: _Part, logits: Logits) -> None:
        call = part.call
        call.done += part.tokens
        self.shares.serve(call.turn.app, part.tokens)
        if call.left == 0:
            call.logits, call.over = logits, True

    def _go_separate_ways(self, parts: Sequence[_Part], error: Exception) -> None:
        """A step failed: it is computed again row by row, so that only those fail whose fault it is."""
        if len(parts) == 1 or not self.inner.capabilities.spans:
            for part in parts:
                self._fail(part.call, error)
            return
        for part in parts:
            try:
                (logits,) = self.inner.step([part.row], part.call.cancelled)
            except Exception as own:  # noqa: BLE001  (raised again by whoever asked for the row)
                self._fail(part.call, own)
            else:
                self._advance(part, logits)

    def _fail(self, call: _Call, error: Exception) -> None:
        """End a call; of what was computed for it nothing stays, as if it had been one step."""
        sequence, spans = call.row.sequence, self.inner.capabilities.spans
        if call.done and sequence.length > call.length:
            sequence.truncate(call.length if spans else 0)
        call.error, call.over = error, True

    def _measure(self, parts: Sequence[_Part], seconds: float) -> None:
        self._step_seconds = seconds
        tokens = sum(part.tokens for part in parts if not part.call.joins)
        if tokens >= _WHOLE_TOKENS:
            self._token_seconds = _smoothed(self._token_seconds, seconds / tokens)
        if tokens == 0 and len(parts) == 1:
            self._alone_seconds = _smoothed(self._alone_seconds, seconds)
            self._since_shared += 1
        elif tokens == 0:
            self._shared_seconds = _smoothed(self._shared_seconds, seconds / len(parts))
            self._since_shared = 0

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return self.inner.name

    @property
    def device(self) -> str:
        """What it computes on, for people."""
        return self.inner.device

    @property
    def arithmetic(self) -> str:
        """What the last bits of its results depend on."""
        return self.inner.arithmetic

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return self.inner.capabilities

    @property
    def layout(self) -> KvLayout:
        """The shape and type of its KV."""
        return self.inner.layout

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.inner.tokenizer

    @property
    def context_tokens(self) -> int:
        """The longest context the model takes."""
        return self.inner.context_tokens

    @property
    def prefill_tokens(self) -> int:
        """How many tokens of one prompt to give to a step at most."""
        return self.inner.prefill_tokens

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        return self.inner.parameters

    @property
    def attention(self) -> int:
        """How many numbers the queries of one token have."""
        return self.inner.attention

    def regime(self, tokens: int) -> str:
        """The rotary regime of a context of so many tokens."""
        return self.inner.regime(tokens)

    def identity(self, regime: str) -> Identity:
        """What makes its KV interchangeable with another's."""
        return self.inner.identity(regime)

    def load_adapter(self, lora: Lora) -> int:
        """Put an adapter on."""
        return self.inner.load_adapter(lora)

    def unload_adapter(self, digest: str) -> None:
        """Take it off."""
        self.inner.unload_adapter(digest)

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> EngineSequence:
        """An empty sequence with room for `capacity` tokens."""
        return self.inner.open(capacity, regime, adapter)

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> TokenSampler:
        """What draws the tokens of a reply."""
        return self.inner.sampler(sampling, context)

    def close(self) -> None:
        """Free the model. Idempotent."""
        self.inner.close()


def _smoothed(known: float | None, measured: float) -> float:
    return measured if known is None else known + _MEASURES * (measured - known)


def _goes_alone(call: _Call) -> bool:
    """Whether a row is better not mixed with others: what a feed raises would end their step too."""
    return bool(call.row.feeds and call.done == 0) or not call.divisible
