"""/v1/embeddings, with the embedder that people get: the same vectors in every form."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest

pytest.importorskip("torch")

from rekindle.engine.embedding.embedder import Embedder
from rekindle.models.pull import pull
from tests.server.serving import Served, fake_session, serving

pytestmark = pytest.mark.real

PATH = "/v1/embeddings"
TEXTS = ["The lamp is lit at dusk.", "Grüße aus 東京", "a" * 3000]


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(fake_session(tmp_path_factory.mktemp("embedding") / "cache")) as served:
        yield served


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    return Embedder.load(pull("minilm").files).embed(TEXTS).vectors


def test_the_openai_client_gets_the_embedders_vectors(embedding: Served, expected: np.ndarray) -> None:
    reply = embedding.openai().embeddings.create(model="minilm", input=TEXTS)
    assert [one.index for one in reply.data] == [0, 1, 2] and reply.model == "minilm"
    np.testing.assert_allclose([one.embedding for one in reply.data], expected, atol=1e-6)
    assert reply.usage.prompt_tokens == reply.usage.total_tokens > 0


def test_numbers_and_base64_are_the_same_vectors(embedding: Served, expected: np.ndarray) -> None:
    plain = embedding.post(PATH, input=TEXTS).json()["data"]
    coded = embedding.post(PATH, input=TEXTS, encoding_format="base64").json()["data"]
    read = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded]
    assert np.array_equal(np.asarray([one["embedding"] for one in plain], np.float32), read)
    np.testing.assert_allclose(read, expected, atol=1e-6)


def test_a_single_text_is_as_good_as_a_list_of_one(embedding: Served) -> None:
    alone, listed = (embedding.post(PATH, input=given).json()["data"] for given in (TEXTS[0], TEXTS[:1]))
    assert alone == listed and len(alone) == 1


def test_token_ids_are_taken_too(embedding: Served) -> None:
    tokens = [101, 1996, 10437, 2003, 5507, 102]
    alone, listed = (embedding.post(PATH, input=given).json() for given in (tokens, [tokens, tokens]))
    np.testing.assert_allclose(listed["data"][1]["embedding"], alone["data"][0]["embedding"], atol=1e-6)
    assert len(listed["data"]) == 2 and listed["usage"]["prompt_tokens"] == 2 * alone["usage"]["prompt_tokens"]


def test_fewer_dimensions_are_the_first_ones_at_unit_length(embedding: Served, expected: np.ndarray) -> None:
    reply = embedding.openai().embeddings.create(model="minilm", input=TEXTS, dimensions=64)
    cut = expected[:, :64] / np.linalg.norm(expected[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose([one.embedding for one in reply.data], cut, atol=1e-6)
    with pytest.raises(openai.BadRequestError) as raised:
        embedding.openai().embeddings.create(model="minilm", input=TEXTS[0], dimensions=385)
    assert raised.value.param == "dimensions"


def test_texts_that_are_alike_have_vectors_that_are(embedding: Served) -> None:
    texts = ["How is the weather today?", "What's the weather like today?", "The stock market fell sharply."]
    vectors = np.asarray([one["embedding"] for one in embedding.post(PATH, input=texts).json()["data"]])
    assert vectors[0] @ vectors[1] > 0.7 > 0.3 > vectors[0] @ vectors[2]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_what_was_cut_off_or_ignored_is_told(embedding: Served) -> None:
    long = embedding.post(PATH, input=["word " * 2000, "short"], hm=1).json()["rekindle"]
    assert long["ignored"] == ["hm"] and long["truncated"]
    assert not embedding.post(PATH, input="short").json()["rekindle"]["truncated"]


@pytest.mark.parametrize("given", [[], "", [[]], [10**9], ["a"] * 2049], ids=["[]", "''", "[[]]", "unknown", "many"])
def test_what_cannot_be_embedded_is_refused(embedding: Served, given: object) -> None:
    assert embedding.post(PATH, input=given).status_code == 400


def test_another_model_is_not_found(embedding: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        embedding.openai().embeddings.create(model="fake-0", input="a")
