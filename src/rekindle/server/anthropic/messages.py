"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Reply, Reuse
from rekindle.core.request import Message, Request
from rekindle.server.anthropic.schema import CountTokensRequest, MessagesRequest
from rekindle.server.anthropic.translate import messages_request, translate_chat
from rekindle.server.call import Call, plan_header
from rekindle.server.errors import ApiError
from rekindle.server.job import Finished, ReplyPart, ThoughtDelta
from rekindle.server.protocol import WireProtocol, typed_frame
from rekindle.server.reply_fields import new_id, rekindle_of
from rekindle.text.tools.parse import CallDelta

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
          429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip
_PING = {"type": "ping"}


def anthropic_error(problem: ApiError) -> dict[str, Any]:
    """An error in Anthropic's format."""
    kind = _KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    message = problem.message
    if problem.overflow is not None:  # in the words that make Claude Code shorten its history
        message = "prompt is too long: {} tokens > {} maximum. {}".format(*problem.overflow, message)
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = WireProtocol("Anthropic", anthropic_error, typed_frame, ping=typed_frame(_PING))


async def answer_messages(call: Call, body: MessagesRequest) -> Response:
    """The reply to a chat in Anthropic's format, whole or as a stream."""
    adapter = call.adapter_of(body.model)
    chat = translate_chat(body)
    request = messages_request(body, chat, call.caller.tenant, call.service.reply_length())
    request, dropped = call.canonical(replace(request, adapter=adapter))
    events = call.service.answer([request], call.caller, body)
    head = {"id": new_id("msg"), "type": "message", "role": "assistant", "model": adapter or call.service.model}
    ignored = sorted([*call.ignored(body), *chat.ignored, *dropped])
    if body.stream:
        start = {**head, "content": [], **_stopped(None)}
        return await call.stream(events, partial(_events, call.parts(events, request), body, start, ignored))
    planned, (reply,) = await call.collect(events, 1)
    ended = {**_stopped(reply), "usage": _usage(body, reply.reuse, reply.usage.completion_tokens)}
    about = rekindle_of(reply.reuse, ignored)
    return JSONResponse({**head, "content": _blocks(reply), **ended, "rekindle": about}, headers=plan_header(planned))


async def count_tokens(call: Call, body: CountTokensRequest) -> Response:
    """The number of tokens of a chat in Anthropic's format."""
    call.adapter_of(body.model)
    chat = translate_chat(body)
    request, dropped = call.canonical(Request.of(chat.messages, tools=chat.tools))
    messages = [message for message in request.prompt if isinstance(message, Message)]
    session = call.service.session

    def count() -> int:
        with session.staying():
            return len(session.engine.tokenizer.encode_chat(messages, tools=request.tools))

    tokens = await call.in_thread(count)
    about = {"ignored": sorted([*call.ignored(body), *chat.ignored, *dropped])}
    return JSONResponse({"input_tokens": tokens, "rekindle": about})


def _usage(body: MessagesRequest, reuse: Reuse, written: int) -> dict[str, int]:
    """Their sum is the whole prompt. Computed tokens count as cached now if the request marks anything to be cached."""
    created = reuse.computed if body.caches and reuse.level != "off" else 0
    return {
        "input_tokens": reuse.computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": reuse.reused,
        "output_tokens": written,
    }


def _stopped(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason = {"stop": "tool_use" if reply.tool_calls else "end_turn", "length": "max_tokens"}.get(reply.finish_reason)
    if reply.stopped_by is not None and not reply.tool_calls:
        reason = "stop_sequence"
    return {"stop_reason": reason or reply.finish_reason, "stop_sequence": reply.stopped_by}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.thinking:
        blocks.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


async def _events(
    parts: AsyncGenerator[ReplyPart, None],
    body: MessagesRequest,
    start: Mapping[str, Any],
    ignored: list[str],
    planned: Reuse,
) -> AsyncGenerator[Mapping[str, Any], None]:
    """The events of a stream, from message_start to message_stop."""
    yield {"type": "message_start", "message": {**start, "usage": _usage(body, planned, 0)}}
    yield _PING
    blocks = _BlockEvents()
    async with aclosing(parts):
        async for item in parts:
            if isinstance(item.part, Finished):
                for event in blocks.close():
                    yield event
                reply = item.part.reply
                usage = _usage(body, reply.reuse, reply.usage.completion_tokens)
                about = rekindle_of(reply.reuse, ignored)
                yield {"type": "message_delta", "delta": _stopped(reply), "usage": usage, "rekindle": about}
                yield {"type": "message_stop"}
            else:
                for event in blocks.add(item.part):
                    yield event


class _BlockEvents:
    """The events of content blocks: each is opened, filled and closed."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None  # the type of the open block

    def add(self, part: ThoughtDelta | str | CallDelta) -> list[dict[str, Any]]:
        if isinstance(part, ThoughtDelta):
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
            opened = [] if self._open == "thinking" else self._begin(block)
            return [*opened, self._delta({"type": "thinking_delta", "thinking": part.text})]
        if isinstance(part, str):
            opened = [] if self._open == "text" else self._begin({"type": "text", "text": ""})
            return [*opened, self._delta({"type": "text_delta", "text": part})]
        block = {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
        return [*self._begin(block), self._delta(delta), *self.close()]

    def close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self.close()
        self._index += 1
        self._open = block["type"]
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
