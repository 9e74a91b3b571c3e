"""From the body of an HTTP request to a request of the session, and from replies to usage and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from rekindle.core.reply import Reply, SampledToken, TokenLogprob
from rekindle.core.request import Options, PromptLike, Request
from rekindle.server.body import ReplyLength, begins_turn, cache_options, content_text, messages_of, sampling_options
from rekindle.server.errors import ApiError
from rekindle.server.reply_form import grammar_of
from rekindle.server.schema import AskRequest, ChatRequest, CompletionRequest, PromptRequest, SamplingBody
from rekindle.session.ask import AskOptions

_SEEDS = 2**64


def chat_request(body: ChatRequest, tenant: str, length: ReplyLength) -> Request:
    """The session's request of a chat. Raises `RequestError` and `ApiError`."""
    options = _options(body, tenant, length, body.max_completion_tokens)
    if body.logprobs:
        options["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true.", param="top_logprobs")
    if body.tools:
        options["tools"] = body.tools
        if body.tool_choice is not None:
            options["tool_choice"] = body.tool_choice
        options["parallel_tool_calls"] = body.parallel_tool_calls is True
    elif body.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools. Send them along.", param="tool_choice")
    options["think"] = body.think
    options["add_generation_prompt"] = begins_turn(body, body.messages)
    if body.prediction is not None:
        options["drafts"] = [content_text(body.prediction.content) or ""]
    return Request.of(messages_of(body.messages), **options)


def ask_options(body: AskRequest, tenant: str, length: ReplyLength) -> AskOptions:
    """The options of `Session.ask` for a question."""
    options: dict[str, Any] = {**_options(body, tenant, length, None)}
    options |= {"top_k": body.top_k, "retrieval": body.retrieval}  # passages, not tokens to draw from
    if body.temperature is None:
        options["temperature"] = 0.0
    if body.instructions is not None:
        options["instructions"] = body.instructions
    if body.answers is not None:
        options["answers"] = body.answers
    if body.reuse is not None:
        options.setdefault("reuse", body.reuse)
    return cast("AskOptions", options)


def completion_requests(body: CompletionRequest, tenant: str, length: ReplyLength) -> list[Request]:
    """The session's requests of a completion, one for each prompt."""
    if body.best_of is not None and body.best_of != body.n:
        raise ApiError(400, "best_of is not supported. Leave it out, or make it equal to n.", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported. Leave one of them out.", param="echo")
    options = _options(body, tenant, length, None)
    if body.logprobs is not None:
        options["logprobs"] = body.logprobs
    return [Request.of(prompt, **options) for prompt in prompts_of(body.prompt)]


def prompt_request(body: PromptRequest, tenant: str) -> Request:
    """A request that only prefills a prompt."""
    if (body.messages is None) == (body.prompt is None):
        raise ApiError(400, "Give either messages or a prompt.", param="messages")
    prompt: PromptLike = messages_of(body.messages) if body.messages is not None else body.prompt or ""
    options: Options = {**cache_options(body, tenant), "max_tokens": 0}
    return Request.of(prompt, **options)


def prompts_of(given: str | Sequence[Any]) -> list[PromptLike]:
    """One prompt or several: texts, or lists of token ids."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    return list(given)


def _options(body: SamplingBody, tenant: str, length: ReplyLength, wanted_tokens: int | None) -> Options:
    options = cache_options(body, tenant) | sampling_options(body)
    options["max_tokens"] = length.of(body.max_tokens if wanted_tokens is None else wanted_tokens)
    if body.min_tokens is not None:
        options["min_tokens"] = body.min_tokens
    if body.logit_bias:
        options["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    if body.seed is not None:
        options["seed"] = body.seed % _SEEDS
    options["grammar"] = grammar_of(body)
    return options


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ApiError(400, f'logit_bias: {text[:50]!r} is no token id. Give {{"ID": number}}.', param="logit_bias")
    return int(text)


def usage_of(replies: Sequence[Reply], prompts: int = 1) -> dict[str, Any]:
    """`usage` as OpenAI has it; a prompt with several choices counts once."""
    each = len(replies) // prompts
    asked = [replies[number] for number in range(0, len(replies), each)]
    prompt, written = sum(r.usage.prompt_tokens for r in asked), sum(r.usage.completion_tokens for r in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(r.usage.cached_tokens for r in asked)},
        "completion_tokens_details": {"accepted_prediction_tokens": sum(r.usage.drafted_tokens for r in replies)},
    }


def chat_logprobs(drawn: Sequence[SampledToken]) -> dict[str, Any]:
    """Logprobs as chat completions have them."""
    content = [{**_likelihood(one.chosen), "top_logprobs": [_likelihood(other) for other in one.top]} for one in drawn]
    return {"content": content, "refusal": None}


def _likelihood(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text.decode("utf-8", "replace"), "logprob": one.logprob, "bytes": list(one.text)}


def completion_logprobs(drawn: Sequence[SampledToken], offset: int) -> dict[str, Any]:
    """Logprobs as completions have them; the text begins at `offset`."""
    texts = [one.chosen.text.decode("utf-8", "replace") for one in drawn]
    offsets = [offset + sum(map(len, texts[:number])) for number in range(len(texts))]
    return {
        "tokens": [_spelled(one.chosen.text) for one in drawn],
        "token_logprobs": [one.chosen.logprob for one in drawn],
        "top_logprobs": [{_spelled(other.text): other.logprob for other in one.top} for one in drawn],
        "text_offset": offsets,
    }


def _spelled(text: bytes) -> str:
    """The text of a token; partial characters are written as bytes, as OpenAI does, so that no two look alike."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
