"""A tiny llama with random weights, the vocabulary of another model and a context long enough for agents."""

from __future__ import annotations

from pathlib import Path

import gguf

from tests.tiny_gguf import Weights, finish

CONTEXT = 65_536
LAYERS, HEADS, DIM, INNER = 2, 1, 32, 64
_TYPES = gguf.GGUFValueType


def write_tiny_long(path: Path, vocabulary_of: Path, *, seed: int) -> Path:
    """Write the model. Its tokenizer and template are those of the GGUF file `vocabulary_of`."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HEADS * DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    fields = gguf.GGUFReader(vocabulary_of).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if field.types[0] == _TYPES.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    size = len(fields["tokenizer.ggml.tokens"].data)
    weights = Weights(writer, seed)
    weights.matrix("token_embd.weight", size, HEADS * DIM)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        weights.ones(block + "attn_norm.weight", HEADS * DIM)
        for part in "qkv":
            weights.matrix(f"{block}attn_{part}.weight", HEADS * DIM, HEADS * DIM)
        weights.matrix(block + "attn_output.weight", HEADS * DIM, HEADS * DIM)
        weights.ones(block + "ffn_norm.weight", HEADS * DIM)
        weights.matrix(block + "ffn_gate.weight", INNER, HEADS * DIM)
        weights.matrix(block + "ffn_up.weight", INNER, HEADS * DIM)
        weights.matrix(block + "ffn_down.weight", HEADS * DIM, INNER)
    weights.ones("output_norm.weight", HEADS * DIM)
    weights.matrix("output.weight", size, HEADS * DIM)
    return finish(writer, path)
