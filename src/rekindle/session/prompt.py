"""From a request to the tokens of its prompt, within the model's context."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rekindle.core.chunk import MIN_CHUNK_TOKENS, PromptLayout
from rekindle.core.kv import Span
from rekindle.core.reply import Reply
from rekindle.core.request import Message, Request
from rekindle.core.scope import Scope, scope_of
from rekindle.core.tools import ToolCall
from rekindle.engine.base import Engine
from rekindle.engine.lora_manager import LoraManager
from rekindle.errors import ContextOverflow, InvalidPrompt
from rekindle.settings import Settings
from rekindle.text.base import QuotedChat, ReplayedChat, TemplateOptions, WrittenReply, cancellable

_Encoded = TypeVar("_Encoded")
_HEADER_TOKENS = 32  # of a prompt, in which the template says who speaks next


@dataclass(frozen=True, slots=True)
class Quoted:
    """A passage in a prompt: which of the request's quotes it is, and where it stands. `cut`: only its beginning."""

    index: int
    span: Span
    cut: bool = False


@dataclass(frozen=True)
class PromptTokens:
    """The tokens to prefill, and what had to be left out for them to fit."""

    tokens: tuple[int, ...]
    dropped_messages: int = 0
    quoted: tuple[Quoted, ...] = ()  # the passages that fit
    head: int = 0  # number of tokens before them
    replayed_replies: int = 0  # number of replies that are as the model generated them

    @property
    def prompt_layout(self) -> PromptLayout | None:
        """Where the passages stand that are long enough to be worth finding; None if none is."""
        long = {number: used.span for number, used in enumerate(self.quoted, 1) if len(used.span) >= MIN_CHUNK_TOKENS}
        return PromptLayout(self.head, tuple(long.values()), tuple(long)) if long else None


