"""Ingesting costs what changed, removes what is gone, and no file stops another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from rekindle.core.document import Document, Section
from rekindle.engine.embedder import Embedder
from rekindle.errors import ExtraMissing, InvalidPrompt, UnreadableDocument
from rekindle.knowledge import ingest as module
from rekindle.knowledge.ingest import Ingested, Ingester, Step, parse_documents
from rekindle.knowledge.library import Library
from rekindle.knowledge.split import Splitting
from tests.knowledge.conftest import Counting, library

ROOT = Path(__file__).parents[2]


class Shelf:
    """A folder of files, and the library they go into."""

    def __init__(self, folder: Path, embedder: Embedder) -> None:
        self.folder = folder / "files"
        self.folder.mkdir()
        self.known: Library = library(folder)
        self._inner = embedder
        self.texts: list[str] = []  # embedded by the last ingestion

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def records(self, name: str, texts: dict[str, str]) -> Path:
        lines = [json.dumps({"id": id, "title": "t", "text": text}) for id, text in texts.items()]
        return self.write(name, "\n".join(lines))

    def ingest(self, *paths: str | Path, app: str | None = None, breaks_after: int | None = None) -> Ingested:
        counting = Counting(self._inner, breaks_after=breaks_after)
        self.texts = counting.texts
        return Ingester(self.known, counting, app=app).ingest(list(paths) or [self.folder])

    @property
    def names(self) -> list[str]:
        """What is in the library, by the ends of their sources."""
        start = len(str(self.folder)) + 1
        return sorted(entry.source[start:] for entry in self.known.entries())

    def said(self, name: str) -> str:
        (entry,) = self.known.find(str(self.folder / name))
        return " ".join(chunk.passage.text for chunk in self.known.chunks_of(entry.id))


@pytest.fixture
def shelf(tmp_path: Path, embedder: Embedder) -> Shelf:
    return Shelf(tmp_path, embedder)


def counts(done: Ingested) -> tuple[int, int, int, int]:
    return done.added, done.changed, done.removed, done.unchanged


# -- what changed


def test_a_file_that_was_only_touched_is_not_read_again(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shelf.write("a.txt", "walrus")
    shelf.write("b.txt", "penguin")
    assert counts(shelf.ingest()) == (2, 0, 0, 0) and len(shelf.texts) == 2
    generation = shelf.known.generation
    os.utime(path, (1, 1))

    def never(path: Path) -> object:
        raise AssertionError(path)

    monkeypatch.setattr(module, "read_file", never)
    assert counts(shelf.ingest()) == (0, 0, 0, 2)
    assert shelf.texts == [] and shelf.known.generation == generation


def test_a_changed_file_embeds_only_its_changed_passages(shelf: Shelf) -> None:
    paragraphs = [" ".join(f"word{number}x{n}" for n in range(80)) + "." for number in range(6)]
    shelf.write("a.md", "# T\n\n" + "\n\n".join(paragraphs))
    first = shelf.ingest()
    assert first.embedded == len(shelf.texts) >= 5
    paragraphs[2] = "something else " * 40 + "."
    shelf.write("a.md", "# T\n\n" + "\n\n".join(paragraphs))
    assert counts(shelf.ingest()) == (0, 1, 0, 0)
    assert len(shelf.texts) == 1 and "something else" in shelf.texts[0]
    assert "something else" in shelf.said("a.md") and "word2x" not in shelf.said("a.md")


def test_another_splitting_cuts_everything_again(shelf: Shelf, embedder: Embedder) -> None:
    shelf.write("a.txt", " ".join(f"This is sentence {number}." for number in range(40)))
    shelf.ingest()
    before = shelf.known.counts()["chunks"]
    done = Ingester(shelf.known, embedder, Splitting(20)).ingest([shelf.folder])
    assert counts(done) == (0, 1, 0, 0) and shelf.known.counts()["chunks"] > before


def test_removed_files_go_and_others_stay(shelf: Shelf, tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt"):
        shelf.write(name, f"about {name}")
    elsewhere = tmp_path / "d.txt"
    elsewhere.write_text("elsewhere")
    shelf.ingest(shelf.folder, elsewhere)
    (shelf.folder / "sub/b.txt").unlink()
    elsewhere.unlink()
    assert counts(shelf.ingest()) == (0, 0, 1, 2)
    assert {Path(entry.source).name for entry in shelf.known.entries()} == {"a.txt", "c.txt", "d.txt"}
    assert counts(shelf.ingest(elsewhere)) == (0, 0, 1, 0)  # named itself, and it was known: no problem
    assert shelf.names == ["a.txt", "sub/deep/c.txt"]


def test_a_folder_that_is_gone_takes_its_documents_along(shelf: Shelf) -> None:
    shelf.write("sub/a.txt", "a")
    shelf.write("sub/deep/b.txt", "b")
    shelf.write("subordinate.txt", "c")
    shelf.ingest()
    for path in ("sub/a.txt", "sub/deep/b.txt"):
        (shelf.folder / path).unlink()
    (shelf.folder / "sub/deep").rmdir()
    (shelf.folder / "sub").rmdir()
    done = shelf.ingest(shelf.folder / "sub")
    assert counts(done) == (0, 0, 2, 0) and done.problems == [] and shelf.names == ["subordinate.txt"]


def test_removed_records_of_a_file_go_and_only_new_ones_are_embedded(shelf: Shelf) -> None:
    shelf.records("r.jsonl", {"one": "walrus", "two": "penguin", "three": "puffin"})
    assert counts(shelf.ingest()) == (3, 0, 0, 0)
    shelf.records("r.jsonl", {"three": "puffin", "one": "walrus!", "four": "gull"})
    assert counts(shelf.ingest()) == (1, 1, 1, 1)
    assert shelf.names == ["r.jsonl#four", "r.jsonl#one", "r.jsonl#three"] and len(shelf.texts) == 2
    assert shelf.said("r.jsonl#one") == "walrus!"


def test_a_renamed_file_is_found_under_its_new_name_and_not_embedded_again(shelf: Shelf) -> None:
    path = shelf.write("old.md", "# Tusks\n\nAbout the walrus.")
    shelf.ingest()
    path.rename(shelf.folder / "new.md")
    assert counts(shelf.ingest()) == (1, 0, 1, 0) and shelf.texts == []
    assert shelf.names == ["new.md"] and shelf.known.counts()["embedded"] == 1


def test_equal_files_are_both_listed_and_embedded_once(shelf: Shelf) -> None:
    for name in ("a.md", "b.md", "c/d.md"):
        shelf.write(name, "# Tusks\n\nAbout the walrus.")
    assert counts(shelf.ingest()) == (3, 0, 0, 0)
    assert shelf.names == ["a.md", "b.md", "c/d.md"] and len(shelf.texts) == 1
    assert shelf.known.counts()["embedded"] == 3


# -- what cannot be read


def test_a_problem_stops_nothing_and_is_told_with_its_path(shelf: Shelf) -> None:
    shelf.write("a.json", "{no json")
    shelf.write("b.txt", "walrus")
    shelf.write("c.pdf", "no pdf")
    shelf.write("d.jsonl", '{"text": "fine"}\n{broken\n{"text": "too"}')
    shelf.write("e.txt", "   \n")
    done = shelf.ingest(shelf.folder, shelf.folder / "missing.txt")
    told = {problem.source: problem.reason for problem in done.problems}
    names = {Path(source).name for source in told}
    assert names == {"a.json", "c.pdf", "d.jsonl#2", "e.txt", "missing.txt"}
    assert all(source in reason for source, reason in told.items())
    assert shelf.names == ["b.txt", "d.jsonl#1", "d.jsonl#3"] and done.added == 3


def test_a_file_that_became_unreadable_loses_what_it_said(shelf: Shelf) -> None:
    path = shelf.write("a.json", '{"text": "walrus"}')
    shelf.write("b.txt", "penguin")
    shelf.ingest()
    path.write_text("{no json any more")
    done = shelf.ingest()
    assert counts(done) == (0, 0, 1, 1) and len(done.problems) == 1 and shelf.names == ["b.txt"]
    assert len(shelf.ingest().problems) == 1  # told each time, and tried each time
    path.write_text('{"text": "walrus again"}')
    assert counts(shelf.ingest()) == (1, 0, 0, 1)


@pytest.mark.parametrize("empty", ["", "  \n\n", "\ufeff"])
def test_a_file_that_was_emptied_loses_what_it_said(shelf: Shelf, empty: str) -> None:
    shelf.write("a.txt", "walrus")
    shelf.ingest()
    shelf.write("a.txt", empty)
    done = shelf.ingest()
    assert done.removed == 1 and len(done.problems) == 1 and shelf.names == []


def test_a_document_without_text_replaces_the_old_one_by_nothing(shelf: Shelf, embedder: Embedder) -> None:
    Ingester(shelf.known, embedder).ingest_documents([Document("x", "t", (Section("walrus"),))])
    done = Ingester(shelf.known, embedder).ingest_documents([Document("x", "t", (Section(" "),))])
    assert counts(done) == (0, 0, 1, 0) and len(done.problems) == 1 and shelf.known.entries() == []


def test_a_parser_that_is_not_installed_stops_only_its_files(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.write("a.pdf", "%PDF-")
    shelf.write("b.txt", "walrus")
    real = module.read_file

    def reading(path: Path) -> object:
        if path.suffix == ".pdf":
            raise ExtraMissing('PDF needs: pip install "rekindle[knowledge]"')
        return real(path)

    monkeypatch.setattr(module, "read_file", reading)
    done = shelf.ingest()
    assert shelf.names == ["b.txt"] and "pip install" in done.problems[0].reason


def test_a_name_that_is_no_text_is_a_problem_of_its_own(shelf: Shelf) -> None:
    shelf.write("b.txt", "walrus")
    try:
        (shelf.folder / os.fsdecode(b"bad\xff.txt")).write_text("penguin")
    except OSError:
        pytest.skip("this system has no such names")
    done = shelf.ingest()
    assert shelf.names == ["b.txt"] and "rename" in done.problems[0].reason
    done.problems[0].reason.encode()


def test_nothing_named_is_refused_and_an_empty_folder_is_fine(shelf: Shelf, embedder: Embedder) -> None:
    assert counts(shelf.ingest()) == (0, 0, 0, 0) and shelf.known.entries() == []
    with pytest.raises(UnreadableDocument, match="Name files"):
        Ingester(shelf.known, embedder).ingest([])


@pytest.mark.parametrize("odd", ["x" * 5000, "~nobodyhere/x", "a\0b", "*nothing*.txt", "", "/proc/none/*/x.txt"])
def test_paths_that_lead_nowhere_are_problems(shelf: Shelf, odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shelf.folder)
    done = shelf.ingest(odd)
    assert len(done.problems) == (odd != "")  # the empty path is where we are
    assert counts(done) == (0, 0, 0, 0)


# -- folders and patterns


def test_hidden_files_are_left_out_unless_they_are_named(shelf: Shelf) -> None:
    for name in (".a.txt", ".git/b.txt", "c.txt", "d.exe"):
        shelf.write(name, name)
    shelf.ingest()
    assert shelf.names == ["c.txt"]
    shelf.ingest(str(shelf.folder / "*.txt"), str(shelf.folder / "**/*.txt"))
    assert shelf.names == ["c.txt"]
    shelf.ingest(shelf.folder / ".a.txt", shelf.folder / ".git", shelf.folder / "d.exe")
    assert shelf.names == [".a.txt", ".git/b.txt", "c.txt", "d.exe"]
    assert counts(shelf.ingest()) == (0, 0, 0, 1)  # what stands there hidden is not gone


def test_patterns_find_files_and_see_that_they_are_gone(shelf: Shelf) -> None:
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt"):
        shelf.write(name, name)
    shelf.ingest(str(shelf.folder / "*.txt"))
    assert shelf.names == ["a.txt"]
    everywhere = str(shelf.folder / "**" / "*.txt")
    shelf.ingest(everywhere)
    assert shelf.names == ["a.txt", "sub/c.txt", "sub/deep/d.txt"]
    for name in ("a.txt", "sub/deep/d.txt"):
        (shelf.folder / name).unlink()
    assert counts(shelf.ingest(everywhere)) == (0, 0, 2, 1) and shelf.names == ["sub/c.txt"]
    (shelf.folder / "sub/c.txt").unlink()
    last = shelf.ingest(everywhere)
    assert counts(last) == (0, 0, 1, 0) and last.problems == []
    assert "is not there" in shelf.ingest(everywhere).problems[0].reason


def test_a_file_with_the_name_of_a_pattern_is_itself(shelf: Shelf) -> None:
    shelf.write("a[1].txt", "one")
    shelf.write("a1.txt", "two")
    shelf.ingest(shelf.folder / "a[1].txt")
    assert shelf.names == ["a[1].txt"]


def test_a_folder_inside_another_one_is_read_once(shelf: Shelf) -> None:
    shelf.write("sub/a.txt", "walrus")
    inside = shelf.folder / "sub"
    done = shelf.ingest(shelf.folder, inside, inside / "a.txt", str(inside / "*.txt"), f"{inside}/../sub")
    assert counts(done) == (1, 0, 0, 0) and len(shelf.texts) == 1


def test_links_that_go_in_circles_or_nowhere_end(shelf: Shelf) -> None:
    shelf.write("sub/a.txt", "walrus")
    (shelf.folder / "sub" / "up").symlink_to(shelf.folder, target_is_directory=True)
    (shelf.folder / "self.txt").symlink_to(shelf.folder / "self.txt")
    (shelf.folder / "nowhere.txt").symlink_to(shelf.folder / "none")
    shelf.ingest(shelf.folder, str(shelf.folder / "**" / "*.txt"))
    assert shelf.names == ["sub/a.txt"]
    assert len(shelf.ingest(shelf.folder / "self.txt").problems) == 1


# -- being stopped


def test_a_second_run_embeds_only_what_the_first_did_not(shelf: Shelf) -> None:
    for number in range(300):
        shelf.write(f"{number:03}.txt", f"document number {number}")
    with pytest.raises(KeyboardInterrupt):
        shelf.ingest(breaks_after=170)
    first = list(shelf.texts)
    assert 100 < len(first) <= 170
    done = shelf.ingest()
    assert done.added + done.unchanged == 300 == len(shelf.names)
    assert len(set(first) & set(shelf.texts)) <= 1 and len({*first, *shelf.texts}) == 300


def test_one_long_document_goes_on_where_it_was_stopped(shelf: Shelf) -> None:
    shelf.write("long.txt", "\n\n".join(" ".join(f"p{number}w{n}" for n in range(80)) + "." for number in range(300)))
    with pytest.raises(KeyboardInterrupt):
        shelf.ingest(breaks_after=200)
    first = list(shelf.texts)
    assert len(first) >= 128
    shelf.ingest()
    assert not set(first) & set(shelf.texts) and len(first) + len(shelf.texts) == shelf.known.counts()["chunks"]
    assert shelf.known.counts()["embedded"] == shelf.known.counts()["chunks"] >= 300


KILLED = """
import os, sys
from pathlib import Path
from rekindle.core.model import ModelFiles
from rekindle.engine.embedder import Embedder
from rekindle.knowledge.ingest import Ingester
from tests.knowledge.conftest import library
def report(step):
    if step.passages >= 100:
        os.kill(os.getpid(), 9)
