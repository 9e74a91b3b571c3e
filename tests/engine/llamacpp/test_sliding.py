"""Models with a sliding window: with `swa_full` nothing that left the window is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle import Session
from rekindle.core.kv import Span
from rekindle.engine.base import Row
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import InvalidSetting, KvLost
from tests.engine.llamacpp.conftest import Load
from tests.tiny_hybrids import WINDOW, write_gemma2

pytestmark = [pytest.mark.llamacpp]

TOKENS = np.random.default_rng(3).integers(3, 250, 12 * WINDOW).tolist()
SETTINGS: dict[str, Any] = {"engine": "llamacpp", "threads": 1, "disk_limit": "200MB", "kv_type": "f32"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma2(tmp_path_factory.mktemp("sliding") / "gemma2.gguf", context=512)


def after(engine: LlamaCppEngine, tokens: list[int]) -> np.ndarray:
    """The logits behind some tokens, from nothing."""
    sequence = engine.open(len(tokens), "plain")
    (logits,) = engine.step([Row.following(sequence, tokens)])
    sequence.close()
    return logits


def test_what_left_the_window_survives_others_that_come_and_go(path: Path, load: Load) -> None:
    engine = load(path, kv_type="f32", context_tokens=256, kv_tokens=768, sequences=6)
    plain = load(path, kv_type="f32", context_tokens=256)
    kept = engine.open(200, "plain")
    neighbours = [engine.open(90, "plain") for _ in range(4)]
    for place in range(0, 160, 20):  # their cells lie between each other
        engine.step([Row.following(kept, TOKENS[place : place + 20])])
        for number, neighbour in enumerate(neighbours):
            engine.step([Row.following(neighbour, TOKENS[place // 2 + number : place // 2 + number + 10])])
    for neighbour in neighbours[:3]:
        neighbour.close()
    large = engine.open(230, "plain")
    engine.step([Row.following(large, TOKENS[:192])])  # looks for cells everywhere
    whole = plain.open(192, "plain")
    plain.step([Row.following(whole, TOKENS[:192])])
    for span in (Span(0, 160), Span(3, 41), Span(100, 160)):
        for ours, theirs in zip(kept.export(span).layers, whole.export(span).layers, strict=True):
            np.testing.assert_allclose(ours.keys, theirs.keys, atol=1e-3)
            np.testing.assert_allclose(ours.values, theirs.values, atol=1e-3)
    kept.truncate(50)
    (logits,) = engine.step([Row.following(kept, TOKENS[50:70])])
    np.testing.assert_allclose(logits, after(plain, TOKENS[:70]), atol=1e-3)


def test_moved_keys_of_the_first_layer_are_what_computing_there_gives(path: Path, load: Load) -> None:
    engine = load(path, kv_type="f32", context_tokens=256)
    one, other, moved = (engine.open(100, "plain") for _ in range(3))
    engine.step([Row.following(one, TOKENS[:60])])
    engine.step([Row.following(other, TOKENS[100:117] + TOKENS[20:60])])
    engine.step([Row.following(moved, TOKENS[100:117])])
    moved.append(one.export(Span(20, 60)))
    first = len(engine.layout.layers) // 2  # has a window, and those without come before
    got, expected = moved.export(Span(17, 57)).layers[first], other.export(Span(17, 57)).layers[first]
    np.testing.assert_allclose(got.keys, expected.keys, atol=1e-4)
    np.testing.assert_allclose(got.values, expected.values, atol=1e-4)


def test_a_sequence_that_lost_a_part_is_not_continued(path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.engine.llamacpp.c_api import llama

    engine = load(path, context_tokens=256)
    sequence = engine.open(100, "plain")
    engine.step([Row.following(sequence, TOKENS[:80])])
    monkeypatch.setitem(llama.__dict__, "llama_memory_seq_pos_min", lambda *_: 7)
    with pytest.raises(KvLost, match="dropped a part"):
        sequence.truncate(60)


def test_a_session_goes_on_after_such_a_loss(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.engine.llamacpp.c_api import llama

    with Session(str(path), cache=str(tmp_path / "cache"), **SETTINGS) as session:
        session.generate(TOKENS[:90], max_tokens=4, min_tokens=4)
        monkeypatch.setitem(llama.__dict__, "llama_memory_seq_pos_min", lambda *_: 7)
        prompt = [*TOKENS[:80], *TOKENS[100:110]]
        reply = session.generate(prompt, max_tokens=4, min_tokens=4)
        assert reply.tokens == session.generate(prompt, max_tokens=4, min_tokens=4, reuse="off").tokens


@pytest.mark.parametrize("shared", [5, 40, 95])
def test_a_prompt_that_differs_anywhere_computes_only_what_follows(path: Path, tmp_path: Path, shared: int) -> None:
    prompt = [*TOKENS[:shared], *TOKENS[120:150]]
    with Session(str(path), cache=str(tmp_path / "cache"), **SETTINGS) as session:
        session.generate(TOKENS[:100], max_tokens=4, min_tokens=4)
        session.flush()
    with Session(str(path), cache=str(tmp_path / "cache"), **SETTINGS) as session:  # as after a restart
        reply = session.generate(prompt, max_tokens=8, min_tokens=8)
        assert reply.reuse.disk == shared
        assert reply.tokens == session.generate(prompt, max_tokens=8, min_tokens=8, reuse="off").tokens


def test_a_turn_writes_only_what_is_new(path: Path, tmp_path: Path) -> None:
    with Session(str(path), cache=str(tmp_path / "cache"), **SETTINGS) as session:
        store = session.cache.store
        assert store is not None
        session.generate(TOKENS[:100], max_tokens=1)
        session.flush()
        before = sum(row.tokens for row in store.disk.entries())
        session.generate(TOKENS[:130], max_tokens=1)
        session.flush()
        assert sum(row.tokens for row in store.disk.entries()) - before <= 30 + 32  # and the rest of a block


def test_more_sequences_than_have_room_for_a_twin_are_refused(path: Path, load: Load) -> None:
    load(path, sequences=127)
    with pytest.raises(InvalidSetting, match="up to 127, or swa_full=False"):
        load(path, sequences=128)
    load(path, sequences=128, swa_full=False)
