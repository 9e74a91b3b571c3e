"""A library keeps what was put, finds it, and forgets it to the last byte."""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rekindle.core.document import Document, Passage, Section
from rekindle.errors import DocumentNotFound, KnowledgeUnusable
from rekindle.knowledge.library import Library
from rekindle.knowledge.retrieve import Retriever, VectorIndex, to_stored
from rekindle.knowledge.rows import SplitDocument, passage_digest
from tests.knowledge.conftest import DIMENSIONS, cut, library, vector

ROOT = Path(__file__).parents[2]


def found(known: Library, words: str) -> set[str]:
    """The sources of the passages that have one of the words."""
    ids = Retriever(known, _no_embedder).search_bm25(words, 1000)
    return {chunk.source for chunk in known.chunks(list(ids)).values()}


def _no_embedder() -> object:  # type: ignore[misc]
    raise AssertionError("words need no embedder")


def id_of(known: Library, source: str) -> int:
    (entry,) = known.find(source)
    return entry.id


def check_words(known: Library) -> None:
    """The index of words says exactly what the passages say."""
    with known.writing() as connection:
        connection.execute("INSERT INTO words(words, rank) VALUES('integrity-check', 1)")


def bytes_in(folder: Path) -> bytes:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return b"\0\0".join(path.read_bytes() for path in files)


def made_up(rng: random.Random, letters: str = "bcdfghjklmnpqrtvwxz") -> str:
    """A word that no other text has, of whatever length."""
    return "".join(rng.choice(letters) for _ in range(rng.randrange(13, 20)))


# -- putting, replacing, removing


def test_what_was_put_is_found_by_id_name_source_words_and_meaning(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("a", "the quick fox", "jumps over", seed=1), cut("b", "a lazy dog", seed=5)], "e")
    (entry,) = known.find("a")
    assert (entry.source, entry.chunks, entry.characters) == ("a", 2, len("the quick fox" + "jumps over"))
    assert known.find(entry.name) == [entry] and [e.source for e in known.entries()] == ["b", "a"]
    assert [chunk.passage.text for chunk in known.chunks_of(entry.id)] == ["the quick fox", "jumps over"]
    assert found(known, "quick") == {"a"} and found(known, "dogs") == {"b"}
    near = VectorIndex(known, DIMENSIONS).snapshot("e").nearest(vector(2), 1)
    assert known.chunks([near[0].id])[near[0].id].passage.text == "jumps over"
    check_words(known)


def test_a_document_of_the_same_source_replaces_the_old_one_wholly(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("a", "walrus one", "walrus two", title="tusks")], "e")
    old = [chunk.id for chunk in known.chunks_of(id_of(known, "a"))]
    known.put([cut("a", "penguin", title="beaks")], "e")
    assert found(known, "walrus tusks") == set() and found(known, "penguin") == {"a"} == found(known, "beaks")
    assert known.counts()["documents"] == known.counts()["chunks"] == 1
    assert known.chunks(old) == {} and not known.has_passages(old)
    check_words(known)


def test_one_put_with_a_source_twice_keeps_the_last(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("a", "walrus"), cut("a", "penguin")], "e")
    assert found(known, "walrus") == set() and found(known, "penguin") == {"a"}
    check_words(known)


def test_after_remove_nothing_finds_it_and_its_texts_and_tokens_are_leaving(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put(
        [cut("gone", "walrus one", "walrus two", title="tusks", seed=1), cut("stays", "a walrus too", seed=9)], "e"
    )
    (entry,) = known.find("gone")
    first, second = (chunk.id for chunk in known.chunks_of(entry.id))
    assert known.note_tokens("t", {first: b"\1\0\2\0"}) and known.note_tokens("u", {first: b"\3\0"})
    assert known.remove([entry.id]) == 2
    for name in ("gone", entry.name):
        with pytest.raises(DocumentNotFound):
            known.find(name)
    assert found(known, "walrus tusks one two") == {"stays"}
    assert known.chunks([first, second]) == {} and known.chunks_of(entry.id) == []
    assert not {first, second} & set(VectorIndex(known, DIMENSIONS).snapshot("e").ids.tolist())
    leaving = {(row.text, row.tokenizer, row.tokens) for row in known.removed_passages()}
    assert leaving == {("walrus one", "t", b"\1\0\2\0"), ("walrus one", "u", b"\3\0"), ("walrus two", None, None)}
    check_words(known)


def test_what_leaves_after_the_list_was_read_stays_on_it(tmp_path: Path) -> None:
    """Somebody else removes a document while KV of the first is being removed: its own was not yet."""
    known = library(tmp_path)
    known.put([cut("a", "first to go"), cut("b", "second to go")], "e")
    known.remove([id_of(known, "a")])
    leaving = known.removed_passages()
    known.remove([id_of(known, "b")])
    known.purge_removed(leaving)
    assert [row.text for row in known.removed_passages()] == ["second to go"]


def test_a_removed_file_is_read_again_when_it_is_ingested_again(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("/f#1", "one", file="/f"), cut("/f#2", "two", file="/f")], "e")
    known.finish_file("/f", "digest", "how", ["/f#1", "/f#2"])
    assert known.files() == {"/f": ("digest", "how")}
    known.remove([id_of(known, "/f#1")])
    assert known.files() == {}


