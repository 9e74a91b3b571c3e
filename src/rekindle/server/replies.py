"""What every reply tells beside its text: sizes, times, and what was reused."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rekindle.core.reply import Drawn, Likelihood, Reply, Reuse
from rekindle.run.ask import Prepared

PLAN_HEADER = "X-Rekindle-Plan"


def new_id(kind: str) -> str:
    """A name for a reply."""
    return f"{kind}-{secrets.token_hex(12)}"


def plan_header(reuse: Reuse) -> dict[str, str]:
    """What a prompt is spared, in one line."""
    parts = {"level": reuse.level, "engine": reuse.engine, "memory": reuse.memory, "disk": reuse.disk}
    if reuse.near:
        parts["near"] = reuse.near
    if reuse.mended:
        parts["mended"] = reuse.mended
    if reuse.streamed:
        parts["streamed"] = reuse.streamed
    fields = {**parts, "computed": reuse.computed, "miss": reuse.miss or "none"}
    return {PLAN_HEADER: "; ".join(f"{name}={value}" for name, value in fields.items())}


def usage_of(replies: Sequence[Reply], prompts: int = 1) -> dict[str, Any]:
    """Tokens in and out, in OpenAI's words; replies to the same prompt count it once."""
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


def timings_of(reply: Reply) -> dict[str, Any]:
    """Where the time went, in llama.cpp's words."""
    prompt_ms, predicted_ms = reply.timings.first_token_seconds * 1e3, reply.timings.decode_seconds * 1e3
    computed, written = reply.reuse.computed, reply.usage.completion_tokens
    return {
        "cache_n": reply.usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_second": round(computed / prompt_ms * 1e3, 3) if prompt_ms else None,
        "predicted_n": written,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_second": None if (rate := reply.timings.tokens_per_second) is None else round(rate, 3),
    }


def rekindle_of(reuse: Reuse, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """What was reused, from where, and why not more; and which fields of the request meant nothing."""
    return {
        "level": reuse.level,
        "loaded": reuse.loaded,
        "loaded_from": {"engine": reuse.engine, "memory": reuse.memory, "disk": reuse.disk},
        "near": reuse.near,
        "mended": reuse.mended,
        "recomputed": reuse.recomputed,
        "streamed": reuse.streamed,
        "computed": reuse.computed,
        "miss": reuse.miss,
        "load_ms": round(reuse.load_seconds * 1e3, 3),
        "cold_ms": None if reuse.cold_seconds is None else round(reuse.cold_seconds * 1e3, 3),
        "ignored": list(ignored),
    } | _mending_of(reuse)


def _mending_of(reuse: Reuse) -> dict[str, Any]:
    """How passages were mended, and where the KV of each came from; nothing where mending was not allowed."""
    if not reuse.chunks:
        return {}
    chunks = [{name: value for name, value in asdict(chunk).items() if name != "anew"} for chunk in reuse.chunks]
    how = {"mender": reuse.mender, "budget": reuse.budget, "calibrated": reuse.calibrated}
    return {"mending": {**how, "passages": chunks}}


def sources_of(prepared: Prepared) -> list[dict[str, Any]]:
    """The passages that the model was given, as they are, whatever they say."""
    return [asdict(source) for source in prepared.sources]


def retrieval_of(prepared: Prepared) -> dict[str, Any]:
    """How they were found, how long that took, and how many of them did not fit."""
    found = prepared.retrieved
    left = len(found.hits) - len(prepared.sources)
    return {"how": found.retrieval, "ms": round(found.seconds * 1e3, 3), "left_out": left}


def stored_of(prepared: Prepared, reply: Reply) -> dict[str, Any]:
    """The earlier answer that took part in this one, and why another did not; nothing where none may."""
    if prepared.consulted is None:
        return {}
    stored = prepared.consulted.stored(reply)
    return {"stored": None if stored is None else asdict(stored), "refused": prepared.consulted.found.refused}


def quoting_of(given: int, reply: Reply, prepared: Prepared | None = None) -> dict[str, Any]:
    """What became of the documents of a chat."""
    if prepared is not None:
        return {"sources": sources_of(prepared), "retrieval": retrieval_of(prepared)}
    quoted = reply.usage.quoted_passages
    return {"documents": {"quoted": quoted, "left_out": given - quoted}} if given else {}


def chat_logprobs(drawn: Sequence[Drawn]) -> dict[str, Any]:
    """Likelihoods as chats tell them."""
    content = [
        {**_likelihood(one.chosen), "top_logprobs": [_likelihood(other) for other in one.likeliest]} for one in drawn
    ]
    return {"content": content, "refusal": None}


def _likelihood(one: Likelihood) -> dict[str, Any]:
    return {"token": one.text.decode("utf-8", "replace"), "logprob": one.logprob, "bytes": list(one.text)}


def completion_logprobs(drawn: Sequence[Drawn], offset: int) -> dict[str, Any]:
    """Likelihoods as completions tell them; the text begins at `offset`."""
    texts = [one.chosen.text.decode("utf-8", "replace") for one in drawn]
    offsets = [offset + sum(map(len, texts[:number])) for number in range(len(texts))]
    return {
        "tokens": [_spelled(one.chosen.text) for one in drawn],
        "token_logprobs": [one.chosen.logprob for one in drawn],
        "top_logprobs": [{_spelled(other.text): other.logprob for other in one.likeliest} for one in drawn],
        "text_offset": offsets,
    }


def _spelled(text: bytes) -> str:
    """The text of a token; parts of characters are spelled as OpenAI does, so that no two look alike."""
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)
