"""What a session streams: prompts whose beginning its origin has, where that is sooner than computing all of it.

    look      [ find ][ link: from the back ............................. ]
    compute   [ loads, first chunks ][ the next, until both meet ][ question ]

Nobody waits for the origin longer than a moment: while it is asked, what is known here is loaded, and the first chunks
are computed. One that fails is left alone for a while.
Nothing is asked for tenants that are marked local.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from rekindle.codec.coder import is_near
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.keys import Shelf
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Plan, Stream
from rekindle.engine.base import Engine, Logits
from rekindle.errors import InvalidSetting, KvLost, StepRefused
from rekindle.origin.client import Found, Origin
from rekindle.origin.line import Stop
from rekindle.origin.names import Model
from rekindle.origin.signing import read_public, read_secret
from rekindle.origin.slices import RAW
from rekindle.reuse.cost import Rates
from rekindle.reuse.latency import Bandwidth
from rekindle.reuse.stream import StreamCosts
from rekindle.run.arrivals import Arrivals, OriginPassages, unknown_passages
from rekindle.run.beginning import Beginning, CarryOut
from rekindle.run.carrier import OriginCarrier
from rekindle.run.chunks import Passages
from rekindle.run.coming import Coming, Offer
from rekindle.run.context import Context
from rekindle.run.known import Known
from rekindle.run.layer_costs import LayerCosts
from rekindle.run.link import Link
from rekindle.run.passages import PassageFill
from rekindle.run.prefill import Filled, Prefill
from rekindle.run.streaming import Streaming
from rekindle.settings import Settings

log = logging.getLogger("rekindle.origin")

LEVELS = ("near", "q5", "q8", "q4", RAW, "q3", "q2")  # what is taken under near, the first that is there
WORTH_SECONDS = 0.2  # what is computed sooner than that is computed
PATIENCE, MOST_PATIENCE_SECONDS = 0.015, 0.2  # the share of computing that is waited for it before anything is computed
MOST_AHEAD = 2  # prompts that come while they wait for their turn: they take memory
FIND_SECONDS = 10.0  # that an origin may take to say whether it has something
REST_SECONDS = 30.0  # that an origin is left alone after it failed
_FLOP_PER_SECOND = 3e10  # until something was measured: what two slow cores do, two operations a weight and token

Name = tuple[Shelf, tuple[int, ...], bool]  # of a prompt; whether it is mended
Sought = Coming | Arrivals  # what an origin is asked for: the beginning of a prompt, or its passages


def local_tenants(text: str) -> frozenset[str]:
    """The tenants whose prompts stay here, as the setting names them; `*` is all of them."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


