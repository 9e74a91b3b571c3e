"""Models of well-known shapes with random weights: for time only, never for quality."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rekindle.core.identity import digest_of_fields
from rekindle.engine.fake import ByteTokenizer
from rekindle.engine.hf.checkpoint import Fingerprint
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import InvalidSetting

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768 + 1024,
    },
    "llama-2-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768 + 1024,
    },
    "llama-3.2-3b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768 + 1024,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 32768 + 1024,
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def build(shape: str, device: str, dtype: str, seed: int) -> HfEngine:
    """An engine over a random model of that shape. Raises `InvalidSetting` for an unknown one."""
    if shape not in SHAPES:
        raise InvalidSetting(f"--shape {shape!r} is unknown. Use {', '.join(SHAPES)}.")
    placement = choose_placement(device, dtype)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**SHAPES[shape])
    with torch.device(placement.device):
        model = AutoModelForCausalLM.from_config(config, dtype=placement.dtype).eval()
    made_of = digest_of_fields(shape, str(placement.dtype), str(seed))  # reading all of it would take a minute
    known = Fingerprint(made_of, made_of, made_of, made_of)
    return HfEngine(model, ByteTokenizer(), name=shape, placement=placement, fingerprint=lambda: known)
