"""Quantized KV from an origin that is decoded where the engine computes: the same bits as decoded on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.baselines.streaming import Steered
from benchmarks.stream.modes import Given
from benchmarks.waiting.timeline import LinkCosts, order_of
from rekindle import Session
from rekindle.cache import cost
from rekindle.codec import quantized
from rekindle.core.cells import Cell, Schedule, Split
from rekindle.core.kv import CodedPiece, Kv, LayerKv, Span
from rekindle.core.request import Request
from rekindle.engine.base import Logits, Row
from rekindle.engine.hf import device_decoder, layer_loader
from rekindle.engine.hf import engine as hf_engine
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.remote import remote_kv as streams
from rekindle.remote.client import Origin, PublishedPrefix
from rekindle.remote.index import KvModel
from rekindle.remote.ladder import LevelLadder, PricedLevel
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey
from rekindle.remote.transfer_queue import OriginSlices, TransferQueue
from rekindle.session.publish import computed, levels_of
from tests.server.serving import eventually
from tests.tiny import byte_tokenizer, tiny_model

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
TOKENS = np.random.default_rng(4).integers(3, 250, 700).tolist()


@pytest.fixture(autouse=True)
def decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too; and as if prompts of a tiny model were worth streaming."""
    for module in (layer_loader, hf_engine):
        monkeypatch.setattr(module, "decodes_on", lambda _: True)
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    monkeypatch.setattr(cost, "FREE", replace(cost.FREE, compute=(0.0, 1.0, 0.0)))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def tiny(device: str, dtype: str) -> Iterator[HfEngine]:
    placement = choose_placement(device, dtype)
    model = tiny_model("llama", max_position_embeddings=2048, num_hidden_layers=5)
    model = model.to(placement.device, placement.dtype)
    with closing(HfEngine(model, byte_tokenizer(), name="tiny", placement=placement)) as engine:
        yield engine


@contextmanager
def published(engine: HfEngine, folder: Path, levels: str) -> Iterator[dict[str, Any]]:
    """An origin with the first tokens at some levels, and the settings of its clients."""
    key = SigningKey.new()
    with Session(engine, cache="off") as session, computed(session, Request.of(TOKENS[:680])) as source:
        Publisher(folder, key).publish(source, levels_of(levels, session))
    with OriginServer(folder, OriginSettings(port=0)).running() as url:
        yield {"origin": url, "origin_keys": key.public}


class Turns(LevelLadder):
    """Another level for every request."""

    def adapt(self, *_: Any, **__: Any) -> None:
        self.level = self.levels[len(self.taken) % len(self.levels)]


