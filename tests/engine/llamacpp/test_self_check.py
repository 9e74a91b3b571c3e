"""What is checked when a model is loaded: a layout that is misread is never used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle.core.kv import Kv, LayerKv, Span
from rekindle.engine.base import Row
from rekindle.engine.llamacpp import engine as module
from rekindle.engine.llamacpp import state
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.state import StateLayout, UnknownLayout
from rekindle.errors import KvLost, StepRefused
from tests.engine.contract import Stored
from tests.engine.llamacpp.conftest import Load
from tests.tiny_gguf import write_llama

pytestmark = [pytest.mark.llamacpp]

TOKENS = np.random.default_rng(5).integers(3, 250, 40).tolist()


def changed(layer: LayerKv, keys: Any, values: Any) -> LayerKv:
    layer.keys[:], layer.values[:] = keys.copy(), values.copy()
    return layer


def swap_heads(layer: LayerKv) -> LayerKv:
    half = layer.keys.shape[2] // 2
    return changed(layer, np.roll(layer.keys, half, axis=2), np.roll(layer.values, half, axis=2))


def swap_keys_and_values(layer: LayerKv) -> LayerKv:
    return changed(layer, layer.values, layer.keys)


def shift_by_a_token(layer: LayerKv) -> LayerKv:
    return changed(layer, np.roll(layer.keys, 1, axis=1), np.roll(layer.values, 1, axis=1))


def turn_values(layer: LayerKv) -> LayerKv:
    """As if they stood the other way round."""
    shape = layer.values.shape
    return changed(layer, layer.keys, layer.values[0].T.reshape(shape))


MISREADINGS = [swap_heads, swap_keys_and_values, shift_by_a_token, turn_values]


@pytest.fixture(params=MISREADINGS)
def misread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is taken out of a state in the wrong way; it is put back in the right one."""
    real = StateLayout.parse

    def parse(self: StateLayout, state: np.ndarray, span: Span) -> Kv:
        kv = real(self, state, span)
        return Kv(kv.span, kv.layout, tuple(request.param(layer) for layer in kv.layers))

    monkeypatch.setattr(StateLayout, "parse", parse)


