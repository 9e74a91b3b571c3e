"""Bytes that only holders of a secret can read or make: AES-256-GCM.

Every file has a key of its own, derived from the secret and the file's random salt. So the number of a piece can be its
nonce: no two pieces under one key have the same, however often and by however many they are written.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import ExtraMissing, InvalidSetting
from rekindle.safe_read import read_secret_file

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as error:  # pragma: no cover  (where the extra is not installed)
    raise ExtraMissing('Encryption needs: pip install "rekindle-llm[crypto]"') from error

SECRET_BYTES = 32
SALT_BYTES = 32
TAG_BYTES = 16  # added by encryption
_NONCE_BYTES = 12


@dataclass(frozen=True, repr=False)
class Secret:
    """32 random bytes. Keys for different purposes are derived from it; none of them tells another, or the secret."""

    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != SECRET_BYTES:
            raise InvalidSetting(f"A secret has {SECRET_BYTES} bytes, not {len(self.key)}.")

    @classmethod
    def new(cls) -> Secret:
        return cls(secrets.token_bytes(SECRET_BYTES))

    def derive(self, purpose: bytes, salt: bytes = b"") -> bytes:
        """The key for a purpose (13 bytes at most), 32 bytes."""
        return hashlib.blake2b(salt, digest_size=32, key=self.key, person=b"rk/" + purpose).digest()

    def cipher(self, purpose: bytes, salt: bytes) -> Cipher:
        """What encrypts the pieces of one file, whose salt it is."""
        if len(salt) != SALT_BYTES:
            raise ValueError(f"a salt has {SALT_BYTES} bytes, not {len(salt)}")
        return Cipher(self.derive(purpose, salt))


def read_secret(path: Path) -> Secret:
    """The secret in a file. Raises `InvalidSetting`."""
    text = read_secret_file(path, "The secret's file").strip()
    if not re.fullmatch(rb"[0-9a-f]{64}", text):
        raise InvalidSetting(f"{path} is not a secret. Make one: rekindle origin key --secret FILE")
    return Secret(bytes.fromhex(text.decode()))


class Cipher:
    """Encrypts pieces under one key, each number once."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)

    def seal(self, number: int, data: bytes, about: bytes) -> bytes:
        """A piece, encrypted, `TAG_BYTES` longer; `about` is not in it, but must be known to open it."""
        return self._aead.encrypt(_nonce(number), data, about)

    def open(self, number: int, data: bytes | bytearray, about: bytes) -> bytes:
        """What was sealed. Raises `ValueError` for another number, other bytes, another key or another `about`."""
        try:
            return self._aead.decrypt(_nonce(number), data, about)
        except InvalidTag:
            raise ValueError("it was changed, or encrypted with another secret") from None


def new_salt() -> bytes:
    """A salt that no other file has."""
    return secrets.token_bytes(SALT_BYTES)


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")
