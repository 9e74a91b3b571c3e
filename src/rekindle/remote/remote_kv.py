"""When a session asks its origin, and what it may use: prompts whose prefix or passages the origin has.

    look      [ find ][ link: from the back ............................. ]
    compute   [ loads, first chunks ][ the next, until both meet ][ question ]

Nothing waits for the origin longer than a moment: while it is asked, local KV is loaded and the first chunks are
computed. After a failure the origin is not asked for a while. Nothing is asked for tenants marked local.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rekindle.cache.coders import quantized_coder
from rekindle.cache.context import Context
from rekindle.cache.cost import Rates
from rekindle.cache.lookup import CacheLookup
from rekindle.cache.prefill import Prefill, PrefillResult
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.codec.cipher import read_secret
from rekindle.codec.coder import is_quantized
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.chunk import ChunkMatches
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Span
from rekindle.core.plan import Plan
from rekindle.core.reply import OriginFinding, OriginMiss
from rekindle.engine.base import Engine
from rekindle.errors import Cancelled, InvalidSetting, KvLost, StepRefused
from rekindle.remote.chunked_prefill import (
    ChunkedPrefill,
    PrefixPrefill,
    keep_arrived,
    prefill_with_arrivals,
    stopping,
)
from rekindle.remote.client import Origin
from rekindle.remote.connection import OriginFailed, Stop
from rekindle.remote.fetch import OriginPassages, RemoteChunkFetch, RemotePrefixFetch, WantedPassage, unknown_passages
from rekindle.remote.hybrid_prefill import HybridPrefill, WholeTokenPrefill
from rekindle.remote.index import KvModel
from rekindle.remote.ladder import LevelLadder, LevelLimit
from rekindle.remote.latency import MIN_BANDWIDTH, Bandwidth, LayerCosts, recall_bandwidth, remember_bandwidth
from rekindle.remote.pairing import ModelPairing, recall_pairing
from rekindle.remote.schedule import StreamCosts
from rekindle.remote.signing import read_public
from rekindle.remote.transfer_queue import OriginSlices
from rekindle.safe_read import read_secret_file
from rekindle.settings import Settings

log = logging.getLogger("rekindle.remote")

WORTH_SECONDS = 0.2  # prompts computed sooner than that are not fetched
PATIENCE, MAX_PATIENCE_SECONDS = 0.015, 0.2  # share of the compute time to wait before computing starts
MAX_AHEAD = 2  # queued prompts that are fetched ahead: they take memory
FIND_SECONDS = 10.0  # timeout of a lookup
BACKOFF_SECONDS = 30.0  # pause after a failure
MIN_SHARE = 0.25  # of a prefix that a link must bring while the rest is computed: going in pieces costs up to that
FAST_LINK = 1.25e8  # bytes a second: what nobody measured is tried where this is enough
SLOW_SECONDS = 300.0  # how long a link counts as slow after its last transfer

PromptKey = tuple[KvSpace, tuple[int, ...], bool]  # of a prompt; whether it has passages
RemoteFetch = RemotePrefixFetch | RemoteChunkFetch  # the prefix of a prompt, or its passages


def local_tenants(text: str) -> frozenset[str]:
    """Parse the setting of tenants whose prompts stay local; `*` means all."""
    return frozenset(name.strip() for name in text.split(",") if name.strip())


class RemoteKv:
    """Remote KV for a session. Thread-safe."""

    def __init__(self, chunks: ChunkPrefill, settings: Settings) -> None:
        """`chunks` reuses passages that arrive. Raises `InvalidSetting`."""
        if settings.origin is None:
            raise InvalidSetting("There is no origin. Name one: origin=URL.")
        if settings.origin_keys is None:
            raise InvalidSetting("An origin needs the public key of a publisher you trust: name it in origin_keys.")
        keys = [read_public(part.strip()) for part in settings.origin_keys.split(",") if part.strip()]
        secret = None if settings.origin_secret is None else read_secret(Path(settings.origin_secret))
        self.origin = Origin(settings.origin, keys, token=_read_token(settings.origin_token), secret=secret)
        self._kv, self._chunks = chunks.kv, chunks
        self._engine = engine = chunks.kv.engine
        self._local = local_tenants(settings.local_tenants)
        has = engine.capabilities
        self._can_fetch_prefix = has.spans and not settings.deterministic
        self._by_layer = has.layer_feeds
        if not 0 <= settings.kl_budget < math.inf:
            raise InvalidSetting(
                f"kl_budget={settings.kl_budget} makes no sense. Use a number from 0 on, such as 0.01."
            )
        self._kl_budget = settings.kl_budget
        self._stored_bits = _stored_bits(engine, settings)
        self._bandwidth = Bandwidth(recall_bandwidth(settings.origin))
        self._top_share = _top_share(engine) if self._by_layer else 1.0
        self._layers = LayerCosts(engine)
        self._lock = threading.Lock()
        self._ahead: dict[PromptKey, RemoteFetch] = {}
        self._closed = False
        self._backoff_until = 0.0
        self._token_bytes: dict[bool, float] = {}  # of what came last, by whether quantized KV was allowed

    def run(self, work: Prefill, context: Context, lookup: CacheLookup, plan: Plan) -> PrefillResult | None:
        """Prefill a prompt from the local cache, the origin and computing; None if the origin is not asked.

        Raises `Cancelled`, and what the engine raises.
        """
        fetch = self.start_fetch(lookup, plan)
        if fetch is None:
            self._report(context, self._obstacle(lookup, plan))
            return None
        try:
            if isinstance(fetch, RemoteChunkFetch):
                result = self._prefill_passages(fetch, ChunkedPrefill(self._kv, work, context, lookup, plan))
            else:
                result = self._prefill_prefix(fetch, PrefixPrefill(self._kv, work, context, lookup, plan))
            self._report(context, fetch.miss)
            return result
        finally:
            fetch.close()

    def start_fetch(self, lookup: CacheLookup, plan: Plan) -> RemoteFetch | None:
        """Start a fetch for a prompt if allowed and worth it, or take over one that was prefetched; None if not."""
        with self._lock:
            ahead = self._ahead.pop(_prompt_key(lookup), None)
        if ahead is not None and not self._is_allowed(lookup, plan):  # in the local cache meanwhile
            ahead.close()
            return None
        return ahead or self._start_fetch(lookup, plan)

    def prefetch(self, lookup: CacheLookup, plan: Plan) -> Prefetched | None:
        """Start the fetch of a prompt that waits for its turn; None if not worth it."""
        key = _prompt_key(lookup)
        with self._lock:
            if len(self._ahead) >= MAX_AHEAD or key in self._ahead or self._closed:
                return None
            fetch = self._start_fetch(lookup, plan)  # only starts it
            if fetch is None:
                return None
            self._ahead[key] = fetch
        return Prefetched(self, key, fetch)

    def look(self, lookup: CacheLookup, plan: Plan) -> OriginFinding | None:
        """What the origin has of a prompt, or why nothing would come; None if it would not be asked."""
        if not self._is_wanted(lookup, plan):
            return None
        if (obstacle := self._obstacle(lookup, plan)) is not None:
            return OriginFinding(miss=obstacle)
        try:
            return self.find(lookup, plan)
        except OriginFailed as error:
            log.warning("The origin failed: %s", error)
            return OriginFinding(miss="failed")

    def find(self, lookup: CacheLookup, plan: Plan) -> OriginFinding:
        """What the origin has of a prompt, whether or not it would be asked. Raises `OriginFailed`."""
        if lookup.passages is None or not lookup.has_documents:
            found = self._find(lookup, Stop())
            if isinstance(found, str):
                return OriginFinding(miss=found)
            first = plan.reused // CHUNK_TOKENS
            return OriginFinding(found.cells.tokens, found.ladder.level.name, int(found.sizes[first:].sum()))
        wanted, source = self._wanted_passages(lookup, lookup.passages), self._passages(lookup)
        offers = [(passage, source.find(passage, Stop())) for passage in wanted]
        there = [(passage, offer) for passage, offer in offers if not isinstance(offer, str)]
        if not there:
            return OriginFinding(miss=next((offer for _, offer in offers if isinstance(offer, str)), "prompt"))
        tokens, size = sum(len(one.span) for one, _ in there), sum(offer.left_bytes for _, offer in there)
        return OriginFinding(tokens, there[0][1].level, size)

    @property
    def ahead(self) -> tuple[RemoteFetch, ...]:
        """Fetches of prompts that wait for their turn."""
        with self._lock:
            return tuple(self._ahead.values())

    def drop(self, key: PromptKey, fetch: RemoteFetch) -> None:
        """Close a prefetch unless `start_fetch` has taken it over."""
        with self._lock:
            if self._ahead.get(key) is not fetch:
                return
            del self._ahead[key]
        fetch.close()

    def _start_fetch(self, lookup: CacheLookup, plan: Plan) -> RemoteFetch | None:
        if not self._is_allowed(lookup, plan):
            return None
        try:
            if lookup.passages is not None and lookup.has_documents:
                return self._start_passages(lookup, lookup.passages)
            find, lowest = partial(self._find, lookup), 1 if self._by_layer else 0
            return RemotePrefixFetch(find, plan.reused, self._back_off, self._bandwidth, lowest)
        except RuntimeError as error:  # no thread left
            log.warning("The origin cannot be used: %s.", error)
            return None

    def _wanted_passages(self, lookup: CacheLookup, passages: ChunkMatches) -> list[WantedPassage]:
        here = [chunk.span for chunk in passages.picked if chunk.known is not None]
        wanted = list(unknown_passages(passages.prompt_layout, lookup.tokens, here, lookup.matches.length))
        return wanted if passages.picked and sum(len(passage.span) for passage in wanted) >= CHUNK_TOKENS else []

    def _passages(self, lookup: CacheLookup) -> OriginPassages:
        limit = self.limit_of(lookup)
        return OriginPassages(self.origin, self.model_of(lookup), limit, self._bandwidth, FIND_SECONDS)

    def _start_passages(self, lookup: CacheLookup, passages: ChunkMatches) -> RemoteChunkFetch | None:
        """Start to fetch passages missing here. Raises `RuntimeError` if no thread can be started."""
        if not (wanted := self._wanted_passages(lookup, passages)):
            return None
        assert self._kv.store is not None
        keep = partial(keep_arrived, self._kv.store, lookup)
        return RemoteChunkFetch(wanted, self._passages(lookup), keep, self._back_off, self._bandwidth)

    def _prefill_prefix(self, fetch: RemotePrefixFetch, prefill: PrefixPrefill) -> PrefillResult:
        """Compute chunk by chunk until the origin has answered; then compute and fetch the rest at the same time."""
        if prefill.is_between_chunks:  # else load or compute first
            fetch.wait_for_first(self._wait_seconds(prefill.plan))
        if (whole := self._whole_unless_it_pays(fetch, prefill, prefill.end)) is not None:
            if fetch.failed is not None:
                self._back_off(fetch.failed)
            return whole
        while not prefill.is_ready(fetch):
            prefill.next_piece()
        offer = fetch.offer
        if offer is None or not prefill.is_between_chunks or offer.cells.tokens <= prefill.at:
            return prefill.end()
        return self._stream(prefill, fetch, offer, self._kv.costs.rates) or prefill.end()

    def _prefill_passages(self, fetch: RemoteChunkFetch, prefill: ChunkedPrefill) -> PrefillResult:
        """Compute passage by passage while the others come."""
        context, lookup = prefill.context, prefill.lookup
        fetch.wait(self._wait_seconds(prefill.plan))
        whole = partial(self._chunks.run, context=context, lookup=lookup, plan=prefill.plan)
        return self._whole_unless_it_pays(fetch, prefill, whole) or prefill_with_arrivals(
            self._chunks, prefill.work, context, lookup, fetch
        )

    def _wait_seconds(self, plan: Plan) -> float:
        """How long computing waits for what comes first."""
        return min(
            PATIENCE * self._kv.costs.rates.compute_seconds(Span(plan.reused, plan.tokens)), MAX_PATIENCE_SECONDS
        )

    def _whole_unless_it_pays(
        self, fetch: RemoteFetch, prefill: ChunkedPrefill, run: Callable[[Prefill], PrefillResult]
    ) -> PrefillResult | None:
        """Beside a link that nobody knows to be fast, `run` the prompt as if there were no origin; None, with what was
        there before, where it is known to be, and once slices come so fast that fetching is sooner."""
        lookup, at = prefill.lookup, prefill.at
        known = self._bandwidth.bytes_per_second() or MIN_BANDWIDTH
        # Steps of an accelerator are launched at once, and hardly ever given up.
        if self._engine.device != "cpu" or self._share(lookup, prefill.plan, known) >= MIN_SHARE:
            return None

        def pays() -> bool:
            """Whether the link brings clearly more of what it offers than was computed meanwhile."""
            found, speed = fetch.found(), self._bandwidth.bytes_per_second()
            if found is None or speed is None:
                return False
            computing = self._spared_seconds(lookup, found.spans)
            share = _share(computing, found.size_bytes / speed)
            return (share - MIN_SHARE) * computing > time.monotonic() - prefill.begun

        try:
            result = run(stopping(prefill.work, pays))
        except Cancelled:
            if prefill.work.cancelled():
                raise
            prefill.context.truncate(at)
            return None
        fetch.give_up()
        return result

    @property
    def bytes_per_second(self) -> float | None:
        """Speed of the link to the origin; None if it was never measured."""
        return self._bandwidth.bytes_per_second()

    def close(self) -> None:
        """Close the connections, and remember what layers cost and how fast the link was. Idempotent."""
        with self._lock:
            if not self._closed:
                remember_bandwidth(self.origin.url, self._bandwidth)
            self._closed = True
            waiting = list(self._ahead.items())
        for key, fetch in waiting:
            self.drop(key, fetch)
        self.origin.close()
        try:
            self._layers.close()
        except (OSError, ValueError, ArithmeticError):  # of the file or the fit: not worth failing for
            log.exception("What layers cost could not be learned.")

    def _is_allowed(self, lookup: CacheLookup, plan: Plan) -> bool:
        return self._is_wanted(lookup, plan) and self._obstacle(lookup, plan) is None

    def _is_wanted(self, lookup: CacheLookup, plan: Plan) -> bool:
        """Whether the user wants the origin to be asked, and enough is missing here."""
        local = self._local & {lookup.kv_space.namespace.tenant, "*"}
        if plan.reuse_chunks is not None and not lookup.has_documents:
            return False  # text of other prompts is here
        return not lookup.off and not local and plan.tokens - plan.reused > CHUNK_TOKENS

    def _obstacle(self, lookup: CacheLookup, plan: Plan) -> OriginMiss | None:
        """Why the origin cannot be asked for a prompt although it is wanted."""
        if not self._is_wanted(lookup, plan):
            return None
        if not (self._can_fetch_prefix if not lookup.has_documents else self._engine.capabilities.spans):
            return "unable"
        if self._kv.costs.rates.compute_seconds(Span(plan.reused, plan.tokens)) < WORTH_SECONDS:
            return "quick"
        if time.monotonic() < self._backoff_until:
            return "failed"
        return "slow" if self._is_slow(lookup, plan) else None

    def _is_slow(self, lookup: CacheLookup, plan: Plan) -> bool:
        """Whether the link, as it was lately, would bring next to nothing while the prompt is computed.

        One that was not measured lately is expected to be a fast one.
        """
        speed = self._bandwidth.bytes_per_second()
        if speed is None or time.monotonic() > self._bandwidth.measured_at + SLOW_SECONDS:
            speed = FAST_LINK
        return self._share(lookup, plan, speed) < MIN_SHARE

    def _share(self, lookup: CacheLookup, plan: Plan, bytes_per_second: float) -> float:
        """Share of what may come of a prompt that a link of this speed is expected to bring."""
        quantized = is_quantized(lookup.kv_space.codec)
        token_bytes = self._token_bytes.get(quantized, self._engine.layout.token_bytes / (4 if quantized else 1))
        spans = [Span(plan.reused, plan.tokens)]
        if lookup.passages is not None and lookup.has_documents:
            spans = [passage.span for passage in self._wanted_passages(lookup, lookup.passages)]
        seconds = sum(map(len, spans)) * token_bytes / bytes_per_second
        return _share(self._spared_seconds(lookup, spans), seconds) if spans else 1.0

    def _spared_seconds(self, lookup: CacheLookup, spans: Sequence[Span]) -> float:
        """Seconds of computing that KV of these spans spares; some tokens of passages are computed all the same."""
        spared = 1.0 - min(1.0, self._chunks.recompute_policy.budget) if lookup.has_documents else 1.0
        return spared * sum(map(self._kv.costs.rates.compute_seconds, spans))

    def _report(self, context: Context, miss: OriginMiss | None) -> None:
        """Note why nothing came. Every reply says it; the log, for those who read no replies, at its lower level."""
        context.origin_miss = miss
        if miss is not None:
            log.info("Nothing came from the origin: %s", OriginFinding(miss=miss))

    def _find(self, lookup: CacheLookup, stop: Stop) -> OriginSlices | OriginMiss:
        """What the origin has of a prompt at levels that may be used, or why nothing. Raises as `Origin.find`."""
        tokens = lookup.tokens[: len(lookup.tokens) - 1]  # the last token is computed
        model, limit = self.model_of(lookup), self.limit_of(lookup)
        found = self.origin.find(tokens, model, limit.allows, timeout_seconds=FIND_SECONDS, stop=stop)
        if found is None:
            return self.origin.why_missing(model, FIND_SECONDS, stop)
        if not (levels := limit.levels(found)):
            return limit.why_none(found)
        compute_seconds = self._kv.costs.rates.compute_seconds(Span(0, found.tokens))
        ladder = LevelLadder(levels, found.cells, limit.kl_budget or 0.0, compute_seconds)
        ladder.adapt(list(found.cells), self._bandwidth.bytes_per_second())
        return OriginSlices(self.origin, found, ladder, left_coded=self._engine.capabilities.decodes)

    def limit_of(self, lookup: CacheLookup) -> LevelLimit:
        """The levels that a prompt allows."""
        if not is_quantized(lookup.kv_space.codec):
            return LevelLimit()
        pairing = self.pairing_of(lookup)
        return LevelLimit(self._kl_budget, None if pairing is None else pairing.levels)

    def model_of(self, lookup: CacheLookup) -> KvModel:
        """Whose KV a prompt may use: that of its own model, or quantized that of the model it was paired with."""
        own, pairing = self._own_model(lookup), self.pairing_of(lookup)
        return own if pairing is None else pairing.model(own)

    def pairing_of(self, lookup: CacheLookup) -> ModelPairing | None:
        """The pairing of a prompt's model, if it may be used; it was measured without an adapter."""
        kv_space = lookup.kv_space
        may = is_quantized(kv_space.codec) and kv_space.adapter is None
        return recall_pairing(self._own_model(lookup)) if may else None

    def _own_model(self, lookup: CacheLookup) -> KvModel:
        return KvModel.of(self._engine, len(lookup.tokens), lookup.kv_space.adapter)

    def _stream(
        self, prefill: PrefixPrefill, link: RemotePrefixFetch, offer: OriginSlices, rates: Rates
    ) -> PrefillResult | None:
        """Hybrid prefill of the rest; None if it has to be computed."""
        context, tokens = prefill.context, prefill.lookup.tokens
        self._token_bytes[is_quantized(prefill.lookup.kv_space.codec)] = float(offer.sizes.sum()) / offer.cells.tokens
        try:
            costs = self._costs(offer, len(tokens), rates)
            prefill_by = HybridPrefill if self._by_layer else WholeTokenPrefill
            streaming = prefill_by(
                self._engine, context.sequence, tokens, offer.cells, link, costs, prefill.work.cancelled
            )
            streaming.alone = prefill.work.alone
            streaming.since = prefill.begun
            logits = streaming.run()
        except (KvLost, StepRefused, ValueError) as error:  # ValueError: costs without a schedule
            log.warning("computing instead: %s", error)
            context.truncate(prefill.at)
            if isinstance(error, KvLost):
                link.lose(str(error))
                self._back_off(str(error))
            return None
        finally:
            link.close()
        if link.failed is not None:
            self._back_off(link.failed)
        if self._by_layer:
            self._layers.learn(streaming.samples)
        return prefill.streamed(streaming, offer, logits, self._stored_bits)

    def _costs(self, offer: OriginSlices, tokens: int, rates: Rates) -> StreamCosts:
        """The estimated costs of every cell."""
        cells = offer.cells
        compute = self._layers.seconds(cells)
        if compute is None:
            rows = [rates.compute_seconds(span) / cells.layers for span in cells.spans]
            compute = np.repeat(np.array(rows)[:, None], cells.layers, axis=1)
        question = rates.compute_seconds(Span(cells.tokens, tokens)) / cells.layers
        return StreamCosts(
            compute,
            compute * self._top_share,
            offer.sizes.astype(np.float64),
            np.full(cells.layers, question),
            bandwidth=1.0,
        )

    def _back_off(self, reason: str) -> None:
        log.warning("The origin is not asked again for %.0f s: %s", BACKOFF_SECONDS, reason)
        self._backoff_until = time.monotonic() + BACKOFF_SECONDS


