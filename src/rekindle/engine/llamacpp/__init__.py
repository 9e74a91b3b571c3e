"""The llama.cpp engine, through the low-level interface of llama-cpp-python. No torch.

library     the shared library: models, contexts, what it says when something goes wrong
tokenizer   the vocabulary and the chat template of a GGUF file
sample      llama.cpp's own samplers
state       the bytes of a sequence's state, and the KV value
cells       the one buffer that all sequences share, and what is in it
sequence    one sequence, with KV by span, or by snapshot where the model has no plain KV
engine      all of it as an `Engine`
"""

from __future__ import annotations

from rekindle.engine.base import Engine


def is_llamacpp(engine: Engine) -> bool:
    """Whether an engine is llama.cpp's, asked without loading the library."""
    return type(engine).__module__ == f"{__name__}.engine"
