"""The messages between `Constraint` and `grammar_worker`: the vocabulary first, then a grammar, then tokens.

A grammar begins a reply and a token advances it. Both are answered by a bit mask of the tokens allowed next, or by a
sentence that says why there is none.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence

from rekindle.core.grammar import Grammar
from rekindle.errors import InvalidGrammar

NOTHING_FOLLOWS = "The grammar leads to a place where nothing may follow. Give every rule a way to end."
_GRAMMAR, _TOKEN = b"g", b"t"
_MASK, _REFUSED = b"m", b"r"
_NUMBER = struct.Struct("<I")


def vocabulary_message(pieces: Sequence[bytes]) -> bytes:
    """The bytes of every token; the last one stands for the end of the reply."""
    return _NUMBER.pack(len(pieces)) + array("I", map(len, pieces)).tobytes() + b"".join(pieces)


def read_vocabulary(message: bytes) -> list[bytes]:
    lengths = array("I")
    (count,) = _NUMBER.unpack_from(message)
    start = _NUMBER.size + count * lengths.itemsize
    lengths.frombytes(message[_NUMBER.size : start])
    pieces = []
    for length in lengths:
        pieces.append(message[start : start + length])
        start += length
    return pieces


def grammar_message(grammar: Grammar) -> bytes:
    return _GRAMMAR + json.dumps([grammar.kind, grammar.text]).encode()


def token_message(token: int) -> bytes:
    return _TOKEN + _NUMBER.pack(token)


def read_step(message: bytes) -> Grammar | int:
    if message[:1] == _GRAMMAR:
        return Grammar(*json.loads(message[1:]))
    return int(_NUMBER.unpack(message[1:])[0])


def mask_message(bits: bytes) -> bytes:
    return _MASK + bits


def refusal_message(refusal: InvalidGrammar) -> bytes:
    return _REFUSED + str(refusal).encode(errors="replace")


def read_mask(message: bytes) -> bytes:
    """The bits of the tokens allowed next. Raises `InvalidGrammar` for a refusal."""
    if message[:1] == _REFUSED:
        raise InvalidGrammar(message[1:].decode())
    return message[1:]
