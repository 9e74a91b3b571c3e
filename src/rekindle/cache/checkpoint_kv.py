"""Reuse by checkpoint, for models whose state cannot be cut: recurrent, hybrid, sliding-window ones.

    prompt       [system ...........][user ......][assistant ...][user ....]..reply..
    checkpoints                     ^            ^              ^         ^         ^    where messages end

A checkpoint is the whole state after some first tokens, and can only be restored whole. It is stored as pages, each in
place of the KV of one token, so limits, tiers, digests and crash safety are the store's. The chain of pages begins with
a digest of all the tokens and their number: the checkpoints of a KV space can be listed, and one is found by exactly
its tokens.

If the state is split, the KV of its attention layers is stored by spans of tokens, as that of other models, and a
checkpoint is only the rest: the recurrent part, or what the windows see. Both are needed to go on from one.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from rekindle.cache.context import Context, ParkedContexts
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.matches import Found, Matches, find_matches
from rekindle.cache.planner import PrefillSteps, make_plan
from rekindle.cache.prefill import IsCancelled, Prefill, PrefillResult
from rekindle.cache.stored_kv import EARLY_TOKENS, StoredKv
from rekindle.cache.writer import BackgroundJob, StoreNote, WriteJob
from rekindle.core.keys import TOKEN_BYTES, KvSpace, token_bytes
from rekindle.core.kv import PAGES, Kv, KvLayout, LayerKv, Span
from rekindle.core.plan import Plan, Tier
from rekindle.engine.base import KvFeed
from rekindle.errors import KvLost
from rekindle.store.feed import StoredFeed, TierLoad
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore

GRID_TOKENS = 512  # distance of checkpoints in a text without messages
_MAX_PLACES = 4  # of one prompt; more where they are small
_SMALL_SHARE, _MAX_SMALL = 0.25, 32  # of split states: what checkpoints take of the prompt's KV, and how many there are
_APART_TOKENS = 32  # a checkpoint nearer to the next one is not worth its time
_SMALL_APART_TOKENS = 256  # of those that are kept only because they are small: each cuts a step of the prefill in two
_PENDING_SECONDS = 0.1
_NAME_PAGES = 9  # carry the name: the digest of the tokens, four bytes each, and how many they are
_HEAD = struct.Struct("<8sQQ")  # what it is, tokens, bytes of the snapshot
_MAGIC = b"rkcheck1"
_LENGTHS = (1 << 5, 1 << 8, 1 << 11, 1 << 14, 1 << 17, 1 << 20)  # pages looked for


class CheckpointKv(StoredKv):
    """Stores and restores whole states."""

    _last_bytes = 0  # of the last checkpoint that was written

    def take_parked(
        self,
        parked: ParkedContexts,
        kv_space: KvSpace,
        tokens: Sequence[int],
        *,
        exact: bool,  # noqa: ARG002  (nothing else is possible)
    ) -> Context | None:
        return parked.take(kv_space, tokens, whole=True)

    def find(
        self,
        kv_space: KvSpace,
        tokens: Sequence[int],
        in_engine: int,
        preferred: KvSpace | None,  # noqa: ARG002  (nothing is quantized)
        follow: int,  # noqa: ARG002  (a state cannot be cut where a draft turns out to be wrong)
    ) -> Matches:
        """The longest checkpoint of a prompt. Raises `NoAnswer`."""
        return self.ask_store(lambda: self._find(kv_space, tokens, in_engine))

    def _find(self, kv_space: KvSpace, tokens: Sequence[int], in_engine: int) -> Matches:
        store = self.store
        assert store is not None and self.writer is not None
        self.writer.flush(_PENDING_SECONDS)  # the last state of this chat may be queued: it is worth waiting for
        plain = find_matches(store, kv_space, tokens).match if self._split else None
        if plain is None and self._split:
            return Matches(len(tokens), in_engine)
        longest = len(tokens) if plain is None else min(len(tokens), plain.length + 1)
        differs_at = 0 if plain is None else plain.length
        space = self._pages_of(kv_space)
        for name, match in _kept(store, space, tokens, Span(in_engine + 1, max(in_engine + 1, longest))):
            if match is not None:
                used = match if plain is None else plain.until(name.tokens)
                pieces = {*match.pieces, *used.pieces}
                held = all(store.holds(piece) for piece in pieces)
                coded = any(piece.coding != "raw" for piece in pieces)
                tier: Tier = "memory" if held else "coded" if coded else "disk"
                plain_bytes = 0 if plain is None else name.tokens * kv_space.layout.token_bytes
                found = Found(Span(0, name.tokens), tier, match.length * space.layout.token_bytes + plain_bytes)
                return Matches(len(tokens), in_engine, (found,), used, differs_at=differs_at)
        return Matches(len(tokens), in_engine, differs_at=differs_at)

    @property
    def _split(self) -> bool:
        return self.engine.capabilities.split

    def _pages_of(self, kv_space: KvSpace) -> KvSpace:
        """Where the checkpoints of a KV space are stored."""
        return replace(kv_space, layout=PAGES) if self._split else kv_space

    def plan(self, lookup: CacheLookup) -> Plan:
        """The fastest plan; its steps end where a state is written."""
        return make_plan(lookup.matches, self.costs.rates, self._steps_of(lookup))

    def miss(self, lookup: CacheLookup, plan: Plan, lost: str | None = None) -> str | None:
        """Why not everything but the last token is reused, in a word; None if it is."""
        word = super().miss(lookup, plan, lost)
        ends = word in (None, "differs") and plan.reused < len(lookup.tokens) - 1
        return "checkpoint" if ends else word

    def work(self, context: Context, lookup: CacheLookup, cancelled: IsCancelled, alone: IsCancelled) -> Prefill:
        """The prefill of a prompt, which writes states on its way."""
        edges = self._places(lookup)

        def reached(length: int) -> None:
            if not lookup.off and length in edges:
                self.write(context, length)

        return replace(super().work(context, lookup, cancelled, alone), reached=reached)

    def _steps_of(self, lookup: CacheLookup) -> PrefillSteps:
        return self.steps if lookup.off else replace(self.steps, edges=self._places(lookup))

    def _places(self, lookup: CacheLookup) -> tuple[int, ...]:
        affordable = 0
        if self._split and self._last_bytes:
            kv_bytes = len(lookup.tokens) * self.engine.layout.token_bytes
            affordable = min(_MAX_SMALL, int(_SMALL_SHARE * kv_bytes / self._last_bytes))
        more = max(0, affordable - _MAX_PLACES)
        chosen = places(lookup.tokens, self.engine.tokenizer.stop_ids, self.steps.piece_tokens, more)
        # What differs from earlier prompts, such as a date, is likely to differ again: the next one goes on from there.
        differs_at = 0 if self.steps.piece_tokens else lookup.matches.differs_at
        before = max(place for place in (0, *chosen) if place <= differs_at)
        return tuple(sorted((*chosen, differs_at))) if differs_at - before >= _SMALL_APART_TOKENS else chosen

    def _used(self, match: Match, tokens: int) -> Match:
        return match.until(tokens) if self._split else match

    def _run(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan, feed: StoredFeed) -> PrefillResult:
        def load() -> tuple[bytes, Kv | None]:
            if not self._split:
                return _filled(feed, self.engine.layout).content(plan.reused), None
            return self._checkpoint(lookup, plan.reused), _kv_of(feed, self.engine.layout)

        started = time.perf_counter()
        snapshot, kv = self.deadlines.ask(load, feed.timeout_seconds, work.cancelled)
        context.sequence.restore(snapshot, plan.reused, kv)
        seconds = time.perf_counter() - started
        context.tokens, context.checkpoint_tokens = tuple(work.tokens[: plan.reused]), plan.reused
        return replace(work.run(context, plan), load_seconds=seconds)

    def _loads(self, feed: StoredFeed, lookup: CacheLookup, result: PrefillResult) -> list[TierLoad]:  # noqa: ARG002
        """A checkpoint and the KV beside it are one load."""
        (found,) = lookup.matches.stored
        return [(found.tier, found.size_bytes, result.load_seconds)]

    def _checkpoint(self, lookup: CacheLookup, tokens: int) -> bytes:
        """The checkpoint after the first `tokens` tokens. Raises `KvLost` if it is gone."""
        store, space = self.store, self._pages_of(lookup.kv_space)
        assert store is not None
        (name,) = _names(lookup.tokens, [tokens])
        match = _lookup(store, space, name)
        if match is None:
            raise KvLost("A checkpoint was evicted meanwhile; its tokens are computed instead.")
        with store.load(space, match) as pages:
            found = _filled(pages, space.layout).content(tokens)
        store.record_use(match, 0.0, lookup.app_ref)
        return found

    def write_early(self, context: Context) -> None:
        """Write the state of a long new prompt before its reply changes it."""
        new = context.prompt_tokens - context.checkpoint_tokens
        if not context.passing and not self.steps.piece_tokens and new >= EARLY_TOKENS:
            self.write(context, context.prompt_tokens)

    def write(self, context: Context, count: int) -> None:
        """Write the state as it is now: that of the first `count` tokens."""
        if self.writer is None or count <= context.checkpoint_tokens or context.sequence.length != count:
            return
        if self._split and count > context.stored_tokens:
            self.writer.offer(context.keep(count))  # others go on waiting: without the checkpoint it is of no use
        space = self._pages_of(context.kv_space)
        snapshot = context.sequence.snapshot()
        self._last_bytes = len(snapshot)
        kv = _as_pages(space.layout, snapshot, count)
        (name,) = _names(context.tokens, [count])
        job = WriteJob(space, tuple(name.ids(len(kv.span))), kv.part)
        job.is_text = False
        job.guard, job.app_ref = context.guard, context.app_ref
        job.detach()
        if self.writer.offer(job):
            context.checkpoint_tokens = count

    def use_note(self, context: Context) -> BackgroundJob:
        """Checkpoints are found by name, not by their tokens."""
        plain = super().use_note(context) if self._split else None
        space, tokens, app_ref = self._pages_of(context.kv_space), context.tokens, context.app_ref

        def note(store: TieredStore) -> None:
            if plain is not None:
                plain.do(store)
            if store.tracks_use_of(app_ref):
                found = _kept(store, space, tokens, Span(0, len(tokens) + 1))
                pieces = [piece for _, match in found if match is not None for piece in match.pieces]
                store.record_use_by(app_ref, pieces)

        return StoreNote(note)

    def cut_to_pieces(self, context: Context) -> None:
        """Whole pieces were written on the way; what came after cannot be cut off."""
        context.truncate(0)


def places(tokens: Sequence[int], stops: Set[int], piece_tokens: int | None = None, more: int = 0) -> tuple[int, ...]:
    """After how many tokens of a prompt the state is worth storing: where its first and its last messages end.

    A text without messages has checkpoints at regular distances. With `piece_tokens` only whole pieces count. If `more`
    are affordable than usual, they are where other messages end, then at regular distances in long ones.
    """
    last, max_places = len(tokens) - 1, _MAX_PLACES + more
    if piece_tokens:
        return tuple(range(piece_tokens, last + 1, piece_tokens)[-max_places:])
    ends = [place + 1 for place, token in enumerate(tokens[:last]) if token in stops]
    if not ends:
        return tuple(range(GRID_TOKENS, last - _APART_TOKENS, GRID_TOKENS)[-max_places:])
    chosen: list[int] = []
    for end in (ends[-1], ends[0], *reversed(ends[1:-1])):
        apart = _APART_TOKENS if len(chosen) < _MAX_PLACES - 1 else _SMALL_APART_TOKENS
        if len(chosen) < max_places - 1 and all(abs(end - other) >= apart for other in chosen):
            chosen.append(end)
    between = [
        place
        for start, stop in pairwise([0, *sorted(chosen), last])
        for place in range(start + GRID_TOKENS, stop - _APART_TOKENS, GRID_TOKENS)
    ]
    left = min(more, max_places - 1 - len(chosen), len(between))
    return tuple(sorted([*chosen, *between[len(between) - left :]]))


@dataclass(frozen=True)
class _Name:
    """The name of a checkpoint: the number of its tokens, and their digest."""

    tokens: int
    digest: bytes

    @classmethod
    def of(cls, beginning: bytes) -> _Name:
        """The name of the checkpoint whose pages begin so."""
        return cls(int.from_bytes(beginning[32:36], "little"), beginning[:32])

    def ids(self, pages: int) -> list[int]:
        """The token ids of its pages: the name, then numbers."""
        return [*np.frombuffer(self.digest, "<u4").tolist(), self.tokens, *range(_NAME_PAGES, pages)]


def _names(tokens: Sequence[int], lengths: Iterable[int]) -> Iterator[_Name]:
    """The names of the states after the first tokens, one for each length."""
    data, start = token_bytes(tokens), 0
    state = hashlib.blake2b(b"rekindle/checkpoint/1", digest_size=32)
    for length in sorted(lengths):
        state.update(data[start : TOKEN_BYTES * length])
        start = TOKEN_BYTES * length
        yield _Name(length, state.copy().digest())


def _kept(
    store: TieredStore, kv_space: KvSpace, tokens: Sequence[int], lengths: Span
) -> Iterator[tuple[_Name, Match | None]]:
    """The checkpoints of a prompt whose length is in `lengths`, the longest first."""
    kept = {_Name.of(beginning) for beginning in store.beginnings(kv_space)}
    own = set(_names(tokens, {name.tokens for name in kept if name.tokens in lengths}))
    for name in sorted(kept & own, key=lambda name: -name.tokens):
        yield name, _lookup(store, kv_space, name)


def _lookup(store: TieredStore, kv_space: KvSpace, name: _Name) -> Match | None:
    for pages in _LENGTHS:
        match = store.lookup(kv_space, name.ids(pages))
        asked = match.root == kv_space.namespace.root and match.tokens == token_bytes(name.ids(pages))
        if not asked or match.length < _NAME_PAGES:
            return None
        if match.length < pages:
            return match
    return None


class _Pages:
    """Buffers for the pages of a checkpoint: keys take the first half of its bytes, values the second."""

    def __init__(self, layout: KvLayout, pages: int) -> None:
        (shape,) = layout.layers
        self.out = LayerKv(
            np.zeros((1, pages, shape.key_dim), np.uint8), np.zeros((1, pages, shape.value_dim), np.uint8)
        )

    def content(self, tokens: int) -> bytes:
        """The snapshot in it. Raises `KvLost` if it is of another number of tokens, or not all of it is there."""
        data = self.out.keys.tobytes() + self.out.values.tobytes()
        magic, kept, size = _HEAD.unpack_from(data)
        pages, page_bytes = self.out.keys.shape[1], len(data) // self.out.keys.shape[1]
        if (magic, kept, _page_count(size, page_bytes)) != (_MAGIC, tokens, pages):
            raise KvLost("A checkpoint is not whole any more; its tokens are computed instead.")
        return data[_HEAD.size : _HEAD.size + size]


def _filled(feed: KvFeed, layout: KvLayout) -> _Pages:
    """The pages of a checkpoint, loaded."""
    pages = _Pages(layout, len(feed.span))
    feed.fill(0, pages.out)
    return pages


def _kv_of(feed: KvFeed, layout: KvLayout) -> Kv:
    """The KV of a feed, loaded."""
    count, dtype = len(feed.span), layout.numpy_dtype
    layers = []
    for layer, shape in enumerate(layout.layers):
        keys, values = ((shape.kv_heads, count, dim) for dim in (shape.key_dim, shape.value_dim))
        layers.append(LayerKv(np.empty(keys, dtype), np.empty(values, dtype)))
        feed.fill(layer, layers[-1])
    return Kv(feed.span, layout, tuple(layers))


def _as_pages(layout: KvLayout, snapshot: bytes, tokens: int) -> Kv:
    (shape,) = layout.layers
    pages = _page_count(len(snapshot), shape.key_dim + shape.value_dim)
    data = np.zeros(pages * (shape.key_dim + shape.value_dim), np.uint8)
    content = _HEAD.pack(_MAGIC, tokens, len(snapshot)) + snapshot
    data[: len(content)] = np.frombuffer(content, np.uint8)
    half = pages * shape.key_dim
    layer = LayerKv(data[:half].reshape(1, pages, -1), data[half:].reshape(1, pages, -1))
    return Kv(Span(0, pages), layout, (layer,))


def _page_count(snapshot_bytes: int, page_bytes: int) -> int:
    return max(_NAME_PAGES, -(-(_HEAD.size + snapshot_bytes) // page_bytes))
