"""Anthropic's API: /v1/messages and /v1/messages/count_tokens.

system, messages   a system message, then user, assistant, tool and system messages in their order
tool_use           a tool call of an assistant message; tool_result: a message of a tool
thinking           the `reasoning_content` of an assistant message, which templates read

Other fields are allowed, and named in the reply (`rekindle.ignored`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt
from starlette.responses import JSONResponse, Response

from rekindle.core.reply import Reply, Reuse
from rekindle.core.request import MAX_STOPS, Options, Request
from rekindle.server.body import NO_IMAGE, ReplyLength, TranslatedChat, agent_options, text_field
from rekindle.server.call import Call
from rekindle.server.errors import ApiError
from rekindle.server.job import Finished, ThoughtDelta
from rekindle.server.pending_reply import PendingReply, begin_chat
from rekindle.server.protocol import WireProtocol, error_kind, typed_frame
from rekindle.server.reply_fields import new_id
from rekindle.server.reply_form import grammar_of
from rekindle.server.schema import AgentBody, CacheBody, Items, RequestBody, ResponseFormat, Stop, Text
from rekindle.text.tools.parse import CallDelta


class TurnMessage(RequestBody):
    """A message of Anthropic's API: a text or blocks."""

    role: Literal["user", "assistant", "system"]
    content: Text | Items[dict[str, Any]]


class NamedTool(RequestBody):
    """A tool of the client, or one that Anthropic's servers would run, which is left out."""

    type: Text | None = None
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: StrictBool | None = None


class ToolPolicy(RequestBody):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: StrictBool | None = None


class CallerMetadata(RequestBody):
    """Who asks."""

    user_id: Text | None = Field(None, description="Used as app_id if that is missing.")


class CountTokensRequest(CacheBody):
    """The body of /v1/messages/count_tokens."""

    model: Text | None = Field(None, description="One of /v1/models; default: the base model.")
    messages: Items[TurnMessage] = Field(min_length=1)
    system: Text | Items[dict[str, Any]] | None = None
    tools: Items[NamedTool] | None = None
    tool_choice: ToolPolicy | None = None
    metadata: CallerMetadata | None = None
    cache_control: dict[str, Any] | None = Field(None, description="Accepted: every prompt is cached.")

    @property
    def app(self) -> str:
        """The app id; Claude Code sends one for each conversation."""
        sent = self.metadata.user_id if self.metadata is not None else None
        return super().app or (sent or "")[:256]

    @property
    def caches(self) -> bool:
        """Whether something is marked with `cache_control`."""
        system = self.system if isinstance(self.system, list) else []
        blocks = [block for m in self.messages if isinstance(m.content, list) for block in m.content]
        tools = [tool.model_extra or {} for tool in self.tools or ()]
        return self.cache_control is not None or any("cache_control" in one for one in (*system, *blocks, *tools))


class OutputConfig(RequestBody):
    """How the reply shall be."""

    format: ResponseFormat | None = None


class MessagesRequest(CountTokensRequest, AgentBody):
    """The body of /v1/messages."""

    max_tokens: StrictInt = Field(ge=0, lt=2**31)
    output_config: OutputConfig | None = None
    output_format: ResponseFormat | None = Field(None, description="The older name of `output_config.format`.")
    stop_sequences: Annotated[Items[Stop], Field(max_length=MAX_STOPS)] | None = None


# What only Anthropic's servers write or read.
_FOREIGN = ("redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "mcp_tool_use",
            "mcp_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result", "tool_reference", "container_upload")  # fmt: skip

Block = Mapping[str, Any]


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
    options = agent_options(body, tenant, body.max_tokens, length)
    config = body.output_config or OutputConfig.model_validate({})
    options["grammar"] = grammar_of(body, "output_config.format", config.format or body.output_format)
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


