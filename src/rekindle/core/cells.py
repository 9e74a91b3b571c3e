"""Cells of a published context: a token chunk in a layer, whose KV is computed here or streamed from an origin.

chunk     0        1        2        3          chunks of 128 tokens, the last may be shorter
layer 3   computed computed streamed streamed
layer 2   computed computed streamed streamed   computed layers of a chunk begin at layer 0 and have no gap: a hidden
layer 1   computed computed computed streamed   state comes up from below, and ends where the computing ends
layer 0   computed computed computed computed
          c = 4    c = 4    c = 2    c = 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
class CellGrid:
    """How a context is cut into chunks and layers."""

    tokens: int
    layers: int
    chunk_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.layers < 1 or self.chunk_tokens < 1:
            raise ValueError(f"nothing to cut: {self}")

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.tokens // self.chunk_tokens)

    def __iter__(self) -> Iterator[Cell]:
        """All cells, chunk by chunk."""
        return (Cell(chunk, layer) for chunk in range(self.chunks) for layer in range(self.layers))

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
    """The layers of each chunk that are computed here: `[0, computed[chunk])`. The others are streamed."""

    layers: int
    computed: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.computed or any(not 0 <= count <= self.layers for count in self.computed):
            raise ValueError(f"not a split of {self.layers} layers: {self.computed}")

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.computed)


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Cells in transfer order, each once. `numbers` are `chunk * layers + layer`."""

    layers: int
    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.numbers)) != len(self.numbers) or min(self.numbers, default=0) < 0:
            raise ValueError("a cell is streamed twice, or is invalid")

    def __iter__(self) -> Iterator[Cell]:
        return (Cell(*divmod(number, self.layers)) for number in self.numbers)


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """What a lane did with some layers of a chunk, in seconds from the start. For timelines.

    The question after the context counts as one more chunk.
    """

    lane: Literal["compute", "link"]
    chunk: int
    first_layer: int
    stop_layer: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a prefill between two steps of the compute lane.

    computed        number of layers computed of each chunk. A running step counts as done: it only keeps the lane busy
    arrived         cells that came from the origin
    flying          cells in transfer, without abandoned ones
    *_busy_seconds  how long each lane still works on what it has begun
    """

    computed: tuple[int, ...]
    arrived: frozenset[Cell] = frozenset()
    flying: tuple[Cell, ...] = ()
    compute_busy_seconds: float = 0.0
    link_busy_seconds: float = 0.0

    def brought(self, layers: int) -> NDArray[np.bool_]:
        """[chunks, layers] whether a cell came, or is coming, from the origin."""
        mask = np.zeros((len(self.computed), layers), bool)
        for cell in (*self.arrived, *self.flying):
            mask[cell] = True
        return mask


@dataclass
class RemoteReport:
    """The outcome of streaming a prompt."""

    computed: tuple[int, ...] = ()  # layers of each chunk
    streamed_cells: tuple[Cell, ...] = ()  # that were used
    slices: Mapping[str, int] = field(default_factory=dict)  # how many of those came at each level
    kl: float | None = None  # expected, of the levels that they came at
    failed: str | None = None  # why streaming was abandoned
    events: list[TimelineEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is computed, what is streamed in which order, and how long that takes from now on.

    Chunks are computed from the front, each in one step from layer 0 upwards. A chunk whose step is over, and whose
    split says more layers than it has computed, is computed a second time from layer 0: its hidden state is gone.
    What came from the origin stays, even where a step passes through its layer.

    The split says where both lanes are expected to meet; both go on until nothing is missing.
    """

    split: Split
    order: TransferOrder
    seconds: float


def steps(split: Split, progress: Progress) -> Sequence[tuple[int, int]]:
    """The remaining steps in order: a chunk, and its number of layers."""
    pairs = zip(split.computed, progress.computed, strict=True)
    return [(chunk, count) for chunk, (count, done) in enumerate(pairs) if count > done]
