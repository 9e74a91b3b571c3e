"""How models write tool calls: the conventions in use, what a template does with tools, grammars that force a call.

A template that takes tools gets them, with calls and results in its own form. For any other, the tools and how to call
them are written into the instructions, and calls and results into the text of the messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rekindle.core.grammar import Grammar
from rekindle.core.tools import Tool, ToolCall, ToolChoice
from rekindle.errors import InvalidPrompt
from rekindle.text.base import Tokenizer

StyleName = Literal[
    "hermes", "qwen-xml", "llama", "mistral", "functionary", "deepseek", "bar", "command", "harmony", "gemma",
    "generic",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """One convention.

    opens       markers before calls: any of them, or several in a row
    closes      markers after a call
    joints      markers between the name of a call and its arguments
    form        object: `{"name": ..., "arguments": {...}}`, alone or in a list. named: also `name{...}`.
                xml: also `name>` and a `<parameter=...>` for each argument.
                bare-keys: `name{...}` with keys without quotes
    arguments   the key of the arguments in a forced call
    anywhere    calls without a marker may begin anywhere in a reply: the marker is a control token, which the text of
                a reply does not show
    call_ids    an id of nine letters and digits may follow the name
    """

    name: StyleName
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    joints: tuple[str, ...] = ()
    form: Literal["object", "named", "xml", "bare-keys"] = "object"
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
_RECIPIENT = " to=functions."
HARMONY = ToolStyle(
    "harmony",
    tuple(
        f"{turn}{channel}{_RECIPIENT}"
        for turn, channel in (
            ("<|start|>assistant", "<|channel|>commentary"),
            ("<|start|>assistant", "<|channel|>analysis"),
            ("<|start|>assistant", ""),
            ("", "<|channel|>commentary"),
            ("", "<|channel|>analysis"),
        )
    ),
    ("<|end|>",),
    ("<|channel|>commentary", "<|channel|>analysis", "<|constrain|>", "json", "<|message|>"),
    form="named",
)
GEMMA = ToolStyle("gemma", ("<|tool_call>call:",), ("<tool_call|>",), form="bare-keys")
GENERIC = ToolStyle("generic", ("<tool_call>",), ("</tool_call>",), form="named")

_LLAMA_SHAPE = re.compile(r'"name":[^\n]{0,60}?"parameters":')


def detect_style(template: str) -> ToolStyle:
    """The convention that a chat template uses; that of `tools_as_text` if it takes no tools."""
    if not TemplateTools.of(template).takes_tools:
        return HERMES
    if "<tool_call>" in template:
        return QWEN_XML if "<function=" in template else HERMES
    for mark, style in (
        ("[TOOL_CALLS]", MISTRAL),
        ("<function=", FUNCTIONARY),  # before Llama's, whose marker it contains too
        ("<|python_tag|>", LLAMA),
        ("<｜tool▁call▁begin｜>", DEEPSEEK),
        ("<|tool_call|>", BAR),
        ("<|START_ACTION|>", COMMAND),
        ("<|channel|>", HARMONY),
        ("<|tool_call>", GEMMA),
    ):
        if mark in template:
            return style
    return LLAMA if _LLAMA_SHAPE.search(template.replace('\\"', '"')) else GENERIC


# What `tools_as_text` writes around a call and a result.
CALL, CALL_END, RESULT, RESULT_END = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"

_TAKES_TOOLS = re.compile(r"(?<![\w.'\"])tools(?![\w'\"])")
# An unclosed block ends with the template: otherwise every opening would be searched to the end.
_CODE = re.compile(r"\{%.*?(?:%\}|\Z)|\{\{.*?(?:\}\}|\Z)", re.DOTALL)
_TEXT_IN_CODE = re.compile(r"'(?:[^'\\]|\\.)*(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)", re.DOTALL)
_ASKS_FOR_NONE = re.compile(r"content(?:['\"]\])?\s+is\s+(?:not\s+)?none", re.IGNORECASE)
_WANTS_SHORT_IDS = re.compile(r"length\s*!=\s*9")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_SHORT_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"

_INSTRUCTIONS = f"""\
# Tools

