"""Personal sets: what one person would have on a device, and what they ask about it.

A folder with `corpus.jsonl` ({doc_id, user, title, text}) and `queries.jsonl` ({query, user, evidence_doc_ids, ...}),
a folder of such folders, or the sample that the package ships. `revisits.jsonl` ({of, kind, query, answer}) has
questions that come back in other words, and some that only look alike.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from benchmarks.data import read_jsonl
from rekindle.core.document import Document, Section
from rekindle.errors import InvalidSetting


@dataclass(frozen=True)
class Question:
    """A question and the documents that answer it."""

    text: str
    evidence: frozenset[str]
    answer: str | None
    id: str = ""


@dataclass(frozen=True)
class Revisit:
    """A question that comes after another one: the same in other words, or one that only looks alike."""

    of: str  # the id of the other one
    text: str
    answer: str | None
    same: bool


@dataclass(frozen=True)
class Person:
    """The documents of one user, and their questions in order."""

    name: str
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]
    revisits: tuple[Revisit, ...] = ()


@dataclass(frozen=True)
class PersonalSet:
    """All users of one folder."""

    name: str
    people: tuple[Person, ...]

    def first(self, documents: int) -> PersonalSet:
        """The first users that have `documents` documents together: at least one of them, and each one whole."""
        chosen: list[Person] = []
        for person in self.people:
            if chosen and sum(len(other.documents) for other in chosen) >= documents:
                break
            chosen.append(person)
        return PersonalSet(self.name, tuple(chosen))


def personal_sets(folder: Path | None) -> list[PersonalSet]:
    """The sets of a folder. Raises `InvalidSetting` if it has none."""
    if folder is None:
        with resources.as_file(resources.files("benchmarks").joinpath("sample_corpus")) as sample:
            return [_read(sample, "sample")]
    found = [folder] if (folder / "corpus.jsonl").is_file() else sorted(p.parent for p in folder.glob("*/corpus.jsonl"))
    if not found:
        raise InvalidSetting(f"--data {folder} has no corpus.jsonl and queries.jsonl.")
    return [_read(path, path.name) for path in found]


def _read(folder: Path, name: str) -> PersonalSet:
    documents: dict[str, list[Document]] = defaultdict(list)
    questions: dict[str, list[Question]] = defaultdict(list)
    for record in read_jsonl(folder / "corpus.jsonl"):
        text = Section(str(record["text"]))
        documents[record.get("user", "")].append(Document(str(record["doc_id"]), str(record.get("title", "")), (text,)))
    for record in read_jsonl(folder / "queries.jsonl"):
        evidence = frozenset(map(str, record.get("evidence_doc_ids") or ()))
        asked = Question(str(record["query"]), evidence, record.get("answer"), str(record.get("query_id", "")))
        questions[record.get("user", "")].append(asked)
    revisits: dict[str, list[Revisit]] = defaultdict(list)
    for record in read_jsonl(folder / "revisits.jsonl") if (folder / "revisits.jsonl").is_file() else ():
        same = record.get("kind") == "paraphrase"
        again = Revisit(str(record["of"]), str(record["query"]), record.get("answer"), same)
        revisits[record.get("user", "")].append(again)
    people = tuple(
        Person(user, tuple(found), tuple(questions[user]), tuple(revisits[user])) for user, found in documents.items()
    )
    if not people:
        raise InvalidSetting(f"{folder / 'corpus.jsonl'} has no documents.")
    return PersonalSet(name, people)
