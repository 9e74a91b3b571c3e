"""Keys that move: fed at another place than they were computed at, they are the keys of that place."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.engine.base import KvFeed, MovedFeed, Row
from rekindle.engine.hf.device import choose_placement
from rekindle.engine.hf.engine import HfEngine
from rekindle.errors import Cancelled, StepRefused
from tests.engine.contract import Garbage, Stored
from tests.tiny import FAMILIES, OTHERS, byte_tokenizer, tiny_engine, tiny_model

pytestmark = pytest.mark.thorough

TOKENS = np.random.default_rng(7).integers(3, 250, 100).tolist()
CHUNK = TOKENS[20:34]  # shorter than any window
OLD, NEW = 5, 19  # where it stood, and where it shall
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 5.0, 7.0],
    "original_max_position_embeddings": 48,
}


def engine_of(family: str, dtype: str = "float32", device: str = "cpu", **changes: Any) -> HfEngine:
    placement = choose_placement(device, dtype)
    model = tiny_model(family, **changes).to(placement.device)
    for parameter in model.parameters():  # not the frequencies, which a loaded model has in single precision too
        parameter.data = parameter.data.to(placement.dtype)
    return HfEngine(model, byte_tokenizer(), name=family, placement=placement)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def engine(request: pytest.FixtureRequest) -> HfEngine:
    return tiny_engine(request.param)


def computed(engine: HfEngine, tokens: list[int], span: Span, regime: str | None = None) -> Kv:
    """The KV of `span` of a context."""
    with engine.open(len(tokens), regime or engine.regime(len(tokens))) as sequence:
        engine.step([Row.following(sequence, tokens, logits="none")])
        return sequence.export(span)


def at(start: int) -> Span:
    return Span(start, start + len(CHUNK))


def at_old(engine: HfEngine, regime: str | None = None) -> Kv:
    return computed(engine, [*TOKENS[:OLD], *CHUNK], at(OLD), regime)


def fed(engine: HfEngine, feed: KvFeed, regime: str | None = None) -> Kv:
    """What stands where a feed brought KV, in a context that is else computed."""
    before, last = TOKENS[40 : 40 + feed.span.start], feed.span.stop
    positions = [*range(len(before)), last]
    with engine.open(last + 1, regime or engine.regime(last + 1)) as sequence:
        engine.step([Row(sequence, [*before, 9], positions, logits="none", feeds=(feed,))])
        return sequence.export(feed.span)


def moved(engine: HfEngine, kv: Kv, start: int, shift: int | None = None, regime: str | None = None) -> Kv:
    shift = start - kv.span.start if shift is None else shift
    return fed(engine, MovedFeed(Stored(kv), start, shift), regime)


def numbers(raw: np.ndarray) -> np.ndarray:
    """Keys or values as float32; brain floats are carried as raw bits."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


