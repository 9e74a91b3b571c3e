"""Embeddings of ONNX Runtime and of numpy are those of the model's own code, whatever their family, batch or length."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models

from rekindle.engine.embedding import bert, embedder
from rekindle.engine.embedding.bert import ACTIVATIONS
from rekindle.errors import BrokenModel, Cancelled, InvalidPrompt, NotAModel, UnsupportedModel
from tests.engine.embedding.tiny_encoders import TEXTS, Make, load, own, put, vocabulary, word_tokenizer

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]

EITHER = pytest.mark.parametrize("either", ["runtime", "numpy"], indirect=True)


@pytest.fixture
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute; numpy's is that of a machine without ONNX Runtime."""
    if request.param == "runtime":
        pytest.importorskip("onnxruntime", reason="numpy computes without ONNX Runtime")
        monkeypatch.setattr(embedder, "_NUMPY_TOKENS", 0)
    else:
        monkeypatch.setattr(embedder, "runtime_installed", lambda: False)
    return str(request.param)


@EITHER
@pytest.mark.parametrize("heads", [1, 2, 3, 12])
@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_new", "gelu_pytorch_tanh"])
def test_vectors_are_the_models_own(heads: int, activation: str, either: str, make: Make) -> None:
    folder = make(num_attention_heads=heads, hidden_act=activation)
    found = load(folder).embed(TEXTS).vectors
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, own(folder, TEXTS, 40), atol=1e-5)


@EITHER
@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
def test_positions_begin_after_the_padding_token_where_the_family_has_it_so(
    family: str, either: str, make: Make
) -> None:
    folder = make(family)
    made = load(folder)
    assert made.token_limit == 38
    np.testing.assert_allclose(made.embed(TEXTS).vectors, own(folder, TEXTS, 38), atol=1e-5)


@EITHER
@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
    ],
)
def test_the_folder_says_how_vectors_are_pooled(
    config: dict[str, object], pooling: str, either: str, make: Make
) -> None:
    folder = make()
    put(folder, "2_Pool/config.json", {"word_embedding_dimension": 24, **config})
    stages = [("Transformer", ""), ("Pooling", "2_Pool"), ("Normalize", "3_Normalize")]
    put(folder, "modules.json", [{"type": f"sentence_transformers.models.{t}", "path": p} for t, p in stages])
    found = load(folder).embed(TEXTS).vectors
    np.testing.assert_allclose(found, own(folder, TEXTS, 40, pooling), atol=1e-5)
    assert np.abs(found - own(folder, TEXTS, 40)).max() > 0.1


@EITHER
def test_scores_that_overflow_an_exponential_are_computed_all_the_same(either: str, make: Make) -> None:
    folder = make(spread=4.0)
    found = load(folder).embed(TEXTS).vectors
    np.testing.assert_allclose(found, own(folder, TEXTS, 40), atol=1e-4)


