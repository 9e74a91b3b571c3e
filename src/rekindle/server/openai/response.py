"""Usage and logprobs as OpenAI has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.core.reply import Reply, SampledToken, TokenLogprob


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
