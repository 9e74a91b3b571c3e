"""How models write calls: the conventions in use, and which one a model's template asks for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from rekindle.engine.calls import ToolHabits

StyleName = Literal["hermes", "qwen-xml", "llama", "mistral", "functionary", "deepseek", "bar", "command", "generic"]


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """One convention.

    opens       markers that announce calls; any of them, also several in a row
    closes      markers behind a call
    joints      markers between the name of a call and its arguments, where the name stands before them
    form        object: `{"name": ..., "arguments": {...}}`, alone or in a list. named: `name{...}`, too.
                xml: `name>` and a `<parameter=...>` for each argument, too
    arguments   what objects call their arguments when they are forced
    anywhere    calls without a marker are looked for in all of a reply, not only where one begins: the marker is a
                control token, which the text of a reply does not show
    call_ids    an id of nine letters and digits may follow the name
    """

    name: StyleName
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    joints: tuple[str, ...] = ()
    form: Literal["object", "named", "xml"] = "object"
    arguments: Literal["arguments", "parameters"] = "arguments"
    anywhere: bool = False
    call_ids: bool = False


HERMES = ToolStyle("hermes", ("<tool_call>",), ("</tool_call>",))
QWEN_XML = ToolStyle("qwen-xml", ("<tool_call>", "<function="), ("</function>", "</tool_call>"), (">",), form="xml")
LLAMA = ToolStyle("llama", ("<|python_tag|>",), arguments="parameters")
MISTRAL = ToolStyle(
    "mistral", ("[TOOL_CALLS]",), joints=("[CALL_ID]", "[ARGS]"), form="named", anywhere=True, call_ids=True
)
FUNCTIONARY = ToolStyle("functionary", ("<function=", "<|python_tag|>"), ("</function>",), (">",), form="named")
DEEPSEEK = ToolStyle(
    "deepseek",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"),
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁sep｜>", "```json"),
    form="named",
)
BAR = ToolStyle("bar", ("<|tool_call|>",), ("<|/tool_call|>",))
COMMAND = ToolStyle("command", ("<|START_ACTION|>",), ("<|END_ACTION|>",), arguments="parameters")
GENERIC = ToolStyle("generic", ("<tool_call>",), ("</tool_call>",), form="named")

_LLAMA_SHAPE = re.compile(r'"name":[^\n]{0,60}?"parameters":')


def style_of(template: str) -> ToolStyle:
    """The convention that a chat template teaches; of one that takes no tools, the one that is taught in its place."""
    if not ToolHabits.of(template).takes_tools:
        return HERMES
    if "<tool_call>" in template:
        return QWEN_XML if "<function=" in template else HERMES
    for mark, style in (
        ("[TOOL_CALLS]", MISTRAL),
        ("<function=", FUNCTIONARY),  # before Llama's, whose marker it has as well
        ("<|python_tag|>", LLAMA),
        ("<｜tool▁call▁begin｜>", DEEPSEEK),
        ("<|tool_call|>", BAR),
        ("<|START_ACTION|>", COMMAND),
    ):
        if mark in template:
            return style
    return LLAMA if _LLAMA_SHAPE.search(template.replace('\\"', '"')) else GENERIC
