"""GGUF headers: pairs, arrays and tensors of any number, length and type."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

from rekindle.errors import BrokenModel, NotAModel
from rekindle.models.gguf import embeds, read_header
from tests.fuzz import mutations
from tests.fuzz.family import Family


class Inputs(Family):
    """A model of three tensors, written field by field, so that any field can be another one."""

    errors = (BrokenModel, NotAModel)

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.gguf"

    def prepare(self, random: Random) -> int:
        writer = _Writer(random, random.choice((0.0, 0.01, 0.05)))
        data = writer.model()
        if random.randrange(3) == 0:
            data = mutations.bits(random, data)
        self.path.write_bytes(data)
        return len(data)

    def read(self) -> None:
        embeds(self.path)
        header = read_header(self.path)
        assert isinstance(header.architecture, str)


class _Writer:
    """Writes fields; each is another one with some probability."""

    def __init__(self, random: Random, wrong: float) -> None:
        self._random = random
        self._wrong = wrong

    def number(self, code: str, value: int) -> bytes:
        width = struct.calcsize("<" + code)
        if self._random.random() < self._wrong:
            value = mutations.number(self._random, width, value)
        return value.to_bytes(width, "little")

    def text(self, value: str) -> bytes:
        data = value.encode()
        if self._random.random() < self._wrong:
            data = self._random.choice((b"", b"\xff\xfe", data * 100))
        return self.number("Q", len(data)) + data

    def pair(self, name: str) -> bytes:
        random = self._random
        kind = random.choice((0, 4, 5, 6, 7, 8, 9, 10, 12))
        head = self.text(name) + self.number("I", kind)
        if kind == 8:
            long = random.random() < self._wrong
            return head + self.text("\U0001f600" + "x" * random.choice((1000, 2 << 20)) if long else "llama")
        if kind != 9:
            return head + self.number({0: "B", 7: "B", 10: "Q", 12: "Q"}.get(kind, "I"), 1)
        count = random.choice((0, 1, 50, 50, 200_000 if random.randrange(50) == 0 else 3))
        inner = random.choice((8, 8, 4, 9))
        items = b"".join(self.text("t") for _ in range(count)) if inner == 8 else bytes(4 * count)
        return head + self.number("I", inner) + self.number("Q", count) + items

    def tensor(self, name: str, offset: int) -> bytes:
        sizes = b"".join(self.number("Q", size) for size in (8, 4))
        return self.text(name) + self.number("I", 2) + sizes + self.number("I", 0) + self.number("Q", offset)

    def model(self) -> bytes:
        random = self._random
        pairs, tensors = random.choice((0, 3, 10, 3000)), random.choice((0, 3, 3, 1000))
        if pairs == 3000 and random.randrange(10):
            pairs = 5
        head = b"GGUF" + self.number("I", 3) + self.number("Q", tensors) + self.number("Q", pairs + 1)
        named = self.text("general.architecture") + self.number("I", 8) + self.text("llama")
        about = b"".join(self.pair(random.choice((f"key{n}", "general.alignment"))) for n in range(pairs))
        places = b"".join(self.tensor(f"blk.{n}.weight", 128 * n) for n in range(tensors))
        data = head + named + about + places
        return data + bytes(-len(data) % 32 + 128 * tensors)
