"""Ollama's API: /api/chat and /api/generate, /api/embed and /api/embeddings. The models: `ollama_models`.

Other fields and options are allowed, and named in the reply (`rekindle.ignored`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime, timezone
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictInt
from starlette.responses import JSONResponse, Response

from rekindle.core.grammar import Grammar
from rekindle.core.reply import Reply
from rekindle.core.request import Message, Options, PromptLike, Request
from rekindle.core.size import keep_alive_seconds
from rekindle.core.tools import ToolCall
from rekindle.server.body import ReplyLength, cache_options, sampling_options
from rekindle.server.call import Call
from rekindle.server.embed_texts import check_embedder, embed_texts, narrowed
from rekindle.server.errors import ApiError
from rekindle.server.job import Finished, ThoughtDelta
from rekindle.server.pending_reply import begin_chat
from rekindle.server.protocol import WireProtocol, to_json
from rekindle.server.schema import CacheBody, ChatOptions, Items, Penalty, RequestBody, SamplingFields, Text
from rekindle.text.tools.parse import CallDelta

_MODEL = "One of /api/tags; default: the base model."


class ModelOptions(SamplingFields):
    """Sampling, as Ollama has it: by default with a temperature of 0.8, top_p 0.9 and top_k 40."""

    repeat_penalty: Penalty = None
    num_predict: StrictInt | None = Field(None, ge=-(2**31), lt=2**31, description="Negative: as many as fit.")
    num_ctx: StrictInt | None = Field(None, ge=0, lt=2**31, description="Named as ignored: --context decides.")


class OllamaBody(CacheBody):
    """What the bodies of chat and generate share."""

    model: Text | None = Field(None, description=_MODEL)
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description='"json", or the schema of the reply.')
    options: ModelOptions | None = None
    stream: StrictBool | None = Field(True, description="false: one object instead of lines.")
    think: StrictBool | Literal["low", "medium", "high"] | None = Field(
        None, description="Whether the model thinks aloud first, if its template has a switch for that."
    )
    rekindle: ChatOptions | None = None

    @property
    def streamed(self) -> bool:
        """Whether the reply comes in lines; null is the default."""
        return self.stream is not False


class OllamaMessage(RequestBody):
    """A message of Ollama's API."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    tool_name: Text | None = None
    images: list[Any] | None = Field(None, description="Refused: models read text here.")


class OllamaChatRequest(OllamaBody):
    """The body of /api/chat. Without messages the model is loaded, or freed if keep_alive is 0."""

    messages: Items[OllamaMessage] | None = None
    tools: Items[dict[str, Any]] | None = None


class GenerateRequest(OllamaBody):
    """The body of /api/generate. Without a prompt the model is loaded, or freed if keep_alive is 0."""

    prompt: Text | None = None
    system: Text | None = None
    raw: StrictBool | None = Field(None, description="true: the prompt is continued as it is, without a template.")
    template: Text | None = Field(None, description="Refused: the model's own template is used.")
    context: Items[StrictInt] | None = Field(None, description="Refused: send the conversation to /api/chat.")
    suffix: Text | None = Field(None, description="What follows the reply, for models that can fill in the middle.")
    images: list[Any] | None = Field(None, description="Refused: models read text here.")


class EmbedRequest(RequestBody):
    """The body of /api/embed."""

    model: Text | None = None
    input: Text | Items[Text]
    truncate: StrictBool | None = Field(None, description="false: refuse texts longer than the embedder reads.")
    dimensions: StrictInt | None = Field(None, ge=1, description="Keep the first dimensions, normalized again.")


class OldEmbeddingsRequest(RequestBody):
    """The body of /api/embeddings, which /api/embed replaced."""

    model: Text | None = None
    prompt: Text


class ModelBody(RequestBody):
    """A body that names a model: /api/show, /api/delete."""

    model: Text | None = Field(None, description=_MODEL)
    name: Text | None = Field(None, description="The older name of `model`.")

    @property
    def named(self) -> str:
        """The name, by either field; "" if there is none."""
        return self.model or self.name or ""


class PullRequest(ModelBody):
    """The body of /api/pull."""

    stream: StrictBool | None = Field(True, description="false: one object at the end instead of lines.")


