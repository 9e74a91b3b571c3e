"""Short steps on a GPU, recorded once as CUDA graphs and replayed.

A GPU finishes a step of a few tokens before Python has launched its thousand kernels. Such steps (the next token of
each chat, the question after a loaded context) are recorded as a CUDA graph: all kernels in one launch. A graph has
fixed shapes and addresses, so a recorded step belongs to certain buffers and a padded number of tokens, while tokens,
positions and lengths are read from the device. Padding follows the real tokens: it writes only to positions that are
not present yet, and no real token attends to it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.engine.hf.attention import ScoreParams
from rekindle.engine.hf.decoder import Decoder, StepPass
from rekindle.engine.hf.lora import AdapterSpans, merge_adapter_spans
from rekindle.engine.hf.rope import Rope, Rotation
from rekindle.engine.hf.sequence import Buffers, TorchSequence
from rekindle.engine.row_checks import CheckedRow

_PADDED = (1, 16, 32, 64)  # tokens of a row are padded to one of these; longer rows are not replayed
_KEPT = 16  # recorded steps
_RARE = 3  # a step of several rows is recorded once it occurs more often than this
_log = logging.getLogger("rekindle")

# query [tokens, heads, dim], keys and values [capacity, kv_heads, dim], lengths -> [tokens, heads, dim]. Causal: the
# queries are at the last of the `used` keys.
Attention = Callable[[Tensor, Tensor, Tensor, "Lengths", ScoreParams], Tensor]
LaneShape = tuple[Buffers, int, str | None]  # buffers, padded tokens, adapter
Key = tuple[str, tuple[tuple[int, int, str | None], ...]]  # regime; the lanes, buffers by their id


@dataclass(frozen=True)
class Lengths:
    """Number of queries and keys: fixed shapes, values on the device."""

    query_edges: Tensor  # [2] int32: 0, queries
    key_edges: Tensor  # [2] int32: 0, capacity
    used: Tensor  # [1] int32: number of keys present


class StaticPass(StepPass):
    """A step of fixed shape. `load` writes another step's tokens into it."""

    def __init__(self, lanes: Sequence[LaneShape], regime: str, attention: Attention) -> None:
        super().__init__()
        self._buffers = [buffers for buffers, _, _ in lanes]
        self._adapters = [adapter for _, _, adapter in lanes]
        self._regime = regime
        self._attention = attention
        device = self._buffers[0].keys[0].device
        counts = [count for _, count, _ in lanes]
        stops = np.cumsum(counts).tolist()
        total = stops[-1]
        self._bounds = list(zip([0, *stops[:-1]], stops, strict=True))
        self._inputs = torch.zeros(2 * total + len(lanes), dtype=torch.int64, device=device)
        self._used = torch.zeros(2, len(lanes), dtype=torch.int32, device=device)
        self._used_padded, self._used_real = self._used  # keys up to the last padded token, up to the last real one
        self.tokens = self._inputs[None, :total]
        self._places = self._inputs[total : 2 * total]  # a position is the slot its KV goes to
        self._last = self._inputs[2 * total :]  # index of each lane's last real token among the packed
        self._edges = {n: torch.tensor([0, n], dtype=torch.int32, device=device) for n in {1, *counts}}
        self._edges |= {
            b.capacity: torch.tensor([0, b.capacity], dtype=torch.int32, device=device) for b, _, _ in lanes
        }
        self.begin()

    def load(self, rows: Sequence[CheckedRow]) -> None:
        """Load the tokens and positions of these rows, one for each lane."""
        tokens, places, last, used = [], [], [], []
        for row, (start, stop) in zip(rows, self._bounds, strict=True):
            count, first = len(row.tokens), int(row.positions[0])
            tokens.append(np.pad(row.tokens, (0, stop - start - count)))
            places.append(np.arange(first, first + stop - start))
            last.append(start + count - 1)
            used.append((first + stop - start, first + count))
        block = np.concatenate([*tokens, *places, np.array(last)])
        self._inputs.copy_(torch.from_numpy(block))
        self._used.copy_(torch.tensor(used, dtype=torch.int32).T)

    def begin(self) -> None:
        """Start again with all tokens of every lane."""
        self._at_end = False
        self.positions = self._places[None]
        self._rotations: dict[str, Rotation] | None = None

    @property
    def adapter_spans(self) -> AdapterSpans:
        lanes = zip(self._lanes(), self._adapters, strict=True)
        return merge_adapter_spans((start, stop, adapter) for (start, stop), adapter in lanes)

    def rotations(self, rope: Rope, hidden: Tensor) -> dict[str, Rotation] | None:
        if self._rotations is None:
            self._rotations = rope.rotations(hidden, self.positions, self._regime)
        return self._rotations

    @property
    def ends_early(self) -> bool:
        """Whether a lane has more than its last token."""
        return self._places.shape[0] > len(self._buffers)

    def gather(self, hidden: Tensor) -> Tensor:
        """The hidden states of each lane's last token."""
        if self._at_end:
            return hidden
        self._at_end = True
        self.positions = self._places[self._last][None]
        self._rotations = None
        return hidden.index_select(1, self._last)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put each lane's keys and values into its buffers."""
        for buffers, (start, stop) in zip(self._buffers, self._lanes(), strict=True):
            slots = self.positions[0, start:stop]
            buffers.keys[layer].index_copy_(2, slots, key[:, :, start:stop])
            buffers.values[layer].index_copy_(2, slots, value[:, :, start:stop])

    def mix(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreParams) -> Tensor:
        """Attention of each lane over its buffers."""
        self.write(layer, key, value)
        parts = []
        for index, (buffers, (start, stop)) in enumerate(zip(self._buffers, self._lanes(), strict=True)):
            used = self._used_real if self._at_end else self._used_padded
            lengths = Lengths(self._edges[stop - start], self._edges[buffers.capacity], used[index : index + 1])
            # Tokens before heads, as the kernel expects; views, not copies.
            queries = query[0, :, start:stop].transpose(0, 1)
            keys, values = (kept[layer][0].transpose(0, 1) for kept in (buffers.keys, buffers.values))
            parts.append(self._attention(queries, keys, values, lengths, scores))
        return torch.cat(parts).transpose(0, 1)[None]

    def _lanes(self) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(self._buffers))] if self._at_end else self._bounds


