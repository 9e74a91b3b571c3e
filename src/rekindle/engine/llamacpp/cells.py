"""The buffer that all sequences of a context share: one cell a token, in any order.

    cells       [a0 a1 a2 b0 b1 a3 .. .. b2 .. .. ..]
    sequence a  0 1 2 . . 3                        the position of each of its cells
    spare       . . . . . .                        for KV on its way in or out: it takes part in no computation

What another sequence has is masked, not skipped: every cell in use makes each step a little slower.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import Span
from rekindle.engine.base import Logits
from rekindle.engine.llamacpp.library import LoadedContext
from rekindle.engine.llamacpp.state import Bytes
from rekindle.errors import Cancelled, Closed, OutOfMemory, RekindleError

_LOOK_SECONDS = 0.005  # how often a computation looks whether it was cancelled
_WATCHED_TOKENS = 8  # fewer are computed before anybody could look
_ABORTED, _NO_ROOM = 2, 1  # what llama.cpp answers


@dataclass(frozen=True)
class Tokens:
    """Tokens of one sequence to compute, from position `start` on; logits are wanted of the last `wanted` ones."""

    sequence: int
    tokens: NDArray[np.int64]
    start: int
    wanted: int


class Cells:
    """A context with its sequences. May be used from several threads: `lock` is held by whoever computes."""

    def __init__(self, context: LoadedContext, sequences: int, vocabulary_size: int) -> None:
        self.lock = threading.RLock()
        self.size = context.cells
        self._context: LoadedContext | None = context
        self._vocabulary_size = vocabulary_size
        self._free = list(range(sequences))
        self._spare = sequences
        self._reserved = 0
        self._moved = False  # whether keys wait to be turned, which happens with the next computation
        self._ids = np.arange(sequences + 1, dtype=np.int32)  # what batches point to

    @property
    def context(self) -> LoadedContext:
        """Raises `Closed` after `close`."""
        if self._context is None:
            raise Closed("The engine was closed. Load the model again.")
        return self._context

    def open(self, capacity: int) -> int:
        """A sequence with room for so many tokens. Raises `OutOfMemory`."""
        with self.lock:
            self.context  # noqa: B018  (raises)
            if not self._free:
                raise OutOfMemory("All sequences are in use. Close one, or ask for more with `sequences`.")
            self.reserve(capacity)
            return self._free.pop(0)

    def reserve(self, count: int) -> None:
        """Take so many cells more; fewer if it is negative. Raises `OutOfMemory`."""
        with self.lock:
            if count > 0 and self._reserved + count > self.size:
                raise OutOfMemory(
                    f"The KV buffer has {self.size - self._reserved:,} of {self.size:,} tokens left, {count:,} are "
                    "wanted. Ask for fewer at once, or make it larger with `kv_tokens`."
                )
            self._reserved += count

    def close_sequence(self, sequence: int, capacity: int) -> None:
        """Give a sequence and its cells back."""
        with self.lock:
            if self._context is not None:
                self.remove(sequence, 0)
            self._reserved -= capacity
            self._free.insert(0, sequence)

    def remove(self, sequence: int, start: int) -> bool:
        """Forget positions from `start` on; False where the model cannot forget a part."""
        with self.lock:
            return bool(llama_cpp.llama_memory_seq_rm(self.context.memory, sequence, start, -1))

    def state_of(self, sequence: int, span: Span, size_bytes: int) -> Bytes:
        """The state of a span of a sequence, in as many bytes; shorter if it is not what was expected."""
        with self.lock:
            self._turn()
            memory = self.context.memory
            llama_cpp.llama_memory_seq_cp(memory, sequence, self._spare, span.start, span.stop)
            try:
                return self._get(self._spare, size_bytes)
            finally:
                llama_cpp.llama_memory_seq_rm(memory, self._spare, -1, -1)

    def whole_state_of(self, sequence: int) -> Bytes:
        """All of a sequence."""
        with self.lock:
            self._turn()
            return self._get(sequence, self.size_bytes_of(sequence))

    def size_bytes_of(self, sequence: int) -> int:
        """How long the state of a whole sequence is."""
        with self.lock:
            return int(llama_cpp.llama_state_seq_get_size(self.context.pointer, sequence))

    def put(self, sequence: int, state: Bytes) -> bool:
        """Make an empty sequence what `state` says; False if llama.cpp does not take it."""
        with self.lock:
            data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            taken = llama_cpp.llama_state_seq_set_data(self.context.pointer, data, len(state), sequence)
            return int(taken) == len(state)

    def put_behind(self, sequence: int, state: Bytes, span: Span, start: int) -> bool:
        """Append the positions of `span`, from their state, so that they stand at `start`; keys turn with them."""
        with self.lock:
            memory = self.context.memory
            try:
                if not self.put(self._spare, state):
                    return False
                if start != span.start:
                    llama_cpp.llama_memory_seq_add(memory, self._spare, span.start, span.stop, start - span.start)
                    self._moved = True
                llama_cpp.llama_memory_seq_cp(memory, self._spare, sequence, -1, -1)
                return True
            finally:
                llama_cpp.llama_memory_seq_rm(memory, self._spare, -1, -1)

    def compute(self, rows: Sequence[Tokens], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
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
                    for place in np.flatnonzero(wanted[start:stop]):
                        pointer = llama_cpp.llama_get_logits_ith(self.context.pointer, int(place))
                        logits[filled] = np.ctypeslib.as_array(pointer, (self._vocabulary_size,))
                        filled += 1
            return np.split(logits, np.cumsum([row.wanted for row in rows])[:-1])

    def compute_in_company(self, row: Tokens, cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        """The same for one row of one token, which rounds as among others: llama.cpp has other kernels for one alone.

        The company is a token that nobody needs, in the spare sequence.
        """
        with self.lock:
            try:
                return self.compute([row, Tokens(self._spare, np.zeros(1, np.int64), 0, 0)], cancelled)[:1]
            finally:
                llama_cpp.llama_memory_seq_rm(self.context.memory, self._spare, -1, -1)

    def close(self) -> None:
        """Free the context. Idempotent."""
        with self.lock:
            context, self._context = self._context, None
            if context is not None:
                context.close()

    def _decode(self, batch: llama_cpp.llama_batch, cancelled: Callable[[], bool] | None) -> None:
        if cancelled is not None and cancelled():
            raise Cancelled("The request was cancelled.")
        answer = llama_cpp.llama_decode(self.context.pointer, batch)
        self._moved = False
        if answer == 0:
            return
        if answer == _ABORTED:
            raise Cancelled("The request was cancelled.")
        if answer == _NO_ROOM:
            raise OutOfMemory("The KV buffer is full. Ask for fewer tokens at once, or make it larger: `kv_tokens`.")
        raise RekindleError(f"llama.cpp could not compute (it answers {answer}). Its log has the reason.")

    def _turn(self) -> None:
        """Have keys turned that wait for it, by computing a token that nobody needs."""
        if self._moved:
            self.compute([Tokens(self._spare, np.zeros(1, np.int64), 0, 0)])
            llama_cpp.llama_memory_seq_rm(self.context.memory, self._spare, -1, -1)

    def _get(self, sequence: int, size_bytes: int) -> Bytes:
        state = np.empty(size_bytes, np.uint8)
        data = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        got = llama_cpp.llama_state_seq_get_data(self.context.pointer, data, size_bytes, sequence)
        return state[: int(got)]


def row_wants(row: Tokens) -> NDArray[np.bool_]:
    """Of which tokens the logits are wanted."""
    wants = np.zeros(len(row.tokens), np.bool_)
    wants[len(wants) - row.wanted :] = True
    return wants


@dataclass(frozen=True)
class _Batch:
    """Tokens of several sequences, side by side."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    counts: NDArray[np.int32]  # of sequences each token belongs to: one
    sequences: NDArray[np.uint64]  # where the number of its sequence is
    wanted: NDArray[np.int8]

    @classmethod
    def of(cls, rows: Sequence[Tokens], ids: NDArray[np.int32]) -> _Batch:
        sizes = [len(row.tokens) for row in rows]
        places = np.repeat(np.array([row.sequence for row in rows], np.uint64), sizes)
        return cls(
            np.concatenate([row.tokens for row in rows]).astype(np.int32),
            np.concatenate([np.arange(row.start, row.start + len(row.tokens)) for row in rows]).astype(np.int32),
            np.ones(sum(sizes), np.int32),
            places * np.uint64(ids.itemsize) + np.uint64(ids.ctypes.data),
            np.concatenate([row_wants(row) for row in rows]).astype(np.int8),
        )

    def part(self, start: int, stop: int) -> llama_cpp.llama_batch:
        """A batch of the library over some of the tokens. It points here: not longer than this lives."""
        fields = dict(llama_cpp.llama_batch._fields_)
        arrays: dict[str, NDArray[Any]] = {
            "token": self.tokens,
            "pos": self.positions,
            "n_seq_id": self.counts,
            "seq_id": self.sequences,
            "logits": self.wanted,
        }
        begins = {name: array.ctypes.data + start * array.itemsize for name, array in arrays.items()}
        pointers = {name: ctypes.cast(begin, fields[name]) for name, begin in begins.items()}
        return llama_cpp.llama_batch(n_tokens=stop - start, **pointers)


class _Watch:
    """While a computation runs, looks whether it is still wanted, and ends it if not."""

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
