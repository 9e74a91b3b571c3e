"""Single flight: a request waits for a prefix that another request is computing, instead of computing it too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rekindle.core.keys import TOKEN_BYTES, KvSpace, common_tokens, token_bytes
from rekindle.errors import Cancelled

_MIN_TOKENS = 64  # fewer are computed faster than waited for
_LOOK_SECONDS = 0.05
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
