"""What replies of every protocol have besides the text: an id, timings, reuse, sources."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rekindle.core.reply import Reply, Reuse
from rekindle.knowledge.salvage import Loss
from rekindle.session.ask import Prepared


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"


def timings_of(reply: Reply) -> dict[str, Any]:
    """`timings` as llama.cpp has them; an unknown rate is 0."""
    prompt_ms, predicted_ms = reply.timings.first_token_seconds * 1e3, reply.timings.decode_seconds * 1e3
    computed, written = reply.reuse.computed, reply.usage.completion_tokens
    prompt_rate, written_rate = computed / prompt_ms * 1e3 if prompt_ms else 0.0, reply.timings.tokens_per_second or 0.0
    return {
        "cache_n": reply.usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": round(1e3 / prompt_rate, 3) if prompt_rate else 0.0,
        "prompt_per_second": round(prompt_rate, 3),
        "predicted_n": written,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": round(1e3 / written_rate, 3) if written_rate else 0.0,
        "predicted_per_second": round(written_rate, 3),
    }


def rekindle_of(reuse: Reuse, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """What was reused, from where, and why not more; and which request fields were ignored."""
    return {
        "level": reuse.level,
        "loaded": reuse.loaded,
        "loaded_from": {"engine": reuse.engine, "memory": reuse.memory, "disk": reuse.disk, **reuse.shared},
        "quantized": reuse.quantized,
        "calibrated_bits": reuse.calibrated_bits,
        "from_chunks": reuse.from_chunks,
        "recomputed": reuse.recomputed,
        "streamed": reuse.streamed,
        "streamed_slices": dict(reuse.streamed_slices),
        "streamed_kl": reuse.streamed_kl,
        "computed": reuse.computed,
        "miss": reuse.miss,
        "replayed_replies": reuse.replayed_replies,
        "origin_miss": reuse.origin_miss,
        "load_ms": round(reuse.load_seconds * 1e3, 3),
        "cold_ms": None if reuse.cold_seconds is None else round(reuse.cold_seconds * 1e3, 3),
        "ignored": list(ignored),
    } | _chunk_reuse_of(reuse)


def _chunk_reuse_of(reuse: Reuse) -> dict[str, Any]:
    """How passages were reused, and where the KV of each came from; nothing where chunk reuse was not allowed."""
    if not reuse.chunks:
        return {}
    chunks = [
        {name: value for name, value in asdict(chunk).items() if name != "recomputed_positions"}
        for chunk in reuse.chunks
    ]
    how = {"recompute_policy": reuse.recompute_policy, "budget": reuse.budget, "calibrated": reuse.calibrated}
    return {"chunk_reuse": {**how, "passages": chunks}}


def sources_of(prepared: Prepared) -> list[dict[str, Any]]:
    """The passages that the model was given, unchanged."""
    return [asdict(source) for source in prepared.sources]


def quote_of_source(prepared: Prepared, reply: Reply) -> dict[str, Any]:
    """The sentence of a source that is shown under a reply, with that source's number."""
    quote = prepared.quote(reply)
    return {"quote": None if quote is None else asdict(quote)}


def retrieval_of(prepared: Prepared) -> dict[str, Any]:
    """How passages were found, how long that took, how many did not fit, whether none is likely to answer, and what
    the library has lost."""
    found = prepared.retrieved
    left = len(found.hits) - len(prepared.sources)
    fields = {"method": found.retrieval, "ms": round(found.seconds * 1e3, 3), "left_out": left}
    return {**fields, "uncertain": found.uncertain, **warnings_of(found.losses)}


def warnings_of(losses: Sequence[Loss]) -> dict[str, Any]:
    """What the library lost to damage, in sentences without paths of this machine; nothing if it lost nothing."""
    advice = 'POST /v1/rekindle/library/check with {"acknowledge": true} ends this message.'
    return {"warnings": [loss.sentence(advice, show_path=False) for loss in losses]} if losses else {}


def stored_of(prepared: Prepared, reply: Reply) -> dict[str, Any]:
    """The stored answer that was used, or why one was not; nothing if stored answers are off."""
    if prepared.consulted is None:
        return {}
    stored = prepared.consulted.stored(reply)
    return {"stored": None if stored is None else asdict(stored), "refused": prepared.consulted.found.refused}


def quoting_of(documents: int, reply: Reply, prepared: Prepared | None = None) -> dict[str, Any]:
    """Which documents of a chat were quoted, and which stored answer took part."""
    if prepared is not None and not prepared.has_own_documents:
        found = {"sources": sources_of(prepared), "retrieval": retrieval_of(prepared)}
        return {**found, **quote_of_source(prepared, reply), **stored_of(prepared, reply)}
    quoted = reply.usage.quoted_passages
    about = {"documents": {"quoted": quoted, "left_out": documents - quoted}} if documents else {}
    return about if prepared is None else {**about, **stored_of(prepared, reply)}
