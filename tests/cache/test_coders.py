"""Coders of models, remembered between runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.cache.coders import default_coder, recall_coder, remember_coder
from rekindle.codec.coder import Coder
from rekindle.codec.quantizer import BitPlan, LayerBits
from rekindle.core.kv import LayerKv
from rekindle.engine.fake import FakeEngine
from rekindle.machine import home_folder
from tests.codec.arrays import decode

ENGINE = FakeEngine()
LAYERS = len(ENGINE.layout.layers)
RISING = BitPlan(tuple(LayerBits(2.0 + layer / 4, 3.0) for layer in range(LAYERS)))
LONG = BitPlan.uniform(LAYERS + 1, 4.0)


def test_a_model_that_was_not_calibrated_has_no_coder() -> None:
    assert recall_coder(ENGINE) is None


@pytest.mark.parametrize("coder", [Coder(RISING, RISING), Coder(None, RISING), Coder(RISING, "exact"), Coder()])
def test_a_coder_comes_back_and_the_latest_one_counts(coder: Coder) -> None:
    remember_coder(ENGINE, Coder(BitPlan.uniform(LAYERS, 8.0)))
    remember_coder(ENGINE, coder)
    assert recall_coder(FakeEngine()) == coder


def test_another_model_has_a_coder_of_its_own() -> None:
    remember_coder(ENGINE, Coder(RISING))
    assert recall_coder(FakeEngine(seed=1)) is None


@pytest.mark.parametrize("coder", [Coder(LONG), Coder(None, LONG)])
def test_a_coder_for_other_layers_is_neither_kept_nor_recalled(coder: Coder) -> None:
    with pytest.raises(ValueError):
        remember_coder(ENGINE, coder)
    keep(coder.to_json())
    assert recall_coder(ENGINE) is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [1, 2],
        {"whole": 1},
        "",
        "null",
        "[]",
        "{}",
        '["[[9,9]]",null]',
        '[null,"other"]',
        f'["[[1{"0" * 400},1]]",null]',
        "[" * 100_000,
    ],
)
def test_what_is_no_coder_is_not_recalled(value: Any) -> None:
    keep(value)
    assert recall_coder(ENGINE) is None


def test_a_damaged_file_counts_as_missing_and_is_replaced() -> None:
    remember_coder(ENGINE, Coder(RISING))
    file = home_folder() / "coders.json"
    file.write_bytes(file.read_bytes()[:-5])
    assert recall_coder(ENGINE) is None
    remember_coder(ENGINE, Coder(RISING))
    assert recall_coder(ENGINE) == Coder(RISING)


@given(st.integers(1, 200))
def test_the_default_codes_every_layer_of_any_model(layers: int) -> None:
    coder = default_coder(layers)
    assert isinstance(coder.whole, BitPlan)
    assert isinstance(coder.delta, BitPlan)
    assert len(coder.whole.layers) == len(coder.delta.layers) == layers
    random = np.random.default_rng(layers)
    kv, anchor = (
        LayerKv(*random.normal(0, 1, (2, 2, 8, 4)).astype(np.float32)) for _ in range(2)
    )  # [2 halves, kv_heads, tokens, dim]
    for against in (None, anchor):
        back = decode(coder.encode(layers - 1, kv, against, "float32"), "float32", against)
        assert np.abs(back.keys - kv.keys).max() < 1
        assert np.abs(back.values - kv.values).max() < 1


def keep(value: Any) -> None:
    """Put something where the coder of the model would be."""
    file = home_folder() / "coders.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({ENGINE.identity(ENGINE.regime(1)).digest: value}))
