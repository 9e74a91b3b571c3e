"""Tools in a chat, made ready for the model's template.

A template that takes tools gets them, and calls and results as it knows them. For one that does not, everything is put
into words: the tools and how to call them into the instructions, calls and results into the text of the messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.core.tools import ToolCall
from rekindle.errors import InvalidPrompt

# What `in_words` writes around a call and around a result.
CALL, CALL_END, RESULT, RESULT_END = "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"

_TAKES_TOOLS = re.compile(r"(?<![\w.'\"])tools(?![\w'\"])")
_CODE = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_TEXT_IN_CODE = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
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

Prepared = dict[str, Any]  # a message as templates read it


@dataclass(frozen=True, slots=True)
class ToolHabits:
    """What a template does with tools.

    takes_tools   it writes tools itself
    asks_none     it asks whether a message's content is none, as it is beside calls
    short_ids     it refuses ids of calls that are not nine letters and digits
    """

    takes_tools: bool
    asks_none: bool
    short_ids: bool

    @classmethod
    def of(cls, template: str) -> ToolHabits:
        """The habits of a template, read off its source."""
        code = (_TEXT_IN_CODE.sub("''", found.group()) for found in _CODE.finditer(template))
        return cls(
            takes_tools=any(_TAKES_TOOLS.search(part) for part in code),
            asks_none=_ASKS_FOR_NONE.search(template) is not None,
            short_ids=_WANTS_SHORT_IDS.search(template) is not None,
        )

    @staticmethod
    def written_by(template: str) -> str:
        """All that is written around the text of users: the template, and what stands in for what it does not know."""
        own = "" if ToolHabits.of(template).takes_tools else f"{CALL}{CALL_END}{RESULT}{RESULT_END}"
        return template + own

    def prepare(self, message: Mapping[str, Any]) -> Prepared:
        """A message with its calls as the template reads them. Raises `InvalidPrompt` for calls that are none."""
        ready = dict(message)
        if ready.get("tool_calls") is None:
            ready.pop("tool_calls", None)
        else:
            ready["tool_calls"] = [self._call(item) for item in _listed(ready["tool_calls"])]
            if self.asks_none and not ready["content"]:
                ready["content"] = None
        if self.short_ids and isinstance(ready.get("tool_call_id"), str):
            ready["tool_call_id"] = _short_id(ready["tool_call_id"])
        return ready

    def _call(self, item: object) -> Prepared:
        call = ToolCall.parse(item).as_template_input()
        return {**call, "id": _short_id(call["id"])} if self.short_ids else call


def in_words(messages: Sequence[Prepared], tools: Sequence[Prepared]) -> list[Prepared]:
    """The same chat for a template that knows neither tools nor calls nor results."""
    names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls", ()) if call["id"]}
    chat: list[Prepared] = []
    for message in messages:
        if message["role"] == "tool":
            result = _result(message, names)
            if chat and chat[-1].get("role") == "user" and chat[-1]["content"].endswith(RESULT_END):
                chat[-1]["content"] += f"\n{result}"  # results of one round are one turn: some templates count them
            else:
                chat.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            said = [message["content"]] if message["content"] else []
            calls = [_written_call(call["function"]) for call in message["tool_calls"]]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            chat.append({**rest, "content": "\n".join(said + calls)})
        else:
            chat.append(dict(message))
    return _instructed(chat, tools) if tools else chat


def without_system(messages: Sequence[Prepared]) -> list[Prepared]:
    """The same chat for a template that refuses instructions: they lead the first message of the user."""
    instructions, *rest = messages
    if instructions["role"] != "system" or not rest or rest[0]["role"] != "user":
        return list(messages)
    return [{**rest[0], "content": f"{instructions['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


def _instructed(chat: list[Prepared], tools: Sequence[Prepared]) -> list[Prepared]:
    described = "\n".join(_json(tool["function"]) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=described)
    if chat and chat[0]["role"] in ("system", "developer"):
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{instructions}".lstrip()}, *chat[1:]]
    return [{"role": "system", "content": instructions}, *chat]


def _written_call(function: Prepared) -> str:
    return f"{CALL}\n{_json({'name': function['name'], 'arguments': function['arguments']})}\n{CALL_END}"


def _result(message: Prepared, names: Mapping[str, str]) -> str:
    name = message.get("name") or names.get(message.get("tool_call_id", ""))
    named = {"name": name} if name else {}
    return f"{RESULT}\n{_json({**named, 'content': message['content']})}\n{RESULT_END}"


def _json(value: Any) -> str:
    # No text inside can end what stands around it; to JSON both spellings are one.
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")


def _listed(calls: object) -> Sequence[object]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise InvalidPrompt("'tool_calls' of a message is a list of calls. Send them as they came.")
    return calls


def _short_id(call_id: str) -> str:
    """The id itself, or nine letters and digits that stand for it, always the same ones."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode("utf-8"), digest_size=8).digest(), "big")
    return "".join(_SHORT_ID_LETTERS[number // len(_SHORT_ID_LETTERS) ** place % 36] for place in range(9))
