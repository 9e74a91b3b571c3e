"""Tokens of text and chats, as the model's own tokenizer gives them, with one difference: the text of users never
becomes a control token.

Where no user text contains the spelling of a control token, which is nearly always, the model's tokenizer is used as
it is. Else the control tokens are renamed: in a second tokenizer each goes by a name nobody can guess. What the
template wrote is respelled to the new names, what users wrote is not, and the rest of the pipeline stays the same.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from rekindle.core.request import Message
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
    ) -> None:
        self._backend = backend
        self._render = render
        self.stop_ids = stop_ids
        self.vocabulary_size = vocabulary_size
        added = backend.get_added_tokens_decoder()
        self._control = {token.content: index for index, token in added.items() if token.special}
        spellings = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with whatever the model wants at its start."""
        backend = self._renamed if self._has_control(text) else self._backend
        return list(backend.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the model's own chat template, up to where the reply begins."""
        if self._render is None:
            raise InvalidPrompt("This model has no chat template. Use generate() with a plain prompt.")
        plain = [message.as_template_input() for message in messages]
        if not any(self._has_control(text) for text in _texts(plain)):
            return list(self._backend.encode(self._render(plain), add_special_tokens=False).ids)
        hidden = _Hidden(self._control_pattern)
        text = self._render([hidden.hide(message) for message in plain])
        text = hidden.reveal(self._respell(text))
        return list(self._renamed.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens left out."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def _has_control(self, text: str) -> bool:
        return self._control_pattern is not None and self._control_pattern.search(text) is not None

    def _respell(self, text: str) -> str:
        """The text with every control token under its secret name."""
        if self._control_pattern is None:
            return text
        return self._control_pattern.sub(lambda found: self._secret(found.group()), text)

    @cached_property
    def _nonce(self) -> str:
        return secrets.token_hex(8)

    def _secret(self, spelling: str) -> str:
        return f"\ue000{self._nonce}:{self._control[spelling]}\ue001"

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """The same tokenizer with its control tokens under their secret names."""
        description = json.loads(self._backend.to_str())
        for token in description["added_tokens"]:
            if token["content"] in self._control:
                token["content"] = self._secret(token["content"])
        model = description["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {
                self._secret(piece) if piece in self._control else piece: index
                for piece, index in model["vocab"].items()
            }
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [
                [self._secret(piece) if piece in self._control else piece, score] for piece, score in model["vocab"]
            ]
        if model.get("unk_token") in self._control:
            model["unk_token"] = self._secret(model["unk_token"])
        return tokenizers.Tokenizer.from_str(json.dumps(description))


class _Hidden:
    """Control tokens spelled out by users, kept out of sight while a template is rendered."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern = pattern
        self._nonce = secrets.token_hex(8)
        self._spellings: list[str] = []

    def hide(self, value: Any) -> Any:
        """The value with every control token in any text of it replaced by a placeholder."""
        if isinstance(value, str):
            return self._pattern.sub(self._placeholder, value) if self._pattern else value
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """The text with the placeholders turned back."""
        return re.sub(f"\ue002{self._nonce}:(\\d+)\ue003", lambda found: self._spellings[int(found.group(1))], text)

    def _placeholder(self, found: re.Match[str]) -> str:
        self._spellings.append(found.group())
        return f"\ue002{self._nonce}:{len(self._spellings) - 1}\ue003"


def _texts(value: Any) -> list[str]:
    """Every text inside a message."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in _texts(item)]
    return []
