"""Tools that a model may call, its calls, and the tool choice of a request: OpenAI's forms, checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rekindle.errors import InvalidPrompt, nearest

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_FORM = '{"type": "function", "function": {"name": ...}}'


def _no_parameters() -> dict[str, Any]:
    return {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of the object it takes."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=_no_parameters)
    strict: bool = False

    @classmethod
    def parse(cls, item: object) -> Tool:
        """Parse a tool of a request; raises `InvalidPrompt`."""
        if not isinstance(item, Mapping) or item.get("type") != "function":
            raise InvalidPrompt(f"A tool has the form {_FORM}; only functions are supported.")
        function = item.get("function")
        if not isinstance(function, Mapping):
            raise InvalidPrompt(f"A tool needs an object 'function': {_FORM}.")
        name, description = function.get("name"), function.get("description")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidPrompt(f"{name!r} cannot name a tool: use 1 to 128 letters, digits, '_' and '-'.")
        if description is not None and not isinstance(description, str):
            raise InvalidPrompt(f"The description of the tool {name!r} is {type(description).__name__}. Give text.")
        strict = function.get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise InvalidPrompt(f"'strict' of the tool {name!r} is {strict!r}. Give true or false.")
        tool = cls(name, description, _parse_parameters(name, function.get("parameters")), bool(strict))
        _check_json(f"The tool {name!r}", tool.as_openai())
        return tool

    def as_openai(self) -> dict[str, Any]:
        form = self.as_template_input()
        return {**form, "function": {**form["function"], "strict": True}} if self.strict else form

    def as_template_input(self) -> dict[str, Any]:
        """What chat templates read: the same without `strict`."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": dict(self.parameters)}}


