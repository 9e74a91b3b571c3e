"""Cells of a published context: a token chunk in a layer, whose KV is computed here or streamed from an origin.

chunk     0        1        2        3          chunks of 128 tokens, the last may be shorter
layer 3   computed computed streamed streamed
layer 2   computed computed streamed streamed   computed layers of a chunk begin at layer 0 and have no gap: a hidden
layer 1   computed computed computed streamed   state comes up from below, and ends where the computing ends
layer 0   computed computed computed computed
          c = 4    c = 4    c = 2    c = 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import Span

CHUNK_TOKENS = 128


class Cell(NamedTuple):
    """The KV of one chunk in one layer."""

    chunk: int
    layer: int


@dataclass(frozen=True, slots=True)
class Cells:
    """How a context of so many tokens is cut."""

    tokens: int
    layers: int
    chunk_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.layers < 1 or self.chunk_tokens < 1:
            raise ValueError(f"nothing to cut: {self}")

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.tokens // self.chunk_tokens)

    def span(self, chunk: int) -> Span:
        """The tokens of a chunk."""
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk {chunk} of {self.chunks}")
        return Span(chunk * self.chunk_tokens, min(self.tokens, (chunk + 1) * self.chunk_tokens))

    @property
    def spans(self) -> tuple[Span, ...]:
        """The tokens of every chunk; they tile the context."""
        return tuple(map(self.span, range(self.chunks)))


@dataclass(frozen=True, slots=True)
class Split:
    """How many layers of each chunk are computed here: `[0, computed[chunk])`. The others are streamed."""

    layers: int
    computed: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.computed or any(not 0 <= count <= self.layers for count in self.computed):
            raise ValueError(f"not a split of {self.layers} layers: {self.computed}")

    @classmethod
    def alike(cls, chunks: int, layers: int, computed: int) -> Split:
        """The same for every chunk."""
        return cls(layers, (computed,) * chunks)

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return len(self.computed)

    def computes(self, cell: Cell) -> bool:
        """Whether a cell is computed here."""
        return cell.layer < self.computed[cell.chunk]

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[chunks, layers] the same for all cells."""
        return np.arange(self.layers) < np.asarray(self.computed)[:, None]


@dataclass(frozen=True, slots=True)
class Streamed:
    """Cells in the order in which the link carries them, none twice. `numbers` are `chunk * layers + layer`."""

    layers: int
    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.numbers)) != len(self.numbers) or min(self.numbers, default=0) < 0:
            raise ValueError("a cell is streamed twice, or is none")

    @classmethod
    def of(cls, layers: int, cells: Iterable[Cell]) -> Streamed:
        """An order of cells."""
        return cls(layers, tuple(cell.chunk * layers + cell.layer for cell in cells))

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[Cell]:
        return (Cell(*divmod(number, self.layers)) for number in self.numbers)

    def without(self, cells: Iterable[Cell]) -> Streamed:
        """The same order, less some of them."""
        gone = {cell.chunk * self.layers + cell.layer for cell in cells}
        return Streamed(self.layers, tuple(number for number in self.numbers if number not in gone))


@dataclass(frozen=True, slots=True)
class Event:
    """What one of the lanes did, in seconds from the beginning: some layers of a chunk. For timelines.

    The question that follows the context is a chunk, too, the one behind the last.
    """

    lane: Literal["compute", "link"]
    chunk: int
    first_layer: int
    stop_layer: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prefill has come, seen between two steps of the compute lane.

    computed        for each chunk how many layers its step has computed, 0 while it had none. A step that runs counts
                    as done: its end is not changed any more, it only keeps the lane busy
    arrived         cells that came from the origin
    flying          cells that are on the link, until it is free again. Who has given one up leaves it out
    *_busy_seconds  how long each lane still works on what it has begun
    """

    computed: tuple[int, ...]
    arrived: frozenset[Cell] = frozenset()
    flying: tuple[Cell, ...] = ()
    compute_busy_seconds: float = 0.0
    link_busy_seconds: float = 0.0

    @classmethod
    def start(cls, chunks: int) -> Progress:
        """Nothing has begun."""
        return cls((0,) * chunks)

    def brought(self, layers: int) -> NDArray[np.bool_]:
        """[chunks, layers] what came, or is coming, from the origin."""
        mask = np.zeros((len(self.computed), layers), bool)
        for cell in (*self.arrived, *self.flying):
            mask[cell] = True
        return mask


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is computed, what is streamed and in which order, and how long that takes from now on.

    Chunks are computed from the front, each in one step from layer 0 upwards. A chunk whose step is over, and whose
    split says more layers than it has computed, is computed a second time from layer 0: its hidden state is gone.
    What came from the origin stays, even where a step passes through its layer.

    With `meeting` the split only says where both lanes are expected to meet: chunks are computed from the front, cells
    come from the back, the top layer first, and both go on until nothing is missing.
    """

    split: Split
    order: Streamed
    seconds: float
    meeting: bool = False

    def owners(self, progress: Progress | None = None) -> NDArray[np.int64]:
        """[chunks, layers] how often each cell is provided for: by the origin so far, by computing, by what it still
        sends. One everywhere, or the schedule is wrong."""
        progress = progress or Progress.start(self.split.chunks)
        brought = progress.brought(self.split.layers)
        again = np.zeros(brought.size, np.int64)
        np.add.at(again, np.asarray(self.order.numbers, np.int64), 1)
        return brought.astype(np.int64) + (self.split.mask & ~brought) + again.reshape(brought.shape)


def steps(split: Split, progress: Progress) -> Sequence[tuple[int, int]]:
    """The steps that are left, in their order: a chunk, and how many layers of it."""
    pairs = zip(split.computed, progress.computed, strict=True)
    return [(chunk, count) for chunk, (count, done) in enumerate(pairs) if count > done]
