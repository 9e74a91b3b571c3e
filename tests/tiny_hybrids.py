"""Tiny GGUF models whose state is not plain KV, with random weights, for llama.cpp: recurrent, hybrid, sliding-window,
with two-dimensional positions; and one that does not write token after token at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from tests.tiny_gguf import CHAT_TEMPLATE, CONTEXT, VOCABULARY, Weights, add_vocabulary, finish

HIDDEN, INNER, HEADS, DIM, LAYERS = 32, 64, 2, 16, 4
STATE, KERNEL, RANK = 8, 4, 4
WINDOW = 16


def _begin(path: Path, architecture: str, seed: int, template: str | None, context: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny-{architecture}-{seed}")
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    add_vocabulary(writer, template=template)
    return writer


def _attend(writer: gguf.GGUFWriter, kv_heads: int | list[int]) -> None:
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(DIM)


def _attention(weights: Weights, block: str, *, output: str = "attn_output") -> None:
    weights.matrix(block + "attn_q.weight", HEADS * DIM, HIDDEN)
    weights.matrix(block + "attn_k.weight", DIM, HIDDEN)
    weights.matrix(block + "attn_v.weight", DIM, HIDDEN)
    weights.matrix(block + f"{output}.weight", HIDDEN, HEADS * DIM)


def _feed_forward(weights: Weights, block: str) -> None:
    weights.ones(block + "ffn_norm.weight", HIDDEN)
    weights.matrix(block + "ffn_gate.weight", INNER, HIDDEN)
    weights.matrix(block + "ffn_up.weight", INNER, HIDDEN)
    weights.matrix(block + "ffn_down.weight", HIDDEN, INNER)


def write_mamba(
    path: Path, *, seed: int = 0, template: str | None = CHAT_TEMPLATE, context: int = CONTEXT, state: int = STATE
) -> Path:
    """Recurrent: four layers of Mamba, no attention. `state` is how many numbers it remembers by."""
    writer = _begin(path, "mamba", seed, template, context)
    wide = 2 * HIDDEN
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_inner_size(wide)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(RANK)
    weights = Weights(writer, seed)
    weights.matrix("token_embd.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        weights.ones(block + "attn_norm.weight", HIDDEN)
        weights.matrix(block + "ssm_in.weight", 2 * wide, HIDDEN)
        weights.matrix(block + "ssm_conv1d.weight", wide, KERNEL, scale=0.5)
        weights.matrix(block + "ssm_conv1d.bias", wide)
        weights.matrix(block + "ssm_x.weight", RANK + 2 * state, wide)
        weights.matrix(block + "ssm_dt.weight", wide, RANK)
        weights.matrix(block + "ssm_dt.bias", wide)
        decay = -np.tile(np.linspace(0.25, 2.0, state, dtype=np.float32), (wide, 1))
        writer.add_tensor(block + "ssm_a", decay)  # [wide, state], negative: what was seen fades slowly
        weights.ones(block + "ssm_d", wide)
        weights.matrix(block + "ssm_out.weight", HIDDEN, wide)
    weights.ones("output_norm.weight", HIDDEN)
    weights.matrix("output.weight", VOCABULARY, HIDDEN)
    return finish(writer, path)


def write_lfm2(path: Path, *, seed: int = 0, template: str | None = CHAT_TEMPLATE, context: int = CONTEXT) -> Path:
    """Hybrid: short convolutions, with attention in every second layer."""
    writer = _begin(path, "lfm2", seed, template, context)
    _attend(writer, [layer % 2 for layer in range(LAYERS)])
    writer.add_shortconv_l_cache(KERNEL)
    weights = Weights(writer, seed)
    weights.matrix("token_embd.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        weights.ones(block + "attn_norm.weight", HIDDEN)
        if layer % 2:
            weights.ones(block + "attn_q_norm.weight", DIM)
            weights.ones(block + "attn_k_norm.weight", DIM)
            _attention(weights, block)
        else:
            weights.matrix(block + "shortconv.conv.weight", HIDDEN, KERNEL, scale=0.5)
            weights.matrix(block + "shortconv.in_proj.weight", 3 * HIDDEN, HIDDEN)
            weights.matrix(block + "shortconv.out_proj.weight", HIDDEN, HIDDEN)
        _feed_forward(weights, block)
    weights.ones("token_embd_norm.weight", HIDDEN)  # llama.cpp's name of the last norm here
    return finish(writer, path)


def write_gemma2(path: Path, *, seed: int = 0, template: str | None = CHAT_TEMPLATE, context: int = CONTEXT) -> Path:
    """Sliding-window: every second layer sees the last sixteen tokens only."""
    writer = _begin(path, "gemma2", seed, template, context)
    _attend(writer, 1)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_sliding_window(WINDOW)
    weights = Weights(writer, seed)
    weights.matrix("token_embd.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        weights.ones(block + "attn_norm.weight", HIDDEN)
        _attention(weights, block)
        weights.ones(block + "post_attention_norm.weight", HIDDEN)
        _feed_forward(weights, block)
        weights.ones(block + "post_ffw_norm.weight", HIDDEN)
    weights.ones("output_norm.weight", HIDDEN)
    return finish(writer, path)


def write_qwen2vl(path: Path, *, seed: int = 0, template: str | None = CHAT_TEMPLATE, context: int = CONTEXT) -> Path:
    """Plain KV, but each cell carries more than a position: its state is laid out in a way that is not taken apart."""
    writer = _begin(path, "qwen2vl", seed, template, context)
    _attend(writer, 1)
    writer.add_rope_dimension_sections([2, 3, 3, 0])
    _plain_layers(writer, seed)
    return finish(writer, path)


def write_dream(path: Path, *, seed: int = 0, template: str | None = CHAT_TEMPLATE, context: int = CONTEXT) -> Path:
    """A diffusion model: it writes all tokens at once, and llama.cpp has no memory for it."""
    writer = _begin(path, "dream", seed, template, context)
    _attend(writer, 1)
    _plain_layers(writer, seed)
    return finish(writer, path)


def _plain_layers(writer: gguf.GGUFWriter, seed: int) -> None:
    weights = Weights(writer, seed)
    weights.matrix("token_embd.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        weights.ones(block + "attn_norm.weight", HIDDEN)
        _attention(weights, block)
        _feed_forward(weights, block)
    weights.ones("output_norm.weight", HIDDEN)
    weights.matrix("output.weight", VOCABULARY, HIDDEN)


# Those whose state can only be kept whole, by what `Capabilities.opaque` must say of them.
OPAQUE: dict[str, tuple[Callable[..., Path], str]] = {
    "mamba": (write_mamba, "recurrent"),
    "lfm2": (write_lfm2, "hybrid"),
    "gemma2": (write_gemma2, "sliding window"),
    "qwen2vl": (write_qwen2vl, "layout that is not known"),
}
