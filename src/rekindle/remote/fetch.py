"""Fetching from an origin in background threads: the prefix of a prompt, or its passages.

Prefix: poll `over` and `offer` to see what was found; slices start to arrive as soon as it is.

Passages go into the chunk cache, the last one first, for this prompt and for later ones:

    find     [last][second last] ...
    fetch          [last ......][second last ......] ...     each is stored when it is complete

One thread looks for the next passage while another fetches, so the link never waits for a lookup.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rekindle.core.cells import Cell, CellGrid, TimelineEvent
from rekindle.core.chunk import ChunkDigest, PromptLayout, Variant, chunk_digest
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.reply import OriginMiss
from rekindle.errors import Cancelled
from rekindle.remote.client import Origin, PublishedPrefix, SliceTransfer, decode_slice
from rekindle.remote.connection import OriginFailed, Stop
from rekindle.remote.index import KvModel
from rekindle.remote.ladder import LevelLimit
from rekindle.remote.latency import Bandwidth, TransferSample
from rekindle.remote.transfer_queue import OriginSlices, TransferQueue

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundRemote:
    """What an origin has of a prompt, and how large it is."""

    spans: tuple[Span, ...]
    size_bytes: float


class RemotePrefixFetch(TransferQueue):
    """Finds the prefix of one prompt, then fetches its slices, from the back until others are wanted."""

    def __init__(
        self,
        find: Callable[[Stop], OriginSlices | OriginMiss],
        tokens: int,
        on_failure: Callable[[str], None],
        bandwidth: Bandwidth | None = None,
        lowest_layer: int = 1,
    ) -> None:
        """Start the lookup. `find` may raise `OriginFailed`, whose text goes to `on_failure`. The first `tokens` are
        here already, or computed soon: they are not fetched, nor are layers below `lowest_layer`. Raises `RuntimeError`
        if no thread can be started."""
        self._find, self._here, self._on_failure, self._lowest_layer = find, tokens, on_failure, lowest_layer
        self._stop = Stop()
        self._over = False
        self._offer: OriginSlices | None = None
        self._miss: OriginMiss | None = None
        super().__init__(None, bandwidth)

    @property
    def over(self) -> bool:
        """Whether the lookup has ended."""
        with self._changed:
            return self._over

    @property
    def offer(self) -> OriginSlices | None:
        """What was found; None until then."""
        with self._changed:
            return self._offer

    @property
    def miss(self) -> OriginMiss | None:
        """Why nothing came; None if something may have. Ask before `close`."""
        with self._changed:
            if not self._over:
                return "late"
            return "failed" if self.failed is not None and not self.arrived_cells else self._miss

    def wait_for_first(self, seconds: float) -> None:
        """Wait until a slice has arrived, none will or `seconds` pass."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._arrived or (self._over and not (self._wanted or self._flying)), seconds
            )

    def found(self) -> FoundRemote | None:
        """What the origin has behind what is here; None until some of it has arrived."""
        offer = self.offer
        if offer is None or not self.arrived or self.failed is not None:
            return None
        spans = (Span(self._here, offer.cells.tokens),)  # no slices come of a shorter one
        return FoundRemote(spans, float(offer.sizes[self._here // offer.cells.chunk_tokens :].sum()))

    def give_up(self) -> None:
        """What it found is not waited for any longer."""
        with self._changed:
            if self._offer is not None and self._offer.cells.tokens > self._here:
                self._miss = "slow"

    def close(self) -> None:
        """Fetch nothing more. Idempotent; does not wait for a hanging transfer."""
        self._stop.set()
        with self._changed:
            self._over = True
        super().close()

    def _run(self) -> None:
        offer = self._look()
        with self._changed:
            self._over = True
            if isinstance(offer, str):
                self._miss = offer
            elif not self._closed:
                self._source = self._offer = offer
                self._wanted = _backwards(offer.cells, self._here, self._lowest_layer)
            self._changed.notify_all()
        if self._offer is not None:
            super()._run()

    def _look(self) -> OriginSlices | OriginMiss:
        try:
            return self._find(self._stop)
        except Cancelled:
            return "late"
        except OriginFailed as failed:
            if not self._stop.is_set:
                self._on_failure(str(failed))
            return "failed"
        except Exception as error:  # any failure: the prompt is computed
            log.exception("Looking for a prompt at the origin failed.")
            self._on_failure(f"{type(error).__name__}: {error}")
            return "failed"


def _backwards(cells: CellGrid, here: int, lowest_layer: int) -> list[Cell]:
    """From the back, the top layer first: where both lanes meet is not known yet."""
    first = -(-here // cells.chunk_tokens)
    chunks = reversed(range(first, cells.chunks))
    return [Cell(chunk, layer) for chunk in chunks for layer in reversed(range(lowest_layer, cells.layers))]


@dataclass(frozen=True)
class WantedPassage:
    """A passage that is not in the local cache.

    number    its number in the prompt, from 1
    span      its span in the prompt
    tokens    its tokens
    head      the digest of the prompt's head
    """

    number: int
    span: Span
    tokens: tuple[int, ...]
    head: ChunkDigest


KeepPassage = Callable[[WantedPassage, Variant, Kv], bool]  # store it in the chunk cache; False if not stored


class RemoteChunkFetch:
    """The passages of one prompt. Always `close` it."""

    def __init__(
        self,
        wanted: Sequence[WantedPassage],
        source: OriginPassages,
        keep: KeepPassage,
        failed: Callable[[str], None],
        bandwidth: Bandwidth,
    ) -> None:
        """Start the lookups. `failed` is called with the reason of a failure; `bandwidth` is that of the link.

        Raises `RuntimeError` if no thread can be started."""
        self._source, self._keep, self._failed, self._bandwidth = source, keep, failed, bandwidth
        self._changed = threading.Condition()
        self._open = {passage.number: passage for passage in wanted}  # neither arrived nor given up
        self._spans = {passage.number: passage.span for passage in wanted}
        self._offers: dict[int, PassageOffer] = {}  # passages that were found
        self._sizes: dict[int, int] = {}
        self._here: set[int] = set()
        self._stop = Stop()
        self._fetching: PassageOffer | None = None
        self._found: queue.SimpleQueue[tuple[WantedPassage, PassageOffer] | None] = queue.SimpleQueue()
        self._events: list[tuple[int, float, float]] = []
        self._miss: OriginMiss | None = None
        for target in (self._look, self._bring):
            name = f"rekindle-arrivals{target.__name__}"
            threading.Thread(target=self._run, args=(target,), name=name, daemon=True).start()

    @property
    def here(self) -> frozenset[int]:
        """Numbers of the passages that have arrived."""
        with self._changed:
            return frozenset(self._here)

    @property
    def miss(self) -> OriginMiss | None:
        """Why nothing was used; None if something may have been."""
        with self._changed:
            return None if self._here and self._miss != "slow" else self._miss or "late"

    def found(self) -> FoundRemote | None:
        """The passages that the origin has, as far as it was asked; None until some of them has arrived."""
        with self._changed:
            offers = dict(self._offers)
            if not self._here and all(offers[number].left_bytes == self._sizes[number] for number in offers):
                return None
            return FoundRemote(tuple(self._spans[number] for number in offers), float(sum(self._sizes.values())))

    def give_up(self) -> None:
        """What it found is not waited for any longer."""
        with self._changed:
            if self._offers:
                self._miss = "slow"

    def left(self) -> tuple[WantedPassage, ...]:
        """Passages that may still arrive, in prompt order."""
        with self._changed:
            return tuple(sorted(self._open.values(), key=lambda passage: passage.number))

    def expected(self) -> dict[int, float] | None:
        """Expected transfer seconds of each passage left, by number; None while unknown."""
        speed = self._bandwidth.bytes_per_second()
        with self._changed:
            left, offers = list(self._open.values()), dict(self._offers)
        if speed is None or not offers:
            return None
        token_bytes = sum(self._sizes[number] for number in offers) / sum(len(self._spans[number]) for number in offers)
        bytes_left = {
            one.number: offers[one.number].left_bytes if one.number in offers else len(one.span) * token_bytes
            for one in left
        }
        return {number: size / speed for number, size in bytes_left.items()}

    def wait(self, seconds: float) -> None:
        """Wait until a passage arrives or is given up, or `seconds` pass."""
        with self._changed:
            before = len(self._open)
            self._changed.wait_for(lambda: not self._open or len(self._open) != before, seconds)

    def skip(self, stop: int) -> None:
        """Give up passages that begin before `stop`: they are computed."""
        with self._changed:
            self._open = {number: one for number, one in self._open.items() if one.span.start >= stop}
            self._changed.notify_all()

    def events(self, begun: float, layers: int) -> list[TimelineEvent]:
        """Arrivals, for a timeline."""
        with self._changed:
            return [
                TimelineEvent("link", number, 0, layers, max(0.0, start - begun), max(0.0, stop - begun))
                for number, start, stop in self._events
            ]

    def close(self) -> None:
        """Fetch nothing more. Idempotent; does not wait for a hanging transfer."""
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
        """Run a thread; after any failure the missing passages are computed."""
        try:
            work()
        except Cancelled:
            self.close()
        except OriginFailed as error:
            self._give_up(str(error))
        except Exception as error:  # any failure: they are computed
            log.exception("Passages from the origin could not be used.")
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        if not self._stop.is_set:
            self._miss = "failed"
            self._failed(reason)
        self.close()

    def _look(self) -> None:
        try:
            for passage in reversed(self.left()):
                if not self._wants(passage):
                    continue
                offer = self._source.find(passage, self._stop)
                if isinstance(offer, str):
                    self._miss = offer
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
            if not self._wants(passage):  # computed meanwhile, or closed
                continue
            with self._changed:
                self._events.append((passage.number, begun, time.monotonic()))
            self._end(passage, here=self._keep(passage, offer.variant, kv))


class OriginPassages:
    """Passages of one model at an origin, each at the smallest level that is allowed."""

    def __init__(
        self, origin: Origin, model: KvModel, limit: LevelLimit, bandwidth: Bandwidth, timeout_seconds: float
    ) -> None:
        """`bandwidth` is updated by every slice."""
        self._origin, self._model, self._limit = origin, model, limit
        self._bandwidth, self._timeout_seconds = bandwidth, timeout_seconds
        self._why: OriginMiss | None = None  # a passage is not there

    def find(self, passage: WantedPassage, stop: Stop) -> PassageOffer | OriginMiss:
        """An offer of a passage, or why there is none. Raises `OriginFailed`, and `Cancelled`."""
        limit, seconds = self._limit, self._timeout_seconds
        found = self._origin.find_passage(
            passage.tokens, self._model, limit.allows, passage.head, timeout_seconds=seconds, stop=stop
        )
        if found is None or found.manifest.passage is None:
            return self._missing(stop)
        if (level := limit.smallest(found)) is None:
            return limit.why_none(found)
        published = found.manifest.passage
        variant = Variant(chunk_digest(passage.tokens), published.span, published.scores)
        return PassageOffer(self._origin, found, level, self._bandwidth, variant)

    def _missing(self, stop: Stop) -> OriginMiss:
        self._why = self._why or self._origin.why_missing(self._model, self._timeout_seconds, stop)
        return self._why


class SpanTransfer:
    """The slices of a published context that hold some of its tokens."""

    def __init__(self, origin: Origin, found: PublishedPrefix, level: str, span: Span, bandwidth: Bandwidth) -> None:
        self._found, self.level, self._span, self._bandwidth = found, level, span, bandwidth
        spans = found.manifest.cells.spans
        self._chunks = [n for n, one in enumerate(spans) if one.start < span.stop and one.stop > span.start]
        self._layers = range(len(found.manifest.model.layout.layers))
        cells = [Cell(chunk, layer) for chunk in self._chunks for layer in self._layers]
        self._sizes = found.sizes(level)
        self.left_bytes = int(self._sizes[self._chunks].sum())
        self._transfer: SliceTransfer = origin.fetch(found, cells, level)

    def fetch(self) -> Kv:
        """Its KV at its published position. Raises `OriginFailed`, and `Cancelled`."""
        layers: list[list[LayerKv]] = [[] for _ in self._layers]
        since = time.monotonic()
        for piece in self._transfer:
            now, size = time.monotonic(), int(self._sizes[piece.cell])
            self._bandwidth.add(TransferSample(size, now - since, now))
            self.left_bytes, since = self.left_bytes - size, now
            part = self._cut(decode_slice(self._found, *piece.cell, piece.data), self._found.span(piece.cell.chunk))
            layers[piece.cell.layer].append(part)
        return Kv(self._span, self._found.model.layout, tuple(map(_joined, layers)))

    def _cut(self, kv: LayerKv, chunk: Span) -> LayerKv:
        """The wanted tokens of a chunk."""
        own = slice(max(0, self._span.start - chunk.start), self._span.stop - chunk.start)
        return LayerKv(kv.keys[:, own], kv.values[:, own])

    def cancel(self) -> None:
        """End `fetch`, from any thread."""
        self._transfer.cancel()


class PassageOffer(SpanTransfer):
    """A passage that can be fetched, and the variant to store."""

    def __init__(
        self, origin: Origin, found: PublishedPrefix, level: str, bandwidth: Bandwidth, variant: Variant
    ) -> None:
        super().__init__(origin, found, level, variant.span, bandwidth)
        self.variant = variant


def _joined(parts: Sequence[LayerKv]) -> LayerKv:
    """Concatenate along tokens."""
    return LayerKv(
        np.concatenate([part.keys for part in parts], axis=1), np.concatenate([part.values for part in parts], axis=1)
    )


def unknown_passages(
    prompt_layout: PromptLayout, tokens: Sequence[int], known: Iterable[Span], start: int
) -> Iterator[WantedPassage]:
    """The documents from `start` on that are not known."""
    spans, head = frozenset(known), chunk_digest(tokens[: prompt_layout.head])
    for number, span in enumerate(prompt_layout.chunks, start=1):
        if span.start >= start and span not in spans and span not in prompt_layout.texts:
            yield WantedPassage(number, span, tuple(tokens[span.start : span.stop]), head)
