"""Hooks into a running step: reading attention and deviation, choosing tokens between layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rekindle.core.kv import Span

Positions = NDArray[np.int64]  # sorted, each once


class Selector(Protocol):
    """Chooses between layers which tokens of a row are computed further."""

    def choose(self, layer: int, positions: Positions) -> Positions:
        """The subset of `positions` that `layer` shall compute; called from layer 1 on.

        A dropped position never comes back. Its KV in this and later layers must be kept from an earlier step or fed.
        The last position stays if its logits are wanted.
        """


@dataclass(frozen=True, slots=True)
class Reading:
    """What a probe saw in one layer. Attention is the mean over heads, except where it says maximum."""

    layer: int
    positions: Positions  # [tokens] the row's positions in this layer
    received: NDArray[np.float32] | None  # [keys] mean mass a key got from the probed queries, mean over heads
    received_most: NDArray[np.float32] | None  # [keys] the same, maximum over heads
    sent: NDArray[np.float32] | None  # [tokens, segments] mass each token gave to each segment
    deviation: NDArray[np.float32] | None  # [tokens] |new - old| / |old|, root mean square of keys' and values'


@dataclass(frozen=True)
class Probe:
    """Asks a step to report attention and deviation of a row, layer by layer: at once to a row with a selector, else
    when the step ends.

    queries     report the attention that the row's tokens in this span pay to each key
    segments    report the attention that each token of the row pays to each of these spans, which do not overlap
    deviation   report how far new KV is from what it replaces
    layers      in these layers; None: in all
    sampled     one of the heads that share a key head is enough: an estimate
    """

    report: Callable[[Reading], None]
    queries: Span | None = None
    segments: tuple[Span, ...] = ()
    deviation: bool = False
    layers: range | None = None
    sampled: bool = False


@dataclass(frozen=True)
class KvDrift:
    """Asks a step to shift KV that it does not compute along with KV that it does.

    In each layer and span, keys and values of the tokens that are not in the row change by `gain` times the mean
    change of those that are, before the row's tokens attend to them. A span with no token, or all tokens, in the row
    stays as it is.
    """

    spans: tuple[Span, ...]
    gain: float


# The layers whose attention of a question counts when tokens are chosen for recompute. Measured on 15 prompts with
# SmolLM2, those from a sixth to two thirds of the way choose as well as all of them (mean KL 0.0096 and 0.0093, median
# 0.0052 and 0.0082); the first half alone leaves 0.0114.
LOOK_LAYERS = 1 / 6, 2 / 3


def look_layers(layers: int) -> range:
    """Those of a model with this many layers."""
    return range(math.floor(LOOK_LAYERS[0] * layers), math.ceil(LOOK_LAYERS[1] * layers))


@dataclass(frozen=True)
class AttentionMap:
    """Asks a step what some of a row's tokens attend to: once for the whole pass, while a `Probe` reports every layer.

    queries   the tokens that attend; they are in the row
    report    called with `[keys]`, one number for each position up to the row's last: the attention it receives from
              the queries times the norm of its value (over the mean norm), maximum over heads, mean over layers. A
              layer that only has to compute keys and values does not count
    layers    in these layers; None: in all
    """

    queries: Span
    report: Callable[[NDArray[np.float32]], None]
    layers: range | None = None
