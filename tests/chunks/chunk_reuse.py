"""Sessions that reuse passages, and what must be true of whatever they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rekindle import Session
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.prefill import PrefillResult
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.plan import Plan
from rekindle.core.reply import Reuse
from rekindle.core.request import Request
from rekindle.engine.base import Engine, Row
from rekindle.engine.fake import FakeEngine
from rekindle.session.prompt import PromptTokens, encode_prompt

PASSAGES = (
    "The lamp in the hall burns for nine hours.",
    "Boats leave Vesk on Tuesdays at six.",
    "Bread is baked at four by Tomas Ivarsen.",
    "The lamp on the pier went out in March.",  # begins as the first does
    "A ferry to Ormund costs eleven crowns.",
    "Nobody has wound the harbour clock since.",
)


def asked(documents: Sequence[Any], question: str = "Why?", system: str = "Be brief.", **options: Any) -> Request:
    """A question about documents."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return Request.of(messages, documents=list(documents), **options)


@dataclass(frozen=True)
class Outcome:
    """What came of a prompt: all of its KV, what was planned and what was done."""

    prompt: PromptTokens
    known: CacheLookup
    plan: Plan
    planned: Reuse
    result: PrefillResult
    reuse: Reuse
    kv: Kv

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt.tokens

    @property
    def logits(self) -> np.ndarray:
        return self.result.logits


def prefill(session: Session, request: Request, cancelled: Callable[[], bool] = lambda: False) -> Outcome:
    """Everything that a session does before the first token of a reply, and what it does after the last."""
    prompt = encode_prompt(session.engine, request)
    with session.cache.prepare(request, prompt.tokens, cancelled, None, prompt.prompt_layout) as done:
        planned = done.reuse
        done.run(len(prompt.tokens) + 8, cancelled)
        kv = done.context.sequence.export(Span(0, len(prompt.tokens)))
        outcome = Outcome(prompt, done.lookup, done.plan, planned, done.result, done.reuse, kv)
        done.commit_prompt()
    assert session.flush()
    assert_adds_up(outcome)
    return outcome


def cancelling_after(looks: int) -> Callable[[], bool]:
    """Whether a request is cancelled: it is once that was asked for so many times."""
    asks = iter(range(looks))
    return lambda: next(asks, None) is None


def warmed(session: Session, *documents: Sequence[Any], **options: Any) -> None:
    """Let a session compute prompts with these documents, so that it knows them."""
    for some in documents:
        prefill(session, asked(some, "Who?", **options))


def compute(engine: Engine, tokens: Sequence[int]) -> tuple[np.ndarray, Kv]:
    """The logits after tokens, and their KV, in one step and without any cache."""
    sequence = engine.open(len(tokens), engine.regime(len(tokens)))
    try:
        (logits,) = engine.step([Row.following(sequence, list(tokens))])
        return logits, sequence.export(Span(0, len(tokens)))
    finally:
        sequence.close()


@cache
def cold(tokens: tuple[int, ...]) -> tuple[np.ndarray, Kv]:
    """The same by the fake engine, once."""
    return compute(FakeEngine(), tokens)


def same_kv(got: Kv, expected: Kv) -> bool:
    """Whether two KV are equal to the last bit."""
    pairs = zip(got.layers, expected.layers, strict=True)
    return all(np.array_equal(a.keys, b.keys) and np.array_equal(a.values, b.values) for a, b in pairs)


def first(kv: Kv, count: int) -> Kv:
    """The KV of the first tokens."""
    layers = tuple(LayerKv(layer.keys[:, :count], layer.values[:, :count]) for layer in kv.layers)
    return Kv(Span(kv.span.start, kv.span.start + count), kv.layout, layers)


def assert_is_exact(outcome: Outcome) -> None:
    """To the last bit what the fake engine computes without a cache."""
    logits, kv = cold(outcome.tokens)
    assert outcome.reuse.level == "exact" and outcome.reuse.from_chunks == 0
    assert np.array_equal(outcome.logits, logits) and same_kv(outcome.kv, kv)


def assert_adds_up(outcome: Outcome) -> None:
    """Every token is counted once; passages are where they should be, and so is what was computed anew."""
    count = len(outcome.tokens)
    for reuse in (outcome.planned, outcome.reuse):
        counts = (reuse.engine, reuse.memory, reuse.disk, reuse.from_chunks, reuse.recomputed, reuse.computed)
        assert min(counts) >= 0, counts
        assert reuse.loaded + reuse.from_chunks + reuse.computed - reuse.recomputed == count
        assert (reuse.level == "approximate") == (reuse.from_chunks > 0)
    reuse, chunks = outcome.reuse, outcome.result.plan.reuse_chunks
    if outcome.result.lost is None:
        assert outcome.planned.level == reuse.level and outcome.planned.from_chunks == reuse.from_chunks
    stale = [range(span.start, span.stop) for span in (chunks.spans if chunks is not None else ())]
    assert len(set(outcome.result.recomputed_positions)) == reuse.recomputed
    assert all(any(place in span for span in stale) for place in outcome.result.recomputed_positions)
    for chunk in reuse.chunks:
        assert (
            list(chunk.recomputed_positions) == sorted(set(chunk.recomputed_positions))
            and len(chunk.recomputed_positions) == chunk.recomputed
        )
        assert all(chunk.start <= place < chunk.stop for place in chunk.recomputed_positions)
        assert chunk.source == "reused" or not chunk.recomputed_positions
    firsts = [chunk.start for chunk in reuse.chunks if chunk.source == "reused"]
    for chunk in reuse.chunks:
        assert chunk.source != "exact" or not firsts or chunk.start < min(firsts)
        assert chunk.source != "computed" or (firsts and chunk.start > min(firsts))


def kv_space_of(session: Session, **options: Any) -> KvSpace:
    """Where the KV of a short prompt is kept."""
    return session.cache.kv_spaces.of(Request.of("x", **options), 100)


def stored_kv(session: Session, kv_space: KvSpace, tokens: Sequence[int]) -> Kv | None:
    """What an exact lookup finds of a prompt, loaded; None if it finds nothing."""
    store = session.cache.store
    assert store is not None
    match = store.lookup(kv_space, list(tokens))
    if not match.length:
        return None
    layout = kv_space.layout
    with_room = [
        LayerKv(
            np.empty((shape.kv_heads, match.length, shape.key_dim), layout.numpy_dtype),
            np.empty((shape.kv_heads, match.length, shape.value_dim), layout.numpy_dtype),
        )
        for shape in layout.layers
    ]
    feed = store.load(kv_space, match)
    try:
        for layer, out in enumerate(with_room):
            feed.fill(layer, out)
    finally:
        feed.close()
    return Kv(Span(0, match.length), layout, tuple(with_room))


def assert_store_is_exact(session: Session, kv_space: KvSpace, prompts: Sequence[tuple[int, ...]]) -> None:
    """Whatever an exact lookup finds of these prompts is what computing them gives."""
    for tokens in prompts:
        found = stored_kv(session, kv_space, tokens)
        if found is not None:
            assert same_kv(found, first(cold(tokens)[1], len(found.span)))
