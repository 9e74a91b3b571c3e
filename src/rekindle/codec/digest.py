"""Digests of what is stored: fast ones against accidents, keyed ones against people."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import xxhash

from rekindle.errors import InvalidSetting

Buffer = bytes | bytearray | memoryview


class State(Protocol):
    """A digest under way."""

    def update(self, data: Buffer, /) -> object:
        """Take more bytes."""

    def digest(self) -> bytes:
        """The digest of all bytes so far."""


class Digester(Protocol):
    """How the bytes of a store are checked."""

    @property
    def name(self) -> str:
        """Which digests these are; other names never verify each other's."""

    @property
    def width(self) -> int:
        """Bytes of a digest of data."""

    def data(self) -> State:
        """A digest of KV."""

    def header(self, data: Buffer) -> bytes:
        """The digest of an extent's header, 16 bytes."""


class PlainDigester:
    """xxh3 for KV, BLAKE2b for headers: finds every accident, stops no attacker who can write the folder."""

    name = "xxh3-64"
    width = 8

    def data(self) -> State:
        return xxhash.xxh3_64()

    def header(self, data: Buffer) -> bytes:
        """The digest of an extent's header."""
        return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, repr=False)
class KeyedDigester:
    """Keyed BLAKE2b for both: nobody without the key can make KV that is served. Slower."""

    key: bytes
    width = 16

    def __post_init__(self) -> None:
        if not 16 <= len(self.key) <= 64:
            raise InvalidSetting(f"A cache key has 16 to 64 bytes, not {len(self.key)}.")

    @property
    def name(self) -> str:
        """Names the key too, without telling it, so that another key means another KV space rather than damage."""
        return f"blake2b-128-keyed:{self._state(b'name').hexdigest()[:16]}"

    def data(self) -> State:
        return self._state(b"data")

    def header(self, data: Buffer) -> bytes:
        """The digest of an extent's header."""
        state = self._state(b"header")
        state.update(data)
        return state.digest()

    def _state(self, purpose: bytes) -> hashlib.blake2b:
        return hashlib.blake2b(digest_size=16, key=self.key, person=b"rk/" + purpose)


def digester_for(key: bytes | None) -> Digester:
    """Keyed digests if there is a key, else plain ones."""
    return PlainDigester() if key is None else KeyedDigester(key)
