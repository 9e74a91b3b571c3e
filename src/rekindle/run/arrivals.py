"""Passages of a prompt that an origin has, on their way into the chunk cache: the last one first.

    find     [last][second last] ...
    fetch          [last ......][second last ......] ...     each is kept here when it has come

What has come is known here like any other passage, for this prompt and for later ones. A thread looks for the next
while another brings what was found: the link never waits for an answer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rekindle.core.cells import Cell, Event
from rekindle.core.chunk import ChunkDigest, Outline, Variant, chunk_digest
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.errors import Cancelled
from rekindle.origin.client import Found, Origin, Transfer, decode_slice
from rekindle.origin.failure import OriginFailed
from rekindle.origin.line import Stop
from rekindle.origin.names import Model
from rekindle.reuse import latency
from rekindle.reuse.latency import Bandwidth
from rekindle.run.scoring import unscored

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WantedPassage:
    """A passage that is not known here.

    number    the one it has among those of its prompt, from 1
    span      where it stands there
    tokens    the prompt it would be published in: the same head, and this passage first; it ends with it
    start     where the passage begins in that
    """

    number: int
    span: Span
    tokens: tuple[int, ...]
    head: int
    start: int

    @property
    def body(self) -> tuple[int, ...]:
        """Its own tokens."""
        return self.tokens[self.start :]

    @property
    def variant(self) -> Variant:
        """What comes. Nobody saw what attention did in it."""
        outline = Outline(self.head, (Span(self.start, len(self.tokens)),))
        digests: tuple[ChunkDigest, ...] = chunk_digest(self.tokens[: self.head]), chunk_digest(self.body)
        return unscored(outline, 1, digests, 0.0)


class PassageSource(Protocol):
    """Where passages come from."""

    def find(self, passage: WantedPassage, stop: Stop) -> PassageOffer | None:
        """A passage that can be fetched; None if it is not there. Raises `OriginFailed`, and `Cancelled`."""


class PassageOffer(Protocol):
    """A passage that can be fetched."""

    @property
    def left_bytes(self) -> int:
        """How much of the link it still takes."""

    def fetch(self) -> Kv:
        """Its KV, as it was computed at its place. Raises `OriginFailed`, and `Cancelled`."""

    def cancel(self) -> None:
        """End that, from any thread."""


Keep = Callable[[WantedPassage, Kv], bool]  # put it into the chunk cache; False if that is not possible


class Arrivals:
    """The passages of one prompt. `close` it, whatever happened."""

    def __init__(
        self,
        wanted: Sequence[WantedPassage],
        source: PassageSource,
        keep: Keep,
        failed: Callable[[str], None],
        bandwidth: Bandwidth,
    ) -> None:
        """Begin to look. `failed` is told if the origin is not what it should be, `bandwidth` is that of its link.

        Raises `RuntimeError` where the system has no thread left."""
        self._source, self._keep, self._failed, self._bandwidth = source, keep, failed, bandwidth
        self._changed = threading.Condition()
        self._open = {passage.number: passage for passage in wanted}  # neither here nor known not to come
        self._tokens = {passage.number: len(passage.span) for passage in wanted}
        self._offers: dict[int, PassageOffer] = {}  # those that were found
        self._sizes: dict[int, int] = {}
        self._here: set[int] = set()
        self._stop = Stop()
        self._fetching: PassageOffer | None = None
        self._found: queue.SimpleQueue[tuple[WantedPassage, PassageOffer] | None] = queue.SimpleQueue()
        self._events: list[tuple[int, float, float]] = []
        for target in (self._look, self._bring):
            name = f"rekindle-arrivals{target.__name__}"
            threading.Thread(target=self._run, args=(target,), name=name, daemon=True).start()

    @property
    def here(self) -> frozenset[int]:
        """The numbers of those that have come."""
        with self._changed:
            return frozenset(self._here)

    def left(self) -> tuple[WantedPassage, ...]:
        """Those that may still come, in the order of the prompt."""
        with self._changed:
            return tuple(sorted(self._open.values(), key=lambda passage: passage.number))

    def expected(self) -> dict[int, float] | None:
        """How many seconds of the link each that is left still takes; None while nobody knows."""
        speed = self._bandwidth.bytes_per_second()
        with self._changed:
            left, offers = list(self._open.values()), dict(self._offers)
        if speed is None or not offers:
            return None
        token_bytes = sum(self._sizes[number] for number in offers) / sum(self._tokens[number] for number in offers)
        bytes_left = {
            one.number: offers[one.number].left_bytes if one.number in offers else len(one.span) * token_bytes
            for one in left
        }
        return {number: size / speed for number, size in bytes_left.items()}

    def wait(self, seconds: float) -> None:
        """Until one has come, or will not, or so long."""
        with self._changed:
            before = len(self._open)
            self._changed.wait_for(lambda: not self._open or len(self._open) != before, seconds)

    def skip(self, stop: int) -> None:
        """Those that begin before a place are computed: they need not come."""
        with self._changed:
            self._open = {number: one for number, one in self._open.items() if one.span.start >= stop}
            self._changed.notify_all()

    def events(self, begun: float, layers: int) -> list[Event]:
        """What came when, for a timeline."""
        with self._changed:
            return [
                Event("link", number, 0, layers, max(0.0, start - begun), max(0.0, stop - begun))
                for number, start, stop in self._events
            ]

    def close(self) -> None:
        """Bring nothing more. Idempotent; does not wait for what hangs."""
        self._stop.set()
        with self._changed:
            self._open = {}
            fetching = self._fetching
            self._changed.notify_all()
        if fetching is not None:
            fetching.cancel()

    def _wants(self, passage: WantedPassage) -> bool:
        with self._changed:
            return passage.number in self._open

    def _end(self, passage: WantedPassage, *, here: bool) -> None:
        with self._changed:
            self._open.pop(passage.number, None)
            if here:
                self._here.add(passage.number)
            self._changed.notify_all()

    def _run(self, work: Callable[[], None]) -> None:
        """Whatever happens, the passages that do not come are computed."""
        try:
            work()
        except Cancelled:
            self.close()
        except OriginFailed as error:
            self._give_up(str(error))
        except Exception as error:
            log.exception("Passages from the origin could not be used.")
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self._stop.asked:
            self._failed(reason)
        self.close()

    def _look(self) -> None:
        try:
            for passage in reversed(self.left()):
                if not self._wants(passage):
                    continue
                offer = self._source.find(passage, self._stop)
                if offer is None:
                    self._end(passage, here=False)
                    continue
                with self._changed:
                    self._offers[passage.number], self._sizes[passage.number] = offer, offer.left_bytes
                self._found.put((passage, offer))
        finally:
            self._found.put(None)

    def _bring(self) -> None:
        while (found := self._found.get()) is not None:
            passage, offer = found
            with self._changed:
                self._fetching = offer
            if not self._wants(passage):
                continue
            begun = time.monotonic()
            kv = offer.fetch()
            if not self._wants(passage):  # it was computed, or nobody waits and the cache may be closed
                continue
            with self._changed:
                self._events.append((passage.number, begun, time.monotonic()))
            self._end(passage, here=self._keep(passage, kv))


class OriginPassages:
    """Passages at an origin, of one model. `level` says in which quality one may be taken, if at all."""

    def __init__(
        self,
        origin: Origin,
        model: Model,
        level: Callable[[Found], str | None],
        bandwidth: Bandwidth,
        patience_seconds: float,
    ) -> None:
        """`bandwidth` learns from what comes."""
        self._origin, self._model, self._level = origin, model, level
        self._bandwidth, self._patience_seconds = bandwidth, patience_seconds

    def find(self, passage: WantedPassage, stop: Stop) -> PassageOffer | None:
        """See `PassageSource`. Only one that is there as a whole is taken."""
        whose, patience = self._model, self._patience_seconds
        found = self._origin.find(
            passage.tokens, whose.identity, whose.layout, whose.adapter, patience_seconds=patience, stop=stop
        )
        level = None if found is None or found.tokens < len(passage.tokens) else self._level(found)
        if found is None or level is None:
            return None
        span = Span(passage.start, len(passage.tokens))
        return _OriginOffer(self._origin, found, level, span, self._bandwidth)


class _OriginOffer:
    """The slices of a published context that hold some of its tokens."""

    def __init__(self, origin: Origin, found: Found, level: str, span: Span, bandwidth: Bandwidth) -> None:
        self._found, self._span, self._bandwidth = found, span, bandwidth
        spans = found.manifest.cells.spans
        self._chunks = [n for n, one in enumerate(spans) if one.start < span.stop and one.stop > span.start]
        self._layers = range(len(found.manifest.model.layout.layers))
        cells = [Cell(chunk, layer) for chunk in self._chunks for layer in self._layers]
        self._sizes = found.sizes(level)
        self.left_bytes = int(self._sizes[self._chunks].sum())
        self._transfer: Transfer = origin.fetch(found, cells, level)

    def fetch(self) -> Kv:
        """See `PassageOffer`."""
        layers: list[list[LayerKv]] = [[] for _ in self._layers]
        since = time.monotonic()
        for piece in self._transfer:
            now, size = time.monotonic(), int(self._sizes[piece.cell])
            self._bandwidth.add(latency.Transfer(size, now - since, now))
            self.left_bytes, since = self.left_bytes - size, now
            part = self._cut(decode_slice(self._found, *piece.cell, piece.data), self._found.span(piece.cell.chunk))
            layers[piece.cell.layer].append(part)
        return Kv(self._span, self._found.manifest.model.layout, tuple(map(_joined, layers)))

    def _cut(self, kv: LayerKv, chunk: Span) -> LayerKv:
        """The tokens of a chunk that are wanted."""
        own = slice(max(0, self._span.start - chunk.start), self._span.stop - chunk.start)
        return LayerKv(kv.keys[:, own], kv.values[:, own])

    def cancel(self) -> None:
        """See `PassageOffer`."""
        self._transfer.cancel()


def _joined(parts: Sequence[LayerKv]) -> LayerKv:
    """Neighbours as one."""
    return LayerKv(
        np.concatenate([part.keys for part in parts], axis=1), np.concatenate([part.values for part in parts], axis=1)
    )


def unknown_passages(
    outline: Outline, tokens: Sequence[int], known: Iterable[Span], start: int
) -> Iterator[WantedPassage]:
    """The passages behind `start` that are not among those known. The first is none of them: it is exact if computed.

    It stands right behind the head, where it was published, so the others take its place in turn.
    """
    first, spans = outline.chunks[0].start, frozenset(known)
    for number, span in enumerate(outline.chunks, start=1):
        if number > 1 and span.start >= start and span not in spans:
            moved = (*tokens[:first], *tokens[span.start : span.stop])
            yield WantedPassage(number, span, moved, outline.head, first)
