"""A cache of an older format: emptied when it is opened, of our files alone, whoever dies or comes along meanwhile."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rekindle.errors import CacheUnusable
from rekindle.store.check import check
from rekindle.store.disk import Machine
from rekindle.store.files import Files, Handle
from rekindle.store.folder import CATALOG, EXTENTS, FORMAT, MARKER, WRITERS, CacheFolder
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NO_MEMORY, REPOSITORY, as_nobody, copy, fill, make_older, open_to_all, prompt
from tests.kvs import KV_SPACE, keep, load

FOREIGN = ("notes.txt", f"{EXTENTS}/map.shp", f"{WRITERS}/README", f"{EXTENTS}/0123456789ABCDEF.kv", "extents.bak/a.kv")
DEAD, SET_ASIDE = f"{WRITERS}/0123456789abcdef", f"{CATALOG}.broken-1"


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of format 1 with two prompts, what a dead writer left, a broken catalog, and other people's files."""
    folder = tmp_path_factory.mktemp("older") / "older"
    fill(folder, [prompt(1), prompt(2)])
    make_older(folder)
    for name in (*FOREIGN, DEAD, SET_ASIDE):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"what {name} says")
    return folder


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def judge(folder: Path, older: Path) -> None:
    """The folder is a sound cache of this format, with nothing of the older one, and takes what is new."""
    ours = files_of(older) - {*FOREIGN, MARKER, CATALOG}
    with TieredStore(folder, NO_MEMORY) as store:
        assert store.lookup(KV_SPACE, prompt(1)).length == 0
        assert keep(store, prompt(7)).outcome == "kept"
        assert load(store, prompt(7)) == len(prompt(7))
        assert check(store.disk).problems == ()
    lines = (folder / MARKER).read_text().splitlines()
    assert lines[1] == f"# Rekindle cache, format {FORMAT}" and "being removed" not in lines[2]
    left = files_of(folder)
    assert not ours & left
    assert {name: (folder / name).read_text() for name in FOREIGN} == {name: f"what {name} says" for name in FOREIGN}
    assert {name for name in left if name.startswith(MARKER)} == {MARKER}


def test_our_files_go_others_stay_and_the_next_keep_works(older: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy(older, "opened")
    with caplog.at_level(logging.WARNING), TieredStore(folder, NO_MEMORY) as store:
        assert store.disk.entries() == []
        assert files_of(folder) - set(FOREIGN) <= {MARKER, CATALOG, f"{CATALOG}-wal", f"{CATALOG}-shm"}
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"{folder} was a cache of an older format: its KV was removed, and the cache starts empty."
    caplog.clear()
    judge(folder, older)
    assert caplog.records == []


def test_a_folder_that_was_left_half_emptied_is_emptied_again(older: Path, tmp_path: Path) -> None:
    """Killed at every call that changes something, by a signal that nothing can catch."""
    for step in range(1, 100):
        folder = copy(older, "killed")
        child = os.fork()
        if child == 0:
            CacheFolder(folder, Dying(step)).claim()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        judge(folder, older)
        if not os.WIFSIGNALED(status):
            assert step > 10, "there are fewer calls than that"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
    raise AssertionError("it never ends")


class Dying(Files):
    """Files of a process that is killed before its nth call that changes something."""

    def __init__(self, dies_at: int) -> None:
        super().__init__()
        self.steps, self._dies_at = 0, dies_at

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def make_folder(self, path: Path) -> None:
        self._step()
        super().make_folder(path)

    def try_lock(self, path: Path) -> Handle | None:
        self._step()
        return super().try_lock(path)

    def create(self, path: Path) -> Handle:
        self._step()
        return super().create(path)

    def write_some(self, handle: Handle, offset: int, data: memoryview) -> int:
        self._step()
        return super().write_some(handle, offset, data[:40])

    def replace(self, draft: Path, path: Path) -> None:
        self._step()
        super().replace(draft, path)

    def remove(self, path: Path) -> bool:
        self._step()
        return super().remove(path)

    def sync_folder(self, path: Path) -> None:
        self._step()
        super().sync_folder(path)


class Interrupted(Files):
    """Files that do something else before each change of the folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.formats: list[str] = []

    def remove(self, path: Path) -> bool:
        self.formats.append((self.folder / MARKER).read_text())
        return super().remove(path)


def test_processes_of_the_older_version_see_a_newer_format_before_anything_goes(older: Path) -> None:
    folder = copy(older, "seen")
    files = Interrupted(folder)
    CacheFolder(folder, files).claim()
    assert len(files.formats) > 5
    assert all(f"# Rekindle cache, format {FORMAT}\n" in text for text in files.formats)


OPENER = """
import sys
from pathlib import Path
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NO_MEMORY, prompt
from tests.kvs import keep, load
folder, number = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
with TieredStore(folder, NO_MEMORY) as store:
    for tokens in (prompt(number), prompt(number + 10)):
        assert keep(store, tokens).outcome == "kept"
        assert load(store, tokens) == len(tokens)
"""


@contextmanager
def opener(folder: Path, number: int) -> Iterator[subprocess.Popen[str]]:
    """A process that waits for a line, and then opens a cache and keeps two prompts."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", OPENER, str(folder), str(number)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process


def test_processes_that_open_it_at_once_empty_it_once_and_lose_nothing_that_is_new(older: Path) -> None:
    folder = copy(older, "shared")
    with opener(folder, 20) as one, opener(folder, 21) as two, opener(folder, 22) as three:
        for process in (one, two, three):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.communicate()[1] for process in (one, two, three)]
        assert [process.returncode for process in (one, two, three)] == [0, 0, 0], said
    assert "".join(said).count("the cache starts empty") == 1
    with TieredStore(folder, NO_MEMORY) as store:
        for number in (20, 21, 22, 30, 31, 32):
            assert load(store, prompt(number)) == len(prompt(number))
    judge(folder, older)


