"""The vocabulary and chat template of a GGUF file, tokenized by llama.cpp."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np

from rekindle.engine.llamacpp.c_api import (
    ATTR_CONTROL,
    ATTR_LSTRIP,
    ATTR_RSTRIP,
    ATTR_UNKNOWN,
    ATTR_USER_DEFINED,
    Token,
    llama,
)
from rekindle.engine.llamacpp.loaded_model import LoadedModel
from rekindle.engine.llamacpp.special_tokens import SpecialTokens
from rekindle.text.base import TokenLength, check_cancelled, check_length
from rekindle.text.chat_template import ChatTokenizer, is_marker, make_renderer, match_any
from rekindle.text.tools.styles import TemplateTools

_TEMPLATE = "tokenizer.chat_template"
_SPECIAL = ATTR_CONTROL | ATTR_UNKNOWN
_DEFINED = ATTR_USER_DEFINED
_MARKER = re.compile(r"<\|.+\|>")  # user-defined tokens that are markers all the same
_SEAM = "\x01"  # a character that no token joins with others


class GgufTokenizer(ChatTokenizer):
    """See `Tokenizer` for the contract. Raises `Closed` once its model was closed."""

    needs_model = True

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        vocab = self._vocab = model.vocab
        self.vocabulary_size = int(llama.llama_vocab_n_tokens(vocab))
        template = model.metadata(_TEMPLATE) or ""
        self._bos, eos = int(llama.llama_vocab_bos(vocab)), int(llama.llama_vocab_eos(vocab))
        begins = self._bos >= 0 and llama.llama_vocab_get_add_bos(vocab)
        self._lead = [self._bos] if begins else []  # the first token of every text
        kinds = np.array([llama.llama_vocab_get_attr(vocab, i) for i in range(self.vocabulary_size)])
        special = {self._text(i): i for i in np.flatnonzero(kinds & _SPECIAL).tolist()}
        defined = {self._text(i): i for i in np.flatnonzero(kinds & _DEFINED).tolist()}
        around = TemplateTools.written_by(template)
        markers = {text: i for text, i in defined.items() if is_marker(text, around) or _MARKER.fullmatch(text)}
        self._ids = {**markers, **special}
        self._markers = re.compile(f"(?={match_any(markers).pattern})")  # where one begins, also inside another
        self._strips = {i: bool(kinds[i] & ATTR_RSTRIP) for i in self._ids.values()}
        takes = {self._text(i) for i in np.flatnonzero(kinds & ATTR_LSTRIP).tolist()}
        strips = bool(np.any(kinds & (ATTR_LSTRIP | ATTR_RSTRIP)))
        self._found_in_chats = SpecialTokens({**special, **defined}, takes, strips=strips)
        self._found_in_text = SpecialTokens(defined, takes, strips=strips)
        ends = {i for i in special.values() if llama.llama_vocab_is_eog(vocab, i)}
        self.stop_ids = frozenset(ends | {i for i in (eos, int(llama.llama_vocab_eot(vocab))) if i >= 0})
        self._beginning = self._spelling(self._bos)
        render = make_renderer(template, self._beginning, self._spelling(eos)) if template else None
        super().__init__(render=render, special=special, control=self._ids, template=template)

    @cached_property
    def token_length(self) -> TokenLength | None:
        kind = self._model.metadata("tokenizer.ggml.model")
        if kind not in ("llama", "gpt2") or any(self._strips.values()):
            return None
        names = [self._text(token) for token in range(self.vocabulary_size)]  # longer than what it adds, for spaces
        return TokenLength.of(self._pieces, names, whole=kind == "llama")

    def encode(self, text: str, *, token_limit: int | None = None) -> list[int]:
        check_length(text, token_limit, self.min_token_count)
        return self._lead + self._as_text(text)

    def decode(self, tokens: Sequence[int]) -> str:
        begins = bool(len(tokens)) and tokens[0] == self._bos  # else the space that leads a text would stay
        return self._detokenize(tokens[1:] if begins else tokens, spelled=False)

    def spell(self, tokens: Sequence[int]) -> str:
        return self._detokenize(tokens, spelled=True)

    def pieces(self) -> list[bytes]:
        return self._pieces

    @cached_property
    def _pieces(self) -> list[bytes]:
        return [self._piece(token) for token in range(self.vocabulary_size)]

    def _plain(self, text: str, *, begins: bool = True) -> list[int]:
        lead, rest = (self._lead, self._rest(text)) if begins else ([], text)
        return lead + self._tokenize(rest, special=True)

    def _mixed(self, text: str, reveal: Callable[[str], str], *, begins: bool = True) -> list[int]:
        tokens, strips = list(self._lead if begins else ()), False
        for piece in re.split(f"({self._control.pattern})", self._rest(text) if begins else text):
            if piece in self._ids:
                tokens.append(self._ids[piece])
                strips = self._strips[tokens[-1]]
            elif piece:
                tokens += self._as_text(reveal(piece.lstrip() if strips else piece))
                strips = False
        return tokens

    def _rest(self, text: str) -> str:
        """A rendered chat without its BOS token, which is added once whether or not the template writes it."""
        return text.removeprefix(self._beginning) if self._lead else text

    def _as_text(self, text: str) -> list[int]:
        """Tokens of plain text without control tokens: a marker is split after its first character."""
        if not text:
            return []
        edges = [0, *(found.start() + 1 for found in self._markers.finditer(text)), len(text)]
        first, *others = pairwise(sorted(set(edges)))
        tokens = self._tokenize(text[slice(*first)], special=False)
        for start, stop in others:
            tokens += self._going_on(text[start:stop])
        return tokens

    def _going_on(self, text: str) -> list[int]:
        """Tokens of a text that continues another: some vocabularies put a space before a first one."""
        seam, joined = self._tokenize(_SEAM, special=False), self._tokenize(_SEAM + text, special=False)
        clean = joined[: len(seam)] == seam
        return joined[len(seam) :] if clean else self._tokenize(text, special=False)

    def _tokenize(self, text: str, *, special: bool) -> list[int]:
        if not text:
            return []
        tokens: list[int] = []
        for piece in (self._found_in_chats if special else self._found_in_text).cut(text):
            check_cancelled()
            tokens += self._tokenize_piece(piece, special=special)
        return tokens

    def _tokenize_piece(self, text: str, *, special: bool) -> list[int]:
        data = text.encode("utf-8")
        room = len(data) + 8
        while True:
            tokens = np.empty(room, np.int32)
            pointer = ctypes.cast(tokens.ctypes.data, ctypes.POINTER(Token))
            with self._model.alive():
                count = llama.llama_tokenize(self._vocab, data, len(data), pointer, room, False, special)
            if count >= 0:
                return [int(token) for token in tokens[:count]]
            room = -count

    def _detokenize(self, tokens: Sequence[int], *, spelled: bool) -> str:
        if not len(tokens):
            return ""
        ids = np.asarray(tokens, dtype=np.int32)
        pointer = ctypes.cast(ids.ctypes.data, ctypes.POINTER(Token))
        room = 16 + 8 * len(ids)
        while True:
            text = ctypes.create_string_buffer(room)
            with self._model.alive():
                count = llama.llama_detokenize(self._vocab, pointer, len(ids), text, room, False, spelled)
            if count >= 0:
                return text.raw[:count].decode("utf-8", errors="replace")
            room = -count

    def _piece(self, token: int) -> bytes:
        room = 64
        while True:
            text = ctypes.create_string_buffer(room)
            with self._model.alive():
                count = int(llama.llama_token_to_piece(self._vocab, token, text, room, 0, False))
            if count >= 0:
                return text.raw[:count]
            room = -count

    def _text(self, token: int) -> str:
        return str((llama.llama_vocab_get_text(self._vocab, token) or b"").decode("utf-8", errors="replace"))

    def _spelling(self, token: int) -> str:
        return self._text(token) if token >= 0 else ""
