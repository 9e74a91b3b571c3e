"""Laws of plans that reuse chunks: pure functions, driven at random."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.recompute_policies import RECOMPUTE_POLICIES, only_the_set, policy_of
from rekindle.cache.cost import Rates, prior_rates
from rekindle.cache.matches import Found, Matches
from rekindle.cache.planner import PrefillSteps, make_plan
from rekindle.chunks.match import QUESTION_TOKENS, match_chunks
from rekindle.chunks.prefill import plan_chunk_reuse
from rekindle.chunks.select import RecomputePolicy
from rekindle.core.chunk import ChunkDigest, ChunkMatch, ChunkScores, EarlierChunk, PromptLayout, Variant, unmeasured
from rekindle.core.kv import Span
from rekindle.core.plan import Compute, Load, Plan, ReuseChunks
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from tests.laws.test_plan_laws import TOKEN_BYTES, some_rates

CUT = PrefillSteps(128)
_TIERS: tuple[Literal["memory", "disk"], ...] = ("memory", "disk")
tiers = st.sampled_from(_TIERS)


@dataclass(frozen=True, eq=False)
class Stored:
    """A variant that could be loaded."""

    id: int
    variant: Variant
    tier: Literal["memory", "disk"]
    size_bytes: int


@dataclass(frozen=True)
class Prompt:
    """A prompt with chunks, what is known of its beginning, and of its chunks."""

    matches: Matches
    prompt_layout: PromptLayout
    chunks: tuple[ChunkMatch, ...]


def a_variant(draw: st.DrawFn, number: int, count: int) -> Variant:
    outside = np.full(count, draw(st.floats(0.0, 1.0, width=16)), dtype=np.float16)
    earlier = (EarlierChunk(ChunkDigest(bytes(16)), 4, draw(st.floats(0.0, 100.0))),)
    scores = ChunkScores(outside, outside, draw(st.floats(0.0, 100.0)), earlier)
    return Variant(ChunkDigest(bytes([number] * 16)), Span(8, 8 + count), scores)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    head = draw(st.integers(1, 60))
    place, spans = head, list[Span]()
    for _ in range(draw(st.integers(1, 5))):
        place += draw(st.integers(1, 6))  # its number
        spans.append(Span(place, place + draw(st.integers(16, 90))))
        place = spans[-1].stop
    tokens = place + draw(st.integers(1, 40))
    picked = []
    for number, span in enumerate(spans, start=1):
        digest = ChunkDigest(bytes([number] * 16))
        if draw(st.booleans()):
            variant = a_variant(draw, number, len(span))
            known = Stored(draw(st.integers(1, 99)), variant, draw(tiers), len(span) * TOKEN_BYTES)
            picked.append(ChunkMatch(span, digest, known, overhead=draw(st.floats(0.0, 1.5))))
        else:
            picked.append(ChunkMatch(span, digest))
    stored = draw(st.integers(0, tokens))
    edge = draw(st.integers(0, stored))
    runs = [Span(a, b) for a, b in ((0, edge), (edge, stored)) if b > a]
    found = tuple(Found(span, draw(tiers), len(span) * TOKEN_BYTES) for span in runs)
    in_engine = draw(st.one_of(st.just(0), st.integers(0, tokens)))
    return Prompt(Matches(tokens, in_engine, found), PromptLayout(head, tuple(spans)), tuple(picked))


@st.composite
def recompute_policies(draw: st.DrawFn) -> RecomputePolicy:
    name = draw(st.sampled_from([*RECOMPUTE_POLICIES, "deviation", "outside*lead"]))
    return policy_of(name, draw(st.one_of(st.none(), st.floats(0.0, 1.0))))


def plans(
    prompt: Prompt, recompute_policy: RecomputePolicy, rates: Rates, token_limit: int = 10_000
) -> tuple[Plan, Plan]:
    """The exact plan, and the one that may reuse chunks."""
    exact = make_plan(prompt.matches, rates, CUT)
    return exact, plan_chunk_reuse(exact, prompt.prompt_layout, prompt.chunks, recompute_policy, rates, token_limit)


def spans_of(plan: Plan) -> list[Span]:
    return [span for step in plan.steps for span in (step.spans if isinstance(step, ReuseChunks) else (step.span,))]


@given(prompts(), recompute_policies(), some_rates)
def test_a_plan_that_reuses_chunks_has_every_token_once_and_computes_the_last(
    prompt: Prompt, recompute_policy: RecomputePolicy, rates: Rates
) -> None:
    _, plan = plans(prompt, recompute_policy, rates)
    places = [place for span in spans_of(plan) for place in range(span.start, span.stop)]
    assert sorted(places) == list(range(prompt.matches.tokens))
    last = plan.steps[-1]
    assert isinstance(last, Compute) and last.span.stop == prompt.matches.tokens


@given(prompts(), recompute_policies(), some_rates)
def test_only_whole_stored_chunks_are_reused_each_from_its_own_variant(
    prompt: Prompt, recompute_policy: RecomputePolicy, rates: Rates
) -> None:
    _, plan = plans(prompt, recompute_policy, rates)
    known = {chunk.span: chunk.known.id for chunk in prompt.chunks if chunk.known is not None}
    reuse = plan.reuse_chunks or ReuseChunks((), (), recompute_policy.name, recompute_policy.budget)
    assert [known.get(span) for span in reuse.spans] == list(reuse.variants)
    assert list(reuse.spans) == sorted(reuse.spans, key=lambda span: span.start)
    assert (reuse.recompute_policy, reuse.budget) == (recompute_policy.name, recompute_policy.budget)


@given(prompts(), recompute_policies(), some_rates)
def test_what_is_loaded_exactly_was_loaded_by_the_exact_plan(
    prompt: Prompt, recompute_policy: RecomputePolicy, rates: Rates
) -> None:
    exact, plan = plans(prompt, recompute_policy, rates)
    assert plan.reused <= exact.reused
    assert all(isinstance(step, Load) for step in plan.steps[: len(plan.loads)])
    places = {place: load.tier for load in exact.loads for place in range(load.span.start, load.span.stop)}
    assert all(places[at] == load.tier for load in plan.loads for at in range(load.span.start, load.span.stop))
    if plan.reuse_chunks is not None:  # nothing that was known exactly is thrown away but the beginning of a chunk
        assert plan.reused == min(exact.reused, plan.reuse_chunks.spans[0].start)
        assert all(span.stop > exact.reused for span in plan.reuse_chunks.spans)


@given(prompts(), recompute_policies(), some_rates)
def test_a_plan_that_reuses_chunks_is_never_expected_to_be_slower_than_the_exact_one(
    prompt: Prompt, recompute_policy: RecomputePolicy, rates: Rates
) -> None:
    exact, plan = plans(prompt, recompute_policy, rates)
    assert plan.predicted_seconds is not None and exact.predicted_seconds is not None
    assert plan.predicted_seconds <= exact.predicted_seconds
    assert plan.steps == exact.steps or plan.predicted_seconds < exact.predicted_seconds


@given(prompts(), recompute_policies(), some_rates, st.integers(1, 400))
def test_no_pass_has_more_tokens_than_it_may(
    prompt: Prompt, recompute_policy: RecomputePolicy, rates: Rates, most: int
) -> None:
    exact, plan = plans(prompt, recompute_policy, rates, most)
    assert plan.steps == exact.steps or sum(len(step.span) for step in plan.computes) <= most


@given(prompts(), recompute_policies(), some_rates)
def test_the_same_arguments_give_the_same_plan(prompt: Prompt, recompute_policy: RecomputePolicy, rates: Rates) -> None:
    assert plans(prompt, recompute_policy, rates) == plans(prompt, recompute_policy, rates)


@given(prompts(), some_rates, st.sampled_from(["rekindle", "leading", "random", "h2o"]))
def test_where_all_tokens_would_be_recomputed_no_chunk_is_reused(prompt: Prompt, rates: Rates, name: str) -> None:
    exact, plan = plans(prompt, policy_of(name, 1.0), rates)
    assert plan is exact and plan.reuse_chunks is None


@given(prompts(), recompute_policies(), some_rates)
def test_without_chunk_reuse_the_same_is_loaded_and_the_rest_computed(
    prompt: Prompt, recompute_policy: RecomputePolicy, rates: Rates
) -> None:
    _, plan = plans(prompt, recompute_policy, rates)
    instead = plan.without_chunk_reuse(CUT.spans(plan.reused, plan.tokens))
    assert instead.loads == plan.loads and instead.reuse_chunks is None
    assert [place for span in spans_of(instead) for place in range(span.start, span.stop)] == list(range(plan.tokens))


def test_chunk_reuse_gives_way_to_an_exact_plan_that_is_expected_to_be_faster() -> None:
    """What the exact plan loads from disk is free; what chunk reuse loads from memory takes too long."""
    span = Span(40, 140)
    variant = Variant(
        ChunkDigest(bytes(16)), span, ChunkScores(np.zeros(100, np.float16), np.zeros(100, np.float16), 1.0, ())
    )
    chunk = ChunkMatch(span, variant.digest, Stored(1, variant, "memory", 100 * TOKEN_BYTES), overhead=0.1)
    rates = Rates(compute=(0.0, 1e-3, 0.0), load={"memory": (1e3, 0.0), "disk": (0.0, 0.0)})
    found = (Found(Span(0, 60), "disk", 60 * TOKEN_BYTES),)
    exact = make_plan(Matches(150, 0, found), rates, CUT)
    assert exact.reused == 60
    plan = plan_chunk_reuse(exact, PromptLayout(36, (span,)), [chunk], policy_of("leading"), rates, 10_000)
    refused = plan.refused_chunks
    assert plan == replace(exact, refused_chunks=refused) and refused is not None
    assert refused.tokens == 100 and refused.seconds > 1e3 and refused.computing_seconds == exact.predicted_seconds
    assert str(refused).startswith("100 tokens stand in an earlier prompt; moving them would take 1,00")


def test_a_file_that_stood_in_an_earlier_prompt_is_reused_by_a_small_model_that_nothing_was_measured_of() -> None:
    """SmolLM2 on a CPU, with the default budget: of 2,946 tokens 1,411 stand in another prompt."""
    span = Span(500, 1911)
    scores = unmeasured(len(span), span.start)
    variant = Variant(ChunkDigest(bytes(16)), span, scores)
    token_bytes = 2 * 4 * 3 * 64 * 30
    chunk = ChunkMatch(span, variant.digest, Stored(1, variant, "memory", len(span) * token_bytes), change=1.0)
    layout = SimpleNamespace(numpy_dtype=np.dtype("float32"))
    engine = SimpleNamespace(
        device="cpu", layout=layout, parameters=134_515_008, attention=9 * 64 * 30,
        capabilities=SimpleNamespace(decodes=False),
    )  # fmt: skip
    rates = prior_rates(cast(Engine, engine))
    exact = make_plan(Matches(2946), rates, CUT)
    new = Span(span.stop, 2946 - QUESTION_TOKENS)
    chunks = [chunk, ChunkMatch(new, ChunkDigest(bytes(16)))]
    plan = plan_chunk_reuse(exact, PromptLayout(500, (span, new)), chunks, RecomputePolicy(), rates, 10_000)
    assert plan.reuse_chunks is not None and plan.refused_chunks is None


def test_what_chunk_reuse_takes_beside_its_parts_is_charged() -> None:
    span = Span(20, 120)
    variant = Variant(
        ChunkDigest(bytes(16)), span, ChunkScores(np.zeros(100, np.float16), np.zeros(100, np.float16), 1.0, ())
    )
    chunk = ChunkMatch(span, variant.digest, Stored(1, variant, "memory", 100 * TOKEN_BYTES), overhead=0.1)
    layout, policy = PromptLayout(16, (span,)), policy_of("leading", 0.1)
    for beside, reuses in (((0.0, 1.0), True), ((0.0, 2.0), True), ((0.0, 3.5), False), ((100.0, 1.0), False)):
        rates = Rates(compute=(0.0, 1.0, 0.0), load={"memory": (0.0, 0.0)}, chunks=beside)
        exact = make_plan(Matches(130), rates, CUT)
        plan = plan_chunk_reuse(exact, layout, [chunk], policy, rates, 10_000)
        assert (plan.reuse_chunks is not None) is reuses


@pytest.mark.parametrize(("head", "again"), [(16, 0), (150, 10)])
def test_the_published_way_is_charged_for_what_it_computes_and_no_more(head: int, again: int) -> None:
    """After a long head that is new, which is computed first, the question is computed again."""
    span = Span(head + 4, head + 104)
    variant = Variant(
        ChunkDigest(bytes(16)), span, ChunkScores(np.zeros(100, np.float16), np.zeros(100, np.float16), 1.0, ())
    )
    chunk = ChunkMatch(span, variant.digest, Stored(1, variant, "memory", 100 * TOKEN_BYTES), overhead=0.1)
    rates = Rates(compute=(0.0, 1.0, 0.0), load={"memory": (0.0, 0.0)})
    exact = make_plan(Matches(span.stop + 10), rates, CUT)
    plan = plan_chunk_reuse(exact, PromptLayout(head, (span,)), [chunk], policy_of("cache-craft"), rates, 10_000)
    assert plan.reuse_chunks is not None and plan.predicted_seconds == head + 4 + 10 + 10 + again


@given(prompts(), st.sampled_from(RECOMPUTE_POLICIES))
def test_picking_keeps_order_and_takes_the_variant_with_the_least_overhead(prompt: Prompt, name: str) -> None:
    digests = (ChunkDigest(b"head" * 4), *(chunk.digest for chunk in prompt.chunks))
    found = {chunk.digest: [chunk.known] for chunk in prompt.chunks if chunk.known is not None}
    picked = match_chunks(prompt.prompt_layout, digests, only_the_set(digests, found) if name == "set-cache" else found)
    assert [one.span for one in picked] == list(prompt.prompt_layout.chunks)
    for one, chunk in zip(picked, prompt.chunks, strict=True):
        assert one.known is None or one.known is chunk.known
        if name != "set-cache":
            assert one.known is chunk.known


@pytest.mark.parametrize("budget", [-0.1, 1.1, float("inf")])
def test_a_budget_that_is_no_share_is_refused(budget: float) -> None:
    with pytest.raises(InvalidSetting, match="recompute_budget"):
        policy_of("rekindle", budget)


def test_an_unknown_recompute_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidSetting, match="rekindle, leading"):
        policy_of("magic")
    with pytest.raises(InvalidSetting):
        policy_of("seen*magic")
