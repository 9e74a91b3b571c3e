"""The scheduler of steps alone: who is in the next step, how long a piece of a prompt may be, who waits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.kv import Span
from rekindle.engine.base import EngineSequence, Row
from rekindle.engine.fairness import FairShare, Requester
from rekindle.engine.fake import FakeEngine
from rekindle.engine.hooks import Probe
from rekindle.engine.step_scheduler import (
    ALONE_SECONDS,
    FIRST_PIECE_TOKENS,
    MIN_PIECE_TOKENS,
    STALL_SECONDS,
    TRY_SHARING_STEPS,
    StepCall,
    StepPart,
    StepScheduler,
)
from tests.engine.contract import Garbage

ENGINE = FakeEngine()
MAX_PIECE_TOKENS = 400
TOKEN_SECONDS = 0.001  # of a prompt
A, B, BACKGROUND = Requester("a"), Requester("b"), Requester("a", background=True)


def sequence() -> EngineSequence:
    return ENGINE.open(4000, ENGINE.regime(1))


def call(tokens: int, requester: Requester = A, **row: Any) -> StepCall:
    """The next `tokens` of a new sequence."""
    row.setdefault("positions", range(tokens))
    return StepCall([Row(sequence(), list(range(tokens)), **row)], requester)


def loading(tokens: int, requester: Requester = A) -> StepCall:
    """Tokens after a span that is loaded."""
    return call(tokens, requester, positions=range(8, 8 + tokens), feeds=(Garbage(Span(0, 8), 1),))


def scheduler(*calls: StepCall, shares: FairShare | None = None, **how: Any) -> StepScheduler:
    made = StepScheduler(shares or FairShare(), MAX_PIECE_TOKENS, **how)
    for one in calls:
        made.add(one)
    return made


def know_speed(made: StepScheduler, token_seconds: float = TOKEN_SECONDS) -> StepScheduler:
    """Let it compute a prompt at that speed."""
    prompt = call(100)
    made.add(prompt)
    made.computed([prompt.piece(100)], 100 * token_seconds)
    return made


def lengths(step: Sequence[StepPart]) -> list[int]:
    return [part.tokens for part in step]


def calls_of(step: Sequence[StepPart]) -> list[StepCall]:
    return [part.call for part in step]


def run(made: StepScheduler, seconds: float = 0.01) -> list[StepPart]:
    step = made.next_step()
    made.computed(step, seconds)
    return step


# Who is in the next step


def test_every_reply_has_its_next_token_in_a_step_and_prompts_go_with_them() -> None:
    replies, prompt = [call(1), call(1, B), call(1, BACKGROUND)], call(90)
    step = know_speed(scheduler(*replies, prompt)).next_step()
    assert set(calls_of(step)) == {*replies, prompt}
    assert lengths(step) == [1, 1, 1, 90]


def test_nobody_waits_for_nobody() -> None:
    made = scheduler()
    assert made.next_step() == [] and not made.returning


def test_without_sharing_a_step_is_one_whole_call() -> None:
    replies, prompt = [call(1), call(1)], call(2000)
    made = scheduler(prompt, *replies, together=False)
    assert [lengths(run(made)) for _ in range(3)] == [[2000], [1], [1]]


def test_of_prompts_the_foreground_comes_first_then_who_was_served_least_then_who_came_first() -> None:
    shares = FairShare()
    for app in ("a", "b"):
        shares.enter(app)
    shares.serve("a", 500)
    prompts = [call(50, BACKGROUND), call(50, A), call(50, B), call(50, B)]
    made = scheduler(*prompts, shares=shares, together=False)
    assert [calls_of(run(made)) for _ in range(4)] == [[prompts[2]], [prompts[3]], [prompts[1]], [prompts[0]]]


def test_two_apps_with_prompts_get_the_same_number_of_tokens() -> None:
    shares = FairShare()
    for app in ("a", "b"):
        shares.enter(app)
    made = know_speed(scheduler(*(call(3900, A) for _ in range(5)), call(3900, B), shares=shares), 0.01)
    for _ in range(30):
        run(made, 1.0)
        assert abs(shares.served("a") - shares.served("b")) <= ALONE_SECONDS / 0.01


def test_recomputed_tokens_share_their_step_with_replies_and_are_not_cut() -> None:
    scattered, reply = call(20, positions=range(0, 40, 2)), call(1)
    made = know_speed(scheduler(scattered, reply))
    assert sorted((part.call is reply, part.tokens) for part in run(made)) == [(False, 20), (True, 1)]


def test_what_loads_or_cannot_be_cut_shares_no_step_and_takes_turns_with_replies() -> None:
    probing = call(40, probe=Probe(lambda reading: None))
    verifying = call(3, logits="all")
    several = StepCall([*call(5).rows, *call(1).rows], A)
    singles = [loading(60), probing, verifying, several, loading(1)]
    made = know_speed(scheduler(*singles))
    for alone in singles:
        reply = call(1)
        made.add(reply)
        assert calls_of(run(made)) == [alone]
        assert calls_of(run(made)) == [reply]


def test_a_prompt_that_loaded_goes_on_with_the_others() -> None:
    made = know_speed(scheduler(loading(1000), call(1)))
    steps = [run(made, 0.25) for _ in range(3)]
    assert [lengths(step) for step in steps] == [[250], [1, 250], [MAX_PIECE_TOKENS]], "no reply waits in the end"
    assert [len(step[-1].rows[0].feeds) for step in steps] == [1, 0, 0]


def test_a_call_that_is_cancelled_is_unwanted_and_leaves() -> None:
    gone, stays = StepCall(call(500).rows, A, cancelled=lambda: True), call(500)
    made = scheduler(gone, stays)
    assert [one for one in made.waiting if one.unwanted] == [gone]
    made.remove(gone)
    assert calls_of(made.next_step()) == [stays]


# How long a piece may be


def test_a_piece_takes_as_long_as_replies_may_wait() -> None:
    assert lengths(know_speed(scheduler(call(3000), call(1))).next_step()) == [1, STALL_SECONDS / TOKEN_SECONDS]
    assert lengths(know_speed(scheduler(call(3000)), 0.004).next_step()) == [ALONE_SECONDS / 0.004]


def test_a_reply_that_ended_does_not_shorten_the_prompts_after_it() -> None:
    made = know_speed(scheduler(call(1)), 0.004)
    run(made)
    made.add(call(200))
    assert made.returning and lengths(made.next_step()) == [200]


def test_one_odd_step_hardly_changes_the_length_of_pieces() -> None:
    usual, odd = know_speed(scheduler(), 0.01), know_speed(scheduler(), 0.01)
    for made, seconds in ((usual, 0.16), (odd, 0.32)):
        made.add(call(16))
        run(made, seconds)
        made.add(call(3000))
    assert lengths(usual.next_step()) == [100]
    assert 70 <= lengths(odd.next_step())[0] < 100


def test_several_prompts_share_what_fits() -> None:
    made = know_speed(scheduler(call(100), call(100), call(100), call(100), call(1)))
    assert lengths(made.next_step()) == [1, 100, 100, 50]


@pytest.mark.parametrize(
    ("token_seconds", "tokens"), [(None, FIRST_PIECE_TOKENS), (9.0, MIN_PIECE_TOKENS), (1e-9, 400)]
)
def test_a_piece_is_neither_tiny_nor_longer_than_the_engine_wants(token_seconds: float | None, tokens: int) -> None:
    made = scheduler(call(3000))
    if token_seconds is not None:
        know_speed(made, token_seconds)
    assert lengths(made.next_step()) == [tokens]


@pytest.mark.parametrize(("tokens", "pieces"), [(250, [250]), (251, [251]), (252, [250, 2])])
def test_no_piece_leaves_one_token_over(tokens: int, pieces: list[int]) -> None:
    made = know_speed(scheduler(call(tokens)), 0.004)
    found = lengths(run(made, 1.0))
    assert [*found, *lengths(made.next_step())] == pieces


def test_steps_that_load_say_nothing_about_the_speed_of_prompts() -> None:
    made = know_speed(scheduler(loading(100), call(3000)), 0.004)
    run(made, 60.0)
    assert lengths(made.next_step()) == [250]


# Who is waited for


def test_the_replies_of_the_last_step_are_waited_for_until_they_call_again() -> None:
    replies, prompt = [call(1), call(1)], call(3000)
    made = know_speed(scheduler(*replies, prompt))
    run(made)
    assert made.returning == {reply.rows[0].sequence for reply in replies}, "the prompt is not over"
    assert not made.add(call(1)), "nobody waited for it"
    assert all(made.add(StepCall(reply.rows, A)) for reply in replies)
    assert not made.returning
    run(made)
    run(made)
    assert not made.returning, "nobody is waited for twice"


def test_where_steps_of_one_token_are_faster_tokens_are_not_shared_until_it_is_tried_again() -> None:
    made = scheduler()

    def tokens_in_step() -> int:
        made.waiting.clear()
        for _ in range(4):
            made.add(call(1))
        step = made.next_step()
        made.computed(step, 0.001 if len(step) == 1 else 0.1)
        assert len(step) > 1 or not made.returning or made._steps_since_shared >= TRY_SHARING_STEPS
        return len(step)

    made.add(call(1))
    run(made, 0.001)
    found = [tokens_in_step() for _ in range(2 * TRY_SHARING_STEPS + 2)]
    assert found == [4, *[1] * TRY_SHARING_STEPS, 4, *[1] * TRY_SHARING_STEPS]


# All of it at random

KINDS = st.sampled_from(["reply", "prompt", "loading", "scattered"])
MADE = st.tuples(KINDS, st.integers(2, 900), st.sampled_from([A, B, BACKGROUND]))


def make(kind: str, tokens: int, requester: Requester) -> StepCall:
    if kind == "scattered":
        return call(tokens, requester, positions=range(0, 2 * tokens, 2))
    return {"reply": lambda: call(1, requester), "prompt": lambda: call(tokens, requester)}.get(
        kind, lambda: loading(tokens, requester)
    )()


@given(
    arriving=st.lists(st.lists(MADE, max_size=4), max_size=12),
    leaving=st.lists(st.integers(0, 9), max_size=12),
    seconds=st.lists(st.floats(1e-5, 5.0), min_size=1, max_size=8),
)
def test_every_call_is_computed_once_in_order_and_no_reply_waits_for_two_steps(
    arriving: list[list[tuple[str, int, Requester]]], leaving: list[int], seconds: list[float]
) -> None:
    made = scheduler()
    pieces: dict[StepCall, list[Row]] = {}
    gone: set[StepCall] = set()
    skipped: set[StepCall] = set()
    number = 0
    while number < len(arriving) or made.waiting:
        for one in arriving[number] if number < len(arriving) else ():
            made.add(make(*one))
            pieces[made.waiting[-1]] = []
        if number < len(leaving) and leaving[number] < len(made.waiting):
            gone.add(made.waiting[leaving[number]])
            made.remove(made.waiting[leaving[number]])
        step = made.next_step()
        assert bool(step) == bool(made.waiting)
        assert len(set(calls_of(step))) == len(step) and set(calls_of(step)) <= set(made.waiting)
        cut = [part for part in step if part.call.divisible and not part.call.is_next_token]
        assert sum(lengths(cut)) <= MAX_PIECE_TOKENS + 1
        assert len(step) == 1 or not any(part.call.goes_alone for part in step)
        replies = {one for one in made.waiting if one.is_next_token}
        if any(not part.call.is_next_token for part in step) or made._sharing_pays:
            assert not skipped & replies - set(calls_of(step)), "a reply waits for one step that goes alone, at most"
        skipped = replies - set(calls_of(step))
        for part in step:
            pieces[part.call] += part.rows
        if step:
            made.computed(step, seconds[number % len(seconds)])
        number += 1
        assert number < 5000
    for one, rows in pieces.items():
        if one in gone:
            continue
        (whole,) = one.rows
        assert [token for row in rows for token in row.tokens] == list(whole.tokens)
        assert [place for row in rows for place in row.positions] == list(whole.positions)
        assert [row.feeds for row in rows] == [whole.feeds, *[()] * (len(rows) - 1)]
        assert [row.logits for row in rows] == [*["none"] * (len(rows) - 1), whole.logits]
        assert all(a.sequence is b.sequence for a, b in pairwise(rows))


@given(st.lists(st.tuples(st.integers(2, 900), st.sampled_from(["a", "b", "c"])), min_size=1, max_size=20))
def test_the_first_prompt_of_a_step_is_of_the_app_that_was_served_least(prompts: list[tuple[int, str]]) -> None:
    shares = FairShare()
    for app in ("a", "b", "c"):
        shares.enter(app)
    made = know_speed(scheduler(*(call(tokens, Requester(app)) for tokens, app in prompts), shares=shares))
    while made.waiting:
        served = {app: shares.served(app) for app in {one.requester.app for one in made.waiting}}
        assert served[run(made, 0.3)[0].call.requester.app] == min(served.values())
