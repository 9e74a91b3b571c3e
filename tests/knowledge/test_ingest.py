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
from rekindle.engine.embedding.embedder import Embedder
from rekindle.errors import ExtraMissing, InvalidPrompt, UnreadableDocument
from rekindle.knowledge import ingest as module
from rekindle.knowledge.ingest import Ingester, IngestProgress, IngestResult, parse_documents
from rekindle.knowledge.library import Library
from rekindle.knowledge.split import Splitting
from tests.knowledge.conftest import Counting, library

ROOT = Path(__file__).parents[2]


class IngestedFolder:
    """A folder of files, and the library they go into."""

    def __init__(self, folder: Path, embedder: Embedder) -> None:
        self.folder = folder / "files"
        self.folder.mkdir()
        self.known: Library = library(folder)
        self.embedder = embedder
        self.texts: list[str] = []  # embedded by the last ingestion

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def records(self, name: str, texts: dict[str, str]) -> Path:
        lines = [json.dumps({"id": id, "title": "t", "text": text}) for id, text in texts.items()]
        return self.write(name, "\n".join(lines))

    def ingest(self, *paths: str | Path, app: str | None = None, breaks_after: int | None = None) -> IngestResult:
        counting = Counting(self.embedder, breaks_after=breaks_after)
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
def files(tmp_path: Path, embedder: Embedder) -> IngestedFolder:
    return IngestedFolder(tmp_path, embedder)


def counts(done: IngestResult) -> tuple[int, int, int, int]:
    return done.added, done.changed, done.removed, done.unchanged


# -- what changed


