"""The prompts of `python -m benchmarks chunks`: some to calibrate on, others to test on, and the donors of both."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.session.calibrate.prompts import PASSAGES, PassagePrompt, PassageQuestion, distinct_prompts, donors_of


@dataclass(frozen=True)
class PromptSets:
    """Prompts to calibrate on, prompts to test on, and the donors of both. No passage is in two prompts."""

    calibration: tuple[PassagePrompt, ...]
    test: tuple[PassagePrompt, ...]
    donors: tuple[PassagePrompt, ...]


def held(
    questions: Sequence[PassageQuestion], calibration: int, test: int, seed: int, passages: int = PASSAGES
) -> PromptSets:
    """Draw prompts: calibration from one end of the shuffled questions, test from the other.

    Where there are too few for both, a quarter of them (at least one) is for calibration. Raises `InvalidSetting` if
    there are not even two.
    """
    order = random.Random(seed)
    drawn = distinct_prompts(questions, order, passages)
    if calibration + test > len(drawn):
        calibration = min(calibration, max(1, len(drawn) // 4)) if test else min(calibration, len(drawn))
    first = tuple(drawn[:calibration])
    last = tuple(drawn[max(calibration, len(drawn) - test) :]) if test else ()
    return PromptSets(first, last, donors_of((*first, *last), questions, order))