def _error(problem: ApiError) -> dict[str, Any]:
    if problem.overflow is None:
        return {"error": problem.message}
    return {
        "error": "the input length exceeds the context length: {} > {}. {}".format(*problem.overflow, problem.message)
    }


def _line(item: Mapping[str, Any]) -> str:
    return f"{to_json(item)}\n"


# A space before a line is still JSON; an empty line is none, and ends clients.
OLLAMA = WireProtocol("Ollama", _error, _line, ping=" ", media_type="application/x-ndjson")


_REFUSED = {
    "template": "the model's own template is used. Leave it out, or send the whole text with raw.",
    "context": "conversations are not kept as tokens. Send their messages to /api/chat.",
    "images": "models read text here. Leave them out.",
}


def chat_request(body: OllamaChatRequest, tenant: str, length: ReplyLength) -> Request:
    """The session's request of a chat with messages. Raises `RequestError` and `ApiError`."""
    options = _options(body, tenant, length)
    if body.tools:
        options["tools"] = body.tools
    messages = [_message(message, f"messages.{number}") for number, message in enumerate(body.messages or ())]
    return Request.of(messages, **options)


def generate_request(
    body: GenerateRequest, tenant: str, length: ReplyLength, tokens: Sequence[int] | None = None
) -> Request:
    """The session's request of a prompt that is not empty, or of its tokens. Raises `RequestError` and `ApiError`."""
    prompt: PromptLike = body.prompt or ""
    if tokens is not None:
        prompt = tokens
    elif not body.raw:
        system = [Message("system", body.system)] if body.system else []
        prompt = [*system, Message("user", body.prompt or "")]
    return Request.of(prompt, **_options(body, tenant, length))


def check_refused(body: GenerateRequest | OllamaMessage, place: str = "") -> None:
    """Raise `ApiError` 400 for a field that would change what the model reads, and that has no meaning here."""
    for name, reason in _REFUSED.items():
        if getattr(body, name, None):
            raise ApiError(400, f"{place}{name}: {reason}", param=f"{place}{name}")


def _message(message: OllamaMessage, place: str) -> dict[str, Any]:
    check_refused(message, f"{place}.")
    fields: dict[str, Any] = {"role": message.role, "content": message.content, **(message.model_extra or {})}
    if message.thinking:
        fields["reasoning_content"] = message.thinking
    if message.tool_name:
        fields["name"] = message.tool_name
    return fields


def _options(body: OllamaBody, tenant: str, length: ReplyLength) -> Options:
    given = body.options or ModelOptions.model_validate({})
    # Ollama's own defaults, but no penalty.
    options = cache_options(body, tenant) | sampling_options(given, temperature=0.8, top_p=0.9, top_k=40)
    options["max_tokens"] = length.of(given.num_predict)
    options["think"] = body.think
    if given.seed is not None and given.seed >= 0:
        options["seed"] = given.seed
    if body.format:
        schema = {"type": "object"} if isinstance(body.format, str) else body.format
        options["grammar"] = Grammar.json_schema(schema)
    return options


def call_of(call: ToolCall) -> dict[str, Any]:
    """A tool call; its arguments are an object."""
    return {"id": call.id, "function": call.as_template_input()["function"]}


def ended(reply: Reply, started: float) -> dict[str, Any]:
    """The end of a reply, with its durations in nanoseconds; what is no prefill and no decoding counts as loading."""
    total = time.perf_counter() - started
    prompt, written = reply.timings.first_token_seconds, reply.timings.decode_seconds
    return {
        "done": True,
        "done_reason": reply.finish_reason,
        "total_duration": nanoseconds(total),
        "load_duration": nanoseconds(max(0.0, total - prompt - written)),
        "prompt_eval_count": reply.usage.prompt_tokens,
        "prompt_eval_duration": nanoseconds(prompt),
        "eval_count": reply.usage.completion_tokens,
        "eval_duration": nanoseconds(written),
    }


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def timestamp(seconds: float | None = None) -> str:
    """A time as Ollama writes it; default: now."""
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc).isoformat()


