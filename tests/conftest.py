"""Fixtures for all tests. Every test has a Rekindle home of its own; those marked `real` or `docs`, and fixtures that
several tests share, have the home of the run, with the models of the user's own home.

No test sees the settings of whoever runs it, and none writes into their home.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import settings

from rekindle.machine import home_folder
from rekindle.store import disk_space
from tests.home import fill_home, live_in

if TYPE_CHECKING:
    from rekindle.engine.base import Engine

# The same examples in every run: none passes or fails by luck. How long one takes says nothing on a shared machine.
settings.register_profile("shared machine", deadline=None, derandomize=True)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=25)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


LEFT_OUT = ("thorough", "exhaustive", "long")  # files with these marks are not even imported by runs without them


@cache
def has_mark(path: Path, mark: str) -> bool:
    """Whether a test file has a mark, or a folder it lies in says so in its `__init__.py` (`THOROUGH = True`).

    Read from the text, because what is left out is not imported.
    """
    if path == Path(__file__).parent:
        return False
    file = path if path.suffix == ".py" else path / "__init__.py"
    says = rf"^(pytestmark = .*\bpytest\.mark\.{mark}\b|{mark.upper()} = True)"
    own = file.exists() and re.search(says, file.read_text("utf-8"), re.MULTILINE)
    return bool(own) or has_mark(path.parent, mark)


def is_quick(config: pytest.Config) -> bool:
    """Whether this is `make quick`, or a run like it."""
    return "not thorough" in config.option.markexpr


OWN_FOLDERS = pytest.StashKey[list[Path]]()
MEMORY = Path("/dev/shm")
ROOM_BYTES = 8 << 30  # several times what a run has at a time


def folder_in_memory() -> Path | None:
    """A folder for what tests write: on a disk they mostly wait until it says that their bytes are safe.

    None where there is no such place or too little room in it, and where `TMPDIR` is set.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return None
    roomy = min(shutil.disk_usage(MEMORY).free, psutil.virtual_memory().available) > ROOM_BYTES
    if not roomy:
        return None
    folder = Path(tempfile.mkdtemp(prefix="rekindle-tests-", dir=MEMORY))
    folder.chmod(0o711)  # some tests read as another user
    return folder


def pytest_configure(config: pytest.Config) -> None:
    if library := os.environ.get("TEST_LLAMA_LIBRARY"):  # instead of the wheel's
        from rekindle.engine.llamacpp.c_api import llama

        llama.load(library)
    settings.load_profile("quick" if is_quick(config) else "shared machine")
    if not hasattr(config, "workerinput"):  # the workers of xdist inherit it
        if (folder := folder_in_memory()) is not None:
            os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        home = Path(tempfile.mkdtemp(prefix="rekindle-tests-"))
        config.stash[OWN_FOLDERS] = [home, *([folder] if folder else [])]
        fill_home(home, home_folder())
        live_in(home)


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in config.stash.get(OWN_FOLDERS, []):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is left out need not be imported either: half of the time of `make quick`."""
    left_out = [mark for mark in LEFT_OUT if f"not {mark}" in config.option.markexpr]
    return True if any(has_mark(collection_path, mark) for mark in left_out) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if has_mark(item.path, "thorough"):
            item.add_marker(pytest.mark.thorough)
    # The longest first: two workers that take a file each end at the same time.
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("real", "docs", "storm")))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "cache"


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that do not exist yet, for tests that have none of their own: making one takes longer than most tests."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in count())


@pytest.fixture(scope="session")
def sockets_folder() -> Iterator[str]:
    """A folder with a short path, where no daemon listens that somebody left in the background."""
    with tempfile.TemporaryDirectory(prefix="rk-") as folder:
        yield folder


@pytest.fixture(autouse=True)
def own_home(
    request: pytest.FixtureRequest,
    homes: Iterator[Path],
    shared_cache: Path,
    sockets_folder: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else next(homes)
    for name in [n for n in os.environ if n.startswith("REKINDLE_") and n != "REKINDLE_HOME"]:
        monkeypatch.delenv(name)
    if any(request.node.get_closest_marker(name) for name in ("real", "docs")):
        monkeypatch.setenv("REKINDLE_CACHE", str(shared_cache))
    else:
        monkeypatch.setenv("REKINDLE_HOME", str(own / "home"))
        for name in ("OLLAMA_MODELS", "HF_HOME"):  # what other tools have here is none of a test's business
            monkeypatch.setenv(name, str(own / "others" / name))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(own / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets_folder)
    monkeypatch.setenv("REKINDLE_DAEMON", "no")  # no process outlives the test that started it


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared machine may be slow: only tests of deadlines have any."""
    monkeypatch.setattr("rekindle.cache.stored_kv.LOOKUP_SECONDS", 120.0)
    monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 120.0)
    monkeypatch.setattr("rekindle.cache.stored_kv.SHARED_LOOKUP_SECONDS", 120.0)
    monkeypatch.setattr("rekindle.cache.inflight._WRITE_SECONDS", 120.0)


@pytest.fixture(scope="session", autouse=True)
def unmeasured() -> Iterator[None]:
    """A model may compute sooner than it loads, a busy machine may for once: a test of reuse must not depend on that.

    For sessions that several tests share, too.
    """
    from rekindle.cache.cost import AlwaysReuse

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rekindle.cache.stored_kv.recall_costs", lambda engine: AlwaysReuse())
        yield


@pytest.fixture(autouse=True)
def measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of costs have those of the machine."""
    if request.node.get_closest_marker("measured_costs"):
        from rekindle.cache.cost import recall_costs

        monkeypatch.setattr("rekindle.cache.stored_kv.recall_costs", recall_costs)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for tiny models: several only wait for each other, ten times longer where others work too."""
    try:
        import torch
    except ImportError:  # then nothing here computes with it
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte tokenizer and a chat template, as a model folder. Do not change it: copy it."""
    from tests.tiny import save_folder

    folder = save_folder(tmp_path_factory.mktemp("models") / "tiny", CHAT_TEMPLATE)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Engine]:
    """The embedded model on transformers, loaded once: a session that is given it leaves it open."""
    from rekindle import Session

    with Session("smollm2", engine="hf", device="cpu", dtype="float32", cache="off") as session:
        yield session.engine


@pytest.fixture(scope="session")
def two_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny Llamas of the same tokenizer and other weights, alpha and beta, as model folders."""
    from tests.tiny import save_folder

    models = tmp_path_factory.mktemp("models")
    alpha, beta = (save_folder(models / name, CHAT_TEMPLATE, seed=seed) for seed, name in enumerate(("alpha", "beta")))
    return alpha, beta


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of llama.cpp. For tests that start processes: one that imports torch takes eight seconds."""
    pytest.importorskip("xllamacpp")
    from tests.tiny_gguf import write_llama

    return write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders count as full: what killed apps left goes by its age alone."""
    monkeypatch.setattr(disk_space, "ROOMY_SHARE", 0.0)
