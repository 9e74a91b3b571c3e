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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from rekindle.core.request import Message
from rekindle.core.tools import Tool
from rekindle.engine.base import Quoting, Written
from rekindle.engine.calls import ToolHabits, in_words, without_system
from rekindle.errors import InvalidPrompt

_MOST_QUOTES = 2048  # whose tokens are remembered


class Render(Protocol):
    """Renders the model's template."""

    def __call__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The template's text, up to where the reply begins. Raises `InvalidPrompt` if it refuses the messages.

        `tools` come only to a template that takes them, and only if there are any.
        """


class ChatTokenizer(ABC):
    """What tokenizers of chats share. See `Tokenizer` for the contract."""

    def __init__(
        self, *, render: Render | None, special: Iterable[str], control: Iterable[str], template: str = ""
    ) -> None:
        """`special` spellings are never text but the template's own; `control` are those and the template's markers.

        `template` is the source of what `render` renders.
        """
        self.template = template
        self._habits = ToolHabits.of(template)
        self._render = render
        self._special, self._control = any_of(special), any_of(control)
        self._nonce = secrets.token_hex(8)
        self._quotes: dict[str, Sequence[int]] = {}  # passages come again and again

    @abstractmethod
    def _plain(self, text: str, *, begins: bool = True) -> list[int]:
        """The tokens of a rendered chat, or of a part of one; `begins`: the part with which it begins."""

    @abstractmethod
    def _mixed(self, text: str, reveal: Callable[[str], str], *, begins: bool = True) -> list[int]:
        """The tokens of a rendered chat in which control tokens are meant, but those not that `reveal` brings back."""

    def encode_chat(
        self, messages: Sequence[Message], written: Written | None = None, *, tools: Sequence[Tool] = ()
    ) -> list[int]:
        """Tokens of the model's own chat template, up to where the reply begins."""
        chat = self._rendered(messages, tools)
        if chat.hidden.spellings:
            return self._mixed(chat.text, chat.hidden.reveal)
        tokens = self._plain(chat.text)
        replies = {m["content"] for m in chat.shown if m["role"] == "assistant" and m["content"]}
        own = {reply: written[reply] for reply in replies if reply in written} if written else {}
        return (self._with_written(chat, tokens, own) or tokens) if own else tokens

    def encode_quoting(
        self, messages: Sequence[Message], quotes: Sequence[str], *, tools: Sequence[Tool] = ()
    ) -> Quoting:
        """The same, with quotes in front of what the user first says; every part is tokenized alone."""
        place = next((at for at, message in enumerate(messages) if message.role == "user"), None)
        if place is None:
            raise InvalidPrompt("There is no user message that passages could be quoted for. Add one.")
        mark = f"\ue004{self._nonce}:quotes\ue005"
        marked = [*messages]
        marked[place] = replace(messages[place], content=mark + messages[place].content)
        chat = self._rendered(marked, tools)
        parts = chat.text.split(mark)
        if len(parts) != 2:
            raise InvalidPrompt("This model's chat template does not write messages as they are: it cannot quote.")
        before, after = (
            self._mixed(part, chat.hidden.reveal, begins=not at)
            if chat.hidden.spellings
            else self._plain(part, begins=not at)
            for at, part in enumerate(parts)
        )
        return Quoting(before, [self._quote(text) for text in quotes], after)

    def _quote(self, text: str) -> Sequence[int]:
        """The tokens of a text that is data, whatever it spells."""
        known = self._quotes.get(text)
        if known is None:
            mark = f"\ue004{self._nonce}:quote\ue005"
            spells = self._control.search(text)
            known = tuple(
                self._mixed(mark, lambda part: part.replace(mark, text), begins=False)
                if spells
                else self._plain(text, begins=False)
            )
            if len(self._quotes) >= _MOST_QUOTES:
                self._quotes.clear()
            self._quotes[text] = known
        return known

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool]) -> _Chat:
        if self._render is None:
            raise InvalidPrompt("This model has no chat template. Use generate() with a plain prompt.")
        hidden = _Hidden()
        shown = [self._shown(message, hidden) for message in messages]
        offered = [hidden.hide(tool.as_template_input(), self._control) for tool in tools]
        render: Callable[[list[dict[str, Any]]], str] = self._render
        if self._habits.takes_tools and offered:
            render = partial(self._render, tools=offered)
        elif not self._habits.takes_tools and (offered or any(m.get("tool_calls") for m in shown)):
            shown = self._accepted(in_words(shown, offered))
        return _Chat(render(shown), shown, hidden, render)

    def _shown(self, message: Message, hidden: _Hidden) -> dict[str, Any]:
        """A message as the template gets it. The arguments of a call are data, although the model wrote them."""
        ready = self._habits.prepare(message.as_template_input())
        calls = hidden.hide({key: ready.pop(key) for key in ("tool_calls",) if key in ready}, self._control)
        return {**hidden.hide(ready, self._forbidden(message)), **calls}

    def _accepted(self, shown: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A chat in words, its instructions where the template takes them: some know no system message."""
        assert self._render is not None
        try:
            self._render(shown)
        except InvalidPrompt:
            return without_system(shown)
        return shown

    def _with_written(self, chat: _Chat, tokens: list[int], own: Written) -> list[int] | None:
        """The tokens with the model's own in place of its replies; None where that cannot be done cleanly."""
        marks = {content: f"\ue004{self._nonce}:{number}\ue005" for number, content in enumerate(own)}
        content_of = {mark: content for content, mark in marks.items()}
        marked = [
            {**m, "content": marks[m["content"]]} if m["role"] == "assistant" and m["content"] in marks else m
            for m in chat.shown
        ]
        rendered = chat.render(marked)
        parts = re.split("|".join(f"({re.escape(mark)})" for mark in marks.values()), rendered)
        pieces = [part for part in parts if part]
        if "".join(content_of.get(piece, piece) for piece in pieces) != chat.text:
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


@dataclass(frozen=True)
class _Chat:
    """A chat as the template wrote it, and what it was made of."""

    text: str
    shown: list[dict[str, Any]]
    hidden: _Hidden
    render: Callable[[list[dict[str, Any]]], str]


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
        """The text with the placeholders turned back, also where a template wrote them with escapes."""
        start, stop = r"(?:\ue002|\\ue002)", r"(?:\ue003|\\ue003)"
        return re.sub(f"{start}{self._nonce}:(\\d+){stop}", lambda found: self.spellings[int(found.group(1))], text)

    def _placeholder(self, found: re.Match[str]) -> str:
        self.spellings.append(found.group())
        return f"\ue002{self._nonce}:{len(self.spellings) - 1}\ue003"
