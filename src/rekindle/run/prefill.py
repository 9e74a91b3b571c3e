"""Filling a sequence with a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rekindle.engine.base import Engine, EngineSequence, Logits, Row, Wanted


def prefill(engine: Engine, sequence: EngineSequence, tokens: Sequence[int], cancelled: Callable[[], bool]) -> Logits:
    """Compute what is missing of `tokens`; the logits `[1, vocabulary]` after the last of them.

    At least the last token is always computed. Long prompts go in pieces, which bounds memory.
    """
    sequence.truncate(min(sequence.length, len(tokens) - 1))
    while True:
        start = sequence.length
        stop = min(start + engine.prefill_tokens, len(tokens))
        wanted: Wanted = "last" if stop == len(tokens) else "none"
        (logits,) = engine.step([Row.following(sequence, tokens[start:stop], logits=wanted)], cancelled)
        if stop == len(tokens):
            return logits
