"""Records on a shared tier: which extents hold the blocks of a chain.

    extents   [ E1: blocks 0..36 ][ E2: 37..74 ][ E3 ...
    records          8   16   24   32   40   48 ...       each names every extent from the root up to its block

A record is written after all extents it names: it is the commit. The deepest one of a prompt names the
whole chain. It is not trusted: the digests of headers and data decide, and the tokens in the headers are compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rekindle.safe_read import parse_untrusted_json
from rekindle.store.catalog.catalog import Extent
from rekindle.store.extents import BaseFile
from rekindle.store.objects import MAX_SMALL_BYTES

_FORMAT = "rekindle-shared/1"
MAX_RECORD_BYTES = MAX_SMALL_BYTES * 15 // 16  # of some three thousand extents; encryption adds a little
MAX_A_CHUNK = 4  # variants


@dataclass(frozen=True)
class SharedExtent:
    """An extent on a shared tier: what its row in a catalog says, and the bases of a delta."""

    name: str
    kv_space: str
    digest: str  # of the header, in hexadecimal
    size_bytes: int
    header_bytes: int
    depth: int
    blocks: int
    coding: str = "raw"
    bases: tuple[SharedBase, ...] = ()

    def row(self) -> Extent:
        """As a row of a catalog."""
        return Extent(
            id=0, name=self.name, kv_space=0, state="live", size_bytes=self.size_bytes, writer="",
            digest=bytes.fromhex(self.digest), depth=self.depth, blocks=self.blocks, live=self.blocks, tokens=0,
            pinned=0, kept=0.0, used=0.0, hits=0, saved_ms=0.0, reason=None, coding=self.coding,
        )  # fmt: skip

    def base_files(self) -> list[BaseFile]:
        """The bases of a delta, to open them."""
        return [BaseFile(b.extent.row(), b.extent.kv_space, b.at, b.place, b.blocks) for b in self.bases]

    @classmethod
    def from_json(cls, fields: Any) -> SharedExtent:
        """Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for anything else."""
        texts = {name: fields[name] for name in ("name", "kv_space", "digest", "coding")}
        numbers = {name: fields[name] for name in ("size_bytes", "header_bytes", "depth", "blocks")}
        if not all(isinstance(text, str) for text in texts.values()) or not all(map(_is_count, numbers.values())):
            raise ValueError("a field of a record has another type")
        bytes.fromhex(texts["digest"])
        return cls(**texts, **numbers, bases=tuple(SharedBase.from_json(base) for base in fields["bases"]))


@dataclass(frozen=True)
class SharedBase:
    """The base of a part of a delta: see `BaseFile`."""

    extent: SharedExtent
    at: int
    place: int
    blocks: int

    @classmethod
    def from_json(cls, fields: Any) -> SharedBase:
        """Raises as `SharedExtent.from_json`. A base is never a delta."""
        extent = SharedExtent.from_json({**fields["extent"], "bases": ()})
        numbers = [fields[name] for name in ("at", "place", "blocks")]
        if not all(_is_count(number) for number in numbers):
            raise ValueError("a field of a record has another type")
        return cls(extent, *numbers)


@dataclass(frozen=True)
class ChainRecord:
    """The extents that hold the first `blocks` blocks of a chain, the root's first; `kept`: when the first was written.

    Each is used up to where the next one begins.
    """

    kept: float
    blocks: int
    extents: tuple[SharedExtent, ...]

    def until(self, blocks: int) -> ChainRecord:
        """The same for the first `blocks` blocks."""
        return ChainRecord(self.kept, blocks, tuple(extent for extent in self.extents if extent.depth < blocks))

    def to_bytes(self) -> bytes:
        """As an object."""
        extents = [asdict(extent) for extent in self.extents]
        return _write({"kept": self.kept, "blocks": self.blocks, "extents": extents})


def parse_chain(data: bytes | None) -> ChainRecord | None:
    """A record that was read; None if there is none, or it is not one of ours."""
    fields = _read(data)
    if fields is None:
        return None
    try:
        extents = tuple(map(SharedExtent.from_json, fields["extents"]))
        ordered = sorted(extents, key=lambda extent: extent.depth)
        if not isinstance(fields["kept"], float) or not _is_count(fields["blocks"]):
            return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return ChainRecord(fields["kept"], fields["blocks"], tuple(ordered)) if ordered else None


@dataclass(frozen=True)
class ChunkRecord:
    """A variant of a chunk: the columns of its row, and the extents that hold it."""

    nonprefix: bool
    columns: tuple[object, ...]
    chain: ChainRecord


def write_chunks(records: Sequence[ChunkRecord]) -> bytes:
    """The variants of one chunk, as one object."""
    return _write({
        "variants": [
            {
                "nonprefix": record.nonprefix,
                "columns": [value.hex() if isinstance(value, bytes) else value for value in record.columns],
                "chain": record.chain.to_bytes().decode(),
            }
            for record in records
        ]
    })  # fmt: skip


def parse_chunks(data: bytes | None) -> list[ChunkRecord]:
    """What was written; what is not ours is left out."""
    fields, found = _read(data), list[ChunkRecord]()
    variants = fields.get("variants") if fields is not None else None
    for one in variants[:MAX_A_CHUNK] if isinstance(variants, list) else ():
        try:
            chain = parse_chain(one["chain"].encode())
            columns = tuple(bytes.fromhex(value) if isinstance(value, str) else value for value in one["columns"])
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if chain is not None:
            found.append(ChunkRecord(bool(one.get("nonprefix")), columns, chain))
    return found


def _write(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({"format": _FORMAT, **fields}, separators=(",", ":")).encode()


def _read(data: bytes | None) -> dict[str, Any] | None:
    try:
        fields = None if data is None or len(data) > MAX_RECORD_BYTES else parse_untrusted_json(data)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and fields.get("format") == _FORMAT else None


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 48
