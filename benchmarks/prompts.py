"""Prompts for the prefix benches: prefixes that are asked again and again, each time with another ending."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.base import BenchOptions
from benchmarks.data import texts
from rekindle.engine.base import Engine


@dataclass
class SharedPrefix:
    """A prefix of `len(prefix)` tokens and endings for it, no two of which begin with the same token."""

    prefix: list[int]
    endings: Iterator[list[int]]

    def next(self) -> list[int]:
        """The prefix with an ending that was never used."""
        return self.prefix + next(self.endings)


def prompts(engine: Engine, options: BenchOptions, count: int, prefix: int, ending: int) -> list[SharedPrefix]:
    """`count` prompts from the texts, or from random tokens for a model that is random itself.

    The prefixes begin differently: none of them helps another.
    """
    stream = tokens_for(engine, options, count * prefix + 4000)
    random = np.random.default_rng(options.seed)
    firsts = random.permutation(engine.tokenizer.vocabulary_size).tolist()
    made = []
    for number in range(count):
        own = stream[number * prefix : (number + 1) * prefix]
        own[0] = firsts[number]
        made.append(SharedPrefix(own, _endings(stream, firsts[count + number :: count], random, ending)))
    return made


def _endings(stream: list[int], firsts: list[int], random: np.random.Generator, length: int) -> Iterator[list[int]]:
    """Pieces of the texts, each with a first token of its own."""
    for first in firsts:
        start = int(random.integers(0, len(stream) - length))
        yield [int(first), *stream[start + 1 : start + length]]


def tokens_for(engine: Engine, options: BenchOptions, count: int) -> list[int]:
    """Real tokens for a real model, random ones for a random one."""
    if options.shape is not None:
        size = engine.tokenizer.vocabulary_size
        return [int(t) for t in np.random.default_rng(options.seed).integers(0, size, count)]
    tokens: list[int] = []
    passages = texts(options.data)
    while len(tokens) < count:
        for passage in passages:
            tokens += engine.tokenizer.encode(passage)
            if len(tokens) >= count:
                break
    return tokens[:count]
