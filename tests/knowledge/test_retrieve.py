"""Passages are found by words and by meaning as plain reference implementations find them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from rekindle.core.document import Document, Section
from rekindle.engine.embedding.embedder import Embedder
from rekindle.errors import InvalidPrompt, InvalidSetting, NothingKnown
from rekindle.knowledge import retrieve as module
from rekindle.knowledge.ingest import Ingester
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import MAX_PASSAGES, Retrieval, Retriever
from tests.knowledge.conftest import Counting, cut, library

WORDS = ["amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "knoll", "ledge"]


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 12)).tolist()) for _ in range(count)]


def documents(some: list[str]) -> list[Document]:
    return [Document(f"s{number}", "t", (Section(text),)) for number, text in enumerate(some)]


def filled(folder: Path, embedder: Embedder) -> Library:
    made = library(folder)
    Ingester(made, embedder).ingest_documents(documents(list(dict.fromkeys(texts(40)))))
    return made


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory, embedder: Embedder) -> Library:
    """A library that is only read."""
    return filled(tmp_path_factory.mktemp("known"), embedder)


def passages(known: Library) -> dict[int, str]:
    return {chunk.id: chunk.passage.text for entry in known.entries() for chunk in known.chunks_of(entry.id)}


def bm25(question: str, bodies: dict[int, str], title_words: int) -> dict[int, float]:
    """As FTS5 defines it: k1 = 1.2, b = 0.75, lengths over all columns, rare words count more."""
    split = {id: re.findall(r"\w+", text) for id, text in bodies.items()}
    average = sum(len(words) + title_words for words in split.values()) / len(split)
    scores: dict[int, float] = {}
    for word in dict.fromkeys(question.split()):
        holding = [id for id, words in split.items() if word in words]
        idf = max(1e-6, math.log((len(split) - len(holding) + 0.5) / (len(holding) + 0.5)))
        for id in holding:
            count, length = split[id].count(word), len(split[id]) + title_words
            part = count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length / average))
            scores[id] = scores.get(id, 0.0) + idf * part
    return dict(sorted(scores.items(), key=lambda item: (-round(item[1], 9), item[0])))


def cosines(question: str, bodies: dict[int, str], embedder: Embedder) -> dict[int, float]:
    query = embedder.embed([question]).vectors[0]
    matrix = embedder.embed([f"t\n{text}" for text in bodies.values()]).vectors.astype(np.float16).astype(np.float32)
    scores = dict(zip(bodies, (matrix @ query).tolist(), strict=True))
    return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))


def reference(
    question: str, bodies: dict[int, str], embedder: Embedder, retrieval: Retrieval, count: int
) -> list[float]:
    """The scores of the first passages, the best first."""
    words, meanings = bm25(question, bodies, title_words=1), cosines(question, bodies, embedder)
    if retrieval in ("bm25", "embedding"):
        return list((words if retrieval == "bm25" else meanings).values())[:count]
    mixed: dict[int, float] = {}
    for part in (words, meanings):
        first = dict(list(part.items())[:50])
        low, high = min(first.values()), max(first.values())
        for id, score in first.items():
            mixed[id] = mixed.get(id, 0.0) + (score - low) / (high - low) / 2
    total = dict(mixed)
    if retrieval == "fused":
        in_order = sorted(mixed, key=lambda id: (-mixed[id], id))
        total = dict.fromkeys(bodies, 0.0)
        for weight, ids in ((1, list(words)[:100]), (1, list(meanings)[:100]), (2, in_order)):
            for rank, id in enumerate(ids, start=1):
                total[id] += weight / (5 + rank)
    return sorted(total.values(), reverse=True)[:count]


@pytest.mark.parametrize("retrieval", ["fused", "weighted", "bm25", "embedding"])
@pytest.mark.parametrize("question", ["amber", "fjord grove heath", "jetty inlet ledge knoll cedar"])
def test_orders_are_those_of_a_straightforward_implementation(
    known: Library, embedder: Embedder, retrieval: Retrieval, question: str
) -> None:
    bodies = passages(known)
    found = Retriever(known, lambda: embedder).retrieve(question, 10, retrieval)
    expected = reference(question, bodies, embedder, retrieval, 10)
    assert [hit.score for hit in found.hits] == pytest.approx(expected, abs=2e-5)
    assert found.retrieval == retrieval and len(found.hits) == len(expected)
    words = list(bm25(question, bodies, 1))
    if retrieval == "fused":  # what it says of its ranks is what it counted
        for hit in found.hits:
            parts = [1 / (5 + rank) for rank in (hit.bm25_rank, hit.embedding_rank) if rank is not None]
            assert sum(parts) < hit.score <= sum(parts) + 2 / 6
            assert (hit.bm25_rank is None) == (hit.chunk.id not in words)


def test_the_best_passages_are_those_with_the_best_scores(known: Library, embedder: Embedder) -> None:
    bodies = passages(known)
    for retrieval, scores in (
        ("bm25", bm25("amber delta", bodies, 1)),
        ("embedding", cosines("amber delta", bodies, embedder)),
    ):
        hits = Retriever(known, lambda: embedder).retrieve("amber delta", 10, retrieval).hits  # type: ignore[arg-type]
        assert [scores[hit.chunk.id] for hit in hits] == pytest.approx(list(scores.values())[: len(hits)], abs=1e-4)


def test_equal_passages_count_once_and_others_take_their_places(tmp_path: Path, embedder: Embedder) -> None:
    known = library(tmp_path)
    same = [f"copy{number}" for number in range(20)]
    known.put([cut(source, "amber birch", title="t", seed=1) for source in same] + [cut("own", "amber cedar")], "e")
    hits = Retriever(known, lambda: embedder).retrieve("amber birch", 5, "bm25").hits
    assert [hit.chunk.passage.text for hit in hits] == ["amber birch", "amber cedar"]


def test_top_k_bounds(known: Library, embedder: Embedder) -> None:
    retriever = Retriever(known, lambda: embedder)
    assert len(retriever.retrieve("amber", 1).hits) == 1
    assert len(retriever.retrieve("amber", MAX_PASSAGES).hits) == len(passages(known))
    for wrong in (0, -1, MAX_PASSAGES + 1, True, 2.5, "5"):
        with pytest.raises(InvalidSetting, match="top_k"):
            retriever.retrieve("amber", wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidSetting, match="fused"):
        retriever.retrieve("amber", 5, "fuse")  # type: ignore[arg-type]


def test_fewer_are_the_first_of_more(known: Library, embedder: Embedder) -> None:
    retriever = Retriever(known, lambda: embedder)
    for retrieval in ("fused", "weighted", "bm25", "embedding"):
        max_count = retriever.retrieve("amber fjord", 20, retrieval).hits  # type: ignore[arg-type]
        for few in (1, 3, 10):
            hits = retriever.retrieve("amber fjord", few, retrieval).hits  # type: ignore[arg-type]
            assert [hit.chunk.id for hit in hits] == [hit.chunk.id for hit in max_count][:few]


SYNTAX = [
    '" OR NEAR( * : ^', "amber'", '"amber', "amber AND", "NOT amber", "NEAR(amber birch, 2)", "body: amber", "^amber*",
    "{title body}: amber", "amber + birch", "-amber", "amber\0birch", "🐧 amber", "_ amber", "amber_birch amber",
    "¹²³ amber",
    "ﬁne amber", "İ amber", "amber; DROP TABLE words", "% amber ?1 $x :y @z",
]  # fmt: skip


@pytest.mark.parametrize("question", SYNTAX)
def test_no_question_is_syntax(known: Library, embedder: Embedder, question: str) -> None:
    hits = Retriever(known, lambda: embedder).retrieve(question, 40).hits
    search_bm25 = {hit.chunk.id for hit in hits if hit.bm25_rank}
    if "amber" in question:
        assert {id for id, text in passages(known).items() if "amber" in text} <= search_bm25
    else:
        assert not search_bm25


def test_a_question_of_100_kb_or_of_nothing_but_signs_is_answered(known: Library, embedder: Embedder) -> None:
    retriever = Retriever(known, lambda: embedder)
    long = "amber " + "unheard of things " * 6000
    assert all("amber" in hit.chunk.passage.text for hit in retriever.retrieve(long, 5, "bm25").hits)
    for odd in ("?!...", "🐧🐧", "_", "\0", "»«"):
        assert retriever.retrieve(odd, 5, "bm25").hits == () and len(retriever.retrieve(odd, 5).hits) == 5
    for empty in ("", " \n\t"):
        with pytest.raises(InvalidPrompt):
            retriever.retrieve(empty)
    with pytest.raises(InvalidPrompt):
        retriever.retrieve("\ud800")


def test_a_question_of_stop_words_alone_looks_for_them(tmp_path: Path, embedder: Embedder) -> None:
    known = library(tmp_path)
    known.put([cut("a", "to be or not to be"), cut("b", "amber")], "e")
    hits = Retriever(known, lambda: embedder).retrieve("to be?", 5, "bm25").hits
    assert [hit.chunk.source for hit in hits] == ["a"]


def test_stop_words_beside_others_do_not_count(tmp_path: Path, embedder: Embedder) -> None:
    known = library(tmp_path)
    known.put([cut("a", "the what is the of"), cut("b", "amber")], "e")
    hits = Retriever(known, lambda: embedder).retrieve("What is the amber?", 5, "bm25").hits
    assert [hit.chunk.source for hit in hits] == ["b"]


def test_common_words_are_left_out_where_they_cost_too_much_and_the_rare_one_is_found(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = library(tmp_path)
    known.put([cut("a", *(f"common number{n}" for n in range(50)), "common rare")], "e")
    retriever = Retriever(known, lambda: embedder)
    assert len(retriever.search_bm25("common rare", 100)) == 51
    monkeypatch.setattr(module, "_MAX_POSTINGS", 10)
    found = known.chunks(list(retriever.search_bm25("common rare", 100)))
    assert [chunk.passage.text for chunk in found.values()] == ["common rare"]
    assert len(retriever.search_bm25("common", 100)) == 51
    # A word that stands nowhere is no reason to leave out the only one that does.
    assert len(retriever.search_bm25("unheard common", 100)) == 51


@pytest.mark.parametrize("retrieval", ["fused", "weighted", "bm25", "embedding"])
def test_an_empty_library_says_so(tmp_path: Path, embedder: Embedder, retrieval: Retrieval) -> None:
    with pytest.raises(NothingKnown, match="rekindle ingest"):
        Retriever(library(tmp_path), lambda: embedder).retrieve("anything", 5, retrieval)


def test_what_changes_while_passages_are_looked_for_counts_from_the_next_question_on(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = filled(tmp_path, embedder)
    retriever = Retriever(known, lambda: embedder)
    before = [hit.chunk for hit in retriever.retrieve("amber fjord", 6).hits]
    chunks = known.chunks

    def late(ids: list[int]) -> object:
        known.remove([before[0].document])
        return chunks(ids)

    monkeypatch.setattr(known, "chunks", late)
    meanwhile = [hit.chunk.id for hit in retriever.retrieve("amber fjord", 5).hits]
    assert meanwhile == [chunk.id for chunk in before[:5]]  # all of it in one view
    monkeypatch.undo()
    after = [hit.chunk.id for hit in retriever.retrieve("amber fjord", 5).hits]
    assert after == [chunk.id for chunk in before[1:]]


def test_with_another_embedder_words_work_and_meaning_waits_for_the_next_ingest(
    tmp_path: Path, embedder: Embedder
) -> None:
    known = filled(tmp_path, embedder)
    other = Counting(embedder, digest="another")
    retriever = Retriever(known, lambda: other)
    assert retriever.retrieve("amber", 5, "embedding").hits == ()
    hits = retriever.retrieve("amber", 5).hits
    assert hits and all("amber" in hit.chunk.passage.text and hit.embedding_rank is None for hit in hits)
    Ingester(known, other).ingest_documents([])
    assert sorted(other.texts[2:]) == sorted(f"t\n{text}" for text in passages(known).values())
    assert len(retriever.retrieve("amber", 5, "embedding").hits) == 5
    assert Retriever(known, lambda: embedder).retrieve("amber", 5, "embedding").hits == ()


def test_words_are_found_in_titles_by_stem_and_without_accents(tmp_path: Path, embedder: Embedder) -> None:
    known = library(tmp_path)
    known.put([cut("a", "body", title="Café Zürich"), cut("b", "he was running late")], "e")
    for question, source in (("cafe", "a"), ("ZURICH", "a"), ("runs", "b")):
        hits = Retriever(known, lambda: embedder).retrieve(question, 5, "bm25").hits
        assert [hit.chunk.source for hit in hits] == [source]
