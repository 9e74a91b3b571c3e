"""A session's model as a chat model of LangChain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

from rekindle import Session
from rekindle.core.reply import Reply
from rekindle.core.request import DEFAULT_MAX_TOKENS, Request
from rekindle.core.tools import ToolCall
from rekindle.errors import InvalidPrompt
from rekindle.session.reply_stream import AsyncReplyStream
from rekindle.text.reasoning import ParsedReply, ReplyParser

_ROLES: Mapping[type, str] = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
    ToolMessage: "tool",
}


class ChatRekindle(BaseChatModel):
    """A session's model as a chat model.

    max_tokens, temperature, top_p, seed, stop   as `Session.chat` takes them: greedy unless a temperature is given
    tenant, cache_salt                           whose KV it is; default: the session's own
    options                                      any other option of `Session.chat`

    Every option can be given in a call, too. So can `documents=`: Documents, texts or {"text": ..., "title": ...},
    quoted by number before the first user message. `forget` finds all KV of library passages quoted so. A reply's
    `usage_metadata` says how many tokens were reused, its `response_metadata` has `rekindle` (where KV came from and
    why not more) and `timings`. Raises as `Session.chat` does.
    """

    session: Session = Field(exclude=True, repr=False)
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = Field(default_factory=list)
    tenant: str | None = None
    cache_salt: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "rekindle"

    @property
    def model_name(self) -> str:
        """The name of the session's model, for traces as well."""
        return self.session.engine.name

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.model_name, **self._options()}

    def bind_tools(
        self,
        tools: Sequence[Mapping[str, Any] | type | Callable[..., Any]],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable:
        """The model with tools: functions, pydantic classes, LangChain's tools or OpenAI's form.

        tool_choice   auto, none; any, required or True: it must call one; a tool's name: it must call that one.
                      This is enforced while the reply is generated.
        """
        forms = [convert_to_openai_tool(tool) for tool in tools]
        if tool_choice:
            kwargs["tool_choice"] = _choice(tool_choice)
        return self.bind(tools=forms, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        return self._result(self.session.answer(self._request(messages, stop, kwargs)).reply)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,  # noqa: ARG002
        **kwargs: Any,
    ) -> ChatResult:
        # Not LangChain's default, a thread: that would finish the reply even when the task is cancelled.
        request = await asyncio.to_thread(self._request, messages, stop, kwargs)
        async with AsyncReplyStream(self.session.answer(request)) as stream:
            return self._result(await stream.reply())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = self._request(messages, stop, kwargs)
        chunks = _MessageChunks(self.session, request)
        with self.session.answer(request) as stream:
            for piece in stream:
                chunk = chunks.of(piece)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            yield chunks.last(stream.reply)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request = await asyncio.to_thread(self._request, messages, stop, kwargs)
        chunks = _MessageChunks(self.session, request)
        async with AsyncReplyStream(self.session.answer(request)) as stream:
            async for piece in stream:
                chunk = chunks.of(piece)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            yield chunks.last(await stream.reply())

    def _options(self) -> dict[str, Any]:
        named = ("max_tokens", "temperature", "top_p", "seed", "stop", "tenant", "cache_salt")
        return {**{name: getattr(self, name) for name in named}, **self.options}

    def _request(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, overrides: Mapping[str, Any]
    ) -> Request:
        chosen = {**self._options(), **overrides}
        if stop is not None:
            chosen["stop"] = stop
        documents = [_passage(item) for item in chosen.pop("documents", None) or ()]
        whose = {name: chosen[name] for name in ("tenant", "cache_salt")}
        chosen["documents"] = self.session.knowledge.quotes(documents, **whose)
        return Request.of([one for message in messages for one in _messages(message)], **chosen)

    def _result(self, reply: Reply) -> ChatResult:
        message = AIMessage(
            content=reply.text,
            tool_calls=[_called(call) for call in reply.tool_calls],
            additional_kwargs=_thought(reply.thinking),
            usage_metadata=_usage(reply),
            response_metadata=_metadata(reply, self.session.engine.name, called=bool(reply.tool_calls)),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])


class _MessageChunks:
    """A reply as LangChain's chunks: text as it comes, tool calls whole, metadata with the last one."""

    def __init__(self, session: Session, request: Request) -> None:
        self._model = session.engine.name
        self._parser = ReplyParser(request, session.engine.tokenizer)

    def of(self, piece: str) -> ChatGenerationChunk:
        return ChatGenerationChunk(message=self._message(self._parser.add(piece)))

    def last(self, reply: Reply) -> ChatGenerationChunk:
        metadata = _metadata(reply, self._model, called=bool(reply.tool_calls))
        message = self._message(self._parser.finish(), usage_metadata=_usage(reply), response_metadata=metadata)
        return ChatGenerationChunk(message=message)

    def _message(self, parsed: ParsedReply, **fields: Any) -> AIMessageChunk:
        calls = [
            {
                "type": "tool_call_chunk",
                "index": delta.index,
                "id": delta.call.id,
                "name": delta.call.name,
                "args": delta.call.arguments,
            }
            for delta in parsed.calls
        ]
        thought = _thought(parsed.thinking)
        return AIMessageChunk(content=parsed.content, tool_call_chunks=calls, additional_kwargs=thought, **fields)


