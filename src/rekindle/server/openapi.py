"""The OpenAPI document of the server, and a page that shows it without any script or foreign host.

Response schemas name what clients may rely on; a response may have more. Tests hold responses against them.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from rekindle import __version__
from rekindle.server.routes import Endpoint

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(kind: Schema) -> Schema:
    return {"anyOf": [kind, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}


def _texts(names: str) -> dict[str, Schema]:
    return dict.fromkeys(names.split(), _TEXT)


def _counts(names: str) -> dict[str, Schema]:
    return dict.fromkeys(names.split(), _COUNT)


_USAGE = _object(
    **_counts("prompt_tokens completion_tokens total_tokens"), prompt_tokens_details=_object(cached_tokens=_COUNT)
)
_TIMINGS = _object(cache_n=_COUNT, prompt_n=_COUNT, prompt_ms=_NUMBER, predicted_n=_COUNT, predicted_ms=_NUMBER)
_REUSED = _object(
    level=_TEXT,
    loaded=_COUNT,
    loaded_from=_object(engine=_COUNT, memory=_COUNT, disk=_COUNT),  # and shared tiers, where they brought something
    quantized=_COUNT,
    calibrated_bits=_or_null(_FLAG),
    computed=_COUNT,
    miss=_or_null(_TEXT),
    replayed_replies=_COUNT,
    origin_miss=_or_null(_TEXT),
    ignored=_list(_TEXT),
)
_HEAD = {"id": _TEXT, "object": _TEXT, "created": _COUNT, "model": _TEXT}
_STATS = {"usage": _USAGE, "timings": _TIMINGS, "rekindle": _REUSED}
_MODEL = _object(id=_TEXT, object=_TEXT, created=_COUNT, owned_by=_TEXT, capabilities=_list(_TEXT))
_APP = {"id": _TEXT, "state": _TEXT, "requests": _COUNT, "seen": _NUMBER}
_RANK = _or_null({"type": "integer", "minimum": 1})
_DOCUMENT = {**_texts("name source title"), "app": _or_null(_TEXT), **_counts("chunks characters"), "added": _NUMBER}
_PASSAGE = {"document": _TEXT, "source": _TEXT, "title": _TEXT, "text": _TEXT, "score": _NUMBER}
_RETRIEVED = _object(method=_TEXT, ms=_NUMBER, left_out=_COUNT, uncertain=_FLAG)
_LOST = _object(at=_NUMBER, documents=_COUNT, passages=_COUNT, names=_list(_TEXT))
_EXPLAINED = _object(model=_TEXT, tokens=_COUNT, parts=_list(_object()), reason=_object(kind=_TEXT), text=_TEXT)

_OLLAMA_END = {"model": _TEXT, "created_at": _TEXT, "done": _FLAG, "done_reason": _TEXT, "rekindle": _object()}
_OLLAMA_MODEL = {"name": _TEXT, "model": _TEXT, "digest": _TEXT, "size": _COUNT, "details": _object()}

_NATIVE_REPLY = _object(
    content=_TEXT, stop=_FLAG, stop_type=_TEXT, tokens_predicted=_COUNT, tokens_cached=_COUNT, timings=_TIMINGS
)
_NATIVE: Schema = {"anyOf": [_NATIVE_REPLY, _list(_NATIVE_REPLY)]}

# By the name of the endpoint function.
RESPONSES: dict[str, Schema] = {
    "answer_chat": _object(
        **_HEAD,
        choices=_list(_object(index=_COUNT, message=_object(role=_TEXT, content=_or_null(_TEXT)), finish_reason=_TEXT)),
        **_STATS,
    ),
    "answer_completion": _object(
        **_HEAD, choices=_list(_object(index=_COUNT, text=_TEXT, finish_reason=_TEXT)), **_STATS
    ),
    "answer_embeddings": _object(
        object=_TEXT,
        data=_list(_object(object=_TEXT, index=_COUNT, embedding={"anyOf": [_list(_NUMBER), _TEXT]})),
        model=_TEXT,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "answer_responses": _object(
        id=_TEXT,
        object=_TEXT,
        created_at=_COUNT,
        status=_TEXT,
        model=_TEXT,
        output=_list(_object(type=_TEXT, id=_TEXT, status=_TEXT)),
        usage=_object(
            input_tokens=_COUNT,
            input_tokens_details=_object(cached_tokens=_COUNT),
            output_tokens=_COUNT,
            total_tokens=_COUNT,
        ),
        timings=_TIMINGS,
        rekindle=_REUSED,
    ),
    "count_input_tokens": _object(object=_TEXT, input_tokens=_COUNT),
    "answer_messages": _object(
        **_texts("id type role model"),
        content=_list(_object(type=_TEXT)),
        stop_reason=_TEXT,
        usage=_object(**_counts("input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens")),
        rekindle=_REUSED,
    ),
    "count_tokens": _object(input_tokens=_COUNT),
    "answer_native_completion": _NATIVE,
    "answer_infill": _NATIVE,
    "show_props": _object(total_slots=_COUNT, chat_template=_TEXT, default_generation_settings=_object(n_ctx=_COUNT)),
    "list_slots": _list(_object(id=_COUNT, n_ctx=_COUNT, is_processing=_FLAG)),
    "apply_template": _object(prompt=_TEXT),
    "answer_ollama_chat": _object(message=_object(role=_TEXT, content=_TEXT), **_OLLAMA_END),
    "answer_generate": _object(response=_TEXT, **_OLLAMA_END),
    "answer_embed": _object(model=_TEXT, embeddings=_list(_list(_NUMBER)), prompt_eval_count=_COUNT),
    "answer_old_embeddings": _object(embedding=_list(_NUMBER)),
    "list_tags": _object(models=_list(_object(**_OLLAMA_MODEL, modified_at=_TEXT))),
    "list_running": _object(models=_list(_object(**_OLLAMA_MODEL, expires_at=_TEXT, context_length=_COUNT))),
    "show_tag": _object(template=_TEXT, details=_object(), model_info=_object(), capabilities=_list(_TEXT)),
    "show_version": _object(version=_TEXT),
    "pull_model": _object(status=_TEXT),
    "delete_model": _object(),
    "answer_question": _object(
        **_HEAD,
        question=_TEXT,
        answer=_TEXT,
        sources=_list(_object(number=_COUNT, **_PASSAGE, cut=_FLAG)),
        quote=_or_null(_object(number=_COUNT, text=_TEXT)),
        finish_reason=_TEXT,
        usage=_USAGE,
        timings=_TIMINGS,
        rekindle={"allOf": [_REUSED, _object(retrieval=_RETRIEVED)]},
    ),
    "search_documents": _object(
        data=_list(_object(**_PASSAGE, bm25_rank=_RANK, embedding_rank=_RANK, chunk=_COUNT)),
        retrieval=_TEXT,
        ms=_NUMBER,
    ),
    "add_documents": _object(
        data=_list(_object(**_DOCUMENT)),
        **_counts("added changed unchanged passages embedded truncated"),
        problems=_list(_object(source=_TEXT, reason=_TEXT)),
        ms=_NUMBER,
    ),
    "list_documents": _object(data=_list(_object(**_DOCUMENT)), total=_COUNT, has_more=_FLAG),
    "show_document": _object(**_DOCUMENT, passages=_list(_object(chunk=_COUNT, text=_TEXT))),
    "forget_document": _object(forgotten=_COUNT, passages=_COUNT),
    "show_library": _object(documents=_COUNT, chunks=_COUNT, limit_bytes=_or_null(_COUNT), lost=_list(_LOST)),
    "check_library": _object(
        sound=_FLAG,
        damage=_or_null(_TEXT),
        salvaged=_or_null(_object(documents=_COUNT, passages=_COUNT)),
        lost=_list(_LOST),
        damaged_files=_COUNT,
    ),
    "list_models": _object(object=_TEXT, data=_list(_MODEL)),
    "show_model": _MODEL,
    "load_adapter": _object(
        **_texts("status name digest"), scale=_NUMBER, **_counts("rank size_bytes same_layers memory_bytes")
    ),
    "unload_adapter": _object(status=_TEXT, name=_TEXT),
    "tokenize": _object(
        tokens=_list({"anyOf": [_COUNT, _object(id=_COUNT, piece=_TEXT)]}), count=_COUNT, max_model_len=_COUNT
    ),
    "detokenize": _object(content=_TEXT),
    "greet": _object(name=_TEXT, version=_TEXT, docs=_TEXT),
    "health": _object(status=_TEXT, version=_TEXT, uptime_seconds=_NUMBER),
    "metrics": _TEXT,
    "show_server": _object(model=_TEXT, engine=_TEXT, device=_TEXT, context_tokens=_COUNT, loaded=_FLAG),
    "show_stats": _object(models=_list(_object())),
    "watch_requests": _object(first=_FLAG, rows=_list(_object()), server=_object(model=_TEXT)),
    "show_request": _object(id=_COUNT, state=_TEXT, spans=_list(_list({})), tokens=_COUNT),
    "show_map": _object(entries=_list(_object()), answers=_list(_object()), origins=_list(_object())),
    "show_usage": _object(hour=_list(_object()), month=_list(_object())),
    "list_entries": _object(data=_list(_object(name=_TEXT, tokens=_COUNT)), total=_COUNT, has_more=_FLAG),
    "remove_entry": _object(removed=_COUNT),
    "pin_entry": _object(pinned=_FLAG),
    "check_cache": _object(problems=_list({})),
    "warm_prompt": _object(usage=_object(prompt_tokens=_COUNT, cached_tokens=_COUNT), rekindle=_REUSED),
    "explain_prompt": _EXPLAINED,
    "explain_last": _EXPLAINED,
    "list_apps": _object(data=_list(_object(**_APP))),
    "set_app": _object(**_APP, stopped_requests=_COUNT),
}


_DESCRIPTION = "A server for clients of OpenAI, Anthropic, Ollama and llama.cpp."
_REF = "#/components/schemas/{model}"
_ERRORS = {
    "OpenAI": _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_or_null(_TEXT))),
    "Anthropic": _object(type=_TEXT, error=_object(type=_TEXT, message=_TEXT)),
    "Ollama": _object(error=_TEXT),
    "LlamaCpp": _object(error=_object(code=_COUNT, message=_TEXT, type=_TEXT)),
}  # by protocol


def openapi_document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document, for programs."""
    kinds = list(dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None))
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = re.sub(r":\w+\}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rekindle", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}) | {f"{name}Error": schema for name, schema in _ERRORS.items()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media_type: {"schema": RESPONSES[endpoint.answer.__name__]}}
    if endpoint.streams:  # of one event: this version of OpenAPI cannot describe a stream
        event = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}
        media = endpoint.protocol.media_type
        content[media] = event if media == "text/event-stream" else {}
    reference = {"$ref": _REF.format(model=f"{endpoint.protocol.name}Error")}
    error = {"content": {"application/json": {"schema": reference}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}_{endpoint.answer.__name__}",
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "What is wrong with the request.", **error},
            "5XX": {"description": "What went wrong here.", **error},
        },
        "security": [] if endpoint.open else [{}, {"key": []}],
    }
    if endpoint.parameters:
        operation["parameters"] = endpoint.parameters
    if endpoint.body is not None:
        reference = {"$ref": _REF.format(model=endpoint.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return operation


def docs_page(endpoints: Sequence[Endpoint]) -> str:
    """The same as a page, for people."""
    schemas = openapi_document(endpoints)["components"]["schemas"]
    sections = []
    for endpoint in endpoints:
        rows = "".join(_row(name, field) for name, field in _fields(endpoint, schemas))
        table = f"<table>{rows}</table>" if rows else ""
        sections.append(
            f"<details><summary><b>{endpoint.method}</b> <code>{html.escape(endpoint.path)}</code> "
            f"{html.escape(endpoint.summary)}</summary>{table}</details>"
        )
    style = (
        "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
        "summary{padding:.3rem 0;cursor:pointer}table{margin:0 0 1rem 1.5rem;border-spacing:1rem .2rem}"
        "td{vertical-align:top}b{display:inline-block;width:4.5rem}"
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Rekindle</title><style>{style}</style>"
        f"<h1>Rekindle {__version__}</h1><p>OpenAI-compatible. For programs: <a href=/openapi.json>openapi.json</a>."
        f"</p>{''.join(sections)}</html>"
    )


def _fields(endpoint: Endpoint, schemas: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if endpoint.body is None:
        return [(parameter["name"], parameter["schema"]) for parameter in endpoint.parameters]
    return list(schemas[endpoint.body.__name__].get("properties", {}).items())


def _row(name: str, field: dict[str, Any]) -> str:
    kinds = [_kind(option) for option in field.get("anyOf", [field])]
    default = f" = {json.dumps(field['default'])}" if field.get("default") is not None else ""
    description = html.escape(field.get("description", ""))
    shown = html.escape(" | ".join(dict.fromkeys(kind for kind in kinds if kind != "null")) + default)
    return f"<tr><td><code>{html.escape(name)}</code><td>{shown}<td>{description}"


def _kind(option: dict[str, Any]) -> str:
    if "enum" in option:
        return " | ".join(map(str, option["enum"]))
    if "items" in option:
        return f"list of {_kind(option['items'])}" if option["items"] else "list"
    return str(option.get("type") or option.get("$ref", "any").rsplit("/", 1)[-1])