You can call functions. Each line between <tools> and </tools> describes one, its parameters as a JSON schema:
<tools>
{{tools}}
</tools>

Call a function only when it helps to answer. To call one, write its name and its arguments as JSON, like this, and
nothing after it:
{CALL}
{{{{"name": "NAME", "arguments": {{{{"PARAMETER": "VALUE"}}}}}}}}
{CALL_END}
To call several, write several of these. What a function gave back is shown to you between {RESULT} and {RESULT_END}. \
When you have what you need, answer in plain words."""

TemplateMessage = dict[str, Any]  # a message as templates get it


@dataclass(frozen=True, slots=True)
class TemplateTools:
    """What a template does with tools.

    takes_tools   it writes tools itself
    asks_none     it checks whether a message's content is none, as it is beside calls
    short_ids     it refuses call ids that are not nine letters and digits
    """

    takes_tools: bool
    asks_none: bool
    short_ids: bool

    @classmethod
    def of(cls, template: str) -> TemplateTools:
        """Read from the template's source."""
        code = (_TEXT_IN_CODE.sub("''", found.group()) for found in _CODE.finditer(template))
        return cls(
            takes_tools=any(_TAKES_TOOLS.search(part) for part in code),
            asks_none=_ASKS_FOR_NONE.search(template) is not None,
            short_ids=_WANTS_SHORT_IDS.search(template) is not None,
        )

    @staticmethod
    def written_by(template: str) -> str:
        """All text that may be written around user text: the template, and the markers of `tools_as_text` if needed."""
        own = "" if TemplateTools.of(template).takes_tools else f"{CALL}{CALL_END}{RESULT}{RESULT_END}"
        return template + own

    def prepare(self, message: Mapping[str, Any]) -> TemplateMessage:
        """A message with its calls in the template's form. Raises `InvalidPrompt` for invalid calls."""
        ready = dict(message)
        if ready.get("tool_calls") is None:
            ready.pop("tool_calls", None)
        else:
            ready["tool_calls"] = [self._call(item) for item in _check_list(ready["tool_calls"])]
            if self.asks_none and not ready["content"]:
                ready["content"] = None
        if self.short_ids and isinstance(ready.get("tool_call_id"), str):
            ready["tool_call_id"] = _short_id(ready["tool_call_id"])
        return ready

    def _call(self, item: object) -> TemplateMessage:
        call = ToolCall.parse(item).as_template_input()
        return {**call, "id": _short_id(call["id"])} if self.short_ids else call


