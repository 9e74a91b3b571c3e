"""Continuous batching: rows of several requests in one step of the engine.

Each request runs in its own thread and calls `step` for its next row. One of these threads owns the engine: it takes
the calls that arrived, asks the `StepScheduler` for the next step, computes it and wakes the callers that have their
logits. Once its own call is over, it hands the engine to the call that waits longest.

    thread a   ... row ----+                    +-> logits, draws a token, comes back with the next row
    thread b   ... row ----+--> one step -------+-> logits
    thread c   ... prompt -+   (a piece of it)  +-> waits: the next piece goes with the next step

So a request joins and leaves at any token. A long prompt is computed in pieces short enough not to stall the replies in
the same step. A thread of its own for the engine would cost every token of a lone request two thread switches.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice

from rekindle.engine.base import Engine, EngineWrapper, Logits, Row
from rekindle.engine.fairness import CURRENT, FairShare
from rekindle.engine.step_scheduler import StepCall, StepPart, StepScheduler
from rekindle.errors import Cancelled, KvLost, RekindleError, StepRefused

_RETURN_SECONDS = 0.005  # to wait for the next reply of the last step to call again: longer than nearly all take


class BatchingEngine(EngineWrapper):
    """See `Engine` for the contract. With `together=False` rows are computed one by one, in chunks that do not depend
    on other requests: the same bits at any load.
    """

    def __init__(self, engine: Engine, shares: FairShare | None = None, *, together: bool = True) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()  # of the two below: no call arrives while the last owner leaves
        self._arrivals: queue.SimpleQueue[StepCall] = queue.SimpleQueue()
        self._owned = False
        # Only the owner uses these.
        self._scheduler = StepScheduler(shares or FairShare(), engine.prefill_tokens, together=together)
        self._last_return = 0.0  # when the last step ended, or a reply of it called again

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute the rows; a single row shares its steps with those of other threads."""
        call = StepCall(rows, CURRENT.get(), cancelled)
        with self._lock:
            self._arrivals.put(call)
            owns, self._owned = not self._owned, True
        try:
            if not owns:
                call.woken.wait()
        except BaseException:  # interrupted, but its sequence is in use until the step ends
            call.abandoned = True
            call.woken.wait()
            raise
        finally:
            if not call.is_over:
                self._run_steps(call)
        if call.error is not None:
            raise call.error
        assert call.logits is not None
        return call.logits

    def _run_steps(self, own: StepCall) -> None:
        """Own the engine until `own` is over, then wake the next owner."""
        try:
            while not own.is_over:
                self._take_arrivals(waits=True)
                self._dismiss_unwanted()
                self._compute(self._scheduler.next_step())
        finally:
            with self._lock:
                self._take_arrivals(waits=False)
                if own in self._scheduler.waiting:  # interrupted
                    self._scheduler.remove(own)
                heir = next(iter(self._scheduler.waiting), None)
                self._owned = heir is not None
            if heir is not None:
                heir.woken.set()

    def _take_arrivals(self, *, waits: bool) -> None:
        """Take the calls that arrived, and wait a moment for each reply of the last step that did not call again."""
        with suppress(queue.Empty):
            while not self._arrivals.empty() or (waits and self._scheduler.returning):
                seconds = self._last_return + _RETURN_SECONDS - time.perf_counter()
                if self._scheduler.add(self._arrivals.get(timeout=max(0.0, seconds))):
                    self._last_return = time.perf_counter()

    def _dismiss_unwanted(self) -> None:
        for call in [call for call in self._scheduler.waiting if call.unwanted]:
            self._fail(call, Cancelled("The request was cancelled."))

    def _compute(self, step: Sequence[StepPart]) -> None:
        if not step:
            return
        started = time.perf_counter()
        try:
            rows = [row for part in step for row in part.rows]
            logits = iter(self.inner.step(rows, lambda: all(part.call.unwanted for part in step)))
        except Exception as error:  # noqa: BLE001  (raised again by the callers)
            if len(step) > 1 and self.capabilities.spans:  # one by one, so that only the faulty ones fail
                for part in step:
                    if part.call.recomputes and not isinstance(error, StepRefused):  # then nothing was computed
                        lost = KvLost(f"KV of passages was lost with a step ({error}); it is computed instead.")
                        self._fail(part.call, error if isinstance(error, Cancelled) else lost)
                    else:
                        self._compute([part])
            else:
                for part in step:
                    self._fail(part.call, error)
            return
        self._last_return = time.perf_counter()
        self._scheduler.computed(step, self._last_return - started)
        for part in step:
            own = list(islice(logits, len(part.rows)))
            if not part.call.left:
                part.call.logits = own
                part.call.woken.set()

    def _fail(self, call: StepCall, error: Exception) -> None:
        """End a call and drop what was computed for it, as if it had been one step."""
        self._scheduler.remove(call)
        with suppress(RekindleError):  # its caller learns why it failed, not what followed
            if call.done and call.rows[0].sequence.length > call.start_length:
                call.rows[0].sequence.truncate(call.start_length if self.capabilities.spans else 0)
        call.error = error
        call.woken.set()
