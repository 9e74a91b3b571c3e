"""What a session publishes: prompts whose KV is in the engine, for an origin to hold.

`pair` pairs a client's model with a published one of another file form, if what was published serves it: measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import get_args

import numpy as np

from rekindle.answers.ask_terms import asking
from rekindle.cache.coders import quantized_coder
from rekindle.cache.context import Context
from rekindle.chunks.scores import ChunkScorer, unscored
from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.chunk import PromptLayout, Variant, chunk_digest
from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.core.plan import RAW
from rekindle.core.request import Request
from rekindle.engine.base import Engine, HeldKv, Row
from rekindle.errors import InvalidSetting
from rekindle.remote.client import Origin, PublishedPrefix
from rekindle.remote.fetch import SpanTransfer
from rekindle.remote.index import KeyOrder, KvModel
from rekindle.remote.latency import Bandwidth
from rekindle.remote.manifest import Manifest
from rekindle.remote.pairing import MAX_KL, ModelPairing, remember_pairing
from rekindle.remote.publish.publisher import PublishSource
from rekindle.remote.slices import Level, decode, encode, level_named, reorder_keys
from rekindle.session.calibrate.kv_trial import Trial
from rekindle.session.calibrate.nearness import Nearness
from rekindle.session.library import quote_of
from rekindle.session.prompt import encode_prompt
from rekindle.session.session import Session

_MEASURED_TOKENS = 4 * CHUNK_TOKENS  # of a context, for the KL of its levels


@contextmanager
def computed(session: Session, request: Request) -> Iterator[PublishSource]:
    """A prompt whose KV is in the engine, computed or loaded, exactly: never quantized, never from other prompts.

    One that quotes passages ends with the last of them: every question about them continues from there, and its first
    passage is found anywhere in a prompt.

    Raises as `Session.generate` does, and `InvalidSetting` for an engine whose KV cannot be taken apart.
    """
    if (why := session.engine.capabilities.opaque) is not None:
        raise InvalidSetting(f"KV of this model cannot be published: {why}.")
    session.stay(None)  # until all of it was taken out
    with session.adapters.use(request.adapter) as adapter:
        exact = replace(request, adapter=adapter, reuse="off" if request.reuse == "off" else "exact", max_tokens=0)
        prompt = encode_prompt(session.engine, exact)
        tokens = prompt.tokens if prompt.prompt_layout is None else prompt.tokens[: prompt.prompt_layout.question]
        with session.cache.prepare(exact, tokens, lambda: False) as prefill:
            prefill.run(len(tokens), lambda: False)
            context, kv_space = prefill.context, prefill.lookup.kv_space
            assert context.quantized_tokens == 0 and context.exact_tokens >= len(tokens), "not what computing gives"
            model = KvModel.of(session.engine, len(tokens), kv_space.adapter)
            passage = None
            if prompt.prompt_layout is not None:
                passage = partial(_score, session.engine, context, tokens, prompt.prompt_layout)
            tenant, name = kv_space.namespace.tenant, session.engine.name
            measure = partial(level_kl, session.engine, tokens, context.sequence.export, kv_space.adapter)
            yield PublishSource(model, tokens, context.sequence.export, tenant, name, passage, measure)


def level_kl(
    engine: Engine,
    tokens: Sequence[int],
    export: Callable[[Span], Kv],
    adapter: str | None,
    levels: Sequence[Level],
) -> dict[str, float]:
    """The mean KL of what follows the beginning of a context in each level to what follows it in exact KV."""
    known = min(_MEASURED_TOKENS, len(tokens)) * 3 // 4
    kv, forced = export(Span(0, known)), tokens[known:_MEASURED_TOKENS]
    with Trial(engine, tokens[:known], forced, adapter, kv) as trial:
        return {level.name: trial.near(_read_back(level, kv)).mean_kl for level in levels}


def _read_back(level: Level, kv: Kv) -> list[LayerKv]:
    """KV as clients decode it."""
    coded = (encode(level, kv.layout, number, layer) for number, layer in enumerate(kv.layers))
    return [decode(data, kv.layout, number, len(kv.span)) for number, data in enumerate(coded)]


def _score(engine: Engine, context: Context, tokens: Sequence[int], prompt_layout: PromptLayout) -> Variant:
    """The first passage of a prompt with its attention: computed once more, after the KV of what is before it."""
    span, head = prompt_layout.chunks[0], prompt_layout.head
    alone = PromptLayout(head, (span,))
    digests = chunk_digest(tokens[:head]), chunk_digest(tokens[span.start : span.stop])
    if not engine.capabilities.probes:
        return unscored(alone, 1, digests, 0.0)
    scorer = ChunkScorer(alone, span.stop, len(engine.layout.layers))
    with closing(engine.open(span.stop, engine.regime(len(tokens)), context.kv_space.adapter)) as own:
        feeds = (HeldKv(context.sequence.export(Span(0, span.start))),)
        positions = np.arange(span.start, span.stop, dtype=np.int64)
        row = Row(own, tokens[span.start : span.stop], positions, "none", feeds, probe=scorer.probe, replay=False)
        engine.step([row])
    return scorer.variant(1, digests) or unscored(alone, 1, digests, 0.0)


def levels_of(text: str, session: Session) -> list[Level]:
    """The levels that a list of names means. Raises `InvalidSetting`."""
    engine, found = session.engine, []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        coder = quantized_coder(engine, session.settings) if name == "quantized" else None
        if name != "quantized":
            found.append(level_named(name, engine.layout))
        elif coder is not None and coder.whole is not None:
            found.append(Level("quantized", coder.whole))
        else:  # its KV is not quantized: by the engine already, or because somebody said so
            found.append(level_named(RAW, engine.layout))
    return list({level.name: level for level in found}.values())


def beginnings(session: Session, passages: int) -> list[Request]:
    """What questions about documents begin with: the system prompt, and passages, each alone behind it; those
    retrieved most often come first, then those never retrieved."""
    chunks = session.knowledge.library(None, None).top_retrieved(passages, others=True)
    quotes = [[], *([quote_of(chunk)] for chunk in chunks)]
    return [Request.of(asking(""), documents=some, max_tokens=0) for some in quotes]


_CONTEXTS, _TOKENS = 3, 4 * CHUNK_TOKENS  # measured: contexts, and tokens of each


@dataclass(frozen=True)
class _Sample:
    """The beginning of a published context: its tokens, and at each level its KV without that of the last quarter."""

    tokens: tuple[int, ...]
    levels: Mapping[str, tuple[LayerKv, ...]]  # the best first
    head_dims: tuple[int, ...]


def pair(engine: Engine, origin: Origin, title: str | None = None) -> ModelPairing:
    """Measure and keep the pairing of a model with the published one of that title, or the only one of its shape.

    Raises `InvalidSetting` if there is none, if there are several, and if it is not near enough; `OriginFailed`.
    """
    own = KvModel.of(engine, 1)
    published = choose_published(own, origin.models(), title)
    tokens = min(_TOKENS, engine.context_tokens)
    samples = list(islice(_samples(origin, replace(own, weights=published.model.weights), tokens), _CONTEXTS))
    if not samples:
        raise InvalidSetting(f"{published.title} is published in no quantized level. Use --levels raw,quantized there.")
    order, near = _measure(engine, samples)
    best = min(near.values(), key=_mean_kl)
    pairing = ModelPairing(
        weights=published.model.weights,
        title=published.title,
        key_order=order,
        levels={name: _mean_kl(some) for name, some in near.items()},
        kl=_mean_kl(best),
        top1=statistics.fmean(one.top1 for one in best),
        positions=sum(one.positions for one in best),
        contexts=len(best),
        at=time.time(),
    )
    if not pairing.is_near:
        raise InvalidSetting(
            f"KV of {published.title} does not serve this model: the KL of what it says then is {pairing.kl:.3f}, and "
            f"at most {MAX_KL} is near enough. They are other weights, or quantized too far."
        )
    remember_pairing(own, pairing)
    return pairing


def _samples(origin: Origin, model: KvModel, max_tokens: int) -> Iterator[_Sample]:
    """Published contexts of a model, the newest first, decoded in the client's type."""
    for entry in filter(origin.trusts, origin.contexts(model)):
        manifest = origin.manifest(entry, model)
        if manifest is None:
            continue
        found = PublishedPrefix(manifest, manifest.cells.chunks, model)
        if levels := [name for name in found.levels if name != RAW]:
            tokens = origin.tokens(found)[:max_tokens]
            span = Span(0, len(tokens) * 3 // 4)
            kv = {name: SpanTransfer(origin, found, name, span, Bandwidth()).fetch().layers for name in levels}
            yield _Sample(tokens, kv, tuple(map(found.head_dim, range(len(kv[levels[0]])))))


def _measure(engine: Engine, samples: Sequence[_Sample]) -> tuple[KeyOrder, dict[str, list[Nearness]]]:
    """The order of keys, and how near what the model says after published KV comes to what it says after its own: of
    every level, for each sample that has it."""
    with ExitStack() as opened:
        trials = []
        for sample in samples:
            known = len(sample.tokens) * 3 // 4
            trial = opened.enter_context(Trial(engine, sample.tokens[:known], sample.tokens[known:]))
            trials.append((trial, sample))

        def near(trial: Trial, sample: _Sample, level: str, order: KeyOrder) -> Nearness:
            layers = zip(sample.levels[level], sample.head_dims, strict=True)
            return trial.near([reorder_keys(layer, order, dim) for layer, dim in layers])

        first = next(iter(samples[0].levels))
        orders: tuple[KeyOrder, ...] = get_args(KeyOrder)
        order = min(orders, key=lambda one: near(*trials[0], first, one).mean_kl)
        names = dict.fromkeys(name for sample in samples for name in sample.levels)
        return order, {
            name: [near(trial, sample, name, order) for trial, sample in trials if name in sample.levels]
            for name in names
        }


def _mean_kl(found: Sequence[Nearness]) -> float:
    return statistics.fmean(near.mean_kl for near in found)


def choose_published(own: KvModel, manifests: Sequence[Manifest], title: str | None) -> Manifest:
    """The published model that is meant. Raises `InvalidSetting`."""
    alike = [one for one in manifests if one.model.widths == own.widths and one.model.adapter is None]
    alike = [one for one in alike if one.model.weights != own.weights]
    named = [one for one in alike if title in (None, one.title)]
    titles = ", ".join(sorted({one.title for one in alike}))
    if "uint8" in (own.layout.dtype, *(one.model.layout.dtype for one in named)):
        raise InvalidSetting("KV that an engine quantizes itself cannot be exchanged: use kv_type='f16'.")
    if not named:
        there = f"models of its shape there: {titles}" if titles else "no other model there has its shape"
        raise InvalidSetting(f"The origin has nothing to pair this model with: {there}.")
    if len({one.model.weights for one in named}) > 1:
        raise InvalidSetting(f"Several models of this shape are published ({titles}): name one with --published.")
    return named[0]
