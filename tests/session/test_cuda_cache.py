"""The prefix cache on a CUDA device, where there is one: loads go through pinned memory on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rekindle import Session
from rekindle.engine.base import EngineWrapper, Logits, Row
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from tests.tiny import byte_tokenizer, tiny_model
from tests.unmeasured_costs import UnmeasuredCosts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TOKENS = np.random.default_rng(4).integers(3, 250, 700).tolist()


class Watched(EngineWrapper):
    """An engine whose logits are noted."""

    def __init__(self, engine: HfEngine) -> None:
        super().__init__(engine)
        self.seen: list[Logits] = []

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        logits = super().step(rows, cancelled)
        self.seen += [found for found in logits if len(found)]
        return logits


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest) -> Watched:
    placement = choose_placement("cuda", request.param)
    model = tiny_model("llama", max_position_embeddings=2048).to(placement.device, placement.dtype)
    return Watched(HfEngine(model, byte_tokenizer(), name="tiny", placement=placement))


@pytest.mark.parametrize("memory", ["512MB", "0"])
def test_what_comes_back_gives_the_same_logits(engine: Watched, tmp_path: Path, memory: str) -> None:
    with Session(engine, cache=str(tmp_path / "c"), memory_limit=memory) as session:
        for length in (40, 200, 650, 651):
            session.generate(TOKENS[:length], max_tokens=3)
            session.flush()
        for count in (30, 199, 640, 700):
            asked = [*TOKENS[:count], 5, 6, 7]
            session.cache.unpark()
            session.cache.kv.costs = UnmeasuredCosts()  # a tiny model is computed sooner than loaded
            warm = session.generate(asked, max_tokens=1)
            got = engine.seen[-1]
            session.generate(asked, max_tokens=1, reuse="off")
            scale = np.abs(engine.seen[-1]).max()
            assert warm.reuse.memory + warm.reuse.disk >= min(count, 651)
            assert np.abs(got - engine.seen[-1]).max() <= (5e-2 if engine.layout.dtype == "bfloat16" else 2e-3) * scale


def test_deterministic_prefills_are_bit_equal_cold_and_warm(engine: Watched, tmp_path: Path) -> None:
    with Session(engine, cache=str(tmp_path / "c"), deterministic=True) as session:
        session.warm([TOKENS])
        for count in (257, 300, 512, 530, 700):
            for ending in ([5], [5, 6, 7], list(range(3, 60))):
                asked = [*TOKENS[:count], *ending]
                logits = []
                for _ in range(3):  # often enough for a step to be recorded
                    for reuse in ("off", "exact"):
                        session.cache.unpark()
                        session.cache.kv.costs = UnmeasuredCosts()
                        reply = session.generate(asked, max_tokens=1, reuse=reuse)
                        logits.append(engine.seen[-1])
                    assert reply.reuse.reused >= 256
                assert all(np.array_equal(logits[0], other) for other in logits[1:])