def head_of(model: str) -> Mapping[str, Any]:
    """What every line of a reply begins with."""
    return {"model": model, "created_at": timestamp()}


def _chat_fields(text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [call_of(call) for call in calls]
    return {"message": message}


def _generate_fields(text: str, thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:  # noqa: ARG001
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


async def answer_ollama_chat(call: Call, body: OllamaChatRequest) -> Response:
    """The reply to a chat in Ollama's format, in lines or whole."""
    if not body.messages:
        return await _load(call, body, _chat_fields(""))
    request = chat_request(body, call.caller.tenant, call.service.reply_length())
    return await _answer(call, body, request, _chat_fields)


async def answer_generate(call: Call, body: GenerateRequest) -> Response:
    """The reply to a prompt in Ollama's format, in lines or whole."""
    check_refused(body)
    if not body.prompt:
        return await _load(call, body, _generate_fields(""))
    session, tokens = call.service.session, None
    if body.suffix:
        prefix, suffix = body.prompt, body.suffix
        tokens = await call.tokenized(lambda: session.fill_in_prompt(prefix, suffix))
    request = generate_request(body, call.caller.tenant, call.service.reply_length(), tokens)
    return await _answer(call, body, request, _generate_fields)


def _ignored_options(call: Call, body: OllamaBody) -> list[str]:
    """Options without effect: a context has the length it has."""
    other = body.options is not None and body.options.num_ctx not in (None, call.service.session.engine.context_tokens)
    return ["options.num_ctx"] if other else []


async def _load(call: Call, body: OllamaBody, fields: Mapping[str, Any]) -> Response:
    """Load the model, or free it: what a body without a prompt is for."""
    service, started = call.service, time.perf_counter()
    frees = body.keep_alive is not None and keep_alive_seconds(body.keep_alive) == 0 and call.caller.operator
    service.turn(call.caller, body)
    if not frees:
        await call.in_thread(service.load)
    reason = {"done": True, "done_reason": "unload" if frees else "load"}
    seconds = time.perf_counter() - started
    about = {"ignored": sorted([*call.ignored(body), *_ignored_options(call, body)])}
    model = call.adapter_of(body.model) or service.model
    line = {**head_of(model), **fields, **reason, "load_duration": nanoseconds(seconds), "rekindle": about}
    return Response(OLLAMA.frame(line), media_type=OLLAMA.media_type) if body.streamed else JSONResponse(line)


def _part_fields(part: ThoughtDelta | str | CallDelta, fields: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    if isinstance(part, ThoughtDelta):
        return fields("", part.text)
    return fields("", "", [part.call]) if isinstance(part, CallDelta) else fields(part)


async def _answer(call: Call, body: OllamaBody, request: Request, fields: Callable[..., dict[str, Any]]) -> Response:
    """`fields` writes text, thoughts and calls as the endpoint has them."""
    switches = [] if body.think is None else ["think"]
    pending = await begin_chat(call, body, request, ignored=_ignored_options(call, body), switches=switches)

    def last(reply: Reply, written: Mapping[str, Any]) -> dict[str, Any]:
        return {**head_of(pending.model), **written, **ended(reply, pending.started), "rekindle": pending.about(reply)}

    async def lines() -> AsyncGenerator[Mapping[str, Any], None]:
        async with aclosing(pending.parts()) as parts:
            async for item in parts:
                if isinstance(item.part, Finished):
                    yield last(item.part.reply, fields(""))
                else:
                    yield {**head_of(pending.model), **_part_fields(item.part, fields), "done": False}

    def whole(replies: list[Reply]) -> dict[str, Any]:
        (reply,) = replies
        return last(reply, fields(reply.text, reply.thinking, reply.tool_calls))

    return await pending.respond(body.streamed, lambda _: lines(), whole)


async def answer_embed(call: Call, body: EmbedRequest) -> Response:
    """Vectors of texts, in Ollama's format."""
    started, model = time.perf_counter(), check_embedder(call, body.model)
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
    check_embedder(call, body.model)
    if not body.prompt:
        raise ApiError(400, "prompt: There is nothing to embed. Give a text.")
    found = await embed_texts(call, body.prompt)
    return JSONResponse({"embedding": found.vectors[0].tolist()})
