"""Cases of computing and streaming, and a plain simulation of them: step by step, one event after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.waiting import timeline
from benchmarks.waiting.timeline import LinkCosts, start
from rekindle.core.cells import Cell, Progress, Split, TransferOrder

KINDS = ("alike", "growing", "sizes", "sparse", "contexts")


def some_costs(kind: str, seed: int, chunks: int, layers: int) -> LinkCosts:
    """Costs of a kind, streaming everything taking from 0.4 to 2.5 times as long as computing everything.

    growing   later chunks attend to more
    sizes     slices compress more or less well
    sparse    attention leaves out more or less, by cell
    contexts  chunks of several contexts: other sizes and other costs, by chunk
    """
    random = np.random.default_rng([seed, KINDS.index(kind)])
    whole, size = np.ones((chunks, layers)), np.full((chunks, layers), 1e5)
    if kind in ("growing", "sizes"):
        whole *= 1 + random.uniform(0.05, 0.6) * np.arange(chunks)[:, None]
    if kind == "sizes":
        size *= random.uniform(0.3, 2.0, (chunks, layers)) * random.uniform(0.4, 2.0, (chunks, 1))
    if kind == "sparse":
        whole *= np.exp(random.uniform(np.log(0.15), np.log(2.5), (chunks, layers)))
    if kind == "contexts":
        whole *= np.exp(random.uniform(-1, 1, (chunks, 1)))
        size *= np.exp(random.uniform(-1, 1, (chunks, 1)))
    top = np.minimum(whole, whole.mean() * random.uniform(0.05, 0.2))
    ratio = np.exp(random.uniform(np.log(0.4), np.log(2.5)))
    question = np.full(layers, random.uniform(0.0, 0.5))
    return LinkCosts(whole, top, size, question, float(size.sum() / whole.sum() / ratio))


def plain_costs(chunks: int, layers: int, **changed: object) -> LinkCosts:
    """A layer takes 1 second, its projections 0.25, a slice 1 second; the question takes none."""
    ones = np.ones((chunks, layers))
    values = {
        "compute_seconds": ones,
        "top_seconds": ones / 4,
        "size_bytes": ones * 100,
        "question_seconds": np.zeros(layers),
        "bandwidth": 100.0,
    }
    return LinkCosts(**{**values, **changed})  # type: ignore[arg-type]


def split_of(layers: int, *computed: int) -> Split:
    return Split(layers, computed)


def order_of(layers: int, *cells: Sequence[int]) -> TransferOrder:
    return timeline.order_of(layers, (Cell(*cell) for cell in cells))


def slow_seconds(split: Split, order: TransferOrder, costs: LinkCosts, progress: Progress | None = None) -> float:
    """When everything is through, found by going along: each cell has a moment from which on it can be used."""
    progress = progress or start(split.chunks)
    there = dict.fromkeys(progress.arrived, 0.0) | dict.fromkeys(progress.flying, progress.link_busy_seconds)
    for chunk, done in enumerate(progress.computed):
        there |= {Cell(chunk, layer): 0.0 for layer in range(done)}
    link = decoder = progress.link_busy_seconds
    for cell in order:
        assert cell not in there
        link += costs.request_seconds + costs.size_bytes[cell] / costs.bandwidth
        decoder = max(decoder, link) + costs.size_bytes[cell] * costs.decode_seconds_per_byte
        there[cell] = decoder
    clock = progress.compute_busy_seconds
    for chunk, (wanted, done) in enumerate(zip(split.computed, progress.computed, strict=True)):
        for layer in range(wanted if wanted > done else 0):
            if layer == wanted - 1:
                clock += costs.top_seconds[chunk, layer]
            else:
                clock = max([clock, *(there[Cell(before, layer)] for before in range(chunk))])
                clock += costs.compute_seconds[chunk, layer]
            there.setdefault(Cell(chunk, layer), clock)
    for layer in range(split.layers):
        clock = max([clock, *(there[Cell(chunk, layer)] for chunk in range(split.chunks))])
        clock += costs.question_seconds[layer]
    return clock
