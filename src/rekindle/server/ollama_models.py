"""/api/tags, /api/show, /api/ps and /api/version: the models that are served, as Ollama describes them.

/api/pull and /api/delete: the models on this machine, for operators.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle import __version__
from rekindle.core.identity import digest_of_fields
from rekindle.models import ollama, registry
from rekindle.models.hub import HUB_NAME
from rekindle.models.pull import pull
from rekindle.models.sources import NAMED
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.host import ServedModel
from rekindle.server.ollama import OLLAMA, ModelBody, PullRequest, timestamp
from rekindle.server.protocol import EventStream
from rekindle.text.reasoning import detect_thoughts

# Clients ask which version of Ollama they talk to: that of the API that is spoken here.
_API_VERSION = "0.11.0"
_FORMATS = {"llamacpp": "gguf", "onnx": "onnx"}
_FOR_EVER = "9999-12-31T23:59:59+00:00"


async def show_version(_: Call) -> Response:
    """The version of Ollama's API, and Rekindle's own."""
    return JSONResponse({"version": _API_VERSION, "rekindle": {"version": __version__}})


async def list_tags(call: Call) -> Response:
    """The models that are served, as Ollama lists them."""
    written, models = timestamp(call.host.shared.started), []
    for model in call.host.models.values():
        size = await call.in_thread(partial(_size_bytes, model))
        own = {"size": size, "modified_at": written, "rekindle": {"loaded": model.loaded}}
        models += [{**_model(model, name), **own} for name in ("", *model.adapters)]
    embedder = call.host.shared.session_settings.embedder
    about = {"digest": digest_of_fields(embedder), "size": 0, "modified_at": written, "details": _details("", "", "")}
    return JSONResponse({"models": [*models, {"name": embedder, "model": embedder, **about}]})


async def list_running(call: Call) -> Response:
    """The models that are in memory, as Ollama lists them."""
    models = []
    for model in call.host.models.values():
        if model.service is None or not model.loaded:
            continue
        session = model.service.session
        size, left = await call.in_thread(partial(_size_bytes, model)), session.rests_in
        about = {
            "size": size,
            "size_vram": 0 if session.engine.device == "cpu" else size,
            "expires_at": _FOR_EVER if left is None else timestamp(time.time() + left),
            "context_length": session.engine.context_tokens,
        }
        models.append({**_model(model), **about})
    return JSONResponse({"models": models})


async def show_tag(call: Call, body: ModelBody) -> Response:
    """One of the models that are served, as Ollama shows it. Of one that was never loaded, little is known."""
    if body.named and call.host.is_embedder(body.named):
        return JSONResponse(_shown(call, "", _details("", "", ""), {}, ["embedding"]))
    named = call.host.resolve(body.named)
    model = call.host.models[named.model]
    details, service = _model(model, named.adapter)["details"], model.service
    if service is None:
        return JSONResponse(_shown(call, "", details, {}, ["completion", "tools"]))
    engine = service.session.engine
    template, fills_in = await call.in_thread(lambda: (service.template, service.fills_in))
    thinks = ["thinking"] if detect_thoughts(template) is not None else []
    info = {
        "general.architecture": "rekindle",
        "general.basename": model.name,
        "general.parameter_count": engine.parameters,
        "rekindle.context_length": engine.context_tokens,
    }
    inserts = ["insert"] if fills_in else []
    return JSONResponse(_shown(call, template, details, info, ["completion", "tools", *inserts, *thinks]))


def _shown(
    call: Call, template: str, details: dict[str, Any], info: dict[str, Any], capabilities: Sequence[str]
) -> dict[str, Any]:
    return {
        "modelfile": "",
        "parameters": f"num_ctx {info['rekindle.context_length']}" if info else "",
        "template": template,
        "details": details,
        "model_info": info,
        "capabilities": list(capabilities),
        "modified_at": timestamp(call.host.shared.started),
    }


def _model(model: ServedModel, adapter: str = "") -> dict[str, Any]:
    """A language model, or an adapter of it; the digest changes with its names, not with its files."""
    form, parameters = "", ""
    if model.service is not None:
        session = model.service.session
        form, parameters = _FORMATS.get(session.engine_kind, "safetensors"), _short(session.engine.parameters)
    name, parent = adapter or model.name, model.name if adapter else ""
    digest = digest_of_fields(name, model.name)
    return {"name": name, "model": name, "digest": digest, "details": _details(parent, form, parameters)}


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


def _size_bytes(model: ServedModel) -> int:
    """Bytes of the model's files; 0 if it was not pulled."""
    entry = registry.lookup(model.name)
    return 0 if entry is None else entry.size_bytes()


async def pull_model(call: Call, body: PullRequest) -> Response:
    """Get a model, so that `rekindle serve NAME` finds it; this server goes on with its own."""
    call.require_operator()
    spec = _spec(body)
    if not (spec in NAMED or spec.startswith(ollama.PREFIX) or HUB_NAME.fullmatch(spec)):  # no path of this machine
        raise ApiError(404, f"model: {spec!r} is no name of a model. Give one (smollm2), ollama:NAME or ORG/NAME.")
    last = {"status": "success", "rekindle": {"served": spec in call.host.models, "ignored": body.ignored()}}
    lines = _progress(spec, last)
    if body.stream is not False:
        return EventStream(OLLAMA, lines, {}, lines, call.failed)
    async for _ in lines:
        pass
    return JSONResponse(last)


async def _progress(spec: str, last: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any], None]:
    """What is done, as it is done. A client that leaves does not stop a download, a server that stops does."""
    loop, stages = asyncio.get_running_loop(), asyncio.Queue[Mapping[str, Any] | Exception]()

    def report(stage: str, done: int, total: int) -> None:
        line = {"status": stage, "digest": digest_of_fields(spec, stage), "completed": done, "total": total}
        loop.call_soon_threadsafe(stages.put_nowait, line)

    def work() -> None:
        outcome: Mapping[str, Any] | Exception = last
        try:
            pull(spec, report)
        except Exception as error:  # noqa: BLE001  (raised again by the reader)
            outcome = error
        with suppress(RuntimeError):  # the server stopped
            loop.call_soon_threadsafe(stages.put_nowait, outcome)

    yield {"status": "pulling manifest"}
    threading.Thread(target=work, name="rekindle-pull", daemon=True).start()
    line: Mapping[str, Any] | None = None
    while line is not last:
        item = await stages.get()
        if isinstance(item, Exception):
            raise item
        line = item
        yield line


async def delete_model(call: Call, body: ModelBody) -> Response:
    """Remove a pulled model; files used in place stay."""
    call.require_operator()
    spec = _spec(body)
    if spec in call.host.models:
        raise ApiError(409, f"{spec!r} is served here. Stop the server first, then: rekindle rm {spec}.")
    await call.in_thread(lambda: registry.remove(spec))
    return JSONResponse({})


def _spec(body: ModelBody) -> str:
    if not body.named:
        raise ApiError(400, "model: Give the name of a model.", param="model")
    return body.named.removesuffix(":latest") if registry.lookup(body.named) is None else body.named