def test_generation_grows_with_each_change_and_only_then(tmp_path: Path) -> None:
    known = library(tmp_path)
    seen = [known.generation]

    def grew() -> bool:
        seen.append(known.generation)
        return seen[-1] > seen[-2]

    known.put([cut("a", "one", file="/f"), cut("b", "two")], "e")
    assert grew()
    known.chunks([1]), known.entries(), known.counts(), known.note_retrieved([1]), known.note_tokens("t", {1: b"\1"})
    assert not grew()
    known.finish_file("/f", "d", "s", ["a"])
    assert not grew()
    known.finish_file("/f", "d", "s", [])
    assert grew()
    known.remove([id_of(known, "b")])
    assert grew()


def test_tokens_of_passages_that_are_gone_are_refused(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("a", "one", "two")], "e")
    ids = [chunk.id for chunk in known.chunks_of(id_of(known, "a"))]
    assert known.note_tokens("t", {ids[0]: b"\1"})
    known.remove([id_of(known, "a")])
    assert not known.note_tokens("t", {ids[0]: b"\1"}) and not known.note_tokens("t", {ids[1]: b"\2"})
    assert len(known.removed_passages()) == 2


def test_tokens_of_a_passage_that_goes_in_this_very_moment_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, other = library(tmp_path), library(tmp_path)
    known.put([cut("a", "one")], "e")
    (chunk,) = known.chunks_of(id_of(known, "a"))
    writing = known.writing

    def late() -> object:
        other.remove([chunk.document])
        return writing()

    monkeypatch.setattr(known, "writing", late)
    assert not known.note_tokens("t", {chunk.id: b"\1"})


def test_counting_no_passages_is_no_error(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.note_retrieved([])
    assert known.top_retrieved(5) == []


def test_most_retrieved_are_those_that_came_first(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("a", "one", "two", "three")], "e")
    one, two, three = (chunk.id for chunk in known.chunks_of(id_of(known, "a")))
    for ids in ([three, one], [three, one], [two, one]):
        known.note_retrieved(ids)
    assert [chunk.id for chunk in known.top_retrieved(9)] == [three, two, one]
    assert [chunk.id for chunk in known.top_retrieved(1)] == [three]