@dataclass(frozen=True)
class Prefetched:
    """The fetch of a prompt that waits for its turn. `close` it when the prompt starts or is dropped."""

    _remote: RemoteKv
    _key: PromptKey
    _fetch: RemoteFetch

    def close(self) -> None:
        """Idempotent."""
        self._remote.drop(self._key, self._fetch)


def _prompt_key(lookup: CacheLookup) -> PromptKey:
    """The same prompt is fetched differently when its passages may be reused."""
    return lookup.kv_space, tuple(lookup.tokens), lookup.has_documents


def _share(computing_seconds: float, streaming_seconds: float) -> float:
    """Share that is streamed if both go on at once until they meet."""
    return computing_seconds / (computing_seconds + streaming_seconds)


def _top_share(engine: Engine) -> float:
    """Share of a layer's weights that make its keys and values: the cost of the top layer of a step."""
    layers = len(engine.layout.layers)
    made = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in engine.layout.layers) / layers
    return min(1.0, made * engine.attention / max(1, engine.parameters))  # an input is about as wide as the queries


def _stored_bits(engine: Engine, settings: Settings) -> float:
    """Bits a number of the quantized KV that a session stores; infinite if it stores it as it is."""
    coder = quantized_coder(engine, settings)
    return math.inf if coder is None or coder.whole is None else coder.whole.mean_bits


def _read_token(path: str | None) -> str | None:
    if path is None:
        return None
    text = read_secret_file(Path(path), "The token file").decode("utf-8", "replace").strip()
    if not text:
        raise InvalidSetting(f"The token file {path} is empty.")
    return text.splitlines()[0].strip()
