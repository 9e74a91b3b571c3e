"""The corpus that is shipped: what it says of itself is so."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from rekindle.core.document import Document, Section
from rekindle.knowledge.split import Splitting, split


def rows(name: str) -> list[dict[str, Any]]:
    text = files("benchmarks").joinpath("sample_corpus", name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_every_question_is_answered_by_documents_of_its_own_user() -> None:
    owner = {row["doc_id"]: row["user"] for row in rows("corpus.jsonl")}
    queries = rows("queries.jsonl")
    assert len(owner) == len(rows("corpus.jsonl"))
    assert len({query["query_id"] for query in queries}) == len(queries)
    for query in queries:
        assert [owner[name] for name in query["evidence_doc_ids"]] == [query["user"]] * len(query["evidence_doc_ids"])
        assert len(set(query["evidence_doc_ids"])) == (2 if query["category"] == "two documents" else 1)


def test_every_document_is_asked_about() -> None:
    asked = {name for query in rows("queries.jsonl") for name in query["evidence_doc_ids"]}
    assert asked == {row["doc_id"] for row in rows("corpus.jsonl")}


def test_numbers_in_an_answer_about_one_document_are_in_it() -> None:
    texts = {row["doc_id"]: row["text"] for row in rows("corpus.jsonl")}
    checked = 0
    for query in rows("queries.jsonl"):
        if query["category"] == "same words":
            (name,) = query["evidence_doc_ids"]
            numbers = [word.strip(",.") for word in query["answer"].split() if word[0].isdigit()]
            assert all(number in texts[name] for number in numbers), query["query_id"]
            checked += len(numbers)
    assert checked > 10


def test_its_documents_are_split_into_whole_sentences_and_lines() -> None:
    for row in rows("corpus.jsonl"):
        passages = split(Document(row["doc_id"], row["title"], (Section(row["text"]),)), Splitting())
        assert 1 < len(passages) <= 4, row["doc_id"]
        ends = [passage.text.rpartition("\n")[2] for passage in passages]
        lines = row["text"].splitlines()
        assert all(end[-1] in ".?!" or any(line.endswith(end) for line in lines) for end in ends), row["doc_id"]
