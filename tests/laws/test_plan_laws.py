"""Laws of plans and of what they cost: pure functions, driven at random."""

from __future__ import annotations

import json
import math
import random
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rekindle.cache.cost import FREE, Costs, Rates, fit, prior_rates
from rekindle.cache.matches import Found, Matches
from rekindle.cache.planner import PrefillSteps, make_plan
from rekindle.core.kv import KvLayout, LayerShape, Span
from rekindle.core.plan import Compute, Load, Plan

pytestmark = pytest.mark.thorough

TOKEN_BYTES = 64  # of the KV in these tests
NOW = time.time()
PRIOR = Rates((1e-3, 1e-3, 1e-7), {"memory": (1e-3, 1e-9), "disk": (1e-3, 1e-9), "coded": (1e-2, 1e-8)})

seconds = st.floats(0.0, 1e3, allow_nan=False)
tiers = st.sampled_from(["memory", "disk"])


@st.composite
def some_matches(draw: st.DrawFn) -> Matches:
    """What may be known of a prompt: runs that tile `[0, n)`, and some of it in the engine."""
    tokens = draw(st.integers(1, 1500), "tokens")
    known = draw(st.integers(0, tokens), "stored")
    inner = draw(st.sets(st.integers(1, max(1, known - 1)), max_size=4), "edges")
    edges = sorted({0, known, *(edge for edge in inner if edge < known)})
    stored = tuple(Found(Span(a, b), draw(tiers), (b - a) * TOKEN_BYTES) for a, b in pairwise(edges))
    return Matches(tokens, draw(st.one_of(st.just(0), st.integers(0, tokens)), "in the engine"), stored)


some_rates = st.builds(
    Rates,
    compute=st.tuples(seconds, seconds, st.floats(0.0, 1.0)),
    load=st.fixed_dictionaries({tier: st.tuples(seconds, st.floats(0.0, 1.0)) for tier in ("memory", "disk")}),
)
some_cuts = st.builds(
    PrefillSteps, token_limit=st.integers(1, 600), piece_tokens=st.one_of(st.none(), st.integers(1, 300))
)
plain_cuts = st.builds(PrefillSteps, token_limit=st.integers(1, 600))


def cost(plan: Plan, rates: Rates) -> float:
    """What the steps of a plan take, added up here. The pieces on a tier are one load."""
    total, tiers = 0.0, set[str]()
    for step in plan.steps:
        if isinstance(step, Compute):
            fixed, per_token, per_pair = rates.compute
            count = len(step.span)
            total += fixed + per_token * count + per_pair * count * (step.span.start + count / 2)
        elif step.tier != "engine":
            fixed, per_byte = rates.load[step.tier]
            total += (0.0 if step.tier in tiers else fixed) + per_byte * len(step.span) * TOKEN_BYTES
            tiers.add(step.tier)
    return total


def compute_spans(plan: Plan) -> list[Span]:
    return [step.span for step in plan.computes]


# -- plans ---------------------------------------------------------------------------------------------------------


@given(some_matches(), some_rates, some_cuts)
def test_a_plan_covers_every_token_exactly_once_and_computes_the_last(
    matches: Matches, rates: Rates, cut: PrefillSteps
) -> None:
    plan = make_plan(matches, rates, cut)
    cells = [cell for step in plan.steps for cell in range(step.span.start, step.span.stop)]
    assert cells == list(range(matches.tokens))
    last = plan.steps[-1]
    assert isinstance(last, Compute) and matches.tokens - 1 in last.span
    assert plan.reused <= matches.tokens - 1
    assert [isinstance(step, Load) for step in plan.steps] == sorted(
        (isinstance(step, Load) for step in plan.steps), reverse=True
    ), "loads come first"


@given(some_matches(), some_rates, some_cuts)
def test_a_plan_loads_only_what_is_known_from_where_it_is(matches: Matches, rates: Rates, cut: PrefillSteps) -> None:
    for load in make_plan(matches, rates, cut).loads:
        if load.tier == "engine":
            assert load.span.start == 0 and load.span.stop <= matches.in_engine
        else:
            (found,) = [found for found in matches.stored if found.span.start == load.span.start]
            assert found.tier == load.tier and load.span.stop <= found.span.stop


@given(some_matches(), some_rates, some_cuts)
def test_no_step_is_longer_than_the_engine_takes(matches: Matches, rates: Rates, cut: PrefillSteps) -> None:
    most = cut.piece_tokens or cut.token_limit
    assert all(0 < len(span) <= most for span in compute_spans(make_plan(matches, rates, cut)))


