"""The QKV cache of PerCache as published: a tree of passages on disk, and one request through it.

A path of the tree is what a prompt begins with: the system prompt, then its passages in their order. A node is one of
them, behind all that stand above it:

    system prompt -- passage 3 -- passage 1
                 |            `-- passage 8
                 `-- passage 5

Nodes are matched by their tokens. The parts of a prompt are tokenized one by one, so the tokens of a part are the same
whatever follows it, and no token has to be given up where two parts meet.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from benchmarks.baselines.qkv_engine import Qkv, QkvReuse
from rekindle.engine.base import Row
from rekindle.errors import InvalidSetting

Segments = Sequence[Sequence[int]]  # the tokens of each part of a prompt that may be known, in order


@dataclass(eq=False)
class _TreeNode:
    parent: _TreeNode | None
    tokens: tuple[int, ...]
    path: Path
    size_bytes: int
    used: int  # the time of the last use, counted in uses of the tree
    retrievals: int = 0
    children: dict[tuple[int, ...], _TreeNode] = field(default_factory=dict)

    def below(self) -> Iterator[_TreeNode]:
        """All nodes under it, and itself at last."""
        for child in list(self.children.values()):
            yield from child.below()
        yield self


class QkvTree:
    """Q, K and V of one model's passages, one file each, in a folder of its own.

    The files never take more than `limit_bytes`: what is retrieved least goes first, of those the one that was not
    used for longest, and only nodes that nothing stands on. The tree itself is in memory and ends with the process.
    For one thread.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Begin empty. Raises `InvalidSetting` if something is in the folder already."""
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InvalidSetting(f"{folder} is not empty. Give the QKV tree a new folder.")
        self._folder = folder
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.asked = 0  # segments that were looked for
        self.hits = 0  # segments that were found and read
        self.evicted = 0
        self._root = _TreeNode(None, (), folder, 0, 0)
        self._clock = count(1)
        self._names = count(1)

    def __len__(self) -> int:
        return sum(1 for _ in self._root.below()) - 1

    def match(self, segments: Segments) -> Qkv | None:
        """Q, K and V of the longest known path that the segments begin with, read from disk.

        A file that is lost, cut or unreadable ends the path; it and what stands on it are forgotten.
        """
        self.asked += sum(1 for tokens in segments if len(tokens))
        now = next(self._clock)
        parts: list[Qkv] = []
        for node in self._known(segments):
            part = _read(node)
            if part is None:
                self._forget(node)
                break
            node.retrievals += 1
            node.used = now
            parts.append(part)
        self.hits += len(parts)
        return Qkv.concat(parts) if parts else None

    def put(self, segments: Segments, qkv: Qkv) -> int:
        """Keep what is not known yet of the segments, with which the tokens of `qkv` begin; the bytes that were added.

        The first segment that has no room beside those before it ends the path. Raises `ValueError` if `qkv` is
        shorter than the segments together.
        """
        if sum(map(len, segments)) > qkv.tokens:
            raise ValueError(f"QKV of {qkv.tokens} tokens is too short for {sum(map(len, segments))} of segments")
        now = next(self._clock)
        node, start, added, path = self._root, 0, 0, {self._root}
        for tokens in segments:
            stop = start + len(tokens)
            if len(tokens):
                child = node.children.get(tuple(tokens))
                if child is None:
                    child = self._add(node, tuple(tokens), qkv.slice(start, stop), path, now)
                    if child is None:
                        break
                    added += child.size_bytes
                child.used = now
                path.add(child)
                node = child
            start = stop
        return added

    def _known(self, segments: Segments) -> list[_TreeNode]:
        """The nodes of the longest known path."""
        found = [self._root]
        for tokens in segments:
            if len(tokens):
                child = found[-1].children.get(tuple(tokens))
                if child is None:
                    break
                found.append(child)
        return found[1:]

    def _add(
        self, parent: _TreeNode, tokens: tuple[int, ...], qkv: Qkv, path: set[_TreeNode], now: int
    ) -> _TreeNode | None:
        """A new node with its file; None if there is no room for it beside `path`."""
        written = _bytes_of(qkv)
        if sum(node.size_bytes for node in path) + len(written) > self.limit_bytes:
            return None
        while self.used_bytes + len(written) > self.limit_bytes:
            leaves = [node for node in self._root.below() if not node.children and node not in path]
            self._forget(min(leaves, key=lambda node: (node.retrievals, node.used)))
            self.evicted += 1
        node = _TreeNode(parent, tokens, self._folder / f"{next(self._names)}.safetensors", len(written), now)
        node.path.write_bytes(written)
        parent.children[tokens] = node
        self.used_bytes += node.size_bytes
        return node

    def _forget(self, node: _TreeNode) -> None:
        """Remove a node, with all that stands on it."""
        for gone in node.below():
            gone.path.unlink(missing_ok=True)
            self.used_bytes -= gone.size_bytes
            assert gone.parent is not None
            del gone.parent.children[gone.tokens]


@dataclass(frozen=True)
class QkvAnswer:
    """The outcome of one request."""

    tokens: tuple[int, ...]  # of the reply
    prompt_tokens: int
    known_tokens: int  # whose Q, K and V were not computed
    load_seconds: float  # of finding and reading them
    first_token_seconds: float  # from the request to the first token, with loading
    seconds: float  # from the request to the last token


def answer(
    reuse: QkvReuse, tree: QkvTree | None, segments: Segments, question: Sequence[int], max_tokens: int
) -> QkvAnswer:
    """Answer a prompt, the segments and then the question, greedily, with exactly `max_tokens` tokens (at least one).

    What the tree knows of the segments is not projected, and what it does not know is kept in it afterwards; the
    question never is. Without a tree everything is computed.
    """
    engine = reuse.engine
    prompt = [*(token for tokens in segments for token in tokens), *question]
    started = time.perf_counter()
    known = None if tree is None else tree.match(segments)
    loaded = time.perf_counter()
    capacity = len(prompt) + max_tokens
    with engine.open(capacity, engine.regime(capacity)) as sequence:
        logits, qkv = reuse.prefill(sequence, prompt, known)
        reply = [int(logits[-1].argmax())]
        first = time.perf_counter()
        while len(reply) < max_tokens:
            (logits,) = engine.step([Row.following(sequence, reply[-1:])])
            reply.append(int(logits[-1].argmax()))
        ended = time.perf_counter()
    if tree is not None:
        tree.put(segments, qkv)
    return QkvAnswer(
        tuple(reply),
        prompt_tokens=len(prompt),
        known_tokens=0 if known is None else known.tokens,
        load_seconds=loaded - started,
        first_token_seconds=first - started,
        seconds=ended - started,
    )


def _bytes_of(qkv: Qkv) -> bytes:
    """The file of a node: all its tensors together."""
    named = {f"{i}.{k}": rows.contiguous() for i, layer in enumerate(qkv.layers) for k, rows in enumerate(layer)}
    written: bytes = save(named)
    return written


def _read(node: _TreeNode) -> Qkv | None:
    """What a node's file holds; None if it is not whole, or not there."""
    try:
        if node.path.stat().st_size != node.size_bytes:
            return None
        named = load_file(node.path)
    except (OSError, SafetensorError):
        return None
    layers: dict[int, dict[int, Tensor]] = {}
    for name, rows in named.items():
        layer, kind = map(int, name.split("."))
        layers.setdefault(layer, {})[kind] = rows
    return Qkv(tuple(tuple(layers[i][k] for k in sorted(layers[i])) for i in sorted(layers)))
