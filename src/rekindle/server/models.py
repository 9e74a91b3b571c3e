"""/v1/models, LoRA adapters, /tokenize and /detokenize.

Adapters are models of their own to clients: loaded and unloaded while the server runs, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.request import parse_prompt
from rekindle.errors import AdapterNotFound
from rekindle.server.body import begins_turn, messages_of
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.schema import DetokenizeRequest, LoadAdapterRequest, TokenizeRequest, UnloadAdapterRequest


async def list_models(call: Call) -> Response:
    """The models that are served: language models, loaded or not, their adapters, and the embedder."""
    models = _models(call)
    if not _wants_anthropics(call):
        return JSONResponse({"object": "list", "data": models})
    data = [_as_anthropic(model) for model in models if "completion" in model["capabilities"]]
    return JSONResponse({"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]})


async def show_model(call: Call) -> Response:
    """One of the models that are served."""
    wanted, models = call.http.path_params["name"], _models(call)
    found = next((model for model in models if model["id"] == wanted), None)
    if found is None and call.host.is_embedder(wanted):
        found = models[-1]
    if found is None:  # an alias, or MODEL:ADAPTER
        meant = call.host.resolve(wanted)
        parent = meant.model if meant.adapter else None
        name = meant.adapter or meant.model
        found = next(model for model in models if (model["id"], model.get("parent")) == (name, parent))
    return JSONResponse(_as_anthropic(found) if _wants_anthropics(call) else found)


def _wants_anthropics(call: Call) -> bool:
    """Whether the client is one of Anthropic's: both APIs have these paths."""
    return "anthropic-version" in call.http.headers


def _as_anthropic(model: Mapping[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(model["created"], timezone.utc).isoformat()
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": created}


def _models(call: Call) -> list[dict[str, Any]]:
    shared = call.host.shared
    about = {"object": "model", "created": int(shared.started), "owned_by": "rekindle"}
    found: list[dict[str, Any]] = []
    for model in call.host.models.values():
        own = {**about, "capabilities": ["completion"]}
        if model.service is not None:
            own["max_model_len"] = model.service.session.engine.context_tokens
        found.append({"id": model.name, **own, "loaded": model.loaded})
        ready = set() if model.service is None else model.service.session.adapters.loaded_names()
        found += [{"id": one, **own, "parent": model.name, "loaded": one in ready} for one in model.adapters]
    return [*found, {"id": shared.session_settings.embedder, **about, "capabilities": ["embedding"]}]


async def tokenize(call: Call, body: TokenizeRequest) -> Response:
    """The tokens of a text, or of messages in the model's template."""
    call.adapter_of(body.model)
    given = body.content if body.content is not None else body.prompt
    if (given is None) == (body.messages is None):
        raise ApiError(400, "Give either content (or prompt) or messages.", param="content")
    return await call.tokenized(lambda: _tokenized(call, body, given))


def _tokenized(call: Call, body: TokenizeRequest, given: str | None) -> Response:
    with call.service.session.staying():
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
        chosen = body.add_special_tokens if body.add_special is None else body.add_special
        special = body.content is None if chosen is None else chosen
        lead = 0 if special else len(tokenizer.encode(""))
        return tokenizer.encode(str(parse_prompt(given)), token_limit=most)[lead:]
    messages, begins = parse_prompt(messages_of(body.messages or [])), begins_turn(body, body.messages or [])
    return tokenizer.encode_chat(messages, token_limit=most, add_generation_prompt=begins)  # type: ignore[arg-type]


async def detokenize(call: Call, body: DetokenizeRequest) -> Response:
    """The text of token ids."""
    call.adapter_of(body.model)
    call.check_tokens(body.tokens)
    text = await call.tokenized(lambda: _decoded(call, body.tokens)) if body.tokens else ""
    return JSONResponse({"content": text, "prompt": text})


def _decoded(call: Call, tokens: list[int]) -> str:
    with call.service.session.staying():
        tokenizer = call.service.session.engine.tokenizer
        if max(tokens) >= tokenizer.vocabulary_size:
            raise ApiError(400, f"Token ids are below {tokenizer.vocabulary_size:,}.", param="tokens")
        return tokenizer.decode(tokens)


async def load_adapter(call: Call, body: LoadAdapterRequest) -> Response:
    """Load a LoRA adapter from a folder on the server; it is served as a model under its name."""
    call.require_operator()
    service = call.service
    if body.lora_name in (*call.host.models, service.session.settings.embedder):
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
