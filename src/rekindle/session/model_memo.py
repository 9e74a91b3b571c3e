"""What is remembered of a model between runs, so that a stored answer is found before the model is loaded.

An answer is found under the identity of the model that wrote it. A session that kept an answer notes that identity
here, under everything that decides it: the files of the model and how its engine is loaded.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass

from rekindle.core.identity import digest_of_fields
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.models.sources import absolute_spec, model_version
from rekindle.settings import ENGINE_SETTINGS, Settings

_MAX_MODELS = 64
_ENGINE_PACKAGES = ("torch", "transformers", "xllamacpp", "llama_cpp", "onnxruntime")  # what engine="auto" looks for
# Variables that change what an engine loads or how it computes.
_VARIABLES = ("CUDA_", "GGML_", "HF_", "HIP_", "MKL_", "OLLAMA_", "OMP_", "PYTHONPATH", "PYTORCH_", "TORCH_")


@dataclass(frozen=True)
class AnsweringModel:
    """What a stored answer depends on: digests of the identity and tokenizer of the model that wrote it, of the
    embedder that found its passages, and how many of those it can use."""

    name: str
    identity: str
    tokenizer: str
    embedder: str
    passages: int


class ModelMemo:
    """The model of a name and settings, as it was when it last answered."""

    def __init__(self, model: str, settings: Settings, version: str | None = None) -> None:
        """Make it before the model is loaded, or give the version that was loaded: files that change later belong to
        another one.
        """
        self._model = absolute_spec(model)
        self._settings = settings
        self._memo = JsonMemo(home_folder() / "answering_models.json", _MAX_MODELS)
        self._key = self._find_key(version)

    def recall(self) -> AnsweringModel | None:
        """The model; None if it did not answer yet, or was loaded from other files or in another way."""
        found = None if self._key is None else self._memo.recall(self._key)
        try:
            return None if found is None else AnsweringModel(**found)
        except TypeError:
            return None

    def keep(self, model: AnsweringModel) -> None:
        """Note the model that just answered."""
        self._key = key = self._key or self._find_key()  # it may have been fetched meanwhile
        if key is not None and self._memo.recall(key) != asdict(model):
            self._memo.keep(key, asdict(model))

    def _find_key(self, version: str | None = None) -> str | None:
        """None if the model is not on this machine."""
        version = version or model_version(self._model)
        if version is None:
            return None
        settings = {name: getattr(self._settings, name) for name in (*ENGINE_SETTINGS, "embedder")}
        paths = {name: settings[name] and absolute_spec(settings[name]) for name in ("embedder", "llama_library")}
        way = {
            "python": sys.executable,
            "packages": [name for name in _ENGINE_PACKAGES if importlib.util.find_spec(name) is not None],
            "variables": engine_variables(),
            "settings": settings | paths,
        }
        return digest_of_fields("rekindle/model_memo/1", self._model, json.dumps(way), version)


def engine_variables() -> dict[str, str]:
    """The environment variables that change what an engine loads or how it computes."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
