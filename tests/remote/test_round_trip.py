"""What is published comes back: from real engines, at every level, plain and encrypted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.codec import quantized
from rekindle.codec.cipher import Secret
from rekindle.codec.quantizer import LayerBits
from rekindle.core.cells import Cell
from rekindle.core.kv import Kv, KvLayout, LayerKv, LayerShape, Span
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting
from rekindle.remote.client import Origin
from rekindle.remote.index import KvModel
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey
from rekindle.session.publish import computed
from tests.remote.places import LAYOUT, TOKENS, cells_of, fetch_all, find, publish, random_kv, same_bits, synthetic
from tests.tiny import tiny_engine

PROMPT = "The keeper lights the lamp at dusk and writes the hour into the book. " * 5


@pytest.mark.parametrize("secret", [None, Secret.new()], ids=["plain", "encrypted"])
@pytest.mark.parametrize("kind", ["fake", "llama", "gemma3_text"])
def test_kv_of_an_engine_comes_back(kind: str, secret: Secret | None, tmp_path: Path, one_thread: None) -> None:
    engine: Any = FakeEngine() if kind == "fake" else tiny_engine(kind)
    key = SigningKey.new()
    with Session(engine, cache=str(tmp_path / "cache")) as session, computed(session, Request.of(PROMPT)) as source:
        assert len(source.tokens) > 300
        whole = source.export(_all(source.tokens)).layers
        done = publish(tmp_path / "origin", key, "raw,q8,q5,q3", source, secret)
        assert [level.name for level in done.levels] == ["raw", "q8", "q5", "q3"]
        sizes = [level.size_bytes for level in done.levels]
        assert sizes == sorted(sizes, reverse=True)
        with OriginServer(tmp_path / "origin", OriginSettings(port=0)).running() as url:
            origin = Origin(url, [key.public], secret=secret)
            found = find(origin, (*source.tokens, 1, 2, 3), source.model)
            assert found is not None and found.tokens == len(source.tokens)
            assert origin.tokens(found) == source.tokens
            for level in found.levels:
                got = fetch_all(origin, found, level)
                assert set(got) == set(cells_of(found))
                for cell, kv in got.items():
                    span = found.span(cell.chunk)
                    if level == "raw":
                        assert same_bits(kv, whole[cell.layer], span)
                        continue
                    at, bits = slice(span.start, span.stop), quantized.PRESETS[level]
                    part = LayerKv(whole[cell.layer].keys[:, at], whole[cell.layer].values[:, at])
                    again = quantized.encode(part, source.model.layout.dtype, LayerBits(bits, bits))
                    assert same_bits(
                        kv, quantized.decode(again, part.spec(source.model.layout.dtype)), _all(range(len(span)))
                    )
            origin.close()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
def test_every_bit_of_every_type_comes_back_at_the_level_raw(dtype: Any, tmp_path: Path) -> None:
    layout = KvLayout(dtype, (LayerShape(2, 8, 8), LayerShape(1, 5, 3)))
    key, model = SigningKey.new(), KvModel("ee" * 16, "bb" * 16, layout)
    publish(tmp_path, key, "raw", synthetic(model, TOKENS[:200]))
    expected = random_kv(layout, 200)
    with OriginServer(tmp_path, OriginSettings(port=0)).running() as url:
        origin = Origin(url, [key.public])
        found = find(origin, TOKENS, model)
        assert found is not None and found.tokens == 200
        for cell, kv in fetch_all(origin, found).items():
            assert same_bits(kv, expected[cell.layer], found.span(cell.chunk))
        origin.close()


def test_nan_infinity_and_minus_zero_survive_the_level_raw_and_are_refused_by_others(tmp_path: Path) -> None:
    plain = synthetic()

    def export(span: Span) -> Kv:
        kv = plain.export(span)
        kv.layers[0].keys[0, 0, :3] = (np.nan, -np.inf, -0.0)
        return kv

    odd, key = replace(plain, export=export), SigningKey.new()
    with pytest.raises(InvalidSetting, match="level q5 cannot hold this KV"):
        publish(tmp_path / "lossy", key, "raw,q5", odd)
    assert not list((tmp_path / "lossy" / "contexts").iterdir())
    assert not list((tmp_path / "lossy" / ".parts").iterdir())
    publish(tmp_path / "exact", key, "raw", odd)
    with OriginServer(tmp_path / "exact", OriginSettings(port=0)).running() as url:
        origin = Origin(url, [key.public])
        found = find(origin)
        assert found is not None
        got = fetch_all(origin, found, cells=[Cell(0, 0)])[Cell(0, 0)].keys[0, 0, :3]
        assert np.isnan(got[0]) and got[1] == -np.inf and np.signbit(got[2]) and got[2] == 0
        origin.close()


@pytest.mark.parametrize("secret", [None, Secret.new()], ids=["plain", "encrypted"])
@pytest.mark.parametrize(("shared", "chunks"), [(2 * 128, 2), (2 * 128 + 100, 2), (127, 0), (0, 0), (5 * 128 + 59, 5)])
def test_a_prompt_that_shares_only_the_first_chunks_uses_these(
    shared: int, chunks: int, secret: Secret | None, tmp_path: Path
) -> None:
    key = SigningKey.new()
    publish(tmp_path, key, "q5", secret=secret)
    other = tuple(token + 1 for token in TOKENS[shared:])
    with OriginServer(tmp_path, OriginSettings(port=0)).running() as url:
        origin = Origin(url, [key.public], secret=secret)
        found = find(origin, (*TOKENS[:shared], *other))
        assert (0 if found is None else found.chunks) == chunks
        if found is not None:
            assert found.tokens == chunks * 128 and len(fetch_all(origin, found, "q5")) == chunks * len(LAYOUT.layers)
            with pytest.raises(ValueError, match="not among the"):
                origin.fetch(found, [Cell(chunks, 0)], "q5")
        origin.close()


def test_the_last_partial_chunk_is_used_only_by_prompts_that_share_all_of_it(tmp_path: Path) -> None:
    key = SigningKey.new()
    publish(tmp_path, key)
    with OriginServer(tmp_path, OriginSettings(port=0)).running() as url:
        origin = Origin(url, [key.public])
        for prompt, tokens in ((TOKENS, 700), ((*TOKENS, 5, 6), 700), (TOKENS[:-1], 640), ((*TOKENS[:-1], 9), 640)):
            found = find(origin, prompt)
            assert found is not None and found.tokens == tokens
        origin.close()


def test_of_many_contexts_the_longest_common_beginning_is_found(tmp_path: Path) -> None:
    """More than an index holds: those that begin alike are told apart by a later chunk."""
    key, head = SigningKey.new(), TOKENS[:300]  # instructions that all share
    tails = [tuple(number * 1000 + offset for offset in range(400)) for number in range(50)]
    for tail in tails:
        publish(tmp_path, key, "q2", synthetic(tokens=(*head, *tail)))
    with OriginServer(tmp_path, OriginSettings(port=0)).running() as url:
        origin = Origin(url, [key.public])
        for tail in (tails[0], tails[20], tails[-1]):
            found = find(origin, (*head, *tail, 7))
            assert found is not None and found.tokens == 700
        other = find(origin, (*head, *(9 for _ in range(400))))
        assert other is not None and other.tokens == 256
        origin.close()


def _all(tokens: Any) -> Span:
    return Span(0, len(tokens))
