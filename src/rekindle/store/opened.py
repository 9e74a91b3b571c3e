"""Extents in use: opened to be read, about to be written, just written; and what they stand on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.codec.extent import ExtentHeader, ExtentPlan
from rekindle.core.kv import Span
from rekindle.store.catalog import Extent
from rekindle.store.files import Handle


class Damaged(Exception):
    """An extent is not what its row says. The reason is for people; `extent` names another one that is to blame."""

    def __init__(self, reason: str, extent: str | None = None) -> None:
        super().__init__(reason)
        self.extent = extent


@dataclass(frozen=True)
class AnchorFile:
    """An extent that another is a difference from: `blocks` blocks of that, from number `at` on, are those of this one
    from `place` on. `shelf` is the digest of this one's shelf."""

    row: Extent
    shelf: str
    at: int
    place: int
    blocks: int


@dataclass(frozen=True, eq=False)
class OpenAnchor:
    """KV that a part of a difference stands on: its `tokens`, which begin at token `start` of the extent."""

    extent: OpenExtent
    tokens: Span
    start: int


@dataclass(frozen=True, eq=False)
class OpenExtent:
    """An extent that can be read, and what it stands on. Whoever has it releases it."""

    handle: Handle
    header: ExtentHeader
    anchors: tuple[OpenAnchor, ...] = ()


@dataclass(frozen=True, eq=False)
class CodedExtent:
    """An extent that is about to be written: the bytes of each layer, and their digests."""

    plan: ExtentPlan
    blobs: Sequence[bytes]
    digests: bytes


@dataclass(frozen=True, eq=False)
class WrittenExtent:
    """An extent that was just written."""

    header: ExtentHeader
    digest: bytes  # of the header
