"""Bodies of requests: validated, their salt, and what all of them say about cache and app."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from rekindle.core.request import Options
from rekindle.server.errors import ApiError
from rekindle.server.schema import MAX_SALT, AgentBody, CacheBody, RequestBody

_Body = TypeVar("_Body", bound=RequestBody)
NO_IMAGE = "[An image was left out: this model reads text.]"


def parse(kind: type[_Body], body: bytes) -> _Body:
    """Validate a body. Raises `ApiError` 400 that names the first wrong field.

    The parser refuses surrogates, and nesting of more than 200 levels.
    """
    try:
        return kind.model_validate_json(body or b"null")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            raise ApiError(400, f"The body is not JSON: {first['msg']}.") from None
        raise ApiError(400, f"{where or 'The body'}: {first['msg']}.", param=where or None) from None


def salt_of(body: RequestBody | None, query: Mapping[str, str]) -> str | None:
    """The cache salt of a call: from its body if it has one, else from the query. Raises `ApiError` 400."""
    salt = query.get("cache_salt") if body is None else getattr(body, "cache_salt", None)
    if isinstance(salt, str) and len(salt) > MAX_SALT:
        raise ApiError(400, f"cache_salt has up to {MAX_SALT:,} characters.", param="cache_salt")
    return salt if isinstance(salt, str) else None


def salt_of_refused(body: bytes) -> str | None:
    """The cache salt of a refused body, so that metrics count it where it belongs."""
    try:
        parsed = from_json(body)
    except ValueError:
        return None
    salt = parsed.get("cache_salt") if isinstance(parsed, dict) else None
    return salt if isinstance(salt, str) else None


def cache_options(body: CacheBody, tenant: str) -> Options:
    """Options of the request: tenant, salt, app, and whether KV is reused."""
    options: Options = {"tenant": tenant}
    if body.cache_salt is not None:
        options["cache_salt"] = body.cache_salt
    if body.cache_prompt is False:
        options["reuse"] = "off"
    if body.app_id:  # session_id, user and so on are not apps: nothing says when they end
        options |= {"app": body.app_id, "app_state": body.app_state}
    return options


def agent_options(body: AgentBody, tenant: str, wanted_tokens: int | None, token_limit: int) -> Options:
    """The same with sampling, and a reply of the wanted length, if `token_limit` allows that."""
    options = cache_options(body, tenant)
    options["max_tokens"] = token_limit if wanted_tokens is None else min(wanted_tokens, token_limit)
    options["temperature"] = 1.0 if body.temperature is None else float(body.temperature)
    if body.top_p is not None:
        options["top_p"] = body.top_p
    if body.top_k:
        options["top_k"] = body.top_k
    if body.rekindle is not None and body.rekindle.reuse is not None:
        options.setdefault("reuse", body.rekindle.reuse)
    return options


def text_field(item: Mapping[str, Any], name: str, place: str) -> str:
    """A text in a part of a body that is validated by hand. Raises `ApiError` 400 that names it."""
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}.{name}: Input should be a valid string.", param=f"{place}.{name}")
    return value
