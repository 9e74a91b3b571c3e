"""Tiny encoders with random weights in Hugging Face form, and what transformers computes with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import AutoModel

from rekindle.engine.embedding.embedder import Embedder
from rekindle.models.files import ModelFiles

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "attn_implementation": "eager",
}
TEXTS = ["", "a", "b c", "hello, world", "the quick brown fox", "x" * 31, "b c", "long " * 40, "日本", "zyx 987"]

Make = Callable[..., Path]


def vocabulary() -> dict[str, int]:
    pieces = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz0123456789,.!?"]
    pieces += [f"##{piece}" for piece in pieces[4:40]]
    return {piece: index for index, piece in enumerate(pieces)}


def word_tokenizer() -> tokenizers.Tokenizer:
    """A WordPiece tokenizer of letters, which asks to cut and to pad as some published ones do."""
    made = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary(), unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_truncation(5)
    made.enable_padding(length=9, pad_id=1, pad_token="[PAD]")
    return made


def load(folder: Path) -> Embedder:
    return Embedder.load(ModelFiles("tiny", folder))


def put(folder: Path, name: str, value: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(value))


def own(folder: Path, texts: list[str], most: int, pooling: str = "mean") -> NDArray[np.float32]:
    """What transformers computes, text by text and so without padding."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    backend = word_tokenizer()
    backend.no_padding()
    backend.enable_truncation(most)
    rows = []
    for text in texts:
        with torch.inference_mode():
            states = model(torch.tensor([backend.encode(text).ids])).last_hidden_state[0]
        rows.append({"mean": states.mean(0), "cls": states[0], "max": states.max(0).values}[pooling])
    return torch.nn.functional.normalize(torch.stack(rows)).numpy()
