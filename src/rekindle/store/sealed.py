"""Encrypted objects: a shared tier then sees sizes and random names, and can neither read nor make KV.

    salt | piece 0: length of the data, data ... | piece 1 | ... | the last piece, filled with zeros

Each piece is encrypted and authenticated by itself (`codec/cipher`), so a range is read as the pieces that hold it. All
have one size, and the name of the object is part of what is authenticated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rekindle.codec.cipher import SALT_BYTES, TAG_BYTES, Secret, new_salt
from rekindle.core.plan import SharedTierName
from rekindle.store.objects import Buffer, ByteRange, ObjectStore

_PIECE_BYTES = 16 << 10
_SEALED_BYTES = _PIECE_BYTES + TAG_BYTES
_LENGTH_BYTES = 8
_PURPOSE = b"tier"


class SealedObjects:
    """An object store whose objects only holders of the secret can read. One that was changed does not exist.

    Ranges may end up to a piece behind the data: there are zeros.
    """

    def __init__(self, objects: ObjectStore, secret: Secret) -> None:
        self._objects = objects
        self._secret = secret
        self._name_key = secret.derive(b"tier-names")

    @property
    def tier(self) -> SharedTierName:
        return self._objects.tier

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        names = [self._name(key) for key in keys]
        found: list[bytes | None] = []
        for name, data in zip(names, self._objects.get_many(names), strict=True):
            plain = None if data is None else self._open(name, data[:SALT_BYTES], data[SALT_BYTES:], 0)
            length = int.from_bytes(plain[:_LENGTH_BYTES], "little") if plain else 0
            found.append(None if plain is None else plain[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return found

    def get_ranges(self, wanted: Sequence[ByteRange]) -> list[bytes | None]:
        asked: list[ByteRange] = []
        for one in wanted:
            name = self._name(one.key)
            first, stop = _first_piece(one), -(-(one.stop + _LENGTH_BYTES) // _PIECE_BYTES)
            start, end = (SALT_BYTES + piece * _SEALED_BYTES for piece in (first, stop))
            asked += [ByteRange(name, 0, SALT_BYTES), ByteRange(name, start, end)]
        answers = self._objects.get_ranges(asked)
        opened: list[bytes | None] = []
        for one, salt, data in zip(wanted, answers[::2], answers[1::2], strict=True):
            first = _first_piece(one)
            plain = None if salt is None or data is None else self._open(self._name(one.key), salt, data, first)
            start = one.start + _LENGTH_BYTES - first * _PIECE_BYTES
            opened.append(None if plain is None else plain[start : start + one.stop - one.start])
        return opened

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return self._objects.contains([self._name(key) for key in keys])

    def put(self, key: str, data: Buffer) -> bool:
        name, salt = self._name(key), new_salt()
        cipher = self._secret.cipher(_PURPOSE, salt)
        plain = len(data).to_bytes(_LENGTH_BYTES, "little") + bytes(data)
        plain += bytes(-len(plain) % _PIECE_BYTES)
        starts = range(0, len(plain), _PIECE_BYTES)
        pieces = [cipher.seal(n, plain[at : at + _PIECE_BYTES], name.encode()) for n, at in enumerate(starts)]
        return self._objects.put(name, salt + b"".join(pieces))

    def claim(self, key: str, seconds: float) -> bool:
        return self._objects.claim(self._name(key), seconds)

    def release(self, key: str) -> None:
        self._objects.release(self._name(key))

    def remove(self, keys: Sequence[str]) -> None:
        self._objects.remove([self._name(key) for key in keys])

    def remove_under(self, folder: str) -> int:
        return self._objects.remove_under(folder)

    def used_bytes(self) -> int:
        return self._objects.used_bytes()

    def close(self) -> None:
        self._objects.close()

    def _name(self, key: str) -> str:
        """The key with its last part hidden: whose it is remains visible."""
        folder, _, _ = key.rpartition("/")
        return f"{folder}/{hashlib.blake2b(key.encode(), digest_size=16, key=self._name_key).hexdigest()}"

    def _open(self, name: str, salt: bytes, data: bytes, first: int) -> bytes | None:
        try:
            cipher = self._secret.cipher(_PURPOSE, salt)
            starts = range(0, len(data), _SEALED_BYTES)
            pieces = [
                cipher.open(first + n, data[at : at + _SEALED_BYTES], name.encode()) for n, at in enumerate(starts)
            ]
        except ValueError:
            return None
        return b"".join(pieces)


def _first_piece(wanted: ByteRange) -> int:
    return (wanted.start + _LENGTH_BYTES) // _PIECE_BYTES
