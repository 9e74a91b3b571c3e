"""Who asks: API keys and the tenants they stand for.

Each key is a tenant of its own: keys never share KV, nor do they see each other in stats, explain or metrics. A key
may be given a name (`alice=sk-...`): then the tenant goes by it, and stays when the key is changed. Operators see
everything.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rekindle.errors import InvalidSetting

_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.+)")
_LEAST_CHARACTERS = 8


@dataclass(frozen=True)
class Caller:
    """Whoever sent a request."""

    tenant: str
    operator: bool = False


@dataclass(frozen=True)
class _Key:
    digest: bytes
    caller: Caller


class Keys:
    """The keys that a server knows. Without any, everybody is the operator and the tenant is `tenant`."""

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = (), *, tenant: str = "local") -> None:
        """Raises `InvalidSetting` for keys that are too short or given twice."""
        own, admin = list(dict.fromkeys(keys)), list(dict.fromkeys(admin_keys))
        alone = len(own) == 1 and not admin  # there is nobody to be protected from
        found = [_parse(text, operator=alone) for text in own]
        found += [_parse(text, operator=True, tenant=tenant) for text in admin]
        if len({key.digest for key in found}) < len(found):
            raise InvalidSetting("An API key is given twice. Give each one once.")
        self._keys = found
        self._anybody = Caller(tenant, operator=True)

    def __len__(self) -> int:
        return len(self._keys)

    def identify(self, authorization: str | None) -> Caller | None:
        """Who sends this `Authorization` header; None if nobody that is known. Takes as long for any wrong key."""
        if not self._keys:
            return self._anybody
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, given):
                found = known.caller
        return found if scheme.lower() == "bearer" else None


def _parse(text: str, *, operator: bool, tenant: str | None = None) -> _Key:
    named = _NAMED.fullmatch(text)
    key = (named.group(2) if named else text).strip()
    if len(key) < _LEAST_CHARACTERS or not key.isprintable():
        raise InvalidSetting(
            f"An API key has at least {_LEAST_CHARACTERS} characters. Make one: python -c "
            "'import secrets; print(secrets.token_urlsafe())'"
        )
    own = named.group(1) if named else f"key-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    return _Key(_digest(key), Caller(tenant or own, operator))


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()