@given(some_matches(), some_rates, some_cuts)
def test_a_plan_is_never_expected_to_be_slower_than_computing_everything(
    matches: Matches, rates: Rates, cut: PrefillSteps
) -> None:
    plan = make_plan(matches, rates, cut)
    everything = Plan.computing(cut.spans(0, matches.tokens))
    assert plan.cold_seconds == pytest.approx(cost(everything, rates))
    assert plan.predicted_seconds is not None and plan.cold_seconds is not None
    assert plan.predicted_seconds <= plan.cold_seconds


@given(some_matches(), some_rates, some_cuts)
def test_what_a_plan_predicts_is_the_sum_of_its_steps(matches: Matches, rates: Rates, cut: PrefillSteps) -> None:
    plan = make_plan(matches, rates, cut)
    assert plan.predicted_seconds is not None and plan.cold_seconds is not None
    # Cutting the rest at other places may cost more fixed parts than it saves; what is free is reused all the same.
    assert plan.predicted_seconds == pytest.approx(min(cost(plan, rates), plan.cold_seconds))


@given(some_matches(), st.integers(1, 300), some_rates)
def test_a_deterministic_plan_reuses_whole_pieces_and_cuts_where_the_cold_one_does(
    matches: Matches, piece: int, rates: Rates
) -> None:
    cut = PrefillSteps(256, piece)
    plan = make_plan(matches, rates, cut)
    cold = make_plan(Matches(matches.tokens), rates, cut)
    assert plan.reused % piece == 0
    assert cold.reused == 0
    spans = compute_spans(plan)
    assert spans == compute_spans(cold)[-len(spans) :], "the same tokens are computed in the same company"


@given(some_matches(), some_rates, st.integers(1, 300))
def test_pieces_do_not_depend_on_how_much_the_engine_takes(matches: Matches, rates: Rates, piece: int) -> None:
    assert make_plan(matches, rates, PrefillSteps(1, piece)) == make_plan(matches, rates, PrefillSteps(10_000, piece))


@given(some_matches(), some_rates, some_cuts)
def test_the_same_arguments_give_the_same_plan(matches: Matches, rates: Rates, cut: PrefillSteps) -> None:
    again = Matches(matches.tokens, matches.in_engine, tuple(matches.stored), matches.match)
    other = Rates(tuple(rates.compute), dict(reversed(list(rates.load.items()))))
    assert make_plan(matches, rates, cut) == make_plan(again, other, cut)


@given(some_matches(), plain_cuts)
def test_where_loads_are_free_everything_known_is_reused(matches: Matches, cut: PrefillSteps) -> None:
    """What tests of reuse rely on."""
    assert make_plan(matches, FREE, cut).reused == min(matches.length, matches.tokens - 1)


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # many have nothing in the engine
@given(some_matches(), some_rates, plain_cuts)
def test_what_is_in_the_engine_is_reused_whatever_the_estimates_say(
    matches: Matches, rates: Rates, cut: PrefillSteps
) -> None:
    stored = matches.stored[-1].span.stop if matches.stored else 0
    assume(matches.in_engine >= stored > 0 or (matches.in_engine > 0 and not stored))
    plan = make_plan(matches, rates, cut)
    assert plan.reused == min(matches.in_engine, matches.tokens - 1)
    assert all(load.tier == "engine" for load in plan.loads)


@given(some_matches(), some_cuts, tiers, st.floats(1e-3, 10))
def test_nothing_is_loaded_where_loading_is_slower_than_computing(
    matches: Matches, cut: PrefillSteps, tier: str, slower: float
) -> None:
    only_stored = Matches(
        matches.tokens, 0, tuple(Found(found.span, tier, found.size_bytes) for found in matches.stored)
    )
    per_token = 1e-3
    rates = Rates((0.0, per_token, 0.0), {tier: (0.0, (per_token / TOKEN_BYTES) * (1 + slower))})
    plan = make_plan(only_stored, rates, cut)
    assert plan.loads == ()
    assert plan.predicted_seconds == plan.cold_seconds


@given(some_matches(), plain_cuts)
def test_everything_known_is_loaded_where_loading_is_faster_than_computing(matches: Matches, cut: PrefillSteps) -> None:
    only_stored = Matches(matches.tokens, 0, matches.stored)
    rates = Rates((0.0, 1e-3, 0.0), dict.fromkeys(("memory", "disk"), (0.0, 1e-4 / TOKEN_BYTES)))
    assert make_plan(only_stored, rates, cut).reused == min(only_stored.length, matches.tokens - 1)


