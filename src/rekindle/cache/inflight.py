"""Requests that wait for others: single flight, for a prefix that another request is computing, instead of computing it
too; and for the engine's memory, until others end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from rekindle.core.keys import TOKEN_BYTES, KvSpace, common_tokens, token_bytes
from rekindle.errors import Cancelled, OutOfMemory

_MIN_TOKENS = 64  # fewer are computed faster than waited for
_LOOK_SECONDS = 0.05  # how often a wait checks for cancellation
_WRITE_SECONDS = 0.1  # so long a wait for the disk is always worth it


class InflightPrefill:
    """A prompt being computed. It lands once others find it in the store, or it has failed."""

    def __init__(self, inflight_prefills: InflightPrefills, kv_space: KvSpace, tokens: bytes, known: int) -> None:
        self._inflight = inflight_prefills
        self.kv_space = kv_space
        self.tokens = tokens
        self.known = known  # number of its tokens that were found; the others are computed
        self.waiting = 0
        self._landed = threading.Event()
        self._written_from: float | None = None

    def being_written(self) -> None:
        """It is computed: only the disk is waited for."""
        self._written_from = time.monotonic()

    def land(self) -> None:
        """Wake those who wait: they look it up again. Idempotent."""
        self._inflight.forget(self)
        self._landed.set()

    def wait(self, cancelled: Callable[[], bool], seconds: float) -> bool:
        """Wait until it lands; False if writing it takes longer than `seconds`. Raises `Cancelled`."""
        longest = max(_WRITE_SECONDS, seconds)
        while not self._landed.wait(_LOOK_SECONDS):
            if cancelled():
                raise Cancelled("The request was cancelled.")
            if self._written_from is not None and time.monotonic() > self._written_from + longest:
                return False
        return True


class InflightPrefills:
    """All prompts being computed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: list[InflightPrefill] = []

    def join(self, kv_space: KvSpace, tokens: Sequence[int], known: int) -> tuple[InflightPrefill, bool]:
        """A new entry and True, or the entry of a prompt that is worth waiting for and False.

        It is if the shared prefix is at least half of what is being computed there: else the wait is too long.
        """
        given = token_bytes(tokens)
        with self._lock:
            for other in self._flying:
                if other.kv_space != kv_space:
                    continue
                common = common_tokens(given, other.tokens)
                spared = min(common, len(tokens) - 1) - known
                computed = len(other.tokens) // TOKEN_BYTES - other.known
                if spared >= _MIN_TOKENS and 2 * spared >= computed:
                    other.waiting += 1
                    return other, False
            own = InflightPrefill(self, kv_space, given, known)
            self._flying.append(own)
            return own, True

    def land(self) -> None:
        """End all waits: nothing will be written any more."""
        with self._lock:
            flying = list(self._flying)
        for inflight in flying:
            inflight.land()

    def forget(self, inflight: InflightPrefill) -> None:
        """Remove an entry that has landed."""
        with self._lock:
            if inflight in self._flying:
                self._flying.remove(inflight)


_LONELY_LOOKS = 20
_LONGEST_SECONDS = 600.0
T = TypeVar("T")


class MemoryGate:
    """Counts running requests; those without memory wait for others to end. Thread-safe."""

    def __init__(self, make: Callable[[], None]) -> None:
        """`make` frees memory that is not in use."""
        self._make = make
        self._changed = threading.Condition()
        self._changes = 0
        self._running = 0
        self._waiting = 0  # of those, for memory

    def enter(self) -> None:
        """Count a request, until `leave`."""
        with self._changed:
            self._running += 1

    def is_alone(self) -> bool:
        """Whether at most one request runs."""
        with self._changed:
            return self._running <= 1

    def take(self, get: Callable[[], T], cancelled: Callable[[], bool]) -> T:
        """Call `get` until it does not raise `OutOfMemory`: parked contexts are closed first, then others must end.

        Raises `OutOfMemory` if no other request holds memory, and `Cancelled`.
        """
        try:
            return get()
        except OutOfMemory:
            pass
        with self._changed:
            self._waiting += 1
        try:
            return self._wait_for(get, cancelled)
        finally:
            with self._changed:
                self._waiting -= 1

    def leave(self) -> None:
        """A counted request has ended."""
        with self._changed:
            self._running -= 1
            self._changes += 1
            self._changed.notify_all()

    def _wait_for(self, get: Callable[[], T], cancelled: Callable[[], bool]) -> T:
        lonely, started = 0, time.monotonic()
        while True:
            with self._changed:
                seen, others = self._changes, self._running - self._waiting
            self._make()
            try:
                return get()
            except OutOfMemory:
                lonely = 0 if others else lonely + 1
                if lonely > _LONELY_LOOKS:  # and no memory is about to be freed
                    raise
            with self._changed:
                if self._changes == seen:
                    self._changed.wait(_LOOK_SECONDS)
            _still_wanted(started, cancelled)


def _still_wanted(started: float, cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled("The request was cancelled.")
    if time.monotonic() - started > _LONGEST_SECONDS:
        raise OutOfMemory(
            f"Other requests of this session did not end within {_LONGEST_SECONDS:.0f} s, and there is no room beside "
            "them. Read their streams to the end, or close them."
        )
