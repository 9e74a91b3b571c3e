"""The model a bench measures with: a real one, or random weights of a well-known shape."""

from __future__ import annotations

from pathlib import Path

from benchmarks.base import BenchOptions, scratch
from rekindle.engine.base import Engine
from rekindle.engine.load import EngineOptions, convert_gguf, load_engine
from rekindle.errors import InvalidSetting
from rekindle.models.pull import obtain

# For models that nobody taught to chat: an answer continues what was said.
_PLAIN_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}Answer:"
_plain = scratch()  # until the process ends: the digests of weights are read late


def settle(engine: Engine) -> None:
    """Wait until the device is idle."""
    if engine.device != "cpu":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def load(options: BenchOptions) -> Engine:
    """Load it. Raises as `load_engine` does, and `InvalidSetting` for a shape on another engine than hf."""
    if options.shape is not None:
        if options.engine == "llamacpp":
            raise InvalidSetting("--shape builds models for --engine hf. Give llama.cpp a real one with --model.")
        from benchmarks.shapes import build

        return build(options.shape, options.device, options.dtype, options.seed)
    chosen = EngineOptions(options.engine, options.device, options.dtype)
    engine = load_engine(options.model, chosen)
    if engine.tokenizer.template or options.engine != "hf":
        return engine
    engine.close()
    return load_engine(_with_template(options.model), chosen)


def _with_template(model: str) -> str:
    """A folder with the files of a model that has no chat template, and a plain one."""
    files, folder = obtain(model), Path(_plain.name) / Path(model).stem
    convert_gguf(files)
    folder.mkdir()
    for path in files.folder.iterdir():
        folder.joinpath(path.name).symlink_to(path.resolve())
    folder.joinpath("chat_template.jinja").write_text(_PLAIN_TEMPLATE, "utf-8")
    return str(folder)
