"""Rows on their way through the layers.

The rows of a step are packed end to end, `[1, tokens of all rows, hidden]`: projections and MLPs see one batch
without padding, whatever the lengths. Where tokens meet the context, in attention, each row is a `Lane` with its
own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rekindle.engine import kernels, probe
from rekindle.engine.attention import Scores, Tile, attend, cut_tiles
from rekindle.engine.base import StayingFeed
from rekindle.engine.filling import Filling
from rekindle.engine.gaze import Gazing
from rekindle.engine.layers import StepPass
from rekindle.engine.lora import Portions, merge_portions
from rekindle.engine.rope import Rope, Rotation
from rekindle.engine.rows import CheckedRow
from rekindle.engine.sequence import Slots, TorchSequence
from rekindle.engine.spread import Spreading
from rekindle.engine.turn import Turner
from rekindle.engine.watch import Positions, Probe
from rekindle.errors import Cancelled, StepRefused


class Lane:
    """One row on its way through the layers: which of its tokens are still there, and where they stand."""

    def __init__(self, checked: CheckedRow, sequence: TorchSequence, device: torch.device) -> None:
        self.checked = checked
        self.sequence = sequence
        self._device = device
        self.gazing = None if checked.row.gaze is None else Gazing(checked.row.gaze)
        self.place(checked.positions)

    def place(self, positions: Positions) -> None:
        """Go on with these positions."""
        self.positions = positions
        self._tiles: dict[tuple[int | None, bool], tuple[Tile, ...]] = {}
        run = len(positions) and int(positions[-1] - positions[0]) + 1 == len(positions)
        self._slots: Slots
        if run:
            self._slots = slice(int(positions[0]), int(positions[-1]) + 1)
        else:
            self._slots = torch.from_numpy(positions).to(self._device)
        spread = self.checked.row.spread
        self._spreading = None if spread is None else Spreading(spread, positions, self._device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put the new keys and values where they belong."""
        if self._spreading is not None and not self._spreading.idle:
            self._spreading.move(self.sequence.keys(layer), self._slots, key)
            self._spreading.move(self.sequence.values(layer), self._slots, value)
        _write(self.sequence.keys(layer), self._slots, key)
        _write(self.sequence.values(layer), self._slots, value)

    def watched(self, layer: int) -> Probe | None:
        """The probe that watches a layer."""
        watch = self.checked.row.probe
        return watch if watch is None or watch.layers is None or layer in watch.layers else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Write the new keys and values, then attend: `[1, heads, tokens, value_dim]`."""
        keys, values = self.sequence.keys(layer), self.sequence.values(layer)
        watch = self.watched(layer)
        deviation = None
        if watch is not None and watch.deviation:
            old = keys[:, :, self._slots], values[:, :, self._slots]
            deviation = probe.deviation_of((key, value), old)
        self.write(layer, key, value)
        by_position = watch is None and scores.softcap is None and kernels.fits(query, keys, values)
        tiles = self._tiles.get((scores.window, by_position))
        if tiles is None:
            tiles = cut_tiles(self.positions, scores.window, query.dtype, query.device, by_position=by_position)
            self._tiles[scores.window, by_position] = tiles
        if watch is not None:
            probe.read(watch, layer, self.positions, query, keys, tiles, scores, deviation)
        if self.gazing is not None:
            self.gazing.look(layer, self.positions, query, keys, values, scores)
        return attend(query, keys, values, tiles, scores)


class Pass(StepPass):
    """The lanes of one step: any rows, whatever they ask for."""

    def __init__(
        self,
        rows: Sequence[CheckedRow],
        device: torch.device,
        layers: int,
        cancelled: Callable[[], bool] | None,
        turner: Turner | None = None,
    ) -> None:
        """`turner` is for feeds that move: without it, none may have a shift."""
        super().__init__()
        self.lanes = [Lane(row, own_sequence(row), device) for row in rows]
        self._device = device
        self._layers = layers
        self._cancelled = cancelled
        self._choosing = any(row.row.selector is not None for row in rows)
        given = [(lane.sequence, feed) for lane in self.lanes for feed in lane.checked.row.feeds]
        feeds = [(sequence, feed) for sequence, feed in given if not isinstance(feed, StayingFeed)]
        self._until = rows[0].row.until
        stays = len(feeds) < len(given)
        self._filling = Filling(feeds, layers, device, turner, between=stays) if feeds else None
        self.tokens = torch.from_numpy(np.concatenate([row.tokens for row in rows]))[None].to(device)
        self._pack()

    def _pack(self) -> None:
        stops = np.cumsum([len(lane.positions) for lane in self.lanes]).tolist()
        # Where each lane that still has tokens stands among the packed ones.
        self._bounds = [
            (lane, start, stop)
            for lane, start, stop in zip(self.lanes, [0, *stops], stops, strict=False)
            if stop > start
        ]
        self._portions = merge_portions((start, stop, lane.sequence.adapter) for lane, start, stop in self._bounds)
        packed = np.concatenate([lane.positions for lane in self.lanes])
        self.positions = torch.from_numpy(packed)[None].to(self._device)  # [1, tokens]
        self._rotations: dict[str, Rotation] | None = None

    @property
    def portions(self) -> Portions:
        """Which adapter the packed tokens belong to."""
        return self._portions

    @property
    def until(self) -> int | None:
        """So many layers are computed, if the step only looks ahead."""
        return self._until

    def ends_with_kv(self, layer: int) -> bool:
        """Whether the step ends with keys and values: a row that looks ahead, and nobody looks."""
        row = self.lanes[0].checked.row
        if self._until is None or not row.blind:
            return False
        if row.enough is not None and row.enough(layer):
            self._until = layer + 1
        return layer + 1 == self._until

    def check_cancelled(self) -> None:
        """Stop here if the caller asked to."""
        if self._cancelled is not None and self._cancelled():
            raise Cancelled("The request was cancelled.")

    def select(self, layer: int, hidden: Tensor) -> Tensor:
        """The hidden states `[1, tokens, hidden]` that `layer` shall compute, after the selectors' choice."""
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
        """Wait for what the feeds bring to the layers that were not computed, and tell what the gazes saw."""
        for layer in range(self._layers if self._until is None else self._until, self._layers):
            self.fill(layer)
        for lane in self.lanes:
            if lane.gazing is not None:
                lane.gazing.report()

    def fill(self, layer: int) -> None:
        """Wait for what the feeds bring to this layer."""
        if self._filling is not None:
            self._filling.wait(layer, self._cancelled)

    def __enter__(self) -> Pass:
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
        """Put each lane's keys and values into its sequence."""
        for lane, start, stop in self._bounds:
            lane.write(layer, key[:, :, start:stop], value[:, :, start:stop])

    def mix(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
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
        """Whether the last layer's output is read for some of the tokens only, and nobody watches the others."""
        unread = any(len(lane.positions) > lane.checked.wanted for lane in self.lanes)
        return unread and not any(lane.watched(self._layers - 1) for lane in self.lanes)

    def gather(self, hidden: Tensor) -> Tensor:
        """Only the hidden states whose logits are wanted, `[1, wanted, hidden]`; the lanes go on with those."""
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
    """Put rows `[1, kv_heads, tokens, dim]` where they belong in a buffer `[1, kv_heads, capacity, dim]`."""
    if isinstance(slots, slice):
        buffer[:, :, slots] = rows
    else:
        buffer.index_copy_(2, slots, rows)


def own_sequence(row: CheckedRow) -> TorchSequence:
    """The row's sequence, which must be of this kind of engine."""
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
