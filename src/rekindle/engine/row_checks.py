"""Checks of the row contract, shared by all engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from rekindle.engine.base import KvFeed, MovedFeed, Row, Wanted
from rekindle.engine.hooks import Positions
from rekindle.errors import StepRefused


@dataclass(frozen=True)
class CheckedRow:
    """A row whose contract holds."""

    row: Row
    tokens: NDArray[np.int64]  # [n]
    positions: Positions  # [n]
    kept: int  # positions present before the step
    end: int  # positions present after it

    @property
    def first_touched(self) -> int:
        """The first position whose KV the step changes."""
        spans = [feed.span for feed in self.row.feeds] + [*(self.row.spread.spans if self.row.spread else ())]
        return min([int(self.positions[0]), *(span.start for span in spans)])

    @property
    def wanted(self) -> int:
        """Number of last tokens whose logits are wanted."""
        return {"none": 0, "last": 1, "all": len(self.tokens)}[self.row.logits]

    def check_choice(self, layer: int, before: Positions, chosen: Positions, layers: int) -> Positions:
        """A selector's choice for `layer`; raises `StepRefused` if it is not allowed."""
        chosen = np.asarray(chosen, dtype=np.int64)
        if len(chosen) and (np.any(np.diff(chosen) <= 0) or not np.all(np.isin(chosen, before))):
            raise StepRefused("A selector chose positions that are not in the row, or not in order.")
        if self.row.logits == "all" and len(chosen) != len(before):
            raise StepRefused("A selector dropped tokens of a row whose logits are all wanted.")
        if self.row.logits == "last" and (not len(chosen) or chosen[-1] != self.positions[-1]):
            raise StepRefused("A selector dropped the last token, whose logits are wanted.")
        dropped = np.setdiff1d(before, chosen, assume_unique=True)
        backed = (dropped < self.kept) | _fed(self.row.feeds, dropped, range(layer, layers))
        if not np.all(backed):
            missing = int(dropped[~backed][0])
            raise StepRefused(f"A selector dropped position {missing}, which has no other KV from layer {layer} on.")
        return chosen


def check_rows(rows: Sequence[Row], *, layers: int, vocabulary_size: int, turns: bool = False) -> list[CheckedRow]:
    """Check rows; raises `StepRefused` if one breaks the contract.

    `turns`: the engine can rotate the keys of moved feeds.
    """
    if not rows:
        raise StepRefused("A step needs at least one row.")
    if len({id(row.sequence) for row in rows}) != len(rows):
        raise StepRefused("A sequence may stand in one row of a step only.")
    if not turns and any(isinstance(feed, MovedFeed) and feed.shift for row in rows for feed in row.feeds):
        raise StepRefused("This engine cannot turn the keys of moved feeds. Compute their tokens instead.")
    if any(row.until is not None for row in rows) and len(rows) > 1:
        raise StepRefused("A row that only looks ahead must be alone in its step.")
    return [_check_row(row, layers, vocabulary_size) for row in rows]


def check_next_tokens(row: CheckedRow, engine: str) -> None:
    """For engines that compute the tokens that come next and nothing else: raise `StepRefused` for any other row, and
    for feeds that do not lie between these and what is present."""
    if row.row.selector or row.row.probe or row.row.gaze or row.row.spread or row.row.until is not None:
        raise StepRefused(f"{engine} can neither choose tokens between layers nor look inside. Use engine='hf'.")
    first, count = int(row.positions[0]), len(row.positions)
    if int(row.positions[-1]) - first + 1 != count or first < row.kept:
        raise StepRefused(
            f"{engine} computes the tokens that come next, without a gap: not {count} from position {first} on, where "
            f"{row.kept} are present."
        )
    if any(feed.span.start < row.kept or feed.span.stop > first for feed in row.row.feeds):
        raise StepRefused(f"Feeds must lie between what is present ({row.kept}) and the row's first ({first}).")


def _check_row(row: Row, layers: int, vocabulary_size: int) -> CheckedRow:
    tokens = np.asarray(row.tokens, dtype=np.int64)
    positions = np.asarray(row.positions, dtype=np.int64)
    kept = row.sequence.length  # raises Closed on a closed sequence
    if row.logits not in get_args(Wanted):
        raise StepRefused(f"logits={row.logits!r} is unknown. Use {', '.join(get_args(Wanted))}.")
    if tokens.ndim != 1 or tokens.shape != positions.shape or not len(tokens):
        raise StepRefused(f"A row needs one position a token: {tokens.shape} tokens, {positions.shape} positions.")
    if positions[0] < 0 or (len(positions) > 1 and np.any(np.diff(positions) <= 0)):
        raise StepRefused("The positions of a row must be sorted, each once, from 0 on.")
    if tokens.min() < 0 or tokens.max() >= vocabulary_size:
        raise StepRefused(f"A token id is outside the vocabulary of {vocabulary_size}.")
    if row.until is not None and (row.logits != "none" or not 0 < row.until <= layers):
        raise StepRefused(f"A row looks ahead through 1 to {layers} layers, without logits; not {row.until}.")
    if row.enough is not None and (row.until is None or not row.blind):
        raise StepRefused("Only a row that looks ahead, and at which nobody looks, may end sooner.")
    last = int(positions[-1])
    if last >= row.sequence.capacity:
        raise StepRefused(f"Position {last} is beyond the sequence's capacity of {row.sequence.capacity}.")
    for feed in row.feeds:
        _check_feed(feed, last, layers)
    _check_no_gap(row, positions, kept, last, layers if row.until is None else row.until - row.blind)
    return CheckedRow(row, tokens, positions, kept, max(kept, last + 1) if row.until is None else kept)


def _check_feed(feed: KvFeed, last: int, layers: int) -> None:
    if feed.span.stop > last:
        raise StepRefused(f"A feed reaches {feed.span.stop}, the row's last token is {last}: it must be computed.")
    if feed.layers.step != 1 or not 0 <= feed.layers.start < feed.layers.stop <= layers:
        raise StepRefused(f"A feed covers layers {feed.layers}, the model has {layers}.")


def _check_no_gap(row: Row, positions: Positions, kept: int, last: int, layers: int) -> None:
    if last < kept or (positions[0] <= kept and last - positions[0] + 1 == len(positions)):
        return
    needed = np.setdiff1d(np.arange(kept, last), positions, assume_unique=True)
    fed = _fed(row.feeds, needed, range(layers))
    if not fed.all():
        raise StepRefused(f"Position {int(needed[~fed][0])} is neither kept, fed in every layer nor in the row: a gap.")


def _fed(feeds: Sequence[KvFeed], positions: Positions, layers: range) -> NDArray[np.bool_]:
    """Which of the sorted positions are fed in all of the layers, by one or several feeds."""
    whole = np.zeros(len(positions), dtype=bool)
    parts = np.zeros((len(layers), len(positions)), dtype=bool)
    for feed in feeds:
        inside = slice(*np.searchsorted(positions, [feed.span.start, feed.span.stop]))
        if feed.layers == layers:
            whole[inside] = True
        else:
            parts[[index for index, layer in enumerate(layers) if layer in feed.layers], inside] = True
    return whole if whole.all() else np.asarray(whole | parts.all(axis=0))
