"""Models of other tools: a folder in Hugging Face form, and a manifest of Ollama."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import numpy as np
from safetensors.numpy import save_file

from rekindle.errors import ModelError
from rekindle.models import ollama
from rekindle.models.hf_folder import check_folder
from tests.fuzz import mutations
from tests.fuzz.family import Family


class Inputs(Family):
    """One of each; a file of it is another one."""

    errors = (ModelError,)

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder / "model", folder / "ollama"
        (self.folder).mkdir()
        (self.folder / "tokenizer.json").write_text("{}")
        save_file({f"w{n}": np.zeros((2, 3), np.float16) for n in range(4)}, self.folder / "model.safetensors")
        self.weights = (self.folder / "model.safetensors").read_bytes()
        self.config = {"model_type": "llama", "hidden_size": 8, "rope_scaling": {"factor": 2.0}}
        self.index = {"metadata": {}, "weight_map": {"w0": "model-1.safetensors", "w1": "model-1.safetensors"}}
        digest = "sha256:" + "a" * 64
        kind = "application/vnd.ollama.image."
        self.manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
            "layers": [{"mediaType": kind + "model", "digest": digest, "size": 4}, {"mediaType": kind + "template"}],
        }
        (self.store / "blobs").mkdir(parents=True)
        (self.store / "blobs" / digest.replace(":", "-")).write_bytes(b"GGUF")
        self.manifest_path = self.store / "manifests" / "registry.ollama.ai" / "library" / "x" / "latest"
        self.manifest_path.parent.mkdir(parents=True)
        os.environ["OLLAMA_MODELS"] = str(self.store)
        self.is_ollama = False

    def prepare(self, random: Random) -> int:
        self.is_ollama = random.randrange(4) == 0
        config, weights = mutations.text_of(self.config).encode(), self.weights
        kind = random.randrange(4)
        if kind == 0:
            config = _changed(random, self.config)
        elif kind == 1:
            length = int.from_bytes(weights[:8], "little")
            header = _changed(random, json.loads(weights[8 : 8 + length]))
            told = len(header) if random.randrange(8) else mutations.number(random, 8, len(header))
            weights = told.to_bytes(8, "little") + header + weights[8 + length :]
        elif kind == 2:
            weights = mutations.bits(random, weights)
        (self.folder / "config.json").write_bytes(config)
        by_index = random.randrange(4) == 0
        (self.folder / "model.safetensors").unlink(missing_ok=True)
        (self.folder / ("model-1.safetensors" if by_index else "model.safetensors")).write_bytes(weights)
        index = _changed(random, self.index)
        (self.folder / "model.safetensors.index.json").write_bytes(index)
        manifest = _changed(random, self.manifest)
        self.manifest_path.write_bytes(manifest)
        return len(config) + len(weights) + len(index) + len(manifest)

    def read(self) -> None:
        if self.is_ollama:
            ollama.find_weights(ollama.parse_name("x"))
        else:
            check_folder(self.folder)


def _changed(random: Random, root: object) -> bytes:
    text = mutations.text_of(mutations.tree(random, root)).encode("utf-8", "surrogatepass")
    return mutations.bits(random, text) if random.randrange(6) == 0 else text
