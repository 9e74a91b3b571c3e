"""From a model's name to a loaded engine."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from rekindle.core.size import human_bytes
from rekindle.engine.base import Engine, Reserve
from rekindle.engine.llamacpp.options import LlamaOptions
from rekindle.engine.onnx.onnx_options import GRAPH_DTYPES, OnnxOptions
from rekindle.errors import EngineMissing, InvalidSetting, ModelError, UnsupportedModel
from rekindle.models.download import Progress, require_space
from rekindle.models.files import ModelFiles, digest_of_files
from rekindle.models.gguf import read_header
from rekindle.models.hf_folder import check_folder
from rekindle.models.onnx_folder import OnnxForm
from rekindle.models.onnx_graph import read_graph
from rekindle.models.pull import obtain
from rekindle.models.registry import lookup
from rekindle.models.sources import GgufModel, HubModel, OllamaModel, OnnxSource, WheelModel, find, parse
from rekindle.settings import Settings

log = logging.getLogger("rekindle.engine")

EngineName = Literal["hf", "llamacpp", "onnx"]
ENGINES: dict[EngineName, tuple[str, ...]] = {  # with the packages that each needs
    "hf": ("torch", "transformers", "accelerate", "gguf", "safetensors"),
    "llamacpp": ("xllamacpp", "jinja2"),
    "onnx": ("onnxruntime", "jinja2"),
}
_INSTEAD = {"xllamacpp": "llama_cpp"}  # brings the same library
_TITLES = {"hf": "The Hugging Face engine", "llamacpp": "The llama.cpp engine", "onnx": "The ONNX Runtime engine"}

FindPackage = Callable[[str], object]


def _silent(_stage: str, _done: int, _total: int) -> None:
    pass


@dataclass(frozen=True)
class EngineOptions:
    """How to run a model: engine, device, dtype, context length."""

    engine: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    context_tokens: int | None = None
    llama: LlamaOptions = field(default_factory=LlamaOptions)
    onnx: OnnxOptions = field(default_factory=OnnxOptions)

    def with_context(self, tokens: int) -> EngineOptions:
        """The same with a context of that number of tokens."""
        llama, onnx = replace(self.llama, context_tokens=tokens), replace(self.onnx, context_tokens=tokens)
        return replace(self, context_tokens=tokens, llama=llama, onnx=onnx)

    @classmethod
    def of(cls, settings: Settings) -> EngineOptions:
        """The part of the settings that is about the engine. Raises `InvalidSetting`."""
        names = {known.name for known in fields(LlamaOptions)} & {known.name for known in fields(Settings)}
        llama = LlamaOptions(context_tokens=settings.context, **{name: getattr(settings, name) for name in names})
        onnx = OnnxOptions(settings.device, settings.context, settings.threads, settings.batch_tokens)
        return cls(settings.engine, settings.device, settings.dtype, settings.context, llama, onnx)


def load_engine(
    model: str, options: EngineOptions, progress: Progress | None = None, reserve: Reserve | None = None
) -> Engine:
    """Find (or pull) a model and load it, once `reserve` has made room for it.

    Raises `ModelError`, `EngineMissing`, `InvalidSetting`, and what `reserve` raises.
    """
    have = packages_beside(options.llama.llama_library)
    name = choose_engine(model, options.engine, have)
    require_packages(name, have)  # before anything is fetched
    load = {"llamacpp": _load_llamacpp, "onnx": _load_onnx, "hf": _load_hf}[name]
    return load(model, options, progress or _silent, reserve)


def choose_engine(model: str, wanted: str, have: FindPackage = importlib.util.find_spec) -> EngineName:
    """The engine for a model: the wanted one, else the one that suits its files, of those installed."""
    for known in ENGINES:
        if wanted == known:
            return known
    if wanted != "auto":
        raise InvalidSetting(f"engine={wanted!r} is unknown. Use auto, {', '.join(ENGINES)}.")
    if _is_graph(model):
        return "onnx"
    ordered: tuple[EngineName, EngineName] = ("llamacpp", "hf") if _is_gguf(model) else ("hf", "llamacpp")
    return next((name for name in ordered if not missing_packages(name, have)), ordered[0])


def kind_of(engine: Engine) -> EngineName:
    """Which engine this is, without importing any."""
    package = type(engine).__module__.rpartition(".")[0].rpartition(".")[2]
    return next((name for name in ENGINES if name == package), "hf")


def _is_graph(model: str) -> bool:
    """Whether a model is an ONNX graph and nothing else."""
    entry = lookup(model)
    source = parse(model)
    named = isinstance(source, HubModel) and (source.wanted or "").endswith(".onnx")
    return isinstance(source, OnnxSource) or named or (entry is not None and entry.files.onnx is not None)


def _is_gguf(model: str) -> bool:
    """Whether a model exists only as GGUF. The named ones come in both forms."""
    source = parse(model)
    if isinstance(source, WheelModel):
        return False
    if isinstance(source, (GgufModel, OllamaModel)) or (isinstance(source, HubModel) and source.wanted is not None):
        return True
    try:
        return find(model).gguf is not None
    except ModelError:  # not here yet: it is fetched in the engine's form
        return False


def missing_packages(name: EngineName, have: FindPackage = importlib.util.find_spec) -> list[str]:
    """The packages that an engine needs and that are not installed."""
    return [package for package in ENGINES[name] if not (have(package) or have(_INSTEAD.get(package, package)))]


def packages_beside(llama_library: str | None) -> FindPackage:
    """Finds packages. With a library of llama.cpp of your own you need no package that brings one."""
    own = {"xllamacpp"} if llama_library is not None else set()
    return lambda package: package in own or importlib.util.find_spec(package)


def require_packages(name: EngineName, have: FindPackage = importlib.util.find_spec) -> None:
    """Raise `EngineMissing` if an engine's packages are not installed."""
    if lacking := missing_packages(name, have):
        extras = "llamacpp,knowledge" if name == "llamacpp" else name
        raise EngineMissing(
            f"{_TITLES[name]} needs {', '.join(lacking)}. Install it with: pip install 'rekindle-llm[{extras}]'"
        )


