"""/v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from rekindle.engine.embedder import Embedded
from rekindle.errors import nearest
from rekindle.run.session import Session
from rekindle.server.problem import Problem
from rekindle.server.schema import MOST_TEXTS, EmbeddingsRequest
from rekindle.server.stream import while_there

if TYPE_CHECKING:
    from rekindle.server.call import Call


class Embeddings:
    """The embedder of a server: the session's, loaded when it is first asked."""

    def __init__(self, session: Session) -> None:
        self.model = session.settings.embedder
        self.embedder = session.knowledge.embedder

    def embed(self, given: str | Sequence[Any], cancelled: threading.Event) -> Embedded:
        """The vectors of a text or several, given as text or as token ids."""
        embedder = self.embedder()
        several: Sequence[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        if isinstance(several[0], str):
            return embedder.embed(several, cancelled=cancelled.is_set)
        return embedder.embed_tokens(several, cancelled=cancelled.is_set)


async def answer_embeddings(call: Call, body: EmbeddingsRequest) -> Response:
    """Vectors of texts."""
    own = call.service.embeddings
    if body.model and body.model != own.model:
        raise Problem(404, f"{body.model!r} gives no embeddings here.{nearest(body.model, [own.model])}",
                      code="model_not_found")  # fmt: skip
    if not body.input:
        raise Problem(400, "There is nothing to embed. Give a text.", param="input")
    if not isinstance(body.input, str) and not isinstance(body.input[0], int) and len(body.input) > MOST_TEXTS:
        raise Problem(400, f"There are {len(body.input):,} texts. Send up to {MOST_TEXTS:,}.", param="input")
    cancelled = threading.Event()
    working = asyncio.get_running_loop().run_in_executor(call.service.aside, own.embed, body.input, cancelled)

    async def embedded() -> Embedded:
        return await working

    try:
        found = await while_there(call.http.receive, embedded())
    finally:
        cancelled.set()
    vectors = _narrowed(found.vectors, body.dimensions)
    data = [
        {"object": "embedding", "index": number, "embedding": _encoded(vector, body.encoding_format)}
        for number, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    about = {"truncated": found.truncated, "ignored": body.ignored()}
    return JSONResponse({"object": "list", "data": data, "model": own.model, "usage": usage, "rekindle": about})


def _narrowed(vectors: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if dimensions > vectors.shape[1]:
        raise Problem(400, f"The model's vectors have {vectors.shape[1]} dimensions.", param="dimensions")
    cut = vectors[:, :dimensions]
    lengths = np.linalg.norm(cut, axis=1, keepdims=True)
    return (cut / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def _encoded(vector: NDArray[np.float32], form: str) -> list[float] | str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if form == "base64" else vector.tolist()
