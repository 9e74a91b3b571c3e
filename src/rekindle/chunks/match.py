"""Which stored variant fits each passage of a prompt, and which passages of a prompt to store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rekindle.cache.context import Context
from rekindle.cache.writer import BackgroundJob, WriteGuard, present_of
from rekindle.chunks.scores import (
    ChunkScorer,
    context_change,
    context_impact,
    disorder,
    fix_overhead,
    overlap,
    preference,
    unscored,
)
from rekindle.chunks.select import OURS
from rekindle.core.chunk import ChunkDigest, ChunkMatch, ChunkMatches, LoadableVariant, PromptLayout, Variant
from rekindle.core.keys import KvSpace, token_bytes
from rekindle.core.kv import Kv, Span
from rekindle.core.plan import Plan
from rekindle.core.scope import AppRef
from rekindle.engine.base import Engine
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.store.text_index import MIN_TEXT_TOKENS, SHARED_TOKENS, FoundText
from rekindle.store.tiered import TieredStore

QUESTION_TOKENS = 128  # the last tokens of a prompt, which show what it attends to; before them, new text is a passage
_MODELS = 64  # number of stored calibrations


class ChunksToKeep:
    """The chunks of a prompt to store once its context is released."""

    def __init__(self, passages: ChunkMatches, plan: Plan, scoring: ChunkScorer | None) -> None:
        self._passages = passages
        self._plan = plan
        self._scoring = scoring

    def jobs(self, context: Context, guard: WriteGuard | None) -> list[BackgroundJob]:
        """Write jobs for the chunks, to run after the job of the prompt itself."""
        exact, nonprefix = [], []
        first = context.exact_tokens
        reused_chunks = [chunk for chunk in context.chunk_reuse if chunk.source == "reused"]
        for number, (name, span) in enumerate(self._passages.prompt_layout.numbered, start=1):
            stale = sum(other.stop - other.start for other in reused_chunks if other.stop <= span.start)
            variant = self._variant(number, span, stale / max(1, span.start))
            if variant is not None and span.stop <= first:
                if name is not None:  # other text is found by its fingerprints
                    exact.append(variant)
            elif variant is not None and span.stop <= len(context.tokens):
                nonprefix.append(variant)
        tokens = context.tokens[:first]
        jobs: list[BackgroundJob] = [WriteVariants(context.kv_space, tokens, exact, guard)] if exact else []
        for variant in nonprefix:
            chunk = context.tokens[variant.span.start : variant.span.stop]
            kv = context.sequence.export(variant.span)
            jobs.append(WriteNonprefixKv(context.kv_space, chunk, kv, variant, guard, context.app_ref))
        return jobs

    def _variant(self, number: int, span: Span, drift: float) -> Variant | None:
        """The variant to store; None if its KV is from another prompt, or is stored already."""
        reused, prompt_layout, digests = self._plan.reuse_chunks, self._passages.prompt_layout, self._passages.digests
        if reused is not None and span in reused.spans:
            return None
        scored = None if self._scoring is None else self._scoring.variant(number, digests, drift)
        stored = any(chunk.span == span and chunk.known is not None for chunk in self._passages.picked)
        if scored is not None or (span.stop <= self._plan.reused and stored):
            return scored
        return unscored(prompt_layout, number, digests, drift)


class WriteVariants:
    """Records the chunks of a prompt that was just stored."""

    def __init__(
        self, kv_space: KvSpace, tokens: Sequence[int], variants: Sequence[Variant], guard: WriteGuard | None
    ) -> None:
        self._kv_space, self._tokens, self._variants, self._guard = kv_space, tokens, variants, guard

    def do(self, store: TieredStore) -> str:
        if _is_barred(self._guard):
            return "barred"
        store.variants.keep(self._kv_space, self._tokens, self._variants)
        store.shared.later(partial(store.shared.share_chunks, self._kv_space, self._tokens, self._variants))
        return "noted"

    def detached_bytes(self) -> int:
        return 0


class WriteNonprefixKv:
    """Stores a chunk computed behind reused ones, where only chunk reuse finds it."""

    def __init__(
        self,
        kv_space: KvSpace,
        tokens: Sequence[int],
        kv: Kv,
        variant: Variant,
        guard: WriteGuard | None,
        app_ref: AppRef | None = None,
    ) -> None:
        self._kv_space, self._tokens, self._kv, self._variant = kv_space, tokens, kv, variant
        self._guard, self._app_ref = guard, app_ref

    def do(self, store: TieredStore) -> str:
        if _is_barred(self._guard):
            return "barred"
        present = None if self._guard is None else self._guard.present
        kept = store.variants.keep_nonprefix(
            self._kv_space, self._tokens, self._kv, self._variant, app=self._app_ref, present=present
        )
        if kept.outcome == "kept":
            store.text.record_nonprefix(self._kv_space, self._tokens, self._variant)
            share = partial(store.shared.share_nonprefix, self._kv_space, token_bytes(self._tokens), self._variant)
            store.shared.later(partial(share, present_of(self._guard)))
        return kept.outcome

    def detached_bytes(self) -> int:
        """Size of its copy of the KV."""
        return len(self._kv.span) * self._kv.layout.token_bytes


def _is_barred(guard: WriteGuard | None) -> bool:
    return guard is not None and not guard.allows


def calibration_of(engine: Engine, recompute_policy: str = OURS) -> float | None:
    """The calibrated budget of a model; None without calibration."""
    known = _calibrations().recall(engine.identity(engine.regime(1)).digest)
    budget = known.get(recompute_policy) if isinstance(known, dict) else None
    return float(budget) if isinstance(budget, (int, float)) and budget >= 0.0 else None


def remember_budgets(engine: Engine, budgets: Mapping[str, float]) -> None:
    """Store budgets for a model, by recompute policy."""
    model = engine.identity(engine.regime(1)).digest
    known = _calibrations().recall(model)
    _calibrations().keep(model, {**(known if isinstance(known, dict) else {}), **budgets})


def _calibrations() -> JsonMemo:
    return JsonMemo(home_folder() / "recompute.json", _MODELS)


def match_chunks(
    prompt_layout: PromptLayout,
    digests: Sequence[ChunkDigest],
    found: Mapping[ChunkDigest, Sequence[LoadableVariant]],
    rank: Callable[[ChunkMatch], tuple[float, ...]] = preference,
) -> tuple[ChunkMatch, ...]:
    """The chunks of a prompt in order, each with the variant of the lowest `rank`; `digests` has the head's first."""
    picked = []
    for number in range(1, len(digests)):
        fits = [_match(prompt_layout, digests, number, known) for known in found.get(digests[number], ())]
        picked.append(min(fits, key=rank, default=_match(prompt_layout, digests, number, None)))
    return tuple(picked)


