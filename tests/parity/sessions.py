"""Sessions for the laws of the cache: what they are asked, and what they must answer."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rekindle import Session
from rekindle.core.reply import Reply
from rekindle.engine.base import Engine, EngineSequence, Row
from rekindle.errors import Closed
from tests.parity.engines import KINDS, STOP, make
from tests.unmeasured_costs import UnmeasuredCosts

ROOM = {"disk_limit": "200MB"}


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 250, count)]


N = 100
MESSAGE = 60  # so many tokens of PROMPT are a message: where there are checkpoints, there is one
PROMPT = [*tokens_of(MESSAGE - 1), STOP, *tokens_of(N)[MESSAGE:]]


def opened(what: str | Callable[[], Engine] | Engine, folder: Path | str, **settings: Any) -> Session:
    """A session that reuses whatever it knows: with an engine that is made here and goes with it, or a given one."""
    made = isinstance(what, str) or not hasattr(what, "step")
    engine: Any = make(what) if isinstance(what, str) else what() if made else what  # type: ignore[operator]
    session = Session(engine, cache=folder, **{**ROOM, **settings})
    session.cache.kv.costs = UnmeasuredCosts()
    session._owns_engine = made
    return session


def ask(session: Session, tokens: Sequence[int], count: int = 5, **options: Any) -> Reply:
    return session.generate(list(tokens), max_tokens=count, min_tokens=count, **options)


@cache
def uncached(kind: str) -> Session:
    """A session without a cache, for as long as the process lives."""
    session = Session(make(kind), cache="off")
    session._owns_engine = True
    atexit.register(session.close)
    return session


@cache
def cold(kind: str, tokens: tuple[int, ...], count: int, least: int | None = None) -> tuple[int, ...]:
    """What the engine answers without any cache, in so many tokens, or at least in so many."""
    reply = uncached(kind).generate(list(tokens), max_tokens=count, min_tokens=count if least is None else least)
    assert reply.reuse.reused == 0
    return reply.tokens


def assert_right(
    kind: str, reply: Reply, tokens: Sequence[int] = PROMPT, count: int = 5, least: int | None = None
) -> None:
    """The reply is the one that the engine gives without any cache.

    Where an engine rounds, two tokens may be equally good to within rounding: then either is right, and what follows
    cannot be compared.
    """
    expected = cold(kind, tuple(tokens), count, least)
    if reply.tokens == expected:
        return
    place = next(i for i, (a, b) in enumerate(zip(reply.tokens, expected, strict=False)) if a != b)
    scores = logits_after(kind, (*tokens, *expected[:place]))
    gap = abs(scores[reply.tokens[place]] - scores[expected[place]]) / np.abs(scores).max()
    assert gap <= KINDS[kind].tolerance, f"token {place} of {reply.tokens} is not that of {expected}"


@cache
def logits_after(kind: str, tokens: tuple[int, ...]) -> np.ndarray:
    """The logits `[vocabulary]` that follow a context, computed in one step."""
    engine = uncached(kind).engine
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    try:
        return engine.step([Row.following(sequence, tokens)])[0][-1]
    finally:
        sequence.close()


def entries(session: Session) -> int:
    assert session.cache.store is not None
    return len(session.cache.store.disk.entries())


def is_open(sequence: EngineSequence) -> bool:
    try:
        return sequence.length >= 0
    except Closed:
        return False


def watch(engine: Any) -> list[EngineSequence]:
    """Every sequence that the engine opens from now on."""
    sequences: list[EngineSequence] = []
    real = engine.open

    def open_and_note(*args: Any) -> EngineSequence:
        sequences.append(real(*args))
        return sequences[-1]

    engine.open = open_and_note
    return sequences


def record(engine: Any) -> list[np.ndarray]:
    """Every logits that the engine gives from now on."""
    seen: list[np.ndarray] = []
    real = engine.step

    def step_and_note(*args: Any) -> list[np.ndarray]:
        logits = real(*args)
        seen.extend(array.copy() for array in logits if len(array))
        return logits

    engine.step = step_and_note
    return seen


def cancel_when_asked(engine: Any, cancel: Callable[[], None], times: int) -> None:
    """Cancel a request when the engine looks for so many times, and once more, whether it was."""
    real, asked = engine.step, [0]

    def step(rows: Any, cancelled: Callable[[], bool]) -> Any:
        def look() -> bool:
            asked[0] += 1
            if asked[0] > times:
                cancel()
            return cancelled()

        return real(rows, look)

    engine.step = step


def assert_bit_equal(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(got) == len(expected) > 0
    for step, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(ours, theirs), f"step {step} is off by {np.abs(ours - theirs).max()}"
