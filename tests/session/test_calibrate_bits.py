"""Bits by measured effect, on tiny models whose weights are random."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.adapters.coding import compare, measure, plain_of
from rekindle.cache.coders import default_coder
from rekindle.codec.coder import EXACT, Coder
from rekindle.codec.quantizer import BitPlan
from rekindle.core.adapter import Lora
from rekindle.core.kv import LayerKv
from rekindle.engine.base import Row
from rekindle.engine.fake import FakeEngine
from rekindle.engine.hf.engine import HfEngine
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import InvalidSetting
from rekindle.session.calibrate.bits import (
    DELTA_TRIED_BITS,
    FORCED_TOKENS,
    CodedPrompt,
    combined,
    find_bits,
    part_effects,
)
from rekindle.session.calibrate.kv_trial import Trial, encode, fitted, read_back, size_bits
from rekindle.session.calibrate.nearness import nearness
from tests.lora import save_lora
from tests.tiny import tiny_engine

pytestmark = pytest.mark.thorough

TEXT = "The tide came in at four and left at ten, and the boats lay on the sand in between, each on its own side. " * 3
LAYERS = 4


@pytest.fixture(scope="module")
def engine() -> HfEngine:
    """A model whose layer 2 has a much louder say than the others."""
    made = tiny_engine("llama")
    with torch.no_grad():
        for number, layer in enumerate(made.model.model.layers):
            layer.self_attn.o_proj.weight *= 1.0 if number == 2 else 0.02
    return made


@pytest.fixture(scope="module")
def lora(engine: HfEngine, tmp_path_factory: pytest.TempPathFactory) -> Lora:
    """An adapter that changes keys and values from layer 1 on."""
    random = np.random.default_rng(5)
    pairs = {
        f"model.layers.{layer}.self_attn.{name}_proj": (
            random.normal(0, 0.1, (2, 32)).astype(np.float32),
            random.normal(0, 0.1, (16, 2)).astype(np.float32),
        )
        for layer in (1, 2, 3)
        for name in ("k", "v")
    }
    read = read_adapter(save_lora(tmp_path_factory.mktemp("lora"), pairs))
    assert engine.check_adapter(read).same_layers == 1
    engine.load_adapter(read)
    return read


def tokens(engine: HfEngine) -> tuple[list[int], list[int]]:
    encoded = engine.tokenizer.encode(TEXT)
    return encoded[:200], encoded[200:216]


def no_news(_: str) -> None:
    """For who wants no progress."""


def test_exact_kv_brought_back_changes_nothing_and_wrong_kv_does(engine: HfEngine) -> None:
    with Trial(engine, *tokens(engine)) as trial:
        own = trial.kv.layers
        same = trial.near(own)
        zeros = [LayerKv(np.zeros_like(layer.keys), np.zeros_like(layer.values)) for layer in own]
        wrong = trial.near(zeros)
    assert (same.mean_kl, same.top1, same.positions) == (0.0, 1.0, 16)
    assert wrong.mean_kl > 0.01
    assert wrong.top1 < 1


def test_a_trial_says_what_the_model_says_in_one_go(engine: HfEngine, lora: Lora) -> None:
    prompt, forced = tokens(engine)
    with (
        Trial(engine, prompt, forced, lora.digest) as trial,
        engine.open(216, engine.regime(216), lora.digest) as sequence,
    ):
        (logits,) = engine.step([Row.following(sequence, prompt + forced, logits="all")])
        np.testing.assert_allclose(trial.exact, logits[200:], atol=1e-4)


def test_the_layer_that_matters_most_has_the_largest_effect_and_gets_the_most_bits(engine: HfEngine) -> None:
    with Trial(engine, *tokens(engine)) as trial:
        effects = part_effects(CodedPrompt(trial), 4.0)
    assert effects.shape == (LAYERS, 2)
    assert effects[:, 1].argmax() == 2
    coder = find_bits(engine, [TEXT], [], no_news, whole_bits=[4.0]).coder
    assert isinstance(coder.whole, BitPlan)
    values = [layer.values for layer in coder.whole.layers]
    assert values[2] == max(values)
    assert values[2] >= min(values) + 1
    assert coder.delta == default_coder(LAYERS).delta  # no adapter, nothing measured


def test_an_effect_falls_with_bits_about_as_the_squared_error_does(engine: HfEngine) -> None:
    with Trial(engine, *tokens(engine)) as trial:
        three, five = (part_effects(CodedPrompt(trial), bits).sum() for bits in (3.0, 5.0))
    assert 4 < three / five < 64  # 16, were it exactly so


def test_a_plan_takes_what_was_asked_for_and_not_much_less(engine: HfEngine, lora: Lora) -> None:
    coder = find_bits(engine, [TEXT], [lora], no_news, whole_bits=[5.0], delta_bits=[3.0]).coder
    encoded = engine.tokenizer.encode(TEXT)[: 256 + FORCED_TOKENS]
    prompt, forced = encoded[:-FORCED_TOKENS], encoded[-FORCED_TOKENS:]
    with Trial(engine, prompt, forced) as base, Trial(engine, prompt, forced, lora.digest) as trial:
        whole = measure(base, coder, None)
        delta = measure(trial, coder, read_back(coder, base.kv.layers, None, "float32"))
    assert 4.5 < whole.bits <= 5.0
    assert 0 < delta.bits <= 3.0  # layers that the adapter leaves as they are take nothing


def test_halves_that_an_adapter_leaves_alone_are_not_measured(engine: HfEngine, lora: Lora) -> None:
    with Trial(engine, *tokens(engine)) as base, Trial(engine, *tokens(engine), lora.digest) as trial:
        effects = part_effects(CodedPrompt(trial, base.kv.layers, base.kv.layers), DELTA_TRIED_BITS)
    assert np.isnan(effects[0]).all()
    assert (effects[1:] > 0).all()


def test_effects_of_several_prompts_count_alike_however_large_and_unknown_ones_are_middling() -> None:
    nothing = np.nan
    one = np.array([[1.0, 4.0], [2.0, nothing], [nothing, 16.0]])
    found = combined([one, 1000 * one, one / 1000])
    relative = found / found[0, 0]
    np.testing.assert_allclose(relative[0], [1, 4])
    np.testing.assert_allclose(relative[1:].reshape(-1)[[0, 3]], [2, 16])
    assert 1 < relative[1, 1] < 16
    assert relative[1, 1] == pytest.approx(relative[2, 0])
    # what only one prompt knows has the place that it has there
    np.testing.assert_allclose(combined([np.array([[1.0, nothing]]), np.array([[10.0, 40.0]])])[0, 1], 4.0)


def test_every_way_of_coding_is_measured_on_the_same_prompt(engine: HfEngine, lora: Lora) -> None:
    coder = default_coder(LAYERS)
    with Trial(engine, *tokens(engine)) as base, Trial(engine, *tokens(engine), lora.digest) as trial:
        found = compare(trial, coder, base.kv.layers)
    assert list(found) == ["by_effect", "uniform", "plain", "exact", "mobilora"]
    assert (found["exact"].near.mean_kl, found["exact"].near.top1) == (0.0, 1.0)
    assert found["plain"].bits <= found["by_effect"].bits < found["exact"].bits
    assert found["by_effect"].near.mean_kl < found["plain"].near.mean_kl
    assert found["mobilora"].near.mean_kl < found["plain"].near.mean_kl
    assert all(one.encode_mb_s > 0 and one.decode_mb_s > 0 for one in found.values())


def test_the_most_bits_that_fit_are_found(engine: HfEngine) -> None:
    with Trial(engine, *tokens(engine)) as trial:
        for bits in (2.5, 4.0, 100.0):
            coder = plain_of(trial, bits)
            assert isinstance(coder.whole, BitPlan)
            blobs = encode(coder, trial.kv.layers, None, "float32")
            assert size_bits(blobs, trial.kv.layers) <= bits
    assert coder.whole.mean_bits == 8.0
    smallest = fitted(lambda bits: Coder(BitPlan.uniform(1, bits)), 0.1, lambda _: 1.0)
    assert smallest.whole == BitPlan.uniform(1, 1.0)


def test_size_counts_every_byte() -> None:
    layer = LayerKv(np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 8), np.float32))
    assert size_bits([b"12", b"345678"], [layer, layer]) == 8 * 8 / 144


def test_quality_is_a_divergence_by_position() -> None:
    exact = np.log(np.array([[0.5, 0.5], [0.9, 0.1]], np.float32))
    other = np.log(np.array([[0.5, 0.5], [0.1, 0.9]], np.float32)) + 7  # a constant means nothing
    found = nearness(exact, other)
    assert found.mean_kl == pytest.approx(0.8 * np.log(9) / 2, rel=1e-5)
    assert found.top1 == 0.5
    assert nearness(exact, exact).mean_kl == 0.0


def test_what_cannot_be_calibrated_is_refused(engine: HfEngine) -> None:
    for texts in ([], ["short"]):
        with pytest.raises(InvalidSetting):
            find_bits(engine, texts, [], no_news)


def test_any_engine_with_spans_can_be_calibrated() -> None:
    coder = find_bits(FakeEngine(), [TEXT], [], no_news).coder
    assert isinstance(coder.whole, BitPlan)
    assert not coder.exact
    assert EXACT.exact
