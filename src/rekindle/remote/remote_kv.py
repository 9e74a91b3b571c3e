"""When a session asks its origin, and what it may use: prompts whose prefix or passages the origin has.

    look      [ find ][ link: from the back ............................. ]
    compute   [ loads, first chunks ][ the next, until both meet ][ question ]

Nothing waits for the origin longer than a moment: while it is asked, local KV is loaded and the first chunks are
computed. After a failure the origin is not asked for a while. Nothing is asked for tenants marked local.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rekindle.cache.context import Context
from rekindle.cache.cost import Rates
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.prefill import Prefill, PrefillResult
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.codec.coder import is_quantized
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.chunk import ChunkMatches
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.core.plan import Plan
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting, KvLost, StepRefused
from rekindle.remote.chunked_prefill import (
    PrefixPrefill,
    RunExactPlan,
    keep_arrived,
    prefill_with_arrivals,
)
from rekindle.remote.client import Origin, PublishedPrefix
from rekindle.remote.connection import Stop
from rekindle.remote.fetch import OriginPassages, RemoteChunkFetch, RemotePrefix, RemotePrefixFetch, unknown_passages
from rekindle.remote.hybrid_prefill import HybridPrefill
from rekindle.remote.index import KvModel
from rekindle.remote.latency import Bandwidth, LayerCosts
from rekindle.remote.schedule import StreamCosts
from rekindle.remote.signing import read_public, read_secret
from rekindle.remote.slices import RAW
from rekindle.remote.transfer_queue import OriginSlices, TransferQueue
from rekindle.safe_read import read_secret_file
from rekindle.settings import Settings

log = logging.getLogger("rekindle.remote")

LEVELS = ("quantized", "q5", "q8", "q4", RAW, "q3", "q2")  # allowed under quantized, in order of preference
WORTH_SECONDS = 0.2  # prompts computed sooner than that are not fetched
PATIENCE, MAX_PATIENCE_SECONDS = 0.015, 0.2  # share of the compute time to wait before computing starts
MAX_AHEAD = 2  # queued prompts that are fetched ahead: they take memory
FIND_SECONDS = 10.0  # timeout of a lookup
BACKOFF_SECONDS = 30.0  # pause after a failure
_FLOP_PER_SECOND = 3e10  # until something was measured: two slow cores, two operations per weight and token

PromptKey = tuple[KvSpace, tuple[int, ...], bool]  # of a prompt; whether it has passages
RemoteFetch = RemotePrefixFetch | RemoteChunkFetch  # the prefix of a prompt, or its passages


def local_tenants(text: str) -> frozenset[str]:
    """Parse the setting of tenants whose prompts stay local; `*` means all."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


