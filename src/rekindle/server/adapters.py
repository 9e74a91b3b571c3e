"""Adapters are models of their own to clients: loaded and unloaded while the server runs, as vLLM's are."""

from __future__ import annotations

from dataclasses import asdict

from starlette.responses import JSONResponse, Response

from rekindle.errors import AdapterNotFound
from rekindle.server.call import Call
from rekindle.server.problem import Problem
from rekindle.server.schema import LoadAdapterRequest, UnloadAdapterRequest


async def load_adapter(call: Call, body: LoadAdapterRequest) -> Response:
    """Load a LoRA adapter from a folder of the server's machine; it is served under its name."""
    call.require_operator()
    service = call.service
    if body.lora_name in (service.model, service.embeddings.model):
        raise Problem(400, f"{body.lora_name!r} is the name of a model here. Use another.", param="lora_name")
    adapters = service.session.adapters
    adapter = await call.aside(lambda: adapters.load(body.lora_name, body.lora_path, body.scale))
    return JSONResponse({"status": "loaded", **asdict(adapter)})


async def unload_adapter(call: Call, body: UnloadAdapterRequest) -> Response:
    """Unload one; requests that use it are answered first. What was computed with it stays in the cache."""
    call.require_operator()
    try:
        await call.aside(lambda: call.service.session.adapters.unload(body.lora_name))
    except AdapterNotFound:
        raise Problem(404, f"No adapter {body.lora_name!r} is loaded.", code="model_not_found") from None
    return JSONResponse({"status": "unloaded", "name": body.lora_name})
