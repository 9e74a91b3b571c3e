"""The embedded encoder, all-MiniLM-L6-v2: the vectors are those of its own code, and they mean something."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rekindle.engine.embedding import embedder
from rekindle.engine.embedding.embedder import Embedder
from rekindle.models.files import ModelFiles
from rekindle.models.pull import pull

pytestmark = pytest.mark.real

TEXTS = [
    "",
    "   \n\t ",
    "How do I reset my password?",
    "I forgot my password and want a new one.",
    "The Danube flows through ten countries.",
    "Übersetze: Grüße, süß, 東京, 🙂, naïve",
    "def add(a, b):\n    return a + b",
    "word " * 100,
    "Every cat that sleeps in the sun dreams of mice. " * 60,
    "[CLS] [SEP] [MASK] [PAD]",
]


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return pull("minilm").files


@pytest.fixture(scope="module")
def minilm(files: ModelFiles) -> Embedder:
    return Embedder.load(files)


def test_vectors_are_those_of_transformers_in_one_padded_batch(minilm: Embedder, files: ModelFiles) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(files.folder)
    model = AutoModel.from_pretrained(files.folder, dtype=torch.float32).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=minilm.token_limit, return_tensors="pt")
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    expected = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1)).numpy()
    found = minilm.embed(TEXTS)
    assert np.abs(found.vectors - expected).max() < 1e-5
    assert (found.tokens, found.truncated) == (int(mask.sum()), 1)


def test_vectors_of_onnx_runtime_are_those_of_numpy(
    minilm: Embedder, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    expected = minilm.embed(TEXTS).vectors
    monkeypatch.setattr(embedder, "_NUMPY_TOKENS", 0)
    assert np.abs(Embedder.load(files).embed(TEXTS).vectors - expected).max() < 1e-5


def test_the_model_is_what_it_says(minilm: Embedder) -> None:
    assert (minilm.name, minilm.dimensions, minilm.token_limit) == ("minilm", 384, 512)
    assert len(minilm.digest) == 32


def test_sentences_of_one_meaning_are_near_each_other(minilm: Embedder) -> None:
    question, same, other = minilm.embed(TEXTS[2:5]).vectors
    assert question @ same > 0.6 > 0.2 > question @ other


def test_company_changes_no_vector(minilm: Embedder) -> None:
    together = minilm.embed(TEXTS * 3).vectors
    alone = np.concatenate([minilm.embed([text]).vectors for text in TEXTS])
    np.testing.assert_allclose(together, np.tile(alone, (3, 1)), atol=1e-5)