def tools_as_text(messages: Sequence[TemplateMessage], tools: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The chat for a template without tools: tools, calls and results written as text."""
    names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls", ()) if call["id"]}
    chat: list[TemplateMessage] = []
    for message in messages:
        if message["role"] == "tool":
            result = _result_text(message, names)
            if chat and chat[-1].get("role") == "user" and chat[-1]["content"].endswith(RESULT_END):
                chat[-1]["content"] += f"\n{result}"  # one message a round: some templates want roles to alternate
            else:
                chat.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            said = [message["content"]] if message["content"] else []
            calls = [_call_text(call["function"]) for call in message["tool_calls"]]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            chat.append({**rest, "content": "\n".join(said + calls)})
        else:
            chat.append(dict(message))
    return _add_instructions(chat, tools) if tools else chat


def merge_system_message(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The chat for a template that refuses system messages: it begins the first user message instead."""
    instructions, *rest = messages
    if instructions["role"] != "system" or not rest or rest[0]["role"] != "user":
        return list(messages)
    return [{**rest[0], "content": f"{instructions['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


def late_instructions_as_user(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """The chat for a template that wants a system message only at the start: later ones are text of the user.

    Messages of the user that follow each other become one, because such templates want roles to alternate.
    """
    chat = list(messages[:1])
    for message in messages[1:]:
        late = {"role": "user", "content": message["content"]} if message["role"] == "system" else message
        if late["role"] == "user" == chat[-1]["role"]:
            chat[-1] = {**chat[-1], "content": f"{chat[-1]['content']}\n\n{late['content']}"}
        else:
            chat.append(late)
    return chat


def _add_instructions(chat: list[TemplateMessage], tools: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    described = "\n".join(_json(tool["function"]) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described)
    if chat and chat[0]["role"] in ("system", "developer"):
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{instructions}".lstrip()}, *chat[1:]]
    return [{"role": "system", "content": instructions}, *chat]


def _call_text(function: TemplateMessage) -> str:
    return f"{CALL}\n{_json({'name': function['name'], 'arguments': function['arguments']})}\n{CALL_END}"


def _result_text(message: TemplateMessage, names: Mapping[str, str]) -> str:
    name = message.get("name") or names.get(message.get("tool_call_id", ""))
    named = {"name": name} if name else {}
    return f"{RESULT}\n{_json({**named, 'content': message['content']})}\n{RESULT_END}"


def _json(value: Any) -> str:
    # So that no text inside can close the tag around it; in JSON both spellings are equal.
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")


def _check_list(calls: object) -> Sequence[object]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InvalidPrompt("'tool_calls' of a message is a list of calls. Send them as they came.")
    return calls


def _short_id(call_id: str) -> str:
    """The id itself, or nine letters and digits derived from it."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8"), digest_size=8).digest(), "big")
    return "".join(_SHORT_ID_LETTERS[number // len(_SHORT_ID_LETTERS) ** place % 36] for place in range(9))


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
    """The grammar of a call of the function that `choice` names, or of one or more calls of any.

    None if nothing may be called. Without `parallel` there is exactly one call. Where no call is forced, it may lack
    its markers: small models leave them out.
    """
    allowed = [tool for tool in tools if choice.permits(tool)]
    if not allowed:
        return None
    frames = [_FRAMES.get(style.name, _Frame())]
    if not choice.forces and frames[0] != _Frame():
        frames.append(_Frame())
    max_calls = MAX_CALLS if parallel and choice.name is None else 1
    around = _around_arguments if choice.forces else _around_free_arguments
    rules = [f"start: {' | '.join(f'calls_{way}' for way in range(len(frames)))}"]
    for way, frame in enumerate(frames):
        more = f" ({_literal(frame.between)} call_{way}){{0,{max_calls - 1}}}" if max_calls > 1 else ""
        rules.append(f"calls_{way}:{_part(frame.first)} call_{way}{more}{_part(frame.last)}")
        rules.append(f"call_{way}: {' | '.join(f'call_{way}_{number}' for number in range(len(allowed)))}")
        for number, tool in enumerate(allowed):
            before, after = around(style, frame, tool)
            rules.append(f"call_{way}_{number}: {before} arguments_{number} {after}")
    rules += [f"arguments_{number}: %json {json.dumps(_closed(tool))}" for number, tool in enumerate(allowed)]
    return Grammar.lark("\n".join(rules) + "\n")


def call_openers(style: ToolStyle, tokenizer: Tokenizer) -> set[int]:
    """The control tokens that announce calls in this style and that the text of a reply does not show."""
    found = {tokenizer.token_of(mark) for mark in style.opens}
    return {token for token in found if token is not None and not tokenizer.decode([token])}


def _around_arguments(style: ToolStyle, frame: _Frame, tool: Tool) -> tuple[str, str]:
    if style.name == "functionary":
        return _literal(f"<function={tool.name}>"), _literal("</function>")
    head = f"{{{json.dumps('name')}: {json.dumps(tool.name)}, {json.dumps(style.arguments)}: "
    return _literal(frame.before + head), _literal("}" + frame.after)


def _around_free_arguments(style: ToolStyle, frame: _Frame, tool: Tool) -> tuple[str, str]:
    """The same for a reply that may begin alike and be no call: in the terminals of JSON, because they are greedy."""
    if style.name == "functionary":
        return _around_arguments(style, frame, tool)
    words = [_literal(json.dumps(word)) for word in ("name", tool.name, style.arguments)]
    head = f"{_part(frame.before)} {_literal('{')} {words[0]} /: ?/ {words[1]} /, ?/ {words[2]} /: ?/"
    return head, f"{_literal('}')}{_part(frame.after)}"


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
