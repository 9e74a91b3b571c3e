"""Grammars of forced tool calls: a reply that is only calls, with arguments that match the tools' schemas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.core.grammar import Grammar
from rekindle.core.tools import Tool, ToolChoice
from rekindle.text.tools.styles import ToolStyle

MAX_CALLS = 8  # a small model that is forced to call may never stop
_OPEN_ENDED = ("patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if")


@dataclass(frozen=True, slots=True)
class _Frame:
    """The text around all calls, around each, and between two."""

    first: str = ""
    last: str = ""
    before: str = ""
    after: str = ""
    between: str = "\n"


_LISTED = _Frame(first="[", last="]", between=", ")
# Markers that are control tokens are not in a reply's text and cannot be forced: those calls have none.
_FRAMES = {
    "hermes": _Frame(before="<tool_call>\n", after="\n</tool_call>"),
    "qwen-xml": _Frame(before="<tool_call>\n", after="\n</tool_call>"),
    "llama": _Frame(between="; "),
    "mistral": _LISTED,
    "bar": _LISTED,
    "command": _LISTED,
}


def call_grammar(
    style: ToolStyle, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool = True
) -> Grammar | None:
    """The grammar of a reply that `choice` forces to be a call of the named function, or one or more calls of any.

    None if no call is forced, also for strict tools: a model that may answer in words cannot follow a grammar from its
    first token on. Without `parallel` there is exactly one call.
    """
    allowed = [tool for tool in tools if choice.mode == "required" or tool.name == choice.name]
    if not choice.forces or not allowed:
        return None
    frame = _FRAMES.get(style.name, _Frame())
    most = MAX_CALLS if parallel and choice.mode == "required" else 1
    more = f" ({_literal(frame.between)} call){{0,{most - 1}}}" if most > 1 else ""
    rules = [
        f"start:{_part(frame.first)} call{more}{_part(frame.last)}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(allowed)))}",
    ]
    for number, tool in enumerate(allowed):
        before, after = _around_arguments(style, frame, tool)
        rules.append(f"call_{number}: {_literal(before)} arguments_{number} {_literal(after)}")
        rules.append(f"arguments_{number}: %json {json.dumps(_closed(tool))}")
    return Grammar.lark("\n".join(rules) + "\n")


def _around_arguments(style: ToolStyle, frame: _Frame, tool: Tool) -> tuple[str, str]:
    if style.name == "functionary":
        return f"<function={tool.name}>", "</function>"
    head = f"{{{json.dumps('name')}: {json.dumps(tool.name)}, {json.dumps(style.arguments)}: "
    return frame.before + head, "}" + frame.after


def _closed(tool: Tool) -> dict[str, Any]:
    """The schema of the tool's arguments, closed to further properties unless it says otherwise."""
    schema = dict(tool.parameters)
    if not any(key in schema for key in ("additionalProperties", *_OPEN_ENDED)):
        schema["additionalProperties"] = False
    return schema


def _part(text: str) -> str:
    return f" {_literal(text)}" if text else ""


def _literal(text: str) -> str:
    return json.dumps(text)
