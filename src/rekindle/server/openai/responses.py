"""/v1/responses.

instructions, first system and developer messages   one system message
reasoning, message, function_call in a row          one message of the assistant
function_call_output                                 a message of a tool
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from pydantic import Field, StrictBool, StrictInt
from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.core.tools import ToolCall
from rekindle.errors import RekindleError
from rekindle.server.body import NO_IMAGE, ReplyLength, TranslatedChat, agent_options, text_field
from rekindle.server.call import Call
from rekindle.server.errors import ApiError, api_error_of
from rekindle.server.job import Finished, ThoughtDelta
from rekindle.server.pending_reply import PendingReply, begin_chat
from rekindle.server.protocol import WireProtocol, openai_error, typed_frame
from rekindle.server.reply_fields import new_id, timings_of
from rekindle.server.reply_form import grammar_of
from rekindle.server.schema import AgentBody, Items, Number, RequestBody, ResponseFormat, Text
from rekindle.text.tools.parse import CallDelta


class OutputText(RequestBody):
    """How the text shall be."""

    format: ResponseFormat | None = None


class ResponsesRequest(AgentBody):
    """The body of /v1/responses."""

    input: Text | Items[dict[str, Any]] = Field(min_length=1, description="A text, or items of a conversation.")
    instructions: Text | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=0, lt=2**31)
    text: OutputText | None = None
    presence_penalty: Number | None = Field(None, ge=-2, le=2)
    frequency_penalty: Number | None = Field(None, ge=-2, le=2)
    metadata: dict[Text, Text] | None = Field(None, description="Comes back with the response.")
    store: StrictBool | None = Field(None, description="Responses are not stored here, whatever this says.")
    previous_response_id: Text | None = Field(None, description="Refused: responses are not stored here.")
    conversation: Text | dict[str, Any] | None = Field(None, description="Refused, too.")
    background: StrictBool | None = Field(None, description="true is refused.")


def translate_input(body: ResponsesRequest) -> TranslatedChat:
    """The chat of a body. Raises `ApiError` 400."""
    _refuse_stored(body)
    chat = TranslatedChat()
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


def responses_request(body: ResponsesRequest, chat: TranslatedChat, tenant: str, length: ReplyLength) -> Request:
    """The session's request of a body and its chat. Raises `RequestError` and `ApiError`."""
    options = agent_options(body, tenant, body.max_output_tokens, length)
    options["grammar"] = grammar_of(body, "text.format", None if body.text is None else body.text.format)
    if chat.tools:
        options["tools"] = chat.tools
        options["parallel_tool_calls"] = body.parallel_tool_calls is True
        choice = body.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        if choice is not None:
            options["tool_choice"] = choice
    elif body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools of type function. Send them along.", param="tool_choice")
    return Request.of(chat.messages, **options)