class RemoteKv:
    """Remote KV for a session. Thread-safe."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        """Raises `InvalidSetting`."""
        if settings.origin is None:
            raise InvalidSetting("There is no origin. Name one: origin=URL.")
        if settings.origin_keys is None:
            raise InvalidSetting("Nothing of an origin is used without a publisher's public key: name it, origin_keys.")
        keys = [read_public(part.strip()) for part in settings.origin_keys.split(",") if part.strip()]
        secret = None if settings.origin_secret is None else read_secret(Path(settings.origin_secret))
        self._origin = Origin(settings.origin, keys, token=_read_token(settings.origin_token), secret=secret)
        self._engine = engine
        self._local = local_tenants(settings.local_tenants)
        has = engine.capabilities
        self._can_fetch_prefix = has.layer_feeds and has.spans and not settings.deterministic
        self._bandwidth = Bandwidth()
        self._top_share = _top_share(engine)
        self._layers = LayerCosts(engine)
        self._lock = threading.Lock()
        self._ahead: dict[PromptKey, RemoteFetch] = {}
        self._closed = False
        self._backoff_until = 0.0

    def start_fetch(
        self, known: CacheLookup, plan: Plan, rates: Rates, passages: ChunkPrefill | None
    ) -> RemoteFetch | None:
        """Start a fetch for a prompt if allowed and worth it, or take over one that was prefetched; None if not.

        `passages` stores those that arrive."""
        with self._lock:
            ahead = self._ahead.pop(_prompt_key(known), None)
        if ahead is not None and not self._is_allowed(known, plan):  # in the local cache by now
            ahead.close()
            return None
        return ahead or self._start_fetch(known, plan, rates, passages)

    def prefetch(
        self, known: CacheLookup, plan: Plan, rates: Rates, passages: ChunkPrefill | None
    ) -> Prefetched | None:
        """Start the fetch of a prompt that waits for its turn; None if not worth it."""
        key = _prompt_key(known)
        with self._lock:
            if len(self._ahead) >= MAX_AHEAD or key in self._ahead or self._closed:
                return None
            coming = self._start_fetch(known, plan, rates, passages)  # only starts it
            if coming is None:
                return None
            self._ahead[key] = coming
        return Prefetched(self, key, coming)

    @property
    def ahead(self) -> tuple[RemoteFetch, ...]:
        """Fetches of prompts that wait for their turn."""
        with self._lock:
            return tuple(self._ahead.values())

    def drop(self, key: PromptKey, coming: RemoteFetch) -> None:
        """Close a prefetch unless `start_fetch` has taken it over."""
        with self._lock:
            if self._ahead.get(key) is not coming:
                return
            del self._ahead[key]
        coming.close()

    def _start_fetch(
        self, known: CacheLookup, plan: Plan, rates: Rates, passages: ChunkPrefill | None
    ) -> RemoteFetch | None:
        if not self._is_allowed(known, plan):
            return None
        left = rates.compute_seconds(Span(plan.reused, plan.tokens))
        if left is not None and left < WORTH_SECONDS:
            return None
        try:
            if known.passages is not None:
                return None if passages is None else self._start_passages(known, known.passages, passages)
            return RemotePrefixFetch(lambda stop: self._find(known, stop), plan.reused, self._back_off)
        except RuntimeError as error:  # no thread left
            log.warning("The origin is not asked: %s.", error)
            return None

    def _start_passages(
        self, known: CacheLookup, passages: ChunkMatches, kept: ChunkPrefill
    ) -> RemoteChunkFetch | None:
        """Start to fetch passages missing here. Raises `RuntimeError` if no thread can be started."""
        kv_space, here = known.kv_space, [chunk.span for chunk in passages.picked if chunk.known is not None]
        wanted = list(unknown_passages(passages.prompt_layout, known.tokens, here, known.matches.length))
        if not passages.picked or sum(len(passage.span) for passage in wanted) < CHUNK_TOKENS:
            return None
        source = OriginPassages(
            self._origin,
            KvModel(kv_space.namespace.identity, kv_space.layout, kv_space.adapter),
            lambda found: self._level(found, known),
            self._bandwidth,
            FIND_SECONDS,
        )
        keep = partial(keep_arrived, kept.store, known)
        return RemoteChunkFetch(wanted, source, keep, self._back_off, self._bandwidth)

    @staticmethod
    def fill_passages(
        coming: RemoteFetch, fill: ChunkPrefill, work: Prefill, context: Context, known: CacheLookup
    ) -> PrefillResult:
        """Prefill a prompt whose passages are being fetched. Raises as `fill` does."""
        assert isinstance(coming, RemoteChunkFetch)  # see `_start_fetch`
        return prefill_with_arrivals(fill, work, context, known, coming)

    def fill(
        self,
        coming: RemoteFetch,
        work: Prefill,
        context: Context,
        known: CacheLookup,
        plan: Plan,
        rates: Rates,
        run_plan: RunExactPlan,
    ) -> PrefillResult:
        """Prefill a prompt from the local cache, the origin and computing. Raises `Cancelled`, and what the engine
        raises."""
        assert isinstance(coming, RemotePrefixFetch)  # see `_start_fetch`
        prefill = PrefixPrefill(work, context, known, plan, run_plan)
        if prefill.is_between_chunks:  # else load or compute first
            left = rates.compute_seconds(Span(plan.reused, plan.tokens))
            coming.wait(MAX_PATIENCE_SECONDS if left is None else min(PATIENCE * left, MAX_PATIENCE_SECONDS))
        while not prefill.is_ready(coming):
            prefill.next_piece()
        offer = coming.offer
        if offer is None or not prefill.is_between_chunks or offer.cells.tokens <= prefill.at:
            return prefill.end()
        return self._stream(prefill, offer, rates) or prefill.end()

    def close(self) -> None:
        """Close the connections, and store the layer costs. Idempotent."""
        with self._lock:
            self._closed = True
            waiting = list(self._ahead.items())
        for key, coming in waiting:
            self.drop(key, coming)
        self._origin.close()
        try:
            self._layers.close()
        except Exception:  # not worth failing for
            log.exception("What layers cost could not be learned.")

    def _is_allowed(self, known: CacheLookup, plan: Plan) -> bool:
        return (
            (self._can_fetch_prefix if known.passages is None else self._engine.capabilities.spans)
            and not known.off
            and plan.tokens - plan.reused > CHUNK_TOKENS
            and not self._local & {known.kv_space.namespace.tenant, "*"}
            and time.monotonic() >= self._backoff_until
        )

    def _find(self, known: CacheLookup, stop: Stop) -> RemotePrefix | None:
        kv_space = known.kv_space
        tokens = known.tokens[: len(known.tokens) - 1]  # the last token is computed
        found = self._origin.find(
            tokens,
            kv_space.namespace.identity,
            kv_space.layout,
            kv_space.adapter,
            timeout_seconds=FIND_SECONDS,
            stop=stop,
        )
        level = None if found is None else self._level(found, known)
        if found is None or level is None:
            return None
        carrier = OriginSlices(self._origin, found, level)
        return RemotePrefix(carrier, TransferQueue(carrier, self._bandwidth))

    @staticmethod
    def _level(found: PublishedPrefix, known: CacheLookup) -> str | None:
        """The level to fetch; None if none may be used."""
        allowed = LEVELS if is_quantized(known.kv_space.codec) else (RAW,)
        return next((level for level in allowed if level in found.levels), None)

    def _stream(self, prefill: PrefixPrefill, offer: RemotePrefix, rates: Rates) -> PrefillResult | None:
        """Hybrid prefill of the rest; None if it has to be computed."""
        context, tokens, link = prefill.context, prefill.known.tokens, offer.link
        try:
            costs = self._costs(offer, len(tokens), rates)
            streaming = HybridPrefill(
                self._engine, context.sequence, tokens, offer.cells, link, costs, prefill.work.cancelled
            )
            streaming.alone = prefill.work.alone
            streaming.since = prefill.begun
            logits = streaming.run()
        except (KvLost, StepRefused, ValueError) as error:  # ValueError: costs without a schedule
            log.warning("computing instead: %s", error)
            context.truncate(prefill.at)
            return None
        finally:
            link.close()
        if link.failed is not None:
            self._back_off(link.failed)
        if self._engine.device == "cpu":  # elsewhere steps are asynchronous
            self._layers.learn(streaming.samples)
        return prefill.streamed(streaming, offer, logits)

    def _costs(self, offer: RemotePrefix, tokens: int, rates: Rates) -> StreamCosts:
        """The estimated costs of every cell."""
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

    def _back_off(self, reason: str) -> None:
        log.warning("The origin is left alone for %.0f s: %s", BACKOFF_SECONDS, reason)
        self._backoff_until = time.monotonic() + BACKOFF_SECONDS


@dataclass(frozen=True)
class Prefetched:
    """The fetch of a prompt that waits for its turn. `close` it when the prompt starts or is dropped."""

    _streams: RemoteKv
    _key: PromptKey
    _coming: RemoteFetch

    def close(self) -> None:
        """Idempotent."""
        self._streams.drop(self._key, self._coming)


def _prompt_key(known: CacheLookup) -> PromptKey:
    """The same prompt is fetched differently when its passages may be reused."""
    return known.kv_space, tuple(known.tokens), known.passages is not None


def _top_share(engine: Engine) -> float:
    """Share of a layer's weights that make its keys and values: the cost of the top layer of a step."""
    layers = len(engine.layout.layers)
    made = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in engine.layout.layers) / layers
    return min(1.0, made * engine.attention / max(1, engine.parameters))  # an input is about as wide as the queries


def _read_token(path: str | None) -> str | None:
    if path is None:
        return None
    text = read_secret_file(Path(path), "The token file").decode("utf-8", "replace").strip()
    if not text:
        raise InvalidSetting(f"The token file {path} is empty.")
    return text.splitlines()[0].strip()
