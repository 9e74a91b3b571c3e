"""What changes on the disk is told: new, changed, deleted files, and folders that move."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.engine.embedding.embedder import Embedder
from rekindle.knowledge.ingest import Ingester
from rekindle.knowledge.paths import watch_changes
from tests.knowledge.conftest import library

pytestmark = pytest.mark.thorough

pytest.importorskip("watchfiles")

DEADLINE_SECONDS = 60


class Watched:
    """A folder that is watched in a thread of its own."""

    def __init__(self, folder: Path, *paths: str) -> None:
        self.folder = folder
        self.paths = list(paths) or [str(folder)]
        self.told: queue.Queue[list[str]] = queue.Queue()
        self.stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        assert self.next() == self.paths  # everything, once it is watched

    def _follow(self) -> None:
        for some in watch_changes(self.paths, self.stop):
            self.told.put(some)

    def next(self) -> list[str]:
        return self.told.get(timeout=DEADLINE_SECONDS)

    def until(self, path: Path) -> None:
        """Wait until a path is told of. One change may be told of in several parts."""
        while str(path) not in self.next():
            pass

    def close(self) -> None:
        self.stop.set()
        self._thread.join(DEADLINE_SECONDS)
        assert not self._thread.is_alive()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "old.txt").write_text("old")
    made = Watched(folder)
    yield made
    made.close()


def test_new_changed_and_deleted_files_are_told_one_by_one(watched: Watched) -> None:
    path = watched.folder / "sub" / "new.txt"
    path.write_text("walrus")
    watched.until(path)
    path.write_text("penguin")
    watched.until(path)
    path.unlink()
    watched.until(path)


def test_a_folder_that_moves_is_a_reason_to_look_at_everything(watched: Watched) -> None:
    (watched.folder / "sub").rename(watched.folder / "moved")
    watched.until(watched.folder)
    shutil.rmtree(watched.folder / "moved")
    watched.until(watched.folder)


def test_hidden_files_and_other_kinds_are_not_told(watched: Watched) -> None:
    (watched.folder / ".hidden.txt").write_text("x")
    (watched.folder / "program.exe").write_text("x")
    (watched.folder / "last.txt").write_text("x")
    seen: list[str] = []
    while not seen or not seen[-1].endswith("last.txt"):
        seen += watched.next()
    assert {Path(path).name for path in seen} == {"last.txt"}


def test_what_is_told_brings_the_library_up_to_date(watched: Watched, tmp_path: Path, embedder: Embedder) -> None:
    known = library(tmp_path)

    def names() -> list[str]:
        return sorted(str(Path(entry.source).relative_to(watched.folder)) for entry in known.entries())

    def follow(expected: list[str]) -> None:
        while names() != expected:
            Ingester(known, embedder).ingest(watched.next())

    Ingester(known, embedder).ingest(watched.paths)
    (watched.folder / "new.txt").write_text("walrus")
    follow(["new.txt", "sub/old.txt"])
    (watched.folder / "sub").rename(watched.folder / "moved")
    follow(["moved/old.txt", "new.txt"])
    (watched.folder / "new.txt").unlink()
    follow(["moved/old.txt"])
    shutil.rmtree(watched.folder / "moved")
    follow([])


def test_a_named_file_and_a_pattern_are_followed_and_their_neighbours_are_not(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    made = Watched(tmp_path, str(tmp_path / "notes"), str(tmp_path / "*.md"))
    (tmp_path / "other.txt").write_text("x")
    (tmp_path / "notes").write_text("y")
    (tmp_path / "new.md").write_text("z")
    seen: set[str] = set()
    while len(seen) < 2:
        seen |= {Path(path).name for path in made.next()}
    made.close()
    assert seen == {"notes", "new.md"}


def test_where_there_is_nothing_to_watch_it_ends(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none" / "none.txt")
    assert list(watch_changes([nowhere])) == [[nowhere]]