@pytest.fixture(params=MISREADINGS)
def miswritten(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is put into a state in the wrong way; it is taken out in the right one."""
    real = StateLayout.parse

    def parse(self: StateLayout, state: np.ndarray, span: Span) -> Kv:
        with monkeypatch.context() as undone:
            undone.setattr(StateLayout, "views", views)
            return real(self, state, span)

    views = StateLayout.views

    def crooked(self: StateLayout, state: np.ndarray, cells: int) -> list[LayerKv]:
        return [_Writes(view, request.param) for view in views(self, state, cells)]  # type: ignore[misc]

    monkeypatch.setattr(StateLayout, "parse", parse)
    monkeypatch.setattr(StateLayout, "views", crooked)


class _Writes:
    """Views of a layer: once both were written, they are changed."""

    def __init__(self, view: LayerKv, change: Any) -> None:
        self._view, self._change, self._missing = view, change, {"keys", "values"}
        self.keys, self.values = _Written(self, "keys"), _Written(self, "values")

    def write(self, name: str, content: np.ndarray) -> None:
        getattr(self._view, name)[:] = content
        self._missing.discard(name)
        if not self._missing:
            self._change(self._view)


class _Written:
    def __init__(self, writes: _Writes, name: str) -> None:
        self._writes, self._name = writes, name

    def __setitem__(self, _: slice, content: np.ndarray) -> None:
        self._writes.write(self._name, content)


def assert_falls_back(engine: LlamaCppEngine, caplog: pytest.LogCaptureFixture) -> None:
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1 and said[0].name == "rekindle.llamacpp", "once, and nothing else"
    assert "reuse is by checkpoint" in said[0].getMessage() and engine.name in said[0].getMessage()
    capabilities = engine.capabilities
    assert not capabilities.spans and capabilities.recompute == "none"
    assert capabilities.opaque is not None and "layout that is not known" in capabilities.opaque
    assert_goes_on_from_a_snapshot(engine)


def assert_goes_on_from_a_snapshot(engine: LlamaCppEngine) -> None:
    first = engine.open(50, engine.regime(50))
    engine.step([Row.following(first, TOKENS[:30])])
    snapshot = first.snapshot()
    (expected,) = engine.step([Row.following(first, TOKENS[30:])])
    second = engine.open(50, engine.regime(50))
    second.restore(snapshot, 30)
    (got,) = engine.step([Row.following(second, TOKENS[30:])])
    np.testing.assert_allclose(got, expected, atol=1e-4)
    with pytest.raises(StepRefused, match="snapshot"):
        first.export(Span(0, 10))
    first.close()
    second.close()


@pytest.mark.usefixtures("misread")
@pytest.mark.parametrize("flash", ["off", "on"])
def test_a_misread_layout_is_not_used(tiny: Path, load: Load, flash: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_falls_back(load(tiny, flash_attention=flash), caplog)


@pytest.mark.usefixtures("miswritten")
@pytest.mark.parametrize("flash", ["off", "on"])
def test_a_miswritten_layout_is_not_used(tiny: Path, load: Load, flash: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_falls_back(load(tiny, flash_attention=flash), caplog)


def test_positions_that_are_off_by_one_are_not_used(
    tiny: Path, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = StateLayout.write
    monkeypatch.setattr(
        StateLayout, "write", lambda self, state, span: write(self, state, Span(span.start + 1, span.stop + 1))
    )
    assert_falls_back(load(tiny), caplog)


def test_a_layout_that_cannot_be_read_is_not_used(
    tiny: Path, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(state: np.ndarray, cells: int) -> StateLayout:
        raise UnknownLayout(f"{len(state)} bytes for {cells} cells")

    monkeypatch.setattr(module, "read_layout", refuse)
    assert_falls_back(load(tiny), caplog)


def test_states_that_are_not_taken_back_are_not_used(
    tiny: Path, load: Load, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = StateLayout.write

    def crooked(self: StateLayout, state: np.ndarray, span: Span) -> None:
        write(self, state, span)
        state[0] ^= 0xFF  # the magic number

    monkeypatch.setattr(StateLayout, "write", crooked)
    assert_falls_back(load(tiny), caplog)


@pytest.mark.parametrize("kv_type", ["f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
@pytest.mark.parametrize("flash", ["off", "on"])
def test_a_sound_layout_passes_whatever_the_numbers(
    tmp_path: Path, load: Load, kv_type: str, flash: str, caplog: pytest.LogCaptureFixture
) -> None:
    if flash == "off" and kv_type.startswith("q"):
        pytest.skip("quantized KV needs flash attention")
    for seed in range(4):
        engine = load(write_llama(tmp_path / f"{seed}.gguf", seed=seed), kv_type=kv_type, flash_attention=flash)
        assert engine.capabilities.opaque is None
    assert not caplog.records


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_numbers_quantized_after_a_rotation_are_kept_by_span_and_under_a_key_of_their_own(
    tmp_path: Path, load: Load, kv_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "wide.gguf", dim=64)  # llama.cpp rotates heads of such a size
    rotated = load(path, kv_type=kv_type)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    plain = load(path, kv_type=kv_type)
    assert rotated.opaque is None and plain.opaque is None
    assert rotated._state is not None and plain._state is not None
    if rotated._state.caches[0].rotations is None:
        pytest.skip("this llama.cpp does not say in its states how it rotates")
    assert rotated._state.rotations and not plain._state.rotations
    assert rotated.identity("plain").digest != plain.identity("plain").digest
    sequence, again = rotated.open(40, "plain"), rotated.open(40, "plain")
    rotated.step([Row.following(sequence, TOKENS[:40])])
    kept = sequence.export(Span(0, 30))
    rotated.step([Row(again, TOKENS[30:40], range(30, 40), feeds=(Stored(kept),))])
    pairs = zip(again.export(Span(0, 30)).layers, kept.layers, strict=True)
    assert all(a.keys.tobytes() == b.keys.tobytes() and a.values.tobytes() == b.values.tobytes() for a, b in pairs)


def test_the_check_leaves_nothing_behind(tiny: Path, load: Load) -> None:
    engine = load(tiny, context_tokens=256, kv_tokens=256, sequences=1)
    sequence = engine.open(256, engine.regime(256))
    engine.step([Row.following(sequence, (TOKENS * 7)[:256])])
    sequence.close()


def test_kv_of_a_layout_that_turned_bad_later_is_lost_not_served(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = engine.open(50, engine.regime(50))
    engine.step([Row.following(sequence, TOKENS)])
    kv = sequence.export(Span(0, 30))
    order_of = state._order_of

    def misplaced(positions: np.ndarray, span: Span) -> np.ndarray | None:
        return order_of(positions + 5, span)

    with monkeypatch.context() as patched:
        patched.setattr(state, "_order_of", misplaced)
        with pytest.raises(KvLost, match="something else"):
            sequence.export(Span(0, 30))
    sequence.truncate(0)
    (fed,) = engine.step([Row(sequence, TOKENS[30:], range(30, 40), feeds=(Stored(kv),))])
    sequence.truncate(0)
    (cold,) = engine.step([Row.following(sequence, TOKENS)])
    np.testing.assert_allclose(fed, cold, atol=1e-2)
    sequence.close()
