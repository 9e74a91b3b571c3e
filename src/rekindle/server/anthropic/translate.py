"""From a body of Anthropic's API to a request of the session.

system, messages   a system message, then user, assistant, tool and system messages in their order
tool_use           a tool call of an assistant message; tool_result: a message of a tool
thinking           the `reasoning_content` of an assistant message, which templates read
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.core.request import Message, Options, Request
from rekindle.server.anthropic.schema import CountTokensRequest, MessagesRequest, NamedTool, TurnMessage
from rekindle.server.body import NO_IMAGE, ReplyLength, agent_options, text_field
from rekindle.server.errors import ApiError

# What only Anthropic's servers write or read.
_FOREIGN = ("redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use",
            "mcp_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result", "tool_reference", "container_upload")  # fmt: skip

Block = Mapping[str, Any]


@dataclass
class TranslatedChat:
    """Messages and tools as the session takes them, and the names of what was left out."""

    messages: list[Message | Mapping[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def translate_chat(body: CountTokensRequest) -> TranslatedChat:
    """The chat of a body. Raises `ApiError` 400 that names the block."""
    chat = TranslatedChat()
    if body.system:
        chat.messages.append({"role": "system", "content": _text_of(body.system, "system", chat)})
    for number, message in enumerate(body.messages):
        _add_message(chat, message, f"messages.{number}")
    for tool in body.tools or ():
        if tool.type not in (None, "custom"):
            chat.ignored.append(f"tools.{tool.name} ({tool.type})")
        else:
            chat.tools.append(_tool(tool))
    return chat


def messages_request(body: MessagesRequest, chat: TranslatedChat, tenant: str, length: ReplyLength) -> Request:
    """The session's request of a body and its chat. Raises `RequestError` and `ApiError`."""
    if body.messages[-1].role == "assistant":
        raise ApiError(400, "The last message is the assistant's: replies cannot be begun here. End with the user's.")
    options = agent_options(body, tenant, body.max_tokens, length)
    if body.stop_sequences:
        options["stop"] = body.stop_sequences
    if chat.tools:
        options["tools"] = chat.tools
        _choose(body, options)
    return Request.of(chat.messages, **options)


def _choose(body: MessagesRequest, options: Options) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    words = {"auto": "auto", "none": "none", "any": "required"}
    named = {"type": "function", "function": {"name": choice.name}}
    options["tool_choice"] = words.get(choice.type, named)
    options["parallel_tool_calls"] = choice.disable_parallel_tool_use is False


def _tool(tool: NamedTool) -> dict[str, Any]:
    about: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        about["description"] = tool.description
    if tool.strict is not None:
        about["strict"] = tool.strict
    return {"type": "function", "function": about}


def _add_message(chat: TranslatedChat, message: TurnMessage, place: str) -> None:
    blocks = message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
    if message.role == "assistant":
        chat.messages.append(_assistant(blocks, place, chat))
    elif message.role == "system":
        chat.messages.append({"role": "system", "content": _text_of(blocks, place, chat)})
    else:
        _add_user(chat, blocks, place)


def _add_user(chat: TranslatedChat, blocks: Sequence[Block], place: str) -> None:
    """The results of tools, each a message of its own, and the text around them."""
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            chat.messages.append({"role": "user", "content": "\n\n".join(texts)})
            texts.clear()

    for number, block in enumerate(blocks):
        where = f"{place}.content.{number}"
        if block.get("type") == "tool_result":
            end_text()
            content = _text_of(block.get("content") or "", where, chat, images=True)
            call_id = text_field(block, "tool_use_id", where)
            chat.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        else:
            texts += _block_texts(block, where, chat)
    end_text()


def _assistant(blocks: Sequence[Block], place: str, chat: TranslatedChat) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        where, kind = f"{place}.content.{number}", block.get("type")
        if kind == "thinking":
            thoughts.append(text_field(block, "thinking", where))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": text_field(block, "name", where), "arguments": arguments}
            calls.append({"id": text_field(block, "id", where), "type": "function", "function": function})
        else:
            texts += _block_texts(block, where, chat)
    message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text_of(content: object, place: str, chat: TranslatedChat, *, images: bool = False) -> str:
    """The text of blocks, a paragraph each. `images` may be there, and are left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ApiError(400, f"{place}: content is a text or a list of blocks.")
    blocks = ((f"{place}.content.{number}", block) for number, block in enumerate(content))
    return "\n\n".join(text for where, block in blocks for text in _block_texts(block, where, chat, images=images))


def _block_texts(block: Block, where: str, chat: TranslatedChat, *, images: bool = False) -> list[str]:
    """The text of a block; none if it is left out."""
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return [text_field(block, "text", where)]
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return [text_field(source, "data", f"{where}.source")]
    if kind in _FOREIGN or (kind == "image" and images):  # refused, the conversation could not go on
        chat.ignored.append(f"{where} ({kind})")
        return [NO_IMAGE] if kind == "image" else []
    raise ApiError(400, f"{where}: a block of type {json.dumps(kind)[:50]} is not supported here.")
