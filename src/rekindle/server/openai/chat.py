"""/v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Reply, SampledToken, TextPiece
from rekindle.core.request import Request
from rekindle.server.call import Call, plan_header
from rekindle.server.job import ChoiceEvent, Finished
from rekindle.server.openai.request import chat_request, last_user_text, request_of_choice
from rekindle.server.openai.response import chat_logprobs, new_id, quoting_of, rekindle_of, timings_of, usage_of
from rekindle.server.schema import ChatRequest
from rekindle.server.stored_answers import answer_prepared
from rekindle.session.ask import Prepared
from rekindle.text.tools.parse import ParsedText, ToolParser
from rekindle.text.tools.styles import detect_style


async def answer_chat(call: Call, body: ChatRequest) -> Response:
    """The reply to a chat, whole or as a stream."""
    adapter, started = call.adapter_of(body.model), time.perf_counter()
    request = replace(chat_request(body, call.caller.tenant, call.service.token_limit()), adapter=adapter)
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
        first, rest = await call.begin(events)
        chunks = _ChatChunks(call, body, request, head, prepared)
        return call.stream(chunks.write(rest), first, rest)
    planned, replies = await call.collect(events, len(requests))
    choices = [_choice(number, reply, body) for number, reply in enumerate(replies)]
    stats = {"usage": usage_of(replies), "timings": timings_of(replies[0])}
    about = rekindle_of(replies[0].reuse, call.ignored(body))
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
    question = last_user_text(body)
    if body.n > 1 and session.answers.way(request) == "direct":  # the same reply several times is no choice
        request = replace(request, answers="verified")
    return await call.in_thread(lambda: session.prepare_request(question, request, wanted.top_k, wanted.retrieval))


def _choice(number: int, reply: Reply, body: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [one.as_openai() for one in reply.tool_calls]
    return {
        "index": number,
        "message": message,
        "logprobs": chat_logprobs(reply.logprobs) if body.logprobs else None,
        "finish_reason": "tool_calls" if reply.tool_calls else reply.finish_reason,
    }


class _ChatChunks:
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
        self._document_count = len(request.quotes)
        self._prepared = prepared
        self._ignored = call.ignored(body)
        self._head = {**head, "object": "chat.completion.chunk"}
        template = call.service.session.engine.tokenizer.template
        calls = request.tools and request.tool_choice.mode != "none"
        self._parsers = [ToolParser(detect_style(template), request.tools) if calls else None for _ in range(body.n)]
        self._called = [False] * body.n
        self._drawn: list[list[SampledToken]] = [[] for _ in range(body.n)]  # tokens not yet in any chunk
        self._sent = [0] * body.n

    async def write(self, events: AsyncGenerator[ChoiceEvent, None]) -> AsyncGenerator[Mapping[str, Any], None]:
        """The chunks, one after the other."""
        replies: dict[int, Reply] = {}
        for number in range(self._body.n):
            yield self._chunk(number, {"role": "assistant", "content": ""})
        async for item in events:
            if isinstance(item.event, TextPiece):
                self._drawn[item.choice] += item.event.logprobs
                for delta in self._deltas(item.choice, self._parsed(item.choice, item.event)):
                    yield self._chunk(item.choice, delta)
            elif isinstance(item.event, Finished):
                parser = self._parsers[item.choice]
                self._drawn[item.choice] = list(item.event.reply.logprobs[self._sent[item.choice] :])
                for delta in self._deltas(item.choice, parser.finish()) if parser is not None else ():
                    yield self._chunk(item.choice, delta)
                replies[item.choice] = item.event.reply
                yield self._last(item.choice, item.event.reply)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": usage_of([replies[number] for number in sorted(replies)])}

    def _parsed(self, choice: int, piece: TextPiece) -> ParsedText:
        parser = self._parsers[choice]
        return ParsedText(str(piece)) if parser is None else parser.add(piece)

    def _deltas(self, choice: int, parsed: ParsedText) -> Sequence[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"content": parsed.content}] if parsed.content else []
        deltas += [{"tool_calls": [one.as_openai()]} for one in parsed.calls]
        self._called[choice] |= bool(parsed.calls)
        return deltas

    def _chunk(self, choice: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        choice_fields = {"index": choice, "delta": delta, "logprobs": self._logprobs(choice), "finish_reason": None}
        return {**self._head, "choices": [choice_fields]}

    def _logprobs(self, choice: int) -> dict[str, Any] | None:
        """Logprobs of tokens not yet sent: text held back for a stop string or a tool call delays theirs too."""
        drawn, self._drawn[choice] = self._drawn[choice], []
        self._sent[choice] += len(drawn)
        return chat_logprobs(drawn) if drawn else None

    def _last(self, choice: int, reply: Reply) -> dict[str, Any]:
        reason = "tool_calls" if self._called[choice] else reply.finish_reason
        chunk = {"index": choice, "delta": {}, "logprobs": self._logprobs(choice), "finish_reason": reason}
        about = rekindle_of(reply.reuse, self._ignored) | quoting_of(self._document_count, reply, self._prepared)
        return {**self._head, "choices": [chunk], "timings": timings_of(reply), "rekindle": about}