def parse_tools(items: object) -> tuple[Tool, ...]:
    """Parse the tools of a request; raises `InvalidPrompt`, also for duplicate names and too many tools."""
    if items is None:
        return ()
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes)):
        raise InvalidPrompt(f"'tools' is a list of {_FORM}.")
    if len(items) > MAX_TOOLS:
        raise InvalidPrompt(f"There are {len(items)} tools; at most {MAX_TOOLS} fit a request. Leave some out.")
    tools = tuple(item if isinstance(item, Tool) else Tool.parse(item) for item in items)
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidPrompt(f"Two tools are named {twice!r}. Give each a name of its own.")
    return tools


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made; `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str

    @classmethod
    def parse(cls, item: object) -> ToolCall:
        """Parse a call in an earlier message; raises `InvalidPrompt`.

        Its arguments may be text, as in OpenAI's form, or an object, as in templates.
        """
        function = item.get("function") if isinstance(item, Mapping) else None
        if not isinstance(item, Mapping) or not isinstance(function, Mapping):
            raise InvalidPrompt(f"A tool call needs an object 'function' with 'name' and 'arguments', not {item!r}.")
        call_id, name, arguments = item.get("id", ""), function.get("name"), function.get("arguments", "{}")
        if not isinstance(name, str) or not name:
            raise InvalidPrompt("A tool call has no name. Give the name of the function that was called.")
        if not isinstance(call_id, str):
            raise InvalidPrompt(
                f"The id of the call of {name!r} is {call_id!r}. Give the text that came with the call."
            )
        if isinstance(arguments, Mapping):
            _check_json(f"The call of {name!r}", arguments)
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            raise InvalidPrompt(
                f"The arguments of the call of {name!r} are {type(arguments).__name__}. Give JSON text."
            )
        _check_json(f"The call of {name!r}", [call_id, name, arguments])
        return cls(call_id, name, arguments)

    def as_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def as_template_input(self) -> dict[str, Any]:
        """What chat templates read: the arguments as an object, if they are JSON of one."""
        return {**self.as_openai(), "function": {"name": self.name, "arguments": self._object()}}

    @property
    def canonical_arguments(self) -> str:
        """The arguments in one spelling: clients send them back with other spaces, key order and numbers (`1.0`)."""
        try:
            value = json.loads(self.arguments, parse_float=_whole_if_possible)
            return json.dumps(value, sort_keys=True)
        except (ValueError, RecursionError):
            return self.arguments.strip()

    def _object(self) -> Any:
        try:
            value = json.loads(self.arguments)
            _check_json("", value)  # NaN, infinities, lone surrogates
        except (ValueError, RecursionError):
            return self.arguments
        return value if isinstance(value, dict) else self.arguments


ChoiceMode = Literal["none", "auto", "required", "function"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the model must call: none, auto (it decides), required (any tool), function (the one of `name`).

    `allowed` are the names of the tools that it may call; empty: all.
    """

    mode: ChoiceMode = "auto"
    name: str | None = None
    allowed: tuple[str, ...] = ()

    @classmethod
    def parse(cls, value: object, tools: Sequence[Tool]) -> ToolChoice:
        """Parse the `tool_choice` of a request with these tools; raises `InvalidPrompt`."""
        if value is None:
            return cls("auto" if tools else "none")
        if isinstance(value, ToolChoice):
            return value
        if isinstance(value, str):
            return cls._of_word(value, tools)
        if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
            return cls._of_allowed(value.get("allowed_tools", value), tools)
        function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise InvalidPrompt(f"'tool_choice' is 'none', 'auto', 'required' or {_FORM}, not {value!r}.")
        names = [tool.name for tool in tools]
        if name not in names:
            advice = nearest(name, names) if names else " The request has no tools: send them along."
            raise InvalidPrompt(f"'tool_choice' names {name!r}, which is not one of the tools.{advice}")
        return cls("function", name)

    @classmethod
    def _of_word(cls, word: str, tools: Sequence[Tool]) -> ToolChoice:
        if word == "none" or (word == "auto" and not tools):
            return cls("none")
        if word == "auto":
            return cls("auto")
        if word != "required":
            raise InvalidPrompt(f"'tool_choice' is {word!r}.{nearest(word, ['none', 'auto', 'required'])}")
        if not tools:
            raise InvalidPrompt("'tool_choice' is 'required', but the request has no tools. Send them along.")
        return cls("required")

    @classmethod
    def _of_allowed(cls, value: Any, tools: Sequence[Tool]) -> ToolChoice:
        mode, listed = (value.get("mode"), value.get("tools")) if isinstance(value, Mapping) else (None, None)
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise InvalidPrompt("'allowed_tools' needs a mode, 'auto' or 'required', and a list of 'tools'.")
        found = [cls.parse({"type": "function", "function": _function_of(item)}, tools) for item in listed]
        return cls(mode, allowed=tuple(choice.name for choice in found if choice.name is not None))

    def permits(self, tool: Tool) -> bool:
        """Whether the model may call the tool."""
        names = self.allowed if self.name is None else (self.name,)
        return self.mode != "none" and (not names or tool.name in names)

    @property
    def forces(self) -> bool:
        """Whether the reply must be a call."""
        return self.mode in ("required", "function")


def _function_of(item: object) -> object:
    """The function of a tool in a list: chats have it inside, responses have its name beside the type."""
    return item.get("function", item) if isinstance(item, Mapping) else item


def _whole_if_possible(number: str) -> int | float:
    value = float(number)
    return int(value) if value.is_integer() else value


def _parse_parameters(name: str, schema: object) -> dict[str, Any]:
    if schema is None or schema == {}:
        return _no_parameters()
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise InvalidPrompt(
            f"The parameters of the tool {name!r} are not the schema of an object. "
            'Give {"type": "object", "properties": {...}}, or leave them out.'
        )
    if not isinstance(schema.get("properties", {}), Mapping):
        raise InvalidPrompt(f"The 'properties' of the tool {name!r} are not an object. Give each a schema by name.")
    return dict(schema) if "type" in schema else {"type": "object", **schema}


def _check_json(what: str, value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidPrompt(
            f"{what} cannot be written as JSON ({error}). Send plain values and valid Unicode."
        ) from None
