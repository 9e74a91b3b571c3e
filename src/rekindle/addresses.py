"""Network addresses: which are loopback, and where secrets may be sent."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from rekindle.errors import InvalidSetting

if TYPE_CHECKING:
    import httpx


def is_loopback(host: str) -> bool:
    """Whether this is a loopback address or `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_plain_http(scheme: str, host: str, what: str) -> None:
    """Raise `InvalidSetting` unless the connection is encrypted or local. Makes no DNS query."""
    if scheme != "https" and not is_loopback(host):
        raise InvalidSetting(
            f"{what} is not sent to {host} over plain http, where others could read it. Use an address with https, "
            "or a tunnel that ends on localhost."
        )


def refuse_plain_authorization(request: httpx.Request) -> None:
    """The same for a request with a key or password: an httpx hook, called before each request."""
    if "Authorization" in request.headers:
        refuse_plain_http(request.url.scheme, request.url.host, "A key or password")
