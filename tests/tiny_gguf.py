"""Tiny GGUF models with random weights, for llama.cpp. The same byte-level vocabulary as `tests.tiny`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from rekindle.models.files import ModelFiles

VOCABULARY = 320
LAYERS, HEADS, KV_HEADS, DIM, INNER = 4, 2, 1, 32, 64
CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTROL = ["<|end|>", "<|start|>", "<|stop|>"]


def add_vocabulary(writer: gguf.GGUFWriter, *, template: str | None = CHAT_TEMPLATE, begins: bool = False) -> None:
    """One token a byte, three control tokens, and a pair that no text spells, because there must be a merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pair = [alphabet[-1], alphabet[-2]]
    tokens = [*alphabet, *CONTROL, "".join(pair)]
    normal, control, unused = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
    kinds = [*[normal] * 256, *[control] * 3, normal]
    tokens += [f"<unused{i}>" for i in range(VOCABULARY - len(tokens))]
    kinds += [unused] * (VOCABULARY - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair)])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)
    writer.add_add_bos_token(begins)
    if template is not None:
        writer.add_chat_template(template)


class Weights:
    """Random tensors, the same for the same seed."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._random = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int, scale: float = 0.2) -> None:
        self._writer.add_tensor(name, (self._random.standard_normal(shape) * scale).astype(np.float32))

    def ones(self, name: str, *shape: int) -> None:
        self._writer.add_tensor(name, np.ones(shape, np.float32))


def write_llama(path: Path, *, seed: int = 0, template: str | None = CHAT_TEMPLATE, **changes: Any) -> Path:
    """A llama of four layers.

    context   how long a context it was made for
    epsilon   of its norms
    switch    for how many tokens its rotary frequencies are made; they are others for longer contexts
    dim       of a head
    kv_heads  how many heads keys and values have
    begins    whether every text begins with a token of its own
    """
    dim, kv_heads = changes.get("dim", DIM), changes.get("kv_heads", KV_HEADS)
    hidden = HEADS * dim
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"tiny-{seed}")
    writer.add_context_length(changes.get("context", CONTEXT))
    writer.add_embedding_length(hidden)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(changes.get("epsilon", 1e-5))
    writer.add_vocab_size(VOCABULARY)
    add_vocabulary(writer, template=template, begins=changes.get("begins", False))
    if "switch" in changes:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_orig_ctx_len(changes["switch"])
        writer.add_tensor("rope_factors_short.weight", np.ones(dim // 2, np.float32))
        writer.add_tensor("rope_factors_long.weight", np.linspace(1.5, 7.0, dim // 2, dtype=np.float32))
    weights = Weights(writer, seed)
    weights.matrix("token_embd.weight", VOCABULARY, hidden)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        weights.ones(block + "attn_norm.weight", hidden)
        weights.matrix(block + "attn_q.weight", HEADS * dim, hidden)
        weights.matrix(block + "attn_k.weight", kv_heads * dim, hidden)
        weights.matrix(block + "attn_v.weight", kv_heads * dim, hidden)
        weights.matrix(block + "attn_output.weight", hidden, HEADS * dim)
        weights.ones(block + "ffn_norm.weight", hidden)
        weights.matrix(block + "ffn_gate.weight", INNER, hidden)
        weights.matrix(block + "ffn_up.weight", INNER, hidden)
        weights.matrix(block + "ffn_down.weight", hidden, INNER)
    weights.ones("output_norm.weight", hidden)
    weights.matrix("output.weight", VOCABULARY, hidden)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def files_of(path: Path) -> ModelFiles:
    return ModelFiles(path.stem, path.parent / "hf", path)
