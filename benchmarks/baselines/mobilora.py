"""The difference from an anchor as MobiLoRA publishes it: a fixed error bound for each class of similarity.

`code = floor((number - anchor) / step + 0.5)` with `step = 2 * ln(1 + bound)`. The bound follows how similar a token is
to its anchor in this layer, keys and values apart: 1e-4 above 97.5 %, 1e-2 below 85 %, 1e-3 between. Integer KV is
differenced without loss. The bounds are absolute, so the codes stay long.

`PublishedCoder` codes like that; importing this module enables decoding it. `opened` is a session as published.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines import policies
from rekindle.codec import coder
from rekindle.codec.coder import SAME_LAYER, Coder, check_alike, encode_exact, same_bits
from rekindle.codec.packing import Planes, PlanesSpec, fold, read_planes, unfold, write_planes
from rekindle.codec.quantized import Kind, OpenLayer, open_layer
from rekindle.codec.quantizer import MAX_BITS, BitPlan, narrow, widen
from rekindle.core.kv import KvType, LayerKv, LayerSpec, Span
from rekindle.engine.base import Engine
from rekindle.session.session import Session

BOUNDS = (1e-4, 1e-3, 1e-2)
HIGH_SIMILARITY, MODERATE_SIMILARITY = 0.975, 0.85
MAGIC = b"RKm1"
_STEPS = 2 * np.log1p(np.array(BOUNDS))


def encode(kv: LayerKv, anchor: LayerKv, dtype: KvType) -> bytes:
    """The difference from the anchor. Raises `ValueError` for other shapes or types, and for numbers that are not
    finite or so far from the anchor that their code has more than 31 bits."""
    if dtype == "uint8":
        return encode_exact(kv, anchor, dtype)
    check_alike(kv, anchor, dtype)
    halves, classes = [], []
    for mine, theirs in ((kv.keys, anchor.keys), (kv.values, anchor.values)):
        wide, base = widen(mine, dtype).astype(np.float64), widen(theirs, dtype).astype(np.float64)
        kind = _classes(wide, base)  # [tokens]
        with np.errstate(invalid="ignore"):  # refused just below
            codes = np.floor((wide - base) / _STEPS[kind][:, None] + 0.5)
        if not (np.abs(codes) < 2**31).all():
            raise ValueError("KV with NaN, infinity or huge numbers has no bounded difference: keep it raw")
        halves.append(fold(codes.astype(np.int32)))
        classes.append(kind)
    return write_planes(MAGIC, Planes(halves[0], halves[1], np.stack(classes).tobytes()))


class PublishedLayer:
    """A difference as published, to be added to its anchor. Raises `ValueError` for damaged bytes."""

    def __init__(self, data: bytes, spec: LayerSpec, span: Span | None = None) -> None:
        tokens, wanted = spec.tokens, Span(0, spec.tokens) if span is None else span
        self._planes = read_planes(data, PlanesSpec(MAGIC, np.dtype(np.uint32), spec.shape, tokens), span)
        classes = np.frombuffer(self._planes.extra, np.uint8)
        if len(classes) != 2 * tokens or classes.max(initial=0) >= len(BOUNDS):
            raise ValueError("the classes of similarity are damaged")
        self._steps = _STEPS[classes.reshape(2, tokens)[:, wanted.start : wanted.stop]][:, :, None]  # [2, tokens, 1]

    def restore(self, half: int, out: NDArray[Any], dtype: KvType, *, delta: bool) -> None:
        """Add keys (0) or values (1) to the anchor in `out`."""
        assert delta, "only differences are published"
        codes = self._planes.values if half else self._planes.keys
        out[...] = narrow((widen(out, dtype) + unfold(codes) * self._steps[half]).astype(np.float32), dtype)


def _classes(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Which bound each token gets, by its cosine similarity over all heads."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        dot, one, other = (_dots(a, b) for a, b in ((mine, theirs), (mine, mine), (theirs, theirs)))
        similarity = np.where(one * other > 0, dot / np.sqrt(one * other), (one == other).astype(np.float64))
    return np.where(similarity > HIGH_SIMILARITY, 0, np.where(similarity < MODERATE_SIMILARITY, 2, 1)).astype(np.uint8)


def _dots(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    dots: NDArray[Any] = np.einsum("htd,htd->t", one, other)
    return dots


class PublishedCoder(Coder):
    """Whole KV as it is, differences as published: the bytes say so themselves, the plan of bits is for the header."""

    def __init__(self, layers: int) -> None:
        super().__init__(None, BitPlan.uniform(layers, MAX_BITS))

    def encode(self, layer: int, kv: LayerKv, anchor: LayerKv | None, dtype: KvType) -> bytes:
        """A layer, coded. Raises `ValueError` for KV that this cannot code."""
        if anchor is None:
            return super().encode(layer, kv, anchor, dtype)
        check_alike(kv, anchor, dtype)
        return SAME_LAYER if same_bits(kv, anchor) else encode(kv, anchor, dtype)


def _open_any(data: bytes, kind: Kind, spec: LayerSpec, span: Span | None = None) -> OpenLayer | PublishedLayer:
    return PublishedLayer(data, spec, span) if data[:4] == MAGIC else open_layer(data, kind, spec, span)


coder.open_layer = _open_any  # type: ignore[attr-defined, assignment]  # of bytes that are no lossless difference


def opened(engine: Engine, **settings: Any) -> Session:
    """A session whose differences are coded, and whose KV is evicted, as published."""
    policies.install()
    with mock.patch("rekindle.session.session.quantized_coder", lambda *_: PublishedCoder(len(engine.layout.layers))):
        return Session(engine, **{**settings, "reuse": "quantized", "policy": "mobilora"})
