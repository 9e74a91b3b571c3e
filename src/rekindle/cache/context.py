"""A sequence of the engine with the tokens it holds; and parked ones, which the next request may continue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rekindle.cache.inflight import InflightPrefill
from rekindle.cache.writer import BackgroundJob, WriteGuard, WriteJob
from rekindle.core.keys import KvSpace, common_tokens, token_bytes
from rekindle.core.reply import ChunkReuse, OriginMiss
from rekindle.core.scope import AppRef
from rekindle.engine.base import EngineSequence

_MAX_PARKED = 8


class ChunkJobs(Protocol):
    """A prompt whose chunks may be worth storing."""

    def jobs(self, context: Context, guard: WriteGuard | None) -> list[BackgroundJob]:
        """Write jobs of the chunks, to queue after the prompt itself."""


@dataclass(frozen=True)
class _ParkedKey:
    tokens: bytes
    turn: int  # number of contexts parked before


class Context:
    """A sequence of the engine with what it holds. Used by one request at a time; the writer may copy from it."""

    def __init__(self, kv_space: KvSpace, sequence: EngineSequence) -> None:
        self.kv_space = kv_space
        self.sequence = sequence
        self.tokens: tuple[int, ...] = ()  # as many as are present in the sequence
        self.prompt_tokens = 0  # number of tokens that were prefilled; the others were decoded
        self.passing = False  # used by one request only: nothing is written
        self.ended = True  # whether its reply is complete: then it is written for the last time
        self.guard: WriteGuard | None = None  # decides whether it may be written
        self.app_ref: AppRef | None = None  # the app that it was computed for
        self.inflight: InflightPrefill | None = None  # others may wait for what is being computed here
        self.watched: ChunkJobs | None = None  # its chunks may be worth storing
        self.chunk_reuse: tuple[ChunkReuse, ...] = ()  # its passages, if some of them were computed in other prompts
        self.origin_miss: OriginMiss | None = None  # why nothing of the current prompt came from the origin
        self.checkpoint_tokens = 0  # number of first tokens of its last stored checkpoint
        self.quantized_tokens = 0  # number of its tokens whose KV was quantized
        self.shared_tokens = 0  # number of its first tokens that were loaded with the help of a shared tier
        self.coarse_from: int | None = None  # from there on some KV has fewer bits than this space stores
        self._keeps: list[WriteJob] = []
        self._stored_tokens = 0

    @property
    def stored_tokens(self) -> int:
        """Number of its tokens in the store: found by the lookup, or written since."""
        kept = [len(job.tokens) for job in self._keeps if job.kept]
        self._stored_tokens = min(max([self._stored_tokens, *kept]), len(self.tokens) or self._stored_tokens)
        return self._stored_tokens

    @stored_tokens.setter
    def stored_tokens(self, count: int) -> None:
        self._stored_tokens = count

    @property
    def size_bytes(self) -> int:
        """Bytes of its buffers."""
        return self.sequence.size_bytes

    @property
    def exact_tokens(self) -> int:
        """Number of its first tokens with exactly the KV that computing gives: those before any reused passage."""
        reused_chunks = [chunk.start for chunk in self.chunk_reuse if chunk.source == "reused"]
        return min([len(self.tokens), *reused_chunks])

    @property
    def storable_tokens(self) -> int:
        """Number of its first tokens that may be written: none whose KV would pass for a better one."""
        return self.exact_tokens if self.coarse_from is None else min(self.exact_tokens, self.coarse_from)

    def common(self, tokens: Sequence[int], *, exact: bool = True) -> int:
        """Number of first tokens in common with `tokens`; with `exact` only those whose KV is exact."""
        shared = common_tokens(token_bytes(tokens), token_bytes(self.tokens))
        return min(shared, self.exact_tokens) if exact else shared

    def keep(self, count: int) -> WriteJob:
        """The job that writes its first `count` tokens."""
        known = self.stored_tokens  # before those that are done are forgotten
        job = WriteJob(self.kv_space, self.tokens[:count], self.sequence.export, known=known)
        job.guard, job.app_ref, job.last = self.guard, self.app_ref, self.ended
        job.shared_tokens, job.lossy = self.shared_tokens, self.quantized_tokens > 0
        self._keeps = [*(other for other in self._keeps if not other.detached), job]
        return job

    def jobs(self) -> list[BackgroundJob]:
        """Write jobs of its chunks. Call it once, after `keep`."""
        watched, self.watched = self.watched, None
        return [] if watched is None else watched.jobs(self, self.guard)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens; write jobs copy from the old buffers first."""
        if capacity > self.sequence.capacity:
            self._detach(0)
            self.sequence.reserve(capacity)

    def truncate(self, length: int) -> None:
        """Drop every token from `length` on; write jobs that need them copy them first."""
        self._detach(length)
        self.sequence.truncate(length)
        self._stored_tokens = min(self.stored_tokens, length)
        self.tokens = self.tokens[:length]
        self.chunk_reuse = cut_passages(self.chunk_reuse, length)
        self.quantized_tokens = min(self.quantized_tokens, length)
        self.shared_tokens = min(self.shared_tokens, length)
        self.coarse_from = None if length <= (self.coarse_from or 0) else self.coarse_from
        self.checkpoint_tokens = min(self.checkpoint_tokens, length)

    def land(self) -> None:
        """End the wait of requests with the same prefix."""
        if self.inflight is not None:
            self.inflight.land()
            self.inflight = None

    def close(self) -> None:
        """Give the sequence back. Idempotent."""
        self.land()
        self._detach(0)
        self.sequence.close()

    def _detach(self, length: int) -> None:
        self._stored_tokens = self.stored_tokens
        for job in self._keeps:
            if len(job.tokens) > length:
                job.detach()
        self._keeps = [job for job in self._keeps if len(job.tokens) <= length]


