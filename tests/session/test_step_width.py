"""How many tokens a step may have is measured where an engine rounds by the size of a step, and drafts keep to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import FakeEngine
from rekindle.machine import home_folder
from rekindle.session.draft import ANY, max_exact_step, measure_step_width

PROMPT = list(range(40, 75))


class Coarse(FakeEngine):
    """Computes steps of more than `most` tokens in another way: their logits are off by more than the last digits."""

    capabilities = replace(FakeEngine.capabilities, steady=False)

    def __init__(self, most: int, **options: Any) -> None:
        super().__init__(**options)
        self._most = most
        self.sizes: list[int] = []

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        found = super().step(rows, cancelled)
        self.sizes += [len(row.tokens) for row in rows]
        return [
            one + np.linspace(0.0, 3.0, one.shape[1], dtype=np.float32) if len(one) > self._most else one
            for row, one in zip(rows, found, strict=True)
        ]


@pytest.mark.parametrize(("most", "found"), [(1, 1), (2, 2), (5, 4), (15, 8), (16, ANY), (99, ANY)])
def test_the_largest_step_that_gives_each_token_what_it_gets_alone(most: int, found: int) -> None:
    assert measure_step_width(Coarse(most)) == found


def test_it_is_measured_once_for_a_model_and_a_machine() -> None:
    first, second = Coarse(4), Coarse(4)
    assert max_exact_step(first) == max_exact_step(second) == 4
    assert first.sizes and not second.sizes
    (home_folder() / "step_width.json").write_text('{"x": "y"', "utf-8")  # damaged: measured again
    assert max_exact_step(second) == 4 and second.sizes


def test_where_there_can_be_no_drafts_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    assert [max_exact_step(Coarse(1)) for _ in range(2)] == [1, 1]
    assert [message for message in caplog.messages if message.startswith("Drafts are not used with")] != []
    assert len(caplog.messages) == 1


def test_an_engine_that_is_steady_is_not_measured() -> None:
    engine = FakeEngine()
    assert max_exact_step(engine) == ANY
    assert not (home_folder() / "step_width.json").exists()


@pytest.mark.parametrize(("dtype", "steady"), [("float32", True), ("bfloat16", False), ("float16", False)])
def test_torch_is_measured_where_numbers_have_fewer_bits(dtype: str, steady: bool) -> None:
    """In bfloat16 a quarter of the answers to questions over documents read differently with drafts and the cache."""
    torch = pytest.importorskip("torch")
    from rekindle.engine.hf.device import choose_placement
    from rekindle.engine.hf.engine import HfEngine
    from tests.tiny import byte_tokenizer, tiny_model

    model = tiny_model("llama").to(getattr(torch, dtype))
    engine = HfEngine(model, byte_tokenizer(), name="tiny", placement=choose_placement("cpu", dtype))
    assert engine.capabilities.steady is steady
    engine.close()


@pytest.mark.parametrize("most", [1, 4])
def test_drafts_are_checked_in_steps_that_change_nothing(most: int, tmp_path: Path) -> None:
    with Session(FakeEngine(), cache="off") as session:
        alone = session.generate(PROMPT, max_tokens=40, min_tokens=40)
    engine = Coarse(most)
    with Session(engine, cache=tmp_path / "cache") as session:
        assert max_exact_step(engine) == most
        engine.sizes.clear()
        checked = session.generate(PROMPT, max_tokens=40, min_tokens=40, drafts=[alone.tokens])
        assert checked.tokens == alone.tokens
        assert max(size for size in engine.sizes if size < 16) <= most
        assert (checked.usage.drafted_tokens > 0) == (most > 1)
