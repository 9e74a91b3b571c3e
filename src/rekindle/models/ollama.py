"""Models that Ollama has pulled, used in place: `ollama:NAME`, `ollama:USER/NAME:TAG`, `ollama:HOST/USER/NAME:TAG`.

    OLLAMA_MODELS, else ~/.ollama/models
    |-- manifests/HOST/USER/NAME/TAG    JSON: the model's layers, each with its kind and digest
    |-- manifests-v2/...                the same, as newer versions write it
    `-- blobs/sha256-DIGEST             the layers; the one with the weights is a GGUF file

Only the weights are used. The chat template is the one in the GGUF file: Ollama's own Go template, system prompt and
parameters are not read. Of a vision model only the language model is used.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rekindle.errors import BrokenModel, ModelNotFound, NotAModel, UnsupportedModel
from rekindle.models.files import as_path, find_paths, is_file
from rekindle.safe_read import parse_untrusted_json

PREFIX = "ollama:"
_HOST, _USER, _TAG = "registry.ollama.ai", "library", "latest"
_HOSTS = (_HOST, "ollama.com")  # two names of one registry, in older and newer manifests
_MANIFESTS = ("manifests-v2", "manifests")
_SERVICE_FOLDERS = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models")

_PART = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_HOST_PART = re.compile(r"\w[\w.:-]{0,255}", re.ASCII)
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_LARGEST_MANIFEST_BYTES = 4 << 20

_LIST = "application/vnd.ollama.manifest.list.v2+json"
_LAYER = "application/vnd.ollama.image."
_GGUF_RUNNERS = ("ollama", "llamacpp")


@dataclass(frozen=True, slots=True)
class OllamaName:
    """A model's full name; Ollama adds the defaults to a short one."""

    name: str
    tag: str = _TAG
    user: str = _USER
    host: str = _HOST

    @property
    def short(self) -> str:
        """The name as Ollama's own commands print and take it."""
        above = [] if self.host == _HOST else [self.host]
        above += [] if not above and self.user == _USER else [self.user]
        return "/".join([*above, f"{self.name}:{self.tag}"])

    def __str__(self) -> str:
        """What to type here."""
        return PREFIX + self.short


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer of a manifest: its kind (`model`, `template`, `projector`, ...) and its blob."""

    kind: str
    digest: str
    size_bytes: int | None


def parse_name(text: str) -> OllamaName:
    """Parse the name after `ollama:`. Raises `ModelNotFound` for an invalid one."""
    path, tag = text.rsplit(":", 1) if text.rfind(":") > text.rfind("/") else (text, _TAG)
    *above, name = path.split("/")
    user, host = (above or [_USER])[-1], above[0] if len(above) == 2 else _HOST
    sound = all(_PART.fullmatch(part) for part in (name, tag, user)) and _HOST_PART.fullmatch(host)
    if len(above) > 2 or not sound:
        raise ModelNotFound(
            f"{PREFIX}{text} is no name of an Ollama model. Write {PREFIX}NAME or {PREFIX}NAME:TAG, as ollama list "
            "shows them."
        )
    return OllamaName(name, tag, user, _HOST if host in _HOSTS else host)


def folders() -> list[Path]:
    """The folders in which Ollama may keep models, in search order."""
    if chosen := os.environ.get("OLLAMA_MODELS"):
        return [as_path(chosen)]
    service = _SERVICE_FOLDERS if sys.platform == "linux" else ()
    return [as_path("~/.ollama/models"), *map(Path, service)]


def names() -> list[OllamaName]:
    """The models that Ollama has, sorted; from the names of its manifests alone."""
    found = set()
    for folder in (folder / kind for folder in folders() for kind in _MANIFESTS):
        for path in find_paths(folder, "*/*/*/*"):
            host, user, name, tag = path.relative_to(folder).parts
            if all(map(_PART.fullmatch, (user, name, tag))) and _HOST_PART.fullmatch(host) and is_file(path):
                found.add(OllamaName(name, tag, user, _HOST if host in _HOSTS else host))
    return sorted(found, key=str)


def closed_folders() -> list[str]:
    """A sentence for each folder of Ollama whose models this user may not even list."""
    sentences = []
    for folder in folders():
        try:
            next((folder / _MANIFESTS[-1]).iterdir(), None)
        except PermissionError as refused:
            sentences.append(f"Ollama's models cannot be listed: {_say_closed(refused.filename)}")
        except OSError:  # none here
            continue
    return sentences


def find_weights(name: OllamaName) -> Path:
    """The GGUF file of a model; its header is not checked.

    Raises `ModelNotFound` (with similar names, and how to get it), `BrokenModel` for a damaged or missing manifest or
    blob, `NotAModel` for a model without GGUF, `UnsupportedModel` for one with adapters or split weights.
    """
    refused = None
    for folder in folders():
        try:
            for path in _manifest_paths(folder, name):
                if (data := _read_manifest(path, name)) is not None:
                    return _weights_of(folder, name, data)
        except PermissionError as error:
            refused = error
    if refused is not None:
        raise ModelNotFound(f"{name} cannot be read: {_say_closed(refused.filename)}") from refused
    respelled = [other for other in names() if str(other).lower() == str(name).lower() and other != name]
    if respelled:  # Ollama ignores case too
        return find_weights(respelled[0])
    raise ModelNotFound(_say_missing(name))


def names_near(name: str) -> list[OllamaName]:
    """The models with a similar name, ignoring user and tag."""
    known = names()
    close = get_close_matches(name, {other.name for other in known}, n=3)
    return [other for other in known if other.name in close]


def _say_closed(path: str) -> str:
    return (
        f"{path} is closed to this user, as Ollama's service keeps it. Join its group (sudo usermod -aG ollama $USER, "
        "then log in again), or set OLLAMA_MODELS to a folder of your own."
    )


def _say_missing(name: OllamaName) -> str:
    if not any(find_paths(folder, "*") for folder in folders()):
        looked = ", ".join(map(str, folders()))
        return (
            f"Ollama has no models here (looked in {looked}). Set OLLAMA_MODELS to where it keeps them, or get this "
            f"one with: ollama pull {name.short}"
        )
    near = names_near(name.name)
    near = [other for other in near if replace(other, tag=name.tag) == name] or near or names()
    has = f" It has {', '.join(map(str, near[:5]))}." if near else ""
    return f"Ollama has no {name.short}.{has} Get it with: ollama pull {name.short}"


def _manifest_paths(folder: Path, name: OllamaName) -> list[Path]:
    hosts = _HOSTS if name.host == _HOST else (name.host,)
    return [folder / kind / host / name.user / name.name / name.tag for kind in _MANIFESTS for host in hosts]


def _read_manifest(path: Path, name: OllamaName) -> dict[str, Any] | None:
    """The manifest in a file; None if there is no such file. Raises `PermissionError` or `BrokenModel`."""
    again = f"Get it again with: ollama pull {name.short}"
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except PermissionError:
        raise
    except OSError as error:
        raise BrokenModel(f"{path} cannot be read ({error.strerror}). {again}") from error
    if len(data) > _LARGEST_MANIFEST_BYTES:
        raise BrokenModel(f"{path} is no manifest: it is larger than {_LARGEST_MANIFEST_BYTES:,} bytes. {again}")
    try:
        manifest = parse_untrusted_json(data)
    except ValueError as error:
        raise BrokenModel(f"{path} is not JSON. {again}") from error
    if not isinstance(manifest, dict):
        raise BrokenModel(f"{path} is no manifest: it is not an object. {again}")
    return manifest


def _weights_of(folder: Path, name: OllamaName, manifest: dict[str, Any]) -> Path:
    layers = _layers(name, _for_gguf(folder, name, manifest))
    models = [layer for layer in layers if layer.kind == "model"]
    if any(layer.kind == "adapter" for layer in layers):
        raise UnsupportedModel(
            f"{name} puts an adapter (LoRA) over its weights, which is not applied here. Merge both into one GGUF "
            "file, or use the model without it."
        )
    if len(models) > 1:
        raise UnsupportedModel(
            f"{name} has its weights in {len(models)} layers. Use one whose weights are one GGUF file."
        )
    if any(layer.kind == "tensor" for layer in layers):
        raise NotAModel(f"{name} is kept as single tensors, not as GGUF. Pull it under a tag that is GGUF.")
    if not models:
        raise NotAModel(f"{name} has no weights here: it runs on Ollama's servers. Pull one that runs on this machine.")
    return _blob(folder, name, models[0])


def _for_gguf(folder: Path, name: OllamaName, manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest, or the one for GGUF from a list with one for each runner."""
    if manifest.get("mediaType") != _LIST:
        return manifest
    choices = manifest.get("manifests")
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and (choice.get("format") == "gguf" or choice.get("runner") in _GGUF_RUNNERS):
            if "layers" in choice:
                return choice
            path = _blob(folder, name, _Layer("manifest", _text_of(choice, "digest"), None))
            return _read_manifest(path, name) or {}
    raise NotAModel(f"{name} is not here as GGUF, only for other runners. Use one that Ollama has as GGUF.")


