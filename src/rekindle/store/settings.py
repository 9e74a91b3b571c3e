"""The settings of a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from rekindle.codec.coder import EXACT, Coder, is_quantized
from rekindle.core.chunk import is_nonprefix
from rekindle.core.size import Limit, parse_limit
from rekindle.errors import InvalidSetting
from rekindle.store.evict import POLICIES, Policy

Admission = Literal["always", "second-use"]


@dataclass(frozen=True)
class StoreSettings:
    """The settings.

    disk_limit       bytes, "512MB", or "10%" of what is free or already the cache's; files and catalog together
    memory_limit     the same for KV held in memory above the disk
    policy           what goes first when space is needed: lru, utility; in memory too
    ttl_seconds      KV older than this is not served and goes; None: never
    killed_ttl_seconds  KV that only a killed app used goes after this time, if more than half of the limit is used;
                     None: when space is needed
    admission        keep always, or on second-use: only what was seen before
    write_budget     bytes that may be written within 24 hours, to spare flash; None: no limit
    max_variants     variants of chunks listed for one KV space; the least used go first
    max_a_chunk      the same for one chunk
    max_fingerprints places of text listed for all KV spaces together; the oldest go first
    exact            how KV is coded where no bit may be lost; None: uncoded
    quantized        the same where the level `quantized` is allowed
    key              16 to 64 secret bytes: then all digests are keyed, and files that others wrote are never served
    """

    disk_limit: str | int | Limit = "10%"
    memory_limit: str | int | Limit = "256MB"
    policy: str = "lru"
    ttl_seconds: float | None = None
    killed_ttl_seconds: float | None = 60.0
    admission: Admission = "always"
    write_budget: str | int | None = None
    max_variants: int = 16_384
    max_a_chunk: int = 8
    max_fingerprints: int = 1_000_000
    exact: Coder | None = EXACT
    quantized: Coder | None = None
    key: bytes | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidSetting(f"Unknown policy {self.policy!r}. Use {', '.join(POLICIES)}.")
        if self.admission not in get_args(Admission):
            raise InvalidSetting(f"Unknown admission {self.admission!r}. Use {', '.join(get_args(Admission))}.")
        if self.ttl_seconds is not None and self.ttl_seconds <= 0:
            raise InvalidSetting(f"ttl_seconds={self.ttl_seconds} is out of range: use a positive number, or None.")
        if self.killed_ttl_seconds is not None and not self.killed_ttl_seconds >= 0:
            raise InvalidSetting(
                f"killed_ttl_seconds={self.killed_ttl_seconds} is out of range: use 0 or more, or None."
            )
        if self.write_budget is not None and parse_limit(self.write_budget, "write_budget").size_bytes is None:
            raise InvalidSetting(f"write_budget={self.write_budget!r} is a share. Use a size (10GB).")
        for name in ("max_variants", "max_a_chunk", "max_fingerprints"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name}={getattr(self, name)} is out of range: use 1 or more.")
        parse_limit(self.disk_limit, "disk_limit")
        parse_limit(self.memory_limit, "memory_limit")

    def coder(self, codec: str) -> Coder | None:
        """How KV of a KV space with that codec is coded; None: uncoded."""
        return None if is_nonprefix(codec) else self.quantized if is_quantized(codec) else self.exact

    @property
    def chosen_policy(self) -> Policy:
        return POLICIES[self.policy]

    @property
    def write_budget_bytes(self) -> int | None:
        """The write budget as a number."""
        return None if self.write_budget is None else parse_limit(self.write_budget).size_bytes