@dataclass(frozen=True)
class _RecordedStep:
    step: StaticPass
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [rows, vocabulary], written by each replay


class GraphRecorder:
    """Records short steps the second time they occur, and replays them from then on.

    Steps of several rows must occur more often: requests come and go, and recording takes as long as several steps.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._steps: OrderedDict[Key, _RecordedStep] = OrderedDict()
        self._asked: OrderedDict[Key, int] = OrderedDict()  # how often each unrecorded step occurred
        self._lock = threading.RLock()  # any thread may close a sequence, which drops buffers
        self._works = True

    @classmethod
    def for_decoder(cls, decoder: Decoder) -> GraphRecorder | None:
        """A recorder, if this model, device and torch allow it."""
        plain = all(scores.softcap is None for scores in decoder.scores) and decoder.rope.fixed_length is None
        shapes = decoder.layout.layers
        fitting = all(shape.key_dim == shape.value_dim <= 256 and shape.key_dim % 8 == 0 for shape in shapes)
        half = decoder.layout.dtype in ("float16", "bfloat16")
        if decoder.device.type != "cuda" or not (plain and fitting and half and decoder.recordable):
            return None
        new_enough = torch.cuda.get_device_capability(decoder.device) >= (8, 0)
        return cls(decoder) if new_enough and has_flash_attention() else None

    def run(self, rows: Sequence[CheckedRow], longest: int) -> Tensor | None:
        """The logits `[rows, vocabulary]` if this step can be replayed; positions stay below `longest`."""
        regimes = {row.row.sequence.regime for row in rows}
        if not self._works or len(regimes) != 1:
            return None
        (regime,) = regimes
        longest = min(longest, self._decoder.rope.limit(regime) or longest)
        lanes = [lane for row in rows if (lane := replayable(row, longest)) is not None]
        if len(lanes) != len(rows):
            return None
        # One recording serves rows in any order.
        order = sorted(range(len(rows)), key=lambda place: id(lanes[place][0]))
        logits = self._replay(regime, [lanes[place] for place in order], [rows[place] for place in order])
        return logits if logits is None or len(rows) == 1 else logits[np.argsort(order).tolist()]

    def _replay(self, regime: str, lanes: Sequence[LaneShape], rows: Sequence[CheckedRow]) -> Tensor | None:
        key = regime, tuple((id(buffers), count, adapter) for buffers, count, adapter in lanes)
        with self._lock:
            recorded = self._recall(key)
            if recorded is None:
                return None if self._too_rare(key) else self._try_to_record(key, lanes, rows)
            recorded.step.load(rows)
            recorded.graph.replay()
            return recorded.logits

    def forget(self, buffers: Buffers) -> None:
        """Drop the steps of buffers that are gone."""
        with self._lock:
            for known in (self._steps, self._asked):
                for key in [key for key in known if any(owner == id(buffers) for owner, _, _ in key[1])]:
                    known.pop(key)

    def forget_adapter(self, digest: str) -> None:
        """Drop the steps of an adapter that is gone."""
        with self._lock:
            for known in (self._steps, self._asked):
                for key in [key for key in known if any(adapter == digest for _, _, adapter in key[1])]:
                    known.pop(key)

    def _recall(self, key: Key) -> _RecordedStep | None:
        if key in self._steps:
            self._steps.move_to_end(key)
        return self._steps.get(key)

    def _too_rare(self, key: Key) -> bool:
        """Count an unrecorded step; whether it has not occurred often enough yet."""
        times = self._asked.pop(key, 0) + 1
        if times > (1 if len(key[1]) == 1 else _RARE):
            return False
        self._asked[key] = times
        if len(self._asked) > _KEPT:
            self._asked.popitem(last=False)
        return True

    def _try_to_record(self, key: Key, lanes: Sequence[LaneShape], rows: Sequence[CheckedRow]) -> Tensor | None:
        step = StaticPass(lanes, key[0], flash_attention)
        step.load(rows)
        try:
            recorded = self._record(step)
        except RuntimeError as error:
            # Something in this model, driver or torch cannot be recorded. Steps run without graphs, only slower.
            _log.warning("short steps will not be replayed: %s", error)
            self._works = False
            self._steps.clear()
            return None
        self._steps[key] = recorded
        if len(self._steps) > _KEPT:
            self._steps.popitem(last=False)
        recorded.graph.replay()
        return recorded.logits

    def _record(self, step: StaticPass) -> _RecordedStep:
        with torch.cuda.device(self._decoder.device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries initialize in a first run, which must not be recorded
                step.begin()
                self._decoder.run(step)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            step.begin()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                logits = self._decoder.run(step)
            return _RecordedStep(step, graph, logits)


def has_flash_attention() -> bool:
    """Whether this torch has attention over a cache whose length is on the device.

    Its public form, `varlen_attn`, takes such a length only in recent releases; the operator under it always did.
    """
    operator = getattr(torch.ops.aten, "_flash_attention_forward", None)
    return operator is not None and "seqused_k" in str(operator.default._schema)


def flash_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scores: ScoreParams) -> Tensor:
    """Attention over the first `lengths.used` keys, the queries being at the last of them."""
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        lengths.query_edges,
        lengths.key_edges,
        query.shape[0],
        keys.shape[0],
        0.0,  # dropout
        True,  # causal
        False,  # no debug mask
        scale=scores.scaling,
        window_size_left=None if scores.window is None else scores.window - 1,
        window_size_right=None if scores.window is None else 0,
        seqused_k=lengths.used,
    )[0]
    return mixed


def replayable(row: CheckedRow, longest: int) -> LaneShape | None:
    """The lane shape for replaying a row; None if it cannot be replayed."""
    asked, sequence, count = row.row, row.row.sequence, len(row.tokens)
    if (
        not asked.replay
        or asked.feeds
        or asked.selector
        or asked.probe
        or asked.gaze
        or asked.spread
        or asked.logits != "last"
        or count > _PADDED[-1]
    ):
        return None
    first = int(row.positions[0])
    follows = first == row.kept and int(row.positions[-1]) == first + count - 1
    if not follows or not isinstance(sequence, TorchSequence):
        return None
    padded = next(size for size in _PADDED if size >= count)
    buffers = sequence.buffers
    return (buffers, padded, sequence.adapter) if first + padded <= min(buffers.capacity, longest) else None
