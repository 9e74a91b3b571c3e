"""The contract of every tokenizer, and bounds on how many tokens a text has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

from rekindle.core.request import Message, Think
from rekindle.core.tools import Tool
from rekindle.errors import Cancelled, ContextOverflow

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class WrittenReply:
    """A reply as the model generated it: its tokens without the one that ends it, and its thoughts as text.

    `before` are the last tokens of the prompt that it answered: they show where a reply begins in this template.
    """

    tokens: tuple[int, ...]
    thinking: str = ""
    before: tuple[int, ...] = ()


Written = Mapping[int, WrittenReply]  # index of an assistant message -> what stands in for it


@dataclass(frozen=True)
class ReplayedChat:
    """The tokens of a chat, and the number of its replies that are as the model generated them."""

    tokens: list[int]
    replies: int = 0


@dataclass(frozen=True)
class QuotedChat:
    """The tokens of a chat with quotes: what comes before the quotes, each quote, what comes after."""

    before: Sequence[int]
    quotes: Sequence[Sequence[int]]
    after: Sequence[int]


class TemplateOptions(TypedDict, total=False):
    """What a chat is encoded with besides its messages."""

    tools: Sequence[Tool]
    think: Think | None
    token_limit: int | None
    add_generation_prompt: bool


_is_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("is_cancelled", default=None)


@contextmanager
def cancellable(cancelled: Callable[[], bool] | None) -> Iterator[None]:
    """Let the rendering and tokenizing inside the block end with `Cancelled` soon after `cancelled()` is true."""
    before = _is_cancelled.set(cancelled)
    try:
        yield
    finally:
        _is_cancelled.reset(before)


def is_cancelled() -> bool:
    """Whether the request was cancelled that renders and tokenizes in this thread."""
    cancelled = _is_cancelled.get()
    return cancelled is not None and cancelled()


def check_cancelled() -> None:
    """Raise `Cancelled` if the request was cancelled that renders and tokenizes in this thread."""
    if is_cancelled():
        raise Cancelled("The request was cancelled.")


class Tokenizer(Protocol):
    """Text to tokens and back. Text of users never becomes a control token."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a reply."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""

    @property
    def needs_model(self) -> bool:
        """Whether it ends with the model it came with."""

    def min_token_count(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, in no time; 0 where none is known."""

    def encode(self, text: str, *, token_limit: int | None = None) -> list[int]:
        """Tokens of a plain text, with whatever the model wants at its start.

        Raises `ContextOverflow` without tokenizing, which takes seconds for a long text, if the text must have more
        than `token_limit`. A text with slightly more may be returned all the same.
        """

    @property
    def template(self) -> str:
        """The source of the model's chat template; empty if it has none, or none that can be read."""

    def begins_thought(self, think: Think | None = None) -> bool:
        """Whether the prompt of a chat ends inside a thought."""

    def token_of(self, spelling: str) -> int | None:
        """The control token of a spelling; None if it is several tokens."""

    def encode_chat(self, messages: Sequence[Message], **how: Unpack[TemplateOptions]) -> list[int]:
        """Tokens of the model's own chat template, up to where the reply begins: in a last message of the assistant, or
        behind what the template writes before a new one (not without `add_generation_prompt`).

        A template that takes `tools` writes them itself; otherwise tools, calls and results are written as text.
        `think` is passed to a template that reads it.

        Raises `InvalidPrompt` if the model has no template or it refuses the messages, and `ContextOverflow` as
        `encode` does.
        """

    def encode_replayed(
        self, messages: Sequence[Message], written: Written, **how: Unpack[TemplateOptions]
    ) -> ReplayedChat:
        """The same, with the generated tokens of the `written` replies in place of what the template writes for them.

        A reply stands in with its thoughts, or is written by the template if that leaves out thoughts at its place.
        All other text of the chat stays the same: where that is not certain, nothing stands in.
        """

    def encode_quoting(
        self, messages: Sequence[Message], quotes: Sequence[str], **how: Unpack[TemplateOptions]
    ) -> QuotedChat:
        """Tokens of a chat with quotes placed before the first user message's text.

        Every part is tokenized alone, so a quote has the same tokens wherever it stands. A quote longer than
        `token_limit` is cut. Raises as `encode_chat` does, and if there is no user message.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens left out."""

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens with control tokens spelled out, for people comparing prompts."""

    def pieces(self) -> list[bytes]:
        """The bytes that each token id adds inside a text; empty for control tokens and unused ids.

        A list of `vocabulary_size`; the first call takes about 100 ms. A space that `decode` strips from the start
        of a text is part of the piece.
        """


_CONTINUING = frozenset(range(0x80, 0xC0))  # every character past ASCII has one of these bytes
_LEADING = frozenset(range(0xC2, 0xF5))


@dataclass(frozen=True)
class TokenLength:
    """A token covers at most `characters` characters. The characters in `vanishing` may be in no token."""

    characters: int
    vanishing: str = ""

    @classmethod
    def of(
        cls, pieces: Sequence[bytes], names: Iterable[str] = (), *, whole: bool, doubled: bool = False
    ) -> TokenLength | None:
        """The bound for a vocabulary with byte fallback; None without one.

        names     other spellings that a token may match
        whole     a character with an unknown byte vanishes as a whole; else only that byte does
        doubled   normalizing may turn two characters into one byte
        """
        single = {piece[0] for piece in pieces if len(piece) == 1}
        if not single >= (_CONTINUING | _LEADING if whole else _CONTINUING):
            return None
        longest = max(1, *map(len, pieces), *(len(name.encode("utf-8")) for name in names))
        return cls(
            2 * longest if doubled else longest, "".join(chr(byte) for byte in range(0x80) if byte not in single)
        )

    def min_token_count(self, text: str) -> int:
        return -(-(len(text) - sum(map(text.count, self.vanishing))) // self.characters)


def check_length(text: str, token_limit: int | None, min_token_count: Callable[[str], int]) -> None:
    """Raise `ContextOverflow` for a text that must have more than `token_limit`."""
    if token_limit is None or len(text) <= token_limit:  # every token covers at least one character
        return
    fewest = min_token_count(text)
    if fewest > token_limit:
        raise ContextOverflow(fewest, token_limit, "Shorten it.", counted=False)
