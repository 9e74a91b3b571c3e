"""How well the guard tells questions that come back from those that only look alike. No model writes anything here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.answers.ways import PUBLISHED_SIMILARITY, TOP_K, unguard
from benchmarks.base import Advance
from benchmarks.personal import Person, PersonalSet
from rekindle.answers.bank import AnswerBank, BankQuestion
from rekindle.answers.bank_rows import AnswerText
from rekindle.answers.guard import disagreement
from rekindle.engine.embedding.embedder import Embedder
from rekindle.errors import InvalidSetting
from rekindle.knowledge.retrieve import Retrieval
from rekindle.session.library import Knowledge

THRESHOLDS = (0.75, 0.8, 0.85, 0.9, 0.95)
_NO_TEXT = AnswerText("-", (0,), "", "stop", 0.0)


@dataclass
class _GuardCounts:
    near: int = 0
    again: int = 0
    false: int = 0
    right: int = 0
    wrong: int = 0  # answers to another question than the one that comes back


def measure(sets: Sequence[PersonalSet], knowledge: Knowledge, threshold: float, advance: Advance) -> dict[str, Any]:
    """Near misses that are served, and questions in other words that are, with the guard and without, by threshold.

    Every question of a user is in the bank when the others come back, as in use.
    """
    counts = {(guarded, at): _GuardCounts() for guarded in (True, False) for at in sorted({*THRESHOLDS, threshold})}
    for some in sets:
        for person in some.people:
            if person.revisits:
                advance(f"guard: {some.name}, {person.name}")
                _person(f"guard/{some.name}/{person.name}", person, knowledge, counts)
    ours, published = counts[True, threshold], counts[False, PUBLISHED_SIMILARITY]
    if not ours.near + ours.again:
        return {"near_misses": None, "false_hits": None, "paraphrase_recall": None, "reason": "no revisits.jsonl"}
    curve = [{"threshold": at, "guarded": guarded, **_shares(found)} for (guarded, at), found in sorted(counts.items())]
    return {
        "threshold": threshold,
        "near_misses": ours.near,
        "false_hits": ours.false,
        "paraphrases": ours.again,
        "paraphrase_recall": ours.right / max(1, ours.again),
        "wrong_paraphrase_hits": ours.wrong,
        "cosine_false_hits": published.false,
        "cosine_paraphrase_recall": published.right / max(1, published.again),
        "curve": curve,
    }


def _shares(found: _GuardCounts) -> dict[str, float]:
    return {"near_served": found.false / max(1, found.near), "again_served": found.right / max(1, found.again)}


def _person(tenant: str, person: Person, knowledge: Knowledge, counts: dict[tuple[bool, float], _GuardCounts]) -> None:
    knowledge.ingest(documents=person.documents, tenant=tenant)
    embedder, library = knowledge.embedder(), knowledge.library(tenant)
    bank, bare = (AnswerBank(library, embedder.digest, embedder.dimensions) for _ in range(2))
    banks = {True: bank, False: unguard(bare)}

    def retrieve(question: str, top_k: int | None, retrieval: Retrieval) -> list[int]:
        return [hit.chunk.id for hit in knowledge.search(question, top_k or TOP_K, retrieval, tenant=tenant).hits]

    def asked(text: str) -> BankQuestion:
        found = knowledge.search(text, TOP_K, tenant=tenant)
        assert found.vector is not None
        chunks = tuple(hit.chunk.id for hit in found.hits)
        documents = tuple({hit.chunk.document for hit in found.hits})
        return BankQuestion(text, found.vector, "", TOP_K, "fused", chunks, documents, library.generation)

    first = {question.id: question for question in person.questions}
    for question in first.values():
        bank.keep(asked(question.text), _NO_TEXT)
    for again in person.revisits:
        one = asked(again.text)
        for (guarded, at), found in counts.items():
            hit = banks[guarded].lookup(one, retrieve, at).direct
            found.again += again.same
            found.near += not again.same
            if hit is not None and not again.same:
                found.false += 1
            elif hit is not None:
                right = hit.entry.question == first[again.of].text or _gold(first, hit.entry.question) == again.answer
                found.right += right
                found.wrong += not right


def _gold(first: dict[str, Any], text: str) -> str | None:
    return next((question.answer for question in first.values() if question.text == text), None)


def measure_pairs(path: Path | None, embedder: Embedder, threshold: float) -> dict[str, Any]:
    """Precision and recall on labelled pairs of questions ({a, b, paraphrase}), with the guard and by cosine alone.

    Without a file: on those that the package ships, which the guard was made with.
    """
    names = ("pairs_precision", "pairs_recall", "cosine_precision", "cosine_recall")
    shipped = resources.files("benchmarks").joinpath("sample_pairs.jsonl")
    try:
        text = shipped.read_text("utf-8") if path is None else path.read_text("utf-8")
        pairs = [json.loads(line) for line in text.splitlines() if line.strip()]
        texts = [str(pair[side]) for side in ("a", "b") for pair in pairs]
        labels = np.array([bool(pair["paraphrase"]) for pair in pairs])
    except (OSError, ValueError, KeyError) as error:
        raise InvalidSetting(f"--pairs {path} has no lines with a, b and paraphrase ({error!r}).") from error
    vectors = embedder.embed(texts).vectors
    cosines = (vectors[: len(pairs)] * vectors[len(pairs) :]).sum(axis=1)
    agrees = np.array([disagreement(str(pair["a"]), str(pair["b"])) is None for pair in pairs])
    ours, alone = (cosines >= threshold) & agrees, cosines >= PUBLISHED_SIMILARITY
    values = [share for served in (ours, alone) for share in _precision_recall(served, labels)]
    return {**dict(zip(names, values, strict=True)), "pairs": len(pairs), "pairs_shipped": path is None}


def _precision_recall(served: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> tuple[float | None, float]:
    right = int((served & labels).sum())
    return (right / int(served.sum()) if served.any() else None), right / max(1, int(labels.sum()))
