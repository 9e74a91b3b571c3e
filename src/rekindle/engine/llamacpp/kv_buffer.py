"""The KV buffer that all sequences of a context share: one cell per token, in any order.

    cells       [a0 a1 a2 b0 b1 a3 .. .. b2 .. .. ..]
    sequence a  0 1 2 . . 3                        the position of each of its cells
    spare       . . . . . .                        for KV being loaded or exported: it takes part in no computation

Cells of other sequences are masked, not skipped: every cell in use makes each step a little slower.

For layers with a sliding window there is a second such buffer (`swa_full`). In it llama.cpp overwrites what left the
window, unless two sequences have it. So that a sequence can be cut and exported, each one has a twin with the same
cells.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import Span
from rekindle.engine.base import Logits
from rekindle.engine.llamacpp.c_api import PARTIAL_ONLY, LlamaBatch, llama
from rekindle.engine.llamacpp.loaded_model import LoadedContext
from rekindle.engine.llamacpp.state import Bytes
from rekindle.errors import Cancelled, Closed, OutOfMemory, RekindleError

_LOOK_SECONDS = 0.025  # interval of checking for cancellation: each check takes a core from the computation
_WATCHED_TOKENS = 8  # fewer are done before the first check
_ABORTED, _NO_ROOM = 2, 1  # results of llama_decode


@dataclass(frozen=True)
class BatchTokens:
    """Tokens of one sequence to compute from position `start` on; the last `wanted` ones get logits."""

    sequence: int
    tokens: NDArray[np.int64]
    start: int
    wanted: int


class KvBuffer:
    """A context with its sequences. Thread-safe: `lock` is held while computing."""

    def __init__(self, context: LoadedContext, sequences: int, vocabulary_size: int) -> None:
        self.lock = threading.RLock()
        self.size = context.cells
        self._context: LoadedContext | None = context
        self._vocabulary_size = vocabulary_size
        self._free = list(range(sequences))
        self._spare = sequences
        self._reserved = 0
        self._twin = sequences + 1 if context.window else 0  # added to the number of a sequence
        self._moved = False  # whether moved keys are not rotated yet, which the next computation does
        self._ids = np.arange(sequences + 1, dtype=np.int32)  # batches point into it

    @property
    def context(self) -> LoadedContext:
        """Raises `Closed` after `close`."""
        if self._context is None:
            raise Closed("The engine was closed. Load the model again.")
        return self._context

    def open(self, capacity: int) -> int:
        """Open a sequence of `capacity` tokens. Raises `OutOfMemory`."""
        with self.lock:
            self.context  # noqa: B018  (raises)
            if not self._free:
                raise OutOfMemory("All sequences are in use. Close one, or ask for more with `sequences`.")
            self.reserve(capacity)
            return self._free.pop(0)

    def reserve(self, count: int) -> None:
        """Reserve `count` more cells; negative frees. Raises `OutOfMemory`."""
        with self.lock:
            if count > 0 and self._reserved + count > self.size:
                raise OutOfMemory(
                    f"The KV buffer has {self.size - self._reserved:,} of {self.size:,} tokens left, {count:,} are "
                    "wanted. Ask for fewer at once, or make it larger with `kv_tokens`."
                )
            self._reserved += count

    def close_sequence(self, sequence: int, capacity: int) -> None:
        """Free a sequence and its cells."""
        with self.lock:
            if self._context is not None:
                self.remove(sequence, 0)
            self._reserved -= capacity
            self._free.insert(0, sequence)

    def remove(self, sequence: int, start: int) -> bool:
        """Drop positions from `start` on; False if the model cannot drop a part, or what is left of it is not whole."""
        with self.lock:
            memory = self.context.memory
            if self._twin:
                llama.llama_memory_seq_rm(memory, sequence + self._twin, start, -1)
            removed = bool(llama.llama_memory_seq_rm(memory, sequence, start, -1))
            return removed and not (start and self._twin and llama.llama_memory_seq_pos_min(memory, sequence) > 0)

    def state_of(self, sequence: int, span: Span, size_bytes: int) -> Bytes:
        """The state of a span of a sequence, of `size_bytes`; shorter if it is not what was expected."""
        with self.lock:
            self._rotate_moved()
            memory = self.context.memory
            llama.llama_memory_seq_cp(memory, sequence, self._spare, span.start, span.stop)
            try:
                return self._get(self._spare, size_bytes)
            finally:
                llama.llama_memory_seq_rm(memory, self._spare, -1, -1)

    def whole_state_of(self, sequence: int) -> Bytes:
        """The state of a whole sequence."""
        with self.lock:
            self._rotate_moved()
            return self._get(sequence, self.size_bytes_of(sequence))

    def partial_state_of(self, sequence: int) -> Bytes:
        """What the state of a sequence has beside the KV of attention layers that see everything."""
        with self.lock:
            state = np.empty(self.partial_size_bytes_of(sequence), np.uint8)
            data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            got = llama.llama_state_seq_get_data_ext(self.context.pointer, data, len(state), sequence, PARTIAL_ONLY)
            return state[: int(got)]

    def partial_size_bytes_of(self, sequence: int) -> int:
        """Bytes of that."""
        with self.lock:
            return int(llama.llama_state_seq_get_size_ext(self.context.pointer, sequence, PARTIAL_ONLY))

    def size_bytes_of(self, sequence: int) -> int:
        """Bytes of the state of a whole sequence."""
        with self.lock:
            return int(llama.llama_state_seq_get_size(self.context.pointer, sequence))

    def put(self, sequence: int, state: Bytes) -> bool:
        """Load a state into an empty sequence; False if llama.cpp rejects it."""
        with self.lock:
            data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            taken = llama.llama_state_seq_set_data(self.context.pointer, data, len(state), sequence)
            self._protect(sequence)
            return int(taken) == len(state)

    def put_behind(self, sequence: int, state: Bytes, span: Span, start: int) -> bool:
        """Append the state of `span` at position `start`, rotating its keys."""
        with self.lock:
            memory = self.context.memory
            try:
                if not self.put(self._spare, state):
                    return False
                if start != span.start:
                    llama.llama_memory_seq_add(memory, self._spare, span.start, span.stop, start - span.start)
                    self._moved = True
                llama.llama_memory_seq_cp(memory, self._spare, sequence, -1, -1)
                self._protect(sequence, start, start + len(span))
                return True
            finally:
                self.remove(self._spare, 0)

    def compute(self, rows: Sequence[BatchTokens], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """The logits each row wants. Raises `Cancelled`, `OutOfMemory`; rows may then be computed in part."""
        with self.lock:
            batch = _Batch.of(rows, self._ids)
            wanted = np.concatenate([row_wants(row) for row in rows])
            logits = np.empty((int(wanted.sum()), self._vocabulary_size), np.float32)
            filled = 0
            with _Watch(self.context, cancelled if len(wanted) > _WATCHED_TOKENS else None):
                for start in range(0, len(wanted), self.context.batch_tokens):
                    stop = min(start + self.context.batch_tokens, len(wanted))
                    self._decode(batch.part(start, stop), cancelled)
                    self._protect_rows(rows, start, stop)
                    for place in np.flatnonzero(wanted[start:stop]):
                        pointer = llama.llama_get_logits_ith(self.context.pointer, int(place))
                        logits[filled] = np.ctypeslib.as_array(pointer, (self._vocabulary_size,))
                        filled += 1
            return np.split(logits, np.cumsum([row.wanted for row in rows])[:-1])

    def compute_with_dummy(self, row: BatchTokens, cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """Compute one row of one token with the rounding of larger batches: llama.cpp has other kernels for one alone.

        The other token is a dummy in the spare sequence.
        """
        with self.lock:
            try:
                return self.compute([row, BatchTokens(self._spare, np.zeros(1, np.int64), 0, 0)], cancelled)[:1]
            finally:
                self.remove(self._spare, 0)

    def synchronize(self) -> None:
        """Wait until everything is computed: layers on a GPU may be behind."""
        with self.lock:
            llama.llama_synchronize(self.context.pointer)

    def close(self) -> None:
        """Free the context. Idempotent."""
        with self.lock:
            context, self._context = self._context, None
            if context is not None:
                context.close()

    def _decode(self, batch: LlamaBatch, cancelled: Callable[[], bool] | None) -> None:
        if cancelled is not None and cancelled():
            raise Cancelled("The request was cancelled.")
        answer = llama.llama_decode(self.context.pointer, batch)
        self._moved = False
        if answer == 0:
            return
        if answer == _ABORTED:
            raise Cancelled("The request was cancelled.")
        if answer == _NO_ROOM:
            raise OutOfMemory("The KV buffer is full. Ask for fewer tokens at once, or make it larger: `kv_tokens`.")
        raise RekindleError(f"llama.cpp could not compute (it answers {answer}). Its log has the reason.")

    def _rotate_moved(self) -> None:
        """Rotate moved keys, by computing a dummy token."""
        if self._moved:
            self.compute([BatchTokens(self._spare, np.zeros(1, np.int64), 0, 0)])
            self.remove(self._spare, 0)

    def _protect(self, sequence: int, start: int = -1, stop: int = -1) -> None:
        """Give the twin of a sequence its cells from position `start` to `stop`, which it does not have yet."""
        if self._twin:
            llama.llama_memory_seq_cp(self.context.memory, sequence, sequence + self._twin, start, stop)

    def _protect_rows(self, rows: Sequence[BatchTokens], start: int, stop: int) -> None:
        """Protect what was computed of rows whose tokens follow each other: those from `start` to `stop`."""
        first = 0
        for row in rows:
            begin, end = max(start, first), min(stop, first + len(row.tokens))
            if begin < end:
                self._protect(row.sequence, row.start + begin - first, row.start + end - first)
            first += len(row.tokens)

    def _get(self, sequence: int, size_bytes: int) -> Bytes:
        state = np.empty(size_bytes, np.uint8)
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        got = llama.llama_state_seq_get_data(self.context.pointer, data, size_bytes, sequence)
        return state[: int(got)]


def row_wants(row: BatchTokens) -> NDArray[np.bool_]:
    """[tokens] whether logits are wanted."""
    wants = np.zeros(len(row.tokens), np.bool_)
    wants[len(wants) - row.wanted :] = True
    return wants


@dataclass(frozen=True)
class _Batch:
    """Tokens of several sequences, side by side."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    counts: NDArray[np.int32]  # number of sequences of each token: one
    sequences: NDArray[np.uint64]  # address of its sequence number
    wanted: NDArray[np.int8]

    @classmethod
    def of(cls, rows: Sequence[BatchTokens], ids: NDArray[np.int32]) -> _Batch:
        sizes = [len(row.tokens) for row in rows]
        places = np.repeat(np.array([row.sequence for row in rows], np.uint64), sizes)
        return cls(
            np.concatenate([row.tokens for row in rows]).astype(np.int32),
            np.concatenate([np.arange(row.start, row.start + len(row.tokens)) for row in rows]).astype(np.int32),
            np.ones(sum(sizes), np.int32),
            places * np.uint64(ids.itemsize) + np.uint64(ids.ctypes.data),
            np.concatenate([row_wants(row) for row in rows]).astype(np.int8),
        )

    def part(self, start: int, stop: int) -> LlamaBatch:
        """A llama.cpp batch of some of the tokens. It points into this object."""
        fields: dict[str, Any] = {field[0]: field[1] for field in LlamaBatch._fields_}
        arrays: dict[str, NDArray[Any]] = {
            "token": self.tokens,
            "pos": self.positions,
            "n_seq_id": self.counts,
            "seq_id": self.sequences,
            "logits": self.wanted,
        }
        begins = {name: array.ctypes.data + start * array.itemsize for name, array in arrays.items()}
        pointers = {name: ctypes.cast(begin, fields[name]) for name, begin in begins.items()}
        return LlamaBatch(n_tokens=stop - start, **pointers)


class _Watch:
    """Aborts a running computation when it is cancelled."""

    def __init__(self, context: LoadedContext, cancelled: Callable[[], bool] | None) -> None:
        self._context, self._cancelled = context, cancelled
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._cancelled is not None:
            self._thread = threading.Thread(target=self._look, name="rekindle-watch", daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._context.abort(False)

    def _look(self) -> None:
        assert self._cancelled is not None
        while not self._over.wait(_LOOK_SECONDS):
            if self._cancelled():
                self._context.abort(True)
                return