def test_what_is_fast_is_loaded_and_what_hangs_on_a_slow_tier_is_computed() -> None:
    stored = (Found(Span(0, 300), "memory", 300 * TOKEN_BYTES), Found(Span(300, 600), "disk", 300 * TOKEN_BYTES))
    rates = Rates((0.0, 1e-3, 0.0), {"memory": (0.0, 1e-6), "disk": (0.0, 1.0)})
    plan = make_plan(Matches(700, 0, stored), rates, PrefillSteps(2048))
    assert plan.loads == (Load(Span(0, 300), "memory"),)


def test_the_end_of_a_prompt_in_a_piece_of_its_own_is_loaded_with_the_rest() -> None:
    """Computing 12 tokens takes 12 ms, a load 10 ms and hardly more for the second piece."""
    stored = (Found(Span(0, 224), "disk", 224 * TOKEN_BYTES), Found(Span(224, 235), "disk", 11 * TOKEN_BYTES))
    rates = Rates((0.0, 1e-3, 0.0), {"disk": (1e-2, 1e-7)})
    assert make_plan(Matches(236, 0, stored), rates, PrefillSteps(2048)).reused == 235


@given(some_matches(), some_rates, some_cuts)
@example(
    Matches(100, 90, (Found(Span(0, 96), "disk", 96 * TOKEN_BYTES),)),
    Rates((0, 1, 0), {"disk": (1e3, 0)}),
    PrefillSteps(256),
)
def test_no_other_way_to_reuse_what_is_known_is_expected_to_be_faster(
    matches: Matches, rates: Rates, cut: PrefillSteps
) -> None:
    """Including what is in the engine, where the store knows some tokens more that take long to load."""
    plan = make_plan(matches, rates, cut)
    others: list[tuple[Load, ...]] = []
    loads: list[Load] = []
    for found in matches.stored:
        stop = cut.reusable(min(found.span.stop, matches.tokens - 1))
        if stop > found.span.start:
            others.append((*loads, Load(Span(found.span.start, stop), found.tier)))
        loads.append(Load(found.span, found.tier))
    stays = cut.reusable(min(matches.in_engine, matches.tokens - 1))
    if stays:
        others.append((Load(Span(0, stays), "engine"),))
    assert plan.predicted_seconds is not None
    for other in others:
        rest = tuple(map(Compute, cut.spans(other[-1].span.stop, matches.tokens)))
        alternative = cost(Plan(matches.tokens, (*other, *rest)), rates)
        assert plan.predicted_seconds <= alternative * (1 + 1e-9) + 1e-12


@given(some_matches(), some_rates)
def test_knowing_more_never_makes_a_plan_slower(matches: Matches, rates: Rates) -> None:
    cut = PrefillSteps(10_000)
    without = make_plan(Matches(matches.tokens, 0, matches.stored[:-1]), rates, cut)
    more = make_plan(Matches(matches.tokens, 0, matches.stored), rates, cut)
    assert more.predicted_seconds is not None and without.predicted_seconds is not None
    assert more.predicted_seconds <= without.predicted_seconds


@given(st.integers(1, 60), st.data())
def test_steps_that_do_not_tile_the_prompt_are_no_plan(tokens: int, data: st.DataObject) -> None:
    """Every way to break a good plan by one token is refused."""
    edges = sorted(
        {0, tokens, *data.draw(st.sets(st.integers(1, max(1, tokens - 1)), max_size=4))} & {*range(tokens + 1)}
    )
    spans = [Span(a, b) for a, b in pairwise(edges)]
    good = tuple(map(Compute, spans))
    assert Plan(tokens, good).reused == 0
    which = data.draw(st.integers(0, len(spans) - 1))
    span = spans[which]
    broken = [Span(span.start, span.stop + 1), Span(span.start, span.start)]
    if span.start:
        broken.append(Span(span.start - 1, span.stop))
    for bad in broken:
        steps = [*good]
        steps[which] = Compute(bad)
        with pytest.raises(ValueError, match="plan"):
            Plan(tokens, tuple(steps))
    with pytest.raises(ValueError, match="plan"):
        Plan(tokens + 1, good)
    with pytest.raises(ValueError, match="computing token"):
        Plan(tokens, (*good[:-1], Load(spans[-1], "disk")))


