"""A manifest as it stands in a file: signed by who published it, and encrypted if there is a secret.

    header, JSON    who signed it, where it is listed, the salt if it is encrypted     in clear, for who keeps the files
    signature       of header and body, hexadecimal
    body            the manifest

It is checked before it is decrypted, and decrypted before anything in it is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.codec.cipher import Secret, new_salt
from rekindle.origin.manifest import FORMAT, Manifest, canonical, hex_of, salt_of, text_of
from rekindle.origin.names import LOOKUP
from rekindle.origin.signing import SIGNATURE_BYTES, SigningKey, TrustedKeys

_MOST_HEADER_BYTES = 1 << 14
_KEY = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Header:
    """What a manifest says in clear: the publisher's key, the lookups that list it, its salt if it is encrypted."""

    key: str
    lookups: tuple[str, ...]
    salt: bytes | None = None

    def to_bytes(self) -> bytes:
        """One line, without its end."""
        return canonical({"format": FORMAT, "key": self.key, "lookups": list(self.lookups), "salt": hex_of(self.salt)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Header:
        """Raises `ValueError` if it is none."""
        try:
            fields = json.loads(data)
            header = cls(
                text_of(fields["key"], _KEY), tuple(text_of(t, LOOKUP) for t in fields["lookups"]), salt_of(fields)
            )
            same = fields["format"] == FORMAT and header.to_bytes() == data
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no header of a manifest: {error!r}") from error
        if not same:
            raise ValueError("no header of a manifest")
        return header


@dataclass(frozen=True)
class SignedManifest:
    """The file of a manifest, taken apart but not believed yet."""

    header: Header
    signature: bytes
    body: bytes

    def to_bytes(self) -> bytes:
        """The file."""
        return b"\n".join([self.header.to_bytes(), self.signature.hex().encode(), self.body])

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedManifest:
        """Raises `ValueError` for other files."""
        parts = data.split(b"\n", 2)
        if len(parts) < 3 or len(parts[0]) > _MOST_HEADER_BYTES:
            raise ValueError("no manifest: it has no header")
        if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * SIGNATURE_BYTES), parts[1]):
            raise ValueError("no manifest: it has no signature")
        return cls(Header.from_bytes(parts[0]), bytes.fromhex(parts[1].decode()), parts[2])

    @classmethod
    def seal(cls, manifest: Manifest, lookups: Sequence[str], key: SigningKey, secret: Secret | None) -> SignedManifest:
        """Encrypt a manifest, if there is a secret, and sign what comes of it."""
        header = Header(key.name, tuple(lookups), None if secret is None else new_salt())
        body = manifest.to_bytes()
        if secret is not None and header.salt is not None:
            body = secret.cipher(b"manifest", header.salt).seal(0, body, header.to_bytes())
        return cls(header, key.sign(_signed(header, body)), body)

    def open(self, keys: TrustedKeys, secret: Secret | None) -> Manifest:
        """The manifest. Raises `ValueError` unless a trusted key signed it and it can be read.

        With a secret it must be encrypted: whoever has one does not want to be given anything else.
        """
        keys.check(self.header.key, self.signature, _signed(self.header, self.body))
        if secret is not None and self.header.salt is None:
            raise ValueError("it is not encrypted, though there is a secret")
        manifest = self.peek(secret)
        salts = [manifest.token_file.salt, *(level.salt for level in manifest.levels)]
        if any((salt is None) != (secret is None) for salt in salts):
            raise ValueError("some of its files are encrypted, others are not")
        return manifest

    def peek(self, secret: Secret | None) -> Manifest:
        """What it says, whoever signed it: for who keeps the files. Raises `ValueError` if it cannot be read."""
        body = self.body
        if self.header.salt is not None:
            if secret is None:
                raise ValueError("it is encrypted, and there is no secret")
            body = secret.cipher(b"manifest", self.header.salt).open(0, body, self.header.to_bytes())
        return Manifest.from_bytes(body)


def _signed(header: Header, body: bytes) -> bytes:
    return b"rekindle/manifest/1\n" + header.to_bytes() + b"\n" + body
