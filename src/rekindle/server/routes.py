"""Every endpoint: where it is, what it takes, who may call it. The router and the OpenAPI document are made of this."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from rekindle.server import admin, knowledge, plain
from rekindle.server.adapters import load_adapter, unload_adapter
from rekindle.server.ask import answer_question
from rekindle.server.call import MOST_PAGE, PAGE
from rekindle.server.chat import answer_chat
from rekindle.server.completions import answer_completion
from rekindle.server.embeddings import answer_embeddings
from rekindle.server.schema import (
    AppRequest,
    Asked,
    AskRequest,
    ChatRequest,
    CheckRequest,
    CompletionRequest,
    DetokenizeRequest,
    DocumentsRequest,
    EmbeddingsRequest,
    LoadAdapterRequest,
    PromptRequest,
    SearchRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)


@dataclass(frozen=True)
class Endpoint:
    """One method at one path. `answer(call)`, or `answer(call, body)` where it takes one."""

    method: str
    path: str
    answer: Callable[..., Awaitable[Response]]
    body: type[Asked] | None = None
    open: bool = False  # needs no key
    streams: bool = False
    media_type: str = "application/json"

    @property
    def summary(self) -> str:
        """What it is for, in one sentence."""
        return (self.answer.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """What stands in the path or behind it, as OpenAPI has it."""
        names = [part[1:-1].split(":")[0] for part in self.path.split("/") if part.startswith("{")]
        told: list[dict[str, Any]] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
        if self.answer in (admin.list_entries, knowledge.list_documents):
            limit = {"type": "integer", "minimum": 1, "maximum": MOST_PAGE, "default": PAGE}
            told.append({"name": "limit", "in": "query", "schema": limit})
            told.append({"name": "after", "in": "query", "schema": {"type": "string"}})
        if self.answer in (knowledge.list_documents, knowledge.show_document, knowledge.forget_document):
            salt = {"type": "string", "maxLength": knowledge.MOST_SALT}
            told.append({"name": "cache_salt", "in": "query", "schema": salt})
        return told


_OWN = "/v1/rekindle"
ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", answer_chat, ChatRequest, streams=True),
    Endpoint("POST", "/v1/completions", answer_completion, CompletionRequest, streams=True),
    Endpoint("POST", "/v1/embeddings", answer_embeddings, EmbeddingsRequest),
    Endpoint("GET", "/v1/models", plain.list_models),
    Endpoint("GET", "/v1/models/{name:path}", plain.show_model),
    Endpoint("POST", "/v1/load_lora_adapter", load_adapter, LoadAdapterRequest),
    Endpoint("POST", "/v1/unload_lora_adapter", unload_adapter, UnloadAdapterRequest),
    Endpoint("POST", "/tokenize", plain.tokenize, TokenizeRequest),
    Endpoint("POST", "/detokenize", plain.detokenize, DetokenizeRequest),
    Endpoint("GET", "/health", plain.health, open=True),
    Endpoint("GET", "/metrics", plain.metrics, media_type="text/plain"),
    Endpoint("POST", f"{_OWN}/ask", answer_question, AskRequest, streams=True),
    Endpoint("POST", f"{_OWN}/search", knowledge.search_documents, SearchRequest),
    Endpoint("POST", f"{_OWN}/documents", knowledge.add_documents, DocumentsRequest),
    Endpoint("GET", f"{_OWN}/documents", knowledge.list_documents),
    Endpoint("GET", f"{_OWN}/documents/{{name}}", knowledge.show_document),
    Endpoint("DELETE", f"{_OWN}/documents/{{name}}", knowledge.forget_document),
    Endpoint("GET", f"{_OWN}/server", admin.show_server),
    Endpoint("GET", f"{_OWN}/stats", admin.show_stats),
    Endpoint("GET", f"{_OWN}/entries", admin.list_entries),
    Endpoint("DELETE", f"{_OWN}/entries/{{name}}", admin.remove_entry),
    Endpoint("PUT", f"{_OWN}/entries/{{name}}/pin", admin.pin_entry),
    Endpoint("DELETE", f"{_OWN}/entries/{{name}}/pin", admin.pin_entry),
    Endpoint("POST", f"{_OWN}/check", admin.check_cache, CheckRequest),
    Endpoint("POST", f"{_OWN}/warm", admin.warm_prompt, PromptRequest),
    Endpoint("POST", f"{_OWN}/explain", admin.explain_prompt, PromptRequest),
    Endpoint("GET", f"{_OWN}/explain/last", admin.explain_last),
    Endpoint("GET", f"{_OWN}/apps", admin.list_apps),
    Endpoint("PUT", f"{_OWN}/apps/{{id}}", admin.set_app, AppRequest),
)
