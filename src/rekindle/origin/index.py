"""The index: which contexts begin with the same chunks, so that one small file tells a client where to look.

It is not signed and need not be: it only names manifests, which are. The worst that a wrong one can do is to waste a
few requests. Of each chunk it has two bytes of the digest, enough to see how far a context goes along with a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.origin.names import CONTEXT

FORMAT = "rekindle-index/1"
MOST_ENTRIES = 32  # in one file, the newest; more are found by a later chunk
_HINT_BYTES = 2


@dataclass(frozen=True)
class Entry:
    """A context, who published it, and a hint of each of its chunks."""

    context: str
    key: str
    hints: bytes

    def common(self, chain: Sequence[bytes]) -> int:
        """How many first chunks it seems to share with a prompt."""
        mine = hints_of(chain)
        shared = 0
        while shared < min(len(mine), len(self.hints)) and mine[shared] == self.hints[shared]:
            shared += 1
        return shared // _HINT_BYTES


@dataclass(frozen=True)
class Index:
    """The contexts of one lookup, newest first. `full`: there were more."""

    entries: tuple[Entry, ...] = ()
    full: bool = False

    def adding(self, entry: Entry) -> Index:
        """The same with a context, in place of what it was before."""
        entries = (entry, *(old for old in self.entries if old.context != entry.context))
        return Index(entries[:MOST_ENTRIES], self.full or len(entries) > MOST_ENTRIES)

    def without(self, context: str) -> Index:
        """The same without one."""
        return Index(tuple(entry for entry in self.entries if entry.context != context), self.full)

    def to_bytes(self) -> bytes:
        """The file."""
        entries = [{"context": e.context, "hints": e.hints.hex(), "key": e.key} for e in self.entries]
        return json.dumps({"contexts": entries, "format": FORMAT, "full": self.full}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Index:
        """Raises `ValueError` for other files."""
        try:
            fields = json.loads(data)
            if fields["format"] != FORMAT or type(fields["full"]) is not bool:
                raise ValueError("a format that is not known here")
            entries = tuple(_entry(one) for one in fields["contexts"][:MOST_ENTRIES])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no index: {error!r}") from error
        return cls(entries, fields["full"])


def hints_of(chain: Sequence[bytes]) -> bytes:
    """The first bytes of each digest."""
    return b"".join(digest[:_HINT_BYTES] for digest in chain)


def _entry(fields: Any) -> Entry:
    if not CONTEXT.fullmatch(fields["context"]) or not isinstance(fields["key"], str):
        raise ValueError("no index: an entry is none")
    return Entry(fields["context"], fields["key"], bytes.fromhex(fields["hints"]))