# -- forgetting


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [0, 3])  # 3: a page keeps a copy of a row that moved
def test_after_cleared_no_byte_of_it_is_in_any_file_and_the_rest_is_whole(tmp_path: Path, seed: int) -> None:
    """Rows of many sizes, put and removed in turns: pages are split, merged and moved. Some go through `replace`."""
    rng = random.Random(seed)
    known = library(tmp_path)
    texts: dict[str, list[str]] = {}
    dead: list[bytes] = []

    def doom(source: str) -> None:
        for text in texts.pop(source):
            dead.extend(word[4:].encode() for word in text.split())  # the index keeps beginnings apart

    tokens: dict[int, bytes] = {}
    for turn in range(8):
        cuts = []
        for number in range(rng.randrange(1, 9)):
            source = f"s{turn}-{number}"
            texts[source] = [" ".join(made_up(rng) for _ in range(rng.randrange(1, 70))) for _ in range(2)]
            cuts.append(cut(source, *texts[source], title="same", seed=rng.randrange(1 << 30)))
        known.put(cuts, "e")
        ids = [chunk.id for made in cuts for chunk in known.chunks_of(id_of(known, made.document.source))]
        noted = {id: rng.randbytes(rng.randrange(16, 600)) for id in ids}
        tokens |= noted
        assert known.note_tokens("t", noted)
        for source in rng.sample(sorted(texts), len(texts) // 3):
            (entry,) = known.find(source)
            gone = known.chunks_of(entry.id)
            with known.reading() as connection:
                rows = connection.execute("SELECT vector FROM chunks WHERE document=?", (entry.id,)).fetchall()
            dead += [row[0] for row in rows] + [tokens[chunk.id] for chunk in gone if chunk.id in tokens]
            doom(source)
            if rng.random() < 0.3:  # replaced
                texts[source] = [made_up(rng)]
                known.put([cut(source, *texts[source], title="same", seed=rng.randrange(1 << 30))], "e")
            else:
                known.remove([entry.id])
    alive = b" ".join(text.encode() for some in texts.values() for text in some)
    known.purge_removed(known.removed_passages())
    everything = bytes_in(tmp_path)
    traces = [trace for trace in dead if trace in everything and trace not in alive]
    assert len(dead) > 300 and traces == []
    known.close()
    assert [trace for trace in dead if trace in bytes_in(tmp_path) and trace not in alive] == []
    check_words(known)
    for source, some in texts.items():
        assert all(found(known, word) == {source} for word in some[0].split()[:5])
        assert [chunk.passage.text for chunk in known.chunks_of(id_of(known, source))] == some


@pytest.mark.parametrize("staying", [0, 1])
def test_words_that_came_and_went_in_one_transaction_leave_no_stem(tmp_path: Path, staying: int) -> None:
    known = library(tmp_path)
    known.put([cut(f"s{number}", "others") for number in range(staying)], "e")
    known.purge_removed([])
    known.put([cut("a", "zanzibarish"), cut("a", "plain")], "e")
    known.purge_removed(known.removed_passages())
    assert b"zanzibar" not in bytes_in(tmp_path) and found(known, "plain") == {"a"}


def test_forgetting_everything_leaves_an_empty_library_that_works(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("a", "walrus")], "e")
    known.remove([entry.id for entry in known.entries()])
    known.purge_removed(known.removed_passages())
    assert b"walrus" not in bytes_in(tmp_path)
    assert known.counts()["documents"] == 0 and found(known, "walrus") == set()
    known.put([cut("a", "penguin")], "e")
    assert found(known, "penguin") == {"a"}


# -- tenants


@pytest.mark.parametrize(("tenant", "salt"), [("other", ""), ("local", "salted"), ("localsalted", "")])
def test_two_tenants_and_two_salts_see_nothing_of_each_other(tmp_path: Path, tenant: str, salt: str) -> None:
    one, two = library(tmp_path), library(tmp_path, tenant, salt)
    one.put([cut("a", "walrus tusk", "walrus"), cut("b", "something else")], "e")
    before = Retriever(one, _no_embedder).search_bm25("walrus tusk", 10)
    two.put([cut("c", *(["walrus walrus"] * 50), seed=50), cut("d", "penguin")], "e")
    assert Retriever(one, _no_embedder).search_bm25("walrus tusk", 10) == before
    assert found(one, "penguin walrus") == {"a"} and found(two, "tusk") == set()
    with pytest.raises(DocumentNotFound):
        one.find("d")
    assert one.counts()["chunks"] == 3 == len(VectorIndex(one, DIMENSIONS).snapshot("e").ids)
    two.remove([entry.id for entry in two.entries()])
    assert one.counts()["chunks"] == 3 and one.removed_passages() == []


# -- embedders


def test_vectors_of_another_embedder_are_never_compared(tmp_path: Path) -> None:
    known = library(tmp_path)
    vectors = VectorIndex(known, DIMENSIONS)
    known.put([cut("a", "walrus", seed=1)], "one")
    assert len(vectors.snapshot("one").ids) == 1 and len(vectors.snapshot("two").ids) == 0
    known.put([cut("b", "penguin", seed=2)], "two")
    (chunk,) = known.chunks_of(id_of(known, "b"))
    assert vectors.snapshot("two").ids.tolist() == [chunk.id] and len(vectors.snapshot("one").ids) == 0
    assert found(known, "walrus") == {"a"}
    (missing,) = known.without_vector("two", 9)
    assert missing.source == "a"
    known.set_vectors({missing.id: to_stored(vector(7)[None])[0]}, "two")
    assert len(vectors.snapshot("two").ids) == 2 and known.without_vector("two", 9) == []


