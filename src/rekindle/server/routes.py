"""The table of endpoints: path, body, access. The router and the OpenAPI document are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, get_type_hints

from starlette.responses import Response

from rekindle.server import admin, anthropic, embed_texts, knowledge, llamacpp, models, ollama, ollama_models
from rekindle.server.anthropic import ANTHROPIC
from rekindle.server.call import MAX_PAGE, PAGE
from rekindle.server.llamacpp import LLAMACPP
from rekindle.server.ollama import OLLAMA
from rekindle.server.openai import chat, completions, responses
from rekindle.server.openai.responses import RESPONSES_API
from rekindle.server.page import views
from rekindle.server.protocol import OPENAI, WireProtocol
from rekindle.server.schema import MAX_SALT, RequestBody

_OWN = "/v1/rekindle"


@dataclass(frozen=True)
class Endpoint:
    """One method at one path. `answer(call)`, or `answer(call, body)` where it takes one, of the type it says."""

    method: str
    path: str
    answer: Callable[..., Awaitable[Response]]
    open: bool = False  # needs no key
    streams: bool = False
    media_type: str = "application/json"
    protocol: WireProtocol = OPENAI
    needs: Literal["model", "default", "nothing"] = "model"  # which must be open: the model that the body names

    @cached_property
    def body(self) -> type[RequestBody] | None:
        """What it takes besides the call."""
        return get_type_hints(self.answer).get("body")

    @property
    def paths(self) -> tuple[str, ...]:
        """Its path, and the one without /v1 that llama-server answers too."""
        return (self.path, self.path.removeprefix("/v1")) if self.path in _ALSO_WITHOUT_V1 else (self.path,)

    @property
    def summary(self) -> str:
        """Its docstring, in one sentence."""
        return (self.answer.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")

    @property
    def prompt_field(self) -> str:
        """The field of its body that has the prompt."""
        known = () if self.body is None else self.body.model_fields
        names = ("messages", "input", "prompt", "question", "input_prefix", "tokens", "content")
        return next((name for name in names if name in known), "messages")

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """Path and query parameters, as OpenAPI has them."""
        names = [part[1:-1].split(":")[0] for part in self.path.split("/") if part.startswith("{")]
        found: list[dict[str, Any]] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
        if self.answer in (admin.list_entries, knowledge.list_documents):
            limit = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE}
            found.append({"name": "limit", "in": "query", "schema": limit})
            found.append({"name": "after", "in": "query", "schema": {"type": "string"}})
        if self.salted and self.body is None:
            found.append({"name": "cache_salt", "in": "query", "schema": {"type": "string", "maxLength": MAX_SALT}})
        return found

    @property
    def salted(self) -> bool:
        """Whether it takes a cache salt: in the body if it has one, else in the query."""
        if self.body is not None:
            return "cache_salt" in self.body.model_fields
        return self.path.startswith(_OWN) and self.answer is not admin.show_server


_ALSO_WITHOUT_V1 = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models",
    "/v1/models/{name:path}",
)  # fmt: skip

ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", chat.answer_chat, streams=True),
    Endpoint("POST", "/v1/completions", completions.answer_completion, streams=True),
    Endpoint("POST", "/v1/responses", responses.answer_responses, streams=True, protocol=RESPONSES_API),
    Endpoint("POST", "/v1/responses/input_tokens", responses.count_input_tokens, protocol=RESPONSES_API),
    Endpoint("POST", "/v1/embeddings", embed_texts.answer_embeddings, needs="default"),
    Endpoint("POST", "/v1/messages", anthropic.answer_messages, streams=True, protocol=ANTHROPIC),
    Endpoint("POST", "/v1/messages/count_tokens", anthropic.count_tokens, protocol=ANTHROPIC),
    Endpoint("POST", "/api/chat", ollama.answer_ollama_chat, streams=True, protocol=OLLAMA),
    Endpoint("POST", "/api/generate", ollama.answer_generate, streams=True, protocol=OLLAMA),
    Endpoint("POST", "/api/embed", ollama.answer_embed, protocol=OLLAMA, needs="default"),
    Endpoint("POST", "/api/embeddings", ollama.answer_old_embeddings, protocol=OLLAMA, needs="default"),
    Endpoint("GET", "/api/tags", ollama_models.list_tags, protocol=OLLAMA, needs="nothing"),
    Endpoint("POST", "/api/show", ollama_models.show_tag, protocol=OLLAMA, needs="nothing"),
    Endpoint("GET", "/api/ps", ollama_models.list_running, protocol=OLLAMA, needs="nothing"),
    Endpoint("GET", "/api/version", ollama_models.show_version, protocol=OLLAMA, needs="nothing"),
    Endpoint("POST", "/api/pull", ollama_models.pull_model, streams=True, protocol=OLLAMA, needs="nothing"),
    Endpoint("DELETE", "/api/delete", ollama_models.delete_model, protocol=OLLAMA, needs="nothing"),
    Endpoint("POST", "/completion", llamacpp.answer_native_completion, streams=True, protocol=LLAMACPP),
    Endpoint("POST", "/infill", llamacpp.answer_infill, streams=True, protocol=LLAMACPP),
    Endpoint("GET", "/props", llamacpp.show_props, protocol=LLAMACPP, needs="default"),
    Endpoint("GET", "/slots", llamacpp.list_slots, protocol=LLAMACPP, needs="default"),
    Endpoint("POST", "/apply-template", llamacpp.apply_template, protocol=LLAMACPP),
    Endpoint("GET", "/v1/models", models.list_models, needs="nothing"),
    Endpoint("GET", "/v1/models/{name:path}", models.show_model, needs="nothing"),
    Endpoint("POST", "/v1/load_lora_adapter", models.load_adapter),
    Endpoint("POST", "/v1/unload_lora_adapter", models.unload_adapter),
    Endpoint("POST", "/tokenize", models.tokenize),
    Endpoint("POST", "/detokenize", models.detokenize),
    Endpoint("GET", "/", admin.greet, open=True, needs="nothing"),
    Endpoint("GET", "/health", admin.health, open=True, needs="nothing"),
    Endpoint("GET", "/metrics", admin.metrics, media_type="text/plain", needs="nothing"),
    Endpoint("POST", f"{_OWN}/ask", knowledge.answer_question, streams=True),
    Endpoint("POST", f"{_OWN}/search", knowledge.search_documents),
    Endpoint("POST", f"{_OWN}/documents", knowledge.add_documents),
    Endpoint("GET", f"{_OWN}/documents", knowledge.list_documents),
    Endpoint("GET", f"{_OWN}/documents/{{name}}", knowledge.show_document),
    Endpoint("DELETE", f"{_OWN}/documents/{{name}}", knowledge.forget_document),
    Endpoint("GET", f"{_OWN}/library", knowledge.show_library),
    Endpoint("POST", f"{_OWN}/library/check", knowledge.check_library),
    Endpoint("GET", f"{_OWN}/server", admin.show_server, needs="nothing"),
    Endpoint("GET", f"{_OWN}/stats", admin.show_stats),
    Endpoint("GET", f"{_OWN}/entries", admin.list_entries),
    Endpoint("DELETE", f"{_OWN}/entries/{{name}}", admin.remove_entry),
    Endpoint("PUT", f"{_OWN}/entries/{{name}}/pin", admin.pin_entry),
    Endpoint("DELETE", f"{_OWN}/entries/{{name}}/pin", admin.pin_entry),
    Endpoint("POST", f"{_OWN}/check", admin.check_cache),
    Endpoint("POST", f"{_OWN}/warm", admin.warm_prompt),
    Endpoint("POST", f"{_OWN}/explain", admin.explain_prompt),
    Endpoint("GET", f"{_OWN}/explain/last", admin.explain_last),
    Endpoint(
        "GET", f"{_OWN}/live", views.watch_requests, streams=True, media_type="text/event-stream", needs="default"
    ),
    Endpoint("GET", f"{_OWN}/requests/{{id}}", views.show_request, needs="default"),
    Endpoint("GET", f"{_OWN}/map", views.show_map, needs="default"),
    Endpoint("GET", f"{_OWN}/usage", views.show_usage, needs="default"),
    Endpoint("GET", f"{_OWN}/apps", admin.list_apps),
    Endpoint("PUT", f"{_OWN}/apps/{{id}}", admin.set_app),
)

_PREFIXES = (("/v1/messages", ANTHROPIC), ("/api/", OLLAMA))  # of the protocols that are not OpenAI's
_LLAMACPP_PATHS = ("/completion", "/infill", "/props", "/slots", "/apply-template")


def protocol_of(path: str) -> WireProtocol:
    """The protocol that a path belongs to, also if nothing is served there."""
    if any(path == own or path.startswith(f"{own}/") for own in _LLAMACPP_PATHS):
        return LLAMACPP
    return next((protocol for prefix, protocol in _PREFIXES if path.startswith(prefix)), OPENAI)


# How paths of APIs begin that are not served.
_FOREIGN = (("/v1beta", "Gemini's"), ("/v2/chat", "Cohere's"), ("/v2/", "Triton's"), ("/generate", "TGI's"),
            ("/sdapi", "Stable Diffusion's"), ("/v1/fim", "Mistral's"), ("/v1/complete", "Anthropic's old"),
            ("/openai/deployments", "Azure's"))  # fmt: skip


def where_to_go(path: str) -> str:
    """Sentences for a path that is not served: whose API it is, and what is served instead."""
    paths = list(dict.fromkeys(endpoint.path for endpoint in ENDPOINTS))
    close = get_close_matches(path, paths, n=1)
    near = f" Did you mean {close[0]}?" if close else ""
    served = (
        "Served are the APIs of OpenAI (/v1/chat/completions, /v1/responses), Anthropic (/v1/messages), Ollama "
        "(/api/chat) and llama.cpp (/completion)."
    )
    foreign = next((whose for prefix, whose in _FOREIGN if path.startswith(prefix)), None)
    whose = "" if foreign is None else f" {foreign} API is not served here."
    return f"There is no {path[:100]}.{whose or near} {served} GET /docs lists all."
