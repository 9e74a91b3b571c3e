"""Relevance means the same for every embedder and for words: only passages that are much less relevant are left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rekindle.core.document import Document, Passage, Section
from rekindle.engine.embedding.embedder import Embedder
from rekindle.knowledge.ingest import Ingester
from rekindle.knowledge.library import Chunk, Library
from rekindle.knowledge.relevance import CERTAIN, Scale, embedding_scale, pairs, word_scale
from rekindle.knowledge.retrieve import Hit, RetrievalResult, Retriever
from rekindle.knowledge.word_index import word_shares
from rekindle.models.files import ModelFiles
from rekindle.models.pull import pull
from tests.knowledge.conftest import Counting, library

NOTES = {
    "harbour": "The harbour master of Quillhaven is called Edda Brandvold, and her office is above the chandlery.",
    "honey": "The honey of the lower hives was sold for nine crowns a jar at the autumn market.",
    "organ": "The organ in the chapel was last tuned by Teun de Groot, who found two dead mice in the bellows.",
    "parcel": "The parcel with the telescope waits at the counter of the post office until Friday noon.",
    "violin": "Grandfather's violin was built in Mittenwald, and its case is lined with green felt.",
}


def scores(unrelated: float, answering: float, spread: float, seed: int = 0) -> np.ndarray:
    """Scores of twenty questions and passages; those on the diagonal belong together."""
    rng = np.random.default_rng(seed)
    made = rng.normal(unrelated, spread, (20, 20))
    np.fill_diagonal(made, rng.normal(answering, spread, 20))
    return made


def test_an_embedder_whose_cosines_are_all_high_judges_as_one_whose_cosines_are_low() -> None:
    low = scores(0.07, 0.57, 0.09)
    high = 0.75 + 0.2 * low  # as e5 has them
    one, other = Scale.of(low), Scale.of(high)
    assert one is not None and other is not None
    for score in (0.0, 0.2, 0.4, 0.6):
        assert one.relevance(score) == pytest.approx(other.relevance(0.75 + 0.2 * score))
    assert one.relevance(0.07) == pytest.approx(0.0, abs=0.05) and one.relevance(0.57) == pytest.approx(1.0, abs=0.05)


def test_an_embedder_that_does_not_tell_questions_apart_has_no_scale(embedder: Embedder) -> None:
    assert Scale.of(scores(0.5, 0.52, 0.2)) is None
    assert embedding_scale(embedder) is None  # random weights


def test_the_scale_of_an_embedder_is_measured_once(embedder: Embedder) -> None:
    first, again = Counting(embedder, digest="measured once"), Counting(embedder, digest="measured once")
    assert embedding_scale(first) == embedding_scale(again)
    assert len(first.texts) == 2 * len(pairs()) and not again.texts


def test_by_words_alone_answering_passages_are_relevant_and_others_are_not(tmp_path: Path, embedder: Embedder) -> None:
    known, retriever = _filled(tmp_path, embedder)
    for question, source in (
        ("Who is the harbour master of Quillhaven?", "harbour"),
        ("Who tuned the organ in the chapel?", "organ"),
        ("Where was grandfather's violin built?", "violin"),
    ):
        found = retriever.retrieve(question, 5, "bm25")
        assert not found.uncertain
        assert [hit.chunk.source for hit in found.relevant().hits] == [source]
    # No note is about that, though one has a word of it.
    asked = "What does a ticket to the Vienna opera cost at the weekend in August, with a glass of honey wine?"
    nothing = retriever.retrieve(asked, 5, "bm25")
    assert nothing.uncertain and len(nothing.relevant().hits) == 1 and nothing.relevant().uncertain
    assert known.counts()["documents"] == len(NOTES)


def test_a_share_of_words_counts_words_that_are_nowhere_and_rare_ones_more(tmp_path: Path, embedder: Embedder) -> None:
    known, _ = _filled(tmp_path, embedder)
    ids = {entry.source: known.chunks_of(entry.id)[0].id for entry in known.entries()}
    with known.reading() as connection:
        whole = word_shares(connection, "telescope parcel", list(ids.values()))
        half = word_shares(connection, "telescope zeppelin", list(ids.values()))
        assert word_shares(connection, "telescope", []) == {}
    assert whole[ids["parcel"]] == 1.0 and whole[ids["honey"]] == 0.0
    assert 0.0 < half[ids["parcel"]] < 0.5
    assert word_scale().relevance(0.0) < CERTAIN < word_scale().relevance(0.5)


def test_pairs_of_letters_are_the_words_where_no_spaces_are(tmp_path: Path, embedder: Embedder) -> None:
    known = library(tmp_path)
    texts = ("図書館は月曜日に閉まっています。", "蜂蜜は一瓶九百円で売られました。")
    Ingester(known, embedder).ingest_documents([Document(text[:2], text[:2], (Section(text),)) for text in texts])
    found = Retriever(known, lambda: embedder).retrieve("図書館はいつ閉まっていますか", 5, "bm25")
    assert not found.uncertain and [hit.chunk.passage.text for hit in found.relevant().hits] == [texts[0]]


@pytest.mark.parametrize(
    ("relevances", "kept", "uncertain"),
    [
        ([1.0, 0.6, 0.4, 0.1], [0, 1], False),
        ([0.3, 1.0, 0.6, 0.2], [1, 2], False),  # the order is the retrieval's, whatever is left out
        ([0.9, 0.8, 0.7, 0.6], [0, 1, 2, 3], False),  # of several hops
        ([0.1, 0.15, 0.0, -0.2], [0], True),
        ([None, None, None, None], [0, 1, 2, 3], False),
    ],
)
def test_what_is_much_less_relevant_than_the_best_passage_is_left_out(
    relevances: list[float | None], kept: list[int], uncertain: bool
) -> None:
    hits = tuple(
        Hit(Chunk(number, number, 0, "n", "s", "t", Passage(str(number))), 1.0 / (1 + number), relevance=relevance)
        for number, relevance in enumerate(relevances)
    )
    found = RetrievalResult(hits, "fused", 0.0, 0.0)
    assert [hit.chunk.id for hit in found.relevant().hits] == kept
    assert found.uncertain is found.relevant().uncertain is uncertain


def test_prefixes_of_an_embedder_stand_before_questions_and_passages(embedder_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e5"
    folder.mkdir()
    for file in embedder_folder.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "query: ", "document": "text: "}}')
    plain, own = (Embedder.load(ModelFiles("tiny", place)) for place in (embedder_folder, folder))
    assert own.digest != plain.digest  # vectors of the two do not compare
    for made, text in (
        (own.embed_questions(["amber"]), "query: amber"),
        (own.embed_passages(["amber"]), "text: amber"),
    ):
        assert np.array_equal(made.vectors, plain.embed([text]).vectors)
    assert np.array_equal(own.embed(["amber"]).vectors, plain.embed(["amber"]).vectors)


@pytest.mark.real
def test_the_default_embedder_tells_answering_passages_from_others(tmp_path: Path) -> None:
    minilm = Embedder.load(pull("minilm").files)
    scale = embedding_scale(minilm)
    assert scale is not None and 0.0 < scale.unrelated < 0.2 and 0.4 < scale.answering < 0.8
    _, retriever = _filled(tmp_path, minilm)
    for question, source in (
        ("What is the name of the man who tuned the organ?", "organ"),
        ("What did people pay for the honey?", "honey"),
        ("Until when can the telescope be picked up?", "parcel"),
    ):
        found = retriever.retrieve(question)
        assert not found.uncertain and [hit.chunk.source for hit in found.relevant().hits] == [source]
    assert retriever.retrieve("Which team won the cricket world cup in 2019?").uncertain


def _filled(folder: Path, embedder: Embedder) -> tuple[Library, Retriever]:
    known = library(folder)
    notes = [Document(source, source, (Section(text),)) for source, text in NOTES.items()]
    Ingester(known, embedder).ingest_documents(notes)
    return known, Retriever(known, lambda: embedder)
