"""Why tokens were not reused, from what is stored and what was asked before. Pure.

The first of these that is true:

    off         reuse was switched off
    late, lost  the cache did not answer, or what it had could not be read
    slower      computing was expected to be faster than loading
    checkpoint  the model's state is only kept where messages end, and that is where the reuse ends
    complete    everything but the last token was reused
    expired     it was kept, but for longer than the `ttl` allows
    gone        it was asked before, but its KV is not there any more: evicted, removed, or never kept
    elsewhere   it is known for another model, template, adapter, tenant, ...: `differs_in` says which
    differs     an earlier prompt shares its beginning, then differs
    ends        everything stored was reused; the rest of the prompt is new
    new         no earlier prompt begins like it
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.codec.coder import is_quantized
from rekindle.core.keys import KvSpace
from rekindle.core.plan import RefusedChunks
from rekindle.core.request import Message
from rekindle.core.size import count_of, human_seconds

_DIGEST_BYTES = 8
_TEXT_PART = 256  # characters


@dataclass(frozen=True)
class Reason:
    """One word, and a sentence for people."""

    kind: str
    sentence: str
    differs_in: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class MissEvidence:
    """What decides the reason.

    reused      tokens of the prompt that are reused, of `tokens`
    asked       the longest beginning, in tokens, that an earlier request on the same KV space had in common with it
    asked_age   seconds since that request
    content     how much of what was asked, in parts, an earlier request on the same KV space had in common
    elsewhere   the same for requests on other KV spaces, with what differs
    goes_on     whether something known goes on otherwise where the reuse ends
    times       expected seconds with the load that was refused, and of computing everything
    refused     the text of earlier prompts that is not reused
    """

    tokens: int
    reused: int
    asked: int = 0
    asked_age: float = 0.0
    content: int = 0
    elsewhere: tuple[int, tuple[str, ...], str] = (0, (), "")
    goes_on: bool = False
    miss: str | None = None
    ttl_seconds: float | None = None
    times: tuple[float | None, float | None] = (None, None)
    refused: RefusedChunks | None = None


def reason_of(evidence: MissEvidence) -> Reason:
    """The reason why not more was reused."""
    left = evidence.tokens - evidence.reused
    others, differences, model = evidence.elsewhere
    if evidence.miss == "slower" and evidence.refused is not None:
        return Reason("slower", f"{evidence.refused}.")
    loading, computing = evidence.times
    if evidence.miss == "slower" and loading is not None and computing is not None:
        times = f"the prompt would take {human_seconds(loading)}, and {human_seconds(computing)} computed"
        return Reason("slower", f"Loading the KV is slower than computing it: with it {times}.")
    if evidence.miss in _PLAIN:
        return Reason(evidence.miss, _PLAIN[evidence.miss])
    if left <= 1:
        return Reason("complete", "Everything but the last token is reused; the last one is always computed.")
    if evidence.asked > evidence.reused + 1:
        lost = evidence.asked - evidence.reused
        if evidence.ttl_seconds is not None and evidence.asked_age > evidence.ttl_seconds:
            return Reason(
                "expired", f"{count_of(lost, 'more token', 'more tokens')} had been kept, but the ttl has expired."
            )
        return Reason("gone", f"An earlier prompt shares {count_of(lost, 'more token', 'more tokens')}, but that KV is "
                              "not in the cache: evicted, removed, or never kept.")  # fmt: skip
    if others > evidence.content:
        named = " and ".join(differences) or "setting"
        what = f" ({model})" if model else ""
        sentence = f"This was asked with another {named}{what}; KV is not shared between them."
        return Reason("elsewhere", sentence, differences)
    if evidence.goes_on:
        if not evidence.reused:
            return Reason("differs", "An earlier prompt looks like this one, but differs from the first token on.")
        first = "token" if evidence.reused == 1 else f"{evidence.reused:,} tokens"
        return Reason("differs", f"An earlier prompt shares the first {first}, then differs.")
    if evidence.reused:
        return Reason("ends", "Everything the cache has of this prompt is reused; the rest is new.")
    return Reason("new", "No earlier prompt begins like this one.")


_PLAIN = {
    "off": "Reuse is switched off.",
    "late": "The cache did not answer in time, so the prompt was computed.",
    "lost": "KV in the cache could not be read, so it was computed.",
    "slower": "Reusing the KV is expected to take longer than computing it.",
    "limit": "The KV of this prompt is larger than the disk limit, so only its beginning is kept and reused. Set a "
    "larger disk_limit (--disk-limit 2GB).",
    "checkpoint": "This model's state can only be reused at checkpoints: the last one that the prompt shares is used, "
    "the rest is computed.",
}


def content_of(prompt: str | Sequence[int] | Sequence[Message]) -> bytes:
    """Chained digests of what was asked, part by part, whatever template or tokenizer it meets: eight bytes each."""
    parts: list[str] = []
    if isinstance(prompt, str):
        parts = _cut(prompt)
    elif prompt and isinstance(prompt[0], Message):
        parts = [part for m in prompt if isinstance(m, Message) for part in _cut(f"{m.role}\0{m.content}")]
    state, digests = hashlib.blake2b(digest_size=_DIGEST_BYTES), b""
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part.encode())
        digests += state.digest()
    return digests


def common_content(a: bytes, b: bytes) -> int:
    """How many first parts two requests share."""
    pairs = zip(_parts(a), _parts(b), strict=False)
    return next((number for number, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)) // _DIGEST_BYTES)


def differences(
    kv_space: KvSpace, identity: Mapping[str, str], other: Mapping[str, Any], its: Mapping[str, str]
) -> list[str]:
    """In what another KV space differs from this one, in words for people."""
    lossy = is_quantized(other["codec"]) != is_quantized(kv_space.codec)
    codec = "reuse level (quantized)" if lossy else "prefill step size (deterministic)"
    words = {
        "tenant": other["tenant"] != kv_space.namespace.tenant,
        "cache_salt": other["salt"] != kv_space.namespace.salt,
        "adapter": other["adapter"] != kv_space.adapter,
        codec: other["codec"] != kv_space.codec,
    }
    named = {"weights": "model", "config": "model", "tokenizer": "tokenizer", "template": "template",
             "dtype": "number type", "rope": "RoPE scaling"}  # fmt: skip
    for field_name, word in named.items():
        words[word] = words.get(word, False) or (bool(its) and its.get(field_name) != identity.get(field_name))
    found = [word for word, differs in words.items() if differs]
    if not found and other["identity"] != kv_space.namespace.identity:
        found = ["model"]
    return found


def _cut(text: str) -> list[str]:
    return [text[start : start + _TEXT_PART] for start in range(0, len(text), _TEXT_PART)]


def _parts(digests: bytes) -> list[bytes]:
    return [digests[start : start + _DIGEST_BYTES] for start in range(0, len(digests), _DIGEST_BYTES)]
