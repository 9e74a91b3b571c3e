"""What to do with idle time: decisions, all of them pure. `run/idle` carries them out.

population   what a foreseen question gets: only its KV, or an answer too
depth        how many of its passages are read
hindrance    why nothing may be done now: somebody works, or the battery would pay for it
Budget       how much may be spent
spread, rotated, first_passages   which parts, which documents, which passages come first
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rekindle.core.request import AnswersWay

Strategy = Literal["prefill", "answer"]
Rule = Literal["rekindle", "percache"]
_READ_PASSAGES = 2


def population(answers: AnswersWay, threshold: float, cutoff: float, rule: Rule = "rekindle") -> Strategy | None:
    """What a foreseen question gets. None: nothing, because no question may be kept.

    answers     how stored answers take part in new ones
    threshold   how near a question must be to be given a stored answer
    cutoff      from this threshold on, hardly any question is near enough

    percache   as published: from the cut-off on a question is only read by the model, below it is answered too
    rekindle   the same where answers are given as they are. A draft is of use however near the question is: where
               answers are checked, all are answered
    """
    if answers == "off":
        return None
    if rule == "rekindle" and answers == "verified":
        return "answer"
    return "prefill" if threshold >= cutoff else "answer"


def depth(asked: bool, rule: Rule = "rekindle") -> int | None:
    """How many passages of a question are read by the model when it is not answered; None: all of them.

    Questions that are asked begin like foreseen ones with one passage, sometimes with two. Of those that go on alike
    nearly all were asked before: reading more of a question that nobody asked is work for nothing. As published
    (percache) all is read.
    """
    return None if asked or rule == "percache" else _READ_PASSAGES


@dataclass(frozen=True)
class Budget:
    """How much may be spent; None: any amount. Seconds end an action in its middle, the others after it."""

    seconds: float | None = None
    tflop: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class Spent:
    """How much was spent. `joules` is None where the machine does not tell."""

    seconds: float = 0.0
    flop: float = 0.0
    joules: float | None = None


def left(budget: Budget, spent: Spent) -> bool:
    """Whether something of every part of a budget is left."""
    limits = (budget.seconds, budget.tflop, budget.joules)
    done = (spent.seconds, spent.flop / 1e12, spent.joules or 0.0)
    return all(limit is None or part < limit for limit, part in zip(limits, done, strict=True))


@dataclass(frozen=True)
class Conditions:
    """When idle time is spent.

    most_load      as long as others keep less than this share of the cores busy
    on_battery     also without mains
    """

    most_load: float = 0.5
    on_battery: bool = False


def hindrance(conditions: Conditions, load: float | None, plugged: bool | None) -> str | None:
    """Why nothing is to be done now; None if nothing is in the way.

    load      how busy others keep each core, 0 to 1 and more; None: nobody knows
    plugged   whether a machine with a battery has mains; None: it has no battery
    """
    if plugged is False and not conditions.on_battery:
        return "the machine runs on its battery"
    if load is not None and load >= conditions.most_load:
        return f"others keep {load:.0%} of the cores busy"
    return None


def spread(lengths: Sequence[int], most: int) -> list[int]:
    """The places of parts that together are not longer than `most`, spread over all of them; at least one."""
    total = sum(lengths)
    if total <= most or not lengths:
        return list(range(len(lengths)))
    count = max(1, int(len(lengths) * most / total))
    places = sorted({math.floor(number * len(lengths) / count) for number in range(count)})
    chosen: list[int] = []
    for place in places:
        if not chosen or sum(lengths[at] for at in chosen) + lengths[place] <= most:
            chosen.append(place)
    return chosen


def rotated(ids: Iterable[int], after: int) -> list[int]:
    """The ids in order, beginning with the first that is larger than `after`: a round trip, taken up where it ended."""
    ordered = sorted(ids)
    later = [id for id in ordered if id > after]
    return later + ordered[: len(ordered) - len(later)]


def first_passages(used: Sequence[int], foreseen: Sequence[int], all_of_them: Iterable[int]) -> list[int]:
    """Passages in the order in which they are worth to be known as the first of a prompt, each once.

    used      those of earlier prompts, the most frequent first
    foreseen  the first ones of foreseen questions
    """
    counts: dict[int, int] = {}
    for id in foreseen:
        counts[id] = counts.get(id, 0) + 1
    frequent = sorted(counts, key=lambda id: (-counts[id], id))
    present = set(rest := list(all_of_them))
    return [id for id in dict.fromkeys((*used, *frequent, *rest)) if id in present]
