"""A byte-level tokenizer for tiny models. Needs no torch."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

VOCABULARY = 320  # 256 bytes, control tokens, room


def byte_backend() -> tokenizers.Tokenizer:
    """A byte-level tokenizer: one token a byte, and a few control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>", "<|stop|>"])
    return backend
