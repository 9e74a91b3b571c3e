"""The model's own tokenizer, by the `tokenizers` library.

If user text spells a control token, a second tokenizer is used, in which every control token has a random name. What
the template wrote is respelled to these names, user text is not, and the rest of the pipeline stays the same.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import tokenizers

from rekindle.text.base import TokenLength, check_length
from rekindle.text.chat_template import ChatTokenizer, Render, is_marker
from rekindle.text.fill_in import ENDS
from rekindle.text.tools.styles import TemplateTools


class HfTokenizer(ChatTokenizer):
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
        """`template` is the source that `render` renders: the markers it writes are control tokens."""
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()  # some files ask for it; a prompt is never cut or padded silently
        self._backend.no_padding()
        self.vocabulary_size = vocabulary_size
        added = self._backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        around = TemplateTools.written_by(template)
        self._ids = {t.content: i for i, t in added.items() if t.content in special or is_marker(t.content, around)}
        self.stop_ids = stop_ids | {self._ids[mark] for mark in ENDS if mark in self._ids}
        super().__init__(render=render, special=special, control=self._ids, template=template)

    def encode(self, text: str, *, token_limit: int | None = None) -> list[int]:
        check_length(text, token_limit, self.min_token_count)
        backend = self._renamed if self._control.search(text) else self._backend
        return encode_text(backend, text, add_special_tokens=True)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    def pieces(self) -> list[bytes]:
        return self._pieces

    @cached_property
    def _pieces(self) -> list[bytes]:
        return vocabulary_bytes(self._backend, self.vocabulary_size)

    @cached_property
    def token_length(self) -> TokenLength | None:
        return find_token_length(self._backend, self._pieces)

    def _plain(self, text: str, *, begins: bool = True) -> list[int]:  # noqa: ARG002  (the template writes a beginning)
        return encode_text(self._backend, text, add_special_tokens=False)

    def _mixed(self, text: str, reveal: Callable[[str], str], *, begins: bool = True) -> list[int]:  # noqa: ARG002
        respelled = self._control.sub(lambda found: self._secret(found.group()), text)
        return encode_text(self._renamed, reveal(respelled), add_special_tokens=False)

    def _secret(self, spelling: str) -> str:
        return f"\ue000{self._nonce}:{self._ids[spelling]}\ue001"

    def _rename(self, piece: str) -> str:
        return self._secret(piece) if piece in self._ids else piece

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """The same tokenizer with its control tokens renamed."""
        description = json.loads(self._backend.to_str())
        for token in description["added_tokens"]:
            if token["content"] in self._ids:
                token |= {"content": self._secret(token["content"]), "normalized": False}
        model = description["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {self._rename(piece): index for piece, index in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[self._rename(piece), score] for piece, score in model["vocab"]]
        if model.get("merges"):  # no merge may produce a control token
            model["merges"] = [m for m in model["merges"] if _merged(m) not in self._ids]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = self._rename(model["unk_token"])
        return tokenizers.Tokenizer.from_str(json.dumps(description))


def _merged(merge: str | list[str]) -> str:
    return merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)


_BEFORE = "x"  # decoded before a token to see what it adds inside a text: no decoder has a rule for it
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def vocabulary_bytes(backend: tokenizers.Tokenizer, size: int) -> list[bytes]:
    """The bytes that each of `size` token ids adds inside a text; empty for special tokens.

    The tokenizer's decoder gives them, except for byte tokens: it turns half a character into U+FFFD.
    """
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    kinds = {str(part["type"]) for part in _parts(json.loads(backend.to_str())["decoder"])}
    alphabet = _byte_alphabet() if "ByteLevel" in kinds else {}
    pieces = [b""] * size
    for index in set(range(size)) - special:
        token = backend.id_to_token(index)  # not from its vocabulary: there, added ones are not as they are decoded
        if token is None:
            continue
        if alphabet.keys() >= set(token):
            pieces[index] = bytes(map(alphabet.__getitem__, token))
        elif "ByteFallback" in kinds and (found := _BYTE.fullmatch(token)):
            pieces[index] = bytes.fromhex(found.group(1))
        else:
            pieces[index] = _added_text(backend, token).encode("utf-8")
    return pieces


# Steps that lose no characters. Others may strip accents or spaces, or replace unknown words.
_KEEPING_NORMALIZERS = {"ByteLevel", "NFC", "Prepend", "Replace"}
_KEEPING_SPLITTERS = {"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"}


def find_token_length(backend: tokenizers.Tokenizer, pieces: Sequence[bytes]) -> TokenLength | None:
    """How much text a token may cover; None if the tokenizer may drop text before looking it up."""
    about = json.loads(backend.to_str())
    normalizers, splitters = list(_parts(about["normalizer"])), list(_parts(about["pre_tokenizer"]))
    by_bytes = "ByteLevel" in {part["type"] for part in (*normalizers, *splitters)}
    keeps = (
        about["model"]["type"] in ("BPE", "Unigram")
        and (by_bytes or about["model"].get("byte_fallback"))
        and all(part["type"] in {*_KEEPING_NORMALIZERS, "Sequence"} for part in normalizers)
        and all(_grows(part) for part in normalizers if part["type"] == "Replace")
        and all(part["type"] in {*_KEEPING_SPLITTERS, "Sequence"} for part in splitters)
        and not any(part.get("behavior") == "Removed" for part in splitters)
        and not any(token["lstrip"] or token["rstrip"] for token in about["added_tokens"])
    )
    if not keeps:
        return None
    names = [token["content"] for token in about["added_tokens"]]
    if not by_bytes:  # a space may be written as a longer name, which texts may contain too
        names += backend.get_vocab(with_added_tokens=False)
    composes = any(part["type"] == "NFC" for part in normalizers)  # at most three characters become two bytes
    return TokenLength.of(pieces, names, whole=not by_bytes, doubled=composes)


def _grows(replace: Mapping[str, Any]) -> bool:
    """Whether a `Replace` normalizer never shortens a text."""
    found = replace["pattern"].get("String")
    return found is not None and len(found.encode("utf-8")) <= len(replace["content"].encode("utf-8"))


def _added_text(backend: tokenizers.Tokenizer, token: str) -> str:
    if backend.decoder is None:  # then tokens are joined with spaces
        return f" {token}"
    return str(backend.decoder.decode([_BEFORE, token])).removeprefix(_BEFORE)


def _parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The parts of a decoder, normalizer or pre-tokenizer, which may be a nested sequence."""
    if decoder is not None:
        yield decoder
        for name in ("decoders", "normalizers", "pretokenizers"):
            for part in decoder.get(name, ()):
                yield from _parts(part)


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies: visible bytes themselves, others past 255."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}


_LONG_CHARACTERS = 1 << 14  # take a few milliseconds
LARGE_CHARACTERS = 1 << 18  # take about 50 MB


def encode_text(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Tokens of a text. Tokenizing a long text lets other Python threads run."""
    if len(text) < _LONG_CHARACTERS:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    # Only the batch call releases the GIL; for one text it takes as long, in a thread of the library.
    tokens: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    if len(text) >= LARGE_CHARACTERS:
        trim_heap()
    return tokens


def trim_heap() -> None:
    """Return freed memory to the system: glibc keeps the pages of every thread that once needed many. Else a no-op."""
    call = _malloc_trim()
    if call is not None:
        call(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # Windows, macOS, musl
        return None
    return found
