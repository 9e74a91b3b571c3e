"""From a body of /v1/responses to a request of the session.

instructions, first system and developer messages   one system message
reasoning, message, function_call in a row          one message of the assistant
function_call_output                                 a message of a tool
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, Field, StrictBool, StrictInt

from rekindle.core.grammar import Grammar
from rekindle.core.request import Request
from rekindle.server.body import NO_IMAGE, ReplyLength, agent_options, text_field
from rekindle.server.errors import ApiError
from rekindle.server.schema import AgentBody, Items, RequestBody, Text


class OutputFormat(RequestBody):
    """The format of the text."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    body: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class OutputText(RequestBody):
    """How the text shall be."""

    format: OutputFormat | None = None


class ResponsesRequest(AgentBody):
    """The body of /v1/responses."""

    input: Text | Items[dict[str, Any]] = Field(min_length=1, description="A text, or items of a conversation.")
    instructions: Text | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=0, lt=2**31)
    text: OutputText | None = None
    store: StrictBool | None = Field(None, description="Responses are not stored here, whatever this says.")
    previous_response_id: Text | None = Field(None, description="Refused: responses are not stored here.")
    conversation: Text | dict[str, Any] | None = Field(None, description="Refused, too.")
    background: StrictBool | None = Field(None, description="true is refused.")


@dataclass
class TranslatedInput:
    """Messages and tools as the session takes them, and the names of what was left out."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def translate_input(body: ResponsesRequest) -> TranslatedInput:
    """The chat of a body. Raises `ApiError` 400."""
    _refuse_stored(body)
    chat = TranslatedInput()
    if body.instructions:
        chat.messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        _add_item(chat, item, f"input.{number}")
    for tool in body.tools or ():
        if tool.get("type") == "function":
            about = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
            chat.tools.append({"type": "function", "function": about})
        else:
            named = f" {tool['name']}" if isinstance(tool.get("name"), str) else ""
            chat.ignored.append(f"tools ({tool.get('type')}{named})"[:200])
    return chat


def responses_request(body: ResponsesRequest, chat: TranslatedInput, tenant: str, length: ReplyLength) -> Request:
    """The session's request of a body and its chat. Raises `RequestError` and `ApiError`."""
    options = agent_options(body, tenant, body.max_output_tokens, length)
    form = None if body.text is None else body.text.format
    if form is not None and form.type != "text":
        options["grammar"] = _grammar(form)
    if chat.tools:
        options["tools"] = chat.tools
        options["parallel_tool_calls"] = body.parallel_tool_calls is True
        choice = body.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        if choice is not None:
            options["tool_choice"] = choice
    elif body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools of type function. Send them along.", param="tool_choice")
    return Request.of(chat.messages, **options)


def _grammar(form: OutputFormat) -> Grammar:
    if form.type == "json_object":
        return Grammar.json_object()
    if form.body is None:
        raise ApiError(400, "A format json_schema needs a schema.", param="text.format.schema")
    return Grammar.json_schema(form.body)


def _refuse_stored(body: ResponsesRequest) -> None:
    advice = "This server stores no responses: send the whole conversation as input."
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported. {advice}", param=name)


def _add_item(chat: TranslatedInput, item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(chat, item, place)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        thought = _text_of(parts, f"{place}.content", chat)
        if thought:
            _assistant(chat, begins=True)["reasoning_content"] = thought
    elif kind == "function_call":
        function = {"name": text_field(item, "name", place), "arguments": text_field(item, "arguments", place)}
        call = {"id": text_field(item, "call_id", place), "type": "function", "function": function}
        _assistant(chat).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _text_of(item.get("output"), f"{place}.output", chat)
        chat.messages.append({"role": "tool", "content": content, "tool_call_id": text_field(item, "call_id", place)})
    elif kind == "item_reference":
        raise ApiError(400, "An item_reference is not supported: nothing is stored here. Send the item.", param=place)
    else:
        chat.ignored.append(f"{place} ({kind})"[:200])


def _add_message(chat: TranslatedInput, item: Mapping[str, Any], place: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        advice = "Use user, assistant, system or developer."
        raise ApiError(400, f"{place}.role: {json.dumps(role)[:50]} is unknown. {advice}", param=f"{place}.role")
    text = _text_of(item.get("content"), f"{place}.content", chat)
    before = chat.messages[-1] if chat.messages else {}
    if role == "assistant":
        _assistant(chat, begins=bool(before.get("content") or before.get("tool_calls")))["content"] = text
    elif role == "user":
        chat.messages.append({"role": "user", "content": text})
    elif len(chat.messages) == 1 and before["role"] == "system":
        before["content"] += f"\n\n{text}"
    else:  # not every template knows developers
        chat.messages.append({"role": "system", "content": text})


def _assistant(chat: TranslatedInput, *, begins: bool = False) -> dict[str, Any]:
    """The message of the assistant that an item belongs to; `begins`: a new one."""
    if begins or not chat.messages or chat.messages[-1]["role"] != "assistant":
        chat.messages.append({"role": "assistant", "content": ""})
    return chat.messages[-1]


def _text_of(content: object, place: str, chat: TranslatedInput) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise ApiError(400, f"{place}: give a text or a list of parts.", param=place)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"):
            texts.append(text_field(part, "refusal" if kind == "refusal" else "text", f"{place}.{number}"))
        elif kind == "input_image" and place.endswith("output"):  # refused, the conversation could not go on
            chat.ignored.append(f"{place}.{number} (input_image)")
            texts.append(NO_IMAGE)
        else:
            message = f"{place}.{number}: a part of type {json.dumps(kind)[:50]} is not supported here: only text is."
            raise ApiError(400, message, param=f"{place}.{number}")
    return "\n\n".join(texts)