def _layers(name: OllamaName, manifest: dict[str, Any]) -> list[_Layer]:
    layers = manifest.get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise BrokenModel(f"The manifest of {name} lists no layers. Get it again with: ollama pull {name.short}")
    return [
        _Layer(
            kind=_text_of(layer, "mediaType").partition(";")[0].removeprefix(_LAYER),
            digest=_text_of(layer, "digest"),
            size_bytes=size if isinstance(size := layer.get("size"), int) else None,
        )
        for layer in layers
    ]


def _text_of(fields: dict[str, Any], name: str) -> str:
    """The text field of that name, or an empty text."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _blob(folder: Path, name: OllamaName, layer: _Layer) -> Path:
    """The blob of a layer, with its size checked. Raises `PermissionError` or `BrokenModel`."""
    again = f"Get it again with: ollama pull {name.short}"
    digest = _DIGEST.fullmatch(layer.digest)
    if digest is None:
        raise BrokenModel(f"The manifest of {name} names {layer.digest[:80]!r}, which is no SHA-256 digest. {again}")
    blob = folder / "blobs" / f"sha256-{digest[1]}"
    if not is_file(blob) and is_file(older := blob.with_name(f"sha256:{digest[1]}")):
        blob = older
    try:
        with blob.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
    except PermissionError:
        raise
    except OSError as error:
        cut = " (it was not fetched to the end)" if find_paths(blob.parent, f"{blob.name}-partial*") else ""
        raise BrokenModel(f"{name} lacks its file {blob}{cut}. {again}") from error
    if layer.size_bytes is not None and size_bytes != layer.size_bytes:
        raise BrokenModel(f"{blob} has {size_bytes:,} bytes, the manifest of {name} says {layer.size_bytes:,}. {again}")
    return blob