def _match(
    prompt_layout: PromptLayout, digests: Sequence[ChunkDigest], number: int, known: LoadableVariant | None
) -> ChunkMatch:
    """Chunk `number` (the head is 0), with its variant if one is stored."""
    span, before = prompt_layout.chunks[number - 1], digests[:number]
    if known is None:
        return ChunkMatch(span, digests[number])
    variant = known.variant
    scores = (
        context_impact(variant.scores, len(span)),
        overlap(variant, before),
        disorder(variant, before),
        fix_overhead(variant, before),
        context_change(variant, before, [prompt_layout.head, *map(len, prompt_layout.chunks[: number - 1])]),
    )
    return ChunkMatch(span, digests[number], known, *scores)


def free_spans(passages: ChunkMatches | None, start: int, stop: int) -> list[Span]:
    """The spans of a prompt between `start` and `stop` that no document with a variant covers, if they are long."""
    known = [] if passages is None else [chunk.span for chunk in passages.picked if chunk.known is not None]
    starts, stops = [start, *(span.stop for span in known)], [*(span.start for span in known), stop]
    between = [(max(a, start), min(b, stop)) for a, b in zip(starts, stops, strict=True)]
    return [Span(a, b) for a, b in between if b - a >= SHARED_TOKENS]


def _common(one: Span, other: Span) -> int:
    """Number of positions that two spans share."""
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def useful_texts(passages: ChunkMatches | None, texts: Sequence[FoundText]) -> Sequence[FoundText]:
    """The texts without those that are in a document and make up less than half of it: it is computed as a whole."""
    for span in () if passages is None else passages.prompt_layout.chunks:
        inside = [text for text in texts if _common(text.span, span)]
        if 2 * sum(_common(text.span, span) for text in inside) < len(span):
            texts = [text for text in texts if text not in inside]
    return texts


def add_text(
    passages: ChunkMatches | None, tokens: Sequence[int], texts: Sequence[FoundText], start: int
) -> ChunkMatches:
    """The passages of a prompt with text that was found in it behind `start`, and with the new text between them.

    A document without a variant gives its place and number to text that was found in it.
    """
    known: dict[Span, LoadableVariant | None] = {text.span: text.stored for text in texts}
    numbers: dict[Span, int | None] = dict.fromkeys(known)
    head = texts[0].span.start
    if passages is not None:
        head = min(head, passages.prompt_layout.head)
        stored = {chunk.span: chunk.known for chunk in passages.picked}
        for number, span in passages.prompt_layout.numbered:
            inside = [text.span for text in texts if _common(text.span, span)]
            if inside:
                numbers[inside[0]] = numbers[inside[0]] or number
            else:
                known[span], numbers[span] = stored.get(span), number
    spans = sorted(known, key=lambda span: span.start)
    stops = [*(span.start for span in spans[1:]), len(tokens) - QUESTION_TOKENS]
    for span, stop in zip(spans, stops, strict=True):  # new text: up to the next passage, or to the question
        place = max(span.stop, start)
        if stop - place >= MIN_TEXT_TOKENS:
            known[Span(place, stop)] = numbers[Span(place, stop)] = None
    spans = sorted(known, key=lambda span: span.start)
    layout = PromptLayout(head, tuple(spans), tuple(numbers[span] for span in spans))
    found = ChunkMatches.of(layout, tokens)
    picked = [_match(layout, found.digests, number, known[span]) for number, span in enumerate(spans, 1)]
    return replace(found, picked=tuple(picked))