def test_a_long_text_is_attended_in_pieces_with_the_same_vector(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedder, "runtime_installed", lambda: False)
    folder = make()
    whole = load(folder).embed(TEXTS).vectors
    for name, value in (("_SCORE_VALUES", 4 * 40 * 7), ("_FEED_ROWS", 3)):
        monkeypatch.setattr(bert, name, value)
    np.testing.assert_allclose(load(folder).embed(TEXTS).vectors, whole, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_read_in_every_float_type(dtype: torch.dtype, make: Make) -> None:
    folder = make()
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights["embeddings.position_ids"] = torch.arange(40)  # old files have it
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    np.testing.assert_allclose(load(folder).embed(TEXTS).vectors, own(folder, TEXTS, 40), atol=1e-5)


def test_weights_saved_with_a_head_and_older_names_are_the_same_model(make: Make) -> None:
    folder = make()
    expected = load(folder).embed(TEXTS).vectors
    renamed = {
        f"bert.{n}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t
        for n, t in load_file(folder / "model.safetensors").items()
    }
    save_file({**renamed, "cls.predictions.bias": torch.zeros(120)}, folder / "model.safetensors")
    np.testing.assert_array_equal(load(folder).embed(TEXTS).vectors, expected)


@EITHER
def test_a_text_has_the_same_vector_in_any_company(either: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load(make())
    together = made.embed(TEXTS)
    alone = [made.embed([text]) for text in TEXTS]
    np.testing.assert_allclose(together.vectors, np.concatenate([one.vectors for one in alone]), atol=1e-5)
    assert together.tokens == sum(one.tokens for one in alone)
    monkeypatch.setattr(embedder, "_BATCH_TOKENS", 25)
    monkeypatch.setattr(embedder, "_TEXTS_AT_ONCE", 3)
    np.testing.assert_allclose(made.embed(TEXTS[::-1]).vectors[::-1], together.vectors, atol=1e-5)


@EITHER
def test_vectors_have_unit_length_and_empty_inputs_a_shape(either: str, make: Make) -> None:
    made = load(make())
    assert (made.name, made.dimensions, made.token_limit) == ("tiny", 24, 40)
    np.testing.assert_allclose(np.linalg.norm(made.embed(TEXTS).vectors, axis=1), 1, atol=1e-6)
    for nothing in (made.embed([]), made.embed_tokens([])):
        assert (nothing.vectors.shape, nothing.tokens, nothing.truncated) == ((0, 24), 0, 0)
    assert made.embed([""]).tokens == 2  # the tokens that begin and end it


@EITHER
def test_texts_longer_than_the_model_reads_are_cut_and_counted(either: str, make: Make) -> None:
    folder = make()
    put(folder, "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": False})
    made = load(folder)
    assert made.token_limit == 12
    found = made.embed(["a " * 10, "a " * 11, "b " * 5000])
    assert (found.tokens, found.truncated) == (36, 2)
    np.testing.assert_allclose(found.vectors[1], found.vectors[0], atol=1e-6)


def test_letters_are_made_small_where_the_folder_asks_for_it(make: Make) -> None:
    folder = make()
    made = load(folder)
    small, large = made.embed(["hello", "HELLO"]).vectors
    assert np.abs(small - large).max() > 0.1
    put(folder, "sentence_bert_config.json", {"do_lower_case": True})
    lowered = load(folder)
    np.testing.assert_allclose(lowered.embed(["HELLO"]).vectors[0], small, atol=1e-6)
    assert lowered.digest != made.digest


@EITHER
def test_the_tokens_of_a_text_have_its_vector_even_when_cut(either: str, make: Make) -> None:
    made = load(make())
    backend = word_tokenizer()
    backend.no_truncation()
    backend.no_padding()
    ids = [backend.encode(text).ids for text in TEXTS]
    found, expected = made.embed_tokens(ids), made.embed(TEXTS)
    np.testing.assert_allclose(found.vectors, expected.vectors, atol=1e-6)
    assert (found.tokens, found.truncated) == (expected.tokens, expected.truncated)
    assert expected.truncated == 1
    assert made.embed_tokens([[2, *[7] * 40, 3]]).truncated == 1


@pytest.mark.parametrize("prompt", [[], [2, 120, 3], [-1], [7], [7, 8, 3], [2, 7, 8], [7] * 41])
def test_token_ids_of_another_tokenizer_are_refused_whatever_their_number(prompt: list[int], make: Make) -> None:
    with pytest.raises(InvalidPrompt, match="Input 1"):
        load(make()).embed_tokens([[2, 3], prompt])


@pytest.mark.parametrize("texts", ["one text", ["a", "\ud800"], ["a", 3], ["a", None]])
def test_what_is_not_text_is_refused(texts: Any, make: Make) -> None:
    with pytest.raises(InvalidPrompt):
        load(make()).embed(texts)


@EITHER
@pytest.mark.parametrize("looks", [0, 1, 4, 9])
def test_a_cancelled_call_ends_and_leaves_the_embedder_sound(looks: int, either: str, make: Make) -> None:
    made = load(make())
    answers = iter([False] * looks + [True])
    with pytest.raises(Cancelled):
        made.embed(TEXTS * 200, cancelled=lambda: next(answers))
    assert next(answers, None) is None  # nobody asked again
    assert made.embed(TEXTS, cancelled=lambda: False).vectors.shape == (len(TEXTS), 24)


def test_the_first_texts_are_computed_by_numpy_and_many_by_onnx_runtime(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(embedder, "_NUMPY_TOKENS", 100)
    opened = []
    session = runtime.InferenceSession
    monkeypatch.setattr(runtime, "InferenceSession", lambda *a, **b: opened.append(a) or session(*a, **b))
    made, spoilt = load(make()), load(make())
    first = made.embed(TEXTS[:3])
    assert first.tokens < 100 and not opened
    np.testing.assert_allclose(made.embed(TEXTS * 3).vectors[:3], first.vectors, atol=1e-6)
    made.embed(TEXTS)
    assert len(opened) == 1
    monkeypatch.setattr(runtime, "InferenceSession", None)  # as good as one that cannot load it
    np.testing.assert_allclose(spoilt.embed(TEXTS * 3).vectors[:3], first.vectors, atol=1e-6)
    assert "numpy does, more slowly" in caplog.text


@EITHER
def test_several_threads_share_an_embedder(either: str, make: Make) -> None:
    made = load(make())
    expected = made.embed(TEXTS).vectors
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: made.embed(TEXTS), range(24)):
            np.testing.assert_allclose(found.vectors, expected, atol=1e-6)


def test_the_digest_follows_weights_tokenizer_and_pooling_and_not_the_place(make: Make, tmp_path: Path) -> None:
    folder = make()
    digests = [load(folder).digest]
    assert load(Path(shutil.copytree(folder, tmp_path / "elsewhere"))).digest == digests[0]
    put(folder, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    digests.append(load(folder).digest)
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    digests.append(load(folder).digest)
    weights = load_file(folder / "model.safetensors")
    weights["pooler.dense.bias"] += 1
    save_file(weights, folder / "model.safetensors")
    digests.append(load(folder).digest)
    assert len(set(digests)) == 4


@pytest.mark.parametrize("family", ["deberta-v2", "distilbert", "mpnet", "llama"])
def test_another_family_is_refused_by_name(family: str, make: Make) -> None:
    folder = make()
    put(folder, "config.json", {**json.loads((folder / "config.json").read_text()), "model_type": family})
    with pytest.raises(UnsupportedModel, match=family):
        load(folder)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("config.json", {"hidden_act": "mish"}, "mish"),
        ("config.json", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("config.json", {"is_decoder": True}, "is_decoder"),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": True}, "lasttoken"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean", "cls"]}, r"mean \+ cls"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "nothing"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name: str, change: dict[str, Any], words: str, make: Make) -> None:
    folder = make()
    before = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    put(folder, name, {**before, **change})
    with pytest.raises(UnsupportedModel, match=words):
        load(folder)


