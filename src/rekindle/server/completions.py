"""/v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Drawn, Piece, Reply
from rekindle.server.asked import completion_requests, prompts_of, variant
from rekindle.server.call import Call
from rekindle.server.job import Finished
from rekindle.server.problem import Problem
from rekindle.server.replies import completion_logprobs, new_id, plan_header, rekindle_of, timings_of, usage_of
from rekindle.server.schema import MOST_CHOICES, CompletionRequest
from rekindle.server.service import Happened

_MOST_REPLIES = 8 * MOST_CHOICES


async def answer_completion(call: Call, body: CompletionRequest) -> Response:
    """What continues a text, whole or as a stream."""
    adapter = call.adapter_of(body.model)
    asked = completion_requests(body, call.caller.tenant, call.service.most_tokens())
    if not asked or len(asked) * body.n > _MOST_REPLIES:
        raise Problem(400, f"Give 1 to {_MOST_REPLIES // body.n} prompts.", param="prompt")
    asked = [replace(request, adapter=adapter) for request in asked]
    requests = [variant(request, number) for request in asked for number in range(body.n)]
    happened = call.service.answer(requests, call.caller, body)
    head = {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": adapter or call.service.model,
    }
    echoes = [_echo(call, prompt) if body.echo else "" for prompt in prompts_of(body.prompt) for _ in range(body.n)]
    if body.stream:
        first, rest = await call.begin(happened)
        return call.stream(_chunks(rest, call, body, head, echoes), first, rest)
    planned, replies = await call.collect(happened, len(requests))
    choices = [_choice(number, reply, body, echoes[number]) for number, reply in enumerate(replies)]
    told = {"usage": usage_of(replies, len(asked)), "timings": timings_of(replies[0])}
    about = rekindle_of(replies[0].reuse, call.ignored(body))
    return JSONResponse({**head, "choices": choices, **told, "rekindle": about}, headers=plan_header(planned))


def _echo(call: Call, prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else call.service.session.engine.tokenizer.decode(prompt)


def _choice(number: int, reply: Reply, body: CompletionRequest, echo: str) -> dict[str, Any]:
    likely = None if body.logprobs is None else completion_logprobs(reply.drawn, len(echo))
    return {"index": number, "text": echo + reply.text, "logprobs": likely, "finish_reason": reply.finish_reason}


async def _chunks(
    happened: AsyncGenerator[Happened, None],
    call: Call,
    body: CompletionRequest,
    head: Mapping[str, Any],
    echoes: Sequence[str],
) -> AsyncGenerator[Mapping[str, Any], None]:
    written = [0 for _ in echoes]  # how many characters
    told = [0 for _ in echoes]  # how many drawn tokens
    replies: dict[int, Reply] = {}

    def chunk(number: int, text: str, drawn: Sequence[Drawn] = (), reason: str | None = None) -> dict[str, Any]:
        likely = completion_logprobs(drawn, written[number]) if drawn else None
        written[number] += len(text)
        told[number] += len(drawn)
        return {
            **head,
            "choices": [{"index": number, "text": text, "logprobs": likely, "finish_reason": reason}],
        }

    for number, echo in enumerate(echoes):
        if echo:
            yield chunk(number, echo)
    async for what in happened:
        if isinstance(what.event, Piece):
            yield chunk(what.choice, what.event, what.event.drawn)
        elif isinstance(what.event, Finished):
            reply = replies[what.choice] = what.event.reply
            about = rekindle_of(reply.reuse, call.ignored(body))
            last = chunk(what.choice, "", reply.drawn[told[what.choice] :], reply.finish_reason)
            yield {**last, "timings": timings_of(reply), "rekindle": about}
    if body.stream_options is not None and body.stream_options.include_usage:
        ordered = [replies[number] for number in sorted(replies)]
        yield {**head, "choices": [], "usage": usage_of(ordered, len(ordered) // body.n)}
