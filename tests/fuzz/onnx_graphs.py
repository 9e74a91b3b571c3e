"""ONNX graphs: fields cut off, doubled and changed; lengths and shapes at every edge."""

from __future__ import annotations

from pathlib import Path
from random import Random

from rekindle.errors import BrokenModel, ModelNotFound, UnsupportedModel
from rekindle.models.onnx_folder import read_onnx_model
from tests.fuzz import mutations
from tests.fuzz.family import Family


class Inputs(Family):
    """A small decoder whose weights are beside it."""

    errors = (BrokenModel, ModelNotFound, UnsupportedModel)

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.onnx"
        (folder / "genai_config.json").write_text('{"model": {"vocab_size": 9, "decoder": {"head_size": 8}}}')
        (folder / "data").write_bytes(bytes(64))

    def prepare(self, random: Random) -> int:
        data = _model(random, random.choice((0.0, 0.02, 0.1)))
        if random.randrange(2):
            data = mutations.bits(random, data)
        self.path.write_bytes(data)
        return len(data)

    def read(self) -> None:
        model = read_onnx_model(self.path)
        assert model.layout.layers


class _Writer:
    """Writes fields of messages; each is another one with some probability."""

    def __init__(self, random: Random, wrong: float) -> None:
        self._random, self._wrong = random, wrong

    def number(self, field: int, value: int) -> bytes:
        if self._random.random() < self._wrong:
            value = mutations.number(self._random, 8, value)
        return _varint(field << 3) + _varint(value)

    def text(self, field: int, value: str | bytes) -> bytes:
        data = value.encode() if isinstance(value, str) else value
        length = len(data)
        if self._random.random() < self._wrong:
            length = mutations.number(self._random, 8, length)
        return _varint(field << 3 | 2) + _varint(length) + data

    def value(self, name: str, kind: int, shape: tuple[int | None, ...]) -> bytes:
        sizes = b"".join(self.text(1, self.text(2, "n") if size is None else self.number(1, size)) for size in shape)
        return self.text(1, name) + self.text(2, self.text(1, self.number(1, kind) + self.text(2, sizes)))

    def tensor(self) -> bytes:
        pairs = (("location", "data"), ("offset", "0"), ("length", "64"))
        external = b"".join(self.text(13, self.text(1, key) + self.text(2, value)) for key, value in pairs)
        return self.number(1, 16) + self.number(2, 1) + self.text(8, "weight") + external


def _model(random: Random, wrong: float) -> bytes:
    writer = _Writer(random, wrong)
    inside = writer.text(1, writer.text(2, "x") + writer.text(4, "Add"))
    for _ in range(random.choice((0, 1, 20))):  # graphs inside graphs
        inside = writer.text(1, writer.text(4, "Loop") + writer.text(5, writer.text(6, inside)))
    halves = [f"{i}.{half}" for i in range(random.choice((1, 2))) for half in ("key", "value")]
    node = writer.text(2, "out") + writer.text(2, "present.0.key") + writer.text(4, "GroupQueryAttention")
    graph = writer.text(1, node) + inside * random.choice((1, 1, 500)) + writer.text(5, writer.tensor())
    for name in ("input_ids", "attention_mask"):
        graph += writer.text(11, writer.value(name, 7, (None, None)))
    for half in halves:
        graph += writer.text(11, writer.value(f"past_key_values.{half}", 1, (None, 2, None, 8)))
        graph += writer.text(12, writer.value(f"present.{half}", 1, (None, 2, None, 8)))
    graph += writer.text(12, writer.value("logits", 1, (None, None, 9)))
    return writer.number(1, 9) + writer.text(7, graph)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))
