"""Chats to tokens, whatever library cuts the text: the model's own template, in which the text of users never becomes
a control token.

Control tokens are those the tokenizer calls special, and the markers that the chat template writes (some models do not
call theirs special). Where no user text spells one, which is nearly always, the rendered chat is tokenized as it is.
Else what users spelled is hidden while the template is rendered, and tokenized as the text it is.

What the model itself wrote, assistant messages, may contain its own markers (a thought, a tool call): there only
special tokens are taken for text.
"""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rekindle.core.request import Message
from rekindle.engine.base import Written
from rekindle.errors import InvalidPrompt

Render = Callable[[list[dict[str, Any]]], str]  # messages -> the template's text, up to where the reply begins


class ChatTokenizer(ABC):
    """What tokenizers of chats share. See `Tokenizer` for the contract."""

    def __init__(self, *, render: Render | None, special: Iterable[str], control: Iterable[str]) -> None:
        """`special` spellings are never text but the template's own; `control` are those and the template's markers."""
        self._render = render
        self._special, self._control = any_of(special), any_of(control)
        self._nonce = secrets.token_hex(8)

    @abstractmethod
    def _plain(self, text: str, *, begins: bool = True) -> list[int]:
        """The tokens of a rendered chat, or of a part of one; `begins`: the part with which it begins."""

    @abstractmethod
    def _mixed(self, text: str, reveal: Callable[[str], str]) -> list[int]:
        """The tokens of a rendered chat in which control tokens are meant, but those not that `reveal` brings back."""

    def encode_chat(self, messages: Sequence[Message], written: Written | None = None) -> list[int]:
        """Tokens of the model's own chat template, up to where the reply begins."""
        if self._render is None:
            raise InvalidPrompt("This model has no chat template. Use generate() with a plain prompt.")
        hidden = _Hidden()
        shown = [hidden.hide(m.as_template_input(), self._forbidden(m)) for m in messages]
        text = self._render(shown)
        if hidden.spellings:
            return self._mixed(text, hidden.reveal)
        tokens = self._plain(text)
        replies = {m.content for m in messages if m.role == "assistant" and m.content}
        own = {reply: written[reply] for reply in replies if reply in written} if written else {}
        return (self._with_written(shown, text, tokens, own) or tokens) if own else tokens

    def _with_written(
        self, shown: Sequence[dict[str, Any]], text: str, tokens: list[int], own: Written
    ) -> list[int] | None:
        """The tokens with the model's own in place of its replies; None where that cannot be done cleanly."""
        assert self._render is not None
        marks = {content: f"\ue004{self._nonce}:{number}\ue005" for number, content in enumerate(own)}
        content_of = {mark: content for content, mark in marks.items()}
        marked = [
            {**m, "content": marks[m["content"]]} if m["role"] == "assistant" and m["content"] in marks else m
            for m in shown
        ]
        rendered = self._render(marked)
        parts = re.split("|".join(f"({re.escape(mark)})" for mark in marks.values()), rendered)
        pieces = [part for part in parts if part]
        if "".join(content_of.get(piece, piece) for piece in pieces) != text:
            return None  # the template does more to a reply than to write it
        alone = [self._plain(content_of.get(piece, piece), begins=not place) for place, piece in enumerate(pieces)]
        if [token for part in alone for token in part] != tokens:
            return None  # a reply and what stands beside it share a token
        chosen = [
            own[content_of[piece]] if piece in content_of else part for piece, part in zip(pieces, alone, strict=True)
        ]
        return [token for part in chosen for token in part]

    def _forbidden(self, message: Message) -> re.Pattern[str]:
        """What must stay text in a message."""
        return self._special if message.role == "assistant" else self._control


def is_marker(content: str, template: str) -> bool:
    """Whether the template writes this token as a marker; spaces, line ends and words are just text."""
    return content in template and content == content.strip() and not content.isalnum()


def any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of the spellings, the longest first; of none, it finds nothing."""
    ordered = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


class _Hidden:
    """Control tokens spelled out by users, kept out of sight while a template is rendered."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self.spellings: list[str] = []

    def hide(self, value: Any, forbidden: re.Pattern[str]) -> Any:
        """The value with every forbidden spelling in any text of it replaced by a placeholder."""
        if isinstance(value, str):
            return forbidden.sub(self._placeholder, value)
        if isinstance(value, dict):
            return {self.hide(key, forbidden): self.hide(item, forbidden) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item, forbidden) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The text with the placeholders turned back."""
        return re.sub(f"\ue002{self._nonce}:(\\d+)\ue003", lambda found: self.spellings[int(found.group(1))], text)

    def _placeholder(self, found: re.Match[str]) -> str:
        self.spellings.append(found.group())
        return f"\ue002{self._nonce}:{len(self.spellings) - 1}\ue003"
