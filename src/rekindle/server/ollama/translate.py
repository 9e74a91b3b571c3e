"""From a body of Ollama's API to a request of the session, and from a reply to Ollama's fields and lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rekindle.core.grammar import Grammar
from rekindle.core.reply import Reply
from rekindle.core.request import Message, Options, PromptLike, Request
from rekindle.core.tools import ToolCall
from rekindle.server.body import ReplyLength, cache_options
from rekindle.server.errors import ApiError
from rekindle.server.ollama.schema import GenerateRequest, ModelOptions, OllamaBody, OllamaChatRequest, OllamaMessage
from rekindle.server.protocol import WireProtocol, to_json


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


def ignored_options(body: OllamaBody, context: int) -> list[str]:
    """The names of options that have no effect here."""
    options = body.sampling
    names = options.ignored()
    if options.num_ctx not in (None, context):
        names.append("num_ctx")
    own = [] if body.rekindle is None else [f"rekindle.{name}" for name in body.rekindle.ignored()]
    return [*(f"options.{name}" for name in names), *own]


def _message(message: OllamaMessage, place: str) -> dict[str, Any]:
    check_refused(message, f"{place}.")
    fields: dict[str, Any] = {"role": message.role, "content": message.content, **(message.model_extra or {})}
    if message.thinking:
        fields["reasoning_content"] = message.thinking
    if message.tool_name:
        fields["name"] = message.tool_name
    return fields


def _options(body: OllamaBody, tenant: str, length: ReplyLength) -> Options:
    given = body.sampling
    options = cache_options(body, tenant) | _sampling(given)
    wanted = given.num_predict
    options["max_tokens"] = length.longest if wanted is not None and wanted < 0 else length.of(wanted)
    options["think"] = body.think
    if body.format:
        schema = {"type": "object"} if isinstance(body.format, str) else body.format
        options["grammar"] = Grammar.json_schema(schema)
    return options


def _sampling(given: ModelOptions) -> Options:
    """Ollama's own defaults where nothing is given, but no penalty."""
    options: Options = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
    for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"):
        if (value := getattr(given, name)) is not None:
            options[name] = value
    options["top_k"] = options["top_k"] or None
    if given.repeat_penalty is not None:
        options["repetition_penalty"] = given.repeat_penalty
    if given.seed is not None and given.seed >= 0:
        options["seed"] = given.seed
    if given.stop:
        options["stop"] = given.stop
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
