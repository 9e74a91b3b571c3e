"""The search of a purge: runs of tokens in the chains of a catalog, and texts in records of requests.

Many runs are found in many chains in one pass: the first tokens of every run are hashed, the hash of every window of
the chains is looked up in a table of bits, and only hits are compared. Only rows are read, never files.

Records hold short excerpts of prompts with signs for spaces, cut anywhere: so only letters and digits are compared.
"""

from __future__ import annotations

import json
import sqlite3
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, NodeKey
from rekindle.errors import InvalidSetting
from rekindle.store.prefix_index import BlockRef
from rekindle.text.visible import visible

MIN_TOKENS = 8  # of the beginning of a run that count where a chain ends before the run does
_TABLE_BITS = 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(64 - _TABLE_BITS)
_PIECE_BYTES = 16  # letters in UTF-8: about twenty characters with spaces
_MIN_LINE = 20
_MIN_LETTERS = 8  # of a line of other signs


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens, four bytes each, and the digest of the tokenizer that made them."""

    tokenizer: str
    tokens: bytes

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) % TOKEN_BYTES:
            raise InvalidSetting("A run of tokens has at least one, of four bytes each.")


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of a chain's end, of which those from number `own` on are looked at; the others are context."""

    tokens: bytes
    own: int


class TokenRuns:
    """Any number of runs, searched together."""

    def __init__(self, runs: Iterable[bytes]) -> None:
        self._runs: dict[bytes, list[bytes]] = defaultdict(list)  # by their first tokens
        for run in dict.fromkeys(runs):
            self._runs[run[: MIN_TOKENS * TOKEN_BYTES]].append(run)
        self.longest = max((len(run) for group in self._runs.values() for run in group), default=0) // TOKEN_BYTES
        self._tables: dict[int, NDArray[np.bool_]] = {}  # by the count of first tokens
        for probe in self._runs:
            count = len(probe) // TOKEN_BYTES
            table = self._tables.setdefault(count, np.zeros(1 << _TABLE_BITS, np.bool_))
            table[_places(_hashes(np.frombuffer(probe, "<u4"), count))] = True

    def __bool__(self) -> bool:
        return bool(self._runs)

    def first(self, segments: Sequence[Segment]) -> list[int | None]:
        """For each segment, where the first run begins that has a token of its own part; None if there is none.

        A run counts as a whole, or with its first eight tokens or more where the segment ends.
        """
        joined = b"".join([segment.tokens for segment in segments])
        starts = np.cumsum([0, *[len(segment.tokens) // TOKEN_BYTES for segment in segments]])
        found: list[int | None] = [None] * len(segments)
        tokens = np.frombuffer(joined, "<u4")
        for count, table in self._tables.items():
            if len(tokens) < count:
                continue
            hits = np.flatnonzero(table[_places(_hashes(tokens, count))])
            numbers = np.searchsorted(starts, hits, side="right") - 1
            for hit, number in zip(hits.tolist(), numbers.tolist(), strict=True):
                start, earliest = hit - int(starts[number]), found[number]
                if (earliest is None or start < earliest) and self._is_at(segments[number], start, count):
                    found[number] = start
        return found

    def __contains__(self, tokens: bytes) -> bool:
        """Whether a run occurs in the tokens, or begins at their end."""
        return self.first([Segment(tokens, 0)]) != [None]

    def _is_at(self, segment: Segment, start: int, count: int) -> bool:
        """Whether a run with `count` first tokens to compare begins there and reaches the segment's own part."""
        data, offset = segment.tokens, start * TOKEN_BYTES
        probe = data[offset : offset + count * TOKEN_BYTES]
        for run in self._runs.get(probe, ()):  # shorter, across the segment's end: no probe
            part = data[offset : offset + len(run)]
            if offset + len(part) > segment.own * TOKEN_BYTES and run.startswith(part):
                return True
        return False


def _hashes(tokens: NDArray[np.uint32], count: int) -> NDArray[np.uint64]:
    """A hash of every window of `count` tokens: [tokens - count + 1]."""
    windows = len(tokens) - count + 1
    mixed = np.zeros(windows, np.uint64)
    for place in range(count):
        mixed *= _FACTOR
        mixed += tokens[place : place + windows]
        mixed += np.uint64(1)
    return mixed


def _places(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The table slots of hashes."""
    places: NDArray[np.uint64] = (hashes * _FACTOR) >> _SHIFT
    return places


class Snippets:
    """Texts to search for. Holds only their letters and digits."""

    def __init__(self, texts: Sequence[str]) -> None:
        wholes = [_letters(visible(text)) for text in texts]
        lines = [_letters(visible(line)) for text in texts for line in text.splitlines() if len(line) >= _MIN_LINE]
        self._long = [whole for whole in wholes if len(whole) >= _PIECE_BYTES]
        self._short = {whole for whole in wholes if 0 < len(whole) < _PIECE_BYTES}
        self._short |= {line for line in lines if _MIN_LETTERS <= len(line) < _PIECE_BYTES}

    def quoted(self, records: Sequence[str]) -> list[bool]:
        """For each record, a JSON text, whether it quotes a whole text, or a substantial part of one.

        Invalid JSON counts as a quote.
        """
        quoted = [False] * len(records)
        where: dict[bytes, set[int]] = {}
        for number, record in enumerate(records):
            strings = _strings(record)
            quoted[number] = strings is None or any(short in string for string in strings for short in self._short)
            for string in strings or ():
                for start in range(len(string) - _PIECE_BYTES + 1):
                    where.setdefault(string[start : start + _PIECE_BYTES], set()).add(number)
        for text in self._long:
            for start in range(len(text) - _PIECE_BYTES + 1):
                for number in where.get(text[start : start + _PIECE_BYTES], ()):
                    quoted[number] = True
        return quoted


def _strings(record: str) -> list[bytes] | None:
    """The letters of every string in a JSON text; None for invalid JSON."""
    try:
        return [_letters(string) for string in _walk(json.loads(record))]
    except (ValueError, RecursionError):
        return None


def _walk(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from (key, *_walk(part))
    elif isinstance(value, list):
        for part in value:
            yield from _walk(part)


def _letters(text: str) -> bytes:
    return "".join(filter(str.isalnum, text.casefold())).encode("utf-8", "surrogatepass")


_HELD_BYTES = 32 << 20  # of tokens, cached because their continuations ask for them again


@dataclass(frozen=True, slots=True)
class ExtentTokens:
    """The live tokens of an extent, and its parent node."""

    extent: int
    kv_space: int
    parent: NodeKey
    tokens: bytes


class Chains:
    """The chains of some KV spaces, extent by extent in the order of their numbers: new and moved ones come last."""

    def __init__(self, kv_spaces: Sequence[int]) -> None:
        self._kv_spaces = tuple(kv_spaces)
        self._marks = ",".join("?" * len(self._kv_spaces))
        self._held: OrderedDict[int, ExtentTokens] = OrderedDict()
        self._held_bytes = 0

    def count(self, connection: sqlite3.Connection) -> int:
        select = f"SELECT coalesce(sum(live), 0) FROM extents WHERE state='live' AND kv_space IN ({self._marks})"
        return int(connection.execute(select, self._kv_spaces).fetchone()[0])

    def after(self, connection: sqlite3.Connection, last: int, max_blocks: int) -> list[ExtentTokens]:
        """The next extents after number `last`, of about `max_blocks` blocks; none at the end."""
        stop, blocks = last, 0
        extents = connection.execute(
            f"SELECT id, live FROM extents WHERE id>? AND state='live' AND kv_space IN ({self._marks}) ORDER BY id",
            (last, *self._kv_spaces),
        )
        for stop, live in extents:  # noqa: B007  (the last one is what is asked for)
            blocks += live
            if blocks >= max_blocks:
                break
        extents.close()
        rows = connection.execute(
            "SELECT extent, kv_space, parent, tokens FROM blocks "
            f"WHERE extent>? AND extent<=? AND kv_space IN ({self._marks}) ORDER BY extent, place",
            (last, stop, *self._kv_spaces),
        )
        return [self._hold(list(group)) for _, group in groupby(rows, itemgetter(0))]

    def before(self, connection: sqlite3.Connection, stretch: ExtentTokens, tokens: int) -> bytes:
        """The last tokens before an extent, at most `tokens`."""
        parts: list[bytes] = []
        missing = tokens * TOKEN_BYTES
        above: ExtentTokens | None = stretch
        while missing > 0 and above is not None:
            spot = _find(connection, above)
            above = None if spot is None else self.read(connection, spot.extent)
            if spot is None or above is None:
                break
            stop = (spot.place + 1) * BLOCK_BYTES
            parts.append(above.tokens[max(0, stop - missing) : stop])
            missing -= stop
        return b"".join(reversed(parts))

    def above(self, connection: sqlite3.Connection, stretch: ExtentTokens, blocks: int) -> BlockRef | None:
        """The block that is `blocks` above an extent's first; None if it was removed."""
        above: ExtentTokens | None = stretch
        while above is not None:
            spot = _find(connection, above)
            if spot is None:
                return None
            if blocks <= spot.place + 1:
                return BlockRef(spot.extent, spot.place + 1 - blocks)
            blocks -= spot.place + 1
            above = self.read(connection, spot.extent)
        return None

    def read(self, connection: sqlite3.Connection, extent: int, *, fresh: bool = False) -> ExtentTokens | None:
        """An extent, as cached or, with `fresh`, as it is now; None if it has no blocks."""
        held = self._held.get(extent)
        if held is not None and not fresh:
            self._held.move_to_end(extent)
            return held
        select = "SELECT extent, kv_space, parent, tokens FROM blocks WHERE extent=? ORDER BY place"
        rows = connection.execute(select, (extent,)).fetchall()
        return self._hold(rows) if rows else None

    def _hold(self, rows: Sequence[tuple[int, int, NodeKey, bytes]]) -> ExtentTokens:
        """An extent of these rows. Its tokens never change, except that the last may be removed."""
        extent, kv_space, parent, _ = rows[0]
        stretch = ExtentTokens(extent, kv_space, parent, b"".join([row[3] for row in rows]))
        if (older := self._held.pop(extent, None)) is not None:
            self._held_bytes -= len(older.tokens)
        self._held[extent] = stretch
        self._held_bytes += len(stretch.tokens)
        while self._held_bytes > _HELD_BYTES and len(self._held) > 1:
            self._held_bytes -= len(self._held.popitem(last=False)[1].tokens)
        return stretch


def _find(connection: sqlite3.Connection, below: ExtentTokens) -> BlockRef | None:
    """The parent block of an extent; None at the root."""
    row = connection.execute(
        "SELECT extent, place FROM blocks WHERE key=? AND kv_space=?", (below.parent, below.kv_space)
    ).fetchone()
    return None if row is None else BlockRef(*row)
