"""Parts of a prompt that change from request to request and that no model should read.

Claude Code begins its system prompt with `x-anthropic-billing-header: cc_version=2.1.197.495; ...`. Its last number
changes with every conversation, so nothing behind it could be reused. What is listed here is dropped, with the cache on
or off alike, so that reuse does not change what the model reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from rekindle.core.request import Message, Request

Canonical = Literal["off", "default", "full"]

# At the start of a system message: a line, and the empty lines behind it.
_NOISE = {"x-anthropic-billing-header": re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")}


def canonical_request(request: Request, level: Canonical) -> tuple[Request, list[str]]:
    """The request without such parts, and their names; `full` also sorts the tools and the keys of their schemas."""
    if level == "off":
        return request, []
    request, changed = _without_noise(request)
    if level == "full":
        tools = sorted((replace(t, parameters=_sorted(t.parameters)) for t in request.tools), key=lambda t: t.name)
        if repr(tools) != repr(list(request.tools)):
            request, changed = replace(request, tools=tuple(tools)), [*changed, "tools (order)"]
    return request, changed


def _without_noise(request: Request) -> tuple[Request, list[str]]:
    kept: list[Message] = []
    names: list[str] = []
    for message in request.prompt:
        if not isinstance(message, Message):
            return request, []
        found = []
        if message.role in ("system", "developer"):
            found = [name for name, noise in _NOISE.items() if noise.match(message.content)]
        for name in found:
            message = replace(message, content=_NOISE[name].sub("", message.content))
        names += [f"system ({name})" for name in found]
        if message.content or not found:
            kept.append(message)
    return (replace(request, prompt=tuple(kept)), names) if names and kept else (request, [])


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
