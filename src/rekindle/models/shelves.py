"""GGUF files that other tools keep on this machine by repository: the cache of the Hugging Face hub, and LM Studio.

HF_HUB_CACHE/models--ORG--NAME/snapshots/REVISION/FILE.gguf    links to the blobs beside them
~/.lmstudio/models/ORG/NAME/FILE.gguf
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from rekindle.core.model import part_names
from rekindle.models.foreign import as_path, find_paths, is_file, modified_seconds, read_text
from rekindle.models.quant import model_names

_HUB_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class Shelf:
    """A folder in which a tool keeps files of one repository, and those of its files that are GGUF."""

    keeper: str
    folder: Path
    pattern: str = "*.gguf"

    def file_names(self) -> set[str]:
        """The names of the GGUF files below the folder."""
        paths = find_paths(self.folder, self.pattern)
        return {path.relative_to(self.folder).as_posix() for path in paths if is_file(path)}

    def has_folder_form(self) -> bool:
        """Whether the model is there in Hugging Face form."""
        return is_file(self.folder / "config.json") and bool(find_paths(self.folder, "*.safetensors"))


@dataclass(frozen=True, slots=True)
class Shelved:
    """A GGUF model on a shelf: its first file, and the names of the parts that are not there."""

    keeper: str
    path: Path
    missing: tuple[str, ...]


def shelves_of(repository: str) -> list[Shelf]:
    """The shelves for a repository, `ORG/NAME`, in the order of preference: the hub's first, its main branch before
    its other snapshots, and the newer before the older of them."""
    hub = hub_cache() / (_HUB_PREFIX + repository.replace("/", "--"))
    main = read_text(hub / "refs" / "main").strip()
    snapshots = find_paths(hub, "snapshots/*")
    snapshots.sort(key=lambda path: (path.name == main, modified_seconds(path)), reverse=True)
    return [Shelf("Hugging Face cache", snapshot, "**/*.gguf") for snapshot in snapshots] + [
        Shelf("LM Studio", folder / repository) for folder in studio_folders()
    ]


def models_of(repository: str) -> dict[str, Shelved]:
    """The GGUF models of a repository on all shelves, by their names below its folder; a whole one where there is."""
    found: dict[str, Shelved] = {}
    for shelf in shelves_of(repository):
        there = shelf.file_names()
        for name in model_names(there):
            missing = tuple(part for part in part_names(name) if part not in there)
            if name not in found or (found[name].missing and not missing):
                found[name] = Shelved(shelf.keeper, shelf.folder / name, missing)
    return dict(sorted(found.items()))


def repositories() -> list[str]:
    """The repositories for which there is a folder, sorted."""
    hub = [path.name.removeprefix(_HUB_PREFIX) for path in find_paths(hub_cache(), f"{_HUB_PREFIX}*--*")]
    studio = [f"{path.parent.name}/{path.name}" for folder in studio_folders() for path in find_paths(folder, "*/*")]
    return sorted({*studio, *(name.replace("--", "/", 1) for name in hub)})


def hub_cache() -> Path:
    """Where the hub's client keeps what it fetched, by its own rules."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if chosen := os.environ.get(name):
            return as_path(chosen)
    if home := os.environ.get("HF_HOME"):
        return as_path(home) / "hub"
    return as_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def studio_folders() -> list[Path]:
    """Where LM Studio keeps models: in the folder its settings name, and below its home, wherever that moved to."""
    moved = read_text(as_path("~/.lmstudio-home-pointer")).strip()
    homes = [as_path(home) for home in (moved, "~/.lmstudio", "~/.cache/lm-studio") if home]
    folders = []
    for home in homes:
        try:
            settings = json.loads(read_text(home / "settings.json"))
        except (ValueError, RecursionError):
            settings = None
        chosen = settings.get("downloadsFolder") if isinstance(settings, dict) else None
        folders += [as_path(chosen)] if isinstance(chosen, str) and chosen else []
        folders.append(home / "models")
    return list(dict.fromkeys(folders))
