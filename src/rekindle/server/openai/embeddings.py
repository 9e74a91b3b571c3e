"""/v1/embeddings."""

from __future__ import annotations

import base64

import numpy as np
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from rekindle.server.call import Call
from rekindle.server.embed_texts import check_embedder, embed_texts, narrowed
from rekindle.server.schema import EmbeddingsRequest


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
