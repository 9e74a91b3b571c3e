"""The pulled models: one folder each, with a `model.json` that says where its files are."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rekindle.core.identity import digest_of_fields
from rekindle.errors import ModelNotFound, NotAModel
from rekindle.json_file import write_json
from rekindle.machine import make_private_folder, models_folder
from rekindle.models import ollama
from rekindle.models.files import ModelFiles, file_version, is_file
from rekindle.models.onnx_folder import GRAPH, PRECISIONS, OnnxForm

_RECORD = "model.json"
PULLED = "hf"  # the subfolder of a model's folder with the files that `pull` put there
CONVERTED = ".converted"  # the subfolder of all models' folder with converted GGUF files


@dataclass(frozen=True)
class PulledModel:
    """A pulled model. Files outside its own folder are used in place and never removed."""

    name: str
    kind: str
    source: str
    files: ModelFiles
    added: str

    @property
    def home(self) -> Path:
        """The model's own folder."""
        return folder_of(self.name)

    @property
    def in_place(self) -> bool:
        """Whether the files are the user's; they may even be in the folder of the record."""
        return self.files.folder != self.home / PULLED or self.source == str(self.files.folder)

    def size_bytes(self) -> int:
        """Bytes of all its files, also of those used in place."""
        return _size_of(*self.files.parts, self.files.folder, self.home, *self._graphs().values())

    def graph_bytes(self) -> dict[OnnxForm, int]:
        """Bytes of the graphs that were exported from it."""
        return {form: _size_of(folder) for form, folder in self._graphs().items()}

    def _graphs(self) -> dict[OnnxForm, Path]:
        folders = {form: exported_folder(self.files, form) for form in PRECISIONS}
        return {form: folder for form, folder in folders.items() if (folder / GRAPH).is_file()}


def folder_of(name: str) -> Path:
    """The folder of a model: `ORG/NAME:QUANT` becomes a name that every file system takes."""
    return models_folder() / name.replace("/", "--").replace(":", "@")


def lookup(name: str) -> PulledModel | None:
    """The model of that name, if its files are still there."""
    entry = _read(folder_of(name))
    return entry if entry is not None and entry.name == name else None


def entries() -> list[PulledModel]:
    """All pulled models whose files are still there, by name."""
    folder = models_folder()
    homes = [path.parent for path in folder.glob(f"*/{_RECORD}")] if folder.is_dir() else []
    read = (entry for home in homes if (entry := _read(home)) is not None and entry.home == home)
    return sorted(read, key=lambda entry: entry.name)


@functools.cache
def loaded_name(path: str) -> str:
    """What a model is called that transformers loaded from a folder, or from the hub by a name that it keeps."""
    folder = Path(path)
    if not path or not folder.is_dir():
        return path
    return next((entry.name for entry in entries() if entry.files.folder == folder.absolute()), folder.resolve().name)


def add(name: str, kind: str, source: str, files: ModelFiles, *, draft: Path | None = None) -> PulledModel:
    """Record a model in its folder, or in a `draft` of it. Raises `NotAModel` if a file of another kind is there."""
    entry = PulledModel(name, kind, source, files, datetime.now(timezone.utc).isoformat(timespec="seconds"))
    home = draft or folder_of(name)
    make_private_folder(home)
    if _is_foreign(home / _RECORD):
        raise NotAModel(f"{home / _RECORD} was not written by Rekindle. Move it away, or set REKINDLE_HOME elsewhere.")
    record = {
        "name": name,
        "kind": kind,
        "source": source,
        "folder": str(files.folder),
        "gguf": None if files.gguf is None else str(files.gguf),
        "onnx": None if files.onnx is None else str(files.onnx),
        "added": entry.added,
    }
    write_json(home / _RECORD, record, indent=2)
    return entry


def remove(name: str) -> PulledModel:
    """Remove a model and Rekindle's files of it; files used in place stay. Raises `ModelNotFound`."""
    entry = lookup(name)
    if entry is None:
        if name.startswith(ollama.PREFIX):
            theirs = name.removeprefix(ollama.PREFIX)
            raise ModelNotFound(f"{name} belongs to Ollama. Remove it there, if you want: ollama rm {theirs}")
        known = ", ".join(e.name for e in entries()) or "none"
        raise ModelNotFound(f"No model {name!r} was pulled. Pulled: {known}.")
    if entry.files.gguf is not None and entry.files.folder.parent == models_folder() / CONVERTED:
        shutil.rmtree(entry.files.folder, ignore_errors=True)  # the converted form is ours
    for form in PRECISIONS:
        shutil.rmtree(exported_folder(entry.files, form), ignore_errors=True)
    if entry.in_place:
        (entry.home / _RECORD).unlink()
        with contextlib.suppress(OSError):  # the user's files are in it
            entry.home.rmdir()
    else:
        shutil.rmtree(entry.home)
    return entry


def exported_folder(files: ModelFiles, form: OnnxForm) -> Path:
    """Where the ONNX form of a model goes that came in another one: beside our files of it, else by what the user's
    files are now."""
    folder = files.folder
    if folder.name != PULLED and folder.parent != models_folder() / CONVERTED:
        versions = [file_version(path) for path in sorted(folder.glob("*.safetensors"))]
        folder = models_folder() / CONVERTED / f"{folder.name}-{digest_of_fields(str(folder), *versions)[:12]}"
    return folder.with_name(f"{folder.name}-{form}")


def is_made_by_pull(name: str) -> bool:
    """Whether the folder of that name does not exist or was made by `pull`."""
    home = folder_of(name)
    try:
        entry = _parse(json.loads((home / _RECORD).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return not os.path.lexists(home)
    return entry.name == name and not entry.in_place and not home.is_symlink()


def _is_foreign(record: Path) -> bool:
    """Whether something other than a record is in its place; a truncated record is ours."""
    try:
        _parse(json.loads(record.read_text("utf-8")))
    except (KeyError, TypeError):
        return True
    except (OSError, ValueError):
        return record.is_symlink() or record.is_dir()
    return False


def _read(home: Path) -> PulledModel | None:
    try:
        entry = _parse(json.loads((home / _RECORD).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # no record, or an unreadable one: as good as not pulled
    files = entry.files
    needed = files.parts if files.onnx is None else (files.onnx,)
    return entry if (all(map(is_file, needed)) if needed else files.converted) else None


def _parse(record: Any) -> PulledModel:
    gguf, onnx = record["gguf"], record.get("onnx")  # records of earlier versions have no graph
    paths = (None if path is None else Path(path) for path in (gguf, onnx))
    files = ModelFiles(record["name"], Path(record["folder"]), *paths)
    return PulledModel(record["name"], record["kind"], record["source"], files, record["added"])


def _size_of(*paths: Path) -> int:
    """Bytes of all files in folders; a file in two of them counts once."""
    unique = {file.resolve() for path in paths for file in _files_in(path)}
    return sum(file.stat().st_size for file in unique)


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file()]