def test_whoever_comes_while_it_is_emptied_waits_and_then_finds_it_done(older: Path) -> None:
    """The second one begins when the first has removed half of it, and the first goes on when the second waits."""
    folder = copy(older, "waiting")
    done: list[str] = []

    class Second(Files):
        def try_lock(self, path: Path) -> Handle | None:
            lock = super().try_lock(path)
            if lock is None and not done:
                done.append("waited")
                raise OSError("the first one's turn")
            return lock

    class First(Files):
        def remove(self, path: Path) -> bool:
            if path.suffix == ".kv" and not done:
                with pytest.raises(CacheUnusable, match="first one's turn"):
                    CacheFolder(folder, Second()).claim()
            return super().remove(path)

    CacheFolder(folder, First()).claim()
    assert done == ["waited"]
    fill(folder, [prompt(3)])
    before = files_of(folder)
    CacheFolder(folder, Second()).claim()
    assert files_of(folder) == before
    judge(folder, older)


@pytest.mark.parametrize("method", ["try_lock", "create", "write_some", "replace", "remove", "sync_folder"])
def test_what_fails_on_the_way_is_a_sentence_and_the_next_one_goes_on(older: Path, method: str) -> None:
    class Failing(Files):
        calls = 0

    def fail(self: Failing, *arguments: object) -> object:
        Failing.calls += 1
        if Failing.calls == nth:
            raise OSError(5, "Input/output error")
        return getattr(Files, method)(self, *arguments)

    setattr(Failing, method, fail)
    for nth in range(1, 100):
        Failing.calls = 0
        folder = copy(older, "failing")
        try:
            TieredStore(folder, NO_MEMORY, Machine(files=Failing())).close()
        except CacheUnusable as error:
            assert str(error).endswith(".")
        judge(folder, older)
        if Failing.calls < nth:
            return
    raise AssertionError("it never ends")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_one_that_can_only_be_read_is_refused_with_what_to_do(older: Path, readable: Path) -> None:
    folder = copy(older, "read").rename(readable / "cache")
    open_to_all(folder)
    before = files_of(folder)
    code = """
try:
    TieredStore(Path(arguments[0]), NO_MEMORY)
except Exception as error:
    answer["said"] = str(error)
"""
    said = str(as_nobody(code, folder)["said"])
    assert "is a cache of an older format and cannot be emptied" in said and said.endswith(
        "another folder for the cache."
    )
    assert files_of(folder) == before


def test_another_programs_database_in_it_is_refused_and_left(older: Path, tmp_path: Path) -> None:
    folder = copy(older, "recipes")
    (folder / CATALOG).write_bytes(b"SQLite format 3\0" + bytes(84))
    before = {name: (folder / name).read_bytes() for name in files_of(folder)}
    with pytest.raises(CacheUnusable, match="not a Rekindle catalog"):
        TieredStore(folder, NO_MEMORY)
    assert {name: (folder / name).read_bytes() for name in files_of(folder)} == before
