"""LoRA adapters made up for tests, in the files that PEFT writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]  # down, up, by the name of the layer


def save_lora(folder: Path, pairs: Pairs, **config: Any) -> Path:
    """Write an adapter; `config` goes over what PEFT writes."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(iter(pairs.values()))[0].shape[0]
    written = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": None, **config}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    tensors = {}
    for name, (down, up) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def fake_pairs(seed: int, names: tuple[str, ...] = ("layers.1.k", "layers.1.v", "layers.2.q"), rank: int = 2) -> Pairs:
    """Matrices for layers of the fake engine, large enough to change what it says."""
    random = np.random.default_rng(seed)
    outputs = {"q": 32, "k": 16, "v": 16, "o": 32}
    return {
        name: (
            random.normal(0, 0.5, (rank, 32)).astype(np.float32),
            random.normal(0, 0.5, (outputs[name[-1]], rank)).astype(np.float32),
        )
        for name in names
    }
