"""Models whose state is not plain KV: what was kept whole goes on as if it had never been away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle.core.kv import PAGES, Kv, Span
from rekindle.engine.base import Row
from rekindle.engine.llamacpp import engine as module
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.sequence import LlamaSequence
from rekindle.engine.llamacpp.state import UnknownLayout
from rekindle.errors import KvLost, StepRefused
from tests.engine.llamacpp.conftest import Load
from tests.tiny_hybrids import OPAQUE

pytestmark = [pytest.mark.llamacpp]

TOKENS = np.random.default_rng(5).integers(3, 250, 200).tolist()
FORCED = "forced"


@pytest.fixture(params=[*OPAQUE, FORCED])
def path(request: pytest.FixtureRequest, tiny: Path, opaque_files: dict[str, Path]) -> Path:
    """A file of each kind; of the last, the layout is plain KV that somebody does not understand."""
    if request.param != FORCED:
        return opaque_files[request.param]

    def refuse(state: np.ndarray, cells: int) -> None:
        raise UnknownLayout("forced")

    request.getfixturevalue("monkeypatch").setattr(module, "read_layout", refuse)
    return tiny


@pytest.fixture
def opaque(path: Path, load: Load) -> LlamaCppEngine:
    return load(path, swa_full=False)


def opened(engine: LlamaCppEngine, capacity: int = 200) -> LlamaSequence:
    return engine.open(capacity, engine.regime(capacity))


def computed(engine: LlamaCppEngine, count: int, capacity: int = 200) -> LlamaSequence:
    sequence = opened(engine, capacity)
    engine.step([Row.following(sequence, TOKENS[:count], logits="none")])
    return sequence


def attention(engine: LlamaCppEngine, sequence: LlamaSequence) -> Kv | None:
    """What is restored beside a snapshot: of a split state, the KV of its attention layers."""
    return sequence.export(Span(0, sequence.length)) if engine.capabilities.split else None


def assert_near(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(got - expected).max() <= 5e-3 * np.abs(expected).max()


def test_it_says_why(path: Path, opaque: LlamaCppEngine) -> None:
    capabilities = opaque.capabilities
    expected = "forced" if path.stem == "tiny" else OPAQUE[path.stem][1]
    assert not capabilities.spans and expected in (capabilities.opaque or "")
    assert (capabilities.recompute, capabilities.layer_feeds, capabilities.crowded) == ("none", False, True)
    assert capabilities.split == (path.stem in ("lfm2", "gemma2"))
    assert (opaque.layout == PAGES) != capabilities.split, "what is kept are pages, or also the KV of tokens"


@pytest.mark.parametrize("count", [1, 5, 15, 16, 17, 60, 150])
def test_a_snapshot_goes_on_as_the_sequence_would(count: int, opaque: LlamaCppEngine) -> None:
    """Also past the sliding window, which is sixteen tokens wide."""
    first = computed(opaque, count)
    snapshot, kv = first.snapshot(), attention(opaque, first)
    (expected,) = opaque.step([Row.following(first, TOKENS[count : count + 20], logits="all")])
    second = opened(opaque)
    second.restore(snapshot, count, kv)
    assert second.length == count and len(second.snapshot()) == len(snapshot)
    (got,) = opaque.step([Row.following(second, TOKENS[count : count + 20], logits="all")])
    assert_near(got, expected)
    for token in TOKENS[count + 20 : count + 40]:  # and on, token by token
        a, b = opaque.step([Row.following(first, [token]), Row.following(second, [token])])
        assert_near(b, a)


def gone_on(engine: LlamaCppEngine, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The logits behind `count` tokens, and those behind a snapshot of them in the same sequence."""
    sequence = computed(engine, count)
    snapshot, kv = sequence.snapshot(), attention(engine, sequence)
    (expected,) = engine.step([Row.following(sequence, TOKENS[count : count + 20], logits="all")])
    sequence.truncate(0)
    sequence.restore(memoryview(snapshot), count, kv)
    (got,) = engine.step([Row.following(sequence, TOKENS[count : count + 20], logits="all")])
    sequence.close()
    return got, expected