def encode_prompt(
    engine: Engine,
    request: Request,
    written: WrittenReplies | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> PromptTokens:
    """The prompt's tokens, with room for at least one more. Raises `InvalidPrompt`, `ContextOverflow` or `Cancelled`.

    `written` has the replies whose generated tokens shall stand in for their text.
    """
    last = request.prompt[-1]
    if request.max_tokens and isinstance(last, Message) and last.role == "assistant" and not last.is_continued:
        raise InvalidPrompt("The last message calls tools. Send the result of each call behind it, as role 'tool'.")
    try:
        with cancellable(cancelled):
            encoded = _encode(engine, request, written)
    except ContextOverflow as found:  # by its length
        raise _overflow(engine, request, found.prompt_tokens, counted=False) from None
    if not encoded.tokens:
        raise InvalidPrompt("The prompt has no tokens. Give some text.")
    if len(encoded.tokens) > _room(engine, request):
        raise _overflow(engine, request, len(encoded.tokens))
    return encoded


def _encode(engine: Engine, request: Request, written: WrittenReplies | None) -> PromptTokens:
    prompt = request.prompt
    if isinstance(prompt, str):
        return PromptTokens(tuple(engine.tokenizer.encode(prompt, token_limit=_room(engine, request))))
    if isinstance(prompt[0], Message):
        messages = [m for m in prompt if isinstance(m, Message)]
        if request.quotes:
            return _encode_quoting(engine, messages, request)
        return _encode_chat(engine, messages, request, written)
    return PromptTokens(_checked_ids(prompt, engine.tokenizer.vocabulary_size))


def _encode_chat(
    engine: Engine, messages: list[Message], request: Request, written: WrittenReplies | None
) -> PromptTokens:
    room = _room(engine, request)

    def encode(kept: list[Message]) -> ReplayedChat:
        return _encode_messages(engine, kept, request, written, room)

    chat, dropped = _drop_until(messages, request, encode, lambda chat: len(chat.tokens) <= room)
    return PromptTokens(tuple(chat.tokens), dropped, replayed_replies=chat.replies)


def _encode_messages(
    engine: Engine, messages: list[Message], request: Request, written: WrittenReplies | None, room: int
) -> ReplayedChat:
    how = template_options(request, room)
    found = {} if written is None else written.standing_for(request, messages)
    if found:
        return engine.tokenizer.encode_replayed(messages, found, **how)
    return ReplayedChat(engine.tokenizer.encode_chat(messages, **how))


def template_options(request: Request, token_limit: int | None) -> TemplateOptions:
    """What the chat of a request is encoded with.

    A model that may call some of the tools reads of these alone; one that must call reads of all, because a grammar
    keeps it to them, and the prompt stays the same.
    """
    choice, tools = request.tool_choice, request.tools
    if choice.allowed and not choice.forces:
        tools = tuple(tool for tool in tools if choice.permits(tool))
    return {
        "tools": tools,
        "think": request.think,
        "token_limit": token_limit,
        "add_generation_prompt": request.add_generation_prompt,
    }


def _encode_quoting(engine: Engine, messages: list[Message], request: Request) -> PromptTokens:
    """As `_encode_chat`, with the first passages that fit, each behind its number; a quarter is left for the reply."""
    texts = [text for number, quote in enumerate(request.quotes) for text in (f"[{number + 1}] ", quote.shown)]
    most = engine.context_tokens
    reply = min(request.max_tokens, max(1, most // 4))

    def encode(kept: list[Message]) -> QuotedChat:
        return engine.tokenizer.encode_quoting(kept, texts, **template_options(request, most))

    def room_for_quotes(parts: QuotedChat) -> int:
        return most - reply - len(parts.before) - len(parts.after)

    parts, dropped = _drop_until(messages, request, encode, lambda parts: room_for_quotes(parts) > 0)
    room = room_for_quotes(parts)
    marks, bodies = parts.quotes[::2], parts.quotes[1::2]
    if all(len(marks[0]) + len(body) > room for body in bodies):
        bodies = [bodies[0][: max(0, room - len(marks[0]))]]  # better a part of the best one than nothing
    tokens, quoted = list(parts.before), list[Quoted]()
    for index, body in enumerate(bodies):
        mark = marks[len(quoted)]  # a passage that is left out leaves its number to the next one
        if body and len(mark) + len(body) <= room:
            tokens += mark
            span = Span(len(tokens), len(tokens) + len(body))
            tokens += body
            quoted.append(Quoted(index, span, cut=len(body) < len(parts.quotes[2 * index + 1])))
            room -= len(mark) + len(body)
    return PromptTokens((*tokens, *parts.after), dropped, tuple(quoted), len(parts.before))


def _drop_until(
    messages: list[Message],
    request: Request,
    encode: Callable[[list[Message]], _Encoded],
    fits: Callable[[_Encoded], bool],
) -> tuple[_Encoded, int]:
    """The chat without as few of its oldest turns as fits, and the number of messages that were dropped.

    Turns are left out by bisection: a chat of thousands is rendered and tokenized a few times only.
    """
    droppable = _droppable(messages) if request.overflow == "drop-oldest" else []
    # What is left after a turn was dropped begins with a user again.
    later = (place for place, index in enumerate(droppable) if place and messages[index].role == "user")
    drops = [0, *later, *([len(droppable)] if droppable else [])]

    def attempt(step: int) -> _Encoded | None:
        dropped = set(droppable[: drops[step]])
        try:
            encoded = encode([message for index, message in enumerate(messages) if index not in dropped])
        except ContextOverflow:
            if step == len(drops) - 1:
                raise
            return None
        return encoded if step == len(drops) - 1 or fits(encoded) else None

    too_long, step = -1, 0
    while (found := attempt(step)) is None:
        too_long, step = step, min(2 * step + 1, len(drops) - 1)
    while step - too_long > 1:
        middle = (too_long + step) // 2
        if (shorter := attempt(middle)) is None:
            too_long = middle
        else:
            found, step = shorter, middle
    return found, drops[step]


def _droppable(messages: Sequence[Message]) -> list[int]:
    """The messages that are neither instructions nor the last one."""
    return [at for at, message in enumerate(messages[:-1]) if message.role not in ("system", "developer")]


def _room(engine: Engine, request: Request) -> int:
    """How long a prompt may be: one token of the reply must fit, unless none is wanted."""
    return engine.context_tokens - min(1, request.max_tokens)


def _overflow(engine: Engine, request: Request, tokens: int, *, counted: bool = True) -> ContextOverflow:
    return ContextOverflow(
        tokens, engine.context_tokens, _advice(request), counted=counted, longest=engine.longest_context
    )


def _advice(request: Request) -> str:
    messages = [m for m in request.prompt if isinstance(m, Message)]
    if request.overflow == "refuse" and _droppable(messages):
        return "Shorten it, or let the oldest messages go with overflow='drop-oldest'."
    if messages and request.overflow == "drop-oldest":
        return "The system messages and the last message alone are too long: shorten them."
    return "Shorten it."


def _checked_ids(ids: tuple[object, ...], vocabulary_size: int) -> tuple[int, ...]:
    tokens = tuple(map(int, ids))  # type: ignore[arg-type]
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocabulary_size:
            raise InvalidPrompt(f"Token id {token} is outside the model's vocabulary of {vocabulary_size:,}.")
    return tokens


class EncodedPrompts:
    """Prompts encoded before their request is answered: to know its sources, or while it waits. Thread-safe."""

    def __init__(self, max_prompts: int = 64) -> None:
        self._prompts: dict[int, tuple[Request, PromptTokens]] = {}  # by the identity of the request
        self._max_prompts = max_prompts
        self._lock = threading.Lock()

    def put(self, request: Request, prompt: PromptTokens) -> None:
        """Keep a prompt until its request is answered, or too many others came."""
        with self._lock:
            self._prompts[id(request)] = request, prompt
            while len(self._prompts) > self._max_prompts:
                del self._prompts[next(iter(self._prompts))]

    def take(self, request: Request) -> PromptTokens | None:
        """The prompt of a request; None if it was not encoded yet."""
        with self._lock:
            found = self._prompts.pop(id(request), None)
        return None if found is None else found[1]


_ReplyKey = tuple[str, str | None, bytes]  # salt, adapter, digest of the chat up to and including the reply


class WrittenReplies:
    """The last replies of a session as they were generated, if it keeps them. Used from several threads.

    A request is only given those to its own scope and adapter: others' must not change how a prompt is read.
    """

    def __init__(self, settings: Settings, adapters: LoraManager, most: int = 256, max_tenants: int = 64) -> None:
        """Remembers a number of replies for each tenant, under all its salts, of the tenants answered last."""
        self._settings, self._adapters = settings, adapters
        self._most, self._max_tenants = most, max_tenants
        self._tenants: dict[str, dict[_ReplyKey, WrittenReply]] = {}
        self._lock = threading.Lock()

    def standing_for(self, request: Request, messages: Sequence[Message]) -> dict[int, WrittenReply]:
        """The replies among the messages, by their index, whose chat up to there was answered with them.

        Its thoughts have to be the same: what a client leaves out stays left out. Spacing and key order of arguments
        do not matter.
        """
        if not self._settings.keep_reply_tokens:
            return {}
        scope, adapter = self._whose(request)
        with self._lock:
            known = dict(self._tenants.get(scope.tenant, {}))
        found = {}
        for at, digest in enumerate(_chat_digests(messages) if known else ()):
            reply = known.get((scope.salt, adapter, digest)) if messages[at].role == "assistant" else None
            thought = messages[at].extra.get("reasoning_content") or ""
            if reply is not None and str(thought).strip() == reply.thinking.strip():
                found[at] = reply
        return found

    def note(self, engine: Engine, prompt: PromptTokens, request: Request, reply: Reply) -> None:
        """Remember the reply to a chat, if the model ended it, or if its tokens decode to exactly its text.

        The oldest replies go for it.
        """
        messages = [m for m in request.prompt if isinstance(m, Message)]
        ended = bool(reply.tokens) and reply.tokens[-1] in engine.tokenizer.stop_ids
        tokens = reply.tokens[:-1] if ended else reply.tokens
        if not self._settings.keep_reply_tokens or not messages or not tokens or messages[-1].is_continued:
            return
        if not (ended or engine.tokenizer.decode(tokens) == reply.text):
            return
        calls = [call.as_openai() for call in reply.tool_calls]
        *_, digest = _chat_digests([*messages, Message("assistant", reply.text, {"tool_calls": calls})])
        written = WrittenReply(tokens, reply.thinking, prompt.tokens[-_HEADER_TOKENS:])
        scope, adapter = self._whose(request)
        with self._lock:
            own = self._tenants.pop(scope.tenant, {})
            self._tenants[scope.tenant] = own  # the last one stands last
            own.pop((scope.salt, adapter, digest), None)
            own[scope.salt, adapter, digest] = written
            while len(own) > self._most:
                del own[next(iter(own))]
            while len(self._tenants) > self._max_tenants:
                del self._tenants[next(iter(self._tenants))]

    def _whose(self, request: Request) -> tuple[Scope, str | None]:
        scope = scope_of(self._settings, request.tenant, request.cache_salt)
        return scope, self._adapters.digest(request.adapter)


def _chat_digests(messages: Sequence[Message]) -> Iterator[bytes]:
    """A digest of the chat up to each message, without thoughts and with arguments in one spelling."""
    state = hashlib.blake2b(digest_size=16)
    for message in messages:
        sent = message.extra.get("tool_calls")
        calls = [ToolCall.parse(item) for item in (sent if isinstance(sent, list) else ())]  # else refused later
        named = [(call.name, call.canonical_arguments) for call in calls]
        state.update(json.dumps([message.role, message.content.strip(), named]).encode())
        yield state.digest()
