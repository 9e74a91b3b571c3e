"""What Rekindle keeps on a machine is its user's alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.json_file import write_json
from rekindle.machine import make_private_folder
from rekindle.models.pull import pull
from rekindle.server.serve import _registered
from rekindle.server.usage_log import UsageLog

pytestmark = pytest.mark.skipif(os.name != "posix", reason="mode bits say nothing there")


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """Nothing takes permissions away but Rekindle itself."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "above" / "home"
    monkeypatch.setenv("REKINDLE_HOME", str(home))
    return home


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_others_can_enter_no_folder_of_the_home_and_read_no_file(home: Path, tiny_gguf: Path) -> None:
    pull(str(tiny_gguf))
    usage = UsageLog(home / "usage" / "tiny.db", lambda: {"requests": 1.0})
    usage.flush()
    with _registered("http://127.0.0.1:1", "tiny"):
        with Session(str(tiny_gguf)) as session:
            session.ingest(documents=["The keeper of the lighthouse writes down every ship."])
            session.generate("The keeper of the lighthouse writes down every ship. " * 8, max_tokens=2)
        found = {path: mode(path) for path in (home, *home.rglob("*"))}
    names = {path.name for path in found}
    assert {"digests.json", "tiny.db", "model.json", "cache", "knowledge", f"{os.getpid()}.json"} <= names
    wide = {str(path): oct(bits) for path, bits in found.items() if bits & 0o077}
    assert wide == {}


def test_a_home_that_others_could_enter_is_narrowed_and_so_are_its_folders(home: Path) -> None:
    (home / "usage").mkdir(parents=True, mode=0o755)
    (home / "costs.json").write_text("{}")
    make_private_folder(home / "usage")
    assert (mode(home), mode(home / "usage"), mode(home.parent)) == (0o700, 0o700, 0o777)
    write_json(home / "costs.json", {})
    assert mode(home / "costs.json") == 0o600


def test_a_home_with_files_of_others_keeps_its_mode_and_what_is_new_in_it_is_private(home: Path) -> None:
    (home / "photos").mkdir(parents=True, mode=0o755)
    home.chmod(0o755)
    write_json(home / "usage" / "a.json", {})
    assert (mode(home), mode(home / "photos")) == (0o755, 0o755)
    assert (mode(home / "usage"), mode(home / "usage" / "a.json")) == (0o700, 0o600)


def test_a_folder_of_another_user_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(parents=True, mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    make_private_folder(home)
    assert mode(home) == 0o755


def test_a_file_system_without_permissions_and_a_user_without_a_home_are_no_reason_to_fail(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(parents=True)

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "chmod", refuse)
    make_private_folder(home / "models")
    for variable in ("REKINDLE_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    write_json(home / "rekindle" / "costs.json", {})
    assert mode(home / "rekindle") == 0o700


def test_a_folder_elsewhere_that_is_there_keeps_its_mode(home: Path, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    make_private_folder(tmp_path / "shared")
    make_private_folder(tmp_path / "shared" / "new")
    assert (mode(tmp_path / "shared"), mode(tmp_path / "shared" / "new")) == (0o755, 0o700)
