"""Who writes, and who is dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.store.disk_space import Writers
from rekindle.store.files import Files, Handle
from rekindle.store.folder import CacheFolder


def writers_of(folder: Path, files: Files) -> Writers:
    """The writers of a cache folder."""
    return Writers(CacheFolder(folder, files), files)


def test_a_living_writer_is_not_dead_and_a_closed_one_is(tmp_path: Path) -> None:
    one, two = writers_of(tmp_path / "w", Files()), writers_of(tmp_path / "w", Files())
    name = one.own_name()
    assert not two.is_dead(name) and not one.is_dead(name) and one.is_own(name) and not two.is_own(name)
    one.close()
    assert two.is_dead(name) and list((tmp_path / "w" / "writers").iterdir()) == []


def test_a_killed_writer_is_dead(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from tests.store.test_writers import Files, writers_of\n"
        "writers = writers_of(Path(sys.argv[1]), Files())\nprint(writers.own_name(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "w")], capture_output=True, text=True)
    assert writers_of(tmp_path / "w", Files()).is_dead(done.stdout.strip())


def test_whoever_looks_for_the_dead_at_the_wrong_moment_stops_no_writer(tmp_path: Path) -> None:
    class Nosy(Files):
        """Somebody else has the file for a moment, the first three times."""

        looked = 0

        def try_lock(self, path: Path) -> Handle | None:
            Nosy.looked += 1
            return None if Nosy.looked <= 3 else super().try_lock(path)

    assert writers_of(tmp_path / "w", Nosy()).own_name()
    assert Nosy.looked == 4


def test_a_folder_where_nothing_can_be_locked_is_an_error(tmp_path: Path) -> None:
    class Refusing(Files):
        def try_lock(self, path: Path) -> Handle | None:
            return None

    with pytest.raises(OSError, match="cannot lock"):
        writers_of(tmp_path / "w", Refusing()).own_name()
