"""Bits for each layer's keys and values, chosen by their effect."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rekindle.codec.quantizer import BitPlan, LayerBits, allocate

BITS = st.just(0.0) | st.floats(1, 8)
PLANS = st.builds(BitPlan, st.lists(st.builds(LayerBits, BITS, BITS), max_size=40).map(tuple))
EFFECTS = st.integers(1, 12).flatmap(
    lambda layers: st.lists(st.floats(1e-9, 1), min_size=2 * layers, max_size=2 * layers)
)
LEVELS = [0.0, *np.arange(1, 8.25, 0.25)]


def table(at_one_bit: list[float]) -> np.ndarray:
    """What is measured where each bit makes the harm four times smaller."""
    one = np.array(at_one_bit).reshape(-1, 2, 1)
    return np.concatenate([3 * one, one * 4.0 ** (1 - np.array(LEVELS[1:]))], -1)


def harm(plan: BitPlan, effects: np.ndarray) -> float:
    chosen = [[layer.keys, layer.values] for layer in plan.layers]
    return sum(
        float(effects[layer, half, LEVELS.index(bits)])
        for layer, row in enumerate(chosen)
        for half, bits in enumerate(row)
    )


@given(PLANS)
def test_a_plan_comes_back_from_its_text(plan: BitPlan) -> None:
    assert BitPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "[[1]]", "[[1,2,3]]", '[["1",2]]', "[[true,1]]", "[[9,1]]", "[[0.5,1]]", "[[NaN,1]]", "["]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        BitPlan.from_json(text)


def test_a_text_nested_without_end_is_refused() -> None:
    with pytest.raises(ValueError):
        BitPlan.from_json("[" * 100_000)


@given(EFFECTS, st.floats(0, 8))
def test_a_plan_never_exceeds_its_budget(at_one_bit: list[float], mean_bits: float) -> None:
    assert allocate(table(at_one_bit), LEVELS, mean_bits).mean_bits <= mean_bits + 1e-6


@given(EFFECTS, st.sampled_from(LEVELS[1:]))
def test_bits_by_effect_do_no_more_harm_than_the_same_everywhere(at_one_bit: list[float], bits: float) -> None:
    effects = table(at_one_bit)
    plan = allocate(effects, LEVELS, bits)
    uniform = BitPlan.uniform(len(effects), bits)
    assert harm(plan, effects) <= harm(uniform, effects) * (1 + 1e-9)


@given(arrays.arrays(np.float64, (2, 2, 4), elements=st.floats(0, 1)), st.floats(0, 4))
def test_no_plan_within_the_budget_does_less_harm(effects: np.ndarray, mean_bits: float) -> None:
    levels = [0.0, 1.0, 1.75, 4.0]
    plan = allocate(effects, levels, mean_bits)
    parts = effects.reshape(4, 4)
    least = min(
        sum(parts[part, level] for part, level in enumerate(choice))
        for choice in itertools.product(range(4), repeat=4)
        if sum(levels[level] for level in choice) <= mean_bits * 4 + 1e-9
    )
    chosen = [bits for layer in plan.layers for bits in (layer.keys, layer.values)]
    assert sum(parts[part, levels.index(bits)] for part, bits in enumerate(chosen)) <= least + 1e-12


def test_a_part_that_matters_more_gets_more_bits() -> None:
    plan = allocate(table([1.0, 1e-3, 1e-3, 1e-3]), LEVELS, 2.0)
    assert plan.layers[0].keys > max(plan.layers[0].values, plan.layers[1].keys, plan.layers[1].values)


def test_bits_that_save_nothing_are_not_spent() -> None:
    effects = np.zeros((3, 2, len(LEVELS)))
    assert allocate(effects, LEVELS, 5.0) == BitPlan.uniform(3, 0)


def test_a_noisy_measurement_does_not_stop_the_purchase_behind_it() -> None:
    effects = np.array([[[1.0, 1.1, 0.1], [1.0, 0.9, 0.8]]])
    assert allocate(effects, [1.0, 2.0, 3.0], 2.5).layers[0] == LayerBits(3.0, 2.0)


@pytest.mark.parametrize(
    ("effects", "levels", "mean_bits"),
    [
        (np.zeros((2, 3, 2)), [1, 2], 2),
        (np.zeros((2, 2, 2)), [1, 2, 3], 2),
        (np.zeros((2, 2, 2)), [2, 1], 2),
        (np.zeros((2, 2, 2)), [1, 1.3], 2),
        (np.zeros((2, 2, 0)), [], 2),
        (np.full((2, 2, 2), np.nan), [1, 2], 2),
        (np.zeros((2, 2, 2)), [2, 3], 1),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(effects: np.ndarray, levels: list[float], mean_bits: float) -> None:
    with pytest.raises(ValueError):
        allocate(effects, levels, mean_bits)


@pytest.mark.parametrize("bits", [-1.0, 0.5, 8.5, float("nan"), float("inf")])
def test_bits_that_no_codec_has_are_refused(bits: float) -> None:
    with pytest.raises(ValueError, match="0 bits or 1 to 8"):
        LayerBits(bits, 2)
