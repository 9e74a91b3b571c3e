"""llama.cpp by itself, for comparison: the shared library called as its documentation shows, without our engine.

Chats are rendered by Jinja as transformers and llama.cpp set it up, in this process.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rekindle.core.request import Message
from rekindle.engine.llamacpp.c_api import LlamaBatch, Token, llama
from rekindle.engine.llamacpp.loaded_model import capture_log


class _ChatMessage(ctypes.Structure):
    _fields_ = [("role", ctypes.c_char_p), ("content", ctypes.c_char_p)]


@cache
def more() -> Any:
    """Functions of the library that the engine does not call."""
    capture_log()
    library = ctypes.CDLL(str(llama.path))
    for name, result, arguments in (
        ("llama_batch_init", LlamaBatch, (ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)),
        ("llama_batch_free", None, (LlamaBatch,)),
        ("llama_memory_clear", None, (ctypes.c_void_p, ctypes.c_bool)),
        ("llama_sampler_sample", Token, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)),
        (
            "llama_chat_apply_template",
            ctypes.c_int32,
            (
                ctypes.c_char_p,
                ctypes.POINTER(_ChatMessage),
                ctypes.c_size_t,
                ctypes.c_bool,
                ctypes.c_char_p,
                ctypes.c_int32,
            ),
        ),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class PlainLlama:
    """A model and one context."""

    def __init__(self, path: Path, *, context_tokens: int = 512, vocab_only: bool = False) -> None:
        more()
        how = llama.llama_model_default_params()
        how.vocab_only, how.n_gpu_layers = vocab_only, 0
        self.model = llama.llama_model_load_from_file(os.fsencode(path), how)
        assert self.model, path
        self.vocab = llama.llama_model_get_vocab(self.model)
        self.context = None if vocab_only else self._context(context_tokens)
        self._length = 0

    def _context(self, tokens: int) -> Any:
        how = llama.llama_context_default_params()
        how.n_ctx, how.n_threads, how.n_threads_batch = tokens, 1, 1
        context = llama.llama_init_from_model(self.model, how)
        assert context
        return context

    def reset(self) -> None:
        """Forget all tokens."""
        more().llama_memory_clear(llama.llama_get_memory(self.context), True)
        self._length = 0

    def eval(self, tokens: Sequence[int]) -> np.ndarray:
        """Compute the next tokens. [tokens, vocabulary] logits."""
        batch = more().llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, self._length + place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        assert llama.llama_decode(self.context, batch) == 0
        more().llama_batch_free(batch)
        self._length += len(tokens)
        size = llama.llama_vocab_n_tokens(self.vocab)
        rows = [llama.llama_get_logits_ith(self.context, place) for place in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, (size,)).copy() for row in rows])

    def tokenize(self, text: str, *, add_bos: bool, special: bool) -> list[int]:
        data = text.encode()
        tokens = (Token * (len(data) + 8))()
        count = llama.llama_tokenize(self.vocab, data, len(data), tokens, len(tokens), add_bos, special)
        assert count >= 0
        return list(tokens[:count])

    def spell(self, tokens: Sequence[int]) -> str:
        """The pieces of plain tokens, one after the other."""
        pieces = []
        for token in tokens:
            piece = ctypes.create_string_buffer(256)
            count = llama.llama_token_to_piece(self.vocab, token, piece, len(piece), 0, False)
            assert count >= 0
            pieces.append(piece.raw[:count])
        return b"".join(pieces).decode()

    def close(self) -> None:
        if self.context:
            llama.llama_free(self.context)
        llama.llama_model_free(self.model)


def rendered(template: str, chat: Sequence[Message], *, bos: str, eos: str) -> str:
    """A chat as Jinja renders it, up to where the reply begins."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [message.as_template_input() for message in chat]
    names = {"bos_token": bos, "eos_token": eos, "add_generation_prompt": True}
    return environment.from_string(template).render(messages=messages, **names)


def applied(template: str, chat: Sequence[Message]) -> str:
    """A chat as `llama_chat_apply_template` writes it: it knows the common templates by heart, without Jinja."""
    turns = (_ChatMessage * len(chat))(*((m.role.encode(), m.content.encode()) for m in chat))
    buffer = ctypes.create_string_buffer(1 << 19)
    count = more().llama_chat_apply_template(template.encode(), turns, len(turns), True, buffer, len(buffer))
    assert 0 < count < len(buffer)
    return buffer.raw[:count].decode()
