"""What a session streams: prompts whose beginning its origin has, where that is sooner than computing all of it.

An origin that does not answer in time, or fails, costs a twentieth of what computing takes, once: then it is left alone
for a while. Nothing is asked for tenants that are marked local.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np

from rekindle.codec.coder import is_near
from rekindle.core.cells import CHUNK_TOKENS, Cells
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Plan, Stream
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting, KvLost, StepRefused
from rekindle.origin.client import Found, Origin
from rekindle.origin.failure import OriginFailed
from rekindle.origin.signing import read_public, read_secret
from rekindle.origin.slices import RAW
from rekindle.reuse.cost import Rates
from rekindle.reuse.latency import Bandwidth
from rekindle.reuse.stream import StreamCosts
from rekindle.run.carrier import OriginCarrier
from rekindle.run.context import Context
from rekindle.run.known import Known
from rekindle.run.link import Link
from rekindle.run.prefill import Filled, Prefill
from rekindle.run.streaming import Streaming
from rekindle.settings import Settings

log = logging.getLogger("rekindle.origin")

LEVELS = ("near", "q5", "q8", "q4", RAW, "q3", "q2")  # what is taken under near, the first that is there
WORTH_SECONDS = 0.2  # what is computed sooner than that is computed
PATIENCE = 0.05  # the share of computing that looking for it may take
LEAST_PATIENCE_SECONDS, MOST_PATIENCE_SECONDS = 0.05, 1.0
REST_SECONDS = 30.0  # that an origin is left alone after it failed
_FLOP_PER_SECOND = 3e10  # until something was measured: what two slow cores do, two operations a weight and token


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
        self._able = able and not settings.deterministic
        self._bandwidth = Bandwidth()
        self._top_share = _top_share(engine)
        self._resting_until = 0.0

    def fill(self, work: Prefill, context: Context, known: Known, plan: Plan, rates: Rates) -> Filled | None:
        """Compute and stream a prompt of which nothing is known here; None: compute it. Raises `Cancelled`."""
        if not self._may(context, known, plan):
            return None
        cold = rates.compute_seconds(Span(0, plan.tokens))
        if cold is not None and cold < WORTH_SECONDS:
            return None
        try:
            found = self._find(known, cold)
        except OriginFailed as failed:
            self._rest(str(failed))
            return None
        level = None if found is None else self._level(found, known)
        if found is None or level is None:
            return None
        return self._stream(work, context, known, plan, found, level, rates)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._origin.close()

    def _may(self, context: Context, known: Known, plan: Plan) -> bool:
        return (
            self._able
            and not known.off
            and known.passages is None
            and not plan.loads
            and context.sequence.length == 0
            and plan.tokens > CHUNK_TOKENS
            and not self._local & {known.shelf.namespace.tenant, "*"}
            and time.monotonic() >= self._resting_until
        )

    def _find(self, known: Known, cold_seconds: float | None) -> Found | None:
        share = MOST_PATIENCE_SECONDS if cold_seconds is None else PATIENCE * cold_seconds
        patience = min(max(share, LEAST_PATIENCE_SECONDS), MOST_PATIENCE_SECONDS)
        shelf = known.shelf
        tokens = known.tokens[: len(known.tokens) - 1]  # the last one is computed
        return self._origin.find(
            tokens, shelf.namespace.identity, shelf.layout, shelf.adapter, patience_seconds=patience
        )

    @staticmethod
    def _level(found: Found, known: Known) -> str | None:
        """The level to take; None if there is none that may be used."""
        allowed = LEVELS if is_near(known.shelf.codec) else (RAW,)
        return next((level for level in allowed if level in found.levels), None)

    def _stream(
        self, work: Prefill, context: Context, known: Known, plan: Plan, found: Found, level: str, rates: Rates
    ) -> Filled | None:
        carrier = OriginCarrier(self._origin, found, level)
        cells = carrier.cells
        link = Link(carrier, self._bandwidth)
        costs = self._costs(cells, found, level, plan.tokens, rates)
        streaming = Streaming(self._engine, context.sequence, known.tokens, cells, link, costs, work.cancelled)
        try:
            logits = streaming.run()
        except (KvLost, StepRefused, ValueError) as error:  # also costs that no schedule can be made of
            log.warning("computing instead: %s", error)
            context.truncate(0)
            return None
        finally:
            link.close()
        if link.failed is not None:
            self._rest(link.failed)
        context.tokens = tuple(known.tokens)
        span = Span(0, cells.tokens)
        steps = (Stream(span, cells.layers, streaming.told.computed, level), Compute(Span(span.stop, plan.tokens)))
        if level != RAW and streaming.told.streamed_cells:
            context.near_tokens = span.stop
        done = Plan(plan.tokens, steps, None, plan.cold_seconds)
        return Filled(context, logits, done, lost=link.failed, streamed=streaming.told)

    def _costs(self, cells: Cells, found: Found, level: str, tokens: int, rates: Rates) -> StreamCosts:
        """What every cell costs, as far as is known before it begins."""
        layers = cells.layers
        rows = [self._seconds(span, rates) / layers for span in cells.spans]
        compute = np.repeat(np.array(rows)[:, None], layers, axis=1)
        question = self._seconds(Span(cells.tokens, tokens), rates) / layers
        return StreamCosts(
            compute,
            compute * self._top_share,
            found.sizes(level).astype(np.float64),
            np.full(layers, question),
            bandwidth=1.0,
        )

    def _seconds(self, span: Span, rates: Rates) -> float:
        known = rates.compute_seconds(span)
        return 2.0 * self._engine.parameters * len(span) / _FLOP_PER_SECOND if known is None else known

    def _rest(self, reason: str) -> None:
        log.warning("The origin is left alone for %.0f s: %s", REST_SECONDS, reason)
        self._resting_until = time.monotonic() + REST_SECONDS


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
