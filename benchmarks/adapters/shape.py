"""`python -m benchmarks adapters --shape NAME`: whether coded KV is on the device sooner than the device computes it.

Time alone, with random weights and random tokens. Loading counts everything: from coded bytes in the memory of the
host, and the anchor beside them, to KV in the buffers of a sequence. The anchor is what the model computes; the KV of
an adapter is the anchor and normal noise, about as far from it as the KV of real adapters.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.base import Advance, BenchOptions, Report, TableRow, Units, interleave, paired_ratio
from benchmarks.models import settle
from benchmarks.shapes import build
from rekindle.codec.coder import Coder, decode
from rekindle.codec.quantizer import BitPlan, narrow, widen
from rekindle.core.kv import CodedPiece, Kv, KvLayout, KvType, LayerKv, Span
from rekindle.engine.base import HeldKv, KvFeed, Row
from rekindle.engine.hf.device_decoder import CodedPart, DecodedPart, LayerTensors, SlotMemory, unpack
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.hf.layer_loader import LayerLoader, PinnedSlots
from rekindle.engine.hf.sequence import TorchSequence
from rekindle.errors import InvalidSetting, KvLost
from rekindle.machine import usable_cores

TOKENS, QUICK_TOKENS = 1024, 256
DELTA_BITS, WHOLE_BITS = 2.75, 6.0  # before entropy coding; what they came to is measured
KEY_COSINE, VALUE_COSINE = 0.98, 0.9  # between the KV of two adapters
_THREADS = min(usable_cores(), 16)
_BARS = {"llama-3.2-3b": ">= 2.0", "llama-2-7b": ">= 1.0", "qwen2.5-7b": ">= 1.0"}


@dataclass(frozen=True, eq=False)
class CodedLayers:
    """KV in the memory of the host, coded; `anchor` is what it is a difference from."""

    layers: list[bytes]
    anchor: Sequence[LayerKv] | None
    bits: float  # that a number takes

    @classmethod
    def of(cls, coder: Coder, kv: Sequence[LayerKv], anchor: Sequence[LayerKv] | None, dtype: KvType) -> CodedLayers:
        """Coded layer by layer, by several threads."""

        def encode(layer: int) -> bytes:
            return coder.encode(layer, kv[layer], None if anchor is None else anchor[layer], dtype)

        with ThreadPoolExecutor(_THREADS) as pool:
            layers = list(pool.map(encode, range(len(kv))))
        numbers = sum(half.size for each in kv for half in (each.keys, each.values))
        return cls(layers, anchor, 8 * sum(map(len, layers)) / numbers)


@dataclass(frozen=True, eq=False)
class CodedLayersFeed:
    """A feed of coded layers."""

    kv: CodedLayers
    layout: KvLayout
    span: Span
    coded: bool = True

    @property
    def layers(self) -> range:
        return range(len(self.kv.layers))

    def fill(self, layer: int, out: LayerKv) -> None:
        """Decode a layer on the host."""
        found = decode(self.kv.layers[layer], self.layout.layer_spec(layer, len(self.span)), self._anchor(layer))
        out.keys[...], out.values[...] = found.keys, found.values

    def fill_coded(self, layer: int, take: Callable[[CodedPiece], None]) -> None:
        """Give the anchor, then the difference."""
        for piece in self.pieces(layer):
            take(piece)

    def pieces(self, layer: int) -> list[CodedPiece]:
        anchor, spec, whole = (
            self._anchor(layer),
            self.layout.layer_spec(layer, len(self.span)),
            Span(0, len(self.span)),
        )
        own = CodedPiece((self.kv.layers[layer],), spec, whole, 0, delta=anchor is not None, owner="own")
        return [own] if anchor is None else [CodedPiece(anchor, spec, whole, 0, delta=False, owner="anchor"), own]

    def damaged(self, piece: CodedPiece, reason: str) -> KvLost:
        return KvLost(f"{piece.owner}: {reason}")

    def _anchor(self, layer: int) -> LayerKv | None:
        return None if self.kv.anchor is None else self.kv.anchor[layer]


def run_shape(options: BenchOptions, advance: Advance) -> Report:
    """Computing against loading, on a model of a shape: what the bench tells of it."""
    if options.shape is None or options.engine == "llamacpp":
        raise InvalidSetting("Differences are timed on a --shape, with --engine hf.")
    advance("build the model")
    engine = build(options.shape, options.device, options.dtype, options.seed)
    tokens = min(QUICK_TOKENS if options.quick else TOKENS, engine.context_tokens)
    about = {"model": engine.name, "device": engine.device, "dtype": engine.layout.dtype}
    units = Units("adapters", options, about, advance)
    try:
        bench = _ShapeBench(engine, tokens, options.seed, units.advance)
        measured = units.one("differences", dict[str, Any], lambda: bench.measure(options.rounds(9)))
    finally:
        engine.close()
    report = units.report()
    found = {"shape": options.shape, "tokens": tokens, "seed": options.seed, **(measured or {})}
    reason = "random weights say nothing about answers"
    report.fields |= {"rows": [], "rows_reason": reason, **found}
    _add_rows(report, found)
    return report


class _ShapeBench:
    """The same tokens, computed and loaded, on one engine."""

    def __init__(self, engine: HfEngine, tokens: int, seed: int, advance: Advance) -> None:
        self._engine, self._advance = engine, advance
        self._device, self._count = engine.placement.device, tokens
        self._slots = PinnedSlots() if self._device.type == "cuda" else None
        self._random = np.random.default_rng(seed)
        vocabulary = engine.tokenizer.vocabulary_size
        self._tokens = [int(token) for token in self._random.integers(0, vocabulary, tokens)]

    def measure(self, rounds: int) -> dict[str, Any]:
        """All times, in turns, and what the loads are made of."""
        self._advance("compute and code the KV")
        anchor, layers = self._exported(), len(self._engine.layout.layers)
        kv, dtype = self._adapted(anchor), self._engine.layout.dtype
        delta = CodedLayers.of(Coder(delta=BitPlan.uniform(layers, DELTA_BITS)), kv, anchor.layers, dtype)
        whole = CodedLayers.of(Coder(whole=BitPlan.uniform(layers, WHOLE_BITS)), kv, None, dtype)
        self._check(delta)
        self._check(whole)
        self._advance("time them")
        jobs: dict[str, Callable[[], object]] = {
            "compute": self._compute,
            "delta": functools.partial(self._load, delta),
            "whole": functools.partial(self._load, whole),
            "raw": functools.partial(self._load_raw, anchor),
        }
        for job in (*jobs.values(), *jobs.values()):  # the first ones set things up
            job()
        times = interleave(jobs, rounds, functools.partial(settle, self._engine))
        return {
            **{f"{name}_s": timing.median for name, timing in times.items()},
            **{f"{name}_speedup": paired_ratio(times["compute"], times[name]) for name in jobs if name != "compute"},
            "times": {name: timing.as_json() for name, timing in times.items()},
            "parts": self._parts(delta, rounds),
            "whole_parts": self._parts(whole, rounds),
            "threads": _THREADS,
            "delta_bits": delta.bits,
            "whole_bits": whole.bits,
            "kv_bytes": self._engine.layout.token_bytes * self._count,
            "difference": f"normal noise: cosine {KEY_COSINE} of keys, {VALUE_COSINE} of values",
        }

    def _compute(self) -> None:
        with self._open() as sequence:
            self._engine.step([Row.following(sequence, self._tokens, logits="none")])

    def _load(self, coded: CodedLayers) -> None:
        with self._open() as sequence:
            self._fill(sequence, self._feed(coded))

    def _load_raw(self, kv: Kv) -> None:
        with self._open() as sequence:
            self._fill(sequence, HeldKv(kv))

    def _feed(self, coded: CodedLayers) -> CodedLayersFeed:
        return CodedLayersFeed(coded, self._engine.layout, Span(0, self._count))

    def _fill(self, sequence: TorchSequence, feed: KvFeed) -> None:
        """As a step of the engine does, which then computes nothing."""
        layers = len(feed.layers)
        with LayerLoader([(sequence, feed)], layers, self._device, slots=self._slots) as loader:
            loader.wait_until(layers, None)
        sequence.extend(self._count)

    def _parts(self, coded: CodedLayers, rounds: int) -> dict[str, float]:
        """How long each part takes alone, one after the other: together they overlap."""
        parts = (self._take_apart(coded) for _ in range(rounds))
        return {name: statistics.median(each) for name, each in zip(_PARTS, zip(*parts, strict=True), strict=True)}

    def _take_apart(self, coded: CodedLayers) -> tuple[float, ...]:
        with self._open() as sequence, torch.inference_mode():
            feed, places = self._feed(coded), self._places(sequence)
            jobs = [(piece, places[layer]) for layer in feed.layers for piece in feed.pieces(layer)]
            times = [self._now()]
            with ThreadPoolExecutor(_THREADS) as pool:
                found = list(pool.map(lambda job: unpack(job[0], job[1], SlotMemory(None)), jobs))
            times.append(self._now())
            brought = [self._bring(part) for parts in found for part in parts]
            times.append(self._now())
            for part in brought:
                part.restore()
            times.append(self._now())
        return tuple(np.diff(times).tolist())

    def _bring(self, part: DecodedPart | CodedPart) -> DecodedPart | CodedPart:
        """The same on the device."""
        if isinstance(part, CodedPart):
            return replace(part, raw=part.raw.to(self._device))
        return replace(part, kv=LayerTensors(*(half.to(self._device) for half in part.kv.halves)))

    def _check(self, coded: CodedLayers) -> None:
        """What is measured is right, too: bit by bit, in the first layer and the last."""
        with self._open() as sequence:
            self._fill(sequence, self._feed(coded))
            found = sequence.export(Span(0, self._count))
        for layer in (0, -1):
            anchor = None if coded.anchor is None else coded.anchor[layer]
            expected = decode(coded.layers[layer], found.layers[layer].spec(found.layout.dtype), anchor)
            for ours, theirs in zip(_halves(found.layers[layer]), _halves(expected), strict=True):
                assert ours.tobytes() == theirs.tobytes(), "unpacked KV is not what the codec decodes"

    def _exported(self) -> Kv:
        with self._open() as sequence:
            self._engine.step([Row.following(sequence, self._tokens, logits="none")])
            return sequence.export(Span(0, self._count))  # from a GPU: to memory that it reads by itself

    def _adapted(self, anchor: Kv) -> list[LayerKv]:
        """The KV under an adapter that nobody trained."""
        dtype = anchor.layout.dtype
        return [
            LayerKv(*(self._near(half, dtype, cosine) for half, cosine in zip(_halves(kv), _COSINES, strict=True)))
            for kv in anchor.layers
        ]

    def _near(self, half: NDArray[Any], dtype: KvType, cosine: float) -> NDArray[Any]:
        """Numbers with that cosine to these, token by token."""
        numbers = widen(half, dtype)  # [kv_heads, tokens, dim]
        size = np.sqrt(np.mean(numbers**2, axis=-1, keepdims=True)) * np.float32((cosine**-2 - 1) ** 0.5)
        return narrow(numbers + size * self._random.standard_normal(numbers.shape, np.float32), dtype)

    def _open(self) -> TorchSequence:
        return self._engine.open(self._count, self._engine.regime(self._count))

    def _places(self, sequence: TorchSequence) -> list[LayerTensors]:
        layers = range(len(self._engine.layout.layers))
        halves = ((sequence.keys(layer)[0], sequence.values(layer)[0]) for layer in layers)
        return [LayerTensors(keys[:, : self._count], values[:, : self._count]) for keys, values in halves]

    def _now(self) -> float:
        settle(self._engine)
        return time.perf_counter()


_PARTS = ("decompress_s", "copy_s", "unpack_s")
_COSINES = (KEY_COSINE, VALUE_COSINE)


def _halves(kv: LayerKv) -> tuple[NDArray[Any], NDArray[Any]]:
    return kv.keys, kv.values


def _add_rows(report: Report, found: dict[str, Any]) -> None:
    computed = f"{found['compute_s'] * 1e3:,.1f} ms"
    labels = {
        "delta": f"differences, {found['delta_bits']:.2f} bits",
        "whole": f"whole KV, {found['whole_bits']:.2f} bits",
        "raw": "raw KV",
    }
    for name, label in labels.items():
        bar = _BARS.get(found["shape"], "") if name == "delta" else ""
        ours, ratio = f"{found[f'{name}_s'] * 1e3:,.1f} ms", f"{found[f'{name}_speedup']:.2f}"
        report.rows.append(TableRow(label, ours, computed, ratio, bar))
