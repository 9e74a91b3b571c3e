"""How fast coded KV is restored, against the bare zstd decoder over the same frames: what decoding costs beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
import zstandard

from benchmarks.base import Report, TableRow, interleave, paired_ratio
from rekindle.codec.coder import DELTA_MAGIC, Both, Coder, decode_into, in_turn
from rekindle.codec.packing import PlanesSpec, open_planes
from rekindle.codec.quantized import locate_parts
from rekindle.codec.quantizer import BitPlan
from rekindle.core.kv import Kv, LayerKv, LayerSpec
from rekindle.store.read_pool import ReadHelper

_NEAR = 0.02  # how far a base is from its delta, as a share of the numbers


def measure_decoding(kv: Kv, rounds: int, report: Report) -> None:
    """Decode float32 KV in every way of coding: by two threads, as a load does, and by one."""
    layers = len(kv.layers)
    coders = {
        "q4": (Coder(whole=BitPlan.uniform(layers, 4)), False),
        "q8": (Coder(whole=BitPlan.uniform(layers, 8)), False),
        "q3 delta": (Coder(delta=BitPlan.uniform(layers, 3)), True),
        "lossless delta": (Coder(delta="exact"), True),
    }
    for name, (coder, delta) in coders.items():
        _measure(name, coder, kv, rounds, report, delta=delta)


def _measure(name: str, coder: Coder, kv: Kv, rounds: int, report: Report, *, delta: bool) -> None:
    bases = [_nearby(layer, number) if delta else None for number, layer in enumerate(kv.layers)]
    blobs = [coder.encode(at, *pair, "float32") for at, pair in enumerate(zip(kv.layers, bases, strict=True))]
    spec, decoder = kv.layers[0].spec("float32"), zstandard.ZstdDecompressor()
    out = [LayerKv(layer.keys.copy(), layer.values.copy()) for layer in kv.layers]
    frames = [frame for blob in blobs for frame in _frames(blob, spec, delta)]

    def decode(both: Both) -> None:
        for blob, place in zip(blobs, out, strict=True):
            decode_into(blob, spec, place, delta=delta, both=both)

    with closing(ReadHelper()) as helper:
        jobs: dict[str, Callable[[], object]] = {
            "ours": partial(decode, helper.run),
            "one thread": partial(decode, in_turn),
            "zstd": lambda: [decoder.decompress(frame) for frame in frames],
        }
        times = interleave(jobs, rounds, lambda: None)
    field, size_bytes = (
        f"decode_{name.replace(' ', '_')}",
        sum(layer.keys.nbytes + layer.values.nbytes for layer in out),
    )
    report.fields[f"{field}_gb_s"] = size_bytes / times["ours"].median / 1e9
    for way, title in (("ours", ""), ("one thread", ", one thread")):
        ratio = 1 / paired_ratio(times[way], times["zstd"])
        report.fields[f"{field}{title.replace(', ', '_').replace(' ', '_')}_vs_zstd"] = ratio
        row = f"decode {name}{title}", str(times[way]), f"{times['zstd']} zstd", f"{ratio:.3f}"
        report.rows.append(TableRow(*row, "" if title else ">= 0.7"))


def _nearby(layer: LayerKv, seed: int) -> LayerKv:
    random = np.random.default_rng(seed)
    keys, values = (
        half + np.float32(_NEAR) * random.standard_normal(half.shape, dtype=np.float32)
        for half in (layer.keys, layer.values)
    )
    return LayerKv(keys, values)


def _frames(blob: bytes, spec: LayerSpec, delta: bool) -> list[bytes]:
    """All zstd frames of a coded layer."""
    if blob[:4] == DELTA_MAGIC:
        planes = open_planes(blob, PlanesSpec(DELTA_MAGIC, np.dtype(np.uint32), spec.shape, spec.tokens))
        edges = [edge for group in planes.frames for half in group for edge in half]
        return [blob[start:stop] for start, stop in edges if stop > start]
    places = locate_parts(blob, "difference" if delta else "whole", spec)
    frames = [blob[frame.start : frame.stop] for group in places.groups for frame in group.halves]
    return [blob[places.side_start : places.side_stop], *frames]
