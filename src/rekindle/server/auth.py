"""Who may call the server, and as whom: API keys, host names, origins of web pages.

Each key is a tenant of its own: keys never share KV, nor do they see each other in stats, explain or metrics. A key
may be given a name (`alice=sk-...`): then the tenant goes by it, and stays when the key is changed. Two keys of one
name are one tenant, so that a key can be changed without a gap; names that mean somebody else are refused. Operators
see everything but the texts of others.

Web pages are refused before anything of a request is read. A browser sends what any page tells it to, with this
machine's rights: a page needs no permission to post a text or to send a form to another origin, only to read the reply.
Browsers say where a request comes from (`Origin`, `Sec-Fetch-Site`) and pages cannot change that; a request with
neither comes from a program, which decides for itself.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rekindle.addresses import is_loopback
from rekindle.core.size import parse_duration, parse_limit
from rekindle.errors import InvalidSetting
from rekindle.http_server import check_port
from rekindle.server.errors import ApiError
from rekindle.settings import ServerSettings

NOBODY = "nobody"  # callers without a known key, in metrics
_UNNAMED = "key-"  # prefix of the tenants of unnamed keys
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.+)")
_MIN_CHARACTERS = 8


@dataclass(frozen=True)
class Caller:
    """Who sent a request."""

    tenant: str
    operator: bool = False


@dataclass(frozen=True)
class _Key:
    digest: bytes
    caller: Caller


class ApiKeys:
    """The API keys of a server. Without any, everybody is the operator and the tenant is `tenant`."""

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = (), *, tenant: str = "local") -> None:
        """Raises `InvalidSetting` for keys that are too short, given twice, or named like somebody else."""
        own, admin = list(dict.fromkeys(keys)), list(dict.fromkeys(admin_keys))
        alone = len(own) == 1 and not admin  # a single key needs no protection from others
        found = [_parse(text, operator=alone) for text in own]
        for text in own:
            _check_name(text, tenant)
        found += [_parse(text, operator=True, tenant=tenant) for text in admin]
        if len({key.digest for key in found}) < len(found):
            raise InvalidSetting("An API key is given twice. Give each one once.")
        self._keys = found
        self._anybody = Caller(tenant, operator=True)

    def __len__(self) -> int:
        return len(self._keys)

    def identify(self, authorization: str | None, api_key: str | None = None) -> Caller | None:
        """The caller of an `Authorization` or an `x-api-key` header; None if unknown. Constant time for wrong keys."""
        if not self._keys:
            return self._anybody
        scheme, _, key = (f"bearer {api_key}" if authorization is None else authorization).partition(" ")
        given = _digest(key.strip())
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, given):
                found = known.caller
        return found if scheme.lower() == "bearer" else None


def _parse(text: str, *, operator: bool, tenant: str | None = None) -> _Key:
    named = _NAMED.fullmatch(text)
    key = (named.group(2) if named else text).strip()
    if len(key) < _MIN_CHARACTERS or not key.isprintable():
        raise InvalidSetting(
            f"An API key has at least {_MIN_CHARACTERS} characters. Make one: python -c "
            "'import secrets; print(secrets.token_urlsafe())'"
        )
    own = named.group(1) if named else f"{_UNNAMED}{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    return _Key(_digest(key), Caller(tenant or own, operator))


def _check_name(text: str, operators: str) -> None:
    named = _NAMED.fullmatch(text)
    name = named.group(1) if named else None
    if name in (operators, NOBODY) or (name or "").startswith(_UNNAMED):
        whose = f"{operators!r} is the tenant of this machine's own user" if name == operators else "that is reserved"
        raise InvalidSetting(
            f"An API key may not be named {name!r}: {whose}. Give it another name, or use --admin-key for the operator."
        )


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()


_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def check_settings(settings: ServerSettings, keys: ApiKeys) -> None:
    """Raises `InvalidSetting` for invalid values, and for a server that others could reach without a key."""
    if not is_loopback(settings.host) and not keys and not settings.allow_unauthenticated:
        raise InvalidSetting(
            f"{settings.host} can be reached by others, and there is no API key. Give one with --api-key, or let "
            "everybody in with --allow-unauthenticated."
        )
    if "null" in settings.cors_origin:
        raise InvalidSetting("Any web page can send the origin null. Name the pages' own, or * for all of them.")
    check_port(settings.port)
    positive = {
        "max_body": parse_limit(settings.max_body).resolve(0),
        "timeout": parse_duration(settings.timeout),
        "client_timeout": parse_duration(settings.client_timeout),
        "max_connections": settings.max_connections,
        "default_reply": settings.default_reply,
    }
    for name, value in positive.items():
        if value <= 0:
            raise InvalidSetting(f"{name}={getattr(settings, name)} makes no sense. Use more than 0.")
    if settings.queue < 0:
        raise InvalidSetting(f"queue={settings.queue} makes no sense. Use 0 or more.")
    parse_duration(settings.stop_timeout)
    parse_limit(settings.model_memory or 0, "model_memory")
    parse_duration(settings.quiet)


@dataclass(frozen=True)
class AnsweredHosts:
    """The Host names that are answered, in lower case and without ports; `names` is None for any.

    Against DNS rebinding: a web page can make its own name point to this machine, so without a key only the machine's
    own names are answered, and where others may come, its addresses: a page cannot have those.
    """

    names: frozenset[str] | None
    addresses: bool = False  # whether all IP addresses are answered

    @classmethod
    def of(cls, settings: ServerSettings, keys: ApiKeys) -> AnsweredHosts:
        """Those that the settings name, else those of this machine, on loopback and without keys."""
        if "*" in settings.allowed_hosts:
            return cls(None)
        if settings.allowed_hosts:
            return cls(frozenset(name.lower() for name in settings.allowed_hosts))
        own = {*_LOOPBACK_NAMES, settings.host}
        if is_loopback(settings.host):
            return cls(frozenset(own))
        if keys:
            return cls(None)
        name = socket.gethostname().lower()
        return cls(frozenset({*own, name, name.partition(".")[0], f"{name.partition('.')[0]}.local"}), addresses=True)

    def includes(self, given: str) -> bool:
        """Whether the host of a `Host` header is answered."""
        name = given if given.endswith("]") else given.rsplit(":", 1)[0]
        return self.names is None or name in self.names or (self.addresses and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class OriginGuard:
    """Refuses requests before their bodies are read: `refused` gives the response. Links may lead to `pages`."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        hosts: AnsweredHosts,
        refused: Callable[[str, ApiError], Response],
        pages: Collection[str],
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = settings.cors_origin
        self._refused = refused
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, or let the application answer."""
        if scope["type"] == "http":
            try:
                self._check(scope, Headers(scope=scope))
            except ApiError as problem:
                await self._refused(scope["path"], problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        if not self._hosts.includes(host):
            message = f"This server does not answer to the name {host[:100]!r}. Start it with --allowed-hosts."
            raise ApiError(403, message, code="bad_host")
        origin, allowed = headers.get("origin"), self._origins
        if "*" in allowed or origin in allowed:
            return
        if headers.get("sec-fetch-site") == "same-origin":  # also behind a proxy with another scheme
            return
        if origin is not None and origin.lower() != f"{scope['scheme']}://{host}":
            raise _foreign(f"web pages of {origin[:100]!r}", origin[:100])
        if headers.get("sec-fetch-site", "none") == "none":
            return
        if scope["method"] not in ("GET", "HEAD") or scope["path"] not in self._pages or not _opens_page(headers):
            raise _foreign("web pages of other origins", "ORIGIN")


def _opens_page(headers: Headers) -> bool:
    """Whether a user followed a link to a top-level page."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _foreign(whose: str, origin: str) -> ApiError:
    advice = "" if origin == "null" else f" Start the server with --cors-origin {origin} to allow them."
    return ApiError(403, f"Requests from {whose} are not answered here.{advice}", code="foreign_origin")
