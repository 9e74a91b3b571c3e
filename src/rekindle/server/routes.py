"""The table of endpoints: path, body, access. The router and the OpenAPI document are made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from starlette.responses import Response

from rekindle.server import admin, knowledge, models
from rekindle.server.anthropic.messages import ANTHROPIC, answer_messages, count_tokens
from rekindle.server.anthropic.schema import CountTokensRequest, MessagesRequest
from rekindle.server.call import MAX_PAGE, PAGE
from rekindle.server.embed_texts import answer_embeddings
from rekindle.server.llamacpp import native
from rekindle.server.llamacpp.native import LLAMACPP
from rekindle.server.llamacpp.schema import ApplyTemplateRequest, InfillRequest, NativeCompletionRequest
from rekindle.server.ollama import model_info, replies
from rekindle.server.ollama.schema import (
    EmbedRequest,
    GenerateRequest,
    ModelBody,
    OldEmbeddingsRequest,
    OllamaChatRequest,
    PullRequest,
)
from rekindle.server.ollama.translate import OLLAMA
from rekindle.server.openai.chat import answer_chat
from rekindle.server.openai.completions import answer_completion
from rekindle.server.openai.responses import RESPONSES_API, answer_responses
from rekindle.server.openai.responses_request import ResponsesRequest
from rekindle.server.page import views
from rekindle.server.protocol import OPENAI, WireProtocol
from rekindle.server.schema import (
    MAX_SALT,
    AppRequest,
    AskRequest,
    ChatRequest,
    CheckRequest,
    CompletionRequest,
    DetokenizeRequest,
    DocumentsRequest,
    EmbeddingsRequest,
    ExplainRequest,
    LibraryCheckRequest,
    LoadAdapterRequest,
    PromptRequest,
    RequestBody,
    SearchRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)

_OWN = "/v1/rekindle"


@dataclass(frozen=True)
class Endpoint:
    """One method at one path. `answer(call)`, or `answer(call, body)` where it takes one."""

    method: str
    path: str
    answer: Callable[..., Awaitable[Response]]
    body: type[RequestBody] | None = None
    open: bool = False  # needs no key
    streams: bool = False
    media_type: str = "application/json"
    protocol: WireProtocol = OPENAI
    needs: Literal["model", "default", "nothing"] = "model"  # which must be open: the model that the body names

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


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", answer_chat, ChatRequest, streams=True),
    Endpoint("POST", "/v1/completions", answer_completion, CompletionRequest, streams=True),
    Endpoint("POST", "/v1/responses", answer_responses, ResponsesRequest, streams=True, protocol=RESPONSES_API),
    Endpoint("POST", "/v1/embeddings", answer_embeddings, EmbeddingsRequest, needs="default"),
    Endpoint("POST", "/v1/messages", answer_messages, MessagesRequest, streams=True, protocol=ANTHROPIC),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest, protocol=ANTHROPIC),
    Endpoint("POST", "/api/chat", replies.answer_ollama_chat, OllamaChatRequest, streams=True, protocol=OLLAMA),
    Endpoint("POST", "/api/generate", replies.answer_generate, GenerateRequest, streams=True, protocol=OLLAMA),
    Endpoint("POST", "/api/embed", replies.answer_embed, EmbedRequest, protocol=OLLAMA, needs="default"),
    Endpoint(
        "POST", "/api/embeddings", replies.answer_old_embeddings, OldEmbeddingsRequest, protocol=OLLAMA, needs="default"
    ),
    Endpoint("GET", "/api/tags", model_info.list_tags, protocol=OLLAMA, needs="nothing"),
    Endpoint("POST", "/api/show", model_info.show_tag, ModelBody, protocol=OLLAMA, needs="nothing"),
    Endpoint("GET", "/api/ps", model_info.list_running, protocol=OLLAMA, needs="nothing"),
    Endpoint("GET", "/api/version", model_info.show_version, protocol=OLLAMA, needs="nothing"),
    Endpoint("POST", "/api/pull", model_info.pull_model, PullRequest, streams=True, protocol=OLLAMA, needs="nothing"),
    Endpoint("DELETE", "/api/delete", model_info.delete_model, ModelBody, protocol=OLLAMA, needs="nothing"),
    Endpoint(
        "POST", "/completion", native.answer_native_completion, NativeCompletionRequest, streams=True, protocol=LLAMACPP
    ),
    Endpoint("POST", "/infill", native.answer_infill, InfillRequest, streams=True, protocol=LLAMACPP),
    Endpoint("GET", "/props", native.show_props, protocol=LLAMACPP, needs="default"),
    Endpoint("GET", "/slots", native.list_slots, protocol=LLAMACPP, needs="default"),
    Endpoint("POST", "/apply-template", native.apply_template, ApplyTemplateRequest, protocol=LLAMACPP),
    Endpoint("GET", "/v1/models", models.list_models, needs="nothing"),
    Endpoint("GET", "/v1/models/{name:path}", models.show_model, needs="nothing"),
    Endpoint("POST", "/v1/load_lora_adapter", models.load_adapter, LoadAdapterRequest),
    Endpoint("POST", "/v1/unload_lora_adapter", models.unload_adapter, UnloadAdapterRequest),
    Endpoint("POST", "/tokenize", models.tokenize, TokenizeRequest),
    Endpoint("POST", "/detokenize", models.detokenize, DetokenizeRequest),
    Endpoint("GET", "/", admin.greet, open=True, needs="nothing"),
    Endpoint("GET", "/health", admin.health, open=True, needs="nothing"),
    Endpoint("GET", "/metrics", admin.metrics, media_type="text/plain", needs="nothing"),
    Endpoint("POST", f"{_OWN}/ask", knowledge.answer_question, AskRequest, streams=True),
    Endpoint("POST", f"{_OWN}/search", knowledge.search_documents, SearchRequest),
    Endpoint("POST", f"{_OWN}/documents", knowledge.add_documents, DocumentsRequest),
    Endpoint("GET", f"{_OWN}/documents", knowledge.list_documents),
    Endpoint("GET", f"{_OWN}/documents/{{name}}", knowledge.show_document),
    Endpoint("DELETE", f"{_OWN}/documents/{{name}}", knowledge.forget_document),
    Endpoint("GET", f"{_OWN}/library", knowledge.show_library),
    Endpoint("POST", f"{_OWN}/library/check", knowledge.check_library, LibraryCheckRequest),
    Endpoint("GET", f"{_OWN}/server", admin.show_server, needs="nothing"),
    Endpoint("GET", f"{_OWN}/stats", admin.show_stats),
    Endpoint("GET", f"{_OWN}/entries", admin.list_entries),
    Endpoint("DELETE", f"{_OWN}/entries/{{name}}", admin.remove_entry),
    Endpoint("PUT", f"{_OWN}/entries/{{name}}/pin", admin.pin_entry),
    Endpoint("DELETE", f"{_OWN}/entries/{{name}}/pin", admin.pin_entry),
    Endpoint("POST", f"{_OWN}/check", admin.check_cache, CheckRequest),
    Endpoint("POST", f"{_OWN}/warm", admin.warm_prompt, PromptRequest),
    Endpoint("POST", f"{_OWN}/explain", admin.explain_prompt, ExplainRequest),
    Endpoint("GET", f"{_OWN}/explain/last", admin.explain_last),
    Endpoint(
        "GET", f"{_OWN}/live", views.watch_requests, streams=True, media_type="text/event-stream", needs="default"
    ),
    Endpoint("GET", f"{_OWN}/requests/{{id}}", views.show_request, needs="default"),
    Endpoint("GET", f"{_OWN}/map", views.show_map, needs="default"),
    Endpoint("GET", f"{_OWN}/usage", views.show_usage, needs="default"),
    Endpoint("GET", f"{_OWN}/apps", admin.list_apps),
    Endpoint("PUT", f"{_OWN}/apps/{{id}}", admin.set_app, AppRequest),
)

_PREFIXES = (  # of the protocols that are not OpenAI's
    ("/v1/messages", ANTHROPIC),
    ("/api/", OLLAMA),
    *((path, LLAMACPP) for path in ("/completion", "/infill", "/props", "/slots", "/apply-template")),
)


def protocol_of(path: str) -> WireProtocol:
    """The protocol that a path belongs to, also if nothing is served there."""
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
