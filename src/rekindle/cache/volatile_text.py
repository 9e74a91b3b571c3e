"""Finding text that changes from request to request, early in the prompt: a date, a counter, a name.

    earlier    You are an assistant. Today is  Monday  . Here are the rules: ... 900 tokens ...
    now        You are an assistant. Today is  Tuesday . Here are the rules: ... 900 tokens ...
                                      start ^  stop   ^  shared

Everything behind the change has to be computed again, though it is the same text. Moving it to the end would save that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core.keys import common_tokens, token_bytes

MIN_SHARED = 64  # tokens behind the change: less is not worth a word
_LONGEST_CHANGE = 256
_ANCHOR = 8  # number of equal tokens in a row where the texts meet again
_MIN_REQUESTS = 2


@dataclass(frozen=True)
class PromptDifference:
    """What differs between two prompts: `[start, stop)` of one, `[start, other_stop)` of the other."""

    start: int
    stop: int
    other_stop: int
    shared: int  # equal tokens behind it


@dataclass(frozen=True)
class Volatile:
    """Text of a prompt that was another in earlier requests, though what follows was the same."""

    start: int
    stop: int
    shared_tokens: int  # behind it, on average
    requests: int  # number of earlier requests that differ there
    others: tuple[tuple[int, ...], ...]  # what stood there, newest first


def find_volatile(tokens: Sequence[int], earlier: Sequence[Sequence[int]]) -> Volatile | None:
    """The text that changes, if the same place changed in at least two earlier prompts (newest first)."""
    changes = [(change, prompt) for prompt in earlier if (change := compare(tokens, prompt)) is not None]
    if not changes:
        return None
    start, count = Counter(change.start for change, _ in changes).most_common(1)[0]
    if count < _MIN_REQUESTS:
        return None
    same = [(change, prompt) for change, prompt in changes if change.start == start]
    others = tuple(dict.fromkeys(tuple(prompt[start : change.other_stop]) for change, prompt in same))
    shared = sum(change.shared for change, _ in same) // len(same)
    return Volatile(start, max(change.stop for change, _ in same), shared, count, others)


def compare(a: Sequence[int], b: Sequence[int]) -> PromptDifference | None:
    """Where `a` says something else than `b`, if they go on alike behind it.

    None if they do not differ, differ for good, or `a` only lacks something.
    """
    start = _common(a, b)
    if start >= min(len(a), len(b)):
        return None
    anchors: dict[tuple[int, ...], int] = {}
    for own in range(start, min(start + _LONGEST_CHANGE, len(a) - _ANCHOR + 1)):
        anchors.setdefault(tuple(a[own : own + _ANCHOR]), own)
    best: PromptDifference | None = None
    for other in range(start, min(start + _LONGEST_CHANGE, len(b) - _ANCHOR + 1)):
        place = anchors.get(tuple(b[other : other + _ANCHOR]))
        if place is not None and (best is None or place + other < best.stop + best.other_stop):
            best = PromptDifference(start, place, other, _common(a[place:], b[other:]))
    if best is None or best.stop == start or best.shared < MIN_SHARED:
        return None
    return best


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return common_tokens(token_bytes(a), token_bytes(b))
