"""The bytes behind each token of the `tokenizers` library, also of those that are no whole character."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

_BEFORE = "x"  # stands before a token to see what it adds inside a text: no decoder has a rule for it
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(backend: tokenizers.Tokenizer, size: int) -> list[bytes]:
    """What each of `size` token ids adds inside a text, as the tokenizer's decoder has it; none for special tokens.

    The decoder itself is asked, except for tokens that are bytes: it shows half a character as U+FFFD.
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


def _added_text(backend: tokenizers.Tokenizer, token: str) -> str:
    if backend.decoder is None:  # then texts of tokens are joined with spaces
        return f" {token}"
    return str(backend.decoder.decode([_BEFORE, token])).removeprefix(_BEFORE)


def _parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The decoder's parts: it may be a sequence of others."""
    if decoder is not None:
        yield decoder
        for part in decoder.get("decoders", ()):
            yield from _parts(part)


def _byte_alphabet() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: itself where it is one to see, else one past 255."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + i): byte for i, byte in enumerate(unseen)}