def test_a_file_that_was_only_touched_is_not_read_again(files: IngestedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = files.write("a.txt", "walrus")
    files.write("b.txt", "penguin")
    assert counts(files.ingest()) == (2, 0, 0, 0) and len(files.texts) == 2
    generation = files.known.generation
    os.utime(path, (1, 1))

    def never(path: Path) -> object:
        raise AssertionError(path)

    monkeypatch.setattr(module, "read_file", never)
    assert counts(files.ingest()) == (0, 0, 0, 2)
    assert files.texts == [] and files.known.generation == generation


def test_a_changed_file_embeds_only_its_changed_passages(files: IngestedFolder) -> None:
    paragraphs = [" ".join(f"word{number}x{n}" for n in range(80)) + "." for number in range(6)]
    files.write("a.md", "# T\n\n" + "\n\n".join(paragraphs))
    first = files.ingest()
    assert first.embedded == len(files.texts) >= 5
    paragraphs[2] = "something else " * 40 + "."
    files.write("a.md", "# T\n\n" + "\n\n".join(paragraphs))
    assert counts(files.ingest()) == (0, 1, 0, 0)
    assert len(files.texts) == 1 and "something else" in files.texts[0]
    assert "something else" in files.said("a.md") and "word2x" not in files.said("a.md")


def test_another_splitting_cuts_everything_again(files: IngestedFolder, embedder: Embedder) -> None:
    files.write("a.txt", " ".join(f"This is sentence {number}." for number in range(40)))
    files.ingest()
    before = files.known.counts()["chunks"]
    done = Ingester(files.known, embedder, Splitting(20)).ingest([files.folder])
    assert counts(done) == (0, 1, 0, 0) and files.known.counts()["chunks"] > before


def test_removed_files_go_and_others_stay(files: IngestedFolder, tmp_path: Path) -> None:
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt"):
        files.write(name, f"about {name}")
    elsewhere = tmp_path / "d.txt"
    elsewhere.write_text("elsewhere")
    files.ingest(files.folder, elsewhere)
    (files.folder / "sub/b.txt").unlink()
    elsewhere.unlink()
    assert counts(files.ingest()) == (0, 0, 1, 2)
    assert {Path(entry.source).name for entry in files.known.entries()} == {"a.txt", "c.txt", "d.txt"}
    assert counts(files.ingest(elsewhere)) == (0, 0, 1, 0)  # named itself, and it was known: no problem
    assert files.names == ["a.txt", "sub/deep/c.txt"]


def test_a_folder_that_is_gone_takes_its_documents_along(files: IngestedFolder) -> None:
    files.write("sub/a.txt", "a")
    files.write("sub/deep/b.txt", "b")
    files.write("subordinate.txt", "c")
    files.ingest()
    for path in ("sub/a.txt", "sub/deep/b.txt"):
        (files.folder / path).unlink()
    (files.folder / "sub/deep").rmdir()
    (files.folder / "sub").rmdir()
    done = files.ingest(files.folder / "sub")
    assert counts(done) == (0, 0, 2, 0) and done.problems == [] and files.names == ["subordinate.txt"]


def test_removed_records_of_a_file_go_and_only_new_ones_are_embedded(files: IngestedFolder) -> None:
    files.records("r.jsonl", {"one": "walrus", "two": "penguin", "three": "puffin"})
    assert counts(files.ingest()) == (3, 0, 0, 0)
    files.records("r.jsonl", {"three": "puffin", "one": "walrus!", "four": "gull"})
    assert counts(files.ingest()) == (1, 1, 1, 1)
    assert files.names == ["r.jsonl#four", "r.jsonl#one", "r.jsonl#three"] and len(files.texts) == 2
    assert files.said("r.jsonl#one") == "walrus!"


def test_a_renamed_file_is_found_under_its_new_name_and_not_embedded_again(files: IngestedFolder) -> None:
    path = files.write("old.md", "# Tusks\n\nAbout the walrus.")
    files.ingest()
    path.rename(files.folder / "new.md")
    assert counts(files.ingest()) == (1, 0, 1, 0) and files.texts == []
    assert files.names == ["new.md"] and files.known.counts()["embedded"] == 1


def test_equal_files_are_both_listed_and_embedded_once(files: IngestedFolder) -> None:
    for name in ("a.md", "b.md", "c/d.md"):
        files.write(name, "# Tusks\n\nAbout the walrus.")
    assert counts(files.ingest()) == (3, 0, 0, 0)
    assert files.names == ["a.md", "b.md", "c/d.md"] and len(files.texts) == 1
    assert files.known.counts()["embedded"] == 3


# -- what cannot be read


def test_a_problem_stops_nothing_and_is_told_with_its_path(files: IngestedFolder) -> None:
    files.write("a.json", "{no json")
    files.write("b.txt", "walrus")
    files.write("c.pdf", "no pdf")
    files.write("d.jsonl", '{"text": "fine"}\n{broken\n{"text": "too"}')
    files.write("e.txt", "   \n")
    done = files.ingest(files.folder)
    told = {problem.source: problem.reason for problem in done.problems}
    names = {Path(source).name for source in told}
    assert names == {"a.json", "c.pdf", "d.jsonl#2", "e.txt"}
    assert all(source in reason for source, reason in told.items())
    assert files.names == ["b.txt", "d.jsonl#1", "d.jsonl#3"] and done.added == 3


def test_a_path_that_does_not_exist_is_refused_as_it_was_typed_before_anything_is_read(
    files: IngestedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("a.txt", "walrus")
    monkeypatch.chdir(files.folder)
    with pytest.raises(UnreadableDocument, match=r"^There is no file or folder nosuch\.txt\."):
        files.ingest("a.txt", "nosuch.txt")
    assert files.names == []
    Ingester(files.known, Counting(files.embedder)).ingest(["a.txt", "nosuch.txt"], watched=True)
    assert files.names == ["a.txt"]


def test_a_file_that_became_unreadable_loses_what_it_said(files: IngestedFolder) -> None:
    path = files.write("a.json", '{"text": "walrus"}')
    files.write("b.txt", "penguin")
    files.ingest()
    path.write_text("{no json any more")
    done = files.ingest()
    assert counts(done) == (0, 0, 1, 1) and len(done.problems) == 1 and files.names == ["b.txt"]
    assert len(files.ingest().problems) == 1  # told each time, and tried each time
    path.write_text('{"text": "walrus again"}')
    assert counts(files.ingest()) == (1, 0, 0, 1)


@pytest.mark.parametrize("empty", ["", "  \n\n", "\ufeff"])
def test_a_file_that_was_emptied_loses_what_it_said(files: IngestedFolder, empty: str) -> None:
    files.write("a.txt", "walrus")
    files.ingest()
    files.write("a.txt", empty)
    done = files.ingest()
    assert done.removed == 1 and len(done.problems) == 1 and files.names == []


def test_a_document_without_text_replaces_the_old_one_by_nothing(files: IngestedFolder, embedder: Embedder) -> None:
    Ingester(files.known, embedder).ingest_documents([Document("x", "t", (Section("walrus"),))])
    done = Ingester(files.known, embedder).ingest_documents([Document("x", "t", (Section(" "),))])
    assert counts(done) == (0, 0, 1, 0) and len(done.problems) == 1 and files.known.entries() == []


def test_a_parser_that_is_not_installed_stops_only_its_files(
    files: IngestedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write("a.pdf", "%PDF-")
    files.write("b.txt", "walrus")
    real = module.read_file

    def reading(path: Path) -> object:
        if path.suffix == ".pdf":
            raise ExtraMissing('PDF needs: pip install "rekindle-llm[knowledge]"')
        return real(path)

    monkeypatch.setattr(module, "read_file", reading)
    done = files.ingest()
    assert files.names == ["b.txt"] and "pip install" in done.problems[0].reason


def test_a_name_that_is_no_text_is_a_problem_of_its_own(files: IngestedFolder) -> None:
    files.write("b.txt", "walrus")
    try:
        (files.folder / os.fsdecode(b"bad\xff.txt")).write_text("penguin")
    except OSError:
        pytest.skip("this system has no such names")
    done = files.ingest()
    assert files.names == ["b.txt"] and "rename" in done.problems[0].reason
    done.problems[0].reason.encode()


def test_nothing_named_is_refused_and_an_empty_folder_is_fine(files: IngestedFolder, embedder: Embedder) -> None:
    assert counts(files.ingest()) == (0, 0, 0, 0) and files.known.entries() == []
    with pytest.raises(UnreadableDocument, match="Name files"):
        Ingester(files.known, embedder).ingest([])


@pytest.mark.parametrize("odd", ["x" * 5000, "~nobodyhere/x", "a\0b", "*nothing*.txt", "", "/proc/none/*/x.txt"])
def test_paths_that_lead_nowhere_are_refused_and_patterns_are_problems(
    files: IngestedFolder, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files.folder)
    if odd and "*" not in odd:  # the empty path is where we are
        with pytest.raises(UnreadableDocument, match=r"There is no file or folder ") as refused:
            files.ingest(odd)
        assert len(str(refused.value)) < 300
        return
    done = files.ingest(odd)
    assert len(done.problems) == (odd != "")
    assert counts(done) == (0, 0, 0, 0)


# -- folders and patterns


def test_hidden_files_are_left_out_unless_they_are_named(files: IngestedFolder) -> None:
    for name in (".a.txt", ".git/b.txt", "c.txt", "d.exe"):
        files.write(name, name)
    files.ingest()
    assert files.names == ["c.txt"]
    files.ingest(str(files.folder / "*.txt"), str(files.folder / "**/*.txt"))
    assert files.names == ["c.txt"]
    files.ingest(files.folder / ".a.txt", files.folder / ".git", files.folder / "d.exe")
    assert files.names == [".a.txt", ".git/b.txt", "c.txt", "d.exe"]
    assert counts(files.ingest()) == (0, 0, 0, 1)  # what stands there hidden is not gone


def test_patterns_find_files_and_see_that_they_are_gone(files: IngestedFolder) -> None:
    for name in ("a.txt", "b.md", "sub/c.txt", "sub/deep/d.txt"):
        files.write(name, name)
    files.ingest(str(files.folder / "*.txt"))
    assert files.names == ["a.txt"]
    everywhere = str(files.folder / "**" / "*.txt")
    files.ingest(everywhere)
    assert files.names == ["a.txt", "sub/c.txt", "sub/deep/d.txt"]
    for name in ("a.txt", "sub/deep/d.txt"):
        (files.folder / name).unlink()
    assert counts(files.ingest(everywhere)) == (0, 0, 2, 1) and files.names == ["sub/c.txt"]
    (files.folder / "sub/c.txt").unlink()
    last = files.ingest(everywhere)
    assert counts(last) == (0, 0, 1, 0) and last.problems == []
    assert "No file matches" in files.ingest(everywhere).problems[0].reason


def test_a_file_with_the_name_of_a_pattern_is_itself(files: IngestedFolder) -> None:
    files.write("a[1].txt", "one")
    files.write("a1.txt", "two")
    files.ingest(files.folder / "a[1].txt")
    assert files.names == ["a[1].txt"]


def test_a_folder_inside_another_one_is_read_once(files: IngestedFolder) -> None:
    files.write("sub/a.txt", "walrus")
    inside = files.folder / "sub"
    done = files.ingest(files.folder, inside, inside / "a.txt", str(inside / "*.txt"), f"{inside}/../sub")
    assert counts(done) == (1, 0, 0, 0) and len(files.texts) == 1


def test_links_that_go_in_circles_or_nowhere_end(files: IngestedFolder) -> None:
    files.write("sub/a.txt", "walrus")
    (files.folder / "sub" / "up").symlink_to(files.folder, target_is_directory=True)
    (files.folder / "self.txt").symlink_to(files.folder / "self.txt")
    (files.folder / "nowhere.txt").symlink_to(files.folder / "none")
    files.ingest(files.folder, str(files.folder / "**" / "*.txt"))
    assert files.names == ["sub/a.txt"]
    with pytest.raises(UnreadableDocument):
        files.ingest(files.folder / "self.txt")


# -- being stopped


def test_a_second_run_embeds_only_what_the_first_did_not(files: IngestedFolder) -> None:
    for number in range(300):
        files.write(f"{number:03}.txt", f"document number {number}")
    with pytest.raises(KeyboardInterrupt):
        files.ingest(breaks_after=170)
    first = list(files.texts)
    assert 100 < len(first) <= 170
    done = files.ingest()
    assert done.added + done.unchanged == 300 == len(files.names)
    assert len(set(first) & set(files.texts)) <= 1 and len({*first, *files.texts}) == 300


def test_one_long_document_goes_on_where_it_was_stopped(files: IngestedFolder) -> None:
    files.write("long.txt", "\n\n".join(" ".join(f"p{number}w{n}" for n in range(80)) + "." for number in range(300)))
    with pytest.raises(KeyboardInterrupt):
        files.ingest(breaks_after=200)
    first = list(files.texts)
    assert len(first) >= 128
    files.ingest()
    assert not set(first) & set(files.texts) and len(first) + len(files.texts) == files.known.counts()["chunks"]
    assert files.known.counts()["embedded"] == files.known.counts()["chunks"] >= 300


KILLED = """
import os, sys
from pathlib import Path
from rekindle.models.files import ModelFiles
from rekindle.engine.embedding.embedder import Embedder
from rekindle.knowledge.ingest import Ingester
from tests.knowledge.conftest import library
def report(step):
    if step.passages >= 100:
        os.kill(os.getpid(), 9)
known = library(Path(sys.argv[1]))
Ingester(known, Embedder.load(ModelFiles("tiny", Path(sys.argv[2]))), report=report).ingest([sys.argv[3]])
"""


def test_killed_amid_an_ingestion_the_next_one_completes_it(
    files: IngestedFolder, tmp_path: Path, embedder_folder: Path
) -> None:
    path = files.records("r.jsonl", {f"r{number}": f"document number {number}" for number in range(200)})
    arguments = [sys.executable, "-c", KILLED, str(tmp_path), str(embedder_folder), str(path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert 64 <= files.known.counts()["documents"] < 200
    again = files.ingest()
    assert again.unchanged >= 64 and again.added + again.unchanged == 200 == files.known.counts()["embedded"]
    assert len(files.texts) <= 200 - 64


# -- how it tells


def test_a_thousand_documents_move_forward_step_by_step(files: IngestedFolder, embedder: Embedder) -> None:
    path = files.records("r.jsonl", {f"r{number}": f"text {number}" for number in range(1000)})
    files.write("z.txt", "last")
    steps: list[IngestProgress] = []
    done = Ingester(files.known, embedder, report=steps.append).ingest([path, files.folder])
    assert done.added == 1001 == done.embedded == done.passages
    told = [(step.files_done, step.documents, step.passages) for step in steps]
    assert all(all(a <= b for a, b in zip(x, y, strict=True)) for x, y in pairwise(told))
    assert told[-1] == (2, 1001, 1001) and len({step.passages for step in steps}) > 10
    assert {step.files for step in steps} == {2}


def test_one_word_documents_are_found(files: IngestedFolder) -> None:
    files.records("r.jsonl", {"a": "walrus", "b": "x", "c": "1"})
    assert files.ingest().added == 3
    assert files.said("r.jsonl#b") == "x"


def test_passages_longer_than_the_embedder_reads_are_counted(files: IngestedFolder, embedder: Embedder) -> None:
    files.write("a.txt", "a b c")
    assert files.ingest().truncated == 0
    files.write("b.txt", "a " * (embedder.token_limit + 20))
    assert files.ingest().truncated == 1


# -- documents that are given


def test_given_documents_are_named_and_replaced_by_their_source(files: IngestedFolder, embedder: Embedder) -> None:
    def give(*given: object) -> IngestResult:
        return Ingester(files.known, embedder).ingest_documents(parse_documents(given))  # type: ignore[arg-type]

    done = give("just text", {"text": "walrus", "id": "w", "title": "Tusks"}, {"text": "penguin", "source": "w"})
    assert done.added + done.changed == 3 and done.changed == 1
    assert [chunk.passage.text for chunk in files.known.chunks_of(files.known.find("w")[0].id)] == ["penguin"]
    assert counts(give("just text")) == (0, 0, 0, 1)
    give({"text": "half \ud800 a character", "title": "\ud800", "source": "s\udfff"})
    assert len(files.known.entries()) == 3


@pytest.mark.parametrize("wrong", [[{}], [{"text": ""}], [{"text": 5}], [5], [None], ["  "], [["text"]]])
def test_what_is_no_document_is_refused(wrong: Sequence[object]) -> None:
    with pytest.raises(InvalidPrompt, match="Document 0"):
        list(parse_documents(wrong))  # type: ignore[arg-type]


def test_documents_carry_their_app(files: IngestedFolder) -> None:
    files.write("a/1.txt", "walrus")
    files.write("b/1.txt", "penguin")
    files.ingest(files.folder / "a", app="mail")
    files.ingest(files.folder / "b")
    assert {entry.source[-7:]: entry.app for entry in files.known.entries()} == {"a/1.txt": "mail", "b/1.txt": None}
