"""/v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from rekindle.engine.embedding.embedder import Embeddings
from rekindle.errors import nearest
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.event_stream import until_disconnect
from rekindle.server.schema import MAX_TEXTS, EmbeddingsRequest
from rekindle.session.session import Session


def _embed(session: Session, given: str | Sequence[Any], cancelled: threading.Event) -> Embeddings:
    """The vectors of a text or several, given as text or as token ids. The first call loads the embedder."""
    embedder = session.knowledge.embedder()
    several: Sequence[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if isinstance(several[0], str):
        return embedder.embed(several, cancelled=cancelled.is_set)
    return embedder.embed_tokens(several, cancelled=cancelled.is_set)


async def answer_embeddings(call: Call, body: EmbeddingsRequest) -> Response:
    """Vectors of texts."""
    session = call.service.session
    model = session.settings.embedder
    if body.model and body.model != model:
        raise ApiError(404, f"{body.model!r} gives no embeddings here.{nearest(body.model, [model])}",
                      code="model_not_found")  # fmt: skip
    if not body.input:
        raise ApiError(400, "There is nothing to embed. Give a text.", param="input")
    if not isinstance(body.input, str) and not isinstance(body.input[0], int) and len(body.input) > MAX_TEXTS:
        raise ApiError(400, f"There are {len(body.input):,} texts. Send up to {MAX_TEXTS:,}.", param="input")
    cancelled = threading.Event()
    working = asyncio.get_running_loop().run_in_executor(
        call.service.side_threads, _embed, session, body.input, cancelled
    )

    async def embedded() -> Embeddings:
        return await working

    try:
        found = await until_disconnect(call.http.receive, embedded())
    finally:
        cancelled.set()
    vectors = _narrowed(found.vectors, body.dimensions)
    data = [
        {"object": "embedding", "index": number, "embedding": _encoded(vector, body.encoding_format)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    about = {"truncated": found.truncated, "ignored": body.ignored()}
    return JSONResponse({"object": "list", "data": data, "model": model, "usage": usage, "rekindle": about})


def _narrowed(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        raise ApiError(400, f"The model's vectors have {vectors.shape[1]} dimensions.", param="dimensions")
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def _encoded(vector: NDArray[np.float32], form: str) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
