"""Tiny GGUF files, written by the reference library, and stand-ins for the tools that keep such files."""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from rekindle.models.files import ModelFiles, part_names
from rekindle.models.hub import hub_cache

REVISION = "0123456789abcdef0123456789abcdef01234567"
ELSEWHERE = ("OLLAMA_MODELS", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


def write_gguf(path: Path, *, architecture: str = "llama", parts: int = 1, tensors: int = 3) -> Path:
    """A GGUF file, or the parts of a split one; gives the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-tensors // parts) if parts > 1 else 0)
    writer.add_context_length(128)
    writer.add_token_list([f"tok{i}" for i in range(50)])
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.weight", np.full((4, 8), number, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def leave_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `home` be the user's home, and no variable lead elsewhere."""
    home.mkdir(parents=True, exist_ok=True)
    for name in ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))


@contextmanager
def stranger() -> Iterator[None]:
    """Files that only their owner may read cannot be read in here, also if root runs the tests."""
    if sys.platform == "win32":
        pytest.skip("permissions are of another kind")
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if before == 0:
            os.seteuid(0)


def cached(repository: str, file: str, revision: str = REVISION, **how: int) -> Path:
    """Put a GGUF file where the hub's client would: a link in a snapshot to a blob. Gives the first link."""
    folder = hub_cache() / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(REVISION)
    first = write_gguf(snapshot / file, **how)
    blobs = folder / "blobs"
    blobs.mkdir(exist_ok=True)
    for path in ModelFiles("", snapshot, first).parts:
        blob = blobs / f"{len(list(blobs.iterdir())):064x}"
        shutil.move(path, blob)
        path.symlink_to(os.path.relpath(blob, path.parent))
    return first


def folder_form(tiny_folder: Path, repository: str) -> Path:
    """Put a model in Hugging Face form into the hub's cache."""
    snapshot = hub_cache() / f"models--{repository.replace('/', '--')}" / "snapshots" / REVISION
    return Path(shutil.copytree(tiny_folder, snapshot, dirs_exist_ok=True))


class Hub:
    """A stand-in for the hub and its client, which writes into the cache as the real one does."""

    def __init__(self, source: Path) -> None:
        self.source = source  # where the files of a model in Hugging Face form come from
        self.files: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.failure: Callable[[], Exception] | None = None

    def publish(self, repository: str, *names: str) -> None:
        self.files[repository] = list(names)

    def info(self, repository: str) -> SimpleNamespace:
        self.asked.append(f"list {repository}")
        self._fail()
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files[repository]])

    def snapshot(self, repository: str, *, allow_patterns: list[str]) -> str:
        self._fail()
        folder = hub_cache() / f"models--{repository.replace('/', '--')}" / "snapshots" / REVISION
        for name in self.files[repository]:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in allow_patterns):
                self.asked.append(name)
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                if (self.source / name).is_file():
                    shutil.copy(self.source / name, folder / name)
                elif not (folder / name).exists():
                    self._write(folder / name)
        return str(folder)

    def _write(self, path: Path) -> None:
        with tempfile.TemporaryDirectory() as work:
            parts = part_names(path.name)
            write_gguf(Path(work) / (path.name if len(parts) == 1 else path.name[:-20] + ".gguf"), parts=len(parts))
            shutil.copy(Path(work) / path.name, path)

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure()
