"""Changes of valid inputs: of bytes, of numbers in them, and of JSON. All that is drawn comes from a seeded source."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

SIZES = (0, 1, 2, 3, 7, 8, 31, 32, 127, 128, 129, 255, 256, 511, 512, 4095, 65535, 65536)
NUMBERS = (*SIZES, -1, -128, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63,
           (1 << 64) - 1, 1 << 64, 10**30, 10**400)  # fmt: skip
# What cannot be said by a Python value is put into the text afterwards.
_TEXTS = {
    "@deep@": "[" * 100_000 + "]" * 100_000,
    "@digits@": "9" * 5000,
    "@many@": "[" + "{}," * 300_000 + "{}]",
    "@dicts@": "[" + '{"a":{"a":1}},' * 150_000 + "{}]",
    "@again@": '1,"format":2,"format":3',
}
_ODD = (None, True, False, -1, 0, 0.5, 1e308, float("inf"), float("nan"), "", "\ud800", "\0", "x" * 5000, "é" * 100, [],
        {}, [[]], [None], {"": {}}, [[[[[[0]]]]]], "../../etc/passwd", "(a+)+$", "(?:\\w{500}){500}", "0")  # fmt: skip


def bits(random: Random, data: bytes, most: int = 4) -> bytes:
    """Some bytes changed, cut out, doubled, put in; or the end lost."""
    changed = bytearray(data)
    for _ in range(random.randint(1, most)):
        at = random.randrange(len(changed) + 1)
        stop = min(len(changed), at + random.choice((1, 2, 4, 8, 64, 512)))
        kind = random.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            del changed[at:stop]
        elif kind == 3:
            changed[at:at] = changed[at:stop]
        elif kind == 4:
            changed[at:at] = random.randbytes(random.choice((1, 4, 8, 512)))
        else:
            del changed[at:]
    return bytes(changed)


def number(random: Random, width: int, near: int = 0) -> int:
    """A number of so many bytes, at some edge or near another one."""
    drawn = random.choice((*NUMBERS, near - 1, near + 1, 2 * near, near // 2, random.getrandbits(8 * width)))
    return drawn % (1 << (8 * width))


def integer(random: Random, data: bytes, at: int, width: int) -> bytes:
    """The little-endian number at a place replaced by another."""
    near = int.from_bytes(data[at : at + width], "little")
    return data[:at] + number(random, width, near).to_bytes(width, "little") + data[at + width :]


def value(random: Random, old: Any) -> Any:
    """Something in place of a JSON value: odd, or of the same kind."""
    kind = random.randrange(10)
    if kind == 0:
        return _odd(random) if random.randrange(8) else random.choice([*_TEXTS])
    if isinstance(old, bool) or old is None or kind < 4:
        return _odd(random)
    if isinstance(old, int):
        return random.choice((*NUMBERS, old + 1, old - 1, 2 * old))
    if isinstance(old, float):
        return random.choice((0.0, -old, old * 2, 1e300, 1e-300))
    if isinstance(old, str):
        at = random.randrange(len(old) + 1)
        return random.choice((old[:at], old + old, old[:at] + random.choice('0f\0\n"é[{') + old[at:], old.upper()))
    if isinstance(old, list):
        return random.choice((old[:-1], old + old, old * 50, old[::-1], [*old, _odd(random)]))
    return dict(random.sample([*old.items()], len(old) // 2)) if isinstance(old, dict) else _odd(random)


def _odd(random: Random) -> Any:
    return copy.deepcopy(random.choice(_ODD))


def tree(random: Random, root: Any, most: int = 3) -> Any:
    """A JSON value with some of its parts changed, taken away or renamed."""
    holder = [json.loads(json.dumps(root))]
    for _ in range(random.randint(1, most)):
        places: list[tuple[Any, Any]] = [(holder, 0)]
        for node, key in places:  # grows as it goes
            child = node[key]
            keys = child if isinstance(child, dict) else range(len(child)) if isinstance(child, list) else ()
            places += [(child, inner) for inner in keys][:200]
        node, key = places[-1 - min(random.randrange(len(places)), random.randrange(len(places)))]
        if isinstance(node, dict) and random.randrange(6) == 0:
            node[random.choice(("", "more", "format"))] = node.pop(key)
        elif isinstance(node, dict) and random.randrange(6) == 0:
            del node[key]
        else:
            node[key] = value(random, node[key])
    return holder[0]


def text_of(root: Any, dumps: Callable[[Any], str] = json.dumps) -> str:
    """The JSON of a value, with what only a text can say."""
    text = dumps(root)
    for name, odd in _TEXTS.items():
        text = text.replace(f'"{name}"', odd, 1)
    return text
