"""What attention does in chunks: the same however a prompt is cut, and no mass is lost or counted twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from rekindle.chunks import scores as craft
from rekindle.chunks import scores as scoring_module
from rekindle.chunks.scores import ChunkScorer, unscored
from rekindle.core.chunk import PromptLayout, Variant, chunk_digest
from rekindle.core.kv import Span
from rekindle.engine.base import Engine, Row
from rekindle.engine.fake import FakeEngine
from rekindle.engine.hooks import Reading

TOKENS = [int(token) for token in np.random.default_rng(5).integers(3, 250, 130)]
OUTLINE = PromptLayout(20, (Span(20, 60), Span(60, 100), Span(100, 120)))  # without gaps: all mass goes to some chunk
DIGESTS = [chunk_digest(TOKENS[span.start : span.stop]) for span in (Span(0, 20), *OUTLINE.chunks)]
CHUNKS = range(1, len(DIGESTS))


@pytest.fixture(params=["fake", "hf"], scope="module")
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "fake":
        return FakeEngine()
    pytest.importorskip("torch")
    from tests.tiny import tiny_engine

    return tiny_engine("llama")


def run(engine: Engine, scoring: ChunkScorer, steps: Sequence[Span]) -> None:
    sequence = engine.open(len(TOKENS), engine.regime(len(TOKENS)))
    for span in steps:
        places = range(span.start, span.stop)
        engine.step([Row(sequence, TOKENS[span.start : span.stop], places, "none", probe=scoring.probe)])
    sequence.close()


def scored(engine: Engine, steps: Sequence[Span]) -> list[Variant]:
    scoring = ChunkScorer(OUTLINE, len(TOKENS), len(engine.layout.layers))
    run(engine, scoring, steps)
    found = [scoring.variant(chunk, DIGESTS) for chunk in CHUNKS]
    assert None not in found
    return [variant for variant in found if variant is not None]


def assert_alike(ours: Sequence[Variant], theirs: Sequence[Variant]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.scores.outside, other.scores.outside, atol=2e-3)
        np.testing.assert_allclose(one.scores.received, other.scores.received, rtol=4e-3, atol=2e-3)
        assert one.scores.intra == pytest.approx(other.scores.intra, rel=1e-4)
        assert one.before == other.before and one.span == other.span
        for a, b in zip(one.scores.earlier, other.scores.earlier, strict=True):
            assert (a.digest, a.tokens) == (b.digest, b.tokens) and a.mass == pytest.approx(b.mass, rel=1e-4)


def test_scores_of_a_prompt_in_several_steps_are_those_in_one(engine: Engine) -> None:
    whole = scored(engine, [Span(0, 130)])
    assert_alike(scored(engine, [Span(0, 33), Span(33, 64), Span(64, 65), Span(65, 130)]), whole)


def test_every_token_pays_one_in_all(engine: Engine) -> None:
    for variant in scored(engine, [Span(0, 130)]):
        scores, count = variant.scores, len(variant.span)
        assert scores.intra + sum(one.mass for one in scores.earlier) == pytest.approx(count, rel=1e-4)
        assert ((scores.outside >= 0) & (scores.outside <= 1)).all()
        assert float(scores.outside.astype(np.float64).sum()) == pytest.approx(count - scores.intra, rel=1e-2)
        assert [one.digest for one in scores.earlier] == DIGESTS[: CHUNKS.stop - 1][: len(scores.earlier)]


def test_what_all_tokens_receive_is_what_all_tokens_pay(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_module, "_EVERY", 1)  # all layers are read
    scoring = ChunkScorer(PromptLayout(1, (Span(1, 130),)), len(TOKENS), len(engine.layout.layers))
    run(engine, scoring, [Span(0, 70), Span(70, 130)])
    variant = scoring.variant(1, [chunk_digest(TOKENS[:1]), chunk_digest(TOKENS[1:])])
    head = scoring.variant(0, [chunk_digest(TOKENS[:1])])
    assert variant is not None and head is not None
    received = variant.scores.received.astype(np.float64).sum() + head.scores.received.astype(np.float64).sum()
    assert received == pytest.approx(len(TOKENS), rel=1e-3)
    assert scoring.probe.layers == range(len(engine.layout.layers))


def test_a_chunk_needs_half_of_its_tokens_seen_and_the_others_count_as_looking_outside(engine: Engine) -> None:
    for unseen, known in ((30, True), (50, False)):
        scoring = ChunkScorer(OUTLINE, len(TOKENS), len(engine.layout.layers))
        sequence = engine.open(len(TOKENS), engine.regime(len(TOKENS)))
        engine.step([Row(sequence, TOKENS[:unseen], range(unseen), "none")])
        engine.step([Row(sequence, TOKENS[unseen:], range(unseen, 130), "none", probe=scoring.probe)])
        sequence.close()
        variant = scoring.variant(1, DIGESTS)  # tokens 20 to 60
        assert (variant is not None) == known
        if variant is not None:
            assert (variant.scores.outside[:10] == 1.0).all() and (variant.scores.outside[11:] < 1.0).all()
            assert np.isclose(variant.scores.intra + variant.scores.earlier[0].mass, 40.0, rtol=0.05)
        assert scoring.variant(2, DIGESTS) is not None


def test_a_prompt_that_is_computed_once_more_is_scored_as_if_once(engine: Engine) -> None:
    whole = scored(engine, [Span(0, 130)])
    assert_alike(scored_twice(engine, [Span(0, 130)]), whole)
    assert_alike(scored_twice(engine, [Span(0, 90)]), whole)


def scored_twice(engine: Engine, lost: Sequence[Span]) -> list[Variant]:
    scoring = ChunkScorer(OUTLINE, len(TOKENS), len(engine.layout.layers))
    run(engine, scoring, lost)  # what it was computed over turned out to be lost
    run(engine, scoring, [Span(0, 64), Span(64, 130)])
    return [variant for chunk in CHUNKS if (variant := scoring.variant(chunk, DIGESTS)) is not None]


def test_scores_fit_the_numbers_they_are_kept_in() -> None:
    scoring = ChunkScorer(PromptLayout(1, (Span(1, 3),)), 3, 1)
    huge = np.full(3, 1e9, dtype=np.float32)
    sent = np.array([[2.0, 0.0], [0.5, 1.5], [np.float32(-0.5), 0.25]], dtype=np.float32)
    scoring.probe.report(Reading(0, np.arange(3), huge, huge, sent, None))
    variant = scoring.variant(1, [DIGESTS[0], DIGESTS[1]])
    assert variant is not None
    assert variant.scores.outside.tolist() == [0.0, 0.75]
    assert np.isfinite(variant.scores.received).all()


def test_a_variant_without_scores_knows_its_place_and_has_an_overhead_that_is_a_number() -> None:
    variant = unscored(OUTLINE, 2, DIGESTS, 0.25)
    assert variant.before == tuple(DIGESTS[:2]) and variant.span == OUTLINE.chunks[1] and variant.drift == 0.25
    assert len(variant.scores.outside) == len(variant.span)
    overhead = craft.fix_overhead(variant, DIGESTS[:1])
    assert np.isfinite(overhead) and overhead >= 0.0