def streamed(engine: HfEngine, origin: Origin, found: PublishedPrefix, *, left_coded: bool) -> tuple[Logits, Kv]:
    """Some of it computed, the rest streamed, with computed slices between those that come."""
    cells, names = found.cells, [level for level in found.levels if level != "raw"]
    prices = [PricedLevel(name, 0.0, 8.0, found.sizes(name)) for name in (*names, "raw")]
    source = OriginSlices(origin, found, Turns(prices, cells, 1.0, 1.0), left_coded=left_coded)
    split = (cells.layers, 1, 3, 0, 0, 2)
    missing = [Cell(chunk, layer) for chunk, count in enumerate(split) for layer in range(count, cells.layers)]
    link = TransferQueue(source)
    link.want(missing)
    eventually(lambda: len(link.arrived) == len(missing) or link.failed)
    assert link.failed is None
    assert any(not isinstance(kv, LayerKv) for kv in link.arrived.values()) == left_coded
    shape = (cells.chunks, cells.layers)
    costs = LinkCosts(np.full(shape, 1e-3), np.full(shape, 1e-4), np.full(shape, 1e3), np.full(cells.layers, 1e-4), 1.0)
    sequence = engine.open(len(TOKENS), engine.regime(len(TOKENS)))
    prefill = Steered(engine, sequence, TOKENS, cells, link, costs)
    prefill.steering = Given(Schedule(Split(cells.layers, split), order_of(cells.layers, missing), 0.0))
    try:
        logits = prefill.run()
        assert prefill.report.computed == split and set(source.ladder.taken.values()) == set(prices)
        return logits, sequence.export(Span(0, cells.tokens))
    finally:
        link.close()
        sequence.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_device_restores_what_the_host_decodes(device: str, dtype: str, tmp_path: Path) -> None:
    with (
        tiny(device, dtype) as engine,
        published(engine, tmp_path, "raw,q8,q3") as own,
        closing(Origin(own["origin"], [own["origin_keys"]])) as origin,
    ):
        found = origin.find(TOKENS[:-1], KvModel.of(engine, len(TOKENS)))
        assert found is not None and found.tokens == 680
        (logits, kv), (expected_logits, expected) = (
            streamed(engine, origin, found, left_coded=left_coded) for left_coded in (True, False)
        )
    for got, wanted in zip(kv.layers, expected.layers, strict=True):
        assert got.keys.tobytes() == wanted.keys.tobytes() and got.values.tobytes() == wanted.values.tobytes()
    assert np.array_equal(logits, expected_logits)


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("levels", ["q8", "raw"])
def test_a_session_leaves_to_the_device_what_is_quantized(
    device: str, levels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[CodedPiece] = []
    unpack = device_decoder.unpack

    def counting(piece: CodedPiece, *rest: Any) -> Any:
        pieces.append(piece)
        return unpack(piece, *rest)

    monkeypatch.setattr(device_decoder, "unpack", counting)
    with tiny(device, "float32") as engine, published(engine, tmp_path / "files", levels) as own:
        assert engine.capabilities.decodes
        with Session(engine, cache="off") as session:
            alone = session.generate(TOKENS, max_tokens=8)
        own |= {"reuse": "quantized", "kl_budget": 10.0}
        with Session(engine, cache=tmp_path / "cache", **own) as session:
            reply = session.generate(TOKENS, max_tokens=8)
    assert reply.reuse.streamed > 0 and reply.reuse.origin_miss is None
    assert bool(pieces) == (levels == "q8") == (reply.reuse.quantized > 0)
    assert levels == "q8" or reply.tokens == alone.tokens


@pytest.mark.usefixtures("origin_first")
def test_codes_that_were_published_damaged_are_computed(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signed by who made the mistake, and therefore found only when they are decoded."""
    encode = quantized.encode
    with monkeypatch.context() as patch:
        patch.setattr(quantized, "encode", lambda *given: encode(*given)[:-1])
        patch.setattr("rekindle.session.publish.level_kl", lambda *_: {"q8": 0.0})
        with tiny(device, "float32") as engine, published(engine, tmp_path / "files", "q8") as own:
            with Session(engine, cache="off") as session:
                alone = session.generate(TOKENS, max_tokens=8)
            with Session(engine, cache=tmp_path / "cache", reuse="quantized", **own) as session:
                reply = session.generate(TOKENS, max_tokens=8)
                assert (reply.tokens, reply.reuse.streamed) == (alone.tokens, 0)
                assert reply.reuse.origin_miss == "failed"
                assert session.generate(TOKENS[::-1], max_tokens=1).reuse.origin_miss == "failed"  # left alone


def test_slices_for_other_heads_are_decoded_on_the_host(tmp_path: Path) -> None:
    """llama.cpp has all heads of a token in one."""
    with (
        tiny("cpu", "float32") as engine,
        published(engine, tmp_path, "q8") as own,
        closing(Origin(own["origin"], [own["origin_keys"]])) as origin,
    ):
        model = KvModel.of(engine, len(TOKENS))
        found = origin.find(TOKENS[:-1], model)
        assert found is not None
        layers = tuple(
            replace(shape, kv_heads=1, key_dim=shape.kv_heads * shape.key_dim,
                    value_dim=shape.kv_heads * shape.value_dim)
            for shape in model.layout.layers
        )  # fmt: skip
        other = replace(found, model=replace(model, layout=replace(model.layout, layers=layers)))
        for one, coded in ((found, True), (other, False)):
            ladder = LevelLadder([PricedLevel("q8", 0.0, 8.0, one.sizes("q8"))], one.cells, 1.0, 1.0)
            (_, kv), *_ = OriginSlices(origin, one, ladder, left_coded=True).carry([Cell(0, 0)])
            assert isinstance(kv, LayerKv) != coded


@CUDA
def test_a_device_is_at_most_a_layer_behind_who_asks() -> None:
    """`enough` is asked about what is computed, not about what was launched; a stopwatch has the time of the device."""
    placement = choose_placement("cuda", "bfloat16")
    model = tiny_model(
        "llama", max_position_embeddings=8192, num_hidden_layers=12, hidden_size=2048, intermediate_size=8192,
        num_attention_heads=16, num_key_value_heads=16, head_dim=128,
    ).to(placement.device, placement.dtype)  # fmt: skip
    events: list[torch.cuda.Event] = []
    behind: list[int] = []

    def enough(_: int) -> bool:
        behind.append(sum(not event.query() for event in events))
        events.append(torch.cuda.Event())
        events[-1].record()
        return False

    with closing(HfEngine(model, byte_tokenizer(), name="wide", placement=placement)) as engine:
        sequence = engine.open(8192, engine.regime(8192))
        row = replace(Row.following(sequence, [5] * 8000, logits="none"), until=12, enough=enough, replay=False)
        for _ in range(2):  # kernels are compiled the first time
            events.clear()
            behind.clear()
            torch.cuda.synchronize()
            watch = engine.stopwatch()
            engine.step([row])
            watch.stop()
            assert watch.seconds is None  # the last layers are still being computed
            torch.cuda.synchronize()
            assert watch.seconds is not None and watch.seconds > 0.001
        assert len(behind) == 12 and max(behind) <= 1
        sequence.close()
