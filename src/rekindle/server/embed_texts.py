"""/v1/embeddings, and vectors of texts for the endpoints of all protocols."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from rekindle.cache.prefill import IsCancelled
from rekindle.engine.embedding.embedder import Embeddings
from rekindle.errors import nearest
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.schema import MAX_TEXTS, EmbeddingsRequest
from rekindle.session.session import Session


async def answer_embeddings(call: Call, body: EmbeddingsRequest) -> Response:
    """Vectors of texts."""
    model = check_embedder(call, body.model)
    found = await embed_texts(call, body.input)
    data = [
        {"object": "embedding", "index": number, "embedding": _encoded(vector, body.encoding_format)}
        for number, vector in enumerate(narrowed(found.vectors, body.dimensions))
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    about = {"truncated": found.truncated, "ignored": body.ignored()}
    return JSONResponse({"object": "list", "data": data, "model": model, "usage": usage, "rekindle": about})


def _encoded(vector: NDArray[np.float32], form: str) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()


def check_embedder(call: Call, name: str | None) -> str:
    """The name of the embedder. Raises `ApiError` 404 for a name that does not stand for it."""
    model = call.host.shared.session_settings.embedder
    if name and not call.host.is_embedder(name):
        message = f"{name!r} gives no embeddings here.{nearest(name, [model])}"
        raise ApiError(404, message, code="model_not_found")
    return model


async def embed_texts(call: Call, given: str | Sequence[Any]) -> Embeddings:
    """The vectors of a text or several, given as text or as token ids. Raises `ApiError` 400 for none or too many."""
    if not given:
        raise ApiError(400, "input: There is nothing to embed. Give a text.", param="input")
    if not isinstance(given, str) and not isinstance(given[0], int) and len(given) > MAX_TEXTS:
        raise ApiError(400, f"input: There are {len(given):,} texts. Send up to {MAX_TEXTS:,}.", param="input")
    return await call.within_time(partial(_embed, call.service.session, given), call.service.embedding)


def narrowed(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first dimensions of vectors, normalized again; None: all. Raises `ApiError` 400 for more than there are."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        message = f"dimensions: The model's vectors have {vectors.shape[1]} dimensions."
        raise ApiError(400, message, param="dimensions")
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def _embed(session: Session, given: str | Sequence[Any], cancelled: IsCancelled) -> Embeddings:
    """The first call loads the embedder."""
    embedder = session.knowledge.embedder()
    several: Sequence[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if isinstance(several[0], str):
        return embedder.embed(several, cancelled=cancelled)
    return embedder.embed_tokens(several, cancelled=cancelled)