def test_a_plan_slower_than_computing_cannot_be_made() -> None:
    steps = (Load(Span(0, 5), "disk"), Compute(Span(5, 9)))
    with pytest.raises(ValueError, match="slower"):
        Plan(9, steps, predicted_seconds=2.0, cold_seconds=1.0)


# -- costs ---------------------------------------------------------------------------------------------------------

some_spans = st.builds(lambda start, count: Span(start, start + count), st.integers(0, 4000), st.integers(1, 2048))
measured = st.lists(st.tuples(some_spans, st.floats(1e-6, 1e3)), min_size=1, max_size=60)


@given(measured)
def test_fitted_costs_are_never_negative_and_never_nonsense(measurements: list[tuple[Span, float]]) -> None:
    costs = Costs(PRIOR)
    for span, taken in measurements:
        costs.computed(span, taken)
        costs.loaded("disk", len(span) * TOKEN_BYTES, taken)
    rates = costs.rates
    assert len(rates.compute) == 3 and len(rates.load["disk"]) == 2
    assert all(c >= 0 and math.isfinite(c) for c in (*rates.compute, *rates.load["disk"]))
    for span, _ in measurements:
        assert rates.compute_seconds(span) >= 0
        assert rates.load_seconds("disk", len(span) * TOKEN_BYTES) >= 0


coefficient = st.floats(1e-5, 1e-2)


DESIGN = [(start, count) for start in (0, 100, 1000, 3000) for count in (1, 7, 60, 256, 900, 2048)]


@given(st.floats(1e-3, 0.1), coefficient, st.floats(1e-8, 1e-5), st.permutations(DESIGN))
def test_exact_measurements_give_back_the_coefficients(
    fixed: float, per_token: float, per_pair: float, design: list[tuple[int, int]]
) -> None:
    costs = Costs(PRIOR)
    for start, count in design:
        costs.computed(Span(start, start + count), fixed + per_token * count + per_pair * count * (start + count / 2))
    for start, count in ((0, 500), (1500, 1), (3000, 2048)):
        exact = fixed + per_token * count + per_pair * count * (start + count / 2)
        assert costs.rates.compute_seconds(Span(start, start + count)) == pytest.approx(exact, rel=0.01)


@given(st.integers(0, 2**32 - 1))
def test_noise_of_a_tenth_moves_a_prediction_by_no_more_than_that(seed: int) -> None:
    noise = random.Random(seed)
    truth = Rates((0.01, 1e-3, 1e-6), {})
    costs = Costs(PRIOR)
    for start, count in DESIGN * 2:
        taken = truth.compute_seconds(Span(start, start + count))
        costs.computed(Span(start, start + count), taken * noise.uniform(0.9, 1.1))
    for start, count in ((0, 500), (3000, 2048)):
        wanted = truth.compute_seconds(Span(start, start + count))
        assert costs.rates.compute_seconds(Span(start, start + count)) == pytest.approx(wanted, rel=0.1)


@given(st.sampled_from([(0.0, 1e-3, 0.0), (0.02, 0.0, 0.0), (0.0, 0.0, 1e-6), (0.01, 1e-3, 0.0), (0.0, 1e-3, 1e-6)]))
def test_what_costs_nothing_is_found_to_cost_nothing(truth: tuple[float, float, float]) -> None:
    rows = [(1.0, float(n), n * (s + n / 2)) for s in (0, 500, 2000) for n in (1, 10, 100, 1000)]
    found = fit([(*row, sum(a * b for a, b in zip(truth, row, strict=True))) for row in rows])
    assert found == pytest.approx(truth, rel=1e-3, abs=1e-9)


@given(st.floats(1e-4, 1e-1), st.floats(1e-10, 1e-7))
def test_exact_loads_give_back_the_coefficients(fixed: float, per_byte: float) -> None:
    costs = Costs(PRIOR)
    for size in (1_000, 20_000, 400_000, 9_000_000, 50_000_000):
        costs.loaded("disk", size, fixed + per_byte * size)
    got = costs.rates.load_seconds("disk", 3_000_000)
    assert got == pytest.approx(fixed + per_byte * 3_000_000, rel=0.02)
    assert costs.rates.load_seconds("memory", 3_000_000) == PRIOR.load_seconds("memory", 3_000_000)
    assert costs.rates.load_seconds("engine", 3_000_000) == 0.0


