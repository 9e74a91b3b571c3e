"""Computes requests in idle time, measures what each costs, and stops within a token."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.fairness import IDLE, taking
from rekindle.errors import Cancelled, Closed, InvalidSetting, RekindleError
from rekindle.idle.budget import Budget, CpuLoad, EnergyMeter, IdleConditions, Spent, blocked_by, is_left, on_mains
from rekindle.idle.log import Action, IdleAction, flop, record_action
from rekindle.knowledge.library import Library
from rekindle.session.session import Session

log = logging.getLogger("rekindle.idle")

_LOOK_SECONDS = 2.0  # between two looks at load and battery


@dataclass(frozen=True)
class WorkResult:
    """The reply of an idle request and what it cost; no reply if it was stopped."""

    reply: Reply | None
    seconds: float
    tokens: int = 0
    flop: float | None = None
    joules: float | None = None


class StopOrDeadline(threading.Event):
    """Set when `stop` is set, and after the deadline."""

    def __init__(self, stop: threading.Event, deadline: float) -> None:
        super().__init__()
        self._stop, self._deadline = stop, deadline

    def is_set(self) -> bool:
        return super().is_set() or self._stop.is_set() or time.perf_counter() >= self._deadline


class IdleWorker:
    """Computes requests that nobody waits for, within a budget and while load and battery allow.

    stop         setting it stops the work within a token
    spent        the total cost so far
    blocked_by   why it does not continue, if because of load or battery
    """

    def __init__(
        self,
        session: Session,
        budget: Budget,
        conditions: IdleConditions | None = None,
        report: Callable[[IdleAction], None] | None = None,
    ) -> None:
        """Raises `InvalidSetting` for a budget of joules if energy cannot be measured."""
        self.stop = threading.Event()
        self.spent = Spent()
        self.blocked_by: str | None = None
        self._session = session
        self._budget, self._conditions = budget, conditions
        self._report = report
        self._meter, self._load = EnergyMeter(), CpuLoad()
        self._looked = float("-inf")
        if budget.joules is not None and not self._meter.measures:
            raise InvalidSetting(
                "This machine does not tell what energy it takes, so joules cannot be limited. Limit seconds or tflop."
            )

    def may_continue(self) -> bool:
        """Whether there is budget left, and neither `stop` nor load nor battery forbid it."""
        if self.stop.is_set() or not is_left(self._budget, self.spent):
            return False
        now = time.monotonic()
        if self._conditions is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self.blocked_by = blocked_by(self._conditions, self._load.others(), on_mains())
        return self.blocked_by is None

    def compute(self, request: Request) -> WorkResult:
        """Compute a request and measure it. A request that the session refuses is logged and skipped."""
        started, energy = time.perf_counter(), self._meter.joules()
        limit = self._budget.seconds
        deadline = float("inf") if limit is None else started + limit - self.spent.seconds
        reply = None
        try:
            with taking(IDLE):
                reply = self._session.answer(request, StopOrDeadline(self.stop, deadline)).reply
        except Cancelled:
            pass
        except Closed:
            raise
        except RekindleError as error:
            log.warning("Left out when idle: %s", error)
        seconds, after = time.perf_counter() - started, self._meter.joules()
        joules = None if energy is None or after is None else after - energy
        if reply is None:
            return WorkResult(None, seconds, joules=joules)
        decoded = max(0, len(reply.tokens) - 1)  # the last token is sampled but never computed
        tokens, context = reply.reuse.computed + decoded, reply.usage.prompt_tokens + decoded
        return WorkResult(reply, seconds, tokens, flop(self._session.engine, tokens, context), joules)

    def record(
        self, library: Library, action: Action, what: str, result: WorkResult, answer: int | None = None
    ) -> IdleAction:
        """Record an action in the log, and report it."""
        finished = result.reply is not None
        done = IdleAction(action, what, answer, result.seconds, result.tokens, result.flop, result.joules, finished)
        joules = None if result.joules is None else (self.spent.joules or 0.0) + result.joules
        self.spent = Spent(self.spent.seconds + result.seconds, self.spent.flop + (result.flop or 0.0), joules)
        record_action(library, done)
        if self._report is not None:
            self._report(done)
        return done
