"""A model in half precision leaves the bits of others in the process alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rekindle.engine.base import Row
from rekindle.engine.hf.device import choose_placement, stable_matmul
from rekindle.engine.hf.engine import HfEngine
from tests.tiny import byte_tokenizer, tiny_engine, tiny_model

TOKENS = [3 + i % 200 for i in range(70)]  # many enough for torch to ask oneDNN


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before  # type: ignore[assignment]


def logits_of(engine: HfEngine) -> np.ndarray:
    with engine.open(len(TOKENS), engine.regime(len(TOKENS))) as sequence:
        (logits,) = engine.step([Row.following(sequence, TOKENS, logits="all")])
        return logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.filterwarnings("error")  # torch tells when it switches oneDNN off
def test_half_precision_does_not_switch_it_off(dtype: str) -> None:
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    placement = choose_placement("cpu", dtype)
    half = HfEngine(tiny_model("llama").to(placement.dtype), byte_tokenizer(), name="half", placement=placement)
    logits_of(half)
    assert torch.backends.mkldnn.enabled


def test_what_others_switched_off_changes_no_bit() -> None:
    engine = tiny_engine("llama", intermediate_size=2048)  # wide enough for the libraries to differ
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    expected = logits_of(engine)
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    assert np.array_equal(logits_of(engine), expected)
    assert not torch.backends.mkldnn.enabled  # theirs, and left to them


def test_it_is_put_back_when_a_step_fails() -> None:
    before = torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError, match="broken"), stable_matmul(torch.device("cpu"), torch.float32):
        raise RuntimeError("broken")
    assert torch.backends.mkldnn.enabled == before
