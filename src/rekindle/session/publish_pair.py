"""Pairs a client's model with a published one of another file form, if what was published serves it: measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import get_args

from rekindle.core.cells import CHUNK_TOKENS
from rekindle.core.kv import LayerKv, Span
from rekindle.core.plan import RAW
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.remote.client import Origin, PublishedPrefix
from rekindle.remote.fetch import SpanTransfer
from rekindle.remote.index import KeyOrder, KvModel
from rekindle.remote.latency import Bandwidth
from rekindle.remote.manifest import Manifest
from rekindle.remote.pairing import MAX_KL, ModelPairing, remember_pairing
from rekindle.remote.slices import reorder_keys
from rekindle.session.calibrate.kv_trial import Trial
from rekindle.session.calibrate.nearness import Nearness

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
