"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from rekindle.core.reply import Reply
from rekindle.server.call import Call
from rekindle.server.job import Finished, ReplyPart, ThoughtDelta
from rekindle.server.openai.translate import chat_logprobs, chat_request, usage_of
from rekindle.server.pending_reply import PendingReply, begin_chat
from rekindle.server.reply_fields import new_id, timings_of
from rekindle.server.schema import ChatRequest
from rekindle.text.tools.parse import CallDelta


async def answer_chat(call: Call, body: ChatRequest) -> Response:
    """The reply to a chat, whole or as a stream."""
    request = chat_request(body, call.caller.tenant, call.service.reply_length())
    switches = [name for name in ("reasoning_effort", "chat_template_kwargs") if getattr(body, name) is not None]
    pending = await begin_chat(call, body, request, switches=switches, count=body.n)
    head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": pending.model}

    def whole(replies: list[Reply]) -> dict[str, Any]:
        choices = [_choice(number, reply, body) for number, reply in enumerate(replies)]
        stats = {"usage": usage_of(replies), "timings": timings_of(replies[0]), "rekindle": pending.about(replies[0])}
        return {**head, "object": "chat.completion", "choices": choices, **stats}

    return await pending.respond(body.stream, lambda _: _ChatChunks(body, pending, head).write(), whole)


def _choice(number: int, reply: Reply, body: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.tool_calls or (body.tools and reply.finish_reason != "stop"):
        message["content"] = reply.text or None
    if reply.tool_calls:
        message["tool_calls"] = [one.as_openai() for one in reply.tool_calls]
    return {
        "index": number,
        "message": message,
        "logprobs": chat_logprobs(reply.logprobs) if body.logprobs else None,
        "finish_reason": _finish_reason(reply),
    }


class _ChatChunks:
    """A chat's reply in pieces."""

    def __init__(self, body: ChatRequest, pending: PendingReply, head: Mapping[str, Any]) -> None:
        self._body = body
        self._pending = pending
        self._head = {**head, "object": "chat.completion.chunk"}

    async def write(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """The chunks, one after the other."""
        replies: dict[int, Reply] = {}
        for number in range(self._body.n):
            yield self._chunk(ReplyPart(number, ""), {"role": "assistant", "content": "", "refusal": None})
        async with aclosing(self._pending.parts()) as parts:
            async for item in parts:
                if isinstance(item.part, Finished):
                    replies[item.choice] = item.part.reply
                    yield self._last(item, item.part.reply)
                elif item.progress is not None:
                    yield {**self._chunk(item, {}), **item.progress.as_event()}
                elif isinstance(item.part, CallDelta):
                    yield self._chunk(item, {"tool_calls": [item.part.as_openai()]})
                elif isinstance(item.part, ThoughtDelta):
                    yield self._chunk(item, {"reasoning_content": item.part.text})
                else:
                    yield self._chunk(item, {"content": item.part})
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            ordered = [replies[number] for number in sorted(replies)]
            yield {**self._head, "choices": [], "usage": usage_of(ordered), "timings": timings_of(ordered[0])}

    def _chunk(self, item: ReplyPart, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        logprobs = chat_logprobs(item.drawn) if item.drawn else None
        choice = {"index": item.choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}

    def _last(self, item: ReplyPart, reply: Reply) -> dict[str, Any]:
        last = self._chunk(item, {}, _finish_reason(reply))
        return {**last, "timings": timings_of(reply), "rekindle": self._pending.about(reply)}


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason
