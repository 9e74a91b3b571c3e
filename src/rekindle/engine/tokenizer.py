"""Text to tokens as the model's own tokenizer of the `tokenizers` library gives them.

Where user text spells a control token, the control tokens are renamed: in a second tokenizer each goes by a name nobody
can guess. What the template wrote is respelled to the new names, what users wrote is not, and the rest of the pipeline
stays the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property

import tokenizers

from rekindle.engine.calls import ToolHabits
from rekindle.engine.chat import ChatTokenizer, Render, is_marker
from rekindle.engine.pieces import token_bytes


class TextTokenizer(ChatTokenizer):
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
        self.stop_ids = stop_ids
        self.vocabulary_size = vocabulary_size
        added = self._backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        around = ToolHabits.written_by(template)
        self._ids = {t.content: i for i, t in added.items() if t.content in special or is_marker(t.content, around)}
        super().__init__(render=render, special=special, control=self._ids, template=template)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with whatever the model wants at its start."""
        backend = self._renamed if self._control.search(text) else self._backend
        return list(backend.encode(text, add_special_tokens=True).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens left out."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens spelled out."""
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def pieces(self) -> list[bytes]:
        """The bytes that each token adds inside a text; none for special tokens."""
        return self._pieces

    @cached_property
    def _pieces(self) -> list[bytes]:
        return token_bytes(self._backend, self.vocabulary_size)

    def _plain(self, text: str, *, begins: bool = True) -> list[int]:  # noqa: ARG002  (the template writes a beginning)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _mixed(self, text: str, reveal: Callable[[str], str], *, begins: bool = True) -> list[int]:  # noqa: ARG002
        respelled = self._control.sub(lambda found: self._secret(found.group()), text)
        return list(self._renamed.encode(reveal(respelled), add_special_tokens=False).ids)

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


def _merged(merge: str | list[str]) -> str:
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
