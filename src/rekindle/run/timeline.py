"""Both lanes of a prompt that was computed and streamed at once, as text.

compute  00001111222233..44qq
link     7777766666555554444.     a column is a moment, a digit the chunk that was worked on
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.core.cells import Event

_COLUMNS = 60
_NAMES = "0123456789abcdefghijklmnoprstuvwxyz"  # of chunks, over and over; q is the question


def tell_timeline(events: Sequence[Event]) -> list[str]:
    """The lanes, line by line; nothing where nothing was streamed."""
    if not events:
        return []
    seconds = max(event.stop for event in events)
    question = max(event.chunk for event in events if event.lane == "compute")
    column = seconds / _COLUMNS * 1e3
    lines = [f"computed and streamed in {seconds:.2f} s; a column is {column:.0f} ms, q the question:"]
    for lane in ("compute", "link"):
        own = [event for event in events if event.lane == lane]
        lines.append(f"  {lane:8} {''.join(_at(own, seconds, column, question) for column in range(_COLUMNS))}")
    return lines


def _at(events: Sequence[Event], seconds: float, column: int, question: int) -> str:
    """What was worked on longest in a column; a dot for nothing."""
    start, stop = seconds * column / _COLUMNS, seconds * (column + 1) / _COLUMNS
    shares: dict[int, float] = {}
    for event in events:
        common = min(stop, event.stop) - max(start, event.start)
        if common > 0:
            shares[event.chunk] = shares.get(event.chunk, 0.0) + common
    if not shares:
        return "."
    chunk = max(shares, key=lambda name: shares[name])
    return "q" if chunk == question else _NAMES[chunk % len(_NAMES)]
