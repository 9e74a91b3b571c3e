"""`python -m benchmarks knowledge`: how fast documents are ingested and found, and how often the right ones.

Each user of a set is a tenant with a library of their own, as in use. Libraries of 1,000 documents and of 100,000
passages are made of the passages of the data: new texts are mixed from two old ones, and their vectors are those of
the old ones moved a little, because embedding all of them would take an hour. Questions are the data's own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.base import Advance, BenchOptions, Report, TableRow, Timing, scratch, seconds_of
from benchmarks.personal import Person, PersonalSet, personal_sets
from rekindle.core.document import Document, Passage, Section
from rekindle.engine.embedding.embedder import Embedder
from rekindle.knowledge.ingest import Ingester, IngestResult
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import (
    STORED_DTYPE,
    Floats,
    Retrieval,
    Retriever,
    VectorIndex,
    VectorSnapshot,
    to_stored,
)
from rekindle.knowledge.rows import SplitDocument
from rekindle.knowledge.split import Splitting
from rekindle.models.pull import pull

FIRST = 5
DEPTH = 50  # passages among which the first five documents are found
QUICK_DOCUMENTS = 60
DOCUMENTS = 1000
PASSAGES = 100_000
QUESTIONS = 40  # that are timed
PUBLISHED_SECONDS = {"match": 1.61, "retrieve": 3.94}  # PerCache, table 1: a phone, with a larger embedder
BARS_MS = {"1k": 20.0, "100k": 50.0}
WAYS: tuple[Retrieval, ...] = get_args(Retrieval)


@dataclass(frozen=True)
class Stock:
    """Passages of the data with their vectors: what larger libraries are made of."""

    passages: Sequence[Passage]
    vectors: Floats  # [passages, dimensions]


def run(options: BenchOptions, advance: Advance) -> Report:
    """Measure everything; see `docs/concepts/knowledge.md` for what it means."""
    report = Report("knowledge")
    embedder = Embedder.load(pull("minilm").files)
    report.fields |= {"device": "cpu", "embedder": embedder.name, "data": [], "sets": {}}
    stock: list[tuple[Passage, Floats]] = []
    questions: list[str] = []
    with scratch() as folder:
        for number, one in enumerate(personal_sets(options.data)):
            chosen = one.first(QUICK_DOCUMENTS) if options.quick else one
            measure = _Set(Path(folder) / str(number), chosen, embedder, options)
            advance(f"ingest {one.name}")
            measure.ingest(report)
            advance(f"retrieve from {one.name}")
            measure.recall(report)
            stock += measure.stock()
            questions += [question.text for person in chosen.people for question in person.questions]
        _total(report)
        sample = np.random.default_rng(options.seed).permutation(len(questions))[
            : QUESTIONS if not options.quick else 15
        ]
        large = _Large(
            Path(folder),
            embedder,
            Stock([passage for passage, _ in stock], np.stack([vector for _, vector in stock])),
            [questions[at] for at in sample],
            options,
        )
        for part in (large.documents, large.match, large.passages):
            advance(part.__name__)
            part(report)
    return report


class _Set:
    """One set: a library for each user."""

    def __init__(self, folder: Path, data: PersonalSet, embedder: Embedder, options: BenchOptions) -> None:
        self._data = data
        self._embedder = embedder
        self._options = options
        self._libraries = {person.name: Library(folder, person.name) for person in data.people}

    def ingest(self, report: Report) -> None:
        """Ingest half, as if it was stopped there; then everything; then again what did not change."""
        documents = sum(len(person.documents) for person in self._data.people)
        started = time.perf_counter()
        half = [self._ingest(person, len(person.documents) // 2) for person in self._data.people]
        rest = [self._ingest(person, None) for person in self._data.people]
        seconds = time.perf_counter() - started
        started = time.perf_counter()
        again = [self._ingest(person, None) for person in self._data.people]
        again_seconds = time.perf_counter() - started
        passages = sum(library.counts()["chunks"] for library in self._libraries.values())
        report.fields["data"].append(self._data.name)
        report.fields["sets"][self._data.name] = {
            "users": len(self._data.people),
            "documents": documents,
            "passages": passages,
            "ingest_s": seconds,
            "ingest_docs_per_s": documents / seconds,
            "again_docs_per_s": documents / again_seconds,
            "resumed": sum(done.unchanged for done in rest) == sum(done.added for done in half),
            "embedded_twice": sum(done.embedded for done in again),
        }

    def _ingest(self, person: Person, max_count: int | None) -> IngestResult:
        ingester = Ingester(self._libraries[person.name], self._embedder, Splitting())
        return ingester.ingest_documents(person.documents[:max_count])

    def recall(self, report: Report) -> None:
        """The share of questions of which a document that answers them is among the first five, by each way.

        Documents come in the order of their best passages; and the same for the first five passages, of which several
        may be of one document.
        """
        hits: dict[str, list[bool]] = {way: [] for way in WAYS}
        quoted: dict[str, list[bool]] = {way: [] for way in WAYS}
        for person in self._data.people:
            retriever = Retriever(self._libraries[person.name], lambda: self._embedder)
            asked = [question for question in person.questions if question.evidence]
            for question in islice(asked, self._options.limit):
                for way in WAYS:
                    found = [hit.chunk.source for hit in retriever.retrieve(question.text, DEPTH, way).hits]
                    hits[way].append(bool(question.evidence & {*list(dict.fromkeys(found))[:FIRST]}))
                    quoted[way].append(bool(question.evidence & {*found[:FIRST]}))
        result = report.fields["sets"][self._data.name]
        result["questions"] = len(hits["fused"])
        result["recall5"] = {way: statistics.mean(found) if found else None for way, found in hits.items()}
        result["recall5_passages"] = {way: statistics.mean(found) if found else None for way, found in quoted.items()}
        if not hits["fused"]:
            result["recall5_reason"] = "no question names the documents that answer it"

    def stock(self) -> Iterator[tuple[Passage, Floats]]:
        """Its passages and their vectors."""
        for library in self._libraries.values():
            with library.reading() as connection:
                rows = connection.execute("SELECT heading, text, vector FROM chunks").fetchall()
            for heading, text, vector in rows:
                yield Passage(text, heading), np.frombuffer(vector, STORED_DTYPE).astype(np.float32)
            library.close()


class _Large:
    """Libraries larger than the data."""

    def __init__(
        self, folder: Path, embedder: Embedder, stock: Stock, questions: Sequence[str], options: BenchOptions
    ) -> None:
        self._folder = folder
        self._embedder = embedder
        self._stock = stock
        self._questions = questions
        self._random = np.random.default_rng(options.seed)
        self._quick = options.quick

    def documents(self, report: Report) -> None:
        """Retrieval among 1,000 documents."""
        library = self._library("1k", DOCUMENTS, passages_each=2)
        self._time(report, library, "1k")
        library.close()

    def match(self, report: Report) -> None:
        """A question against 1,000 earlier ones, by meaning: what finds a stored answer."""
        matrix = self._moved(np.arange(1000) % len(self._stock.vectors))
        earlier = VectorSnapshot(np.arange(1000, dtype=np.int64), matrix)

        def match(question: str) -> None:
            earlier.nearest(self._embedder.embed([question]).vectors[0], 1)

        timing = Timing(tuple(seconds_of(partial(match, question)) for question in self._questions))
        report.fields["match_ms_1k"] = timing.median * 1e3
        published = PUBLISHED_SECONDS["match"]
        ratio = f"{published / timing.median:,.0f}x"
        report.rows.append(
            TableRow("match a question with 1,000", str(timing), f"{published:.2f} s (published)", ratio)
        )

    def passages(self, report: Report) -> None:
        """Retrieval among 100,000 passages, and beside it an index of their vectors."""
        library = self._library("100k", PASSAGES // 10, passages_each=10)
        started = time.perf_counter()
        snapshot = VectorIndex(library, self._embedder.dimensions).snapshot(self._embedder.digest)
        report.fields["load_ms_100k"] = (time.perf_counter() - started) * 1e3
        self._time(report, library, "100k")
        library.close()
        self._index(report, snapshot)

    def _library(self, name: str, documents: int, passages_each: int) -> Library:
        library = Library(self._folder / name)
        for start in range(0, documents, 500):
            cuts = []
            for number in range(start, min(documents, start + 500)):
                chosen = self._random.integers(0, len(self._stock.passages), (2, passages_each))
                passages = [self._mixed(int(a), int(b)) for a, b in chosen.T]
                document = Document(f"made/{number}", f"Made of others, {number}", (Section(""),))
                cuts.append(SplitDocument(document, passages, to_stored(self._moved(chosen[0])), "made"))
            library.put(cuts, self._embedder.digest)
        return library

    def _mixed(self, first: int, second: int) -> Passage:
        """The first half of one passage and the second of another."""
        a, b = self._stock.passages[first].text.split(), self._stock.passages[second].text.split()
        return Passage(" ".join(a[: len(a) // 2] + b[len(b) // 2 :]))

    def _moved(self, chosen: Any) -> Floats:
        """Vectors near those of the stock: about as far from them as neighbours are from each other."""
        vectors = self._stock.vectors[chosen]
        moved = vectors + self._random.normal(0, 0.03, vectors.shape).astype(np.float32)
        return np.asarray(moved / np.linalg.norm(moved, axis=1, keepdims=True), np.float32)

    def _time(self, report: Report, library: Library, size: str) -> None:
        retriever = Retriever(library, lambda: self._embedder)
        retriever.retrieve(self._questions[0], FIRST)  # reads the vectors, once in the life of a process
        found = [retriever.retrieve(question, FIRST) for question in self._questions]
        words = [seconds_of(partial(retriever.search_bm25, question, 100)) for question in self._questions]
        timing = Timing(tuple(one.seconds for one in found))
        counts = library.counts()
        report.fields |= {
            f"retrieve_ms_{size}": timing.median * 1e3,
            f"retrieve_p95_ms_{size}": float(np.percentile(timing.seconds, 95)) * 1e3,
            f"embed_ms_{size}": statistics.median(one.embed_seconds for one in found) * 1e3,
            f"search_ms_{size}": statistics.median(one.search_seconds for one in found) * 1e3,
            f"words_ms_{size}": statistics.median(words) * 1e3,
            f"passages_{size}": counts["chunks"],
            f"library_bytes_{size}": counts["file_bytes"],
        }
        published = PUBLISHED_SECONDS["retrieve"]
        report.rows.append(
            TableRow(
                f"retrieve, {counts['documents']:,} documents, {counts['chunks']:,} passages",
                str(timing),
                f"{published:.2f} s (published)",
                f"{published / timing.median:,.0f}x",
                f"<= {BARS_MS[size]:g} ms",
            )
        )

    def _index(self, report: Report, snapshot: VectorSnapshot) -> None:
        """The nearest 100 by reading all vectors, and by a well-kept index (HNSW)."""
        queries = self._embedder.embed(self._questions).vectors
        exact = [snapshot.nearest(query, 100) for query in queries]
        brute = Timing(tuple(seconds_of(partial(snapshot.nearest, query, 100)) for query in queries))
        report.fields["nearest_ms_100k"] = brute.median * 1e3
        try:
            from usearch.index import Index
        except ImportError:
            report.fields |= {"index_ms_100k": None, "index_reason": "usearch is not installed (rekindle-llm[bench])"}
            return
        if self._quick:
            report.fields |= {"index_ms_100k": None, "index_reason": "building it takes too long for a quick run"}
            return
        index = Index(ndim=snapshot.matrix.shape[1], metric="ip", dtype="f32")
        built = seconds_of(lambda: index.add(snapshot.ids, snapshot.matrix))
        timing = Timing(tuple(seconds_of(partial(index.search, query, 100)) for query in queries))
        shared = [
            len({near.id for near in found} & set(map(int, index.search(query, 100).keys))) / len(found)
            for query, found in zip(queries, exact, strict=True)
        ]
        report.fields |= {
            "index_ms_100k": timing.median * 1e3,
            "index_build_s_100k": built,
            "index_recall_100k": statistics.mean(shared),
        }
        report.rows.append(
            TableRow(
                "nearest 100 of 100,000 vectors, all read / HNSW index",
                str(brute),
                f"{timing} (built in {built:.0f} s, finds {statistics.mean(shared):.0%})",
                f"{timing.median / brute.median:.2f}",
            )
        )


def _total(report: Report) -> None:
    """The sets together, and the rows of each."""
    sets = report.fields["sets"]
    seconds = sum(result["ingest_s"] for result in sets.values())
    report.fields["ingest_docs_per_s"] = sum(result["documents"] for result in sets.values()) / seconds
    asked = {name: result for name, result in sets.items() if result["questions"]}
    weights = [result["questions"] for result in asked.values()]
    for name in ("recall5", "recall5_passages"):
        report.fields[name] = {
            way: float(np.average([result[name][way] for result in asked.values()], weights=weights)) if asked else None
            for way in WAYS
        }
    for name, result in sets.items():
        speed = f"{result['ingest_docs_per_s']:.1f}/s"
        report.rows.append(
            TableRow(
                f"ingest {result['documents']:,} documents, {result['passages']:,} passages ({name})",
                speed,
                f"again: {result['again_docs_per_s']:,.0f}/s",
                f"{result['again_docs_per_s'] / result['ingest_docs_per_s']:,.0f}x",
            )
        )
    for name, result in asked.items():
        recall = result["recall5"]
        best = max(recall["bm25"], recall["embedding"])
        report.rows.append(
            TableRow(
                f"recall@5 of {result['questions']:,} questions ({name}), fused / words, meaning, weighted",
                f"{recall['fused']:.3f}",
                f"{recall['bm25']:.3f}, {recall['embedding']:.3f}, {recall['weighted']:.3f}",
                f"{recall['fused'] / best:.3f}" if best else "",
                ">= 1",
            )
        )
    result = [one["recall5"] for one in asked.values()]
    report.fields["fused_is_best"] = all(one["fused"] >= max(one["bm25"], one["embedding"]) for one in result)