def test_the_same_state_in_the_same_place_goes_on_with_the_same_bits(path: Path, opaque: LlamaCppEngine) -> None:
    """A snapshot holds of a sliding window only what is still in it, and restoring puts that at the buffer's start.

    So the tokens in a window are in the same cells up to its width (16 here). Later they are in others, and kernels
    that add several cells at once group them otherwise: bits are equal where the window's first cell is a multiple of
    what a kernel adds at once, which divides 64 on every processor, and else but for rounding.
    """
    for count in (10, 16, 50, 64 + 16):
        got, expected = gone_on(opaque, count)
        if path.stem == "gemma2" and count == 50:
            assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
        else:
            np.testing.assert_array_equal(got, expected)


def test_a_snapshot_is_not_changed_by_what_comes_later(opaque: LlamaCppEngine) -> None:
    sequence = computed(opaque, 30)
    before = sequence.snapshot()
    copy = bytes(bytearray(before))
    opaque.step([Row.following(sequence, TOKENS[30:60])])
    assert before == copy and sequence.snapshot() != before


def test_another_engine_over_the_same_file_takes_the_snapshot(path: Path, load: Load, opaque: LlamaCppEngine) -> None:
    first = computed(opaque, 40)
    snapshot, kv = first.snapshot(), attention(opaque, first)
    (expected,) = opaque.step([Row.following(first, TOKENS[40:50])])
    other = load(path, swa_full=False, context_tokens=256, sequences=3, batch_tokens=100)
    assert other.identity(other.regime(1)).digest == opaque.identity(opaque.regime(1)).digest
    second = opened(other)
    second.restore(snapshot, 40, kv)
    (got,) = other.step([Row.following(second, TOKENS[40:50])])
    assert_near(got, expected)


def test_engines_that_cannot_read_each_others_snapshots_have_different_identities(path: Path, load: Load) -> None:
    """Else what one keeps, the other would find, fail to restore, and never replace."""
    off, on = load(path, swa_full=False, flash_attention="off"), load(path, swa_full=False, flash_attention="on")
    first, second = computed(off, 20), opened(on)
    try:
        second.restore(first.snapshot(), 20, attention(off, first))
    except KvLost:
        assert on.identity(on.regime(1)).digest != off.identity(off.regime(1)).digest


def test_rows_of_several_sequences_are_computed_as_each_alone(opaque: LlamaCppEngine) -> None:
    alone = []
    for start in (0, 20, 40):
        sequence = opened(opaque)
        (logits,) = opaque.step([Row.following(sequence, TOKENS[start : start + 30], logits="all")])
        alone.append(logits)
        sequence.close()
    sequences = [opened(opaque) for _ in alone]
    rows = [
        Row.following(s, TOKENS[start : start + 30], logits="all")
        for s, start in zip(sequences, (0, 20, 40), strict=True)
    ]
    for got, expected in zip(opaque.step(rows), alone, strict=True):
        assert_near(got, expected)
    snapshots = [s.snapshot() for s in sequences]
    assert len({bytes(s) for s in snapshots}) == 3, "each has its own"


def test_a_cut_into_steps_changes_nothing_but_rounding(opaque: LlamaCppEngine) -> None:
    (whole,) = opaque.step([Row.following(opened(opaque), TOKENS[:100])])
    for size in (1, 7, 33):
        sequence = opened(opaque)
        for start in range(0, 100, size):
            (logits,) = opaque.step([Row.following(sequence, TOKENS[start : min(100, start + size)])])
        assert_near(logits, whole)
        sequence.close()


