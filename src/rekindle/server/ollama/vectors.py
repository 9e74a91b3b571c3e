"""/api/embed and /api/embeddings."""

from __future__ import annotations

import time

from starlette.responses import JSONResponse, Response

from rekindle.server.call import Call
from rekindle.server.embed_texts import check_embedder, embed_texts, narrowed
from rekindle.server.errors import ApiError
from rekindle.server.model_names import without_latest
from rekindle.server.ollama.schema import EmbedRequest, OldEmbeddingsRequest
from rekindle.server.ollama.translate import nanoseconds


async def answer_embed(call: Call, body: EmbedRequest) -> Response:
    """Vectors of texts, in Ollama's format."""
    started, model = time.perf_counter(), check_embedder(call, without_latest(body.model or ""))
    found = await embed_texts(call, body.input)
    if found.truncated and body.truncate is False:
        raise ApiError(400, f"truncate: {found.truncated} of the texts are longer than {model} reads. Shorten them.")
    return JSONResponse(
        {
            "model": model,
            "embeddings": narrowed(found.vectors, body.dimensions).tolist(),
            "total_duration": nanoseconds(time.perf_counter() - started),
            "load_duration": 0,
            "prompt_eval_count": found.tokens,
            "rekindle": {"truncated": found.truncated, "ignored": body.ignored()},
        }
    )


async def answer_old_embeddings(call: Call, body: OldEmbeddingsRequest) -> Response:
    """The vector of one text, in Ollama's older format."""
    check_embedder(call, without_latest(body.model or ""))
    if not body.prompt:
        raise ApiError(400, "prompt: There is nothing to embed. Give a text.")
    found = await embed_texts(call, body.prompt)
    return JSONResponse({"embedding": found.vectors[0].tolist()})
