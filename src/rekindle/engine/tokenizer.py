"""Tokens of text and chats, as the model's own tokenizer gives them, with one difference: the text of users never
becomes a control token.

Control tokens are those the tokenizer calls special, and the markers that the chat template writes (some models do not
call theirs special). Where no user text spells one, which is nearly always, the model's tokenizer is used as it is.
Else the control tokens are renamed: in a second tokenizer each goes by a name nobody can guess. What the template
wrote is respelled to the new names, what users wrote is not, and the rest of the pipeline stays the same.

What the model itself wrote, assistant messages, may contain its own markers (a thought, a tool call): there only
special tokens are taken for text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from rekindle.core.request import Message
from rekindle.engine.base import Written
from rekindle.errors import InvalidPrompt

Render = Callable[[list[dict[str, Any]]], str]  # messages -> the template's text, up to where the reply begins


class TextTokenizer:
    """A tokenizer of the `tokenizers` library and a chat template. See `Tokenizer` for the contract."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        render: Render | None,
        stop_ids: frozenset[int],
        vocabulary_size: int,
        template: str = "",
    ) -> None:
        """`template` is the source of what `render` renders: the markers it writes are control tokens."""
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()  # some files ask for it; a prompt is never cut or padded in silence
        self._backend.no_padding()
        self._render = render
        self.stop_ids = stop_ids
        self.vocabulary_size = vocabulary_size
        added = self._backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        self._ids = {t.content: i for i, t in added.items() if t.content in special or _is_marker(t.content, template)}
        self._special, self._control = _any_of(special), _any_of(self._ids)
        self._nonce = secrets.token_hex(8)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with whatever the model wants at its start."""
        backend = self._renamed if self._control.search(text) else self._backend
        return list(backend.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Message], written: Written | None = None) -> list[int]:
        """Tokens of the model's own chat template, up to where the reply begins."""
        if self._render is None:
            raise InvalidPrompt("This model has no chat template. Use generate() with a plain prompt.")
        hidden = _Hidden()
        shown = [hidden.hide(m.as_template_input(), self._forbidden(m)) for m in messages]
        text = self._render(shown)
        if not hidden.spellings:
            tokens = self._plain(text)
            replies = {m.content for m in messages if m.role == "assistant" and m.content}
            own = {reply: written[reply] for reply in replies if reply in written} if written else {}
            return (self._with_written(shown, text, tokens, own) or tokens) if own else tokens
        respelled = self._control.sub(lambda found: self._secret(found.group()), text)
        return list(self._renamed.encode(hidden.reveal(respelled), add_special_tokens=False).ids)

    def _plain(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

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
        alone = [self._plain(content_of.get(piece, piece)) for piece in pieces]
        if [token for part in alone for token in part] != tokens:
            return None  # a reply and what stands beside it share a token
        chosen = [
            own[content_of[piece]] if piece in content_of else part for piece, part in zip(pieces, alone, strict=True)
        ]
        return [token for part in chosen for token in part]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens left out."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens spelled out."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def _forbidden(self, message: Message) -> re.Pattern[str]:
        """What must stay text in a message."""
        return self._special if message.role == "assistant" else self._control

    def _secret(self, spelling: str) -> str:
        return f"\ue000{self._nonce}:{self._ids[spelling]}\ue001"

    def _rename(self, piece: str) -> str:
        return self._secret(piece) if piece in self._ids else piece

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """The same tokenizer with its control tokens under their secret names."""
        description = json.loads(self._backend.to_str())
        for token in description["added_tokens"]:
            if token["content"] in self._ids:
                token |= {"content": self._secret(token["content"]), "normalized": False}
        model = description["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {self._rename(piece): index for piece, index in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[self._rename(piece), score] for piece, score in model["vocab"]]
        if model.get("merges"):  # no two pieces may make up a control token
            model["merges"] = [m for m in model["merges"] if _merged(m) not in self._ids]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._rename(model["unk_token"])
        return tokenizers.Tokenizer.from_str(json.dumps(description))


def _is_marker(content: str, template: str) -> bool:
    """Whether the template writes this token as a marker; spaces, line ends and words are just text."""
    return content in template and content == content.strip() and not content.isalnum()


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of the spellings, the longest first; of none, it finds nothing."""
    ordered = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _merged(merge: str | list[str]) -> str:
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)


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
