"""A request from its body alone, whichever protocol it was written for: to explain what a client sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rekindle.core.request import Request
from rekindle.server.anthropic import MessagesRequest, messages_request, translate_chat
from rekindle.server.body import ReplyLength, parse
from rekindle.server.ollama import OllamaChatRequest
from rekindle.server.ollama import chat_request as ollama_request
from rekindle.server.openai.responses import ResponsesRequest, responses_request, translate_input
from rekindle.server.openai.translate import chat_request
from rekindle.server.schema import ChatRequest

# What only one protocol has, in the body, in a message or one of its parts, or in a tool.
_ANTHROPIC = frozenset(
    {"system", "stop_sequences", "context_management", "output_config", "input_schema", "tool_use_id"}
)
_NO_REPLY = ReplyLength(0, 0)  # only the prompt is read
_OLLAMA = frozenset({"options", "tool_name"})
_ANTHROPIC_BLOCKS = frozenset({"thinking", "redacted_thinking", "tool_use", "tool_result"})


def recorded_request(body: Mapping[str, Any], tenant: str) -> Request:
    """The request of a body with `messages` or `input`, which only reads its prompt. Raises `ApiError` 400."""
    objects = [body, *_objects(body.get("messages")), *_objects(body.get("tools"))]
    fields = {key for one in objects for key in one}
    if "input" in body:
        responses = _parsed(ResponsesRequest, body)
        request = responses_request(responses, translate_input(responses), tenant, _NO_REPLY)
    elif fields & _ANTHROPIC or any(one.get("type") in _ANTHROPIC_BLOCKS for one in objects):
        messages = _parsed(MessagesRequest, {"max_tokens": 0, **body})
        request = messages_request(messages, translate_chat(messages), tenant, _NO_REPLY)
    elif fields & _OLLAMA or any("thinking" in one for one in _objects(body.get("messages"))):
        request = ollama_request(_parsed(OllamaChatRequest, body), tenant, _NO_REPLY)
    else:
        request = chat_request(_parsed(ChatRequest, body), tenant, _NO_REPLY)
    return replace(request, min_tokens=0)


def _parsed(kind: Any, body: Mapping[str, Any]) -> Any:
    return parse(kind, json.dumps(body).encode())


def _objects(items: object) -> Iterator[Mapping[str, Any]]:
    """The objects in a list, and the parts of messages."""
    for item in items if isinstance(items, list) else ():
        if isinstance(item, Mapping):
            yield item
            yield from _objects(item.get("content"))
