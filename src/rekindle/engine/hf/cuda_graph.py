"""Short steps on a GPU, recorded once as CUDA graphs and replayed.

A GPU finishes a step of a few tokens before Python has launched its thousand kernels. Such steps (the next token of
each chat, the question after a loaded context, its look at reused chunks) are recorded as a CUDA graph: all kernels in
one launch. A graph has fixed shapes, so a recorded step belongs to a padded number of tokens of each row, while tokens,
positions and the addresses of KV are read from the device: a recording made when the model is loaded serves every
context. Padding repeats a row's last token, and writes nothing.

A step is recorded in parts of some layers, so that the first ones run while the KV of others is being loaded.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rekindle.core.kv import KvLayout, Span
from rekindle.engine.base import Row
from rekindle.engine.hf import kernels, kv_kernels
from rekindle.engine.hf.attention import ScoreParams
from rekindle.engine.hf.decoder import Decoder, StepPass
from rekindle.engine.hf.lora import AdapterSpans, merge_adapter_spans
from rekindle.engine.hf.rope import Rope, Rotation
from rekindle.engine.hf.row_batch import own_sequence
from rekindle.engine.hf.sequence import TORCH_TYPE, TorchSequence
from rekindle.engine.hooks import AttentionMap, look_layers
from rekindle.engine.row_checks import CheckedRow, check_rows

_PADDED = (1, 16, 32, 64)  # tokens of a row are padded to one of these; longer rows are not replayed
_LOOK_PADDED = (128, 192, 256, 512)  # of a row that looks ahead
_PARTS = 4
_KEPT = 32  # recorded steps
_RARE = 3  # a step of several rows is recorded once it occurs more often than this
_log = logging.getLogger("rekindle")


@dataclass(frozen=True, order=True)
class RowShape:
    """What a recorded step knows of a row."""

    padded: int  # tokens
    adapter: str = ""  # digest; empty: none
    look: tuple[int, ...] = ()  # of a row that looks ahead: its layers, the first that counts, and the last one's end


Key = tuple[str, tuple[RowShape, ...]]  # regime, rows


class StaticPass(StepPass):
    """A step of fixed shape. `load` writes another step's tokens and addresses into it."""

    def __init__(self, rows: Sequence[RowShape], regime: str, layout: KvLayout, device: torch.device) -> None:
        super().__init__()
        self._adapters = [row.adapter or None for row in rows]
        self._regime = regime
        self._kv_heads = [shape.kv_heads for shape in layout.layers]
        stops = np.cumsum([row.padded for row in rows]).tolist()
        total, pointers = stops[-1], 2 * len(layout.layers) + 1
        self._bounds = list(zip([0, *stops[:-1]], stops, strict=True))
        size = 2 * total + len(rows) * (1 + pointers) + 2
        self._inputs = torch.zeros(size, dtype=torch.int64, device=device)
        self._staged = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.tokens = self._inputs[None, :total]
        self._places = self._inputs[total : 2 * total]  # a position is the slot its KV goes to
        self._last = self._inputs[2 * total : 2 * total + len(rows)]  # each row's last real token among the packed
        self._tables = self._inputs[2 * total + len(rows) : -2].view(len(rows), pointers)
        self._asked = self._inputs[-2:]  # which tokens a row that looks ahead looks for
        self._copied: torch.cuda.Event | None = None
        self.before_layer: Callable[[int], None] = lambda _: None
        self.begin()

    def load(self, rows: Sequence[CheckedRow]) -> None:
        """Load the tokens and positions of these rows, and where their KV is."""
        tokens, places, last = [], [], []
        for row, (start, stop) in zip(rows, self._bounds, strict=True):
            count = len(row.tokens)
            tokens.append(np.pad(row.tokens, (0, stop - start - count), mode="edge"))
            places.append(np.pad(row.positions, (0, stop - start - count), mode="edge"))
            last.append(start + count - 1)
        addresses = (own_sequence(row).buffers.addresses for row in rows)
        gaze = rows[0].row.gaze
        asked = [0, 0] if gaze is None else [gaze.queries.start, gaze.queries.stop]
        if self._copied is not None:
            self._copied.synchronize()
        parts = [*tokens, *places, np.array(last), *addresses, np.searchsorted(rows[0].positions, asked)]
        np.concatenate(parts, out=self._staged.numpy())
        self._inputs.copy_(self._staged, non_blocking=True)  # so that layers are loaded while kernels are launched
        if self._inputs.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def fill(self, layer: int) -> None:
        self.before_layer(layer)

    def begin(self) -> None:
        """Start again with all tokens of every row."""
        self._at_end = False
        self.positions = self._places[None]
        self._rotations: dict[str, Rotation] | None = None

    @property
    def adapter_spans(self) -> AdapterSpans:
        rows = zip(self._rows(), self._adapters, strict=True)
        return merge_adapter_spans((start, stop, adapter) for (start, stop), adapter in rows)

    def rotations(self, rope: Rope, hidden: Tensor) -> dict[str, Rotation] | None:
        if self._rotations is None:
            self._rotations = rope.rotations(hidden, self.positions, self._regime)
        return self._rotations

    @property
    def ends_early(self) -> bool:
        """Whether a row has more than its last token."""
        return self._places.shape[0] > len(self._bounds)

    def gather(self, hidden: Tensor) -> Tensor:
        """The hidden states of each row's last token."""
        if self._at_end:
            return hidden
        self._at_end = True
        self.positions = self._places[self._last][None]
        self._rotations = None
        return hidden.index_select(1, self._last)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put each row's keys and values into its buffers."""
        for number, (start, stop) in enumerate(self._rows()):
            self._write(number, layer, self.positions[0, start:stop], key[:, :, start:stop], value[:, :, start:stop])

    def mix(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreParams) -> Tensor:
        """Attention of each row over its buffers."""
        self.write(layer, key, value)
        parts = [
            self._attend(number, layer, self.positions[0, start:stop], query[:, :, start:stop], scores)
            for number, (start, stop) in enumerate(self._rows())
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _write(self, row: int, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        kv_kernels.write_rows(self._kept(row, layer), places, key, value)

    def _attend(self, row: int, layer: int, places: Tensor, query: Tensor, scores: ScoreParams) -> Tensor:
        return kernels.attend_split(query, self._kept(row, layer), places, scores.scaling, scores.window)[0]

    def _kept(self, row: int, layer: int) -> kernels.LayerAddress:
        return kernels.LayerAddress(self._tables[row], layer, self._kv_heads[layer])

    def _rows(self) -> list[tuple[int, int]]:
        return [(i, i + 1) for i in range(len(self._bounds))] if self._at_end else self._bounds


class LookPass(StaticPass):
    """A row of fixed shape that looks ahead, and what it saw."""

    def __init__(
        self, rows: Sequence[RowShape], regime: str, layout: KvLayout, device: torch.device, longest: int
    ) -> None:
        """`longest`: the context in tokens."""
        super().__init__(rows, regime, layout, device)
        self._until, *counted = rows[0].look
        self._counted = range(*counted)
        self._seen = torch.zeros(len(self._counted), longest, device=device)
        self._norms = torch.zeros(len(self._counted), -(-longest // kernels.KEYS_READ), device=device)
        self._heads = self._norms.new_tensor([self._kv_heads[layer] for layer in self._counted])

    def report(self, row: CheckedRow) -> None:
        """Report what the row saw, as `AttentionMap` says."""
        assert row.row.gaze is not None
        end = int(row.positions[-1]) + 1
        means = self._norms[:, : -(-end // kernels.KEYS_READ)].sum(dim=1) / (self._heads * end)
        row.row.gaze.report((self._seen[:, :end] / means[:, None]).mean(dim=0).cpu().numpy())

    @property
    def until(self) -> int | None:
        return self._until

    def gather(self, hidden: Tensor) -> Tensor:
        """No logits are wanted."""
        return hidden[:, :0]

    def _attend(self, row: int, layer: int, places: Tensor, query: Tensor, scores: ScoreParams) -> Tensor:
        kept = self._kept(row, layer)
        mixed, sums = kernels.attend_split(query, kept, places, scores.scaling, scores.window)
        if layer in self._counted:
            number = layer - self._counted.start
            seen = kernels.ReceivedAttention(self._seen[number], self._norms[number])
            kernels.attention_received(query, kept, places, sums, self._asked, seen, scores.scaling, scores.window)
        return mixed


@dataclass(frozen=True)
class _RecordedStep:
    step: StaticPass
    parts: Sequence[tuple[int, torch.cuda.CUDAGraph]]  # in order, each with the end of its layers
    logits: Tensor  # [rows, vocabulary], written by each replay

    def replay(self, rows: Sequence[CheckedRow], wait_until: Callable[[int], None]) -> Tensor:
        self.step.load(rows)
        for stop, graph in self.parts:
            wait_until(stop)
            graph.replay()
        return self.logits


class GraphRecorder:
    """Records short steps, and replays them from then on.

    Steps of one row are recorded when the model is loaded. Others must occur more often than a few times: requests come
    and go, and recording takes as long as several steps.
    """

    static_pass, look_pass = StaticPass, LookPass

    def __init__(self, decoder: Decoder, longest: int) -> None:
        """`longest`: the context in tokens."""
        self._decoder = decoder
        self._longest = longest
        self._steps: OrderedDict[Key, _RecordedStep] = OrderedDict()
        self._asked: OrderedDict[Key, int] = OrderedDict()  # how often each unrecorded step occurred
        self._lock = threading.RLock()  # any thread may unload an adapter
        self._works = True
        self._stream: torch.cuda.Stream | None = None  # one for all recordings: each stream has a workspace of its own

    @classmethod
    def for_decoder(cls, decoder: Decoder, longest: int) -> GraphRecorder | None:
        """A recorder, if this model, device and torch allow it."""
        plain = all(scores.softcap is None for scores in decoder.scores) and decoder.rope.fixed_length is None
        dims = {dim for shape in decoder.layout.layers for dim in (shape.key_dim, shape.value_dim)}
        if decoder.device.type != "cuda" or not (plain and decoder.recordable) or len(dims) > 1:
            return None
        dtype = TORCH_TYPE[decoder.layout.dtype]
        return cls(decoder, longest) if kernels.fits_split(dims.pop(), dtype, decoder.device) else None

    def warm(self, sequence: TorchSequence) -> None:
        """Record the steps of one row, in a sequence that nobody uses, so that no request waits for it."""
        size, layers = self._decoder.vocabulary_size, len(self._decoder.layout.layers)
        short = Row.following(sequence, [0])
        counted = look_layers(layers)
        gaze = AttentionMap(Span(0, 1), lambda _: None, counted)
        look = replace(short, logits="none", until=counted.stop, gaze=gaze)
        looks = (counted.stop, counted.start, counted.stop)
        for row, shape in (
            *((short, RowShape(padded)) for padded in _PADDED),
            *((look, RowShape(padded, look=looks)) for padded in _LOOK_PADDED if self._decoder.turner is not None),
        ):
            if self._works:
                rows = check_rows([row], layers=layers, vocabulary_size=size)
                self._try_to_record((sequence.regime, (shape,)), rows)

    def run(self, rows: Sequence[CheckedRow], wait_until: Callable[[int], None] = lambda _: None) -> Tensor | None:
        """The logits `[rows, vocabulary]` if this step can be replayed. `wait_until` is called with the end of the
        layers that are computed next."""
        regimes = {row.row.sequence.regime for row in rows}
        shapes = [shape for row in rows if (shape := replayable(row)) is not None]
        if not self._works or len(regimes) != 1 or len(shapes) != len(rows):
            return None
        (regime,) = regimes
        # One recording serves rows in any order.
        order = sorted(range(len(rows)), key=shapes.__getitem__)
        key, rows = (regime, tuple(shapes[place] for place in order)), [rows[place] for place in order]
        with self._lock:
            recorded = self._recall(key)
            if recorded is None:
                recorded = None if self._too_rare(key) else self._try_to_record(key, rows)
            logits = None if recorded is None else recorded.replay(rows, wait_until)
        return logits if logits is None or len(rows) == 1 else logits[np.argsort(order).tolist()]

    def report_look(self, row: CheckedRow) -> None:
        """Report what a row saw that was replayed just now."""
        shape = replayable(row)
        assert shape is not None
        step = self._steps[row.row.sequence.regime, (shape,)].step
        assert isinstance(step, LookPass)
        step.report(row)

    def forget_adapter(self, digest: str) -> None:
        """Drop the steps of an adapter that is gone."""
        with self._lock:
            for known in (self._steps, self._asked):
                for key in [key for key in known if any(row.adapter == digest for row in key[1])]:
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

    def _try_to_record(self, key: Key, rows: Sequence[CheckedRow]) -> _RecordedStep | None:
        """Record a step, while computing these rows."""
        shapes, place = key[1], (key[0], self._decoder.layout, self._decoder.device)
        looks = bool(shapes[0].look)
        step = self.look_pass(shapes, *place, self._longest) if looks else self.static_pass(shapes, *place)
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
        return recorded

    def _record(self, step: StaticPass) -> _RecordedStep:
        with torch.cuda.device(self._decoder.device):
            side = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # libraries initialize in a first run, which must not be recorded
                step.begin()
                self._decoder.run(step)
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            layers = len(self._decoder.layout.layers) if step.until is None else step.until
            starts = sorted({layers * part // _PARTS for part in range(1, _PARTS)} - {0})
            graphs, pool = [torch.cuda.CUDAGraph()], torch.cuda.graph_pool_handle()

            def next_graph(layer: int) -> None:
                if layer in starts:
                    graphs[-1].capture_end()
                    graphs.append(torch.cuda.CUDAGraph())
                    graphs[-1].capture_begin(pool, capture_error_mode="thread_local")

            step.begin()
            step.before_layer = next_graph
            with torch.cuda.stream(side):
                graphs[-1].capture_begin(pool, capture_error_mode="thread_local")
                try:
                    logits = self._decoder.run(step)
                finally:
                    graphs[-1].capture_end()
            return _RecordedStep(step, list(zip([*starts, layers], graphs, strict=True)), logits)


def replayable(row: CheckedRow) -> RowShape | None:
    """The shape for replaying a row; None if it cannot be replayed."""
    asked, sequence = row.row, row.row.sequence
    sizes: tuple[int, ...] = _PADDED
    look: tuple[int, ...] = ()
    if asked.until is not None and asked.gaze is not None and asked.gaze.layers is not None:
        if asked.gaze.layers.stop > asked.until or asked.gaze.queries.stop != row.positions[-1] + 1:
            return None
        sizes, look = _LOOK_PADDED, (asked.until, asked.gaze.layers.start, asked.gaze.layers.stop)
    elif asked.gaze or asked.logits != "last":
        return None
    hooked = asked.feeds or asked.selector or asked.probe or asked.spread
    if hooked or not asked.replay or len(row.tokens) > sizes[-1] or not isinstance(sequence, TorchSequence):
        return None
    padded = next(size for size in sizes if size >= len(row.tokens))
    return RowShape(padded, sequence.adapter or "", look)