def test_a_stage_that_is_not_computed_is_refused_by_name(make: Make) -> None:
    folder = make()
    put(folder, "modules.json", [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}])
    with pytest.raises(UnsupportedModel, match="Dense"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "bert", "hidden_size": 25, "num_attention_heads": 2}'),
        ("config.json", '{"model_type": "bert", "hidden_size": "x"}'),
        ("config.json", '{"model_type": "bert"}'),
        ("modules.json", "{}"),
        ("modules.json", '[{"path": ""}]'),
        ("1_Pooling/config.json", "[]"),
        ("tokenizer.json", "{}"),
        ("model.safetensors", ""),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str, make: Make) -> None:
    folder = make()
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content)
    with pytest.raises(BrokenModel):
        load(folder)


def test_a_missing_tensor_and_a_missing_tokenizer_are_named(make: Make) -> None:
    folder = make()
    weights = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "layer.2.output.dense.bias" not in n}, folder / "model.safetensors")
    with pytest.raises(BrokenModel, match=r"layer\.2\.output\.dense\.bias"):
        load(folder)
    save_file(weights, folder / "model.safetensors")
    (folder / "tokenizer.json").rename(folder / "vocab.txt")
    with pytest.raises(UnsupportedModel, match="save_pretrained"):
        load(folder)
    (folder / "vocab.txt").unlink()
    with pytest.raises(BrokenModel, match="tokenizer"):
        load(folder)


def test_a_tokenizer_that_puts_nothing_around_a_text_is_refused(make: Make) -> None:
    folder = make()
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary(), unk_token="[UNK]"))
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(BrokenModel, match="around a text"):
        load(folder)


def test_a_folder_without_a_model_is_not_one(tmp_path: Path) -> None:
    with pytest.raises(NotAModel):
        load(tmp_path)


def test_gelu_is_exact_to_a_millionth_everywhere() -> None:
    values = np.concatenate([np.linspace(-9, 9, 200_001), [-1e30, -3e4, 0, 3e4, 1e30]]).astype(np.float32)
    expected = np.array([0.5 * x * math.erfc(-x / math.sqrt(2)) for x in values.tolist()])
    found = values.copy()
    ACTIVATIONS["gelu"](found)
    errors = np.abs(found - expected) / np.maximum(1, np.abs(expected))
    assert errors.max() < 1e-6


def test_embedding_needs_no_torch() -> None:
    heavy = "{'torch', 'transformers'}"
    code = f"import sys, rekindle.engine.embedding.embedder; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LONG_TEXTS = {
    "words": "lamp house river " * 40_000,
    "one word": "z" * 500_000,
    "white space first": " \n" * 200_000 + "lamp house",
    "a word nobody knows first": "é" * 100_000 + " lamp house",
    "short": "lamp",
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_a_long_text_has_the_vector_of_its_first_tokens(name: str, make: Make) -> None:
    made = load(make())
    ids = made._tokenizer.encode(LONG_TEXTS[name]).ids
    np.testing.assert_array_equal(made.embed([LONG_TEXTS[name]]).vectors, made.embed_tokens([ids]).vectors)
    assert made.embed([LONG_TEXTS[name]]).truncated == bool(made._tokenizer.encode(LONG_TEXTS[name]).overflowing)


def test_of_a_long_text_only_its_beginning_is_tokenized(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load(make())
    lengths: list[int] = []

    class Counting:
        def __init__(self, real: tokenizers.Tokenizer) -> None:
            self._real = real

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

        def encode_batch_fast(self, texts: list[str], **how: object) -> object:
            lengths.extend(map(len, texts))
            return self._real.encode_batch_fast(texts, **how)

    longest = max(map(len, made._tokenizer.get_vocab()))
    monkeypatch.setattr(made, "_uncut", Counting(made._uncut))
    monkeypatch.setattr(made, "_tokenizer", Counting(made._tokenizer))
    assert made.embed([LONG_TEXTS["words"]]).truncated == 1
    assert sum(lengths) < 20 * made.token_limit * longest
