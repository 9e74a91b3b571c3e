"""From a request to the tokens of its prompt, within the model's context."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rekindle.core.chunk import LEAST_CHUNK_TOKENS, Outline
from rekindle.core.kv import Span
from rekindle.core.reply import Reply
from rekindle.core.request import Message, Request
from rekindle.engine.base import Engine, Written
from rekindle.errors import ContextOverflow, InvalidPrompt


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
    head: int = 0  # so many tokens stand before them

    @property
    def outline(self) -> Outline | None:
        """Where the passages stand that are long enough to be worth finding; None if none is."""
        long = {number: used.span for number, used in enumerate(self.quoted, 1) if len(used.span) >= LEAST_CHUNK_TOKENS}
        return Outline(self.head, tuple(long.values()), tuple(long)) if long else None


def encode_prompt(engine: Engine, request: Request, written: Written | None = None) -> PromptTokens:
    """The prompt's tokens, with room for at least one more. Raises `InvalidPrompt` or `ContextOverflow`.

    `written` has the tokens of replies that shall stand in for their text.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        encoded = PromptTokens(tuple(engine.tokenizer.encode(prompt)))
    elif isinstance(prompt[0], Message):
        messages = [m for m in prompt if isinstance(m, Message)]
        if request.quotes:
            encoded = _encode_quoting(engine, messages, request)
        else:
            encoded = _encode_chat(engine, messages, request, written)
    else:
        encoded = PromptTokens(_checked_ids(prompt, engine.tokenizer.vocabulary_size))
    if not encoded.tokens:
        raise InvalidPrompt("The prompt has no tokens. Give some text.")
    if len(encoded.tokens) > _room(engine, request):
        raise ContextOverflow(len(encoded.tokens), engine.context_tokens, _advice(request))
    return encoded


def _encode_chat(engine: Engine, messages: list[Message], request: Request, written: Written | None) -> PromptTokens:
    tokens = engine.tokenizer.encode_chat(messages, written, tools=request.tools)
    dropped = 0
    while request.overflow == "drop-oldest" and len(tokens) > _room(engine, request):
        if _oldest_droppable(messages) is None:
            break
        dropped += _drop_oldest_turn(messages)
        tokens = engine.tokenizer.encode_chat(messages, written, tools=request.tools)
    return PromptTokens(tuple(tokens), dropped)


def _encode_quoting(engine: Engine, messages: list[Message], request: Request) -> PromptTokens:
    """As `_encode_chat`, with the first passages that fit, each behind its number; a quarter is left for the reply."""
    texts = [text for number, quote in enumerate(request.quotes) for text in (f"[{number + 1}] ", quote.shown)]
    reply = min(request.max_tokens, max(1, engine.context_tokens // 4))
    dropped = 0
    while True:
        parts = engine.tokenizer.encode_quoting(messages, texts, tools=request.tools)
        room = engine.context_tokens - reply - len(parts.before) - len(parts.after)
        if room > 0 or request.overflow != "drop-oldest" or _oldest_droppable(messages) is None:
            break
        dropped += _drop_oldest_turn(messages)
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


def _drop_oldest_turn(messages: list[Message]) -> int:
    """Drop the oldest message and whatever answered it: what is left begins with a user again."""
    dropped = 0
    while (oldest := _oldest_droppable(messages)) is not None and (dropped == 0 or messages[oldest].role != "user"):
        del messages[oldest]
        dropped += 1
    return dropped


def _oldest_droppable(messages: list[Message]) -> int | None:
    """The oldest message that is neither an instruction nor the last one."""
    for index, message in enumerate(messages[:-1]):
        if message.role not in ("system", "developer"):
            return index
    return None


def _room(engine: Engine, request: Request) -> int:
    """How long a prompt may be: one token of the reply must fit, unless none is wanted."""
    return engine.context_tokens - min(1, request.max_tokens)


def _advice(request: Request) -> str:
    messages = [m for m in request.prompt if isinstance(m, Message)]
    if request.overflow == "refuse" and _oldest_droppable(messages) is not None:
        return "Shorten it, or let the oldest messages go with overflow='drop-oldest'."
    if messages and request.overflow == "drop-oldest":
        return "The system messages and the last message alone are too long: shorten them."
    return "Shorten it."


def _checked_ids(ids: tuple[object, ...], vocabulary_size: int) -> tuple[int, ...]:
    tokens = tuple(int(i) for i in ids)  # type: ignore[call-overload]
    wrong = [token for token in tokens if not 0 <= token < vocabulary_size]
    if wrong:
        raise InvalidPrompt(f"Token id {wrong[0]} is outside the model's vocabulary of {vocabulary_size:,}.")
    return tokens


class WrittenReplies(Mapping[str, Sequence[int]]):
    """The tokens of the last replies, by their text. Used from several threads."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._tokens: dict[str, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def note(self, engine: Engine, reply: Reply) -> None:
        """Remember a reply, if its tokens decode to exactly its text."""
        stops = engine.tokenizer.stop_ids
        tokens = reply.tokens[:-1] if reply.tokens and reply.tokens[-1] in stops else reply.tokens
        if tokens and engine.tokenizer.decode(tokens) == reply.text:
            with self._lock:
                self._tokens.pop(reply.text, None)
                self._tokens[reply.text] = tokens
                while len(self._tokens) > self._most:
                    del self._tokens[next(iter(self._tokens))]

    def __getitem__(self, text: str) -> tuple[int, ...]:
        return self._tokens[text]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._tokens))

    def __len__(self) -> int:
        return len(self._tokens)