def convert_gguf(files: ModelFiles, progress: Progress = _silent) -> None:
    """Convert a GGUF model to Hugging Face form unless that exists: once, about half a minute."""
    if files.gguf is None or files.converted:
        return
    if len(files.parts) > 1:
        raise UnsupportedModel(
            f"{files.name} is split into {len(files.parts)} GGUF files, which the Hugging Face engine cannot convert. "
            "Use engine='llamacpp'."
        )
    require_space(files.folder.parent, 4 * read_header(files.gguf).values, f"The converted form of {files.name}")
    from rekindle.engine.hf import checkpoint

    progress("convert", 0, 1)
    checkpoint.convert_gguf(files.gguf, files.folder)
    progress("convert", 1, 1)


def _load_hf(model: str, options: EngineOptions, progress: Progress, reserve: Reserve | None) -> Engine:
    _refuse_llama_options(options.llama)
    files = obtain(model, progress)
    if options.engine == "auto" and files.gguf is not None and not files.converted and _is_gguf(model):
        size = human_bytes(4 * read_header(files.gguf).values)
        log.warning(
            "llama.cpp is not installed, so %s is converted for transformers first, once (%s). To run it as it is: "
            "pip install 'rekindle-llm[llamacpp,knowledge]'",
            files.name,
            size,
        )
    convert_gguf(files, progress)
    _digest(check_folder(files.folder), progress)
    progress("load", 0, 1)
    from rekindle.engine.hf.engine import HfEngine  # takes seconds

    engine = HfEngine.load(
        files,
        device=options.device,
        dtype=options.dtype,
        context_tokens=options.context_tokens,
        reserve=reserve,
    )
    progress("load", 1, 1)
    return engine


def _refuse_llama_options(given: LlamaOptions, *taken: str) -> None:
    """Raise `InvalidSetting` for settings that only llama.cpp takes, but for those in `taken`."""
    plain = LlamaOptions(given.device, given.context_tokens, llama_library=given.llama_library)
    for name in (known.name for known in fields(LlamaOptions) if known.name not in taken):
        value = getattr(given, name)
        if value != getattr(plain, name):
            raise InvalidSetting(f"{name}={value!r} is for llama.cpp. Leave it out, or use engine='llamacpp'.")


def _load_onnx(model: str, options: EngineOptions, progress: Progress, reserve: Reserve | None) -> Engine:
    _refuse_llama_options(options.llama, "threads", "batch_tokens")
    forms = [form for form, dtype in GRAPH_DTYPES.items() if options.dtype in ("auto", dtype)]
    if not forms:
        raise InvalidSetting(
            f"dtype={options.dtype!r} is unknown to ONNX Runtime. Use auto, {', '.join(GRAPH_DTYPES.values())}."
        )
    if options.dtype != "auto" and _is_graph(model):
        raise InvalidSetting(f"dtype={options.dtype!r} is for models that are exported: a graph has its own numbers.")
    from rekindle.engine.onnx.graph_runner import choose_provider
    from rekindle.engine.onnx.onnx_engine import OnnxEngine

    choose_provider(options.device)  # before anything is fetched
    files = next((files for form in forms if (files := obtain(model, progress, form=form)).onnx), None)
    files = files or export_graph(obtain(model, progress, form=forms[0]), forms[0], progress)
    assert files.onnx is not None
    _digest(read_graph(files.onnx).weights, progress)
    progress("load", 0, 1)
    engine = OnnxEngine(files, options.onnx, reserve)
    progress("load", 1, 1)
    return engine


def export_graph(files: ModelFiles, form: OnnxForm, progress: Progress = _silent) -> ModelFiles:
    """The files with a graph of that precision, exported unless there is one. Raises `EngineMissing` without the
    packages that exporting needs."""
    if files.onnx is not None:
        return files
    from rekindle.engine.onnx.export import export, require_exporter

    require_exporter(files.name, form)
    convert_gguf(files, progress)
    progress("export", 0, 1)
    graph = export(files, form)
    progress("export", 1, 1)
    return replace(files, onnx=graph)


def _load_llamacpp(model: str, options: EngineOptions, progress: Progress, reserve: Reserve | None) -> Engine:
    if options.dtype != "auto":
        raise InvalidSetting(
            f"dtype={options.dtype!r} is for engine='hf': a GGUF file has its own numbers. Those of KV are kv_type."
        )
    from rekindle.engine.llamacpp.c_api import llama
    from rekindle.engine.llamacpp.engine import LlamaCppEngine

    llama.load(options.llama.llama_library)  # before anything is fetched
    files = obtain(model, progress, form="gguf")
    _digest(files.parts, progress)

    def loaded(share: float) -> None:
        progress("load", round(share * 100), 100)

    return LlamaCppEngine(files, options.llama, loaded, reserve)


def _digest(weights: Sequence[Path], progress: Progress) -> None:
    """Read the weights once, which takes a while: their digest is remembered for the identity."""
    digest_of_files(weights, lambda done, total: progress("digest", done, total))
