"""Does one thing after the other when nobody asks, counts what each takes, and stops within a token."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.errors import Cancelled, Closed, InvalidSetting, RekindleError
from rekindle.knowledge.library import Library
from rekindle.predict.populate import Budget, Conditions, Spent, hindrance, left
from rekindle.run.power import Load, Meter, plugged
from rekindle.run.session import Session
from rekindle.run.turn import IDLE, taking
from rekindle.run.work import Action, Did, flop, note_work

log = logging.getLogger("rekindle.idle")

_LOOK_SECONDS = 2.0  # between two looks at load and battery


@dataclass(frozen=True)
class Took:
    """What computing something took; no reply if it was stopped."""

    reply: Reply | None
    seconds: float
    tokens: int = 0
    flop: float | None = None
    joules: float | None = None


class Halt(threading.Event):
    """Set when somebody says stop, and when time is up."""

    def __init__(self, stop: threading.Event, deadline: float) -> None:
        super().__init__()
        self._stop, self._deadline = stop, deadline

    def is_set(self) -> bool:
        """Whether to stop."""
        return super().is_set() or self._stop.is_set() or time.perf_counter() >= self._deadline


class Worker:
    """Computes requests that nobody waits for, within a budget and as long as nothing is in the way.

    stop       whoever sets it stops the work within a token
    spent      what all of it took
    hindered   why it does not go on, if load or battery are in the way
    """

    def __init__(
        self,
        session: Session,
        budget: Budget,
        conditions: Conditions | None = None,
        report: Callable[[Did], None] | None = None,
    ) -> None:
        """Raises `InvalidSetting` for a budget of joules where the machine does not tell them."""
        self.stop = threading.Event()
        self.spent = Spent()
        self.hindered: str | None = None
        self._session = session
        self._budget, self._conditions = budget, conditions
        self._report = report
        self._meter, self._load = Meter(), Load()
        self._looked = float("-inf")
        if budget.joules is not None and not self._meter.measures:
            raise InvalidSetting(
                "This machine does not tell what energy it takes, so joules cannot be limited. Limit seconds or tflop."
            )

    def goes_on(self) -> bool:
        """Whether there is still budget, and nobody and nothing is in the way."""
        if self.stop.is_set() or not left(self._budget, self.spent):
            return False
        now = time.monotonic()
        if self._conditions is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self.hindered = hindrance(self._conditions, self._load.others(), plugged())
        return self.hindered is None

    def compute(self, request: Request) -> Took:
        """Compute a request, and count what it takes. What the session refuses is left out."""
        started, energy = time.perf_counter(), self._meter.joules()
        limit = self._budget.seconds
        deadline = float("inf") if limit is None else started + limit - self.spent.seconds
        reply = None
        try:
            with taking(IDLE):
                reply = self._session.answer(request, Halt(self.stop, deadline)).reply
        except Cancelled:
            pass
        except Closed:
            raise
        except RekindleError as error:
            log.warning("Left out when idle: %s", error)
        seconds, after = time.perf_counter() - started, self._meter.joules()
        joules = None if energy is None or after is None else after - energy
        if reply is None:
            return Took(None, seconds, joules=joules)
        decoded = max(0, len(reply.tokens) - 1)  # the last one drawn is never computed
        tokens, context = reply.reuse.computed + decoded, reply.usage.prompt_tokens + decoded
        return Took(reply, seconds, tokens, flop(self._session.engine, tokens, context), joules)

    def note(self, library: Library, action: Action, what: str, took: Took, answer: int | None = None) -> Did:
        """Write down what was done, and tell it."""
        finished = took.reply is not None
        did = Did(action, what, answer, took.seconds, took.tokens, took.flop, took.joules, finished)
        joules = None if took.joules is None else (self.spent.joules or 0.0) + took.joules
        self.spent = Spent(self.spent.seconds + took.seconds, self.spent.flop + (took.flop or 0.0), joules)
        note_work(library, did)
        if self._report is not None:
            self._report(did)
        return did
