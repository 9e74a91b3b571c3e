"""Bodies of requests: validated, their salt, and what all of them say about cache and app."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from rekindle.core.request import Message, Options
from rekindle.server.errors import ApiError
from rekindle.server.schema import (
    MAX_SALT,
    AgentBody,
    CacheBody,
    ChatMessage,
    ChatOptions,
    CompletionOptions,
    DocumentText,
    RequestBody,
    TurnBody,
)

_Body = TypeVar("_Body", bound=RequestBody)
NO_IMAGE = "[An image was left out: this model reads text.]"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class ReplyLength:
    """The longest reply, in tokens, and the longest to a request that wants none in particular."""

    longest: int
    default: int

    def of(self, wanted: int | None) -> int:
        """The tokens that a request may have that wants a reply of that length; below 0: as many as fit."""
        wanted = self.default if wanted is None else wanted
        return self.longest if wanted < 0 else min(wanted, self.longest)


def parse(kind: type[_Body], body: bytes) -> _Body:
    """Validate a body. Raises `ApiError` 400 that names a wrong field.

    The parser refuses surrogates, and nesting of more than 200 levels.
    """
    try:
        return kind.model_validate_json(body or b"null")
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False, include_context=False)
    if found[0]["type"] == "json_invalid":
        raise _no_json(body, found[0]["msg"])
    sent = from_json(body or b"null")
    places = [(_place(problem["loc"], sent, problem["type"] == "missing"), problem) for problem in found]
    # Of a field that may have several types, each is reported: the one that fits best is refused furthest inside.
    (place, value), first = max(places, key=lambda one: len(one[0][0]))
    where, message = ".".join(place), first["msg"]
    if value is None and first["type"] != "missing":
        message = "It is null. Give a value"
    raise ApiError(400, f"{where or 'The body'}: {message}.", param=where or None)


def _place(loc: Sequence[str | int], sent: Any, missing: bool) -> tuple[list[str], Any]:
    """The names and numbers in the place of a problem that are the body's own, not a validator's; the value there."""
    place, value = [], sent
    for number, part in enumerate(loc):
        inside = isinstance(value, dict) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            place.append(str(part))
            value = value[part]
        elif missing and number == len(loc) - 1:
            place.append(str(part))
    return place, value


def _no_json(body: bytes, reason: str) -> ApiError:
    """The error of a body that is no JSON, or that has half a character."""
    try:
        where = _half_character(json.loads(body), [])
    except (ValueError, RecursionError):
        where = None
    if where is None:
        return ApiError(400, f"The body is not JSON: {reason}.")
    message = "The text has half of a surrogate pair, as if it was cut inside a character. Send whole characters."
    return ApiError(400, f"{'.'.join(where)}: {message}", param=".".join(where))


def _half_character(value: Any, place: list[str]) -> list[str] | None:
    """Where a text has a lone surrogate; None if none has."""
    if isinstance(value, str):
        return place if _SURROGATE.search(value) else None
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_half_character(inner, [*place, str(name)]) for name, inner in items)
    return next((one for one in found if one is not None), None)


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


@dataclass
class TranslatedChat:
    """Messages and tools as the session takes them, and the names of what was left out."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def cache_options(body: CacheBody, tenant: str) -> Options:
    """Options of the request that all protocols have: tenant, salt, app, and what stands under `rekindle`."""
    options: Options = {"tenant": tenant}
    if body.cache_salt is not None:
        options["cache_salt"] = body.cache_salt
    if body.cache_prompt is False:
        options["reuse"] = "off"
    if body.app_id:  # session_id, user and so on are not apps: nothing says when they end
        options |= {"app": body.app_id, "app_state": body.app_state}
    own = getattr(body, "rekindle", None)
    if isinstance(own, CompletionOptions) and own.reuse is not None:
        options.setdefault("reuse", own.reuse)
    if isinstance(own, ChatOptions):
        if own.answers is not None:
            options["answers"] = own.answers
        if own.documents and own.knowledge is not None:
            raise ApiError(400, "rekindle: Give either documents or knowledge.", param="rekindle.knowledge")
        options["documents"] = documents_of(own.documents or (), "rekindle.documents")
    return options


def documents_of(given: Sequence[str | DocumentText], field: str) -> list[dict[str, str]]:
    """Documents as the session takes them. Raises `ApiError` 400 that names an empty one."""
    found = []
    for number, item in enumerate(given):
        text = item if isinstance(item, str) else item.content
        if not text.strip():
            message = "It has no text. Give one, as a text or as {'text': ..., 'title': ...}."
            raise ApiError(400, f"{field}.{number}: {message}", param=f"{field}.{number}")
        about = {} if isinstance(item, str) else item.model_dump(include={"title", "source"}, exclude_none=True)
        found.append({"text": text, **about})
    return found


def agent_options(body: AgentBody, tenant: str, wanted_tokens: int | None, length: ReplyLength) -> Options:
    """The same with sampling, and a reply of the wanted length, if `length` allows that."""
    return cache_options(body, tenant) | {"max_tokens": length.of(wanted_tokens)} | sampling_options(body)


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


def sampling_options(given: RequestBody, **defaults: float) -> Options:
    """The sampling of a reply: what was given, else these defaults. What a body has beside its fields is not heeded."""
    fields = {name: value for name, value in given if name in type(given).model_fields and value is not None}
    options: Options = {"temperature": 1.0}
    for name, value in (defaults | {name: fields[name] for name in _SAMPLING if name in fields}).items():
        if name != "top_k":
            options[name] = float(value)  # type: ignore[literal-required]
        elif value > 0:
            options["top_k"] = int(value)
    for name in ("repetition_penalty", "repeat_penalty"):
        if name in fields:
            options["repetition_penalty"] = fields[name]
    if fields.get("stop"):
        options["stop"] = fields["stop"]
    return options


def begins_turn(body: TurnBody, messages: Sequence[ChatMessage]) -> bool:
    """Whether the template writes what comes before a new message of the assistant. Raises `ApiError` 400."""
    name = "continue_final_message"
    if body.continue_final_message and messages[-1].role != "assistant":
        raise ApiError(400, f"{name}: the last message is not the assistant's. Leave it out, or send one.", param=name)
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(400, f"{name} and add_generation_prompt exclude each other. Leave one of them out.", param=name)
    return body.add_generation_prompt is not False


def messages_of(messages: Sequence[ChatMessage]) -> list[Message | Mapping[str, Any]]:
    """Messages as the session takes them: content parts are joined."""
    return [
        {"role": message.role, "content": content_text(message.content), **(message.model_extra or {})}
        for message in messages
    ]


def content_text(content: str | list[dict[str, Any]] | None) -> str | None:
    """The text of a message's content, whose parts are joined. Raises `ApiError` 400 for a part that is no text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if part.get("type") not in ("text", "input_text") or not isinstance(part.get("text"), str):
            kind = json.dumps(part.get("type"))[:50]
            raise ApiError(400, f"A part of type {kind} is not supported: only text is.", param="messages")
        texts.append(part["text"])
    return "".join(texts)


def text_field(item: Mapping[str, Any], name: str, place: str) -> str:
    """A text in a part of a body that is validated by hand. Raises `ApiError` 400 that names it."""
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}.{name}: Input should be a valid string.", param=f"{place}.{name}")
    return value
