"""A session's model as an LLM of LlamaIndex."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, MessageRole
from llama_index.core.bridge.pydantic import Field
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore

from rekindle import Session
from rekindle.core.reply import Reply
from rekindle.core.request import DEFAULT_MAX_TOKENS, PromptLike, Request
from rekindle.errors import InvalidPrompt, InvalidSetting
from rekindle.session.reply_stream import AsyncReplyStream

# By name: older versions have fewer of them.
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("chatbot", "model"), "assistant"),
}
_TEMPLATE_FIELDS = ("name", "tool_calls", "tool_call_id")  # of a message, besides its text


class RekindleLLM(CustomLLM):
    """A session's model as an LLM.

    max_tokens, temperature, top_p, seed   as `Session.chat` takes them: greedy unless a temperature is given
    tenant, cache_salt                     of the KV; default: the session's own
    options                                any other option of `Session.chat`, but tools

    Every option can be given in a call, too. So can `documents=`: nodes, texts or {"text": ..., "title": ...}, quoted
    by number before the first user message. `forget` finds all KV of library passages quoted so.

    A response's `raw` is the reply as plain values; its `additional_kwargs` have token counts, `rekindle`
    (where KV came from and why not more) and `timings`. Raises as `Session.chat` does.
    """

    session: Session = Field(exclude=True, repr=False)
    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name for the class."""
        return "RekindleLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Context size and name of the model."""
        engine = self.session.engine
        return LLMMetadata(
            context_window=engine.context_tokens,
            num_output=min(self.max_tokens, engine.context_tokens),
            is_chat_model=True,
            model_name=engine.name,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a chat."""
        return _reply(self.session, self._request(_chat(messages), kwargs)).chat()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        """The same, piece by piece. The last one adds no text but the metadata."""
        partial = _stream(self.session, self._request(_chat(messages), kwargs))
        return (each.chat() for each in partial)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for coroutines: cancelling the task stops the model."""
        request = await asyncio.to_thread(self._request, _chat(messages), kwargs)
        return (await _areply(self.session, request)).chat()

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        """`stream_chat` for coroutines."""
        request = await asyncio.to_thread(self._request, _chat(messages), kwargs)
        return (each.chat() async for each in _astream(self.session, request))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text. One already formatted for the model is continued as it is."""
        return _reply(self.session, self._request(_text(prompt, formatted), kwargs)).completion()

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Generator[CompletionResponse, None, None]:
        """The same, piece by piece. The last one adds no text but the metadata."""
        partial = _stream(self.session, self._request(_text(prompt, formatted), kwargs))
        return (each.completion() for each in partial)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` for coroutines: cancelling the task stops the model."""
        request = await asyncio.to_thread(self._request, _text(prompt, formatted), kwargs)
        return (await _areply(self.session, request)).completion()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        """`stream_complete` for coroutines."""
        request = await asyncio.to_thread(self._request, _text(prompt, formatted), kwargs)
        return (each.completion() async for each in _astream(self.session, request))

    def _request(self, prompt: PromptLike, overrides: Mapping[str, Any]) -> Request:
        named = ("max_tokens", "temperature", "top_p", "seed", "tenant", "cache_salt")
        chosen = {**{name: getattr(self, name) for name in named}, **self.options, **overrides}
        if chosen.get("tools"):
            raise InvalidSetting("This LLM calls no tools. Use an agent that asks in words, such as ReActAgent.")
        documents = [_passage(item) for item in chosen.pop("documents", None) or ()]
        whose = {name: chosen[name] for name in ("tenant", "cache_salt")}
        chosen["documents"] = self.session.knowledge.quotes(documents, **whose)
        return Request.of(prompt, **chosen)


@dataclass(frozen=True, slots=True)
class _PartialReply:
    """The text so far, the new part of it, and the reply when it is complete."""

    text: str
    new: str | None = None
    reply: Reply | None = None

    def chat(self) -> ChatResponse:
        message = ChatMessage(role=MessageRole.ASSISTANT, content=self.text)
        return ChatResponse(message=message, delta=self.new, raw=self._raw(), additional_kwargs=self._metadata())

    def completion(self) -> CompletionResponse:
        return CompletionResponse(text=self.text, delta=self.new, raw=self._raw(), additional_kwargs=self._metadata())

    def _raw(self) -> dict[str, Any] | None:
        return None if self.reply is None else self.reply.as_dict()

    def _metadata(self) -> dict[str, Any]:
        if self.reply is None:
            return {}
        told = self.reply.as_dict()
        counts = {name: told["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        left = {name: told["usage"][name] for name in ("quoted_passages", "dropped_messages")}
        return {**counts, "rekindle": {**told["reuse"], **left}, "timings": told["timings"]}


def _reply(session: Session, request: Request) -> _PartialReply:
    reply = session.answer(request).reply
    return _PartialReply(reply.text, reply=reply)


async def _areply(session: Session, request: Request) -> _PartialReply:
    async with AsyncReplyStream(session.answer(request)) as stream:
        reply = await stream.reply()
    return _PartialReply(reply.text, reply=reply)


def _stream(session: Session, request: Request) -> Generator[_PartialReply, None, None]:
    text = ""
    with session.answer(request) as stream:
        for piece in stream:
            text += piece
            yield _PartialReply(text, str(piece))
        yield _PartialReply(text, "", stream.reply)


async def _astream(session: Session, request: Request) -> AsyncGenerator[_PartialReply, None]:
    text = ""
    async with AsyncReplyStream(session.answer(request)) as stream:
        async for piece in stream:
            text += piece
            yield _PartialReply(text, str(piece))
        yield _PartialReply(text, "", await stream.reply())


def _passage(item: Any) -> Any:
    """A node as the session takes it; anything else as it is."""
    node = item.node if isinstance(item, NodeWithScore) else item
    if not isinstance(node, BaseNode):
        return item
    text, title = node.get_content(metadata_mode=MetadataMode.NONE), node.metadata.get("title")
    return {**node.metadata, "text": text, "title": title if isinstance(title, str) else ""}


def _text(prompt: str, formatted: bool) -> PromptLike:
    return prompt if formatted else [{"role": "user", "content": prompt}]


def _chat(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    return [_message(message) for message in messages]


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as the session takes it. Raises `InvalidPrompt` for other roles and content."""
    role = _ROLES.get(message.role.value)
    if role is None:
        raise InvalidPrompt(f"A message of the role {message.role.value!r} cannot be answered. Use 'tool' instead.")
    other = next((block.block_type for block in message.blocks if block.block_type != "text"), None)
    if other is not None:
        raise InvalidPrompt(f"A block of type {other!r} is not supported: only text is. Leave it out.")
    extra = {name: message.additional_kwargs[name] for name in _TEMPLATE_FIELDS if name in message.additional_kwargs}
    return {"role": role, "content": message.content or "", **extra}
