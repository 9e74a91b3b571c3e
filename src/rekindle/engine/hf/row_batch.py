"""The rows of a step, batched through the layers.

The rows of a step are packed end to end, `[1, tokens of all rows, hidden]`: projections and MLPs see one batch
without padding, whatever the lengths. In attention each row is a `BatchRow` with its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rekindle.engine.base import StayingFeed
from rekindle.engine.hf import kernels
from rekindle.engine.hf.attention import ScoreParams, Tile, attend, cut_tiles
from rekindle.engine.hf.decoder import StepPass
from rekindle.engine.hf.device import LayerPace
from rekindle.engine.hf.hooks import AttentionMapRecorder, KvDriftCorrection, deviation_of, read_attention
from rekindle.engine.hf.layer_loader import LayerLoader, PinnedSlots
from rekindle.engine.hf.lora import AdapterSpans, merge_adapter_spans
from rekindle.engine.hf.rope import Rope, RopeShifter, Rotation
from rekindle.engine.hf.sequence import Slots, TorchSequence
from rekindle.engine.hooks import Positions, Probe, Reading
from rekindle.engine.row_checks import CheckedRow
from rekindle.errors import Cancelled, StepRefused


class BatchRow:
    """One row of a step: which of its tokens are still computed, and their positions."""

    def __init__(self, checked: CheckedRow, sequence: TorchSequence, device: torch.device) -> None:
        self.checked = checked
        self.sequence = sequence
        self._device = device
        self.gazing = None if checked.row.gaze is None else AttentionMapRecorder(checked.row.gaze)
        self._readings: list[Callable[[], Reading]] = []  # not reported yet: the device shall not wait for it
        self.place(checked.positions)

    def place(self, positions: Positions) -> None:
        """Continue with these positions."""
        self.positions = positions
        self._tiles: dict[tuple[int | None, bool], tuple[Tile, ...]] = {}
        run = len(positions) and int(positions[-1] - positions[0]) + 1 == len(positions)
        self._slots: Slots
        if run:
            self._slots = slice(int(positions[0]), int(positions[-1]) + 1)
        else:
            self._slots = torch.from_numpy(positions).to(self._device)
        spread = self.checked.row.spread
        self._spreading = None if spread is None else KvDriftCorrection(spread, positions, self._device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write new keys and values to their positions."""
        if self._spreading is not None and not self._spreading.idle:
            self._spreading.move(self.sequence.keys(layer), key)
            self._spreading.move(self.sequence.values(layer), value)
        _write(self.sequence.keys(layer), self._slots, key)
        _write(self.sequence.values(layer), self._slots, value)

    def report(self) -> None:
        """Report what probe and gaze have seen."""
        for reading in self._readings:
            assert self.checked.row.probe is not None
            self.checked.row.probe.report(reading())
        if self.gazing is not None:
            self.gazing.report()

    def watched(self, layer: int) -> Probe | None:
        """The row's probe if it reads this layer."""
        watch = self.checked.row.probe
        return watch if watch is None or watch.layers is None or layer in watch.layers else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreParams) -> Tensor:
        """Write the new keys and values, then attend: `[1, heads, tokens, value_dim]`."""
        keys, values = self.sequence.keys(layer), self.sequence.values(layer)
        watch = self.watched(layer)
        deviation = None
        if watch is not None and watch.deviation:
            old = keys[:, :, self._slots], values[:, :, self._slots]
            deviation = deviation_of((key, value), old)
        self.write(layer, key, value)
        by_position = watch is None and scores.softcap is None and kernels.supports(query, keys, values)
        tiles = self._tiles.get((scores.window, by_position))
        if tiles is None:
            tiles = cut_tiles(self.positions, scores.window, query.dtype, query.device, by_position=by_position)
            self._tiles[scores.window, by_position] = tiles
        if watch is not None:
            reading = read_attention(watch, layer, self.positions, query, keys, tiles, scores, deviation)
            if self.checked.row.selector is not None:  # which chooses by what was read so far
                watch.report(reading())
            else:
                self._readings.append(reading)
        if self.gazing is not None:
            self.gazing.look(layer, self.positions, query, keys, values, scores)
        return attend(query, keys, values, tiles, scores)


