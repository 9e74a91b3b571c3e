"""The small endpoints: models, tokens, health, metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle import __version__
from rekindle.core.request import parse_prompt
from rekindle.server.asked import messages_of
from rekindle.server.call import Call
from rekindle.server.metrics import CONTENT_TYPE
from rekindle.server.problem import Problem
from rekindle.server.schema import DetokenizeRequest, TokenizeRequest


async def list_models(call: Call) -> Response:
    """The models that are served: one that writes, its adapters, and one that embeds."""
    return JSONResponse({"object": "list", "data": _models(call)})


async def show_model(call: Call) -> Response:
    """One of them."""
    wanted = call.http.path_params["name"]
    for model in _models(call):
        if model["id"] == wanted:
            return JSONResponse(model)
    raise Problem(404, f"The model {wanted!r} is not served here.", code="model_not_found")


def _models(call: Call) -> list[dict[str, Any]]:
    service = call.service
    about = {"object": "model", "created": int(service.started), "owned_by": "rekindle"}
    context = service.session.engine.context_tokens
    own = {**about, "max_model_len": context, "capabilities": ["completion"]}
    return [
        {"id": service.model, **own},
        *({"id": adapter.name, **own, "parent": service.model} for adapter in service.session.adapters),
        {"id": service.embeddings.model, **about, "capabilities": ["embedding"]},
    ]


async def tokenize(call: Call, body: TokenizeRequest) -> Response:
    """The tokens of a text, or of messages in the model's template."""
    call.adapter_of(body.model)
    given = body.content if body.content is not None else body.prompt
    if (given is None) == (body.messages is None):
        raise Problem(400, "Give either content (or prompt) or messages.", param="content")
    return await asyncio.get_running_loop().run_in_executor(call.service.aside, _tokenized, call, body, given)


def _tokenized(call: Call, body: TokenizeRequest, given: str | None) -> Response:
    tokens = _tokens(call, body, given)
    spell = call.service.session.engine.tokenizer.spell
    shown: list[Any] = [{"id": t, "piece": spell([t])} for t in tokens] if body.with_pieces else tokens
    return JSONResponse({"tokens": shown, "count": len(tokens), "max_model_len": call.service.most_tokens()})


def _tokens(call: Call, body: TokenizeRequest, given: str | None) -> list[int]:
    tokenizer = call.service.session.engine.tokenizer
    if given == "":
        return []
    if given is not None:
        return tokenizer.encode(str(parse_prompt(given)))
    messages = parse_prompt(messages_of(body.messages or []))
    return tokenizer.encode_chat(messages)  # type: ignore[arg-type]


async def detokenize(call: Call, body: DetokenizeRequest) -> Response:
    """The text of tokens."""
    call.adapter_of(body.model)
    tokenizer = call.service.session.engine.tokenizer
    if body.tokens and max(body.tokens) >= tokenizer.vocabulary_size:
        raise Problem(400, f"Token ids are below {tokenizer.vocabulary_size:,}.", param="tokens")
    decoding = asyncio.get_running_loop().run_in_executor(call.service.aside, tokenizer.decode, body.tokens)
    text = await decoding if body.tokens else ""
    return JSONResponse({"content": text, "prompt": text})


async def health(call: Call) -> Response:
    """Whether it answers, for whoever watches over it. Needs no key, and tells nothing else."""
    return JSONResponse({"status": "ok", "version": __version__, "uptime_seconds": time.time() - call.service.started})


async def metrics(call: Call) -> Response:
    """What Prometheus reads."""
    text = await asyncio.get_running_loop().run_in_executor(call.service.aside, call.service.metrics.text, call.caller)
    return Response(text, media_type=CONTENT_TYPE)
