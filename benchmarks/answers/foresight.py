"""How many questions are foreseen from the documents' own words, by how many are made of each document.

No model writes anything here: a question counts as foreseen if one made before it is near, and its first passage as
warm if one of those would have found it first, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.answers.ways import PUBLISHED_SIMILARITY, TOP_K
from benchmarks.base import Advance
from benchmarks.personal import Person, PersonalSet
from rekindle.idle.extracted_questions import extract_questions, topic_words
from rekindle.session.library import Knowledge

STRIDES = (1, 2, 3, 5)  # questions made of a document
MAX_QUESTIONS = 100  # of a person
_NEAR = 0.7


@dataclass
class _ForesightCounts:
    asked: int = 0
    made: int = 0
    published: int = 0  # asked with one so near that the published system gives its answer
    near: int = 0
    warm: int = 0


def measure(sets: Sequence[PersonalSet], knowledge: Knowledge, users: int, advance: Advance) -> list[dict[str, Any]]:
    """A row for each set and stride: shares of the questions that were foreseen."""
    rows = []
    for some in sets:
        counts = {stride: _ForesightCounts() for stride in STRIDES}
        for person in [person for person in some.people if person.questions][:users]:
            advance(f"foresight: {some.name}, {person.name}")
            _person(f"foresight/{some.name}/{person.name}", person, knowledge, counts)
        rows += [{"set": some.name, "stride": stride, **_shares(found)} for stride, found in counts.items()]
    return rows


def _shares(found: _ForesightCounts) -> dict[str, float]:
    asked = max(1, found.asked)
    return {
        "questions": found.asked,
        "made": found.made,
        "near85_share": found.published / asked,
        "near70_share": found.near / asked,
        "first_passage_warm_share": found.warm / asked,
    }


def _person(tenant: str, person: Person, knowledge: Knowledge, counts: dict[int, _ForesightCounts]) -> None:
    knowledge.ingest(documents=person.documents, tenant=tenant)
    texts = [(document.title, "\n".join(part.text for part in document.sections)) for document in person.documents]
    frequencies = Counter(word for title, text in texts for word in topic_words(f"{title}\n{text}"))
    asked = [question.text for question in person.questions[:MAX_QUESTIONS]]
    real = _looked(asked, knowledge, tenant)
    made = {(title, text): extract_questions(title, text, max(STRIDES), frequencies) for title, text in texts}
    flat = list(dict.fromkeys(question for some in made.values() for question in some))
    known = dict(zip(flat, _looked(flat, knowledge, tenant), strict=True))
    for stride, found in counts.items():
        chosen = [known[question] for some in made.values() for question in some[:stride]]
        found.asked += len(asked)
        found.made += len(chosen)
        if not chosen:
            continue
        vectors, first = np.stack([vector for vector, _ in chosen]), {place for _, place in chosen}
        nearest = [float((vectors @ vector).max()) for vector, _ in real]
        found.published += sum(cosine >= PUBLISHED_SIMILARITY for cosine in nearest)
        found.near += sum(cosine >= _NEAR for cosine in nearest)
        found.warm += sum(place in first for _, place in real)


def _looked(questions: Sequence[str], knowledge: Knowledge, tenant: str) -> list[tuple[np.ndarray[Any, Any], int]]:
    """The vector of each question, and the passage that is found first for it."""
    pairs = []
    for question in questions:
        found = knowledge.search(question, TOP_K, tenant=tenant)
        assert found.vector is not None
        pairs.append((found.vector, found.hits[0].chunk.id if found.hits else -1))
    return pairs
