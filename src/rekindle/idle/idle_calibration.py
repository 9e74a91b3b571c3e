"""Calibrating a model in idle time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from rekindle.core.adapter import Lora
from rekindle.engine.base import Engine, EngineWrapper, Logits, Row
from rekindle.engine.fairness import IDLE, taking
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import AdapterRefused, Cancelled
from rekindle.idle.idle import IdleOptions
from rekindle.idle.worker import Budget, IdleWorker, Spent, StopOrDeadline
from rekindle.session.calibrate.calibration import Calibration, measure, missing_parts
from rekindle.session.session import Session

_MAX_ADAPTERS = 4  # that deltas are measured with


class IdleCalibration:
    """Measures what the level of reuse of a session needs, if nobody did; at most `calibrate_seconds` of work in all.

    Sessions that are opened later use what was found.
    """

    def __init__(self, session: Session, options: IdleOptions) -> None:
        self._session, self._seconds = session, options.calibrate_seconds
        self._worker = IdleWorker(session, Budget(self._seconds), options.conditions)
        self._is_over = False

    def run(self, stop: threading.Event) -> Calibration | None:
        """Work until `stop` is set, load or battery forbid it, or the time is spent: nothing is kept then.

        None if nothing was found. Raises `RekindleError` once if the model cannot be calibrated.
        """
        self._worker.stop, self._worker.blocked_by = stop, None
        parts = [] if self._is_over else missing_parts(self._session)
        if not parts or not self._worker.may_continue():
            return None
        started, spent = time.perf_counter(), self._worker.spent.seconds
        self._is_over = True
        try:
            with self._session.staying(), ExitStack() as opened:
                ended = StopOrDeadline(stop, started + self._seconds - spent)
                engine = _StoppableEngine(self._session.engine, self._worker, ended)
                return measure(engine, self._adapters(opened), None, lambda _: None, parts=parts)
        except Cancelled:
            self._is_over = False
            return None
        finally:
            self._worker.spent = Spent(spent + time.perf_counter() - started)

    def _adapters(self, opened: ExitStack) -> list[Lora]:
        """Some of the session's adapters, loaded without waiting for memory."""
        found: list[Lora] = []
        for adapter in list(self._session.adapters)[:_MAX_ADAPTERS]:
            try:
                opened.enter_context(self._session.adapters.use(adapter.name, lambda: True))
                found.append(read_adapter(adapter.source, adapter.scale))
            except (AdapterRefused, Cancelled):
                continue
        return found


class _StoppableEngine(EngineWrapper):
    """Its steps end between two layers when idle work must stop."""

    def __init__(self, engine: Engine, worker: IdleWorker, ended: threading.Event) -> None:
        super().__init__(engine)
        self._worker, self._ended = worker, ended

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:  # noqa: ARG002
        if self._ended.is_set() or not self._worker.may_continue():
            raise Cancelled("Idle work was stopped.")
        with taking(IDLE):
            return super().step(rows, self._ended.is_set)