class Streams:
    """The origin of a session. Used from several threads."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        """Raises `InvalidSetting`."""
        if settings.origin is None:
            raise InvalidSetting("There is no origin. Name one: origin=URL.")
        if settings.origin_keys is None:
            raise InvalidSetting("Nothing of an origin is used without a publisher's public key: name it, origin_keys.")
        keys = [read_public(part.strip()) for part in settings.origin_keys.split(",") if part.strip()]
        secret = None if settings.origin_secret is None else read_secret(Path(settings.origin_secret))
        self._origin = Origin(settings.origin, keys, token=_token(settings.origin_token), secret=secret)
        self._engine = engine
        self._local = local_tenants(settings.local_tenants)
        able = engine.capabilities.layer_feeds and engine.capabilities.spans
        self.able = able and not settings.deterministic  # to stream at all
        self._bandwidth = Bandwidth()
        self._top_share = _top_share(engine)
        self._layers = LayerCosts(engine)
        self._lock = threading.Lock()
        self._ahead: dict[Name, Sought] = {}
        self._closed = False
        self._resting_until = 0.0

    def ask(self, known: Known, plan: Plan, rates: Rates, passages: PassageFill | None) -> Sought | None:
        """Begin to look for a prompt, if it is worth it and may be; None if not. It may be on its way already.

        `passages` keeps those that come."""
        with self._lock:
            ahead = self._ahead.pop(_name(known), None)
        if ahead is not None and not self._may(known, plan):  # it became known here meanwhile
            ahead.close()
            return None
        return ahead or self._ask(known, plan, rates, passages)

    def prefetch(self, known: Known, plan: Plan, rates: Rates, passages: PassageFill | None) -> Prefetched | None:
        """Begin with that for a prompt that has to wait for its turn; None if it is not worth it."""
        name = _name(known)
        with self._lock:
            if len(self._ahead) >= MOST_AHEAD or name in self._ahead or self._closed:
                return None
            coming = self._ask(known, plan, rates, passages)  # it only begins
            if coming is None:
                return None
            self._ahead[name] = coming
        return Prefetched(self, name, coming)

    @property
    def ahead(self) -> tuple[Sought, ...]:
        """What comes for prompts that wait for their turn."""
        with self._lock:
            return tuple(self._ahead.values())

    def drop(self, name: Name, coming: Sought) -> None:
        """Nobody waits for it any more, unless its turn has come."""
        with self._lock:
            if self._ahead.get(name) is not coming:
                return
            del self._ahead[name]
        coming.close()

    def _ask(self, known: Known, plan: Plan, rates: Rates, passages: PassageFill | None) -> Sought | None:
        if not self._may(known, plan):
            return None
        left = rates.compute_seconds(Span(plan.reused, plan.tokens))
        if left is not None and left < WORTH_SECONDS:
            return None
        try:
            if known.passages is not None:
                return None if passages is None else self._ask_passages(known, known.passages, passages)
            return Coming(lambda stop: self._find(known, stop), plan.reused, self._rest)
        except RuntimeError as error:  # the system has no thread left
            log.warning("The origin is not asked: %s.", error)
            return None

    def _ask_passages(self, known: Known, passages: Passages, kept: PassageFill) -> Arrivals | None:
        """Begin to look for passages that are not known here. Raises `RuntimeError` where there is no thread left."""
        shelf, here = known.shelf, [chunk.span for chunk in passages.picked if chunk.known is not None]
        wanted = list(unknown_passages(passages.outline, known.tokens, here, known.matches.length))
        if not passages.picked or sum(len(passage.span) for passage in wanted) < CHUNK_TOKENS:
            return None
        source = OriginPassages(
            self._origin,
            Model(shelf.namespace.identity, shelf.layout, shelf.adapter),
            lambda found: self._level(found, known),
            self._bandwidth,
            FIND_SECONDS,
        )
        keep = partial(kept.keep_arrived, known)
        return Arrivals(wanted, source, keep, self._rest, self._bandwidth)

    def fill(
        self, coming: Sought, work: Prefill, context: Context, known: Known, plan: Plan, rates: Rates, carry: CarryOut
    ) -> Filled:
        """Fill a prompt with what is known here, what comes and what is computed. Raises `Cancelled`, and what the
        engine raises."""
        assert isinstance(coming, Coming)  # prompts with passages are filled elsewhere
        filling = _Filling(work, context, known, plan, carry)
        if filling.is_between_chunks:  # else there is something to do first
            left = rates.compute_seconds(Span(plan.reused, plan.tokens))
            coming.wait(MOST_PATIENCE_SECONDS if left is None else min(PATIENCE * left, MOST_PATIENCE_SECONDS))
        while not filling.is_ready(coming):
            filling.next_piece()
        offer = coming.offer
        if offer is None or not filling.is_between_chunks or offer.cells.tokens <= filling.at:
            return filling.end()
        return self._stream(filling, offer, rates) or filling.end()

    def close(self) -> None:
        """Close the connections, and remember what layers cost. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = list(self._ahead.items())
        for name, coming in waiting:
            self.drop(name, coming)
        self._origin.close()
        try:
            self._layers.close()
        except Exception:  # what it would have learned is not worth more
            log.exception("What layers cost could not be learned.")

    def _may(self, known: Known, plan: Plan) -> bool:
        return (
            (self.able if known.passages is None else self._engine.capabilities.spans)
            and not known.off
            and plan.tokens - plan.reused > CHUNK_TOKENS
            and not self._local & {known.shelf.namespace.tenant, "*"}
            and time.monotonic() >= self._resting_until
        )

    def _find(self, known: Known, stop: Stop) -> Offer | None:
        shelf = known.shelf
        tokens = known.tokens[: len(known.tokens) - 1]  # the last one is computed
        found = self._origin.find(
            tokens,
            shelf.namespace.identity,
            shelf.layout,
            shelf.adapter,
            patience_seconds=FIND_SECONDS,
            stop=stop,
        )
        level = None if found is None else self._level(found, known)
        if found is None or level is None:
            return None
        carrier = OriginCarrier(self._origin, found, level)
        return Offer(carrier, Link(carrier, self._bandwidth))

    @staticmethod
    def _level(found: Found, known: Known) -> str | None:
        """The level to take; None if there is none that may be used."""
        allowed = LEVELS if is_near(known.shelf.codec) else (RAW,)
        return next((level for level in allowed if level in found.levels), None)

    def _stream(self, filling: _Filling, offer: Offer, rates: Rates) -> Filled | None:
        """The rest of a prompt that is coming; None if it has to be computed after all."""
        context, tokens, link = filling.context, filling.known.tokens, offer.link
        try:
            costs = self._costs(offer, len(tokens), rates)
            streaming = Streaming(
                self._engine, context.sequence, tokens, offer.cells, link, costs, filling.work.cancelled
            )
            streaming.alone = filling.work.alone
            streaming.since = filling.begun
            logits = streaming.run()
        except (KvLost, StepRefused, ValueError) as error:  # also costs that no schedule can be made of
            log.warning("computing instead: %s", error)
            context.truncate(filling.at)
            return None
        finally:
            link.close()
        if link.failed is not None:
            self._rest(link.failed)
        if self._engine.device == "cpu":  # elsewhere a step is over before it is computed
            self._layers.learn(streaming.told.samples)
        return filling.streamed(streaming, offer, logits)

    def _costs(self, offer: Offer, tokens: int, rates: Rates) -> StreamCosts:
        """What every cell costs, as far as is known before it begins."""
        cells = offer.cells
        compute = self._layers.seconds(cells)
        if compute is None:
            rows = [self._seconds(span, rates) / cells.layers for span in cells.spans]
            compute = np.repeat(np.array(rows)[:, None], cells.layers, axis=1)
        question = self._seconds(Span(cells.tokens, tokens), rates) / cells.layers
        return StreamCosts(
            compute,
            compute * self._top_share,
            offer.carrier.sizes.astype(np.float64),
            np.full(cells.layers, question),
            bandwidth=1.0,
        )

    def _seconds(self, span: Span, rates: Rates) -> float:
        known = rates.compute_seconds(span)
        return 2.0 * self._engine.parameters * len(span) / _FLOP_PER_SECOND if known is None else known

    def _rest(self, reason: str) -> None:
        log.warning("The origin is left alone for %.0f s: %s", REST_SECONDS, reason)
        self._resting_until = time.monotonic() + REST_SECONDS


