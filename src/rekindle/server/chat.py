"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Drawn, Piece, Reply
from rekindle.core.request import Message, Request
from rekindle.run.ask import Prepared
from rekindle.run.tools import Parsed, ToolParser, style_of
from rekindle.server.asked import chat_request, looked_for, variant
from rekindle.server.call import Call
from rekindle.server.job import Finished
from rekindle.server.replies import (
    chat_logprobs,
    new_id,
    plan_header,
    quoting_of,
    rekindle_of,
    timings_of,
    usage_of,
)
from rekindle.server.schema import ChatRequest
from rekindle.server.service import Happened


async def answer_chat(call: Call, body: ChatRequest) -> Response:
    """The reply to a chat, whole or as a stream."""
    adapter = call.adapter_of(body.model)
    request = replace(chat_request(body, call.caller.tenant, call.service.most_tokens()), adapter=adapter)
    prepared = await _prepared(call, body, request)
    if prepared is not None:
        request = replace(request, quotes=prepared.request.quotes)
    requests = [variant(request, number) for number in range(body.n)]
    happened = call.service.answer(requests, call.caller, body)
    head = {"id": new_id("chatcmpl"), "created": int(time.time()), "model": adapter or call.service.model}
    if body.stream:
        first, rest = await call.begin(happened)
        chunks = _Chunks(call, body, request, head, prepared)
        return call.stream(chunks.write(rest), first, rest)
    planned, replies = await call.collect(happened, len(requests))
    choices = [_choice(number, reply, body) for number, reply in enumerate(replies)]
    told = {"usage": usage_of(replies), "timings": timings_of(replies[0])}
    about = rekindle_of(replies[0].reuse, call.ignored(body))
    about |= quoting_of(len(request.quotes), replies[0], prepared)
    return JSONResponse(
        {**head, "object": "chat.completion", "choices": choices, **told, "rekindle": about},
        headers=plan_header(planned),
    )


async def _prepared(call: Call, body: ChatRequest, request: Request) -> Prepared | None:
    """What the library has for a chat; None if it does not ask for that."""
    wanted = body.rekindle.knowledge if body.rekindle is not None else None
    if wanted is None:
        return None
    question, session = looked_for(body), call.service.session
    chat = [message for message in request.prompt if isinstance(message, Message)]
    return await call.aside(
        lambda: session.prepare(
            question,
            messages=chat,
            top_k=wanted.top_k,
            retrieval=wanted.retrieval,
            max_tokens=request.max_tokens,
            tools=request.tools,
            tenant=request.tenant,
            cache_salt=request.cache_salt,
        )
    )


def _choice(number: int, reply: Reply, body: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [one.as_openai() for one in reply.tool_calls]
    return {
        "index": number,
        "message": message,
        "logprobs": chat_logprobs(reply.drawn) if body.logprobs else None,
        "finish_reason": "tool_calls" if reply.tool_calls else reply.finish_reason,
    }


class _Chunks:
    """A chat's reply in pieces."""

    def __init__(
        self,
        call: Call,
        body: ChatRequest,
        request: Request,
        head: Mapping[str, Any],
        prepared: Prepared | None = None,
    ) -> None:
        self._body = body
        self._given = len(request.quotes)
        self._prepared = prepared
        self._ignored = call.ignored(body)
        self._head = {**head, "object": "chat.completion.chunk"}
        template = call.service.session.engine.tokenizer.template
        calls = request.tools and request.tool_choice.mode != "none"
        self._parsers = [ToolParser(style_of(template), request.tools) if calls else None for _ in range(body.n)]
        self._called = [False] * body.n
        self._drawn: list[list[Drawn]] = [[] for _ in range(body.n)]  # tokens that no chunk told of yet
        self._told = [0] * body.n

    async def write(self, happened: AsyncGenerator[Happened, None]) -> AsyncGenerator[Mapping[str, Any], None]:
        """One chunk after the other."""
        replies: dict[int, Reply] = {}
        for number in range(self._body.n):
            yield self._chunk(number, {"role": "assistant", "content": ""})
        async for what in happened:
            if isinstance(what.event, Piece):
                self._drawn[what.choice] += what.event.drawn
                for delta in self._deltas(what.choice, self._parsed(what.choice, what.event)):
                    yield self._chunk(what.choice, delta)
            elif isinstance(what.event, Finished):
                parser = self._parsers[what.choice]
                self._drawn[what.choice] = list(what.event.reply.drawn[self._told[what.choice] :])
                for delta in self._deltas(what.choice, parser.finish()) if parser is not None else ():
                    yield self._chunk(what.choice, delta)
                replies[what.choice] = what.event.reply
                yield self._last(what.choice, what.event.reply)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": usage_of([replies[number] for number in sorted(replies)])}

    def _parsed(self, choice: int, piece: Piece) -> Parsed:
        parser = self._parsers[choice]
        return Parsed(str(piece)) if parser is None else parser.add(piece)

    def _deltas(self, choice: int, parsed: Parsed) -> Sequence[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"content": parsed.content}] if parsed.content else []
        deltas += [{"tool_calls": [one.as_openai()]} for one in parsed.calls]
        self._called[choice] |= bool(parsed.calls)
        return deltas

    def _chunk(self, choice: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        told = {"index": choice, "delta": delta, "logprobs": self._likely(choice), "finish_reason": None}
        return {**self._head, "choices": [told]}

    def _likely(self, choice: int) -> dict[str, Any] | None:
        """The tokens of which no chunk told yet: text that waits for a stop string or a call delays theirs too."""
        drawn, self._drawn[choice] = self._drawn[choice], []
        self._told[choice] += len(drawn)
        return chat_logprobs(drawn) if drawn else None

    def _last(self, choice: int, reply: Reply) -> dict[str, Any]:
        reason = "tool_calls" if self._called[choice] else reply.finish_reason
        chunk = {"index": choice, "delta": {}, "logprobs": self._likely(choice), "finish_reason": reason}
        about = rekindle_of(reply.reuse, self._ignored) | quoting_of(self._given, reply, self._prepared)
        return {**self._head, "choices": [chunk], "timings": timings_of(reply), "rekindle": about}
