"""Prompts that share their beginnings as those of a real service did: shaped by a trace, scaled down to fit.

A trace is a `.jsonl` file, a request a line, in the order of arrival: `hash_ids` names the blocks of its prompt, equal
ids at the beginning are an equal beginning. Here each block becomes a run of `BLOCK_TOKENS` tokens, always the same
for the same id. Whole conversations are drawn, for the turns of one share most; those with long prompts are thinned
to every so-manieth block, which leaves the share that their turns have in common as it was.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from rekindle.errors import InvalidSetting

BLOCK_TOKENS = 32
_OWN_TOKENS = 8  # at the end of each prompt, which no other has: the question
_SAMPLE = "sample_trace.jsonl"

Blocks = tuple[int, ...]  # the ids of one prompt


@dataclass(frozen=True)
class PromptWorkload:
    """Prompts in the order in which they are asked.

    shared_share    of all their tokens, those that stood at the same place of one before: the most a cache can spare
    """

    prompts: tuple[tuple[int, ...], ...]
    shared_share: float


@dataclass(frozen=True)
class TraceRequest:
    """A request of a trace: when it came, and the blocks of its prompt."""

    arrival_seconds: float
    blocks: Blocks


def read_trace(folder: Path | None) -> list[Blocks]:
    """The prompts of all traces in a folder, as blocks; without one, of the trace that the package ships."""
    return [request.blocks for request in read_requests(folder)]


def read_requests(folder: Path | None) -> list[TraceRequest]:
    """The requests of all traces in a folder; without one, of the trace that the package ships."""
    if folder is None:
        return _read(_SAMPLE, resources.files("benchmarks").joinpath(_SAMPLE).read_text("utf-8"))
    if not folder.is_dir():
        raise InvalidSetting(f"--data {folder} is not a folder. Give one with a .jsonl trace.")
    found = [one for path in sorted(folder.glob("*.jsonl")) for one in _read(str(path), path.read_text("utf-8"))]
    if not found:
        raise InvalidSetting(f"--data {folder} has no requests in .jsonl files. Each line needs hash_ids.")
    return found


def _read(name: str, text: str) -> list[TraceRequest]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
            ids, arrival = record["hash_ids"], float(record.get("timestamp_ms", 0)) / 1e3
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidSetting(f"{name}, line {number} is no request of a trace: it needs hash_ids.") from error
        if not isinstance(ids, list) or not ids or not all(isinstance(one, int) and one >= 0 for one in ids):
            raise InvalidSetting(f"{name}, line {number}: hash_ids must be a list of numbers, 0 or more.")
        found.append(TraceRequest(arrival, tuple(ids)))
    return found


def shared_share(trace: Sequence[Blocks]) -> float:
    """The share of blocks that stood in a prompt before."""
    seen: set[int] = set()
    known = 0
    for blocks in trace:
        known += sum(one in seen for one in blocks)
        seen.update(blocks)
    return known / sum(len(blocks) for blocks in trace)


def draw(trace: Sequence[Blocks], requests: int, random: np.random.Generator) -> list[int]:
    """The numbers of `requests` requests, or of all, in their order: whole conversations drawn at random."""
    conversations = _conversations(trace)
    drawn: list[int] = []
    for number in random.permutation(len(conversations)):
        drawn += conversations[number]
        if len(drawn) >= requests:
            break
    return sorted(drawn[:requests])


def scale(trace: Sequence[Blocks], requests: int, max_blocks: int, random: np.random.Generator) -> list[Blocks]:
    """`requests` requests, or all: whole conversations drawn at random, no prompt longer than `max_blocks`."""
    chosen = set(draw(trace, requests, random))
    conversations = _conversations(trace)
    thinned: dict[int, Blocks] = {}
    for members in conversations:
        mine = [number for number in members if number in chosen]
        stride = -(-max((len(trace[number]) for number in mine), default=1) // max_blocks)
        thinned |= {number: trace[number][::stride] for number in mine}
    return [thinned[number] for number in sorted(chosen)]


def _conversations(trace: Sequence[Blocks]) -> list[list[int]]:
    """Requests by the first block that is their own: one that most prompts have says nothing."""
    counts = Counter(one for blocks in trace for one in set(blocks))
    found: dict[int, list[int]] = {}
    for number, blocks in enumerate(trace):
        own = next((one for one in blocks if 2 * counts[one] <= len(trace)), blocks[-1])
        found.setdefault(own, []).append(number)
    return list(found.values())


def make_workload(asked: Sequence[Blocks], stream: Sequence[int], vocabulary: int, seed: int) -> PromptWorkload:
    """Prompts of tokens: runs of `stream`, each beginning with a token that tells it from others."""
    prompts = []
    seen: set[tuple[int, ...]] = set()
    known = 0
    for number, blocks in enumerate(asked):
        runs = [_run(stream, (seed, 0, one), one % vocabulary, BLOCK_TOKENS) for one in blocks]
        own = _run(stream, (seed, 1, number), number % vocabulary, _OWN_TOKENS)
        prompts.append(tuple(token for run in (*runs, own) for token in run))
        known += sum(BLOCK_TOKENS for stop in range(1, len(blocks) + 1) if tuple(blocks[:stop]) in seen)
        seen.update(tuple(blocks[:stop]) for stop in range(1, len(blocks) + 1))
    return PromptWorkload(tuple(prompts), known / sum(len(prompt) for prompt in prompts))


def _run(stream: Sequence[int], key: tuple[int, ...], first: int, length: int) -> list[int]:
    start = int(np.random.default_rng(key).integers(0, len(stream) - length))
    return [first, *stream[start + 1 : start + length]]
