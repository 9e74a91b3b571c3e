"""What things at an origin are called: chunks, contexts, files.

    root(model) --tokens 0..127--> chunk --tokens 128..255--> chunk --...--> the last, maybe partial, chunk

A chunk's digest covers the model and all tokens up to it, so equal digests mean equal context, and a prompt that shares
only the first chunks of a context has the same first digests. With a secret all of it is keyed: who does not have it
cannot try whether a guessed text is there.

    by-chunk/LOOKUP.json          which contexts begin like that; a lookup is a hash of a chunk's digest
    contexts/CONTEXT/manifest     what there is of a context, signed
    contexts/CONTEXT/DIGEST.kv    its slices at one level; the name is the digest of the content, so it never changes
    contexts/CONTEXT/DIGEST.tokens
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rekindle.codec.cipher import Secret
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.identity import digest_of_fields
from rekindle.core.keys import TOKEN_BYTES, layout_text, token_bytes
from rekindle.core.kv import KvLayout

CHAIN_BYTES = 32  # of a chunk's digest: who writes documents must not find two that have the same
NAME_BYTES = 16  # of a lookup or a context: names only find things

LOOKUP = re.compile(r"[0-9a-f]{32}")
CONTEXT = re.compile(r"[0-9a-f]{32}")
FILE = re.compile(r"[0-9a-f]{64}\.(?:kv|tokens)")
INDEX_FOLDER, CONTEXT_FOLDER, MANIFEST = "by-chunk", "contexts", "manifest"
SERVED = re.compile(
    rf"{INDEX_FOLDER}/{LOOKUP.pattern}\.json|{CONTEXT_FOLDER}/{CONTEXT.pattern}/(?:{MANIFEST}|{FILE.pattern})"
)


@dataclass(frozen=True)
class Model:
    """Whose KV it is: what must be equal for KV of the same tokens to be interchangeable.

    `identity` is the digest of the engine's identity, `adapter` the digest of a LoRA, None for the model alone.
    """

    identity: str
    layout: KvLayout
    adapter: str | None = None

    @cached_property
    def digest(self) -> bytes:
        """One name for all of it."""
        adapter = "base" if self.adapter is None else f"adapter:{self.adapter}"
        return bytes.fromhex(digest_of_fields("rekindle/origin/1", self.identity, adapter, layout_text(self.layout)))


class Names:
    """How chunks and contexts are called; other names for each secret."""

    def __init__(self, secret: Secret | None = None) -> None:
        self._key = b"" if secret is None else secret.derive(b"names")

    def chain(self, model: Model, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """The digests of the chunks of a prompt, in order; the last chunk may be partial."""
        data, size = token_bytes(tokens), CHUNK_TOKENS * TOKEN_BYTES
        parent = self._hash(b"root", model.digest, CHAIN_BYTES)
        chain = []
        for start in range(0, len(data), size):
            parent = self._hash(
                b"chunk", parent + data[start : start + size], CHAIN_BYTES
            )  # the parent's size is fixed
            chain.append(parent)
        return tuple(chain)

    def lookup(self, chunk: bytes) -> str:
        """Where contexts are listed that begin with everything up to this chunk."""
        return self._hash(b"lookup", chunk, NAME_BYTES).hex()

    def context(self, last_chunk: bytes, publisher: str) -> str:
        """The name of a context that ends with this chunk. Publishers do not overwrite each other's."""
        return self._hash(b"context", last_chunk + publisher.encode(), NAME_BYTES).hex()

    def _hash(self, purpose: bytes, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._key, person=b"rk/o/" + purpose).digest()


def depths(chunks: int) -> list[int]:
    """At which chunks, counted from 1, a context of so many whole ones is listed: 1, 2, 4, 8, ...

    The first is enough, unless too many contexts begin alike, with the same instructions, say.
    """
    return [1 << power for power in range(chunks.bit_length())]


def index_path(lookup: str) -> str:
    """Where the contexts of a lookup are listed."""
    return f"{INDEX_FOLDER}/{lookup}.json"


def context_path(context: str, file: str = MANIFEST) -> str:
    """A file of a context."""
    return f"{CONTEXT_FOLDER}/{context}/{file}"
