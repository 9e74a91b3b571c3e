"""Requests to a session: prompt, sampling, options."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args

from rekindle.core.document import Quote
from rekindle.core.scope import AppRef, AppState, Scope
from rekindle.core.tools import Tool, ToolChoice, parse_tools
from rekindle.errors import InvalidPrompt, InvalidSampling, InvalidSetting, nearest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from rekindle.core.grammar import Grammar

Role = Literal["system", "developer", "user", "assistant", "tool"]
Overflow = Literal["refuse", "drop-oldest"]
ReuseLevel = Literal["exact", "quantized", "approximate", "off"]
AnswersWay = Literal["off", "verified", "direct"]
Think = Literal["low", "medium", "high"] | bool

DEFAULT_MAX_TOKENS = 512
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_QUOTES = 1000
MAX_DRAFTS = 16
_LARGEST_SEED = 2**64 - 1
_MAX_BIASES = 1024


@dataclass(frozen=True)
class Message:
    """One message of a chat. `extra` carries further fields for the model's template (tool calls, names)."""

    role: Role
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_continued(self) -> bool:
        """Whether a reply continues it if it is the last one: the assistant began it, and calls no tool in it."""
        return self.role == "assistant" and not self.extra.get("tool_calls")

    def as_template_input(self) -> dict[str, Any]:
        """The dictionary that chat templates read."""
        return {"role": self.role, "content": self.content, **self.extra}


