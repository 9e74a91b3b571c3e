"""Calls that may hang: on a thread of their own, with a deadline.

A network disk, a dying drive or a locked catalog can hold a call for minutes. A request must not wait for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from rekindle.errors import Cancelled

_LAST_SECONDS = 1.0  # how long `close` waits for the threads
_LOOK_SECONDS = 0.005  # how often a wait checks for cancellation
T = TypeVar("T")


class NoAnswer(Exception):
    """The call failed, whatever the reason."""


class Late(NoAnswer):
    """No answer within the deadline, or an earlier call still hangs."""


class _Question(Generic[T]):
    def __init__(self, ask: Callable[[], T]) -> None:
        self.ask = ask
        self.answered = threading.Event()
        self.answer: T | None = None
        self.error: BaseException | None = None


class DeadlineCaller:
    """Runs calls with a deadline; while one hangs, all others fail at once as late."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hanging: _Question[object] | None = None
        self._idle: list[_QuestionThread] = []

    def ask(self, question: Callable[[], T], timeout_seconds: float, cancelled: Callable[[], bool] | None = None) -> T:
        """The result. Raises `NoAnswer` if the call raised anything, `Late` if it took too long, and `Cancelled`."""
        asked: _Question[T] = _Question(question)
        with self._lock:
            if self._hanging is not None and not self._hanging.answered.is_set():
                raise Late("it has not answered the last question yet")
            self._hanging = None
            try:
                worker = self._idle.pop() if self._idle else _QuestionThread()
            except RuntimeError as error:
                raise NoAnswer(str(error)) from error
        worker.questions.put(asked)  # type: ignore[arg-type]
        deadline = Deadline(timeout_seconds)
        while not asked.answered.wait(timeout_seconds if cancelled is None else _LOOK_SECONDS):
            unwanted = cancelled is not None and cancelled()
            if not unwanted and not deadline.passed:
                continue
            with self._lock:
                self._hanging = asked  # type: ignore[assignment]
            worker.questions.put(None)  # its thread ends with it
            if unwanted:
                raise Cancelled("The request was cancelled.")
            raise Late(f"no answer within {timeout_seconds:.2f} s")
        with self._lock:
            self._idle.append(worker)
        if isinstance(asked.error, Exception):
            raise NoAnswer(str(asked.error) or type(asked.error).__name__) from asked.error
        if asked.error is not None:
            raise asked.error
        return asked.answer  # type: ignore[return-value]

    def close(self) -> None:
        """End the threads that are not hanging."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.questions.put(None)
        for worker in idle:
            worker.thread.join(_LAST_SECONDS)


class _QuestionThread:
    """A thread and its queue. Raises `RuntimeError` if the system has no thread left."""

    def __init__(self) -> None:
        self.questions: SimpleQueue[_Question[object] | None] = SimpleQueue()
        self.thread = threading.Thread(target=_answer, args=(self.questions,), name="rekindle-ask", daemon=True)
        self.thread.start()


def _answer(questions: SimpleQueue[_Question[object] | None]) -> None:
    while (question := questions.get()) is not None:
        try:
            question.answer = question.ask()
        except BaseException as error:  # noqa: BLE001  (raised again by the caller)
            question.error = error
        answered = question.answered
        del question  # do not keep the last result alive
        answered.set()


class Deadline:
    """A moment after which waiting ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        """Whether it is too late."""
        return time.monotonic() > self._at
