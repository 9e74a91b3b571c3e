"""Who published something: Ed25519 keys, and the files they are kept in.

A client has a list of public keys it trusts. Nothing else makes KV usable: neither the address it came from nor that
server's certificate.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from rekindle.codec.cipher import Secret
from rekindle.errors import ExtraMissing, InvalidSetting, why_unreadable
from rekindle.safe_read import read_secret_file, read_small_file

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError as error:  # pragma: no cover  (where the extra is not installed)
    raise ExtraMissing('Origins need: pip install "rekindle-llm[crypto]"') from error

SIGNATURE_BYTES = 64
_PUBLIC = re.compile(r"[0-9a-f]{64}")
_ID_BYTES = 16
_PUBLIC_BYTES = 1 << 14  # of the file of a public key


class SigningKey:
    """A publisher's private key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def new(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """The key of a file (PEM). Raises `InvalidSetting`."""
        content = read_secret_file(path, "The key file")
        try:
            key = serialization.load_pem_private_key(content, password=None)
        except (ValueError, TypeError) as error:
            raise InvalidSetting(f"{path} is not a signing key. Make one: rekindle origin key FILE") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidSetting(f"{path} is not an Ed25519 key. Make one: rekindle origin key FILE")
        return cls(key)

    @property
    def public(self) -> str:
        """The public key, 64 hexadecimal digits."""
        return self._key.public_key().public_bytes_raw().hex()

    @property
    def name(self) -> str:
        """A short name for the public key, 32 hexadecimal digits."""
        return name_of(self.public)

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    def pem(self) -> bytes:
        """The content of a key file."""
        form, kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return self._key.private_bytes(form, kind, serialization.NoEncryption())


class TrustedKeys:
    """Public keys of trusted publishers."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Keys as in `SigningKey.public`. Raises `InvalidSetting` for other texts."""
        texts = [key.strip().lower() for key in keys]
        for text in texts:
            if not _PUBLIC.fullmatch(text):
                raise InvalidSetting(f"A public key has 64 hexadecimal digits, unlike {text[:80]!r}.")
        self._keys = {name_of(text): Ed25519PublicKey.from_public_bytes(bytes.fromhex(text)) for text in texts}

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def check(self, name: str, signature: bytes, data: bytes) -> None:
        """Raises `ValueError` unless the key of that name is trusted and signed these bytes."""
        key = self._keys.get(name)
        if key is None:
            raise ValueError(f"it is signed with the key {name[:40]}, which is not trusted")
        try:
            key.verify(signature, data)
        except InvalidSignature:
            raise ValueError("its signature is wrong") from None


def name_of(public: str) -> str:
    """The short name of a public key."""
    return hashlib.blake2b(bytes.fromhex(public), digest_size=_ID_BYTES, person=b"rk/o/key").hexdigest()


def make_signing_key(path: Path) -> SigningKey:
    """Write a new key to a file only its owner can read, and the public key beside it (`.pub`).

    Raises `InvalidSetting` if one of the files exists or cannot be written.
    """
    key = SigningKey.new()
    public = path.with_name(f"{path.name}.pub")
    if public.exists():
        raise InvalidSetting(f"{public} already exists. Choose another name.")
    _write(path, key.pem(), 0o600)
    _write(public, f"{key.public}\n".encode(), 0o644)
    return key


def make_secret(path: Path) -> Secret:
    """Write a new secret to a file only its owner can read. Raises `InvalidSetting`."""
    secret = Secret.new()
    _write(path, f"{secret.key.hex()}\n".encode(), 0o600)
    return secret


def read_public(text: str) -> str:
    """A public key, from its text or a file. Raises `InvalidSetting`."""
    if _PUBLIC.fullmatch(text.strip().lower()):
        return text.strip().lower()
    try:
        key = read_small_file(Path(text).expanduser(), _PUBLIC_BYTES).decode("ascii", "replace").strip().lower()
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of an unknown user
        raise InvalidSetting(why_unreadable(text, error)) from error
    if not _PUBLIC.fullmatch(key):
        raise InvalidSetting(f"{text} is not a public key: use the file that ends with .pub.")
    return key


def _write(path: Path, data: bytes, mode: int) -> None:
    """Write a new file; never overwrite one, because a lost key cannot be recovered."""
    try:
        handle = os.open(path.expanduser(), os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
    except FileExistsError:
        raise InvalidSetting(f"{path} already exists. Choose another name; keys are never overwritten.") from None
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be written: {error}.") from error