def assert_near(got: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    got, expected = numbers(got), numbers(expected)
    assert np.abs(got - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def assert_first_layer_is_as_computed_there(engine: HfEngine, tolerance: float, regime: str | None = None) -> None:
    """Keys of the first layer depend on a token and its position only: there the turn can be checked exactly."""
    got = moved(engine, at_old(engine, regime), NEW, regime=regime)
    expected = computed(engine, [*TOKENS[40 : 40 + NEW], *CHUNK], at(NEW), regime)
    assert_near(got.layers[0].keys, expected.layers[0].keys, tolerance)


def test_a_moved_key_is_the_key_of_its_new_place(engine: HfEngine) -> None:
    assert engine.capabilities.recompute == "scattered"
    assert_first_layer_is_as_computed_there(engine, 1e-5)


@pytest.mark.parametrize("family", [*sorted(OTHERS), "glm4", "helium"])
def test_keys_of_families_that_are_not_promised_move_too(family: str) -> None:
    engine = tiny_engine(family)
    assert engine.capabilities.recompute == "scattered"
    assert_first_layer_is_as_computed_there(engine, 1e-5)


def test_a_context_that_moves_as_a_whole_keeps_every_layers_keys(engine: HfEngine) -> None:
    """Attention only sees distances, so all layers of a context at [d, d + n) have the keys of [0, n), turned by d."""
    cache = DynamicCache()
    with torch.inference_mode():
        engine.model(
            torch.tensor([CHUNK]), position_ids=torch.arange(NEW, NEW + len(CHUNK))[None], past_key_values=cache
        )
    got = moved(engine, computed(engine, CHUNK, at(0)), NEW)
    for layer, own in enumerate(got.layers):
        assert_near(own.keys, cache.layers[layer].keys[0].numpy())
        assert_near(own.values, cache.layers[layer].values[0].numpy())


def test_moving_twice_is_moving_by_the_sum(engine: HfEngine) -> None:
    kv = at_old(engine)
    twice = moved(engine, moved(engine, kv, NEW), 11)
    for got, once in zip(twice.layers, moved(engine, kv, 11).layers, strict=True):
        assert_near(got.keys, once.keys)


def test_moving_there_and_back_restores_the_keys(engine: HfEngine) -> None:
    kv = at_old(engine)
    there = moved(engine, kv, NEW)
    for before, between, after in zip(kv.layers, there.layers, moved(engine, there, OLD).layers, strict=True):
        assert_near(after.keys, before.keys)
        np.testing.assert_array_equal(between.values, before.values)
        np.testing.assert_array_equal(after.values, before.values)


def test_a_shift_of_nothing_leaves_every_bit(engine: HfEngine) -> None:
    kv = at_old(engine)
    for got, before in zip(moved(engine, kv, NEW, shift=0).layers, kv.layers, strict=True):
        np.testing.assert_array_equal(got.keys, before.keys)
        np.testing.assert_array_equal(got.values, before.values)


@pytest.mark.parametrize(("family", "without"), [("smollm3", {3}), ("cohere2", {1, 3})])
def test_layers_without_positions_are_left_as_they_are(family: str, without: set[int]) -> None:
    engine = tiny_engine(family)
    kv = at_old(engine)
    got = moved(engine, kv, NEW)
    same = {i for i, (a, b) in enumerate(zip(got.layers, kv.layers, strict=True)) if np.array_equal(a.keys, b.keys)}
    assert same == without


def turned_by_hand(family: str, kv: Kv, shift: int) -> Kv:
    """What the papers say a rotary embedding is, for three families of three kinds."""
    pairs = {
        "llama": ([0, 1, 2, 3], [4, 5, 6, 7]),
        "cohere2": ([0, 2, 4, 6], [1, 3, 5, 7]),
        "gpt_neox": ([0, 1], [2, 3]),
    }
    first, second = pairs[family]
    angles = shift / 10000.0 ** (np.arange(len(first)) / len(first))
    layers = []
    for layer, own in enumerate(kv.layers):
        keys = own.keys.astype(np.float64)
        x, y = keys[..., first], keys[..., second]
        if family != "cohere2" or layer in (0, 2):
            keys[..., first] = x * np.cos(angles) - y * np.sin(angles)
            keys[..., second] = y * np.cos(angles) + x * np.sin(angles)
        layers.append(LayerKv(keys.astype(np.float32), own.values))
    return Kv(at(kv.span.start + shift), kv.layout, tuple(layers))


@pytest.mark.parametrize("family", ["llama", "cohere2", "gpt_neox"])
def test_tokens_after_moved_kv_have_the_logits_of_kv_turned_by_hand(family: str) -> None:
    engine = tiny_engine(family)
    kv = at_old(engine)
    logits = []
    for feed in (MovedFeed(Stored(kv), NEW, NEW - OLD), Stored(turned_by_hand(family, kv, NEW - OLD))):
        with engine.open(60, "plain") as sequence:
            engine.step([Row.following(sequence, TOKENS[40 : 40 + NEW], logits="none")])
            rest = range(at(NEW).stop, at(NEW).stop + 6)
            logits += engine.step([Row(sequence, TOKENS[:6], rest, logits="all", feeds=(feed,))])
    assert_near(logits[0], logits[1])
    stale = fed(engine, MovedFeed(Stored(kv), NEW, 0))
    assert np.abs(stale.layers[0].keys - moved(engine, kv, NEW).layers[0].keys).max() > 0.1


@DEVICES
@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
@pytest.mark.parametrize("family", ["llama", "cohere2", "gpt_neox"])
def test_half_precision_is_turned_in_single_and_rounded_once(
    family: str, dtype: str, rounding: float, device: str
) -> None:
    engine = engine_of(family, dtype, device)
    assert engine.capabilities.recompute == "scattered"
    kv = at_old(engine)
    exact = Kv(kv.span, kv.layout, tuple(LayerKv(numbers(own.keys), numbers(own.values)) for own in kv.layers))
    got = moved(engine, kv, NEW)
    for mine, theirs, old in zip(got.layers, turned_by_hand(family, exact, 14).layers, kv.layers, strict=True):
        off = np.abs(numbers(mine.keys) - theirs.keys)
        assert np.all(off <= rounding * np.abs(theirs.keys) + 1e-6)
        np.testing.assert_array_equal(mine.values, old.values)
    assert_first_layer_is_as_computed_there(engine, 4 * rounding)


@GPU
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_keys_are_turned_where_the_model_is(family: str) -> None:
    assert_first_layer_is_as_computed_there(engine_of(family, device="cuda"), 1e-4)


@pytest.mark.parametrize("rope", [YARN, DYNAMIC], ids=["yarn", "dynamic"])
def test_a_factor_that_is_on_the_keys_is_not_put_on_twice(rope: dict[str, Any]) -> None:
    engine = tiny_engine("llama", rope_parameters=rope)
    assert engine.capabilities.recompute == "scattered"
    assert_first_layer_is_as_computed_there(engine, 1e-5)


@pytest.fixture(scope="module")
def long() -> HfEngine:
    """A model that changes its frequencies past 48 tokens."""
    return tiny_engine("phi3", rope_parameters=LONG, original_max_position_embeddings=48, sliding_window=None)


@pytest.mark.parametrize("regime", ["short", "long"])
def test_keys_are_turned_by_the_frequencies_of_their_regime(long: HfEngine, regime: str) -> None:
    assert_first_layer_is_as_computed_there(long, 1e-5, regime)


def test_sequences_of_both_regimes_are_turned_in_one_step(long: HfEngine) -> None:
    last = at(NEW).stop
    sequences = {regime: long.open(50, regime) for regime in ("short", "long")}
    rows = []
    for regime, sequence in sequences.items():
        feed = MovedFeed(Stored(at_old(long, regime)), NEW, NEW - OLD)
        positions = [*range(NEW), last]
        rows.append(Row(sequence, [*TOKENS[40 : 40 + NEW], 9], positions, logits="none", feeds=(feed,)))
    long.step(rows)
    for regime, sequence in sequences.items():
        for got, alone in zip(
            sequence.export(at(NEW)).layers, moved(long, at_old(long, regime), NEW, regime=regime).layers, strict=True
        ):
            np.testing.assert_array_equal(got.keys, alone.keys)
        sequence.close()


@DEVICES
def test_each_of_several_feeds_is_turned_by_its_own_shift(device: str) -> None:
    engine = engine_of("llama", device=device)
    kv, size = at_old(engine), len(CHUNK)
    starts = (1, 1 + size + 2, 1 + 2 * size + 2)  # the last two side by side
    feeds = tuple(MovedFeed(Stored(kv), start, start - OLD) for start in starts)
    last = 1 + 3 * size + 2
    computing = [0, 1 + size, 2 + size, last]
    with engine.open(last + 1, "plain") as sequence:
        engine.step([Row(sequence, TOKENS[:4], computing, logits="none", feeds=feeds)])
        for start in starts:
            for got, alone in zip(sequence.export(at(start)).layers, moved(engine, kv, start).layers, strict=True):
                np.testing.assert_array_equal(got.keys, alone.keys)


@DEVICES
def test_what_lies_over_a_moved_feed_is_not_turned_with_it(device: str) -> None:
    engine = engine_of("llama", device=device)
    kv = at_old(engine)
    over = Span(NEW + 3, NEW + 8)
    feeds = (MovedFeed(Stored(kv), NEW, NEW - OLD), Garbage(over, 4), MovedFeed(Garbage(Span(0, 2), 4), NEW + 5, 0))
    with engine.open(50, "plain") as sequence:
        positions = [*range(NEW), at(NEW).stop]
        engine.step([Row(sequence, TOKENS[: NEW + 1], positions, logits="none", feeds=feeds)])
        got = sequence.export(at(NEW))
    for own, whole in zip(got.layers, moved(engine, kv, NEW).layers, strict=True):
        assert np.all(own.keys[:, 3:8] == 7)
        np.testing.assert_array_equal(own.keys[:, :3], whole.keys[:, :3])
        np.testing.assert_array_equal(own.keys[:, 8:], whole.keys[:, 8:])


@DEVICES
def test_a_feed_of_some_layers_has_only_those_turned(device: str) -> None:
    engine = engine_of("llama", device=device)
    kv = at_old(engine)
    upper = MovedFeed(Stored(kv, layers=range(2, 4)), NEW, NEW - OLD)
    lower = Stored(Kv(at(NEW), kv.layout, kv.layers), layers=range(2))
    with engine.open(50, "plain") as sequence:
        positions = [*range(NEW), at(NEW).stop]
        engine.step([Row(sequence, TOKENS[: NEW + 1], positions, logits="none", feeds=(upper, lower))])
        got = sequence.export(at(NEW))
    for layer, (own, whole) in enumerate(zip(got.layers, moved(engine, kv, NEW).layers, strict=True)):
        np.testing.assert_array_equal(own.keys, (kv.layers[layer] if layer < 2 else whole).keys)


class Squared(nn.Module):
    """Angles that grow with the square of a position: what lies between two keys is not their distance alone."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.rotary(hidden, position_ids * position_ids)


def squared() -> HfEngine:
    model = tiny_model("llama")
    model.model.rotary_emb = Squared(model.model.rotary_emb)
    return HfEngine(model, byte_tokenizer(), name="squared", placement=choose_placement("cpu", "float32"))


def learned() -> HfEngine:
    """A model that adds its positions to the embedding."""
    return tiny_engine("opt", ffn_dim=48, word_embed_proj_dim=32)


@pytest.mark.parametrize("make", [squared, learned])
def test_a_model_whose_keys_do_not_turn_says_so_and_refuses(make: Any) -> None:
    engine = make()
    assert engine.capabilities.recompute == "none"
    assert tiny_engine("llama").capabilities.recompute == "scattered", "of one engine, not of all"
    kv = at_old(engine)
    feed = Stored(kv)
    with engine.open(50, "plain") as sequence:
        row = Row(sequence, [9], [at(NEW).stop], feeds=(Garbage(Span(0, NEW), 4), MovedFeed(feed, NEW, NEW - OLD)))
        with pytest.raises(StepRefused, match="cannot turn the keys"):
            engine.step([row])
        assert (sequence.length, feed.filled) == (0, [])
    for got, before in zip(moved(engine, kv, NEW, shift=0).layers, kv.layers, strict=True):
        np.testing.assert_array_equal(got.keys, before.keys)


class Hanging(Garbage):
    """A feed whose source does not answer until it is told to."""

    def __init__(self, span: Span, layers: int) -> None:
        super().__init__(span, layers)
        self.begun, self.release = threading.Event(), threading.Event()

    def fill(self, layer: int, out: LayerKv) -> None:
        self.begun.set()
        assert self.release.wait(30)
        super().fill(layer, out)


def test_what_a_cancelled_step_still_turns_is_no_longer_the_sequences() -> None:
    engine = tiny_engine("llama")
    feed = Hanging(at(OLD), 4)
    row_of = range(NEW, 40)
    with engine.open(40, "plain") as sequence:
        engine.step([Row.following(sequence, TOKENS[:40], logits="none")])
        kept = sequence.export(Span(0, NEW))
        with pytest.raises(Cancelled):
            feeds = (MovedFeed(feed, NEW, NEW - OLD), MovedFeed(Garbage(Span(0, 3), 4), at(NEW).stop, 7))
            row = Row(sequence, TOKENS[NEW:40], row_of, feeds=feeds)
            engine.step([row], feed.begun.is_set)
        assert sequence.length == NEW
        engine.step([Row.following(sequence, TOKENS[NEW:40], logits="none")])
        before = sequence.export(Span(0, 40))
        feed.release.set()
        for thread in threading.enumerate():
            if thread.name == "rekindle-fill":
                thread.join(30)
        after = sequence.export(Span(0, 40))
    for first, old, new in zip(kept.layers, before.layers, after.layers, strict=True):
        np.testing.assert_array_equal(first.keys, old.keys[:, :NEW])
        np.testing.assert_array_equal(new.keys, old.keys)


def texts(engine: HfEngine) -> tuple[list[int], list[int], list[int]]:
    encode = engine.tokenizer.encode
    passage = "The heron stands in shallow water and waits. It strikes at fish with its long bill. " * 3
    return encode("You answer questions."), encode("Here is what was found, in order of merit:\n" * 4), encode(passage)


@pytest.mark.real
def test_smollm2_keys_move_to_where_they_would_have_been_computed(smollm2: HfEngine) -> None:
    short, long, passage = texts(smollm2)
    spans = [Span(len(head), len(head) + len(passage)) for head in (short, long)]
    old, expected = (
        computed(smollm2, [*head, *passage], span) for head, span in zip((short, long), spans, strict=True)
    )
    shift = len(long) - len(short)
    for first, second, start, by in ((old, expected, len(long), shift), (expected, old, len(short), -shift)):
        feed = MovedFeed(Stored(first), start, by)
        with smollm2.open(feed.span.stop + 1, "plain") as sequence:
            head = (long if by > 0 else short)[:start]
            row = Row(sequence, [*head, 9], [*range(start), feed.span.stop], logits="none", feeds=(feed,))
            smollm2.step([row])
            got = sequence.export(feed.span)
        assert_near(got.layers[0].keys, second.layers[0].keys, 1e-5)
        np.testing.assert_array_equal(got.layers[0].values, first.layers[0].values)


@pytest.mark.real
def test_a_smollm2_context_moves_as_a_whole(smollm2: HfEngine) -> None:
    passage = texts(smollm2)[2]
    cache = DynamicCache()
    with torch.inference_mode():
        smollm2.model(
            torch.tensor([passage]), position_ids=torch.arange(300, 300 + len(passage))[None], past_key_values=cache
        )
    kv = computed(smollm2, passage, Span(0, len(passage)))
    feed = MovedFeed(Stored(kv), 300, 300)
    with smollm2.open(feed.span.stop + 1, "plain") as sequence:
        filler = Garbage(Span(0, 300), len(smollm2.layout.layers))
        smollm2.step([Row(sequence, [9], [feed.span.stop], logits="none", feeds=(filler, feed))])
        got = sequence.export(feed.span)
    for layer, own in enumerate(got.layers):
        assert_near(own.keys, cache.layers[layer].keys[0].float().numpy(), 2e-3)
