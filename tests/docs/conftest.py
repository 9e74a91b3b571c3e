"""What the pages of the docs need to be run."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemons import daemons
from tests.docs.pages import ROOT, commands

REKINDLE = Path(sys.executable).parent / "rekindle"
LICENCE_LINES = 40  # computing the whole text takes longer than all else on a page
GUIDE = ("answers.md", "attach.md", "knowledge.md", "start.md")  # embedding all pages takes half a minute


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    pages = getattr(metafunc.module, "PAGES", None)
    if pages is not None and "command" in metafunc.fixturenames:
        found = commands(pages)
        names = [f"{where}: {command[:40]}" for where, command, _ in found]
        metafunc.parametrize(("where", "command", "prints"), found, ids=names)
    if pages is not None and "page" in metafunc.fixturenames:
        metafunc.parametrize("page", pages)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The current folder of the commands: this repository, with some pages and the first lines of its licence."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in ("LICENSE", "docs"):
            (folder / path.name).symlink_to(path)
    (folder / "docs" / "guide").mkdir(parents=True)
    for name in GUIDE:
        shutil.copy(ROOT / "docs" / "guide" / name, folder / "docs" / "guide" / name)
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    lines = (ROOT / "LICENSE").read_text("utf-8").splitlines(keepends=True)
    (folder / "LICENSE").write_text("".join(lines[:LICENCE_LINES]), "utf-8")
    return folder


@pytest.fixture(scope="module")
def background() -> Iterator[Path]:
    """The folder in which the commands of a page find the model that the first one leaves loaded, as users do."""
    folder = Path(tempfile.mkdtemp(prefix="rk-"))
    yield folder
    for process in daemons(folder):
        process.kill()
        process.wait(60)
    shutil.rmtree(folder)


@pytest.fixture
def stays_loaded(own_home: None, background: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_DAEMON", "yes")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(background))


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """Where the server of the guide listens."""
    server = subprocess.Popen(
        [REKINDLE, "serve", "smollm2", "--port", "0"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        said = ""
        while (found := re.search(r" at http://\S+?:(\d+)/v1", said)) is None:
            line = server.stderr.readline()
            assert line, f"it did not start: {said}"
            said += line
        yield found[1]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
