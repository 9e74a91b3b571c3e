"""Fixtures for tests of embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from tests.engine.embedding.tiny_encoders import SIZES, Make, word_tokenizer


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a model folder with random weights, large enough that vectors differ clearly."""

    def made(family: str = "bert", *, spread: float = 0.3, **changes: Any) -> Path:
        torch.manual_seed(0)
        model = AutoModel.from_config(AutoConfig.for_model(family, **{**SIZES, **changes}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * spread)
        folder = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        word_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    return made