class ForwardBatch(StepPass):
    """The lanes of one step, with any combination of feeds, selectors and hooks."""

    def __init__(
        self,
        rows: Sequence[CheckedRow],
        device: torch.device,
        layers: int,
        cancelled: Callable[[], bool] | None,
        turner: RopeShifter | None = None,
        slots: PinnedSlots | None = None,
    ) -> None:
        """`turner` rotates keys of feeds that move: without it, none may have a shift. `slots`: see `LayerLoader`."""
        super().__init__()
        self.lanes = [BatchRow(row, own_sequence(row), device) for row in rows]
        self._device = device
        self._layers = layers
        self._cancelled = cancelled
        self._choosing = any(row.row.selector is not None for row in rows)
        given = [(lane.sequence, feed) for lane in self.lanes for feed in lane.checked.row.feeds]
        feeds = [(sequence, feed) for sequence, feed in given if not isinstance(feed, StayingFeed)]
        self._until = rows[0].row.until
        self._pace = LayerPace(device) if device.type == "cuda" and rows[0].row.enough is not None else None
        stays = len(feeds) < len(given)
        self._filling = LayerLoader(feeds, layers, device, turner, between=stays, slots=slots) if feeds else None
        self.tokens = torch.from_numpy(np.concatenate([row.tokens for row in rows]))[None].to(device)
        self._pack()

    def _pack(self) -> None:
        stops = np.cumsum([len(lane.positions) for lane in self.lanes]).tolist()
        # Where each lane that still has tokens is among the packed ones.
        self._bounds = [
            (lane, start, stop)
            for lane, start, stop in zip(self.lanes, [0, *stops], stops, strict=False)
            if stop > start
        ]
        self._adapter_spans = merge_adapter_spans(
            (start, stop, lane.sequence.adapter) for lane, start, stop in self._bounds
        )
        packed = np.concatenate([lane.positions for lane in self.lanes])
        self.positions = torch.from_numpy(packed)[None].to(self._device)  # [1, tokens]
        self._rotations: dict[str, Rotation] | None = None

    @property
    def adapter_spans(self) -> AdapterSpans:
        return self._adapter_spans

    @property
    def until(self) -> int | None:
        return self._until

    def ends_with_kv(self, layer: int) -> bool:
        """Whether the step ends with this layer's keys and values: no hook reads its attention."""
        row = self.lanes[0].checked.row
        if self._until is None or not row.blind:
            return False
        if row.enough is not None:
            if self._pace is not None:
                self._pace.keep()
            if row.enough(layer):
                self._until = layer + 1
        return layer + 1 == self._until

    def check_cancelled(self) -> None:
        if self._cancelled is not None and self._cancelled():
            raise Cancelled("The request was cancelled.")

    def select(self, layer: int, hidden: Tensor) -> Tensor:
        """The hidden states `[1, tokens, hidden]` that `layer` computes, after the selectors' choice."""
        if not self._choosing or layer == 0:
            return hidden
        keep: list[Tensor] = []
        changed = False
        for lane, start, _ in self._bounds:
            chosen = lane.positions
            if (selector := lane.checked.row.selector) is not None:
                choice = selector.choose(layer, lane.positions)
                chosen = lane.checked.check_choice(layer, lane.positions, choice, self._layers)
            keep.append(start + torch.from_numpy(np.searchsorted(lane.positions, chosen)))
            if len(chosen) != len(lane.positions):
                changed = True
                lane.place(chosen)
        if not changed:
            return hidden
        self._pack()
        return hidden.index_select(1, torch.cat(keep).to(self._device))

    def finish(self) -> None:
        """Wait until the feeds have filled the layers that were not computed, and report the gazes."""
        for layer in range(self._layers if self._until is None else self._until, self._layers):
            self.fill(layer)
        for lane in self.lanes:
            lane.report()

    def fill(self, layer: int) -> None:
        if self._filling is not None:
            self._filling.wait(layer, self._cancelled)

    def __enter__(self) -> ForwardBatch:
        if self._filling is not None:
            self._filling.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._filling is not None:
            self._filling.stop()

    def rotations(self, rope: Rope, hidden: Tensor) -> dict[str, Rotation] | None:
        """The rotations of the packed positions, each lane under its own regime."""
        if self._rotations is None:
            regimes = {lane.sequence.regime for lane in self.lanes}
            if len(regimes) == 1:
                self._rotations = rope.rotations(hidden, self.positions, regimes.pop())
            else:
                parts = [
                    rope.rotations(hidden, self.positions[:, start:stop], lane.sequence.regime)
                    for lane, start, stop in self._bounds
                ]
                self._rotations = _join([part for part in parts if part is not None])
        return self._rotations

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write each lane's keys and values into its sequence."""
        for lane, start, stop in self._bounds:
            lane.write(layer, key[:, :, start:stop], value[:, :, start:stop])

    def mix(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreParams) -> Tensor:
        """Attention of each lane over its sequence."""
        if len(self.lanes) == 1:
            return self.lanes[0].attend(layer, query, key, value, scores)
        parts = []
        for lane, start, stop in self._bounds:
            own = slice(start, stop)
            parts.append(lane.attend(layer, query[:, :, own], key[:, :, own], value[:, :, own], scores))
        return torch.cat(parts, dim=2)

    @property
    def ends_early(self) -> bool:
        """Whether the last layer's output is read for some tokens only, and no probe reads it."""
        unread = any(len(lane.positions) > lane.checked.wanted for lane in self.lanes)
        return unread and not any(lane.watched(self._layers - 1) for lane in self.lanes)

    def gather(self, hidden: Tensor) -> Tensor:
        """Only the hidden states whose logits are wanted, `[1, wanted, hidden]`; the lanes continue with those."""
        kept: list[int] = []
        for lane, start, stop in self._bounds:
            first = stop - min(lane.checked.wanted, stop - start)
            kept.extend(range(first, stop))
            if first > start:
                lane.place(lane.positions[first - start :])
        if len(kept) == hidden.shape[1]:
            return hidden
        self._pack()
        return hidden.index_select(1, torch.tensor(kept, dtype=torch.int64, device=self._device))


def _write(buffer: Tensor, slots: Slots, rows: Tensor) -> None:
    """Write rows `[1, kv_heads, tokens, dim]` to their slots in a buffer `[1, kv_heads, capacity, dim]`."""
    if isinstance(slots, slice):
        buffer[:, :, slots] = rows
    else:
        buffer.index_copy_(2, slots, rows)


def own_sequence(row: CheckedRow) -> TorchSequence:
    """The row's sequence. Raises `StepRefused` for one of another engine."""
    if not isinstance(row.row.sequence, TorchSequence):
        raise StepRefused("A row holds a sequence of another engine.")
    return row.row.sequence


def _join(parts: Sequence[dict[str, Rotation]]) -> dict[str, Rotation] | None:
    if not parts:
        return None
    return {
        kind: (
            torch.cat([part[kind][0] for part in parts], dim=1),
            torch.cat([part[kind][1] for part in parts], dim=1),
        )
        for kind in parts[0]
    }