MessageLike: TypeAlias = "Message | Mapping[str, Any]"
PromptLike: TypeAlias = "str | Sequence[int] | Sequence[MessageLike]"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. The default is greedy: the most likely token, always.

    temperature         0 is greedy; above, logits are divided by it
    top_k               only the k most likely tokens; None: all
    top_p               only the smallest set of tokens that holds this share of the probability
    min_p               only tokens at least this share as likely as the most likely one
    repetition_penalty  above 1, tokens already in the context become less likely
    seed                same seed, same prompt, same machine: same text; None: a fresh one each time
    presence_penalty    subtracted from the logits of tokens that the reply has already
    frequency_penalty   the same, times how often it has them
    logit_bias          added to the logits of these tokens: {token: number}, or pairs
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, low=0.0, high=100.0, hint="0 is greedy, 0.7 is usual")
        _check_number("top_p", self.top_p, low=0.0, high=1.0, hint="1 keeps every token", low_open=True)
        _check_number("min_p", self.min_p, low=0.0, high=1.0, hint="0 keeps every token")
        _check_number(
            "repetition_penalty",
            self.repetition_penalty,
            low=0.0,
            high=100.0,
            hint="1 is none",
            low_open=True,
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), low=-2.0, high=2.0, hint="0 is none")
        object.__setattr__(self, "logit_bias", _parse_bias(self.logit_bias))
        if self.top_k is not None:
            _check_whole("top_k", self.top_k, low=1, hint="None keeps every token")
        if self.seed is not None:
            _check_whole("seed", self.seed, low=0, high=_LARGEST_SEED, hint="None draws a fresh one")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def biased(self) -> bool:
        """Whether logits are changed by token, or by what the reply has so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


class ReplyOptions(TypedDict, total=False):
    """The keyword arguments of everything that gives a reply."""

    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    overflow: Overflow
    temperature: float
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    logprobs: int | None
    grammar: Grammar | None
    tools: Sequence[Tool | Mapping[str, Any]]
    tool_choice: ToolChoice | str | Mapping[str, Any]
    parallel_tool_calls: bool
    think: Think | None
    add_generation_prompt: bool
    documents: Sequence[str | Mapping[str, Any] | Quote]
    drafts: Sequence[str | Sequence[int]]
    answers: AnswersWay | None
    reuse: ReuseLevel | None
    adapter: str | None
    tenant: str | None
    cache_salt: str | None
    app: str | None
    app_state: AppState | None


class Options(ReplyOptions, total=False):
    """The keyword arguments of `Session.generate`, `stream`, `chat` and their async variants."""

    top_k: int | None


@dataclass(frozen=True)
class Request:
    """One generation: a prompt (text, token ids or messages) and how to continue it.

    The reply has at least `min_tokens` and at most `max_tokens`. With `logprobs` it has the log probability of each of
    its tokens and of that many alternatives. `grammar` constrains it; `tools` are what it may call, and a call that
    `tool_choice` forces is one, or several with `parallel_tool_calls`. `think` says whether the model thinks aloud
    first, and how much, if its template has a switch for that. A last message of the assistant is continued; without
    `add_generation_prompt` the template does not begin one either. `quotes` are passages placed before the first user
    message, as many as fit. `drafts` are likely replies, the most likely first: the model verifies them, which is
    faster than generating and does not change the text. `answers` says whether earlier replies are used as drafts.
    `adapter` names a LoRA, "" none. It, `answers`, `reuse`, `tenant` and `cache_salt` default to the session's. `app`
    is the name of the app that asks, `app_state` is "foreground" or "background". `begun` is when this was made: a
    session makes its own when it begins to answer.
    """

    prompt: str | tuple[int, ...] | tuple[Message, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    overflow: Overflow = "refuse"
    logprobs: int | None = None
    grammar: Grammar | None = None
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = False
    think: Think | None = None
    add_generation_prompt: bool = True
    quotes: tuple[Quote, ...] = ()
    drafts: tuple[str | tuple[int, ...], ...] = ()
    answers: AnswersWay | None = None
    reuse: ReuseLevel | None = None
    adapter: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    app: str | None = None
    app_state: AppState | None = None
    begun: float = field(default_factory=time.time, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, low=0, hint="0 only reads the prompt")
        _check_whole("min_tokens", self.min_tokens, low=0, high=self.max_tokens, hint="at most max_tokens")
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS, hint="0 gives the drawn token's alone")
        if len(self.stop) > MAX_STOPS:
            raise InvalidSampling(f"There are {len(self.stop):,} stop strings. Use up to {MAX_STOPS}.")
        if any(not text for text in self.stop):
            raise InvalidSampling("A stop string is empty and would stop before the first token. Leave it out.")
        if self.quotes and not (isinstance(self.prompt, tuple) and isinstance(self.prompt[0], Message)):
            raise InvalidPrompt("Documents go with messages: a text or token ids are continued as they are.")
        if len(self.quotes) > MAX_QUOTES:
            raise InvalidPrompt(f"There are {len(self.quotes):,} documents. Give up to {MAX_QUOTES:,}.")
        if self.overflow not in get_args(Overflow):
            raise InvalidSetting(f"overflow={self.overflow!r} is unknown. Use 'refuse' or 'drop-oldest'.")
        if self.reuse is not None and self.reuse not in get_args(ReuseLevel):
            raise InvalidSetting(f"reuse={self.reuse!r} is unknown. Use 'exact', 'quantized', 'approximate' or 'off'.")
        if self.answers is not None and self.answers not in get_args(AnswersWay):
            raise InvalidSetting(f"answers={self.answers!r} is unknown. Use 'verified', 'direct' or 'off'.")
        if self.think not in (None, True, False, "low", "medium", "high"):
            raise InvalidSetting(f"think={self.think!r} is unknown. Use True, False, 'low', 'medium' or 'high'.")
        if len(self.drafts) > MAX_DRAFTS:
            raise InvalidPrompt(f"There are {len(self.drafts):,} drafts. Give up to {MAX_DRAFTS}.")
        self.app_ref(Scope(""))
        if self.app is None and self.app_state is not None:
            raise InvalidSetting("app_state needs an app: give its name, too, as app='...'.")

    @property
    def continued_text(self) -> str | None:
        """The last message of the assistant that the reply continues; None if the reply is a message of its own."""
        last = self.prompt[-1] if isinstance(self.prompt, tuple) else None
        return last.content if isinstance(last, Message) and last.is_continued else None

    @property
    def drafted_tokens(self) -> int:
        """Number of tokens of an earlier reply to the same prompt that may serve as a draft."""
        return 0 if self.answers in (None, "off") else self.max_tokens

    def app_ref(self, scope: Scope) -> AppRef | None:
        """The app that asks, in that scope; None if it gave no name."""
        if self.app is None:
            return None
        return AppRef(scope.tenant, self.app, self.app_state, self.begun, scope.salt)

    @classmethod
    def of(cls, prompt: PromptLike, **options: Unpack[Options]) -> Request:
        """Build a request from what people write; raises `InvalidPrompt`, `InvalidSampling`, `InvalidSetting`."""
        known = {*ReplyOptions.__annotations__, *Options.__annotations__}
        for name in options:
            if name not in known:
                raise InvalidSetting(f"Unknown option {name!r}.{nearest(name, known)}")
        chosen: dict[str, Any] = dict(options)
        sampling = Sampling(**{f.name: chosen.pop(f.name) for f in fields(Sampling) if f.name in chosen})
        stop = chosen.pop("stop", ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        tools = parse_tools(chosen.pop("tools", None))
        quotes = tuple(_parse_quote(number, item) for number, item in enumerate(chosen.pop("documents", ())))
        drafts = chosen.pop("drafts", ())
        choice = ToolChoice.parse(chosen.pop("tool_choice", None), tools)
        return cls(
            prompt=parse_prompt(prompt),
            sampling=sampling,
            stop=stops,
            tools=tools,
            tool_choice=choice,
            quotes=quotes,
            drafts=tuple(_parse_draft(draft) for draft in ([drafts] if isinstance(drafts, str) else drafts)),
            **chosen,
        )


def parse_prompt(prompt: PromptLike) -> str | tuple[int, ...] | tuple[Message, ...]:
    """Parse a text, token ids or messages; raises `InvalidPrompt` for anything else and for empty prompts."""
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidPrompt("The prompt is empty. Give at least one character.")
        _check_text("The prompt", prompt)
        return prompt
    if isinstance(prompt, (bytes, bytearray)):
        raise InvalidPrompt("The prompt is bytes. Decode it first: prompt.decode('utf-8').")
    if isinstance(prompt, (Message, Mapping)):
        raise InvalidPrompt("Messages come as a list, even a single one: [{'role': 'user', 'content': '...'}].")
    items = list(prompt)
    if not items:
        raise InvalidPrompt("The prompt is empty. Give at least one token or message.")
    if set(map(type, items)) == {int}:  # what most token ids are; the checks below take longer than finding their KV
        return tuple(items)  # type: ignore[return-value]
    if all(isinstance(item, (Message, Mapping)) for item in items):
        return tuple(_parse_message(item) for item in items)  # type: ignore[arg-type]
    if all(_is_whole(item) for item in items):
        return tuple(int(item) for item in items)  # type: ignore[arg-type]
    raise InvalidPrompt("A prompt is a text, a list of token ids, or a list of messages with 'role' and 'content'.")


def as_messages(messages: str | Sequence[MessageLike]) -> Sequence[MessageLike]:
    """Messages as they are; a text as one user message."""
    return [{"role": "user", "content": parse_prompt(messages)}] if isinstance(messages, str) else messages


def as_prompts(prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    """A list of prompts from several or one: a text, a list of messages and a list of token ids are one."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    single = all(isinstance(item, (Message, Mapping)) or hasattr(item, "__index__") for item in items)
    return [items] if items and single else items