@given(some_spans, some_spans, st.floats(1e-4, 10))
def test_one_measurement_scales_the_prior(span: Span, other: Span, taken: float) -> None:
    """A step of a few tokens on a large GPU is all overhead: many tokens do not take as much more."""
    costs = Costs(PRIOR)
    costs.computed(span, taken)
    scale = PRIOR.compute_seconds(other) / PRIOR.compute_seconds(span)
    assert costs.rates.compute_seconds(span) == pytest.approx(taken)
    assert costs.rates.compute_seconds(other) == pytest.approx(scale * taken)


def test_a_tiny_load_says_nothing_of_what_a_large_one_takes() -> None:
    costs = Costs(PRIOR)
    costs.loaded("coded", 92_160, 0.14)  # the first one: most of it is getting ready
    assert costs.rates.load_seconds("coded", 20_000_000) == pytest.approx(0.14 + 0.2)  # by the prior
    costs.loaded("coded", 20_000_000, 0.2)
    assert costs.rates.load_seconds("coded", 40_000_000) == pytest.approx(0.26, rel=0.1)


def test_new_measurements_win_over_old_ones() -> None:
    costs = Costs(PRIOR)
    for _ in range(48):
        costs.computed(Span(0, 100), 5.0)
    for _ in range(48):
        costs.computed(Span(0, 100), 1.0)
    assert costs.rates.compute_seconds(Span(0, 100)) == pytest.approx(1.0, rel=0.05)


def test_before_anything_was_measured_the_prior_holds() -> None:
    assert Costs(PRIOR).rates == PRIOR
    assert fit([]) == ()


def engine_like(device: str, parameters: int = 135_000_000) -> Any:
    layout = KvLayout("float32" if device == "cpu" else "bfloat16", (LayerShape(3, 64, 64),) * 30)
    can = SimpleNamespace(decodes=device.startswith("NVIDIA"))
    return SimpleNamespace(device=device, layout=layout, parameters=parameters, attention=17_280, capabilities=can)