def _thought(thinking: str) -> dict[str, Any]:
    """Where LangChain's own models have it."""
    return {"reasoning_content": thinking} if thinking else {}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "input_tokens": reply.usage.prompt_tokens,
        "output_tokens": reply.usage.completion_tokens,
        "total_tokens": reply.usage.total_tokens,
        "input_token_details": {"cache_read": reply.usage.cached_tokens},
    }


def _metadata(reply: Reply, model: str, *, called: bool) -> dict[str, Any]:
    reason = "tool_calls" if called else reply.finish_reason
    told = reply.as_dict()
    left = {name: told["usage"][name] for name in ("quoted_passages", "dropped_messages")}
    about = {"rekindle": {**told["reuse"], **left}, "timings": told["timings"]}
    return {"model_name": model, "finish_reason": reason, **about}


def _called(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_call", "id": call.id, "name": call.name, "args": json.loads(call.arguments)}


def _choice(choice: str | bool | Mapping[str, Any]) -> str | Mapping[str, Any]:
    """LangChain's tool choice as OpenAI's."""
    if choice is True or choice == "any":
        return "required"
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": choice}}
    assert not isinstance(choice, bool)
    return choice


def _passage(item: Any) -> Any:
    """A Document as the session takes it; anything else as it is."""
    if not isinstance(item, Document):
        return item
    title = item.metadata.get("title")
    return {**item.metadata, "text": item.page_content, "title": title if isinstance(title, str) else ""}


def _messages(message: BaseMessage) -> list[dict[str, Any]]:
    """A message as the session takes it; results of tools that are parts of it come first, as messages of their own.

    Raises `InvalidPrompt` for other roles and content.
    """
    role = next((role for kind, role in _ROLES.items() if isinstance(message, kind)), None)
    if isinstance(message, ChatMessage):
        role = message.role
    if role is None:
        raise InvalidPrompt(f"A {type(message).__name__} cannot be answered. Use human, ai, system and tool messages.")
    parts = [message.content] if isinstance(message.content, str) else message.content
    results = [part for part in parts if _kind(part) == "tool_result"] if role == "user" else []
    rest = [part for part in parts if part not in results]
    unread = _CALLS + _THOUGHTS if isinstance(message, AIMessage) else ()
    made: dict[str, Any] = {"role": role, "content": _text([part for part in rest if _kind(part) not in unread])}
    if message.name:
        made["name"] = message.name
    if isinstance(message, AIMessage):
        if calls := _calls(message, parts):
            made["tool_calls"] = [call.as_openai() for call in calls]
        if thoughts := [str(part.get(kind) or "") for part, kind in _mappings(parts) if kind in _THOUGHTS]:
            made["reasoning_content"] = "\n".join(thoughts)
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    found = [_result_message(part) for part in results]
    return [*found, made] if rest or not found else found


_Part = str | Mapping[str, Any]
# Parts of replies, as Anthropic's models and LangChain's standard write them.
_CALLS = ("tool_use", "tool_call")
_THOUGHTS = ("thinking", "reasoning")


def _kind(part: _Part) -> Any:
    return "text" if isinstance(part, str) else part.get("type")


def _mappings(parts: Sequence[_Part]) -> list[tuple[Mapping[str, Any], Any]]:
    """The parts that are no plain text, each with its type."""
    return [(part, part.get("type")) for part in parts if not isinstance(part, str)]


def _calls(message: AIMessage, parts: Sequence[_Part]) -> list[ToolCall]:
    """The tool calls of a reply. They may be parts of its content, too: those that are nowhere else count as well."""
    calls = [ToolCall(call["id"] or "", call["name"], json.dumps(call["args"])) for call in message.tool_calls]
    known = {call.id for call in calls}
    for part, kind in _mappings(parts):
        if kind in _CALLS and part.get("id") not in known:
            arguments = part.get("input", part.get("args", {}))
            calls.append(ToolCall(str(part.get("id") or ""), str(part.get("name")), json.dumps(arguments)))
    return calls


def _result_message(part: _Part) -> dict[str, Any]:
    """What a tool gave, as Anthropic's clients send it: as a part of the user's message."""
    assert isinstance(part, Mapping)
    content = _text(part.get("content") or "")
    return {"role": "tool", "content": content, "tool_call_id": str(part.get("tool_use_id") or "")}


def _text(content: str | Sequence[_Part]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidPrompt(f"A part of type {_kind(part)!r} is not supported: only text is. Leave it out.")
        texts.append(text)
    return "".join(texts)
