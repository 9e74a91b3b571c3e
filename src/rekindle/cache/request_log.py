"""What is noted about a request when it is over: why it was not faster, and what it used. Jobs for the keeper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.cache.cost import Costs
from rekindle.cache.explain import Explainer, Prompt
from rekindle.cache.writer import WriteGuard
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.core.plan import Plan
from rekindle.core.reply import Reuse
from rekindle.core.scope import AppRef
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore


@dataclass(frozen=True)
class Note:
    """Explains a request and remembers it."""

    explainer: Explainer
    prompt: Prompt
    plan: Plan
    match: Match | None
    reuse: Reuse
    first_token_seconds: float
    guard: WriteGuard | None = None

    def do(self, store: TieredStore) -> str:
        """Before anything of it is kept: then it would explain itself."""
        if self.guard is not None and not self.guard.allows:
            return "barred"
        told = self.explainer.explain(self.prompt, self.plan, self.match, self.reuse)
        told = replace(told, first_token_seconds=self.first_token_seconds, at=store.disk.clock())
        asked, present = self.prompt, None if self.guard is None else self.guard.present
        store.note(asked.kv_space, asked.identity, asked.tokens, asked.content, told.as_dict(), present=present)
        return "noted"

    def detached_bytes(self) -> int:
        """Next to nothing."""
        return 0


class Stayed:
    """Notes that KV the store knows was reused without asking it: else it would look unused, and be evicted."""

    def __init__(self, kv_space: KvSpace, tokens: Sequence[int], costs: Costs) -> None:
        self._kv_space, self._tokens = kv_space, tokens
        self._saved_seconds = costs.rates.compute_seconds(Span(0, len(tokens))) or 0.0

    def do(self, store: TieredStore) -> str:
        """Look it up now, and count it."""
        match = store.lookup(self._kv_space, self._tokens)
        if match.pieces:
            store.record_use(match, self._saved_seconds * 1e3 * match.length / len(self._tokens))
        return "noted"

    def detached_bytes(self) -> int:
        """Next to nothing."""
        return 0


@dataclass(frozen=True)
class WasAsked:
    """Notes which app used what is known of a prompt and its reply, however that came to the engine."""

    kv_space: KvSpace
    tokens: Sequence[int]
    app_ref: AppRef | None

    def do(self, store: TieredStore) -> str:
        """Behind the keeping of it: then all of it is known."""
        store.record_request(self.kv_space, self.tokens, self.app_ref)
        return "noted"

    def detached_bytes(self) -> int:
        """Next to nothing."""
        return 0
