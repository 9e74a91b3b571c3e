"""/api/tags, /api/show, /api/ps and /api/version: the models that are served, as Ollama describes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle import __version__
from rekindle.core.identity import digest_of_fields
from rekindle.models import ollama, registry
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.ollama.schema import ModelBody
from rekindle.server.ollama.translate import timestamp
from rekindle.text.fill_in import has_fill_in
from rekindle.text.reasoning import detect_thoughts

# Clients ask which version of Ollama they talk to: that of the API that is spoken here.
_API_VERSION = "0.11.0"
_LATEST = ":latest"
_FORMATS = {"llamacpp": "gguf", "onnx": "onnx"}
_FOR_EVER = "9999-12-31T23:59:59+00:00"


def without_latest(name: str | None) -> str | None:
    """A name without the tag that Ollama's clients add."""
    return None if name is None else name.removesuffix(_LATEST)


def adapter_named(call: Call, name: str | None) -> str:
    """The adapter that a name stands for, "" for the base model. Raises `ApiError` 404.

    `llama3.2` and `llama3.2:latest` also stand for `ollama:llama3.2`.
    """
    short = without_latest(name)
    for known in (short, f"{ollama.PREFIX}{name}", f"{ollama.PREFIX}{short}"):
        try:
            return call.adapter_of(known)
        except ApiError:
            continue
    return call.adapter_of(name)


async def show_version(_: Call) -> Response:
    """The version of Ollama's API, and Rekindle's own."""
    return JSONResponse({"version": _API_VERSION, "rekindle": {"version": __version__}})


async def list_tags(call: Call) -> Response:
    """The models that are served, as Ollama lists them."""
    size, written = await call.in_thread(lambda: _size_bytes(call)), timestamp(call.service.started)
    names = [call.service.model, *(adapter.name for adapter in call.service.session.adapters)]
    models = [{**_model(call, name), "size": size, "modified_at": written} for name in names]
    embedder = call.service.session.settings.embedder
    about = {"digest": digest_of_fields(embedder), "size": 0, "modified_at": written, "details": _details("", "", "")}
    return JSONResponse({"models": [*models, {"name": embedder, "model": embedder, **about}]})


async def list_running(call: Call) -> Response:
    """The models that are in memory, as Ollama lists them."""
    session = call.service.session
    if session.resting:
        return JSONResponse({"models": []})
    size, left = await call.in_thread(lambda: _size_bytes(call)), session.rests_in
    about = {
        "size": size,
        "size_vram": 0 if session.engine.device == "cpu" else size,
        "expires_at": _FOR_EVER if left is None else timestamp(time.time() + left),
        "context_length": session.engine.context_tokens,
    }
    return JSONResponse({"models": [{**_model(call, call.service.model), **about}]})


async def show_tag(call: Call, body: ModelBody) -> Response:
    """One of the models that are served, as Ollama shows it."""
    service, wanted = call.service, without_latest(body.named)
    if wanted and wanted == service.session.settings.embedder:
        return JSONResponse(_shown(call, "", _details("", "", ""), {}, ["embedding"]))
    name = adapter_named(call, body.named) or service.model
    engine = service.session.engine
    template = await call.template()
    thinks = ["thinking"] if detect_thoughts(template) is not None else []
    info = {
        "general.architecture": "rekindle",
        "general.basename": service.model,
        "general.parameter_count": engine.parameters,
        "rekindle.context_length": engine.context_tokens,
    }
    details = _model(call, name)["details"]
    inserts = ["insert"] if has_fill_in(engine.tokenizer) else []
    return JSONResponse(_shown(call, template, details, info, ["completion", "tools", *inserts, *thinks]))


def _shown(
    call: Call, template: str, details: dict[str, Any], info: dict[str, Any], capabilities: Sequence[str]
) -> dict[str, Any]:
    return {
        "modelfile": "",
        "parameters": f"num_ctx {call.service.session.engine.context_tokens}" if info else "",
        "template": template,
        "details": details,
        "model_info": info,
        "capabilities": list(capabilities),
        "modified_at": timestamp(call.service.started),
    }


def _model(call: Call, name: str) -> dict[str, Any]:
    """A language model; its digest changes with its name and its number of parameters, not with its files."""
    session = call.service.session
    parent = "" if name == call.service.model else call.service.model
    details = _details(parent, _FORMATS.get(session.engine_kind, "safetensors"), _short(session.engine.parameters))
    digest = digest_of_fields(name, call.service.model, str(session.engine.parameters))
    return {"name": name, "model": name, "digest": digest, "details": details}


def _details(parent: str, form: str, parameters: str) -> dict[str, Any]:
    return {
        "parent_model": parent,
        "format": form,
        "family": "",
        "families": [],
        "parameter_size": parameters,
        "quantization_level": "",
    }


def _short(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _size_bytes(call: Call) -> int:
    """Bytes of the model's files; 0 if it was not pulled."""
    entry = registry.lookup(call.service.model)
    return 0 if entry is None else entry.size_bytes()
