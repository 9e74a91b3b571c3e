"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.server.call import Call, answer_prepared, plan_header
from rekindle.server.job import Finished, ReplyPart, ThoughtDelta
from rekindle.server.openai.translate import chat_logprobs, chat_request, request_of_choice, usage_of
from rekindle.server.reply_fields import new_id, quoting_of, rekindle_of, timings_of
from rekindle.server.schema import ChatRequest
from rekindle.session.ask import Prepared
from rekindle.text.reasoning import has_think_switch
from rekindle.text.tools.parse import CallDelta


async def answer_chat(call: Call, body: ChatRequest) -> Response:
    """The reply to a chat, whole or as a stream."""
    adapter, started = call.adapter_of(body.model), time.perf_counter()
    request, dropped = call.canonical(chat_request(body, call.caller.tenant, call.service.reply_length()))
    request, ignored = replace(request, adapter=adapter), sorted([*call.ignored(body), *dropped])
    if request.think is not None and not has_think_switch(await call.template()):
        ignored += [name for name in ("reasoning_effort", "chat_template_kwargs") if getattr(body, name) is not None]
    prepared = await _prepared(call, body, request)
    if prepared is not None:
        request = prepared.request
    requests = [request_of_choice(request, number) for number in range(body.n)]
    if prepared is not None and body.n == 1:
        events = answer_prepared(call, body, prepared, started)
    else:
        events = call.service.answer(requests, call.caller, body)
    head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": adapter or call.service.model}
    if body.stream:
        chunks = _ChatChunks(body, request, head, ignored, prepared)
        return await call.stream(events, lambda _: chunks.write(call.parts(events, request, body.n)))
    planned, replies = await call.collect(events, len(requests))
    choices = [_choice(number, reply, body) for number, reply in enumerate(replies)]
    stats = {"usage": usage_of(replies), "timings": timings_of(replies[0])}
    about = rekindle_of(replies[0].reuse, ignored)
    about |= quoting_of(len(request.quotes), replies[0], prepared)
    return JSONResponse(
        {**head, "object": "chat.completion", "choices": choices, **stats, "rekindle": about},
        headers=plan_header(planned),
    )


async def _prepared(call: Call, body: ChatRequest, request: Request) -> Prepared | None:
    """Passages of the library for a chat, or earlier answers about its own documents; None if it wants neither."""
    wanted, session = body.rekindle.knowledge if body.rekindle is not None else None, call.service.session
    if wanted is None:
        return await call.in_thread(lambda: session.prepare_given(request)) if body.n == 1 and request.quotes else None
    if body.n > 1 and session.answers.way(request) == "direct":  # the same reply several times is no choice
        request = replace(request, answers="verified")
    return await call.with_passages(request, wanted)


def _choice(number: int, reply: Reply, body: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
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

    def __init__(
        self,
        body: ChatRequest,
        request: Request,
        head: Mapping[str, Any],
        ignored: Sequence[str],
        prepared: Prepared | None = None,
    ) -> None:
        self._body = body
        self._document_count = len(request.quotes)
        self._prepared = prepared
        self._ignored = ignored
        self._head = {**head, "object": "chat.completion.chunk"}

    async def write(self, parts: AsyncGenerator[ReplyPart, None]) -> AsyncGenerator[Mapping[str, Any], None]:
        """The chunks, one after the other."""
        replies: dict[int, Reply] = {}
        for number in range(self._body.n):
            yield self._chunk(ReplyPart(number, ""), {"role": "assistant", "content": ""})
        async with aclosing(parts):
            async for item in parts:
                if isinstance(item.part, Finished):
                    replies[item.choice] = item.part.reply
                    yield self._last(item, item.part.reply)
                elif isinstance(item.part, CallDelta):
                    yield self._chunk(item, {"tool_calls": [item.part.as_openai()]})
                elif isinstance(item.part, ThoughtDelta):
                    yield self._chunk(item, {"reasoning_content": item.part.text})
                else:
                    yield self._chunk(item, {"content": item.part})
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": usage_of([replies[number] for number in sorted(replies)])}

    def _chunk(self, item: ReplyPart, delta: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        logprobs = chat_logprobs(item.drawn) if item.drawn else None
        choice = {"index": item.choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}

    def _last(self, item: ReplyPart, reply: Reply) -> dict[str, Any]:
        about = rekindle_of(reply.reuse, self._ignored) | quoting_of(self._document_count, reply, self._prepared)
        return {**self._chunk(item, {}, _finish_reason(reply)), "timings": timings_of(reply), "rekindle": about}


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.tool_calls and reply.finish_reason == "stop" else reply.finish_reason