def _refuse_stored(body: ResponsesRequest) -> None:
    advice = "This server stores no responses: send the whole conversation as input."
    for name in ("previous_response_id", "conversation", "background"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported. {advice}", param=name)


def _add_item(chat: TranslatedChat, item: Mapping[str, Any], place: str) -> None:
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


def _add_message(chat: TranslatedChat, item: Mapping[str, Any], place: str) -> None:
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


def _assistant(chat: TranslatedChat, *, begins: bool = False) -> dict[str, Any]:
    """The message of the assistant that an item belongs to; `begins`: a new one."""
    if begins or not chat.messages or chat.messages[-1]["role"] != "assistant":
        chat.messages.append({"role": "assistant", "content": ""})
    return chat.messages[-1]


def _text_of(content: object, place: str, chat: TranslatedChat) -> str:
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


def _error_event(problem: ApiError) -> dict[str, Any]:
    message = openai_error(problem)["error"]["message"]
    code = problem.code or "server_error"
    return {"type": "error", "code": code, "message": message, "param": problem.param, "sequence_number": 0}


RESPONSES_API = WireProtocol("OpenAI", openai_error, typed_frame, stream_error=_error_event)


async def answer_responses(call: Call, body: ResponsesRequest) -> Response:
    """The reply to a conversation of items, whole or as a stream."""
    chat = translate_input(body)
    request = responses_request(body, chat, call.caller.tenant, call.service.reply_length())
    pending = await begin_chat(call, body, request, ignored=chat.ignored)
    head = _head(body, pending.model)

    def whole(replies: list[Reply]) -> dict[str, Any]:
        (reply,) = replies
        output = [*_thought_items(reply.thinking), *_message_items(reply.text), *map(_call_item, reply.tool_calls)]
        if output and not reply.tool_calls:
            output[-1]["status"] = _status(reply)
        return _ended(pending, head, output, reply)

    return await pending.respond(body.stream, lambda _: _numbered(_events(pending, head)), whole)


async def count_input_tokens(call: Call, body: ResponsesRequest) -> Response:
    """The number of tokens of a conversation of items."""
    call.adapter_of(body.model)
    chat = translate_input(body)
    asked = responses_request(body, chat, call.caller.tenant, call.service.reply_length())
    request, dropped = call.canonical(asked)
    tokens = len(await call.encode_chat(request))
    about = {"ignored": sorted([*call.ignored(body), *chat.ignored, *dropped])}
    return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens, "rekindle": about})


# What a response says of options that it has no field for, or that were not given.
_UNSET: dict[str, Any] = {
    "error": None,
    "incomplete_details": None,
    "completed_at": None,
    "output": [],
    "usage": None,
    "previous_response_id": None,
    "store": False,
    "background": False,
    "max_tool_calls": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "temperature": 1.0,
    "top_logprobs": 0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "truncation": "disabled",
    "metadata": {},
    "tool_choice": "auto",
}
_ECHOED = {"metadata", "temperature", "tool_choice", "top_p", "presence_penalty", "frequency_penalty"}
_UNNAMED_TOOL = {"description": None, "parameters": None, "strict": None}


def _head(body: ResponsesRequest, model: str) -> dict[str, Any]:
    """The response before anything was written."""
    tools = [_UNNAMED_TOOL | tool if tool.get("type") == "function" else tool for tool in body.tools or ()]
    text = {} if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        **_UNSET,
        **body.model_dump(include={"instructions", "max_output_tokens", "user", "prompt_cache_key"}),
        **body.model_dump(include=_ECHOED, exclude_none=True, by_alias=True),
        "text": {"format": {"type": "text"}, **text},
        "tools": tools,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }


def _ended(
    pending: PendingReply, head: Mapping[str, Any], output: list[dict[str, Any]], reply: Reply
) -> dict[str, Any]:
    tokenizer = pending.call.service.session.engine.tokenizer
    thought_tokens = len(tokenizer.encode(reply.thinking)) if reply.thinking else 0
    cut = {"length": "max_output_tokens"}.get(reply.finish_reason, reply.finish_reason)
    usage = {
        "input_tokens": reply.usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": reply.usage.cached_tokens,
            "cache_write_tokens": 0 if reply.reuse.level == "off" else reply.reuse.computed,
        },
        "output_tokens": reply.usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": reply.usage.total_tokens,
    }
    return {
        **head,
        "status": "completed" if cut == "stop" else "incomplete",
        "completed_at": int(time.time()) if cut == "stop" else None,
        "incomplete_details": None if cut == "stop" else {"reason": cut},
        "output": output,
        "usage": usage,
        "timings": timings_of(reply),
        "rekindle": pending.about(reply),
    }


def _status(reply: Reply) -> str:
    """Of the item that was written last."""
    return "completed" if reply.finish_reason == "stop" else "incomplete"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _message_items(text: str) -> list[dict[str, Any]]:
    content = [_text_part(text)]
    about = {"id": new_id("msg_"), "status": "completed", "role": "assistant", "content": content}
    return [{"type": "message", **about}] if text else []


