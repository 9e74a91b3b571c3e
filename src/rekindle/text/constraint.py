"""Constrained decoding: at every step only tokens that the grammar allows can be drawn.

llguidance does the work, in a process of its own for every reply (`grammar_worker`): some grammars of 2 KB take it
minutes and gigabytes despite its own limits. Such a process is killed and the grammar refused.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rekindle.core.grammar import NOTHING_FOLLOWS, Grammar
from rekindle.errors import InvalidGrammar, StepRefused
from rekindle.text.base import Tokenizer
from rekindle.text.sandbox import LimitExceeded, SandboxPool, WorkRefused

if TYPE_CHECKING:
    from typing_extensions import Self


class GrammarBackend:
    """Starts constraints over the vocabulary of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, parallel: int = 2) -> None:
        """Up to `parallel` processes are kept for reuse; starting one takes about 300 ms, first when it is needed."""
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._known: _Vocabulary | None = None
        self._processes = SandboxPool("rekindle.text.grammar_worker", lambda: self._vocabulary().message, parallel)

    def start(
        self,
        grammar: Grammar,
        cancelled: Callable[[], bool] = lambda: False,
        calls: Grammar | None = None,
        openers: Iterable[int] = (),
    ) -> Constraint:
        """The constraint of a new reply. Raises `InvalidGrammar` if no reply can satisfy it, and `Cancelled`.

        The reply may follow `calls` instead. `openers` are control tokens that may begin such a reply.
        """
        if calls is None:
            return Constraint([grammar], self._vocabulary(), self._processes, cancelled)
        other = dict.fromkeys(openers, calls)
        return Constraint([grammar, calls], self._vocabulary(), self._processes, cancelled, other)

    def close(self) -> None:
        """Kill the idle processes."""
        self._processes.close()

    def _vocabulary(self) -> _Vocabulary:
        with self._lock:  # else two threads would build the same
            self._known = self._known or _Vocabulary(self._tokenizer)
            return self._known


class Constraint:
    """The state of one reply in its grammar. Not thread-safe. `close` returns its process for reuse."""

    def __init__(
        self,
        grammars: Sequence[Grammar],
        vocabulary: _Vocabulary,
        processes: SandboxPool,
        cancelled: Callable[[], bool],
        openers: Mapping[int, Grammar] | None = None,
    ) -> None:
        """The reply follows one of the grammars. `cancelled` is polled during long waits.

        `openers` are control tokens that may come first, each with the grammar of what follows it.
        """
        self._vocabulary = vocabulary
        self._cancelled = cancelled
        self._process = processes.take()
        self._end = weakref.finalize(self, processes.give_back, self._process)
        self._ended = False
        self._openers = dict(openers or {})
        self._allowed = self._ask([[grammar.kind, grammar.text] for grammar in grammars])  # [vocabulary]
        self._allowed[list(self._openers)] = True

    @property
    def finished(self) -> bool:
        """Whether only the end may follow: the caller ends the reply, with or without a stop token."""
        return self._ended or self._complete

    def mask(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """A copy of logits `[vocabulary]` with forbidden tokens set to -inf; at least one stays allowed.

        Stop tokens are allowed where the grammar may end. If all allowed tokens have logits of -inf, they become
        equally likely. Raises `StepRefused` if nothing may follow and the model has no stop token.
        """
        if not self._allowed.any():
            raise StepRefused("The reply is finished: nothing may follow.")
        masked: NDArray[np.float32] = np.where(self._allowed, logits, np.float32(-np.inf))
        if np.isneginf(masked.max()):
            masked[self._allowed] = 0.0
        return masked

    def accept(self, token: int) -> None:
        """Advance by the token that was drawn.

        Raises `StepRefused` for a forbidden token, `InvalidGrammar` if the next mask cannot be computed (the grammar is
        too complex here, or leads to a dead end), and `Cancelled`.
        """
        if not self._allowed[token]:
            raise StepRefused(f"Token {token} does not follow the grammar: draw one from the masked logits.")
        if token in self._vocabulary.stop_ids:
            self._ended = True
            return
        opened, self._openers = self._openers.get(token), {}
        self._allowed = self._ask(token if opened is None else [[opened.kind, opened.text]])

    def close(self) -> None:
        """Return the process. Idempotent."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, step: list[list[str]] | int) -> NDArray[np.bool_]:
        """The tokens allowed next, stop tokens included."""
        try:
            bits = self._process.ask(json.dumps(step).encode(), self._cancelled)
        except WorkRefused as refusal:
            raise InvalidGrammar(str(refusal)) from None
        except LimitExceeded as limit:
            raise InvalidGrammar(f"The grammar is too complex: {limit}. Simplify it, or leave parts out.") from None
        size = len(self._vocabulary.usable)
        known = np.unpackbits(np.frombuffer(bits, np.uint8), count=size + 1, bitorder="little").view(np.bool_)
        allowed, may_end = known[:size] & self._vocabulary.usable, bool(known[size])
        self._complete = not allowed.any()
        if self._complete and not may_end:
            raise InvalidGrammar(NOTHING_FOLLOWS)
        allowed[self._vocabulary.stops] = may_end
        return allowed


class _Vocabulary:
    """The model's tokens and one more that stands for all stop tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.pieces()
        self.stop_ids = tokenizer.stop_ids
        self.stops = np.array(sorted(self.stop_ids), dtype=np.int64)  # [stop tokens]
        self.usable = np.array([bool(piece) for piece in pieces], dtype=np.bool_)  # [vocabulary]
        self.usable[self.stops] = False  # they end the reply, whatever their text
        tokens = [piece if use else b"" for piece, use in zip(pieces, self.usable, strict=True)]
        # llguidance's convention: a special token begins with a byte that no text has.
        self.message = json.dumps([piece.decode("latin-1") for piece in (*tokens, b"\xff<end>")]).encode()