def test_vectors_that_come_after_another_embedder_took_over_are_not_taken(tmp_path: Path) -> None:
    """Two processes with two embedders: neither gets vectors of the other one's."""
    known = library(tmp_path)
    known.put([cut("a", "walrus", seed=1)], "one")
    (late,) = known.without_vector("two", 9)  # they are the second one's now
    digest = passage_digest("a", Passage("walrus"))
    known.set_vectors({late.id: to_stored(vector(1)[None])[0]}, "one")
    assert len(VectorIndex(known, DIMENSIONS).snapshot("two").ids) == 0
    known.set_vectors({late.id: to_stored(vector(2)[None])[0]}, "two")
    assert known.vectors_of([digest], "one") == {}
    assert known.vectors_of([digest], "two") == {digest: to_stored(vector(2)[None])[0]}


# -- bad moments


def test_a_library_whose_folder_is_deleted_begins_anew_and_its_vectors_with_it(tmp_path: Path) -> None:
    known = library(tmp_path)
    vectors = VectorIndex(known, DIMENSIONS)
    known.put([cut("a", "walrus", seed=1)], "e")
    assert vectors.snapshot("e").nearest(vector(1), 1)[0].score > 0.99
    shutil.rmtree(tmp_path / "library")
    assert known.counts()["chunks"] == 0
    known.put([cut("b", "penguin", seed=2)], "e")
    assert vectors.snapshot("e").nearest(vector(2), 1)[0].score > 0.99
    known.put([cut("c", "puffin", seed=3)], "e")
    assert len(vectors.snapshot("e").ids) == 2 and known.about("tenant") == "local"


def test_text_with_nuls_and_any_characters_comes_back_and_goes_without_a_trace(tmp_path: Path) -> None:
    known = library(tmp_path)
    odd = "nul\0inside \u202e\x1b[31m 日本 🐧 'quote\" ;--"
    known.put([cut("a", odd, title="ti\0tle")], "e")
    (chunk,) = known.chunks_of(id_of(known, "a"))
    assert chunk.passage.text == odd and chunk.title == "ti\0tle" and found(known, "日本") == {"a"}
    known.remove([chunk.document])
    check_words(known)


