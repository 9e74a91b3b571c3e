"""Where KV is at an origin: names of chunks and contexts, paths of files, and the index.

    root(model) --tokens 0..127--> chunk --tokens 128..255--> chunk --...--> the last, maybe partial, chunk

A chunk's digest covers the model and all tokens up to it, so equal digests mean equal context, and a prompt that shares
only the first chunks of a context has the same first digests. The model is that of every dtype and engine: contexts of
all of them are listed together, and each manifest says whose its unquantized KV is. With a secret every digest is
keyed: without it, nobody can test whether a guessed text is published.

    by-chunk/LOOKUP.json          the index: contexts that begin alike; LOOKUP is a hash of a chunk's digest, or of the
                                  root: the newest contexts of a model; or of nothing: one context of each model;
                                  or of a passage: the contexts that it is published in
    contexts/CONTEXT/manifest     what is published of a context, signed
    contexts/CONTEXT/DIGEST.kv    its slices at one level, named after the digest of the content
    contexts/CONTEXT/DIGEST.tokens

The index is not signed: it only names manifests, which are, so a wrong one wastes a few requests at worst. It holds two
bytes of each chunk's digest, enough to see how many chunks a context shares with a prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rekindle.codec.cipher import Secret
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.identity import digest_of_fields
from rekindle.core.keys import TOKEN_BYTES, token_bytes
from rekindle.core.kv import KvLayout
from rekindle.engine.base import Engine
from rekindle.safe_read import parse_untrusted_json

CHAIN_BYTES = 32  # of a chunk's digest: collision-resistant against authors of documents
NAME_BYTES = 16  # of a lookup or a context: for finding, not for trust

LOOKUP = re.compile(r"[0-9a-f]{32}")
CONTEXT = re.compile(r"[0-9a-f]{32}")
FILE = re.compile(r"[0-9a-f]{64}\.(?:kv|tokens)")
INDEX_FOLDER, CONTEXT_FOLDER, MANIFEST = "by-chunk", "contexts", "manifest"
SERVED = re.compile(
    rf"{INDEX_FOLDER}/{LOOKUP.pattern}\.json|{CONTEXT_FOLDER}/{CONTEXT.pattern}/(?:{MANIFEST}|{FILE.pattern})"
)


KeyOrder = Literal["same", "interleaved", "halves"]


@dataclass(frozen=True)
class KvModel:
    """Whose KV it is.

    exact     what must be equal for unquantized KV to be the same: the engine's identity, which has a dtype, and device
    weights   what must be equal for quantized KV to be interchangeable: the model's files (`Identity.model`)
    adapter   the digest of a LoRA; None for the model alone
    key_order where it differs from that of published keys, for a client whose model was paired with another file form
    """

    exact: str
    weights: str
    layout: KvLayout
    adapter: str | None = None
    key_order: KeyOrder = field(default="same", compare=False)

    @classmethod
    def of(cls, engine: Engine, tokens: int, adapter: str | None = None) -> KvModel:
        """The model of a context of `tokens` tokens."""
        identity = engine.identity(engine.regime(tokens))
        exact = digest_of_fields("rekindle/exact/1", identity.digest, engine.device)
        return cls(exact, identity.model, engine.layout, adapter)

    @cached_property
    def digest(self) -> bytes:
        """One digest of what all dtypes, devices and engines have in common."""
        adapter = "base" if self.adapter is None else f"adapter:{self.adapter}"
        kind = "bytes" if self.layout.dtype == "uint8" else "floats"
        return bytes.fromhex(digest_of_fields("rekindle/origin/2", self.weights, adapter, kind, str(self.widths)))

    @property
    def widths(self) -> list[tuple[int, int]]:
        """How many numbers the keys and the values of a token are in each layer. llama.cpp has all heads in one."""
        return [(one.kv_heads * one.key_dim, one.kv_heads * one.value_dim) for one in self.layout.layers]


class ContextNames:
    """Digests and names of chunks and contexts; keyed by the secret if there is one."""

    def __init__(self, secret: Secret | None = None) -> None:
        self._key = b"" if secret is None else secret.derive(b"names")

    def chain(self, model: KvModel, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """The digests of the chunks of a prompt, in order; the last chunk may be partial."""
        data, size = token_bytes(tokens), CHUNK_TOKENS * TOKEN_BYTES
        parent, chain = self.root(model), []
        for start in range(0, len(data), size):
            # The parent's size is fixed: nothing else can be cut so.
            parent = self._hash(b"chunk", parent + data[start : start + size], CHAIN_BYTES)
            chain.append(parent)
        return tuple(chain)

    def root(self, model: KvModel) -> bytes:
        """The digest before the first chunk."""
        return self._hash(b"root", model.digest, CHAIN_BYTES)

    def lookup(self, chunk: bytes = b"") -> str:
        """The lookup that lists contexts beginning with everything up to this chunk, or root; by default the one that
        lists a context of each model."""
        return self._hash(b"lookup", chunk, NAME_BYTES).hex()

    def passage(self, model: KvModel, tokens: Sequence[int]) -> bytes:
        """The digest of a passage, whatever is before it."""
        return self._hash(b"passage", self.root(model) + token_bytes(tokens), CHAIN_BYTES)

    def context(self, last_chunk: bytes, exact: str, publisher: str) -> str:
        """The name of a context that ends with this chunk; different for each publisher, dtype, device and engine."""
        data = last_chunk + digest_of_fields(exact, publisher).encode()
        return self._hash(b"context", data, NAME_BYTES).hex()

    def _hash(self, purpose: bytes, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._key, person=b"rk/o/" + purpose).digest()


def listed_depths(chunks: int) -> list[int]:
    """The chunks, counted from 1, under which a context of `chunks` whole chunks is listed: 1, 2, 4, 8, ...

    The first is enough unless too many contexts begin alike, for example with the same instructions.
    """
    return [1 << power for power in range(chunks.bit_length())]


def index_path(lookup: str) -> str:
    """Path of the index of a lookup."""
    return f"{INDEX_FOLDER}/{lookup}.json"


def context_path(context: str, file: str = MANIFEST) -> str:
    """Path of a file of a context."""
    return f"{CONTEXT_FOLDER}/{context}/{file}"


FORMAT = "rekindle-index/1"
MAX_ENTRIES = 32  # newest in one file; more are listed under a later chunk
_HINT_BYTES = 2


@dataclass(frozen=True)
class IndexEntry:
    """A context, its publisher, and a hint of each of its chunks."""

    context: str
    key: str
    hints: bytes

    def count_shared(self, chain: Sequence[bytes]) -> int:
        """Number of leading chunks it seems to share with a prompt."""
        mine = hints_of(chain)
        shared = 0
        while shared < min(len(mine), len(self.hints)) and mine[shared] == self.hints[shared]:
            shared += 1
        return shared // _HINT_BYTES


@dataclass(frozen=True)
class Index:
    """The contexts of one lookup, newest first. `full`: there are more."""

    entries: tuple[IndexEntry, ...] = ()
    full: bool = False

    def adding(self, entry: IndexEntry) -> Index:
        """A copy with this entry, replacing an older one of the same context."""
        entries = (entry, *(old for old in self.entries if old.context != entry.context))
        return Index(entries[:MAX_ENTRIES], self.full or len(entries) > MAX_ENTRIES)

    def adding_model(self, entry: IndexEntry) -> Index:
        """A copy with this entry, whose hints are a model's root, replacing the publisher's older one of that model."""
        others = (old for old in self.entries if (old.key, old.hints) != (entry.key, entry.hints))
        return Index(tuple(others), self.full).adding(entry)

    def without(self, context: str) -> Index:
        """A copy without this context."""
        return Index(tuple(entry for entry in self.entries if entry.context != context), self.full)

    def to_bytes(self) -> bytes:
        entries = [{"context": e.context, "hints": e.hints.hex(), "key": e.key} for e in self.entries]
        return json.dumps({"contexts": entries, "format": FORMAT, "full": self.full}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Index:
        """Raises `ValueError` for invalid files."""
        try:
            fields = parse_untrusted_json(data)
            if fields["format"] != FORMAT or type(fields["full"]) is not bool:
                raise ValueError("an unknown format")
            entries = tuple(_parse_entry(one) for one in fields["contexts"][:MAX_ENTRIES])
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not an index: {error!r}") from error
        return cls(entries, fields["full"])


def hints_of(chain: Sequence[bytes]) -> bytes:
    """The leading bytes of each digest."""
    return b"".join(digest[:_HINT_BYTES] for digest in chain)


def _parse_entry(fields: Any) -> IndexEntry:
    if not CONTEXT.fullmatch(fields["context"]) or not isinstance(fields["key"], str):
        raise ValueError("not an index: an entry is invalid")
    return IndexEntry(fields["context"], fields["key"], bytes.fromhex(fields["hints"]))
