"""Continuous batching: rows of several requests in one step of the engine.

Each request runs in its own thread and asks for its next row. The first one leads: it waits a moment for those that
were in the last step, computes all rows together, and hands out the results.

    thread a   ... row ----+                    +-> logits, draws a token, comes back with the next row
    thread b   ... row ----+--> one step -------+-> logits
    thread c   ... prompt -+   (a piece of it)  +-> waits: the next piece goes with the next step

So a request joins and leaves at any token. A long prompt is computed in chunks short enough not to stall the replies in
the same step.
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
from rekindle.engine.base import Capabilities, Engine, EngineSequence, Logits, Row, TokenSampler
from rekindle.engine.fairness import CURRENT, FairShare, Requester
from rekindle.errors import Cancelled
from rekindle.text.base import Tokenizer

_STALL_SECONDS = 0.25  # for which a chunk of a prompt may stall replies that are being written
_ALONE_SECONDS = 1.0  # for which it may stall newcomers while there is no reply
_FIRST_TOKENS = 64  # of a chunk, while nothing was measured
_MIN_TOKENS = 16
_WHOLE_TOKENS = 8  # fewer say nothing about the speed of prompts
_WAIT_SHARE = 0.25  # of the last step's time: worth waiting for other rows
_WAIT_SECONDS = 0.025  # the longest wait
_DRAW_SECONDS = 0.001  # for each expected row: threads sample their tokens one after the other
_TRY_AGAIN = 64  # steps after which sharing is tried again, once found slower
_NEWEST_WEIGHT = 0.3  # weight of the newest measurement


@dataclass(eq=False)
class _Call:
    """A row that a thread waits for, and its progress."""

    row: Row
    cancelled: Callable[[], bool] | None
    turn: Requester
    arrival: int
    length: int  # of its sequence before the call
    done: int = 0
    over: bool = False
    logits: Logits | None = None
    error: BaseException | None = None

    @property
    def left(self) -> int:
        """Number of tokens still to compute."""
        return len(self.row.tokens) - self.done

    @property
    def joins(self) -> bool:
        """Whether it is a single token, which any step can include."""
        return len(self.row.tokens) == 1 and not self.row.feeds

    @property
    def divisible(self) -> bool:
        """Whether it may be computed in chunks."""
        first, last = int(self.row.positions[0]), int(self.row.positions[-1])
        return self.row.logits != "all" and last - first + 1 == len(self.row.positions)

    @property
    def unwanted(self) -> bool:
        """Whether it was cancelled."""
        return self.cancelled is not None and self.cancelled()

    def piece(self, tokens: int) -> Row:
        """The row of its next `tokens`."""
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
    """The part of a call that a step computes."""

    call: _Call
    row: Row

    @property
    def tokens(self) -> int:
        return len(self.row.tokens)


class BatchingEngine:
    """See `Engine` for the contract. With `together=False` rows are computed one by one, in chunks that do not depend
    on other requests: the same bits at any load.
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
        self._alone_seconds: float | None = None  # per token, of a step with one token
        self._shared_seconds: float | None = None  # per token, of a shared step
        self._since_shared = 0
        self._token_seconds: float | None = None
        self._arrivals = itertools.count()

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows; a single row is batched with those of other threads."""
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
        """Compute steps until `own` is done; then another thread leads."""
        try:
            while not own.over:
                with self._changed:
                    self._wait_for_others()
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
                if own in self._waiting:  # interrupted
                    self._waiting.remove(own)
                self._changed.notify_all()

    def _wait_for_others(self) -> None:
        """Wait a moment for the requests of the last step; those that do not come back are not waited for again."""
        if not self._sharing_pays:
            self._expected.clear()
        seconds = max(_WAIT_SHARE * self._step_seconds, _DRAW_SECONDS * len(self._expected))
        deadline = time.monotonic() + min(seconds, _WAIT_SECONDS)
        while self._expected and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)
        self._expected.clear()

    def _dismiss_unwanted(self) -> None:
        for call in self._waiting:
            if call.unwanted:
                self._fail(call, Cancelled("The request was cancelled."))
        self._waiting = [call for call in self._waiting if not call.over]

    def _choose(self) -> list[_Part]:
        """The next step: every reply's next token, and as much of the prompts as time allows."""
        ordered = sorted(self._waiting, key=self._rank)
        if not self._together:
            return [_Part(ordered[0], ordered[0].row)] if ordered else []
        singles = [call for call in ordered if call.joins]
        prompts = [call for call in ordered if not call.joins]
        if prompts and (_goes_alone(prompts[0]) and not (singles and self._was_alone)):
            self._was_alone = True
            return [self._part(prompts[0], self._budget(bool(singles)))]
        self._was_alone = False
        if not prompts and not self._sharing_pays:
            singles = singles[:1]
        parts = [_Part(call, call.row) for call in singles]
        budget = self._budget(bool(singles))
        for call in prompts:
            if budget > 0 and not _goes_alone(call):
                parts.append(self._part(call, budget))
                budget -= parts[-1].tokens
        return parts

    @property
    def _sharing_pays(self) -> bool:
        """Whether shared steps are faster per token. They may not be where single-token steps are replayed."""
        alone, shared = self._alone_seconds, self._shared_seconds
        return alone is None or shared is None or shared < alone or self._since_shared >= _TRY_AGAIN

    def _rank(self, call: _Call) -> tuple[object, ...]:
        return call.turn.background, self.shares.served(call.turn.app), call.arrival

    def _part(self, call: _Call, budget: int) -> _Part:
        tokens = call.left if not call.divisible or call.left <= budget + 1 else budget  # never leave one token over
        return _Part(call, call.piece(tokens))

    def _budget(self, others: bool) -> int:
        """Number of prompt tokens in the next step."""
        seconds = _STALL_SECONDS if others else _ALONE_SECONDS
        tokens = _FIRST_TOKENS if self._token_seconds is None else int(seconds / self._token_seconds)
        return max(_MIN_TOKENS, min(tokens, self.inner.prefill_tokens))

    def _compute(self, parts: Sequence[_Part]) -> None:
        started = time.perf_counter()
        try:
            results = self.inner.step([part.row for part in parts], lambda: all(part.call.unwanted for part in parts))
        except Exception as error:  # noqa: BLE001  (raised again by whoever asked for the row)
            self._retry_separately(parts, error)
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

    def _retry_separately(self, parts: Sequence[_Part], error: Exception) -> None:
        """Compute a failed step again row by row, so that only the faulty rows fail."""
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
        """End a call and drop what was computed for it, as if it had been one step."""
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
        return self.inner.name

    @property
    def device(self) -> str:
        return self.inner.device

    @property
    def arithmetic(self) -> str:
        return self.inner.arithmetic

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def layout(self) -> KvLayout:
        return self.inner.layout

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inner.tokenizer

    @property
    def context_tokens(self) -> int:
        return self.inner.context_tokens

    @property
    def longest_context(self) -> int:
        return self.inner.longest_context

    @property
    def prefill_tokens(self) -> int:
        return self.inner.prefill_tokens

    @property
    def parameters(self) -> int:
        return self.inner.parameters

    @property
    def attention(self) -> int:
        return self.inner.attention

    def regime(self, tokens: int) -> str:
        return self.inner.regime(tokens)

    def identity(self, regime: str) -> Identity:
        return self.inner.identity(regime)

    def load_adapter(self, lora: Lora) -> int:
        return self.inner.load_adapter(lora)

    def unload_adapter(self, digest: str) -> None:
        self.inner.unload_adapter(digest)

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> EngineSequence:
        return self.inner.open(capacity, regime, adapter)

    def sampler(self, sampling: Sampling, context: Sequence[int]) -> TokenSampler:
        return self.inner.sampler(sampling, context)

    def close(self) -> None:
        self.inner.close()


def _smoothed(known: float | None, measured: float) -> float:
    return measured if known is None else known + _NEWEST_WEIGHT * (measured - known)


def _goes_alone(call: _Call) -> bool:
    """Whether a row must not be batched: an error of its feed would end the others' step too."""
    return bool(call.row.feeds and call.done == 0) or not call.divisible
