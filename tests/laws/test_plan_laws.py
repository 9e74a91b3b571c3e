"""Laws of plans and of what they cost: pure functions, driven at random."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from rekindle.cache.cost import FREE, Costs, Rates, machine_and_model, prior_rates, recall_costs, remember_costs
from rekindle.cache.matches import Found, Matches
from rekindle.cache.planner import PrefillSteps, make_plan
from rekindle.core.kv import KvLayout, LayerShape, Span
from rekindle.core.plan import MARGIN, Compute, Load, Plan, Tier
from rekindle.engine.fake import FakeEngine
from rekindle.json_file import JsonMemo
from rekindle.machine import home_folder
from rekindle.store.probe import ReadSpeeds

pytestmark = pytest.mark.thorough

TOKEN_BYTES = 64  # of the KV in these tests
NOW = time.time()
PRIOR = Rates((1e-3, 1e-3, 1e-7), {"memory": (1e-3, 1e-9), "disk": (1e-3, 1e-9), "coded": (1e-2, 1e-8)})


class Everywhere(dict[int, float]):
    """A measurement of every size, as the formula says."""

    def get(self, key: int, default: Any = None) -> Any:
        return 1.0

    def __contains__(self, key: object) -> bool:
        return True


MEASURED: Mapping[str, Mapping[int, float]] = {"compute": {1: 1.0}, "memory": Everywhere(), "disk": Everywhere()}

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
    measured=st.sampled_from([MEASURED, {}]),
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
def test_a_plan_is_expected_to_take_longer_than_computing_by_the_margin_at_most(
    matches: Matches, rates: Rates, cut: PrefillSteps
) -> None:
    plan = make_plan(matches, rates, cut)
    everything = Plan.computing(cut.spans(0, matches.tokens))
    assert plan.cold_seconds == pytest.approx(cost(everything, rates))
    assert plan.predicted_seconds is not None and plan.cold_seconds is not None
    assert plan.predicted_seconds <= MARGIN * plan.cold_seconds


@given(some_matches(), some_rates, some_cuts)
def test_what_a_plan_predicts_is_the_sum_of_its_steps(matches: Matches, rates: Rates, cut: PrefillSteps) -> None:
    plan = make_plan(matches, rates, cut)
    assert plan.predicted_seconds is not None and plan.cold_seconds is not None
    # What was never measured is expected to take no longer than computing.
    summed = cost(plan, rates) if rates.measured else min(cost(plan, rates), plan.cold_seconds)
    assert plan.predicted_seconds == pytest.approx(summed)


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
    other = replace(rates, load=dict(reversed(list(rates.load.items()))))
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


@given(some_matches(), some_rates, some_cuts)
def test_stored_kv_is_refused_exactly_where_every_load_was_measured_to_be_clearly_slower(
    matches: Matches, rates: Rates, cut: PrefillSteps
) -> None:
    plan = make_plan(matches, rates, cut)
    assert plan.cold_seconds is not None
    faster = [
        one
        for one in others(matches, cut)
        if cost(one, rates) <= MARGIN * plan.cold_seconds and not gains_nothing(one, plan.cold_seconds, rates)
    ]
    assert bool(plan.loads) is bool(faster if rates.measured else list(others(matches, cut)))
    assert (plan.refused_seconds is not None) is (not plan.loads and bool(list(others(matches, cut))))


@pytest.mark.parametrize("unmeasured", ["compute", "disk"])
def test_what_was_not_measured_is_tried_however_slow_it_seems(unmeasured: str) -> None:
    matches = Matches(701, 0, (Found(Span(0, 700), "disk", 700 * TOKEN_BYTES),))
    rates = Rates((0.0, 1e-3, 0.0), {"disk": (9.0, 1.0)}, measured=MEASURED)
    assert make_plan(matches, rates, PrefillSteps(2048)).reused == 0
    some = {kind: known for kind, known in MEASURED.items() if kind != unmeasured}
    assert make_plan(matches, replace(rates, measured=some), PrefillSteps(2048)).reused == 700


@given(some_matches(), plain_cuts)
def test_everything_known_is_loaded_where_loading_is_faster_than_computing(matches: Matches, cut: PrefillSteps) -> None:
    only_stored = Matches(matches.tokens, 0, matches.stored)
    rates = Rates((0.0, 1e-3, 0.0), dict.fromkeys(("memory", "disk"), (0.0, 1e-4 / TOKEN_BYTES)))
    assert make_plan(only_stored, rates, cut).reused == min(only_stored.length, matches.tokens - 1)


def test_what_is_fast_is_loaded_and_what_hangs_on_a_slow_tier_is_computed() -> None:
    stored = (Found(Span(0, 300), "memory", 300 * TOKEN_BYTES), Found(Span(300, 600), "disk", 300 * TOKEN_BYTES))
    rates = Rates((0.0, 1e-3, 0.0), {"memory": (0.0, 1e-6), "disk": (0.0, 1.0)}, measured=MEASURED)
    plan = make_plan(Matches(700, 0, stored), rates, PrefillSteps(2048))
    assert plan.loads == (Load(Span(0, 300), "memory"),)


def test_the_end_of_a_prompt_in_a_piece_of_its_own_is_loaded_with_the_rest() -> None:
    """Computing 12 tokens takes 12 ms, a load 10 ms and hardly more for the second piece."""
    stored = (Found(Span(0, 224), "disk", 224 * TOKEN_BYTES), Found(Span(224, 235), "disk", 11 * TOKEN_BYTES))
    rates = Rates((0.0, 1e-3, 0.0), {"disk": (1e-2, 1e-7)})
    assert make_plan(Matches(236, 0, stored), rates, PrefillSteps(2048)).reused == 235


def gains_nothing(plan: Plan, cold: float, rates: Rates) -> bool:
    """Whether what a plan loads spares less than the margin of computing, and takes longer than that."""
    spared = max(0.0, cold - sum(rates.compute_seconds(step.span) for step in plan.computes))
    loading = cost(plan, replace(rates, compute=(0.0, 0.0, 0.0)))
    return bool(rates.measured) and spared < (MARGIN - 1) * cold and loading > spared


def test_a_load_that_spares_less_than_it_takes_and_less_than_the_margin_is_not_tried() -> None:
    """On an H200 the ten tokens before the passages of a prompt of 160 spare a millisecond; any load takes longer."""
    rates = Rates((4e-2, 3e-5, 0.0), {"memory": (2e-3, 1e-10)}, measured={"compute": {1: 1.0}})
    head = Matches(160, 0, (Found(Span(0, 10), "memory", 10 * TOKEN_BYTES),))
    assert make_plan(head, rates, PrefillSteps(2048)).reused == 0
    assert make_plan(head, replace(rates, measured={}), PrefillSteps(2048)).reused == 10
    slower = replace(rates, compute=(4e-2, 3e-4, 0.0))  # the same tokens spare 3 ms
    assert make_plan(head, slower, PrefillSteps(2048)).reused == 10


def others(matches: Matches, cut: PrefillSteps) -> Iterator[Plan]:
    """Every plan that loads something."""
    loads: list[Load] = []
    choices: list[tuple[Load, ...]] = []
    for found in matches.stored:
        stop = cut.reusable(min(found.span.stop, matches.tokens - 1))
        if stop > found.span.start:
            choices.append((*loads, Load(Span(found.span.start, stop), found.tier)))
        loads.append(Load(found.span, found.tier))
    if stays := cut.reusable(min(matches.in_engine, matches.tokens - 1)):
        choices.append((Load(Span(0, stays), "engine"),))
    for choice in choices:
        rest = tuple(map(Compute, cut.spans(choice[-1].span.stop, matches.tokens)))
        yield Plan(matches.tokens, (*choice, *rest))


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
    assert plan.predicted_seconds is not None
    assert plan.cold_seconds is not None
    for other in others(matches, cut):
        if gains_nothing(other, plan.cold_seconds, rates):
            continue
        assert plan.predicted_seconds <= cost(other, rates) * (1 + 1e-9) + 1e-12


@given(some_matches(), some_rates)
def test_knowing_more_makes_a_plan_slower_by_the_margin_at_most(matches: Matches, rates: Rates) -> None:
    cut = PrefillSteps(10_000)
    without = make_plan(Matches(matches.tokens, 0, matches.stored[:-1]), rates, cut)
    more = make_plan(Matches(matches.tokens, 0, matches.stored), rates, cut)
    assert more.predicted_seconds is not None and without.predicted_seconds is not None
    assert more.predicted_seconds <= MARGIN * without.predicted_seconds


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


def test_a_plan_clearly_slower_than_computing_cannot_be_made() -> None:
    steps = (Load(Span(0, 5), "disk"), Compute(Span(5, 9)))
    assert Plan(9, steps, predicted_seconds=MARGIN, cold_seconds=1.0).reused == 5
    with pytest.raises(ValueError, match="slower"):
        Plan(9, steps, predicted_seconds=1.01 * MARGIN, cold_seconds=1.0)


# -- costs ---------------------------------------------------------------------------------------------------------

some_spans = st.builds(lambda start, count: Span(start, start + count), st.integers(0, 4000), st.integers(1, 2048))
measured = st.lists(st.tuples(some_spans, st.floats(1e-6, 1e3)), min_size=1, max_size=60)
PROMPT = Span(0, 1000)
SIZE = 46_000_000  # bytes of its KV
STORED = Matches(1001, 0, (Found(PROMPT, "disk", SIZE),))
SPEEDS = ReadSpeeds(memory=8e9, cached=4e9, disk=1e9)
COMPUTED = 1.5  # seconds, of the prompt


def costs_with(tier: Tier, *loads: float, probed: bool = True) -> Costs:
    """Of a machine that computes the prompt in 1.5 s, and loaded it so often from a tier."""
    costs = Costs(PRIOR)
    if probed:
        costs.probed(SPEEDS)
    for _ in range(3):
        costs.computed(PROMPT, COMPUTED)
    for taken in loads:
        costs.loaded(tier, SIZE, taken)
    return costs


def reuses(costs: Costs, tier: Tier = "disk") -> bool:
    """Whether the prompt is loaded the next time."""
    stored = (Found(PROMPT, tier, SIZE),)
    return make_plan(Matches(1001, 0, stored), costs.rates, PrefillSteps(8192)).reused == 1000


@given(measured)
def test_what_is_expected_is_never_negative_and_never_nonsense(measurements: list[tuple[Span, float]]) -> None:
    costs = Costs(PRIOR)
    for span, taken in measurements:
        costs.computed(span, taken)
        costs.loaded("disk", len(span) * TOKEN_BYTES, taken)
    for span, _ in measurements:
        assert 0 < costs.rates.compute_seconds(span) < math.inf
        assert 0 < costs.rates.load_seconds("disk", len(span) * TOKEN_BYTES) < math.inf


@given(some_spans, st.lists(st.floats(1e-4, 10), min_size=1, max_size=12), st.data())
def test_what_is_expected_is_what_was_measured_most_often(span: Span, taken: list[float], data: st.DataObject) -> None:
    """Fewer than half of the measurements change nothing, however long the machine stood still."""
    costs, stalls = Costs(PRIOR), data.draw(st.integers(0, (len(taken) - 1) // 2))
    for number, one in enumerate(data.draw(st.permutations(taken))):
        costs.computed(span, 3e4 if number < stalls else one)
    assert costs.rates.compute_seconds(span) <= max(taken) * (1 + 1e-9)


@given(st.integers(0, 2**32 - 1))
def test_noise_of_a_tenth_moves_a_prediction_by_no_more_than_that(seed: int) -> None:
    noise, truth = random.Random(seed), replace(PRIOR, compute=tuple(3 * rate for rate in PRIOR.compute))
    costs = Costs(PRIOR)
    for start in (0, 100, 1000, 3000):
        for count in (1, 7, 60, 256, 900, 2048):
            span = Span(start, start + count)
            costs.computed(span, truth.compute_seconds(span) * noise.uniform(0.9, 1.1))
    for span in (Span(0, 500), Span(3000, 5048), Span(100, 103)):
        assert costs.rates.compute_seconds(span) == pytest.approx(truth.compute_seconds(span), rel=0.11)


@given(some_spans, some_spans, st.floats(1e-4, 10))
def test_one_measurement_scales_what_nothing_was_measured_of(span: Span, other: Span, taken: float) -> None:
    """A step of a few tokens on a large GPU is all overhead: many tokens do not take as much more."""
    costs = Costs(PRIOR)
    costs.computed(span, taken)
    scale = PRIOR.compute_seconds(other) / PRIOR.compute_seconds(span)
    assert costs.rates.compute_seconds(span) == pytest.approx(taken)
    assert costs.rates.compute_seconds(other) == pytest.approx(scale * taken)


@given(st.integers(1, 10**9), st.floats(1e-4, 10))
def test_loads_say_what_a_load_of_about_their_size_takes_and_nothing_of_others(size: int, taken: float) -> None:
    costs = Costs(PRIOR)
    for _ in range(3):
        costs.loaded("disk", size, taken)
    assert costs.rates.load_seconds("disk", size) == pytest.approx(taken)
    for other in (4 * size, max(1, size // 4)):
        if other != size:
            assert costs.rates.load_seconds("disk", other) == PRIOR.load_seconds("disk", other)
    assert costs.rates.load_seconds("memory", size) == PRIOR.load_seconds("memory", size)
    assert costs.rates.load_seconds("engine", size) == 0.0


def test_new_measurements_win_over_old_ones() -> None:
    costs = Costs(PRIOR)
    for seconds, times in ((5.0, 48), (1.0, 7)):
        for _ in range(times):
            costs.computed(Span(0, 100), seconds)
    assert costs.rates.compute_seconds(Span(0, 100)) == pytest.approx(1.0)


def test_before_anything_was_measured_the_prior_holds_and_what_a_probe_read() -> None:
    costs = Costs(PRIOR)
    assert costs.rates == PRIOR
    costs.probed(SPEEDS)
    assert costs.rates.load_seconds("memory", 8 * 10**9) == pytest.approx(1.0, rel=0.01)
    assert costs.rates.load_seconds("disk", 4 * 10**9) == pytest.approx(1.0, rel=0.01)


# -- what cannot happen -----------------------------------------------------------------------------------------------


@given(st.sampled_from(["memory", "disk"]), st.lists(st.floats(1e-3, 9e4), max_size=40))
def test_whatever_loads_were_measured_to_take_the_next_identical_prompt_is_reused(
    tier: Tier, taken: list[float]
) -> None:
    """46 MB are read in 6 to 46 ms by the probe: they are never expected to take half a second, computing takes 1.5."""
    costs = costs_with(tier, *taken)
    assert reuses(costs, tier)
    assert costs.rates.load_seconds(tier, SIZE) <= 10 * SIZE / 1e9 * (1 + 1e-9)


@given(st.sampled_from(["memory", "disk", "coded", "redis"]), st.integers(1, 2), st.floats(2, 9e4))
def test_one_or_two_stalls_of_a_load_refuse_nothing(tier: Tier, stalls: int, taken: float) -> None:
    """Also where nobody could probe the disk, and on tiers that have no probe."""
    prior = replace(PRIOR, load={**PRIOR.load, "redis": (1e-3, 1e-9)})
    costs = Costs(prior)
    for _ in range(3):
        costs.computed(PROMPT, COMPUTED)
    for _ in range(stalls):
        costs.loaded(tier, SIZE, taken)
    assert reuses(costs, tier)


@given(st.floats(10.0, 9e4), st.integers(1, 12))
def test_a_stall_while_computing_never_makes_a_load_look_slow(stall: float, times: int) -> None:
    costs = costs_with("disk", 0.05, 0.05, 0.05)
    for _ in range(times):
        costs.computed(PROMPT, stall)
        costs.stepped(Span(1000, 1001), stall)
    assert reuses(costs)
    assert costs.rates.load_seconds("disk", SIZE) == pytest.approx(0.05)


@given(st.floats(2.0, 100.0), st.integers(1, 30), st.integers(0, 30))
def test_a_machine_that_becomes_busy_and_quiet_again_reuses_all_the_time(times: float, busy: int, quiet: int) -> None:
    """Beside fourteen others on two cores, computing and loading took many times as long."""
    costs = costs_with("disk", *[0.05] * 12)
    for _ in range(busy):
        costs.loaded("disk", SIZE, 0.05 * times)
        assert reuses(costs)
    costs.computed(PROMPT, COMPUTED * times)
    for _ in range(quiet):
        costs.loaded("disk", SIZE, 0.05)
        assert reuses(costs)
    if quiet >= 7:
        assert costs.rates.load_seconds("disk", SIZE) == pytest.approx(0.05)


@pytest.mark.parametrize("jump", [-1e8, -3600.0, 3600.0, 1e8, 1e12])
def test_a_clock_that_jumps_forgets_refusals_and_makes_none(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_with("disk", 9.0, 9.0, 9.0, probed=False)
    assert not reuses(costs)
    remembered = json.loads(json.dumps(costs.as_json()))
    monkeypatch.setattr("rekindle.cache.cost.time", SimpleNamespace(time=lambda: NOW + jump))
    assert reuses(costs) and reuses(Costs(PRIOR, remembered))
    for _ in range(2):
        costs.loaded("disk", SIZE, 0.05)
    assert reuses(costs)


def test_what_was_refused_is_tried_again_after_ten_minutes_and_known_better_after_two_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = NOW
    monkeypatch.setattr("rekindle.cache.cost.time", SimpleNamespace(time=lambda: now))
    costs = costs_with("disk", *[9.0] * 12, probed=False)
    tries = []
    for minute in range(60):
        now = NOW + 60 * minute
        if reuses(costs):
            tries.append(minute)
            costs.loaded("disk", SIZE, 9.0)
    assert tries == [11, 22, 33, 44, 55], "one try in ten minutes"
    now += 700
    costs.loaded("disk", SIZE, 0.05)
    assert not reuses(costs)
    now += 700
    costs.loaded("disk", SIZE, 0.05)
    assert reuses(costs) and costs.rates.load_seconds("disk", SIZE) == pytest.approx(0.05)


def test_the_first_of_each_kind_and_size_on_a_device_is_not_measured() -> None:
    """It compiles: 8,192 tokens of a model on Vulkan took 4.9 s to load in a new process, 0.6 the next time."""
    costs = Costs(PRIOR, compiles=True)
    for taken in (4.9, 0.6, 0.6):
        costs.loaded("disk", SIZE, taken)
        costs.computed(PROMPT, 10 * taken)
        costs.stepped(Span(5, 6), taken)
    assert {kind: [row[-2] for row in rows] for kind, rows in costs.as_json().items() if rows} == {
        "compute": [6.0, 6.0], "step": [0.6, 0.6], "disk": [0.6, 0.6],
    }  # fmt: skip


def test_a_new_process_on_a_gpu_tries_what_a_probe_says_is_faster() -> None:
    """8,192 tokens of an 8B shape on an H200: computed in 260 ms, 1.07 GB that the system still holds."""
    engine = engine_like("NVIDIA H200", 8_000_000_000)
    matches = Matches(8193, 0, (Found(Span(0, 8192), "disk", 1_073_741_824),))
    known = Costs(prior_rates(engine))
    known.computed(Span(0, 8192), 0.26)
    again = Costs(prior_rates(engine), json.loads(json.dumps(known.as_json())), compiles=True)
    again.probed(ReadSpeeds(memory=1.2e10, cached=6e9, disk=2.6e9))
    plan = make_plan(matches, again.rates, PrefillSteps(8192))
    assert plan.reused == 8192 and plan.predicted_seconds is not None and plan.predicted_seconds < 0.26
    for _ in range(4):
        again.loaded("disk", 1_073_741_824, 0.088)
    assert make_plan(matches, again.rates, PrefillSteps(8192)).reused == 8192


def engine_like(device: str, parameters: int = 135_000_000) -> Any:
    layout = KvLayout("float32" if device == "cpu" else "bfloat16", (LayerShape(3, 64, 64),) * 30)
    can = SimpleNamespace(decodes=device.startswith("NVIDIA"))
    return SimpleNamespace(device=device, layout=layout, parameters=parameters, attention=17_280, capabilities=can)


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
    rows = [[100.0, 5000.0, 9.0, NOW - days * 86_400] for days in (31, 400, -2)]
    assert Costs(PRIOR, {"compute": rows}).rates == PRIOR
    young = [[100.0, 5000.0, 9.0, NOW - 29 * 86_400]]
    assert Costs(PRIOR, {"compute": [*rows, *young]}).rates.compute_seconds(Span(0, 100)) == pytest.approx(9.0)


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
    st.lists(st.one_of(rubbish, st.lists(st.one_of(numbers, st.just(NOW)), min_size=3, max_size=4)), max_size=6),
)
remembered = st.one_of(rubbish, st.fixed_dictionaries({"compute": rows, "memory": rows, "disk": rows}))
KNOWN = Matches(100, 0, (Found(Span(0, 40), "memory", 40 * TOKEN_BYTES), Found(Span(40, 90), "disk", 50 * TOKEN_BYTES)))


@settings(max_examples=300)
@given(remembered)
@example({"compute": [[2, 3, 10**400, NOW]]})
@example({"compute": [[2, 3, 5e-324, NOW]]})
@example({"compute": [[2, 3, 1.0, 10**400]]})
@example({"compute": [[1e308, 3, 1e-3, NOW]]})
@example({"disk": [[-2, 1e-3, NOW]]})
@example({"compute": [[0, 0, 1.0, NOW]], "disk": [[0, 1.0, NOW]]})
@example({"compute": [[1.0, 100.0, 5000.0, 1.0, NOW]] * 3, "disk": [[1.0, 1e7, 25.6, NOW]] * 3})
def test_rubbish_among_the_remembered_costs_never_spoils_a_plan(known: Any) -> None:
    """The file is anybody's: damaged, of another version, or written by hand."""
    costs = Costs(PRIOR, json.loads(json.dumps(known)))
    plan = make_plan(KNOWN, costs.rates, PrefillSteps(256))
    assert plan.steps[-1].span.stop == 100
    assert 0 < costs.rates.compute_seconds(Span(0, 100)) < math.inf
    costs.computed(Span(0, 100), 0.5)
    assert costs.rates.compute_seconds(Span(0, 100)) > 0
    make_plan(KNOWN, costs.rates, PrefillSteps(256))
    json.dumps(costs.as_json())


def test_what_an_earlier_version_remembered_is_ignored_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """553 kB from memory were expected to take 25.6 s, by the file of a machine that had been busy."""
    engine = FakeEngine()
    rows = [[1.0, 553_000.0, 25.6, NOW]] * 9
    JsonMemo(home_folder() / "costs.json", 9).keep(machine_and_model(engine), {"memory": rows, "disk": rows})
    costs = recall_costs(engine)
    assert costs.rates == prior_rates(engine) and not caplog.records
    for _ in range(3):
        costs.loaded("memory", 553_000, 3e-3)
    remember_costs(engine, costs)
    assert recall_costs(engine).rates.load_seconds("memory", 553_000) == pytest.approx(3e-3)