_KINDS = {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
_PING = {"type": "ping"}


def anthropic_error(problem: ApiError) -> dict[str, Any]:
    """An error in Anthropic's format."""
    kind, message = error_kind(problem, _KINDS, "api_error"), problem.message
    if problem.overflow is not None:  # in the words that make Claude Code shorten its history
        message = "prompt is too long: {} tokens > {} maximum. {}".format(*problem.overflow, message)
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = WireProtocol("Anthropic", anthropic_error, typed_frame, ping=typed_frame(_PING))


async def answer_messages(call: Call, body: MessagesRequest) -> Response:
    """The reply to a chat in Anthropic's format, whole or as a stream."""
    chat = translate_chat(body)
    request = messages_request(body, chat, call.caller.tenant, call.service.reply_length())
    pending = await begin_chat(call, body, request, ignored=chat.ignored)
    head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": pending.model}

    def whole(replies: list[Reply]) -> dict[str, Any]:
        (reply,) = replies
        ended = {**_stopped(reply), "usage": _usage(body, reply.reuse, reply.usage.completion_tokens)}
        return {**head, "content": _blocks(reply), **ended, "rekindle": pending.about(reply)}

    start = {**head, "content": [], **_stopped(None)}
    return await pending.respond(body.stream, partial(_events, pending, body, start), whole)


async def count_tokens(call: Call, body: CountTokensRequest) -> Response:
    """The number of tokens of a chat in Anthropic's format."""
    call.adapter_of(body.model)
    chat = translate_chat(body)
    request, dropped = call.canonical(Request.of(chat.messages, tools=chat.tools))
    tokens = len(await call.encode_chat(request, token_limit=call.service.session.engine.context_tokens))
    about = {"ignored": sorted([*call.ignored(body), *chat.ignored, *dropped])}
    return JSONResponse({"input_tokens": tokens, "rekindle": about})


def _usage(body: MessagesRequest, reuse: Reuse, written: int) -> dict[str, int]:
    """Their sum is the whole prompt. Computed tokens count as cached now if the request marks anything to be cached."""
    created = reuse.computed if body.caches and reuse.level != "off" else 0
    return {
        "input_tokens": reuse.computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": reuse.reused,
        "output_tokens": written,
    }


def _stopped(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason = {"stop": "tool_use" if reply.tool_calls else "end_turn", "length": "max_tokens"}.get(reply.finish_reason)
    if reply.stopped_by is not None and not reply.tool_calls:
        reason = "stop_sequence"
    return {"stop_reason": reason or reply.finish_reason, "stop_sequence": reply.stopped_by}


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.thinking:
        blocks.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


async def _events(
    pending: PendingReply, body: MessagesRequest, start: Mapping[str, Any], planned: Reuse
) -> AsyncGenerator[Mapping[str, Any], None]:
    """The events of a stream, from message_start to message_stop."""
    yield {"type": "message_start", "message": {**start, "usage": _usage(body, planned, 0)}}
    yield _PING
    blocks = _BlockEvents()
    async with aclosing(pending.parts()) as parts:
        async for item in parts:
            if isinstance(item.part, Finished):
                for event in blocks.close():
                    yield event
                reply = item.part.reply
                usage = _usage(body, reply.reuse, reply.usage.completion_tokens)
                about = pending.about(reply)
                yield {"type": "message_delta", "delta": _stopped(reply), "usage": usage, "rekindle": about}
                yield {"type": "message_stop"}
            else:
                for event in blocks.add(item.part):
                    yield event


class _BlockEvents:
    """The events of content blocks: each is opened, filled and closed."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None  # the type of the open block

    def add(self, part: ThoughtDelta | str | CallDelta) -> list[dict[str, Any]]:
        if isinstance(part, ThoughtDelta):
            block: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}
            opened = [] if self._open == "thinking" else self._begin(block)
            return [*opened, self._delta({"type": "thinking_delta", "thinking": part.text})]
        if isinstance(part, str):
            opened = [] if self._open == "text" else self._begin({"type": "text", "text": ""})
            return [*opened, self._delta({"type": "text_delta", "text": part})]
        block = {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
        return [*self._begin(block), self._delta(delta), *self.close()]

    def close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _begin(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        closed = self.close()
        self._index += 1
        self._open = block["type"]
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
