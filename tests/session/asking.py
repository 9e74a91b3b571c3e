"""Sessions with documents, and a search for what must not be left of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import KvLayout, LayerShape
from rekindle.engine.base import Capabilities, Logits, Row
from rekindle.engine.fake import END, FakeEngine, FakeSequence


def forms_of_tokens(tokens: Sequence[int], window: int = 8) -> Iterator[bytes]:
    """Every run of so many tokens, in every form that somebody might have written it in."""
    for start in range(max(1, len(tokens) - window + 1)):
        run = list(tokens[start : start + window])
        for kind in ("<u2", ">u2", "<u4", ">u4", "<i8", ">i8"):
            if max(run) < 2 ** (8 * int(kind[-1])):
                yield np.array(run).astype(kind).tobytes()
        yield json.dumps(run).encode()
        yield json.dumps(run, separators=(",", ":")).encode()
        yield " ".join(map(str, run)).encode()


def forms_of_text(text: str, window: int = 24) -> Iterator[bytes]:
    """Every so many characters of a text, in every form."""
    for start in range(max(1, len(text) - window + 1)):
        part = text[start : start + window]
        yield part.encode("utf-8")
        yield part.encode("utf-16-le")
        yield json.dumps(part)[1:-1].encode()
        yield json.dumps(part, ensure_ascii=False)[1:-1].encode()


def traces(folder: Path, wanted: Iterator[bytes] | Sequence[bytes]) -> dict[str, list[bytes]]:
    """Which of the byte strings are in which file under a folder, or under that of its library beside it."""
    found: dict[str, list[bytes]] = {}
    patterns = set(wanted)
    for path in sorted([*folder.rglob("*"), *Path(f"{folder}-library").rglob("*")]):
        if path.is_file():
            data = path.read_bytes()
            hits = [pattern for pattern in _candidates(patterns, data) if pattern in data]
            if hits:
                found[str(path.relative_to(folder.parent))] = hits
    return found


def _candidates(patterns: set[bytes], data: bytes) -> list[bytes]:
    """The patterns that may be in the data: those whose first eight bytes have a hash that is there."""
    seen = np.zeros(1 << 24, dtype=bool)
    for shift in range(min(8, len(data))):
        seen[_hashes(np.frombuffer(data, "<u8", (len(data) - shift) // 8, shift))] = True
    short = [pattern for pattern in patterns if len(pattern) < 8]
    long = [pattern for pattern in patterns if len(pattern) >= 8]
    heads = np.frombuffer(b"".join(pattern[:8] for pattern in long), "<u8")
    return [*short, *(long[index] for index in np.flatnonzero(seen[_hashes(heads)]))]


def _hashes(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A number of 24 bits for each."""
    return (words * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)


class _State(FakeSequence):
    """A sequence that can only be taken out and put back as a whole."""

    def snapshot(self) -> bytes:
        return np.ascontiguousarray(self._kv[..., : self.length, :]).tobytes()

    def restore(self, snapshot: bytes | memoryview, length: int) -> None:
        shape = (*self._kv.shape[:3], length, self._kv.shape[4])
        self._kv[..., :length, :] = np.frombuffer(snapshot, np.float32).reshape(shape)
        self.set_length(length)


class WholeStates(FakeEngine):
    """An engine whose state cannot be cut."""

    capabilities = Capabilities(layer_feeds=False, recompute="none", probes=False, opaque="it is so")

    def __init__(self) -> None:
        super().__init__(context_tokens=4000)
        self.layout = KvLayout("uint8", (LayerShape(1, 8192, 8192),))

    def open(self, capacity: int, regime: str, adapter: str | None = None) -> FakeSequence:
        return _State(self, capacity, adapter)


class Terse(FakeEngine):
    """An engine that ends its replies as soon as it may: after `min_tokens`."""

    def __init__(self, *, seed: int = 0, context_tokens: int = 4000) -> None:
        super().__init__(seed=seed, context_tokens=context_tokens)

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        logits = super().step(rows, cancelled)
        for of_row in logits:
            of_row[:, END] += 1e3
        return logits


class Waiting(Terse):
    """An engine that stops before its next step until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.entered = threading.Event(), threading.Event()
        self.go.set()

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.entered.set()
        assert self.go.wait(60)
        return super().step(rows, cancelled)
