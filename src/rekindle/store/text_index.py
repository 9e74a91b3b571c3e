"""Text of earlier prompts, found by its tokens at any offset of a prompt.

    prompt    [prefix, found already ][ new ][ a file that was read before ......][ question ]
                                                   ^ one of its fingerprints is listed
    chain     [system][ an earlier turn ..][ a file that was read before ......][ ...
                                            <------ compared token by token ---->

    tokens    t t t t t t t t t t t t t t t t t t t t t t t
    grams     [every 32 tokens in a row have a hash .......]
    kept      of every 64 grams in a row the one with the smallest hash (winnowing)

The same text has the same fingerprints at any offset of any prompt: two prompts that share at least `SHARED_TOKENS`
tokens in a row have one in common, wherever they share them; about one token of 32 ends one. A gram is as long as a
block: the tokens of the block where it ends, up to its end, are tokens of the gram.

A fingerprint only says where to compare: from there stored tokens are compared in both directions, as far as they are
equal. What is found is a view on blocks that are kept anyway. As everywhere in the store, failures never fail a
request: then nothing is found and nothing is listed. A row of a fingerprint is sealed like a variant's.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.codec.digest import Digester
from rekindle.core.chunk import DIGEST_TOKENS, Variant, chain_tokens, chunk_digest, nonprefix, unmeasured
from rekindle.core.keys import BLOCK_TOKENS, TOKEN_BYTES, KvSpace, NodeKey, chain, common_tokens, token_bytes
from rekindle.core.kv import Span
from rekindle.store.catalog.variant_rows import LOST, BlockLocation, ChunkLocation, ChunkView, SpaceRow
from rekindle.store.disk import DiskStore
from rekindle.store.failures import Failures
from rekindle.store.feed import KvSources
from rekindle.store.variants import StoredVariant, Variants, part_of, spaces_of

GRAM_TOKENS = BLOCK_TOKENS
WINDOW_GRAMS = 64
SHARED_TOKENS = WINDOW_GRAMS + GRAM_TOKENS - 1

_POSITION = np.uint64((1 << 24) - 1)  # the low bits that make every hash of a prompt different
_BASE = 0x9E3779B97F4A7C15

SINK_TOKENS = 4  # the first tokens of a prompt, which all others attend to, whatever they are: never taken elsewhere
MIN_TEXT_TOKENS = 64  # computing a shorter text is faster than moving its KV
_ROWS_A_TRANSACTION = 128
_ROW_BYTES = 128  # estimate, with the index
_FIRST_BLOCKS = 8  # compared at once; then twice as many, and so on


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """The fingerprints of a prompt.

    ends   [n] the position behind each gram, growing
    keys   [n] its hash
    """

    ends: NDArray[np.int64]
    keys: NDArray[np.int64]

    @classmethod
    def of(cls, tokens: bytes) -> Fingerprints:
        """Those of some tokens (see `token_bytes`), in time linear in their number."""
        hashes = _gram_hashes(tokens)  # [grams]
        if len(hashes) < WINDOW_GRAMS:
            return cls(np.empty(0, np.int64), np.empty(0, np.int64))
        least = (hashes & ~_POSITION) | np.arange(len(hashes), dtype=np.uint64)
        width = 1
        while width < WINDOW_GRAMS:  # the minimum of `width` grams from each on
            least = np.minimum(least[:-width], least[width:])
            width *= 2
        kept = np.unique(least & _POSITION).astype(np.int64)
        return cls(kept + GRAM_TOKENS, hashes[kept].view(np.int64))


@dataclass(frozen=True, eq=False)
class FoundText:
    """Text of a prompt whose KV was computed in another prompt, and where that is stored."""

    span: Span
    stored: StoredVariant


_KEYS_A_QUERY = 500
_SEAL_BYTES = 8
# In a damaged catalog a column may have another type: a cast makes it readable at least.
_COLUMNS = (
    "key, CAST(parent AS BLOB), CAST(stop AS INTEGER), CAST(moved AS INTEGER), CAST(drift AS REAL), CAST(seal AS BLOB)"
)


@dataclass(frozen=True, slots=True)
class TextPlace:
    """Where a gram is stored.

    parent   the node above the block that has its last token
    stop     the position behind it in its chain
    moved    where it was computed, less where it is in its chain
    drift    share of what came before it that was not exact when it was computed
    """

    key: int
    parent: NodeKey
    stop: int
    moved: int = 0
    drift: float = 0.0

    def seal(self, digester: Digester, kv_space_digest: str) -> bytes:
        """The digest of a row, keyed if the store has a key. Raises `struct.error` for invalid numbers."""
        numbers = struct.pack("<qqqd", self.key, self.stop, self.moved, self.drift)
        return digester.header(b"rekindle/fingerprint/1" + numbers + self.parent + kv_space_digest.encode())[
            :_SEAL_BYTES
        ]


@dataclass(frozen=True)
class _Listed:
    """What is listed in one KV space of the fingerprints of a prompt."""

    space: SpaceRow
    view: ChunkView
    places: Mapping[int, TextPlace]


class TextIndex:
    """The text of a store's prompts. Thread-safe, and shared by processes."""

    def __init__(self, disk: DiskStore, failures: Failures, sources: KvSources, variants: Variants) -> None:
        self._disk, self._failures, self._sources, self._variants = disk, failures, sources, variants

    def find(self, kv_space: KvSpace, tokens: Sequence[int], spans: Sequence[Span]) -> list[FoundText]:
        """Stored text in these spans of a prompt, in order, without overlaps. Changes nothing.

        Text that is at least `SHARED_TOKENS` long is found, if all of it is stored in one chain.
        """
        data = token_bytes(tokens)
        prints = [Fingerprints.of(part_of(data, span)) for span in spans]
        keys = sorted({key for some in prints for key in some.keys.tolist()})

        def look() -> list[FoundText]:
            with self._disk.database.reading() as connection:
                listed = self._listed(connection, kv_space, keys)
                found = [
                    text
                    for span, some in zip(spans, prints, strict=True)
                    for text in self._find(kv_space, data, span, some, listed)
                ]
            return sorted(found, key=lambda text: text.span.start)

        return self._failures.reading(look, []) if keys else []

    def record(self, kv_space: KvSpace, tokens: Sequence[int]) -> None:
        """List the text of a prompt that was kept, as far as it is stored and not listed already."""
        self._record(kv_space, token_bytes(tokens))

    def record_nonprefix(self, kv_space: KvSpace, chunk_tokens: Sequence[int], variant: Variant) -> None:
        """The same for a chunk of non-prefix KV."""
        data = chain_tokens(variant, token_bytes(chunk_tokens))
        moved = variant.span.start - DIGEST_TOKENS
        self._record(nonprefix(kv_space), data, DIGEST_TOKENS, moved, variant.drift)

    # -- finding ---------------------------------------------------------------------------------------------------

    def _listed(self, connection: sqlite3.Connection, kv_space: KvSpace, keys: Sequence[int]) -> list[_Listed]:
        fresh = self._disk.room.fresh()
        return [
            _Listed(
                space,
                ChunkView(connection, space.number, fresh, self._sources.bad),
                _places_of(connection, self._disk.digester, space, keys),
            )
            for space in spaces_of(self._disk, connection, kv_space)
        ]

    def _find(
        self, kv_space: KvSpace, data: bytes, span: Span, prints: Fingerprints, listed: Sequence[_Listed]
    ) -> list[FoundText]:
        """From the last fingerprint on: each that is in no text found so far."""
        found: list[FoundText] = []
        stop = span.stop
        for end, key in zip(reversed(prints.ends.tolist()), reversed(prints.keys.tolist()), strict=True):
            if span.start + end > stop:
                continue
            texts = [
                text
                for one in listed
                if (place := one.places.get(key)) is not None
                and (text := self._compare(kv_space, data, Span(span.start, stop), span.start + end, one, place))
            ]
            if texts:
                found.append(max(texts, key=lambda text: len(text.span)))
                stop = found[-1].span.start
        return found

    def _compare(
        self, kv_space: KvSpace, data: bytes, within: Span, end: int, listed: _Listed, place: TextPlace
    ) -> FoundText | None:
        """The stored text around a gram that ends at `end` in a prompt; None if it is short or was removed."""
        view = listed.view
        block, ahead = (place.stop - 1) // BLOCK_TOKENS, end - place.stop  # the prompt is `ahead` of the chain
        start = block * BLOCK_TOKENS
        last = view.beginning(place.parent, part_of(data, Span(start + ahead, end)))
        if last is None or last.depth + last.place != block:
            return None
        stop = start + _equal_after(view, last, part_of(data, Span(start + ahead, within.stop)))
        floor = max(within.start - ahead, DIGEST_TOKENS if listed.space.nonprefix else SINK_TOKENS)
        before = part_of(data, Span(min(floor, start) + ahead, start + ahead))
        start = max(floor, start - _equal_before(view, last, before))
        span, own = Span(start + ahead, stop + ahead), Span(start, stop)
        if len(span) < MIN_TEXT_TOKENS:
            return None
        block = (stop - 1) // BLOCK_TOKENS
        parent = view.above(last.extent, block - last.depth)
        if parent is None:
            return None
        tokens = part_of(data, span)
        location = ChunkLocation(parent, part_of(data, Span(block * BLOCK_TOKENS + ahead, span.stop)), own)
        computed = Span(start + place.moved, stop + place.moved)
        variant = Variant(chunk_digest(tokens), computed, unmeasured(len(span), computed.start), place.drift)
        size_bytes = len(span) * kv_space.layout.token_bytes
        stored = self._variants.stored_at(view, listed.space, location, variant, tokens, size_bytes)
        return None if stored is None else FoundText(span, stored)

    # -- listing ---------------------------------------------------------------------------------------------------

    def _record(self, kv_space: KvSpace, data: bytes, skip: int = 0, moved: int = 0, drift: float = 0.0) -> None:
        """List the text of a chain of `data`, without its first `skip` tokens."""
        prints = Fingerprints.of(data[skip * TOKEN_BYTES :])
        if self._disk.database.read_only or not len(prints.keys):
            return
        root, digest = kv_space.namespace.root, self._disk.kv_space_digest(kv_space)
        nodes = [root, *chain(root, data)]
        stops = dict(zip(reversed(prints.keys.tolist()), reversed((prints.ends + skip).tolist()), strict=True))
        places = [TextPlace(key, nodes[(stop - 1) // BLOCK_TOKENS], stop, moved, drift) for key, stop in stops.items()]

        def write() -> None:
            with self._disk.database.scanning() as connection:
                spaces = [one for one in spaces_of(self._disk, connection, kv_space) if one.digest == digest]
                listed = _listed_keys(connection, spaces[0].number, list(stops)) if spaces else set(stops)
            new = [place for place in places if place.key not in listed]
            for first in range(0, len(new), _ROWS_A_TRANSACTION):
                self._add(spaces[0], data, new[first : first + _ROWS_A_TRANSACTION])

        self._failures.writing(write, lambda _: None)

    def _add(self, space: SpaceRow, data: bytes, places: Sequence[TextPlace]) -> None:
        """List what is stored: it may have been removed since it was kept."""
        with self._disk.database.writing() as connection:
            view = ChunkView(connection, space.number, self._disk.room.fresh())
            there = [
                place
                for place in places
                if view.beginning(
                    place.parent, part_of(data, Span((place.stop - 1) // BLOCK_TOKENS * BLOCK_TOKENS, place.stop))
                )
            ]
            if there and self._disk.room.allows(connection, len(there) * _ROW_BYTES):
                max_count = self._disk.settings.max_fingerprints
                _put_places(connection, self._disk.digester, space, there, max_count)


def _places_of(
    connection: sqlite3.Connection, digester: Digester, space: SpaceRow, keys: Sequence[int]
) -> dict[int, TextPlace]:
    """The places of those keys that are listed; damaged rows are left out."""
    found = {}
    for values in _select(connection, _COLUMNS, space.number, keys):
        try:
            place = TextPlace(*values[:5])
            if values[5] == place.seal(digester, space.digest):
                found[place.key] = place
        except (struct.error, TypeError, ValueError):
            continue
    return found


def _listed_keys(connection: sqlite3.Connection, kv_space: int, keys: Sequence[int]) -> set[int]:
    """Those of the keys whose rows lead to text that is still stored."""
    return {key for (key,) in _select(connection, "key", kv_space, keys, f"AND NOT {LOST['fingerprints']}")}


def _put_places(
    connection: sqlite3.Connection, digester: Digester, space: SpaceRow, places: Sequence[TextPlace], max_count: int
) -> None:
    """List places, each in place of an earlier one with its key; the oldest rows beyond `max_count` go."""
    connection.executemany(
        "INSERT OR REPLACE INTO fingerprints (kv_space, key, parent, stop, moved, drift, seal) VALUES (?,?,?,?,?,?,?)",
        [
            (space.number, one.key, one.parent, one.stop, one.moved, one.drift, one.seal(digester, space.digest))
            for one in places
        ],
    )
    connection.execute("DELETE FROM fingerprints WHERE id <= (SELECT max(id) FROM fingerprints) - ?", (max_count,))


def _select(
    connection: sqlite3.Connection, columns: str, kv_space: int, keys: Sequence[int], where: str = ""
) -> Iterator[tuple[Any, ...]]:
    for first in range(0, len(keys), _KEYS_A_QUERY):
        some = keys[first : first + _KEYS_A_QUERY]
        marks = ",".join("?" * len(some))
        yield from connection.execute(
            f"SELECT {columns} FROM fingerprints v WHERE key IN ({marks}) AND kv_space=? {where}", (*some, kv_space)
        ).fetchall()


def _equal_after(view: ChunkView, first: BlockLocation, tokens: bytes) -> int:
    """How many of `tokens` an extent has from a block on."""
    place, count, blocks = first.place, 0, _FIRST_BLOCKS
    while True:
        stored = view.block_tokens(first.extent, place, place + blocks)
        equal = common_tokens(stored, tokens[count * TOKEN_BYTES :])
        count += equal
        if equal < blocks * BLOCK_TOKENS:
            return count
        place, blocks = place + blocks, blocks * 2


def _equal_before(view: ChunkView, last: BlockLocation, tokens: bytes) -> int:
    """How many of `tokens`, from their end on, a chain has before a block, in its extent and those above."""
    extent, place, count, blocks = last.extent, last.place, 0, _FIRST_BLOCKS
    while len(tokens):
        if place == 0:
            node = view.above(extent)
            above = None if node is None else view.holding(node)
            if above is None:
                break
            extent, place = above.extent, above.place + 1
        first = max(0, place - blocks)
        equal = _common_end(view.block_tokens(extent, first, place), tokens)
        count += equal
        if equal < (place - first) * BLOCK_TOKENS:
            break
        tokens = tokens[: len(tokens) - equal * TOKEN_BYTES]
        place, blocks = first, blocks * 2
    return count


def _common_end(a: bytes, b: bytes) -> int:
    """Length of the common end of two texts, in tokens."""
    shorter = min(len(a), len(b))
    ends = [np.frombuffer(text[len(text) - shorter :], "<u4") for text in (a, b)]
    differ = np.flatnonzero(ends[0] != ends[1])
    return shorter // TOKEN_BYTES - (int(differ[-1]) + 1 if len(differ) else 0)


def _gram_hashes(tokens: bytes) -> NDArray[np.uint64]:
    """The hash of every `GRAM_TOKENS` tokens in a row, `[tokens - GRAM_TOKENS + 1]`."""
    hashes = _mixed(np.frombuffer(tokens, "<u4").astype(np.uint64) + np.uint64(1))
    base, width = _BASE, 1
    while width < GRAM_TOKENS:  # a polynomial in `base`, modulo 2^64: twice as many tokens in every round
        hashes = hashes[:-width] * np.uint64(base) + hashes[width:]
        base, width = base * base % (1 << 64), 2 * width
    return _mixed(hashes)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection that spreads every bit over all others (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
