"""Policies of eviction as published. `install` lets stores be opened with them by name.

weighted-lru, lfu   hits and recency; who asked does not matter
plain-lru           recency alone: killed apps' KV does not go first
aged                lru with ages that length and hits change, for `bench policies` to find weights for
mobilora            state, recency and length, added up; what is new may be worth least, and is not kept then
"""

from __future__ import annotations

import sqlite3
from collections.abc import Container
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from rekindle.core.kv import Kv
from rekindle.core.scope import AppRef
from rekindle.store import disk, disk_space, evict, tiered
from rekindle.store.catalog import app_rows, catalog
from rekindle.store.catalog.app_rows import AppUsers
from rekindle.store.catalog.catalog import Tail
from rekindle.store.evict import NOBODY, POLICIES, EvictionState, Worth, chance, recency


@dataclass(frozen=True, slots=True)
class Weighted:
    """Hits alone, or with recency as `chance` weighs them."""

    name: str
    recency: bool
    by_app: bool = False

    def worth(self, tail: Tail, users: AppUsers, state: EvictionState) -> Worth:  # noqa: ARG002
        weighed = chance(tail.hits, state.age_seconds(tail), state.max_hits)
        return Worth(True, weighed if self.recency else float(tail.hits))


WEIGHTED_LRU, LFU = Weighted("weighted-lru", recency=True), Weighted("lfu", recency=False)


@dataclass(frozen=True, slots=True)
class PlainLru:
    """The least recently used goes first, of every app."""

    name: str = "plain-lru"
    by_app: bool = False

    def worth(self, tail: Tail, users: AppUsers, state: EvictionState) -> Worth:  # noqa: ARG002
        return Worth(True, 0.0)


@dataclass(frozen=True, slots=True)
class Aged:
    """Killed apps' KV, then the oldest: age x `unhit`, if it was never hit, / blocks ** `length`. (0, 1) is `lru`."""

    length: float
    unhit: float
    by_app: bool = True

    @property
    def name(self) -> str:
        return f"aged-{self.length:g}-{self.unhit:g}"

    def worth(self, tail: Tail, users: AppUsers, state: EvictionState) -> Worth:
        age = state.age_seconds(tail) * (1.0 if tail.hits else self.unhit)
        return Worth(not users.dead, -age / tail.live**self.length)


@dataclass(frozen=True, slots=True)
class MobiLora:
    """`U = state_weight * phi(scores of the apps) + recency_weight * recency + length_weight * phi(length)`.

    `phi` is `x / (1 + x)`, for lengths in units of `unit_tokens`. The source gives form and order, no numbers: these
    make the state of one live app outweigh everything else, so that killed apps' KV goes first as it says.
    """

    name: str = "mobilora"
    state_weight: float = 0.7
    recency_weight: float = 0.2
    length_weight: float = 0.1
    foreground: float = 2.0
    background: float = 1.0
    unit_tokens: float = 512.0
    by_app: bool = True

    def worth(self, tail: Tail, users: AppUsers, state: EvictionState) -> Worth:
        states = self.foreground * users.foreground + self.background * users.background
        value = self.state_weight * _phi(states)
        value += self.recency_weight * recency(state.age_seconds(tail))
        value += self.length_weight * _phi(tail.tokens / self.unit_tokens)
        return Worth(not users.dead, value)


def _phi(x: float) -> float:
    return x / (1 + x)


@dataclass(frozen=True)
class Newcomer:
    """KV to be kept next: space is freed for it, if it is worth that. `users` are the apps that asked for it."""

    tokens: int
    size_bytes: int
    users: AppUsers

    def tail(self, now: float) -> Tail:
        """As if it were there already."""
        return Tail(0, 1, 1, self.size_bytes, 0, now, self.tokens, 0)


_NEWCOMER: ContextVar[Newcomer | None] = ContextVar("newcomer", default=None)


class RefusingEviction(evict.Eviction):
    """Algorithm 1: the newcomer is one of those that the one of least utility is chosen from."""

    def free(self, short: int, holder: tuple[int, int] | None, whole: bool, apart: Container[int] = ()) -> int:
        """Nothing goes that is worth more than the one it would go for."""
        newcomer, policy = _NEWCOMER.get(), self._policy
        if newcomer is None or not isinstance(policy, MobiLora):
            return super().free(short, holder, whole, apart)
        with self._database.scanning() as connection:
            state = self._state(connection, whole)
            own = policy.worth(newcomer.tail(state.now), newcomer.users, state)
            rows = list(catalog.tails(connection))
        worth_more = {tail.extent for tail in rows if policy.worth(tail, state.users(tail), state) > own}
        kept_apart = {tail.extent for tail in rows if tail.extent in apart}
        return super().free(short, holder, whole, worth_more | kept_apart)


class NotingDisk(disk.DiskStore):
    """A disk store whose eviction knows what space is freed for, and that keeps all of it or nothing."""

    def keep_first(self, kv_space: Any, root: Any, tokens: bytes, kv: Kv, **options: Any) -> Any:
        """As published: what is refused is refused whole."""
        return self.keep(kv_space, root, tokens, kv, **options)

    def keep(self, kv_space: Any, root: Any, tokens: bytes, kv: Kv, **options: Any) -> Any:
        app: AppRef | None = options.get("app")
        users = NOBODY
        if app is not None:
            with self.database.scanning() as connection:
                users = users_of(connection, app)
        noted = _NEWCOMER.set(Newcomer(len(kv.span), len(kv.span) * kv.layout.token_bytes, users))
        try:
            return super().keep(kv_space, root, tokens, kv, **options)
        finally:
            _NEWCOMER.reset(noted)


def users_of(connection: sqlite3.Connection, app_ref: AppRef) -> AppUsers:
    """The users of KV that only this app asked for."""
    row = app_rows.app(connection, app_ref.scope, app_ref.name)
    before = "foreground" if row is None or row.state == "killed" else row.state
    state = app_ref.state or before
    return AppUsers(int(state == "foreground"), int(state == "background"), int(state == "killed"))


def install() -> None:
    """Stores that are opened from now on know these policies. Idempotent."""
    POLICIES.update({policy.name: policy for policy in (WEIGHTED_LRU, LFU, MobiLora())})
    disk_space.Eviction = RefusingEviction  # type: ignore[attr-defined]
    tiered.DiskStore = NotingDisk  # type: ignore[attr-defined]
