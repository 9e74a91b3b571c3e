"""LoRA adapters in llama.cpp: its own GGUF files, and PEFT's, converted on loading.

llama.cpp applies an adapter to whole batches, so rows with different adapters are computed in separate batches.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.core.adapter import Lora, LoraPair, Matrix
from rekindle.engine.llamacpp.c_api import llama
from rekindle.engine.llamacpp.loaded_model import LoadedContext, LoadedModel, capture_log
from rekindle.engine.lora_files import name_pattern
from rekindle.errors import AdapterRefused, RekindleError

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_USUAL_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# The names of linear layers in a GGUF file, by architecture.
_NAMES: Mapping[str, Mapping[str, str]] = dict.fromkeys(("llama", "qwen2", "qwen3", "gemma2", "gemma3"), _USUAL_NAMES)
_PERMUTED = frozenset({"llama"})  # GGUF files of these permute queries and keys
_ALIGN_BYTES = 32
_TEXT, _FLOAT, _F32 = 8, 6, 0  # GGUF's types


class LlamaLoras:
    """The adapters of one model. Used under the lock of its `KvBuffer`."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._loaded: dict[str, tuple[Any, float]] = {}  # pointer and scale, by digest
        self._loads: Counter[str] = Counter()
        self._set: str | None = None

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def load(self, lora: Lora) -> None:
        """Load an adapter. Raises `AdapterRefused`."""
        if lora.digest not in self._loaded:
            self._loaded[lora.digest] = self._read(lora)
        self._loads[lora.digest] += 1

    def _read(self, lora: Lora) -> tuple[Any, float]:
        if lora.file is not None:
            if replace(lora).digest != lora.digest:  # the copy reads the file again
                raise AdapterRefused(f"{lora.source} was changed since it was loaded. Load it again under its name.")
            return self._init(lora.file, lora.source), lora.file_scale
        with tempfile.TemporaryDirectory(prefix="rekindle-lora-") as folder:
            path = Path(folder) / "adapter.gguf"
            path.write_bytes(self._converted(lora))
            return self._init(path, lora.source), 1.0

    def unload(self, digest: str, context: LoadedContext) -> None:
        """Unload an adapter, if it is loaded."""
        if self._loads[digest] > 1:
            self._loads[digest] -= 1
            return
        del self._loads[digest]
        if self._set == digest:
            self.use(None, context)
        pointer, _ = self._loaded.pop(digest, (None, 0.0))
        if pointer:
            llama.llama_adapter_lora_free(pointer)

    def use(self, digest: str | None, context: LoadedContext) -> None:
        """Compute with this adapter from now on, or with none."""
        if digest == self._set:
            return
        pointer, scale = (None, 0.0) if digest is None else self._loaded[digest]
        count = 0 if digest is None else 1
        adapters = (ctypes.c_void_p * 1)(pointer)
        if llama.llama_set_adapters_lora(context.pointer, adapters, count, (ctypes.c_float * 1)(scale)):
            raise RekindleError("llama.cpp could not put the adapter on. Its log has the reason.")
        self._set = digest

    def _init(self, path: Path, source: str) -> Any:
        said = capture_log()
        said.clear()
        pointer = llama.llama_adapter_lora_init(self._model.pointer, os.fsencode(path))
        if not pointer:
            reason = "; ".join(said) or "it gives no reason"
            raise AdapterRefused(f"llama.cpp does not put {source} on this model: {reason}.")
        return pointer

    def _converted(self, lora: Lora) -> bytes:
        architecture = str(self._model.metadata("general.architecture"))
        if architecture not in _NAMES:
            raise AdapterRefused(
                f"{lora.source}: it is not known here how layers are called in a {architecture!r} model of llama.cpp. "
                "Convert it with llama.cpp's convert_lora_to_gguf.py and give the .gguf file, or use engine='hf'."
            )
        self._check_whole(lora, architecture)
        tensors: dict[str, Matrix] = {}
        for name, pair in lora.pairs.items():
            known = self._name(name, architecture)
            if known is None:
                raise AdapterRefused(f"{lora.source} changes {name}, which is not known in llama.cpp. Use engine='hf'.")
            tensors[f"{known}.weight.lora_a"] = pair.down
            tensors[f"{known}.weight.lora_b"] = self._ordered(known, pair, architecture) * np.float32(pair.scale)
        return _gguf_bytes(architecture, tensors)

    def _check_whole(self, lora: Lora, architecture: str) -> None:
        if lora.copies:
            raise AdapterRefused(f"{lora.source} brings weights of {next(iter(lora.copies))} along. Use engine='hf'.")
        layers = range(int(llama.llama_model_n_layer(self._model.pointer)))
        names = [f"model.layers.{number}.{part}" for number in layers for part in _NAMES[architecture]]
        for name in names:
            if name not in lora.pairs and any(name_pattern(pattern).matches(name) for pattern in lora.targets):
                raise AdapterRefused(
                    f"{lora.source} has no matrices for {name}, which it says it changes. Get it again."
                )

    def _name(self, name: str, architecture: str) -> str | None:
        if name == "lm_head":
            return "output"
        found = _LAYER.match(name)
        part = _NAMES[architecture].get(found[2]) if found is not None else None
        return None if found is None or part is None else f"blk.{found[1]}.{part}"

    def _ordered(self, name: str, pair: LoraPair, architecture: str) -> Matrix:
        """The rows of `up` in llama.cpp's order: pairs that are rotated together are adjacent."""
        kind = name.rpartition(".")[2]
        if architecture not in _PERMUTED or kind not in ("attn_q", "attn_k"):
            return pair.up
        count = llama.llama_model_n_head if kind == "attn_q" else llama.llama_model_n_head_kv
        heads = int(count(self._model.pointer))
        outputs, rank = pair.up.shape
        if heads < 1 or outputs % (2 * heads):
            raise AdapterRefused(f"The adapter has {outputs} outputs for {name}, which has {heads} heads here.")
        apart = pair.up.reshape(heads, 2, outputs // heads // 2, rank)
        ordered: Matrix = apart.swapaxes(1, 2).reshape(outputs, rank)
        return ordered


def _gguf_bytes(architecture: str, tensors: Mapping[str, Matrix]) -> bytes:
    """A GGUF file with these tensors in llama.cpp's adapter format; the scale is already applied."""
    about = {"general.type": "adapter", "general.architecture": architecture, "adapter.type": "lora"}
    head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(about) + 1)]
    for key, value in about.items():
        head += [_text(key), struct.pack("<I", _TEXT), _text(value)]
    head += [_text("adapter.lora.alpha"), struct.pack("<If", _FLOAT, 0.0)]  # 0: no scale but the one passed later
    data: list[bytes] = []
    place = 0
    for name, tensor in tensors.items():
        rows, columns = tensor.shape
        head += [_text(name), struct.pack("<IQQIQ", 2, columns, rows, _F32, place)]
        data += _padded(np.ascontiguousarray(tensor, "<f4").tobytes())
        place = sum(map(len, data))
    return b"".join([*_padded(b"".join(head)), *data])


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _padded(part: bytes) -> Iterator[bytes]:
    yield part
    yield bytes(-len(part) % _ALIGN_BYTES)