def test_bytes_that_are_no_snapshot_are_lost_and_the_sequence_is_still_empty(opaque: LlamaCppEngine) -> None:
    source = computed(opaque, 30)
    snapshot, kv = source.snapshot(), attention(opaque, source)
    (expected,) = opaque.step([Row.following(source, TOKENS[30:40])])
    sequence = opened(opaque)
    cuts = [snapshot[:length] for length in (0, 3, 8, 11, 40, len(snapshot) // 2, len(snapshot) - 1)]
    for wrong in (*cuts, snapshot + b"\0", bytes(len(snapshot)), b"\xff" * len(snapshot), snapshot[4:] + snapshot[:4]):
        with pytest.raises(KvLost):
            sequence.restore(wrong, 30, kv)
        assert sequence.length == 0
    (cold,) = opaque.step([Row.following(sequence, TOKENS[:40])])
    assert_near(cold, expected)
    sequence.truncate(0)
    sequence.restore(snapshot, 30, kv)
    (warm,) = opaque.step([Row.following(sequence, TOKENS[30:40])])
    assert_near(warm, expected)


@pytest.mark.parametrize("length", [1, 29, 31, 100])
def test_a_snapshot_of_another_length_is_lost(length: int, opaque: LlamaCppEngine) -> None:
    """Going on from it would put the next token at the wrong position."""
    snapshot = computed(opaque, 30).snapshot()
    sequence = opened(opaque)
    with pytest.raises(KvLost):
        sequence.restore(snapshot, length)
    assert sequence.length == 0


def test_a_snapshot_of_nothing_is_lost(opaque: LlamaCppEngine) -> None:
    sequence = opened(opaque)
    with pytest.raises(KvLost):
        sequence.restore(sequence.snapshot(), 1)
    assert sequence.length == 0


def test_a_snapshot_of_another_model_is_lost(opaque_files: dict[str, Path], load: Load) -> None:
    engines = {name: load(path, swa_full=False) for name, path in opaque_files.items()}
    snapshots = {name: computed(engine, 20).snapshot() for name, engine in engines.items()}
    for name, engine in engines.items():
        for other, snapshot in snapshots.items():
            sequence = opened(engine)
            if name != other:
                with pytest.raises(KvLost):
                    sequence.restore(snapshot, 20)
                assert sequence.length == 0
            sequence.close()


def test_what_it_cannot_do_is_refused(opaque: LlamaCppEngine) -> None:
    sequence = computed(opaque, 30)
    snapshot = sequence.snapshot()
    with pytest.raises(StepRefused, match="cannot forget a part"):
        sequence.truncate(10)
    with pytest.raises(StepRefused, match="Only an empty sequence"):
        sequence.restore(snapshot, 30)
    if opaque.capabilities.split:
        with pytest.raises(StepRefused, match="split: restore it with the KV of all 30 tokens"):
            opened(opaque).restore(snapshot, 30)
        with pytest.raises(StepRefused, match="split: restore it with the KV of all 30 tokens"):
            opened(opaque).restore(snapshot, 30, sequence.export(Span(0, 29)))
    else:
        with pytest.raises(StepRefused, match="no plain KV"):
            sequence.export(Span(0, 10))
    with pytest.raises(StepRefused, match="cannot be moved"):
        sequence.append(Kv(Span(0, 0), opaque.layout, ()))
    with pytest.raises(StepRefused, match="do not fit the sequence's capacity"):
        opened(opaque, 29).restore(snapshot, 30)
    sequence.truncate(30)
    assert sequence.length == 30 and sequence.snapshot() == snapshot
    sequence.truncate(0)
    assert sequence.length == 0


def test_its_size_is_that_of_its_state(opaque: LlamaCppEngine) -> None:
    sequence = opened(opaque)
    assert sequence.size_bytes == 0
    opaque.step([Row.following(sequence, TOKENS[:30])])
    plain = 30 * opaque.layout.token_bytes if opaque.capabilities.split else 0
    assert sequence.size_bytes >= len(sequence.snapshot()) + plain > 1000


def test_a_sequence_that_is_used_again_remembers_nothing(opaque: LlamaCppEngine) -> None:
    (expected,) = opaque.step([Row.following(first := opened(opaque), TOKENS[:20])])
    first.close()
    for start in range(0, 100, 20):
        sequence = opened(opaque)
        opaque.step([Row.following(sequence, TOKENS[start : start + 50])])
        sequence.close()
    (got,) = opaque.step([Row.following(opened(opaque), TOKENS[:20])])
    assert_near(got, expected)


def test_all_sequences_can_be_open_at_once(path: Path, load: Load) -> None:
    engine = load(path, swa_full=False, sequences=8)
    sequences = [opened(engine, 60) for _ in range(8)]
    rows = [Row.following(s, TOKENS[i : i + 40]) for i, s in enumerate(sequences)]
    together = engine.step(rows)
    for sequence in sequences:
        sequence.close()
    for i in (0, 7):
        (alone,) = engine.step([Row.following(sequence := opened(engine), TOKENS[i : i + 40])])
        assert_near(together[i], alone)
        sequence.close()


def test_an_engine_with_spans_gives_and_takes_no_snapshots(tiny: Path, load: Load) -> None:
    engine = load(tiny)
    sequence = computed(engine, 10)
    with pytest.raises(StepRefused, match="plain KV"):
        sequence.snapshot()
    with pytest.raises(StepRefused):
        opened(engine).restore(b"x", 10)
