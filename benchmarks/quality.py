"""How far answers with reused KV are from those of the full computation: by distribution, text, and right answer.

Prompts that were started in several ways are decoded together, a row each.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.engine.base import Engine, Row
from rekindle.session.calibrate.budget import StartedPrompt
from rekindle.session.calibrate.nearness import LogProbabilities, log_softmax

FORCED_TOKENS = 16  # of the full computation's own continuation
POSITIONS = FORCED_TOKENS + 1
ANSWER_TOKENS = 28

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Quality:
    """One start against the full computation of the same prompt."""

    kl: float  # nats, mean over positions
    top1: float  # share of positions with the same most likely token
    rouge_l: float | None  # of its answer to the other; None: the package is missing
    f1: float | None  # against the right answers; None: there are none
    text: str


def judge(engine: Engine, starts: Sequence[StartedPrompt], answers: Sequence[str]) -> list[Quality]:
    """The quality of each; the first is the full computation. The sequences are as before afterwards."""
    replies, reference = _greedy(engine, starts, ANSWER_TOKENS)
    found = _forced(engine, starts[1:], replies[0][:FORCED_TOKENS])
    texts = [_text(engine, reply) for reply in replies]
    score = rouge_l()
    judged = []
    for text, probabilities in zip(texts, [reference, *found], strict=True):
        kl, top1 = divergence(reference, probabilities)
        rouge = None if score is None else score(texts[0], text)
        judged.append(Quality(kl, top1, rouge, best_f1(text, answers), text))
    return judged


def compare(engine: Engine, exact: StartedPrompt, others: Sequence[StartedPrompt]) -> list[tuple[float, float]]:
    """KL and top-1 agreement of each with the exact one, teacher-forced. The sequences are as before afterwards."""
    replies, reference = _greedy(engine, [exact], POSITIONS)
    return [divergence(reference, one) for one in _forced(engine, others, replies[0][:FORCED_TOKENS])]


def divergence(reference: LogProbabilities, other: LogProbabilities) -> tuple[float, float]:
    """KL of `other` from `reference` in nats, and how often the most likely token is the same: means over positions."""
    kl = (np.exp(reference) * (reference - other)).sum(axis=-1)
    same = reference.argmax(axis=-1) == other.argmax(axis=-1)
    return float(max(0.0, kl.mean())), float(same.mean())


def rouge_l() -> Callable[[str, str], float] | None:
    """What gives ROUGE-L (F-measure, no stemming) of a text to another; None without the package rouge-score."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        return None
    scorer = RougeScorer(["rougeL"], use_stemmer=False)

    def score(target: str, text: str) -> float:
        return 1.0 if text == target else float(scorer.score(target, text)["rougeL"].fmeasure)

    return score


def best_f1(text: str, answers: Iterable[str]) -> float | None:
    """F1 of the words of a text against the nearest of the answers; None if there are none."""
    return max((_f1(_words(text), _words(answer)) for answer in answers), default=None)


def _greedy(engine: Engine, starts: Sequence[StartedPrompt], tokens: int) -> tuple[list[list[int]], LogProbabilities]:
    """The first tokens of each reply, and the log-probabilities `[positions, vocabulary]` of the first one."""
    lengths = [one.result.context.sequence.length for one in starts]
    replies = [[int(one.result.logits[-1].argmax())] for one in starts]
    first = [starts[0].result.logits[-1]]
    for _ in range(tokens - 1):
        rows = [
            Row.following(one.result.context.sequence, reply[-1:]) for one, reply in zip(starts, replies, strict=True)
        ]
        logits = engine.step(rows)
        first.append(logits[0][-1])
        for reply, found in zip(replies, logits, strict=True):
            reply.append(int(found[-1].argmax()))
    for one, length in zip(starts, lengths, strict=True):
        one.result.context.sequence.truncate(length)
    return replies, log_softmax(np.stack(first[:POSITIONS]))


def _forced(engine: Engine, starts: Sequence[StartedPrompt], reply: Sequence[int]) -> list[LogProbabilities]:
    """The log-probabilities of each `[positions, vocabulary]` along the same continuation."""
    if not starts:
        return []
    sequences = [one.result.context.sequence for one in starts]
    lengths = [sequence.length for sequence in sequences]
    logits = engine.step([Row.following(sequence, reply, logits="all") for sequence in sequences])
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.truncate(length)
    return [
        log_softmax(np.concatenate([one.result.logits[-1:], found])) for one, found in zip(starts, logits, strict=True)
    ]


def _text(engine: Engine, reply: Sequence[int]) -> str:
    """What the model said until it stopped."""
    stops = engine.tokenizer.stop_ids
    end = next((place for place, token in enumerate(reply) if token in stops), len(reply))
    return engine.tokenizer.decode(reply[:end]).strip()


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def _f1(found: Sequence[str], right: Sequence[str]) -> float:
    if not found or not right:
        return float(found == right)
    shared = sum((Counter(found) & Counter(right)).values())
    return 2 * shared / (len(found) + len(right))
