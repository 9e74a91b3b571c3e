"""Tiny GGUF models of one layer for tests of tokens: other vocabularies, other templates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
from tokenizers import pre_tokenizers

from tests.tiny_gguf import Weights, finish

NORMAL, UNKNOWN, CONTROL = gguf.TokenType.NORMAL, gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL
DEFINED, BYTE = gguf.TokenType.USER_DEFINED, gguf.TokenType.BYTE

_HIDDEN = 32


class Vocabulary:
    """Pieces with their kinds and scores; the number of a piece is its place."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.pieces: list[str] = []
        self.kinds: list[int] = []
        self.scores: list[float] = []
        self.merges: list[str] = []
        self.bos = self.eos = 0
        self.add_bos = False
        self.template: str | None = None
        self.name = "tiny-words"

    def add(self, kind: int, *pieces: str) -> Vocabulary:
        for piece in pieces:
            self.pieces.append(piece)
            self.kinds.append(kind)
            self.scores.append(-float(len(self.pieces)) / 100)
        return self

    def id(self, piece: str) -> int:
        return self.pieces.index(piece)

    def write(self, path: Path) -> Path:
        """A llama of one layer over this vocabulary."""
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name(self.name)
        for add, value in (
            (writer.add_context_length, 256),
            (writer.add_embedding_length, _HIDDEN),
            (writer.add_block_count, 1),
            (writer.add_feed_forward_length, _HIDDEN),
            (writer.add_head_count, 1),
            (writer.add_rope_dimension_count, _HIDDEN),
            (writer.add_layer_norm_rms_eps, 1e-5),
            (writer.add_vocab_size, len(self.pieces)),
        ):
            add(value)
        self._add_tokenizer(writer)
        weights = Weights(writer, 0)
        weights.matrix("token_embd.weight", len(self.pieces), _HIDDEN)
        weights.ones("blk.0.attn_norm.weight", _HIDDEN)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            weights.matrix(f"blk.0.{name}.weight", _HIDDEN, _HIDDEN)
        weights.ones("blk.0.ffn_norm.weight", _HIDDEN)
        weights.ones("output_norm.weight", _HIDDEN)
        return finish(writer, path)

    def _add_tokenizer(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        if self.model == "gpt2":
            writer.add_tokenizer_pre("gpt-2")
            writer.add_token_merges(self.merges)
        else:
            writer.add_token_scores(self.scores)
        writer.add_token_list(self.pieces)
        writer.add_token_types(self.kinds)
        writer.add_bos_token_id(self.bos)
        writer.add_eos_token_id(self.eos)
        writer.add_add_bos_token(self.add_bos)
        if self.template is not None:
            writer.add_chat_template(self.template)


def byte_level(*defined: str, control: Sequence[str] = ("<|end|>", "<|start|>", "<|stop|>")) -> Vocabulary:
    """One token a byte, as in `tests.tiny_gguf`; control tokens; and tokens that are not called control ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = Vocabulary("gpt2").add(NORMAL, *alphabet).add(CONTROL, *control).add(DEFINED, *defined)
    vocabulary.merges = [f"{alphabet[-1]} {alphabet[-2]}"]  # there must be one; no text spells it
    vocabulary.add(NORMAL, alphabet[-1] + alphabet[-2])
    vocabulary.eos, vocabulary.bos = vocabulary.id(control[0]), vocabulary.id(control[1])
    return vocabulary


def sentencepiece(*defined: str) -> Vocabulary:
    """As Llama 2 and Gemma have: a mark for a space, which also leads every text; bytes for what has no piece."""
    words = ["▁", "e", "l", "o", "h", "w", "r", "d", "▁h", "el", "lo", "▁w", "or", "ld", "▁hello", "▁world", "hello"]
    vocabulary = Vocabulary("llama").add(UNKNOWN, "<unk>").add(CONTROL, "<s>", "</s>")
    vocabulary.add(BYTE, *(f"<0x{byte:02X}>" for byte in range(256))).add(NORMAL, *words).add(DEFINED, *defined)
    vocabulary.bos, vocabulary.eos, vocabulary.add_bos = 1, 2, True
    return vocabulary