def _thought_items(text: str) -> list[dict[str, Any]]:
    about = {"id": new_id("rs_"), "status": "completed", "summary": [], "content": [_thought_part(text)]}
    return [{"type": "reasoning", **about}] if text else []


def _call_item(call: ToolCall) -> dict[str, Any]:
    about = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
    return {"type": "function_call", "id": new_id("fc_"), "status": "completed", **about}


async def _numbered(
    events: AsyncGenerator[dict[str, Any], None],
) -> AsyncGenerator[Mapping[str, Any], None]:
    number = 0
    async with aclosing(events):
        async for event in events:
            yield {**event, "sequence_number": number}
            number += 1


async def _events(pending: PendingReply, head: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream, from response.created to response.completed."""
    yield {"type": "response.created", "response": head}
    yield {"type": "response.in_progress", "response": head}
    items = _ItemEvents()
    try:
        async with aclosing(pending.parts()) as parts:
            async for item in parts:
                if isinstance(item.part, Finished):
                    for event in items.close(_status(item.part.reply)):
                        yield event
                    ended = _ended(pending, head, items.output, item.part.reply)
                    yield {"type": f"response.{ended['status']}", "response": ended}
                else:
                    for event in items.add(item.part):
                        yield event
    except (ApiError, RekindleError) as failure:
        problem = api_error_of(failure, "input")
        pending.call.failed(problem.outcome)
        error = {"code": "server_error", "message": openai_error(problem)["error"]["message"]}
        failed = {**head, "status": "failed", "output": items.output, "error": error}
        yield {"type": "response.failed", "response": failed}


class _ItemEvents:
    """The events of output items: each is added, filled and done."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []  # those that are done
        self._open: dict[str, Any] | None = None  # the message or thought being written, with its text so far

    def add(self, part: ThoughtDelta | str | CallDelta) -> Iterator[dict[str, Any]]:
        if isinstance(part, CallDelta):
            yield from self._add_call(part)
            return
        thought = isinstance(part, ThoughtDelta)
        text = part.text if isinstance(part, ThoughtDelta) else part
        if self._open is None or self._open["type"] != ("reasoning" if thought else "message"):
            yield from self.close()
            (self._open,) = _thought_items(text) if thought else _message_items(text)
            yield self._event("output_item.added", item={**self._open, "status": "in_progress", "content": []})
            yield self._part_event("content_part.added", part=_thought_part("") if thought else _text_part(""))
        else:
            self._open["content"][0]["text"] += text
        yield self._part_event(f"{self._kind}.delta", delta=text, **self._likely)

    def _add_call(self, delta: CallDelta) -> Iterator[dict[str, Any]]:
        yield from self.close()
        item = _call_item(delta.call)
        where = {"item_id": item["id"]}
        yield self._event("output_item.added", item={**item, "status": "in_progress", "arguments": ""})
        yield self._event("function_call_arguments.delta", **where, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("function_call_arguments.done", **where, **done)
        yield self._event("output_item.done", item=item)
        self.output.append(item)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the message or the thought that is being written, if there is one."""
        if self._open is None:
            return
        (part,) = self._open["content"]
        yield self._part_event(f"{self._kind}.done", text=part["text"], **self._likely)
        yield self._part_event("content_part.done", part=part)
        self._open["status"] = status
        yield self._event("output_item.done", item=self._open)
        self.output.append(self._open)
        self._open = None

    @property
    def _likely(self) -> dict[str, Any]:
        """Log probabilities, which only text has; there are none."""
        return {"logprobs": []} if self._kind == "output_text" else {}

    @property
    def _kind(self) -> str:
        """The type of the open item's part."""
        assert self._open is not None
        kind: str = self._open["content"][0]["type"]
        return kind

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "output_index": len(self.output), **fields}

    def _part_event(self, name: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(name, item_id=self._open["id"], content_index=0, **fields)