known = library(Path(sys.argv[1]))
Ingester(known, Embedder.load(ModelFiles("tiny", Path(sys.argv[2]))), report=report).ingest([sys.argv[3]])
"""


def test_killed_amid_an_ingestion_the_next_one_completes_it(
    shelf: Shelf, tmp_path: Path, embedder_folder: Path
) -> None:
    path = shelf.records("r.jsonl", {f"r{number}": f"document number {number}" for number in range(200)})
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), str(embedder_folder), str(path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert 64 <= shelf.known.counts()["documents"] < 200
    again = shelf.ingest()
    assert again.unchanged >= 64 and again.added + again.unchanged == 200 == shelf.known.counts()["embedded"]
    assert len(shelf.texts) <= 200 - 64


# -- how it tells


def test_a_thousand_documents_move_forward_step_by_step(shelf: Shelf, embedder: Embedder) -> None:
    path = shelf.records("r.jsonl", {f"r{number}": f"text {number}" for number in range(1000)})
    shelf.write("z.txt", "last")
    steps: list[Step] = []
    done = Ingester(shelf.known, embedder, report=steps.append).ingest([path, shelf.folder])
    assert done.added == 1001 == done.embedded == done.passages
    told = [(step.files_done, step.documents, step.passages) for step in steps]
    assert all(all(a <= b for a, b in zip(x, y, strict=True)) for x, y in pairwise(told))
    assert told[-1] == (2, 1001, 1001) and len({step.passages for step in steps}) > 10
    assert {step.files for step in steps} == {2}


def test_one_word_documents_are_found(shelf: Shelf) -> None:
    shelf.records("r.jsonl", {"a": "walrus", "b": "x", "c": "1"})
    assert shelf.ingest().added == 3
    assert shelf.said("r.jsonl#b") == "x"


def test_passages_longer_than_the_embedder_reads_are_counted(shelf: Shelf, embedder: Embedder) -> None:
    shelf.write("a.txt", "a b c")
    assert shelf.ingest().truncated == 0
    shelf.write("b.txt", "a " * (embedder.most_tokens + 20))
    assert shelf.ingest().truncated == 1


# -- documents that are given


def test_given_documents_are_named_and_replaced_by_their_source(shelf: Shelf, embedder: Embedder) -> None:
    def give(*given: object) -> Ingested:
        return Ingester(shelf.known, embedder).ingest_documents(parse_documents(given))  # type: ignore[arg-type]

    done = give("just text", {"text": "walrus", "id": "w", "title": "Tusks"}, {"text": "penguin", "source": "w"})
    assert done.added + done.changed == 3 and done.changed == 1
    assert [chunk.passage.text for chunk in shelf.known.chunks_of(shelf.known.find("w")[0].id)] == ["penguin"]
    assert counts(give("just text")) == (0, 0, 0, 1)
    give({"text": "half \ud800 a character", "title": "\ud800", "source": "s\udfff"})
    assert len(shelf.known.entries()) == 3


@pytest.mark.parametrize("wrong", [[{}], [{"text": ""}], [{"text": 5}], [5], [None], ["  "], [["text"]]])
def test_what_is_no_document_is_refused(wrong: Sequence[object]) -> None:
    with pytest.raises(InvalidPrompt, match="Document 0"):
        list(parse_documents(wrong))  # type: ignore[arg-type]


def test_documents_carry_their_app(shelf: Shelf) -> None:
    shelf.write("a/1.txt", "walrus")
    shelf.write("b/1.txt", "penguin")
    shelf.ingest(shelf.folder / "a", app="mail")
    shelf.ingest(shelf.folder / "b")
    assert {entry.source[-7:]: entry.app for entry in shelf.known.entries()} == {"a/1.txt": "mail", "b/1.txt": None}
