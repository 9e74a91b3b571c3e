"""The vocabulary and the chat template of a GGUF file: tokens as llama.cpp itself gives them."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import llama_cpp
import numpy as np

from rekindle.engine.chat import ChatTokenizer, Render, any_of, is_marker
from rekindle.engine.llamacpp.library import LoadedModel
from rekindle.errors import InvalidPrompt

_TEMPLATE = "tokenizer.chat_template"
_SPECIAL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_DEFINED = llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED


class GgufTokenizer(ChatTokenizer):
    """See `Tokenizer` for the contract. Raises `Closed` once its model was closed."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        vocab = self._vocab = model.vocab
        self.vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self.template = model.metadata(_TEMPLATE) or ""
        self._bos, eos = int(llama_cpp.llama_vocab_bos(vocab)), int(llama_cpp.llama_vocab_eos(vocab))
        begins = self._bos >= 0 and llama_cpp.llama_vocab_get_add_bos(vocab)
        self._lead = [self._bos] if begins else []  # with which every text of this model begins
        kinds = np.array([llama_cpp.llama_vocab_get_attr(vocab, i) for i in range(self.vocabulary_size)])
        special = {self._text(i): i for i in np.flatnonzero(kinds & _SPECIAL).tolist()}
        defined = {self._text(i): i for i in np.flatnonzero(kinds & _DEFINED).tolist()}
        markers = {text: i for text, i in defined.items() if is_marker(text, self.template)}
        self._ids = {**markers, **special}
        self._markers = any_of(markers)
        ends = {i for i in special.values() if llama_cpp.llama_vocab_is_eog(vocab, i)}
        self.stop_ids = frozenset(ends | {i for i in (eos, int(llama_cpp.llama_vocab_eot(vocab))) if i >= 0})
        render = _renderer(self.template, self._spelling(self._bos), self._spelling(eos)) if self.template else None
        super().__init__(render=render, special=special, control=self._ids)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain text, with whatever the model wants at its start."""
        return self._lead + self._as_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens left out."""
        return self._detokenize(tokens, spelled=False)

    def spell(self, tokens: Sequence[int]) -> str:
        """The text of tokens, control tokens spelled out."""
        return self._detokenize(tokens, spelled=True)

    def _plain(self, text: str, *, begins: bool = True) -> list[int]:
        lead, rest = (self._lead, self._rest(text)) if begins else ([], text)
        return lead + self._tokenize(rest, special=True)

    def _mixed(self, text: str, reveal: Callable[[str], str]) -> list[int]:
        tokens = list(self._lead)
        for piece in re.split(f"({self._control.pattern})", self._rest(text)):
            tokens += [self._ids[piece]] if piece in self._ids else self._as_text(reveal(piece))
        return tokens

    def _rest(self, text: str) -> str:
        """A rendered chat without the token it begins with, which comes once, whether the template writes it or not."""
        written = self._spelling(self._bos)
        return text[len(written) :] if self._lead and written and text.startswith(written) else text

    def _as_text(self, text: str) -> list[int]:
        """Tokens of text in which nothing is a control token: a marker of the template is cut after a letter."""
        if not text:
            return []
        edges = [0, *(found.start() + 1 for found in self._markers.finditer(text)), len(text)]
        return [token for a, b in pairwise(edges) for token in self._tokenize(text[a:b], special=False)]

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        if not text:
            return []
        data = text.encode("utf-8")
        room = len(data) + 8
        while True:
            tokens = np.empty(room, np.int32)
            pointer = ctypes.cast(tokens.ctypes.data, ctypes.POINTER(llama_cpp.llama_token))
            with self._model.alive():
                count = llama_cpp.llama_tokenize(self._vocab, data, len(data), pointer, room, False, special)
            if count >= 0:
                return [int(token) for token in tokens[:count]]
            room = -count

    def _detokenize(self, tokens: Sequence[int], *, spelled: bool) -> str:
        if not len(tokens):
            return ""
        ids = np.asarray(tokens, dtype=np.int32)
        pointer = ctypes.cast(ids.ctypes.data, ctypes.POINTER(llama_cpp.llama_token))
        room = 16 + 8 * len(ids)
        while True:
            text = ctypes.create_string_buffer(room)
            with self._model.alive():
                count = llama_cpp.llama_detokenize(self._vocab, pointer, len(ids), text, room, False, spelled)
            if count >= 0:
                return text.raw[:count].decode("utf-8", errors="replace")
            room = -count

    def _text(self, token: int) -> str:
        return str((llama_cpp.llama_vocab_get_text(self._vocab, token) or b"").decode("utf-8", errors="replace"))

    def _spelling(self, token: int) -> str:
        return self._text(token) if token >= 0 else ""


def _renderer(template: str, bos: str, eos: str) -> Render:
    """As transformers and llama.cpp render templates: sandboxed, with the few functions that templates know."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        compiled: jinja2.Template | jinja2.TemplateError = environment.from_string(template)
    except jinja2.TemplateError as error:
        compiled = error

    def render(messages: list[dict[str, Any]]) -> str:
        try:
            if isinstance(compiled, jinja2.TemplateError):
                raise compiled
            return compiled.render(messages=messages, add_generation_prompt=True, bos_token=bos, eos_token=eos)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidPrompt(f"The model's chat template refuses these messages: {error}") from error

    return render


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(message)