def cut_passages(passages: Sequence[ChunkReuse], length: int) -> tuple[ChunkReuse, ...]:
    """The passages within the first `length` tokens of a context."""
    left = []
    for chunk in passages:
        if chunk.start < length:
            recomputed = tuple(position for position in chunk.recomputed_positions if position < length)
            stop = min(chunk.stop, length)
            left.append(replace(chunk, stop=stop, recomputed=len(recomputed), recomputed_positions=recomputed))
    return tuple(left)


class ParkedContexts:
    """Contexts of finished requests, still in the engine: a request that continues one loads nothing.

    Never more bytes than the limit. The oldest leave first, and long ones age slower than short ones: the title request
    of a chat does not evict the chat. Thread-safe.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._parked: dict[Context, _ParkedKey] = {}  # the least recently used first
        self._turn = 0

    def take(
        self, kv_space: KvSpace, tokens: Sequence[int], *, whole: bool = False, exact: bool = True
    ) -> Context | None:
        """Take the context that has most in common with `tokens`; None if none is worth taking.

        With `exact`, tokens behind reused passages do not count.

        Continuing a context drops the rest of it, so at least half of it must be of use: else it stays for its own
        chat. With `whole` all of it must be, and something must be left to compute.
        """
        given = token_bytes(tokens)
        with self._lock:
            own = {c: p for c, p in self._parked.items() if c.kv_space is kv_space or c.kv_space == kv_space}
            shared = [(common_tokens(given, place.tokens), context) for context, place in own.items()]
            if exact:
                shared = [(min(common, context.exact_tokens), context) for common, context in shared]
            useful = [(common, context) for common, context in shared if 2 * common >= len(context.tokens) > 0]
            if whole:
                useful = [(c, context) for c, context in useful if c == len(context.tokens) < len(tokens)]
            if not useful:
                return None
            _, best = max(useful, key=lambda pair: pair[0])
            del self._parked[best]
            return best

    def park(self, context: Context) -> None:
        """Keep a context for its next request; others make room for it, or it leaves itself."""
        if not self._limit_bytes:
            context.close()
            return
        leaving: list[Context] = []
        with self._lock:
            self._turn += 1
            self._parked[context] = _ParkedKey(token_bytes(context.tokens), self._turn)
            mean = sum(len(key.tokens) for key in self._parked.values()) / len(self._parked)
            ages = {
                one: (self._turn - key.turn + 1) * mean / max(1, len(key.tokens)) for one, key in self._parked.items()
            }
            for one in sorted(ages, key=lambda one: -ages[one]):
                if self._is_full():
                    del self._parked[one]
                    leaving.append(one)
        for gone in leaving:
            gone.close()

    def _is_full(self) -> bool:
        return len(self._parked) > _MAX_PARKED or sum(one.size_bytes for one in self._parked) > self._limit_bytes

    def clear(self, leaves: Callable[[Context], bool] = lambda _: True) -> None:
        """Close all contexts, or those that `leaves` says."""
        with self._lock:
            leaving = [context for context in self._parked if leaves(context)]
            for context in leaving:
                del self._parked[context]
        for context in leaving:
            context.close()
