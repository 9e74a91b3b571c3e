"""GGUF models of other tools on this machine, used in place: Ollama, the Hugging Face hub's cache, LM Studio.

HF_HUB_CACHE/models--ORG--NAME/snapshots/REVISION/FILE.gguf    links to the blobs beside them
~/.lmstudio/models/ORG/NAME/FILE.gguf
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import ModelError
from rekindle.models import ollama
from rekindle.models.files import ModelFiles, as_path, find_paths, is_file, modified_seconds, part_names, read_text
from rekindle.models.gguf import embeds
from rekindle.models.hub import hub_cache, is_repository, model_names, spec_for

_HUB_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder in which a tool keeps the files of one repository."""

    tool: str
    folder: Path
    pattern: str = "*.gguf"

    def file_names(self) -> set[str]:
        """The GGUF files, by their paths in the folder."""
        paths = find_paths(self.folder, self.pattern)
        return {path.relative_to(self.folder).as_posix() for path in paths if is_file(path)}

    def has_folder_form(self) -> bool:
        """Whether it has the model in Hugging Face form."""
        return is_file(self.folder / "config.json") and bool(find_paths(self.folder, "*.safetensors"))


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A GGUF model of a repository: its first file, and the names of missing parts."""

    tool: str
    path: Path
    missing: tuple[str, ...]


def folders_of(repository: str) -> list[ModelFolder]:
    """The folders of a repository, `ORG/NAME`, by preference: the hub's snapshots (main first, then the newest), then
    LM Studio's."""
    hub = hub_cache() / (_HUB_PREFIX + repository.replace("/", "--"))
    main = read_text(hub / "refs" / "main").strip()
    snapshots = find_paths(hub, "snapshots/*")
    snapshots.sort(key=lambda path: (path.name == main, modified_seconds(path)), reverse=True)
    return [ModelFolder("Hugging Face cache", snapshot, "**/*.gguf") for snapshot in snapshots] + [
        ModelFolder("LM Studio", folder / repository) for folder in studio_folders()
    ]


def find_models(repository: str) -> dict[str, FoundModel]:
    """The GGUF models of a repository in all folders, by name; a complete one is preferred."""
    found: dict[str, FoundModel] = {}
    for folder in folders_of(repository):
        there = folder.file_names()
        for name in model_names(there):
            missing = tuple(part for part in part_names(name) if part not in there)
            if name not in found or (found[name].missing and not missing):
                found[name] = FoundModel(folder.tool, folder.folder / name, missing)
    return dict(sorted(found.items()))


def repositories() -> list[str]:
    """All repositories with a folder, sorted."""
    hub = [path.name.removeprefix(_HUB_PREFIX) for path in find_paths(hub_cache(), f"{_HUB_PREFIX}*--*")]
    studio = [f"{path.parent.name}/{path.name}" for folder in studio_folders() for path in find_paths(folder, "*/*")]
    return sorted({*studio, *(name.replace("--", "/", 1) for name in hub)})


def studio_folders() -> list[Path]:
    """LM Studio's model folders: the one in its settings, and the one in its home, which may have moved."""
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


@dataclass(frozen=True, slots=True)
class InPlaceModel:
    """A GGUF model of another tool; `name` is what to type for it."""

    name: str
    kind: str
    tool: str
    gguf: Path
    size_bytes: int


def list_in_place(report: Callable[[str], None] = lambda _: None) -> list[InPlaceModel]:
    """All models of other tools, without unreadable and incomplete ones. Raises nothing.

    `report` gets a sentence for each model that Ollama has and that cannot be used.
    """
    return [*_in_ollama(report), *_in_repositories()]


def _in_ollama(report: Callable[[str], None]) -> Iterator[InPlaceModel]:
    for sentence in ollama.closed_folders():
        report(sentence)
    for name in ollama.names():
        try:
            yield _describe(str(name), "Ollama", ollama.find_weights(name))
        except ModelError as error:
            report(str(error))
        except OSError as error:
            report(f"{name} cannot be read ({error}).")


def _in_repositories() -> Iterator[InPlaceModel]:
    for repository in repositories():
        if not is_repository(repository):
            continue  # some other folder
        models = find_models(repository)
        for name, model in models.items():
            with suppress(OSError):  # a part is missing
                yield _describe(spec_for(repository, name, list(models)), model.tool, model.path)


def _describe(name: str, tool: str, gguf: Path) -> InPlaceModel:
    parts = ModelFiles(name, gguf.parent, gguf).parts
    return InPlaceModel(
        name, "embedder" if embeds(gguf) else "decoder", tool, gguf, sum(p.stat().st_size for p in parts)
    )
