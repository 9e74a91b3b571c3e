"""/v1/models, LoRA adapters, /tokenize and /detokenize.

Adapters are models of their own to clients: loaded and unloaded while the server runs, as in vLLM.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.request import parse_prompt
from rekindle.errors import AdapterNotFound
from rekindle.server.body import messages_of
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.schema import DetokenizeRequest, LoadAdapterRequest, TokenizeRequest, UnloadAdapterRequest


async def list_models(call: Call) -> Response:
    """The models that are served: the language model, its adapters, and the embedder."""
    return JSONResponse({"object": "list", "data": _models(call)})


async def show_model(call: Call) -> Response:
    """One of the models that are served."""
    wanted, models = call.http.path_params["name"], {model["id"]: model for model in _models(call)}
    if wanted not in models:  # an alias, or MODEL:ADAPTER
        wanted = call.adapter_of(wanted) or call.service.model
    return JSONResponse(models[wanted])


def _models(call: Call) -> list[dict[str, Any]]:
    service, adapters = call.service, call.service.session.adapters
    about = {"object": "model", "created": int(service.started), "owned_by": "rekindle"}
    context = service.session.engine.context_tokens
    own = {**about, "max_model_len": context, "capabilities": ["completion"]}
    return [
        {"id": service.model, **own},
        *({"id": one.name, **own, "parent": service.model, "loaded": adapters.is_loaded(one)} for one in adapters),
        {"id": service.session.settings.embedder, **about, "capabilities": ["embedding"]},
    ]


async def tokenize(call: Call, body: TokenizeRequest) -> Response:
    """The tokens of a text, or of messages in the model's template."""
    call.adapter_of(body.model)
    given = body.content if body.content is not None else body.prompt
    if (given is None) == (body.messages is None):
        raise ApiError(400, "Give either content (or prompt) or messages.", param="content")
    return await asyncio.get_running_loop().run_in_executor(call.service.side_threads, _tokenized, call, body, given)


def _tokenized(call: Call, body: TokenizeRequest, given: str | None) -> Response:
    tokens = _tokens(call, body, given)
    if body.with_pieces:
        call.check_tokens(tokens)
    spell = call.service.session.engine.tokenizer.spell
    shown: list[Any] = [{"id": t, "piece": spell([t])} for t in tokens] if body.with_pieces else tokens
    return JSONResponse({"tokens": shown, "count": len(tokens), "max_model_len": call.service.reply_length().longest})


def _tokens(call: Call, body: TokenizeRequest, given: str | None) -> list[int]:
    engine = call.service.session.engine
    tokenizer, most = engine.tokenizer, engine.context_tokens
    if given == "":
        return []
    if given is not None:
        return tokenizer.encode(str(parse_prompt(given)), token_limit=most)
    messages = parse_prompt(messages_of(body.messages or []))
    return tokenizer.encode_chat(messages, token_limit=most)  # type: ignore[arg-type]


async def detokenize(call: Call, body: DetokenizeRequest) -> Response:
    """The text of token ids."""
    call.adapter_of(body.model)
    call.check_tokens(body.tokens)
    tokenizer = call.service.session.engine.tokenizer
    if body.tokens and max(body.tokens) >= tokenizer.vocabulary_size:
        raise ApiError(400, f"Token ids are below {tokenizer.vocabulary_size:,}.", param="tokens")
    decoding = asyncio.get_running_loop().run_in_executor(call.service.side_threads, tokenizer.decode, body.tokens)
    text = await decoding if body.tokens else ""
    return JSONResponse({"content": text, "prompt": text})


async def load_adapter(call: Call, body: LoadAdapterRequest) -> Response:
    """Load a LoRA adapter from a folder on the server; it is served as a model under its name."""
    call.require_operator()
    service = call.service
    if body.lora_name in (service.model, service.session.settings.embedder):
        raise ApiError(400, f"{body.lora_name!r} is the name of a model here. Use another.", param="lora_name")
    adapters = service.session.adapters
    adapter = await call.in_thread(lambda: adapters.load(body.lora_name, body.lora_path, body.scale))
    return JSONResponse({"status": "loaded", **asdict(adapter)})


async def unload_adapter(call: Call, body: UnloadAdapterRequest) -> Response:
    """Unload a LoRA adapter after the requests that use it. KV that was computed with it stays in the cache."""
    call.require_operator()
    try:
        await call.in_thread(lambda: call.service.session.adapters.unload(body.lora_name))
    except AdapterNotFound:
        raise ApiError(404, f"No adapter {body.lora_name!r} is loaded.", code="model_not_found") from None
    return JSONResponse({"status": "unloaded", "name": body.lora_name})
