"""Tiny models with random weights, of many families: fast stand-ins that are real decoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.text.tokenizer import HfTokenizer
from tests.tiny_tokenizer import VOCABULARY, byte_backend

WINDOW = 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW, "layer_types": _MIXED},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED},
    "gemma2": {"sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": _MIXED, "query_pre_attn_scalar": 8},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "starcoder2": {"sliding_window": WINDOW},
    "cohere2": {"sliding_window": WINDOW, "layer_types": _MIXED},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
}

# Not promised, but driven all the same: the check at load lets them pass.
OTHERS: dict[str, dict[str, Any]] = {
    "cohere": {},
    "gemma": {},
    "mixtral": {"num_local_experts": 4},
    "nemotron": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": _MIXED},
    "phi": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "stablelm": {},
}


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model of the family with random weights large enough that its logits differ clearly."""
    known = FAMILIES.get(family) or OTHERS.get(family) or {}
    config = AutoConfig.for_model(family, **{**_SIZES, **known, **changes})
    torch.manual_seed(seed)
    # Soft-capped attention is only right in transformers' plain implementation.
    how = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    return model.eval()


def save_folder(folder: Path, template: str, **changes: Any) -> Path:
    """A tiny Llama with a byte tokenizer and a chat template, as a model folder."""
    tiny_model("llama", eos_token_id=256, **changes).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token="<|end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer(vocabulary_size: int = VOCABULARY) -> HfTokenizer:
    """The byte-level tokenizer with a small chat template."""

    def render(messages: list[dict[str, Any]]) -> str:
        turns = "".join(f"<|start|>{m['role']}\n{m['content']}<|end|>" for m in messages)
        return turns + "<|start|>assistant\n"

    return HfTokenizer(byte_backend(), render=render, stop_ids=frozenset({256, 258}), vocabulary_size=vocabulary_size)


def tiny_engine(family: str = "llama", **changes: Any) -> HfEngine:
    """An engine over a tiny model."""
    model = tiny_model(family, **changes)
    return HfEngine(model, byte_tokenizer(), name=f"tiny-{family}", placement=choose_placement("cpu", "float32"))
