"""/api/chat and /api/generate, /api/embed and /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.responses import JSONResponse, Response

from rekindle.core.request import Request
from rekindle.core.size import keep_alive_seconds
from rekindle.core.tools import ToolCall
from rekindle.server.call import Call, answer_prepared, plan_header
from rekindle.server.embed_texts import check_embedder, embed_texts, narrowed
from rekindle.server.errors import ApiError
from rekindle.server.host import without_latest
from rekindle.server.job import Finished, ReplyPart, ThoughtDelta
from rekindle.server.ollama.schema import (
    EmbedRequest,
    GenerateRequest,
    OldEmbeddingsRequest,
    OllamaBody,
    OllamaChatRequest,
)
from rekindle.server.ollama.translate import (
    OLLAMA,
    call_of,
    chat_request,
    check_refused,
    ended,
    generate_request,
    head_of,
    ignored_options,
    nanoseconds,
)
from rekindle.server.reply_fields import quoting_of, rekindle_of
from rekindle.session.ask import Prepared
from rekindle.text.reasoning import has_think_switch
from rekindle.text.tools.parse import CallDelta


def _chat_fields(text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [call_of(call) for call in calls]
    return {"message": message}


def _generate_fields(text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:  # noqa: ARG001
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


@dataclass(frozen=True)
class _Answering:
    """What the lines of one reply are made of. `fields` writes text, thoughts and calls as the endpoint has them."""

    body: OllamaBody
    request: Request
    model: str
    ignored: Sequence[str]
    fields: Callable[..., dict[str, Any]]
    started: float
    prepared: Prepared | None = None

    def line(self, part: ThoughtDelta | str | CallDelta) -> dict[str, Any]:
        if isinstance(part, ThoughtDelta):
            fields = self.fields("", part.text)
        elif isinstance(part, CallDelta):
            fields = self.fields("", "", [part.call])
        else:
            fields = self.fields(part)
        return {**head_of(self.model), **fields, "done": False}

    def last(self, finished: Finished, fields: Mapping[str, Any]) -> dict[str, Any]:
        reply = finished.reply
        about = rekindle_of(reply.reuse, self.ignored) | quoting_of(len(self.request.quotes), reply, self.prepared)
        return {**head_of(self.model), **fields, **ended(reply, self.started), "rekindle": about}

    async def lines(self, parts: AsyncGenerator[ReplyPart, None]) -> AsyncGenerator[Mapping[str, Any], None]:
        async with aclosing(parts):
            async for item in parts:
                if isinstance(item.part, Finished):
                    yield self.last(item.part, self.fields(""))
                else:
                    yield self.line(item.part)


async def answer_ollama_chat(call: Call, body: OllamaChatRequest) -> Response:
    """The reply to a chat in Ollama's format, in lines or whole."""
    model = _model(call, body)
    if not body.messages:
        return await _load(call, body, model, _chat_fields(""))
    request = chat_request(body, call.caller.tenant, call.service.reply_length())
    return await _answer(call, body, request, model, _chat_fields)


async def answer_generate(call: Call, body: GenerateRequest) -> Response:
    """The reply to a prompt in Ollama's format, in lines or whole."""
    model = _model(call, body)
    check_refused(body)
    if not body.prompt:
        return await _load(call, body, model, _generate_fields(""))
    session, tokens = call.service.session, None
    if body.suffix:
        prefix, suffix = body.prompt, body.suffix
        tokens = await call.in_thread(lambda: session.fill_in_prompt(prefix, suffix))
    request = generate_request(body, call.caller.tenant, call.service.reply_length(), tokens)
    return await _answer(call, body, request, model, _generate_fields)


def _model(call: Call, body: OllamaBody) -> str:
    """The model that answers: an adapter, or the base model. Raises `ApiError` 404."""
    return call.adapter_of(body.model) or call.service.model


async def _load(call: Call, body: OllamaBody, model: str, fields: Mapping[str, Any]) -> Response:
    """Load the model, or free it: what a body without a prompt is for."""
    service, started = call.service, time.perf_counter()
    frees = body.keep_alive is not None and keep_alive_seconds(body.keep_alive) == 0 and call.caller.operator
    service.turn(call.caller, body)
    if not frees:
        await call.in_thread(service.load)
    reason = {"done": True, "done_reason": "unload" if frees else "load"}
    seconds = time.perf_counter() - started
    about = {"ignored": sorted([*call.ignored(body), *ignored_options(body, service.session.engine.context_tokens)])}
    line = {**head_of(model), **fields, **reason, "load_duration": nanoseconds(seconds), "rekindle": about}
    return Response(OLLAMA.frame(line), media_type=OLLAMA.media_type) if body.streamed else JSONResponse(line)


async def _answer(
    call: Call, body: OllamaBody, request: Request, model: str, fields: Callable[..., dict[str, Any]]
) -> Response:
    started, session = time.perf_counter(), call.service.session
    request, dropped = call.canonical(request)
    request = replace(request, adapter="" if model == call.service.model else model)
    ignored = [*call.ignored(body), *dropped, *ignored_options(body, session.engine.context_tokens)]
    if body.think is not None and not has_think_switch(await call.template()):
        ignored.append("think")
    wanted = body.rekindle.knowledge if body.rekindle is not None else None
    prepared = None if wanted is None else await call.with_passages(request, wanted)
    if prepared is None:
        events = call.service.answer([request], call.caller, body)
    else:
        request = prepared.request
        events = answer_prepared(call, body, prepared, started)
    answering = _Answering(body, request, model, sorted(ignored), fields, started, prepared)
    if body.streamed:
        return await call.stream(events, lambda _: answering.lines(call.parts(events, request)))
    planned, (reply,) = await call.collect(events, 1)
    written = fields(reply.text, reply.thinking, reply.tool_calls)
    return JSONResponse(answering.last(Finished(reply), written), headers=plan_header(planned))


async def answer_embed(call: Call, body: EmbedRequest) -> Response:
    """Vectors of texts, in Ollama's format."""
    started, model = time.perf_counter(), check_embedder(call, without_latest(body.model or ""))
    found = await embed_texts(call, body.input)
    if found.truncated and body.truncate is False:
        raise ApiError(400, f"truncate: {found.truncated} of the texts are longer than {model} reads. Shorten them.")
    return JSONResponse(
        {
            "model": model,
            "embeddings": narrowed(found.vectors, body.dimensions).tolist(),
            "total_duration": nanoseconds(time.perf_counter() - started),
            "load_duration": 0,
            "prompt_eval_count": found.tokens,
            "rekindle": {"truncated": found.truncated, "ignored": body.ignored()},
        }
    )


async def answer_old_embeddings(call: Call, body: OldEmbeddingsRequest) -> Response:
    """The vector of one text, in Ollama's older format."""
    check_embedder(call, without_latest(body.model or ""))
    if not body.prompt:
        raise ApiError(400, "prompt: There is nothing to embed. Give a text.")
    found = await embed_texts(call, body.prompt)
    return JSONResponse({"embedding": found.vectors[0].tolist()})
