"""What was pulled: one folder a model, with a `model.json` that says where its files are."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rekindle.config import models_folder
from rekindle.core.model import ModelFiles
from rekindle.errors import ModelNotFound

_RECORD = "model.json"


@dataclass(frozen=True)
class Entry:
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
        """Whether the model's files stay where the user has them."""
        return not (self.files.gguf or self.files.folder).is_relative_to(self.home)

    def size_bytes(self) -> int:
        """Bytes of the files Rekindle keeps for it, and of those used in place."""
        paths = [*self.files.parts, self.files.folder, self.home]
        unique = {file.resolve() for path in paths for file in _files_in(path)}
        return sum(file.stat().st_size for file in unique)


def folder_of(name: str) -> Path:
    """Where a model of this name lives; `ORG/NAME:QUANT` becomes one folder, under a name that every disk takes."""
    return models_folder() / name.replace("/", "--").replace(":", "@")


def lookup(name: str) -> Entry | None:
    """The entry of that name whose files are still there."""
    entry = _read(folder_of(name))
    return entry if entry is not None and entry.name == name else None


def entries() -> list[Entry]:
    """All pulled models whose files are still there, by name."""
    folder = models_folder()
    homes = [path.parent for path in folder.glob(f"*/{_RECORD}")] if folder.is_dir() else []
    read = (entry for home in homes if (entry := _read(home)) is not None and entry.home == home)
    return sorted(read, key=lambda entry: entry.name)


def add(name: str, kind: str, source: str, files: ModelFiles) -> Entry:
    """Record a model."""
    entry = Entry(name, kind, source, files, datetime.now(timezone.utc).isoformat(timespec="seconds"))
    home = folder_of(name)
    home.mkdir(parents=True, exist_ok=True)
    record = {
        "name": name,
        "kind": kind,
        "source": source,
        "folder": str(files.folder),
        "gguf": None if files.gguf is None else str(files.gguf),
        "added": entry.added,
    }
    handle, temporary = tempfile.mkstemp(dir=home, prefix=".model-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=2)
    Path(temporary).replace(home / _RECORD)
    return entry


def remove(name: str) -> Entry:
    """Forget a model and remove what Rekindle keeps for it; files used in place stay. Raises `ModelNotFound`."""
    entry = lookup(name)
    if entry is None:
        known = ", ".join(e.name for e in entries()) or "none"
        raise ModelNotFound(f"No model {name!r} was pulled. Pulled: {known}.")
    if entry.files.gguf is not None and entry.files.folder.is_relative_to(models_folder()):
        shutil.rmtree(entry.files.folder, ignore_errors=True)  # the converted form is ours
    shutil.rmtree(entry.home)
    return entry


def _read(home: Path) -> Entry | None:
    try:
        entry = _parse(json.loads((home / _RECORD).read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no record, or one that nobody can read: as good as not pulled
    parts = entry.files.parts
    return entry if (all(part.is_file() for part in parts) if parts else entry.files.converted) else None


def _parse(record: Any) -> Entry:
    gguf = record["gguf"]
    files = ModelFiles(record["name"], Path(record["folder"]), None if gguf is None else Path(gguf))
    return Entry(record["name"], record["kind"], record["source"], files, record["added"])


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file()]
