"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from rekindle.core.reply import PromptProgress, Reply, SampledToken, TextPiece
from rekindle.errors import InvalidPrompt
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.job import Finished
from rekindle.server.openai.translate import (
    completion_logprobs,
    completion_requests,
    prompts_of,
    usage_of,
)
from rekindle.server.pending_reply import PendingReply, request_of_choice
from rekindle.server.reply_fields import new_id, timings_of
from rekindle.server.schema import MAX_CHOICES, CompletionRequest

_MAX_REPLIES = 8 * MAX_CHOICES


async def answer_completion(call: Call, body: CompletionRequest) -> Response:
    """The continuation of a text, whole or as a stream."""
    adapter = call.adapter_of(body.model)
    for prompt in prompts_of(body.prompt)[: _MAX_REPLIES + 1]:
        call.check_tokens(prompt)
    if body.suffix:
        body = body.model_copy(update={"prompt": await _between(call, body, body.suffix)})
    asked = completion_requests(body, call.caller.tenant, call.service.reply_length())
    if not asked or len(asked) * body.n > _MAX_REPLIES:
        raise ApiError(400, f"Give 1 to {_MAX_REPLIES // body.n} prompts.", param="prompt")
    asked = [replace(request, adapter=adapter) for request in asked]
    requests = [request_of_choice(request, number) for request in asked for number in range(body.n)]
    texts = await _texts(call, prompts_of(body.prompt)) if body.echo else [""] * len(asked)
    echoes = [text for text in texts for _ in range(body.n)]
    events = call.service.answer(requests, call.caller, body)
    pending = PendingReply(call, requests[0], events, call.ignored(body), len(requests))
    head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": pending.model}

    def whole(replies: list[Reply]) -> dict[str, Any]:
        choices = [_choice(number, reply, body, echoes[number]) for number, reply in enumerate(replies)]
        stats = {"usage": usage_of(replies, len(asked)), "timings": timings_of(replies[0])}
        return {**head, "choices": choices, **stats, "rekindle": pending.about(replies[0])}

    return await pending.respond(body.stream, lambda _: _chunks(pending, body, head, echoes), whole)


async def _between(call: Call, body: CompletionRequest, suffix: str) -> list[list[int]]:
    """The prompts of texts that go before a suffix. Raises `ApiError` 400 where that is not possible."""
    prompts = prompts_of(body.prompt)[: _MAX_REPLIES + 1]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if body.echo or len(texts) < len(prompts):
        raise ApiError(400, "suffix goes with a prompt that is text, and without echo.", param="suffix")
    session = call.service.session
    try:
        return await call.tokenized(lambda: [session.fill_in_prompt(text, suffix) for text in texts])
    except InvalidPrompt as error:
        raise ApiError(400, f"suffix is not supported: {error}", param="suffix") from None


async def _texts(call: Call, prompts: Sequence[Any]) -> list[str]:
    session = call.service.session

    def decoded() -> list[str]:
        with session.staying():
            return [one if isinstance(one, str) else session.engine.tokenizer.decode(one) for one in prompts]

    return await call.tokenized(decoded)


def _choice(number: int, reply: Reply, body: CompletionRequest, echo: str) -> dict[str, Any]:
    likely = None if body.logprobs is None else completion_logprobs(reply.logprobs, len(echo))
    return {"index": number, "text": echo + reply.text, "logprobs": likely, "finish_reason": reply.finish_reason}


async def _chunks(
    pending: PendingReply, body: CompletionRequest, head: Mapping[str, Any], echoes: Sequence[str]
) -> AsyncGenerator[Mapping[str, Any], None]:
    written = [0 for _ in echoes]  # characters
    sent = [0 for _ in echoes]  # tokens
    replies: dict[int, Reply] = {}

    def chunk(number: int, text: str, drawn: Sequence[SampledToken] = (), reason: str | None = None) -> dict[str, Any]:
        likely = completion_logprobs(drawn, written[number]) if drawn else None
        written[number] += len(text)
        sent[number] += len(drawn)
        return {
            **head,
            "choices": [{"index": number, "text": text, "logprobs": likely, "finish_reason": reason}],
        }

    for number, echo in enumerate(echoes):
        if echo:
            yield chunk(number, echo)
    async for item in pending.events:
        if isinstance(item.event, TextPiece):
            yield chunk(item.choice, item.event, item.event.logprobs)
        elif isinstance(item.event, PromptProgress):
            yield {**chunk(item.choice, ""), **item.event.as_event()}
        elif isinstance(item.event, Finished):
            reply = replies[item.choice] = item.event.reply
            last = chunk(item.choice, "", reply.logprobs[sent[item.choice] :], reply.finish_reason)
            yield {**last, "timings": timings_of(reply), "rekindle": pending.about(reply)}
    if body.stream_options is not None and body.stream_options.include_usage:
        ordered = [replies[number] for number in sorted(replies)]
        stats = {"usage": usage_of(ordered, len(ordered) // body.n), "timings": timings_of(ordered[0])}
        yield {**head, "choices": [], **stats}
