"""Feeds and selectors for tests of the engine contract."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.engine.hooks import Positions


class Stored:
    """A feed of KV that was exported before."""

    def __init__(self, kv: Kv, span: Span | None = None, layers: range | None = None) -> None:
        self.kv = kv
        self.span = span or kv.span
        self.layers = layers or range(len(kv.layers))
        self.filled: list[int] = []

    def fill(self, layer: int, out: LayerKv) -> None:
        self.filled.append(layer)
        start, stop = self.span.start - self.kv.span.start, self.span.stop - self.kv.span.start
        out.keys[:] = self.kv.layers[layer].keys[:, start:stop]
        out.values[:] = self.kv.layers[layer].values[:, start:stop]


class Garbage:
    """A feed of numbers that mean nothing."""

    def __init__(self, span: Span, layers: int) -> None:
        self.span, self.layers = span, range(layers)

    def fill(self, layer: int, out: LayerKv) -> None:
        out.keys[:] = 7
        out.values[:] = 3


class Failing(Garbage):
    """A feed whose source breaks in one layer."""

    def __init__(self, span: Span, layers: int, broken: int) -> None:
        super().__init__(span, layers)
        self.broken = broken

    def fill(self, layer: int, out: LayerKv) -> None:
        super().fill(layer, out)
        if layer == self.broken:
            raise OSError("the disk is gone")


class Choosing:
    """A selector that follows a function."""

    def __init__(self, choice: Callable[[int, Positions], list[int]]) -> None:
        self.choice = choice
        self.seen: list[tuple[int, list[int]]] = []

    def choose(self, layer: int, positions: Positions) -> Positions:
        self.seen.append((layer, positions.tolist()))
        return np.asarray(self.choice(layer, positions), dtype=np.int64)