def test_a_file_that_is_no_library_is_refused_with_a_reason(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.close()
    known.path.unlink()
    with sqlite3.connect(known.path) as connection:
        connection.execute("CREATE TABLE mine (x)")
    with pytest.raises(KnowledgeUnusable, match=r"cannot be used"):
        library(tmp_path)


def put_and_read(known: Library, name: str, turns: int, wrong: list[str]) -> None:
    """Put, replace and remove documents; whatever is read in between must be whole."""
    vectors = VectorIndex(known, DIMENSIONS)
    for turn in range(turns):
        source = f"{name}-{turn % 3}"
        words = [f"{name}word{turn}{part}" for part in "abc"]
        known.put([cut(source, *words, seed=turn)], "e")
        if found(known, words[1]) != {source}:
            wrong.append(f"{words[1]} is not found")
        chunks = known.chunks_of(id_of(known, source))
        if [chunk.passage.text for chunk in chunks] != words:
            wrong.append(f"{source} is not whole: {chunks}")
        known.note_tokens("t", {chunk.id: b"\1\2" for chunk in chunks})
        if len({chunk.id for chunk in chunks} & set(vectors.snapshot("e").ids.tolist())) != 3:
            wrong.append(f"{source} has no vectors")
        if turn % 5 == 4:
            known.remove([id_of(known, source)])
            known.purge_removed(known.removed_passages())
    known.close()


STORM = """
import sys
from pathlib import Path
from tests.knowledge.test_library import library, put_and_read
wrong = []
put_and_read(library(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), wrong)
sys.exit("\\n".join(wrong) or 0)
"""


@pytest.mark.thorough
def test_threads_and_processes_write_and_read_at_the_same_time(tmp_path: Path) -> None:
    """Two of the threads share a library; one that is done closes it under the other's hands."""
    wrong: list[str] = []
    shared = library(tmp_path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", STORM, str(tmp_path), name, "20"], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for name in ("p", "q")
    ]
    threads = [
        threading.Thread(target=put_and_read, args=(known, name, 20, wrong))
        for name, known in (("x", shared), ("y", shared), ("z", library(tmp_path)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    known = library(tmp_path)
    assert wrong == [] and known.counts()["documents"] == 5 * 2
    assert known.generation == 5 * (20 + 4)
    check_words(known)


KILLED = """
import os, sys
from pathlib import Path
from rekindle.knowledge import library as module
from tests.knowledge.conftest import cut, library
known = library(Path(sys.argv[1]))
known.put([cut("stays", "walrus"), cut("old", "penguin one", "penguin two")], "e")
added = module.put_document
def dies(connection, one):
    added(connection, one)
    if one.document.source == "last":
        connection.execute("PRAGMA cache_spill=ON")
        os.kill(os.getpid(), 9)
module.put_document = dies
known.put([cut("old", "puffin"), cut("new", *["puffin " * 500] * 200), cut("last", "gull")], "e")
"""


@pytest.mark.thorough
def test_killed_amid_a_put_leaves_nothing_of_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    known = library(tmp_path)
    assert {entry.source for entry in known.entries()} == {"stays", "old"} and known.removed_passages() == []
    assert found(known, "puffin gull") == set() and found(known, "penguin") == {"old"}
    check_words(known)
    known.put([cut("old", "puffin"), cut("last", "gull")], "e")
    assert found(known, "puffin") == {"old"} and found(known, "gull") == {"last"}


def test_what_fails_amid_a_put_leaves_nothing_of_it(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("old", "penguin")], "e")
    bad = SplitDocument(Document("bad", "bad", (Section("x"),)), [Passage("x")], [], "as given")
    with pytest.raises(ValueError, match="zip"):
        known.put([cut("old", "puffin"), bad], "e")
    assert found(known, "penguin") == {"old"} and found(known, "puffin") == set() and known.removed_passages() == []


# -- vectors in memory


def brute_force(known: Library, query: np.ndarray, max_count: int) -> list[int]:  # type: ignore[type-arg]
    with known.reading() as connection:
        rows = connection.execute("SELECT id, vector FROM chunks WHERE vector IS NOT NULL").fetchall()
    scores = {id: float(np.frombuffer(data, "<f2").astype(np.float32) @ query) for id, data in rows}
    return sorted(scores, key=lambda id: (-round(scores[id], 6), id))[:max_count]


@pytest.mark.parametrize("seed", range(4))
def test_a_snapshot_follows_adds_and_removals_exactly(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    known = library(tmp_path)
    vectors = VectorIndex(known, DIMENSIONS)
    acts: list[Callable[[], object]] = [
        lambda: known.put([cut(f"s{rng.randrange(30)}", *"xyz"[: rng.randrange(1, 4)], seed=rng.randrange(999))], "e"),
        lambda: known.remove([entry.id for entry in rng.sample(known.entries(), len(known.entries()) // 3)]),
        lambda: known.set_vectors(
            {
                chunk.id: to_stored(vector(chunk.id)[None])[0]
                for chunk in known.without_vector("e", rng.randrange(1, 9))
            },
            "e",
        ),
        lambda: known.put([late], "e"),
    ]
    late = SplitDocument(
        Document("late", "late", (Section("x"),)), [Passage("x"), Passage("y")], [None, None], "as given"
    )
    for _ in range(40):
        rng.choice(acts)()
        snapshot = vectors.snapshot("e")
        query = vector(rng.randrange(999))
        assert [near.id for near in snapshot.nearest(query, 7)] == brute_force(known, query, 7)
        assert len(snapshot.ids) == known.counts()["embedded"] == len(snapshot.matrix)


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
def test_equal_scores_keep_the_order_they_came_in_wherever_it_is_cut(tmp_path: Path, count: int) -> None:
    known = library(tmp_path)
    same = to_stored(np.repeat(np.eye(DIMENSIONS, dtype=np.float32)[:1], count, axis=0))
    known.put([SplitDocument(Document("a", "a", (Section("x"),)), [Passage("x")] * count, same, "as given")], "e")
    snapshot = VectorIndex(known, DIMENSIONS).snapshot("e")
    everything = [near.id for near in snapshot.nearest(np.eye(DIMENSIONS, dtype=np.float32)[0], count)]
    assert everything == sorted(everything) and len(everything) == count
    for max_count in {1, 2, 5, count // 2, count - 1, count + 1} - {0}:
        cut_short = [near.id for near in snapshot.nearest(np.eye(DIMENSIONS, dtype=np.float32)[0], max_count)]
        assert cut_short == everything[:max_count]


def test_an_empty_library_has_no_vectors(tmp_path: Path) -> None:
    snapshot = VectorIndex(library(tmp_path), DIMENSIONS).snapshot("e")
    assert snapshot.nearest(vector(1), 5) == [] and snapshot.matrix.shape == (0, DIMENSIONS)


def test_a_view_within_a_view_is_the_same_one(tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("a", "walrus")], "e")
    with known.reading() as outer:
        outer.execute("SELECT count(*) FROM documents").fetchone()  # it begins with the first look
        known.put([cut("b", "puffin")], "e")
        assert known.counts()["documents"] == 1  # looks within
        with known.reading() as inner:
            assert inner is outer
    assert known.counts()["documents"] == 2