@pytest.mark.parametrize(
    ("device", "tokens", "tier", "loads"),
    [
        ("cpu", 64, "disk", True),  # a small model on any processor of today
        ("cpu", 4096, "coded", True),
        ("NVIDIA H200", 64, "memory", False),
        ("NVIDIA H200", 700, "disk", False),
    ],
)
def test_the_prior_knows_where_loading_pays(
    device: str, tokens: int, tier: Any, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.cache.cost.usable_cores", lambda: 4)
    engine = engine_like(device)
    stored = Found(Span(0, tokens), tier, tokens * engine.layout.token_bytes)
    plan = make_plan(Matches(tokens + 20, 0, (stored,)), prior_rates(engine), PrefillSteps(8192))
    assert bool(plan.loads) is loads


def test_coded_kv_is_expected_later_where_the_processor_decodes_it() -> None:
    on_device, on_host = (prior_rates(engine_like(device)).load_seconds("coded", 10**9) for device in ("NVIDIA", "mps"))
    assert on_device < on_host / 4


def test_a_larger_model_or_a_slower_device_is_expected_to_compute_longer() -> None:
    span = Span(0, 1000)
    small, large, fast = (
        prior_rates(engine_like(*kind)).compute_seconds(span)
        for kind in (("cpu", 10**8), ("cpu", 10**9), ("NVIDIA H200", 10**8))
    )
    assert fast < small < large


def test_what_was_measured_more_than_a_month_ago_is_forgotten() -> None:
    rows = [[1.0, 100.0, 5000.0, 9.0, NOW - days * 86_400] for days in (31, 400, -2)]
    assert Costs(PRIOR, {"compute": rows}).rates == PRIOR
    young = [[1.0, 100.0, 5000.0, 9.0, NOW - 29 * 86_400]]
    assert Costs(PRIOR, {"compute": [*rows, *young]}).rates.compute_seconds(Span(0, 100)) == pytest.approx(9.0)


@given(st.floats(2.1, 50.0), st.integers(2, 20))
def test_a_machine_that_becomes_busy_is_noticed_at_once_and_so_is_one_that_is_idle_again(
    times: float, count: int
) -> None:
    costs, size = Costs(PRIOR), 10**7

    def expected(*taken: float) -> float:
        for seconds in taken:
            costs.loaded("disk", size, seconds)
        return costs.rates.load_seconds("disk", size)

    assert expected(*[0.1] * count) == pytest.approx(0.1)
    assert 0.099 * math.sqrt(times) <= expected(0.1 * times) < 0.1 * times, "it may be a moment"
    assert expected(*[0.1 * times] * 8) >= 0.045 * times
    assert expected(0.1) <= 0.21


@given(st.floats(0.8, 1.25), st.floats(1e-6, 1e-3), st.permutations(DESIGN))
def test_another_size_is_no_change_of_the_machine(
    noise: float, per_token: float, design: list[tuple[int, int]]
) -> None:
    costs = Costs(PRIOR)
    for number, (start, count) in enumerate(design):
        costs.computed(Span(start, start + count), (0.01 + per_token * count) * (noise if number % 2 else 1.0))
    assert costs.rates.compute_seconds(Span(0, 500)) == pytest.approx(0.01 + per_token * 500, rel=0.5)


def test_a_machine_that_became_busy_between_two_prefills_still_loads() -> None:
    """As it was measured beside fourteen others on two cores: the shorter prefill took longer."""
    costs = Costs(PRIOR)
    costs.computed(Span(0, 757), 3.3)
    for seconds in (9.6, 12.2, 9.7, 7.7):
        costs.computed(Span(0, 155), seconds)
        for token in range(8):
            costs.stepped(Span(155 + token, 156 + token), 2.9)
        found = make_plan(
            Matches(155, stored=(Found(Span(0, 155), "disk", 7_000_000),)), costs.rates, PrefillSteps(512)
        )
        assert found.reused == 154


def test_tries_in_vain_become_rare() -> None:
    """What takes three times as long as computing is tried less and less often."""
    costs, tries = Costs(PRIOR), []
    costs.loaded("disk", 10**7, 0.3)
    for request in range(200):
        if costs.rates.load_seconds("disk", 10**7) <= 0.1:
            costs.loaded("disk", 10**7, 0.3)
            tries.append(request)
        else:
            costs.refused({"disk"})
    gaps = [b - a for a, b in pairwise(tries)]
    assert 3 <= len(tries) <= 6 and all(b > 1.5 * a for a, b in pairwise(gaps))


@given(measured)
def test_what_was_measured_survives_a_restart(measurements: list[tuple[Span, float]]) -> None:
    costs = Costs(PRIOR)
    for span, taken in measurements:
        costs.computed(span, taken)
        costs.loaded("memory", len(span) * TOKEN_BYTES, taken)
    again = Costs(PRIOR, json.loads(json.dumps(costs.as_json())))
    assert again.rates == costs.rates


numbers = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 5e-324, 1e308, -1e308, 1e-320, 0, -0.0, True, math.inf, math.nan]),
)
rubbish = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=12,
)
rows = st.one_of(
    rubbish,
    st.lists(st.one_of(rubbish, st.lists(st.one_of(numbers, st.just(NOW)), min_size=4, max_size=5)), max_size=6),
)
remembered = st.one_of(rubbish, st.fixed_dictionaries({"compute": rows, "memory": rows, "disk": rows}))
KNOWN = Matches(100, 0, (Found(Span(0, 40), "memory", 40 * TOKEN_BYTES), Found(Span(40, 90), "disk", 50 * TOKEN_BYTES)))


@settings(max_examples=300)
@given(remembered)
@example({"compute": [[1, 2, 3, 10**400, NOW]]})
@example({"compute": [[1, 2, 3, 5e-324, NOW]]})
@example({"compute": [[1, 2, 3, 1.0, 10**400]]})
@example({"compute": [[1, 1e308, 3, 1e-3, NOW]]})
@example({"disk": [[-1, -2, 1e-3, NOW]]})
@example({"compute": [[0, 0, 0, 1.0, NOW]], "disk": [[0, 0, 1.0, NOW]]})
def test_rubbish_among_the_remembered_costs_never_spoils_a_plan(known: Any) -> None:
    """The file is anybody's: damaged, of another version, or written by hand."""
    costs = Costs(PRIOR, json.loads(json.dumps(known)))
    plan = make_plan(KNOWN, costs.rates, PrefillSteps(256))
    assert plan.steps[-1].span.stop == 100
    assert all(c >= 0 and math.isfinite(c) for c in costs.rates.compute)
    costs.computed(Span(0, 100), 0.5)
    assert costs.rates.compute_seconds(Span(0, 100)) > 0
    make_plan(KNOWN, costs.rates, PrefillSteps(256))
    json.dumps(costs.as_json())