@dataclass(frozen=True)
class Prefetched:
    """A prompt that waits for its turn, and is on its way meanwhile. `close` it when it has begun, or never will."""

    _streams: Streams
    _name: Name
    _coming: Sought

    def close(self) -> None:
        """Idempotent."""
        self._streams.drop(self._name, self._coming)


class _Filling(Beginning):
    """A prompt whose beginning may be published, chunk by chunk while the origin is asked."""

    @property
    def is_between_chunks(self) -> bool:
        """Whether a chunk could begin, with all that is known here before it."""
        return self.at >= self.plan.reused and not self.at % CHUNK_TOKENS

    @property
    def _boundary(self) -> int:
        """Where the next piece ends. Each is as long as all before: who has not answered by now may take as long again,
        and long steps are faster. While others wait for them, they are short."""
        at = self.following
        pieces = sum(event.lane == "compute" for event in self.events)
        most = min(pieces, self.work.engine.prefill_tokens // CHUNK_TOKENS) if self.work.alone() else 1
        last = (self.plan.tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        following = (at // CHUNK_TOKENS + 1) * CHUNK_TOKENS
        return max(following, min(following + (max(1, most) - 1) * CHUNK_TOKENS, last))

    def is_ready(self, coming: Coming) -> bool:
        """Whether it is time to stream, or to compute the rest."""
        if self._boundary >= self.plan.tokens or (coming.over and coming.offer is None):
            return True
        return coming.offer is not None and self.is_between_chunks

    def next_piece(self) -> None:
        """Load what is known here, and compute up to the end of a chunk."""
        stop = self._boundary
        chunks = range(self.following // CHUNK_TOKENS, stop // CHUNK_TOKENS)
        self.go_on(stop, [(chunk, Span(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)) for chunk in chunks])

    def streamed(self, streaming: Streaming, offer: Offer, logits: Logits) -> Filled:
        """Everything is here, and some of it came."""
        cells, told, level = offer.cells, streaming.told, offer.carrier.level
        told.events[:0] = self.events
        self.context.tokens = tuple(self.known.tokens)
        if level != RAW and told.streamed_cells:
            self.context.near_tokens = cells.tokens  # as far as is known
        first = -(-self.loaded // CHUNK_TOKENS)
        span = Span(first * CHUNK_TOKENS, cells.tokens)
        stream = Stream(span, cells.layers, told.computed[first:], level)
        last = Compute(Span(span.stop, self.plan.tokens))
        filled = self.told(logits, (*self.computed_before(span.start), stream, last))
        return replace(filled, lost=filled.lost or told.failed, streamed=told)


def _name(known: Known) -> Name:
    """Under `exact` the same prompt comes otherwise than where its passages are mended."""
    return known.shelf, tuple(known.tokens), known.passages is not None


def _top_share(engine: Engine) -> float:
    """How much of a layer's weights make its keys and values: all that the top layer of a step computes."""
    layers = len(engine.layout.layers)
    made = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in engine.layout.layers) / layers
    return min(1.0, made * engine.attention / max(1, engine.parameters))  # an input is about as wide as a query


def _token(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"The token file {path} cannot be read: {error}.") from None
    if not text:
        raise InvalidSetting(f"The token file {path} is empty.")
    return text.splitlines()[0].strip()
