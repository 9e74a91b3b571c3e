"""Background jobs that record a request: why it was not faster, and what it used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.cache.cost import Costs
from rekindle.cache.explain import Explainer, Prompt
from rekindle.cache.writer import BackgroundJob, WriteGuard
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.core.plan import Plan
from rekindle.core.reply import Reuse
from rekindle.core.scope import AppRef
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore


@dataclass(frozen=True)
class Note(BackgroundJob):
    """Explains a request and stores the explanation."""

    explainer: Explainer
    prompt: Prompt
    plan: Plan
    match: Match | None
    reuse: Reuse
    first_token_seconds: float
    guard: WriteGuard | None = None

    def do(self, store: TieredStore) -> str:
        """Runs before the prompt is written: else it would be its own explanation."""
        if self.guard is not None and not self.guard.allows:
            return "barred"
        explanation = self.explainer.explain(self.prompt, self.plan, self.match, self.reuse)
        explanation = replace(explanation, first_token_seconds=self.first_token_seconds, at=store.disk.clock())
        asked, present = self.prompt, None if self.guard is None else self.guard.present
        store.note(asked.kv_space, asked.identity, asked.tokens, asked.content, explanation.as_dict(), present=present)
        return "noted"


class Stayed(BackgroundJob):
    """Records the use of stored KV that was still in the engine: else it would look unused, and be evicted."""

    def __init__(self, kv_space: KvSpace, tokens: Sequence[int], costs: Costs) -> None:
        self._kv_space, self._tokens = kv_space, tokens
        self._saved_seconds = costs.rates.compute_seconds(Span(0, len(tokens)))

    def do(self, store: TieredStore) -> str:
        match = store.lookup(self._kv_space, self._tokens)
        if match.pieces:
            store.record_use(match, self._saved_seconds * 1e3 * match.length / len(self._tokens))
        return "noted"


@dataclass(frozen=True)
class WasAsked(BackgroundJob):
    """Records which app used the stored KV of a prompt and its reply, however it came to the engine."""

    kv_space: KvSpace
    tokens: Sequence[int]
    app_ref: AppRef | None

    def do(self, store: TieredStore) -> str:
        """Runs after the prompt is written: then all of it is found."""
        store.record_request(self.kv_space, self.tokens, self.app_ref)
        return "noted"
