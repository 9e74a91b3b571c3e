"""The OpenAPI document of the server, and a page that shows it without any script or foreign host."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from rekindle import __version__
from rekindle.server.answers import ANSWERS
from rekindle.server.routes import Endpoint

_REF = "#/components/schemas/{model}"
_PROBLEM = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def document(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """What the server offers, for programs."""
    kinds = list(dict.fromkeys(endpoint.body for endpoint in endpoints if endpoint.body is not None))
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = re.sub(r":\w+\}", "}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rekindle", "version": __version__, "description": "An OpenAI-compatible server."},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Problem": _PROBLEM},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.media_type: {"schema": ANSWERS[endpoint.answer.__name__]}}
    if endpoint.streams:  # of one event: this version of OpenAPI has no word for many
        content["text/event-stream"] = {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}
    problem = {"content": {"application/json": {"schema": {"$ref": _REF.format(model="Problem")}}}}
    told: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}_{endpoint.answer.__name__}",
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "What is wrong with the request.", **problem},
            "5XX": {"description": "What went wrong here.", **problem},
        },
        "security": [] if endpoint.open else [{}, {"key": []}],
    }
    if endpoint.parameters:
        told["parameters"] = endpoint.parameters
    if endpoint.body is not None:
        reference = {"$ref": _REF.format(model=endpoint.body.__name__)}
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return told


def page(endpoints: Sequence[Endpoint]) -> str:
    """What the server offers, for people."""
    schemas = document(endpoints)["components"]["schemas"]
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
    told = html.escape(field.get("description", ""))
    shown = html.escape(" | ".join(dict.fromkeys(kind for kind in kinds if kind != "null")) + default)
    return f"<tr><td><code>{html.escape(name)}</code><td>{shown}<td>{told}"


def _kind(option: dict[str, Any]) -> str:
    if "enum" in option:
        return " | ".join(map(str, option["enum"]))
    if "items" in option:
        return f"list of {_kind(option['items'])}" if option["items"] else "list"
    return str(option.get("type") or option.get("$ref", "any").rsplit("/", 1)[-1])