def _parse_message(item: MessageLike) -> Message:
    if isinstance(item, Message):
        message = item
    else:
        if "role" not in item or ("content" not in item and not item.get("tool_calls")):
            raise InvalidPrompt(f"A message needs 'role' and 'content'; this one has {sorted(item)}.")
        extra = {key: value for key, value in item.items() if key not in ("role", "content")}
        content = item.get("content")
        if content is None and item["role"] == "user":
            raise InvalidPrompt("The content of a user message is null. Give it a text, or leave the message out.")
        message = Message(item["role"], "" if content is None else content, extra)
    if message.role not in get_args(Role):
        raise InvalidPrompt(f"Unknown role {message.role!r}.{nearest(str(message.role), get_args(Role))}")
    if not isinstance(message.content, str):
        raise InvalidPrompt(
            f"The content of a message is text; this one is {type(message.content).__name__}. "
            "Images and other parts are not supported."
        )
    _check_text(f"The {message.role} message", message.content)
    return message


def _parse_quote(number: int, item: str | Mapping[str, Any] | Quote) -> Quote:
    if isinstance(item, Quote):
        return item
    fields = {"text": item} if isinstance(item, str) else item
    # LangChain and others call it page_content.
    text = fields.get("text", fields.get("page_content")) if isinstance(fields, Mapping) else None
    title = fields.get("title") or "" if isinstance(fields, Mapping) else None
    if not isinstance(text, str) or not text.strip() or not isinstance(title, str):
        raise InvalidPrompt(f"Document {number} has no text. Give a text, or {{'text': ..., 'title': ...}}.")
    _check_text(f"Document {number}", text + title)
    return Quote(text.strip(), title.strip())


def _parse_bias(given: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Pairs of a token and a number, by token: the same bias has one form."""
    try:
        pairs = sorted((token, bias) for token, bias in (given.items() if isinstance(given, Mapping) else given))
    except (TypeError, ValueError):
        raise InvalidSampling(f"logit_bias={given!r:.100} is not one: use {{token: number}}.") from None
    if len(pairs) > _MAX_BIASES:
        raise InvalidSampling(f"logit_bias has {len(pairs):,} tokens. Use up to {_MAX_BIASES:,}.")
    for token, bias in pairs:
        _check_whole("A token of logit_bias", token, low=0, hint="the number of a token")
        _check_number(f"logit_bias of token {token}", bias, low=-100.0, high=100.0, hint="0 is none")
    return tuple((int(token), float(bias)) for token, bias in pairs)


def _parse_draft(draft: str | Sequence[int]) -> str | tuple[int, ...]:
    if isinstance(draft, str):
        _check_text("A draft", draft)
        return draft
    if not isinstance(draft, Iterable) or not all(_is_whole(token) and token >= 0 for token in draft):
        raise InvalidPrompt("A draft is a text, or a list of token ids.")
    return tuple(int(token) for token in draft)


def _check_text(what: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidPrompt(
            f"{what} is not valid Unicode: a lone surrogate at character {error.start}. "
            "Read the file as UTF-8, or pass errors='replace' when decoding."
        ) from None


def _check_number(name: str, value: float, *, low: float, high: float, hint: str, low_open: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (low_open and value == low):
        raise InvalidSampling(
            f"{name}={value!r} is out of range: use a number from {low:g}{' (excluded)' if low_open else ''} "
            f"to {high:g} ({hint})."
        )


def _check_whole(name: str, value: int, *, low: int, high: int | None = None, hint: str) -> None:
    if not _is_whole(value) or value < low or (high is not None and value > high):
        limit = f"from {low}" if high is None else f"from {low} to {high}"
        raise InvalidSampling(f"{name}={value!r} is out of range: use a whole number {limit} ({hint}).")


def _is_whole(value: object) -> bool:
    # numpy's integers are not ints, but they are whole numbers.
    return not isinstance(value, bool) and hasattr(value, "__index__")
