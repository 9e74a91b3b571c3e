"""Drafts: whatever they say, a reply is what it is without them. Only the steps are fewer."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rekindle import Session
from rekindle.cache.cost import FREE, Costs
from rekindle.core.grammar import Grammar
from rekindle.core.keys import token_bytes
from rekindle.core.kv import LayerKv
from rekindle.core.reply import Reply
from rekindle.core.request import MAX_DRAFTS, Request
from rekindle.engine.base import Engine, Logits, Row
from rekindle.engine.fake import FakeEngine
from rekindle.errors import Cancelled, InvalidPrompt, InvalidSetting
from rekindle.session import draft as draft_module
from rekindle.session.draft import Drafts
from rekindle.session.reply_stream import ReplyStream
from tests.lora import fake_pairs, save_lora
from tests.parity.engines import each, make, needs
from tests.parity.sessions import cancel_when_asked

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]

PROMPT = tuple(range(40, 75))
COUNT = 40
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # replies take a while: what fails is not made smaller
ENDLESS = {"max_tokens": COUNT, "min_tokens": COUNT}


class Noting(FakeEngine):
    """Notes how many tokens each row of its steps has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.steps: list[list[int]] = []

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.steps.append([len(row.tokens) for row in rows])
        return super().step(rows, cancelled)


class Rounding(Noting):
    """An engine like those that people use: tokens that are computed together come out a little different."""

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        found = super().step(rows, cancelled)
        noise = np.random.default_rng(len(self.steps))
        return [
            one if row.logits != "all" else one + noise.uniform(-4e-4, 4e-4, one.shape).astype(np.float32)
            for row, one in zip(rows, found, strict=True)
        ]


@cache
def engine_of(kind: str) -> Engine:
    return make(kind)


def told(stream: ReplyStream) -> dict[str, Any]:
    """Everything that a reader gets to see of a reply, piece by piece."""
    pieces = [(str(piece), [one.chosen.token for one in piece.logprobs]) for piece in stream]
    reply = stream.reply
    return {
        "pieces": pieces,
        "text": reply.text,
        "tokens": reply.tokens,
        "finish": reply.finish_reason,
        "drawn": [(one.chosen.token, [other.token for other in one.top]) for one in reply.logprobs],
        "usage": (reply.usage.prompt_tokens, reply.usage.completion_tokens),
    }


def alone(kind: str, prompt: Any, **options: Any) -> dict[str, Any]:
    with Session(engine_of(kind), cache="off") as session:
        return told(session.stream(prompt, **options))


def reply_of(engine: Engine, prompt: Any, settings: dict[str, Any] | None = None, **options: Any) -> Reply:
    with Session(engine, cache="off", **(settings or {})) as session:
        return session.stream(prompt, **options).reply


def changed(tokens: Sequence[int], rng: random.Random) -> list[int]:
    """A reply with some tokens replaced, left out, or added."""
    made = list(tokens)
    for _ in range(rng.randrange(4)):
        place = rng.randrange(len(made) + 1)
        act = rng.randrange(3)
        if act == 0:
            made[place : place + 1] = [rng.randrange(258)]
        elif act == 1:
            del made[place : place + rng.randrange(1, 5)]
        else:
            made[place:place] = [rng.randrange(258) for _ in range(rng.randrange(1, 6))]
    return made


TOKENS = st.lists(st.integers(0, 257), min_size=1, max_size=40)
PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=30)
HOW = st.one_of(
    st.just({"temperature": 0.0}),
    st.builds(lambda seed, heat: {"temperature": heat, "seed": seed}, st.integers(0, 99), st.sampled_from([0.3, 1.0])),
    st.builds(lambda seed: {"temperature": 0.9, "top_p": 0.8, "top_k": 12, "seed": seed}, st.integers(0, 99)),
    st.builds(
        lambda seed, heat: {"temperature": heat, "repetition_penalty": 1.3, "seed": seed},
        st.integers(0, 99),
        st.sampled_from([0.0, 0.7]),
    ),
)


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    limit = draw(st.integers(0, 20))
    how = {**draw(HOW), "max_tokens": limit, "min_tokens": draw(st.integers(0, limit))}
    if draw(st.booleans()):
        how["logprobs"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        how["stop"] = [draw(st.text(st.characters(codec="ascii"), min_size=1, max_size=2))]
    return how


@settings(max_examples=40, phases=QUICK)
@given(PROMPTS, questions(), st.lists(TOKENS, max_size=3), st.randoms(use_true_random=False))
def test_a_reply_is_the_same_with_any_draft(
    prompt: list[int], how: dict[str, Any], drafts: list[list[int]], rng: random.Random
) -> None:
    """Random drafts, and its own text changed at random places, longer than it may be, or beyond its stop."""
    expected = alone("fake", prompt, **how)
    longer = alone("fake", prompt, **{**how, "max_tokens": how["max_tokens"] + 9, "stop": ()})["tokens"]
    for some in (drafts, [longer], [changed(longer, rng), *drafts]):
        answers = rng.choice(["off", "verified"])
        assert alone("fake", prompt, **how, drafts=some, answers=answers) == expected


@needs("hf")
@settings(max_examples=15, phases=QUICK)
@given(PROMPTS, questions(), st.randoms(use_true_random=False))
def test_a_reply_of_a_rounding_engine_is_the_same_with_any_draft(
    prompt: list[int], how: dict[str, Any], rng: random.Random
) -> None:
    how["logprobs"] = None  # the order of those that were not drawn may change with the last digits
    expected = alone("hf", prompt, **how)
    for draft in (expected["tokens"], changed(expected["tokens"], rng), [rng.randrange(320) for _ in range(20)]):
        assert alone("hf", prompt, **how, drafts=[draft], answers="verified") == expected


@pytest.mark.parametrize("stop", [1, 4, 9, 20])
def test_a_stop_string_inside_what_was_guessed_ends_the_reply_there(stop: int) -> None:
    whole = reply_of(FakeEngine(), PROMPT, **ENDLESS)
    text = FakeEngine().tokenizer.decode(whole.tokens)
    how = {**ENDLESS, "stop": [text[stop : stop + 2]]}
    expected = alone("fake", PROMPT, **how)
    assert alone("fake", PROMPT, **how, drafts=[whole.tokens]) == expected and expected["finish"] == "stop"


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "[a-c]{3,12}"), Grammar("regex", "(abc)*d?"), Grammar("regex", "")]
)
def test_a_grammar_is_obeyed_as_without_a_draft(grammar: Grammar) -> None:
    how: dict[str, Any] = {"grammar": grammar, "max_tokens": 20}
    expected = alone("fake", PROMPT, **how)
    for draft in (expected["tokens"], list(b"abcabcabcabc"), list(b"zzzz"), [*expected["tokens"][:3], 7, 7]):
        assert alone("fake", PROMPT, **how, drafts=[draft], answers="verified") == expected


@each("fake", "hf")
def test_likelihoods_stand_where_they_stand_without_a_draft(kind: str) -> None:
    engine = engine_of(kind)
    how = {"max_tokens": 20, "min_tokens": 20, "logprobs": 2}
    plain = reply_of(engine, PROMPT, **how)
    drafted = reply_of(engine, PROMPT, **how, drafts=[[*plain.tokens[:9], 5, *plain.tokens[10:]]])
    assert drafted.usage.drafted_tokens >= 9 and len(drafted.logprobs) == len(plain.logprobs)
    for ours, theirs in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert ours.chosen.token == theirs.chosen.token
        assert ours.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-4)


# -- what it takes


def test_a_right_draft_takes_few_steps_and_a_wrong_one_hardly_more() -> None:
    plain = Noting()
    tokens = reply_of(plain, PROMPT, **ENDLESS).tokens
    right = Noting()
    reply = reply_of(right, PROMPT, **ENDLESS, drafts=[tokens])
    assert reply.tokens == tokens and reply.usage.drafted_tokens == COUNT - 1 - (len(right.steps) - 1)
    assert len(right.steps) < len(plain.steps) / 4
    wrong = Noting()
    reply = reply_of(wrong, PROMPT, **ENDLESS, drafts=[[255 - token % 256 for token in tokens]])
    assert reply.tokens == tokens and reply.usage.drafted_tokens <= 2
    assert len(wrong.steps) <= len(plain.steps)


def test_the_rate_of_a_reply_does_not_count_the_trial_of_its_first_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = reply_of(FakeEngine(), PROMPT, **ENDLESS).tokens

    def slow_trial(_engine: Engine) -> int:
        time.sleep(0.5)
        return 8

    monkeypatch.setattr(draft_module, "max_exact_step", slow_trial)
    started = time.perf_counter()
    reply = reply_of(FakeEngine(), PROMPT, **ENDLESS, drafts=[tokens])
    seconds = time.perf_counter() - started
    assert reply.usage.drafted_tokens and reply.timings.decode_seconds <= seconds - 0.5
    assert reply.timings.tokens_per_second == pytest.approx((COUNT - 1) / reply.timings.decode_seconds)


def test_a_draft_with_a_wrong_word_is_followed_again_behind_it() -> None:
    tokens = reply_of(FakeEngine(), PROMPT, **ENDLESS).tokens
    engine = Noting()
    draft = [*tokens[:10], (tokens[10] + 1) % 256, *tokens[11:]]
    reply = reply_of(engine, PROMPT, **ENDLESS, drafts=[draft])
    assert reply.tokens == tokens and len(engine.steps) < COUNT / 2


def test_a_draft_longer_than_the_reply_may_be_never_needs_more_room() -> None:
    """The context is just as long as prompt and reply: one position more would be refused."""
    engine = FakeEngine(context_tokens=len(PROMPT) + COUNT)
    tokens = reply_of(FakeEngine(), PROMPT, max_tokens=2 * COUNT, min_tokens=2 * COUNT).tokens
    reply = reply_of(engine, PROMPT, max_tokens=2 * COUNT, min_tokens=COUNT, drafts=[tokens])
    assert reply.tokens == tokens[:COUNT] and reply.finish_reason == "length"
    for count in (0, 1, 2):
        assert reply_of(FakeEngine(), PROMPT, max_tokens=count, drafts=[tokens]).tokens == tokens[:count]


def test_drafts_of_nothing_of_other_models_and_of_text() -> None:
    plain = reply_of(FakeEngine(), PROMPT, **ENDLESS)
    for drafts in ([], [[]], [""], [[10**9]], [[2**63]], [[258, *plain.tokens]]):
        reply = reply_of(FakeEngine(), PROMPT, **ENDLESS, drafts=drafts)
        assert reply.tokens == plain.tokens and reply.usage.drafted_tokens == 0
    beyond = reply_of(FakeEngine(), PROMPT, **ENDLESS, drafts=[[*plain.tokens[:6], 400, *plain.tokens[6:]]])
    assert beyond.tokens == plain.tokens and beyond.usage.drafted_tokens == 5
    text = reply_of(FakeEngine(), PROMPT, max_tokens=8, grammar=Grammar("regex", "abc{6}"), drafts="abcccccc")
    assert text.text == "abcccccc" and text.usage.drafted_tokens == 6  # the first and the last one are drawn as always


def rates_of(step: tuple[float, float, float]) -> Costs:
    return Costs(replace(FREE, step=step))


def test_a_draft_is_checked_only_where_that_is_expected_to_be_sooner() -> None:
    text = list(range(60))
    cheap, dear = (Drafts([text], costs=rates_of((1.0, per_token, 0.0))) for per_token in (0.1, 1.0))
    assert cheap.pays(7, 100) and dear.pays(7, 100), "all of it was right so far: seven steps are spared"
    for drafts in (cheap, dear):
        assert drafts.guess(text[:1])
        drafts.checked(7, 0)
    assert cheap.pays(7, 100) and not dear.pays(7, 100)
    while cheap.pays(7, 100):
        cheap.checked(7, 0)
    far = Drafts([text], costs=rates_of((1.0, 0.0, 1e-4)))
    far.checked(7, 5)
    assert far.pays(7, 0) and not far.pays(7, 1_000_000), "every token attends to all before it"
    mended = Drafts([text], costs=rates_of((1.0, 0.1, 0.0)))
    for taken in (0, 7, 7, 0, 7):
        mended.checked(7, taken)
    assert mended.pays(7, 100), "one that goes on after a wrong token is followed"


def test_a_draft_that_does_not_pay_is_left_alone_and_the_reply_is_the_same(tmp_path: Path) -> None:
    tokens = reply_of(FakeEngine(), PROMPT, **ENDLESS).tokens
    wrong = [*tokens[:3], *(255 - token % 256 for token in tokens[3:])]
    engine = Noting()
    with Session(engine, cache=tmp_path / "cache") as session:
        session.cache.kv.costs = rates_of((1.0, 1.0, 0.0))  # a step of eight takes as long as four and a half
        reply = session.generate(PROMPT, **ENDLESS, drafts=[wrong])
        assert reply.tokens == tokens and sum(len(row) > 1 or row[0] > 1 for row in engine.steps[1:]) <= 1


def test_steps_are_timed_for_later_drafts(tmp_path: Path) -> None:
    with Session(FakeEngine(), cache=tmp_path / "cache") as session:
        tokens = session.generate(PROMPT, **ENDLESS).tokens
        costs = session.cache.kv.costs = rates_of((1.0, 0.0, 0.0))
        session.generate(PROMPT, **ENDLESS, drafts=[[*tokens[:9], 5, 6, 7, 8, 9, 10]])
        sizes = [row[0] for row in costs.as_json()["step"]]
        assert max(sizes) > 1 and 0 < sizes.count(1.0) <= 8


def test_what_is_no_draft_is_refused_with_a_reason() -> None:
    with pytest.raises(InvalidPrompt, match="draft"):
        Request.of("x", drafts=[1, 2, 3])  # type: ignore[list-item]
    with pytest.raises(InvalidPrompt, match="draft"):
        Request.of("x", drafts=[[-1]])
    with pytest.raises(InvalidPrompt, match="draft"):
        Request.of("x", drafts=[["a"]])  # type: ignore[list-item]
    with pytest.raises(InvalidPrompt, match="Unicode"):
        Request.of("x", drafts=["\ud800"])
    with pytest.raises(InvalidPrompt, match="17 drafts"):
        Request.of("x", drafts=[[1]] * (MAX_DRAFTS + 1))
    with pytest.raises(InvalidSetting, match="answers"):
        Request.of("x", answers="always")  # type: ignore[arg-type]
    assert Request.of("x", drafts="one text").drafts == ("one text",)


@given(st.lists(TOKENS, max_size=3), TOKENS, TOKENS, st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=9))
def test_guesses_stand_in_a_draft_or_in_the_prompt(
    texts: list[list[int]], prompt: list[int], written: list[int], checks: list[tuple[int, bool]]
) -> None:
    drafts = Drafts(texts, prompt)
    for guessed, right in checks:
        guess = list(drafts.guess(written))
        assert len(guess) <= 64
        known = [text[start : start + len(guess)] for text in [*texts, prompt] for start in range(len(text))]
        assert not guess or guess in known
        drafts.checked(guessed, guessed if right else 0)


# -- too close to call


def twins(kind: type[Noting]) -> Noting:
    """A model that cannot tell some tokens from others: it finds two of each equally likely."""
    engine = kind()
    head = engine._weights["head"]
    head[128:256] = head[:128]
    return engine


def test_tokens_that_are_equally_likely_are_computed_alone() -> None:
    plain, drafted = twins(Noting), twins(Noting)
    tokens = reply_of(plain, PROMPT, **ENDLESS).tokens
    assert any(token < 128 for token in tokens)
    reply = reply_of(drafted, PROMPT, **ENDLESS, drafts=[tokens])
    assert reply.tokens == tokens
    assert [1] in drafted.steps[1:]


@pytest.mark.parametrize(
    "how",
    [{}, {"repetition_penalty": 1.2}, {"repetition_penalty": 0.8}, {"frequency_penalty": 0.7, "logit_bias": {5: 2}}],
    ids=str,
)
@pytest.mark.parametrize("make_one", [Rounding, lambda: twins(Rounding)], ids=["plain", "twins"])
def test_rounding_does_not_change_what_is_drawn(make_one: Callable[[], Noting], how: dict[str, Any]) -> None:
    for start in range(0, 60, 20):
        prompt = tuple(range(start, start + 20))
        tokens = reply_of(make_one(), prompt, **ENDLESS, **how).tokens
        wrong = [*tokens[:7], 3, *tokens[8:]]
        for drafts in ([tokens], [wrong], [tokens[3:]]):
            reply = reply_of(make_one(), prompt, **ENDLESS, **how, drafts=drafts, answers="verified")
            assert reply.tokens == tokens


def test_a_close_call_under_a_penalty_is_not_left_to_rounding() -> None:
    """Tokens whose logits differ clearly, and no more once those of the prompt are made less likely."""
    engine = Rounding()
    head = engine._weights["head"]
    head[128:256] = 1.5 * head[:128]
    how: dict[str, Any] = {**ENDLESS, "repetition_penalty": 1.5}
    tokens = reply_of(engine, range(128, 256), **how).tokens
    for drafts in ([tokens], [[*tokens[:4], 1, *tokens[5:]]]):
        assert reply_of(engine, range(128, 256), **how, drafts=drafts).tokens == tokens


# -- engines


@needs("hf")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3_text"])
def test_families_take_back_what_was_guessed_wrong(family: str) -> None:
    """Also where a layer sees only the last few tokens."""
    from tests.tiny import tiny_engine

    engine = tiny_engine(family)
    plain = reply_of(engine, PROMPT, **ENDLESS)
    wrong = [token if place % 9 else 5 for place, token in enumerate(plain.tokens, start=1)]
    reply = reply_of(engine, PROMPT, **ENDLESS, drafts=[wrong])
    assert reply.tokens == plain.tokens and reply.usage.drafted_tokens > COUNT / 4
    engine.close()


@needs("hf")
@pytest.mark.parametrize("count", [20, 40, 47, 48, 60])
def test_a_draft_across_a_change_of_the_rope_changes_nothing(count: int) -> None:
    from tests.parity.test_prefix_cache import changing_engine

    engine = changing_engine()
    prompt = [3 + place * 7 % 240 for place in range(count)]
    plain = reply_of(engine, prompt, **ENDLESS)
    for draft in (plain.tokens, [*plain.tokens[:20], 9, *plain.tokens[21:]]):
        reply = reply_of(engine, prompt, **ENDLESS, drafts=[draft])
        assert reply.tokens == plain.tokens and reply.usage.drafted_tokens > COUNT / 4
    engine.close()


@needs("llamacpp")
def test_llama_cpp_takes_back_what_was_guessed_wrong() -> None:
    engine = engine_of("llamacpp")
    plain = reply_of(engine, PROMPT, **ENDLESS)
    for draft in (plain.tokens, [token if place % 9 else 5 for place, token in enumerate(plain.tokens, start=1)]):
        assert reply_of(engine, PROMPT, **ENDLESS, drafts=[draft], answers="verified").tokens == plain.tokens


@needs("llamacpp-opaque")
def test_an_engine_whose_state_cannot_be_cut_gets_no_draft(tmp_path: Path) -> None:
    with Session(engine_of("llamacpp-opaque"), cache=tmp_path / "cache", answers="verified") as session:
        plain = session.generate(list(PROMPT), **ENDLESS)
        again = session.generate(list(PROMPT), **ENDLESS, drafts=[plain.tokens])
        assert again.tokens == plain.tokens and again.usage.drafted_tokens == 0


def test_deterministic_sessions_follow_no_draft(tmp_path: Path) -> None:
    engine = Noting()
    with Session(engine, cache=tmp_path / "cache", deterministic=True, answers="verified") as session:
        plain = session.generate(list(PROMPT), **ENDLESS)
        again = session.generate(list(PROMPT), **ENDLESS, drafts=[plain.tokens])
    assert again.tokens == plain.tokens and again.usage.drafted_tokens == 0
    assert all(step == [1] for step in engine.steps if step != [len(PROMPT)])


def test_drafted_requests_share_an_engine(tmp_path: Path) -> None:
    prompts = [tuple(range(start, start + 30)) for start in (0, 50, 100, 150)]
    right = [reply_of(FakeEngine(), prompt, **ENDLESS).tokens for prompt in prompts]
    drafts = [right[0], [*right[1][:5], 1, *right[1][6:]], right[0], None]
    replies: dict[int, Reply] = {}
    with Session(FakeEngine(), cache=tmp_path / "cache", parallel=2) as session:

        def work(number: int) -> None:
            draft = drafts[number]
            more: dict[str, Any] = {} if draft is None else {"drafts": [draft]}
            replies[number] = session.generate(list(prompts[number]), **ENDLESS, **more)

        for _ in range(3):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert [replies[number].tokens for number in range(4)] == right
            assert replies[0].usage.drafted_tokens > 20 and replies[1].usage.drafted_tokens > 20


# -- what is kept


def blocks(session: Session) -> set[bytes]:
    """The tokens of everything that is kept, chained block by block."""
    session.flush()
    assert session.cache.store is not None
    with session.cache.store.disk.database.reading() as connection:
        return {row[0] for row in connection.execute("SELECT tokens FROM blocks")}


def kept(session: Session, tokens: Sequence[int]) -> list[np.ndarray]:
    """The KV of a context as it is stored, all of which must be known."""
    store = session.cache.store
    session.flush()
    assert store is not None
    kv_space = session.cache.kv_spaces.of(Request.of(list(tokens)), len(tokens))
    match = store.lookup(kv_space, tokens)
    assert match.length == len(tokens)
    found: list[np.ndarray] = []
    with store.load(kv_space, match) as feed:
        for layer in feed.layers:
            shape = kv_space.layout.layers[layer]
            out = [np.zeros((shape.kv_heads, len(tokens), dim), np.float32) for dim in (shape.key_dim, shape.value_dim)]
            feed.fill(layer, LayerKv(*out))
            found += out
    return found


@each("fake", "hf")
def test_what_is_kept_of_a_drafted_reply_is_what_computing_gives(kind: str, tmp_path: Path) -> None:
    engine = engine_of(kind)
    with Session(engine, cache=tmp_path / "plain") as session:
        plain = session.generate(list(PROMPT), **ENDLESS)
        expected, chains = kept(session, [*PROMPT, *plain.tokens[:-1]]), blocks(session)
    marks = [250, 251, 252, 253]
    assert token_bytes(marks[:2]) not in token_bytes(plain.tokens)
    for number, draft in enumerate(
        ([*plain.tokens[:11], *marks, *plain.tokens[11:]], [*marks, *plain.tokens], marks * 9, plain.tokens)
    ):
        with Session(engine, cache=tmp_path / str(number)) as session:
            reply = session.generate(list(PROMPT), **ENDLESS, drafts=[draft])
            assert reply.tokens == plain.tokens
            for ours, theirs in zip(kept(session, [*PROMPT, *plain.tokens[:-1]]), expected, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
            assert blocks(session) == chains


@pytest.mark.parametrize("times", range(1, 16, 2))
def test_a_cancelled_draft_leaves_a_context_that_holds_what_it_says(times: int, tmp_path: Path) -> None:
    plain = reply_of(FakeEngine(), PROMPT, **ENDLESS)
    engine = FakeEngine()
    with Session(engine, cache=tmp_path / "cache") as session:
        stream = session.stream(list(PROMPT), **ENDLESS, drafts=[[*plain.tokens[:13], 1, 2, *plain.tokens[13:]]])
        cancel_when_asked(engine, stream.cancel, 3 + times)
        with pytest.raises(Cancelled):
            stream.reply  # noqa: B018
        del engine.step  # type: ignore[method-assign]
        (context,) = session.cache._parked._parked
        assert context.tokens == (*PROMPT, *plain.tokens)[: len(context.tokens)]
        assert context.sequence.length == len(context.tokens) >= len(PROMPT)
        again = session.generate(list(PROMPT), **ENDLESS)
        assert again.tokens == plain.tokens
        session.flush()
    with Session(FakeEngine(), cache=tmp_path / "cache") as session:
        assert session.generate(list(PROMPT), **ENDLESS).tokens == plain.tokens


@pytest.mark.parametrize("pieces", [1, 3, 9, 20])
def test_a_reader_who_leaves_amid_checked_tokens_leaves_a_right_context(pieces: int, tmp_path: Path) -> None:
    plain = reply_of(FakeEngine(), PROMPT, **ENDLESS)
    with Session(FakeEngine(), cache=tmp_path / "cache") as session:
        stream = session.stream(list(PROMPT), **ENDLESS, drafts=[plain.tokens])
        for _ in range(pieces):
            next(stream)
        stream.close()
        (context,) = session.cache._parked._parked
        assert context.tokens == (*PROMPT, *plain.tokens)[: len(context.tokens)]
        assert context.sequence.length == len(context.tokens)
        assert session.generate(list(PROMPT), **ENDLESS).tokens == plain.tokens


# -- repeated chats

CHAT = [{"role": "user", "content": "Which lamp burns longest, and who lights it in the evening?"}]


@pytest.fixture
def loras(tmp_path: Path) -> list[Path]:
    return [save_lora(tmp_path / f"lora{seed}", fake_pairs(seed)) for seed in range(2)]


def repeated(tmp_path: Path, **settings: Any) -> Session:
    return Session(FakeEngine(), cache=tmp_path / "cache", **{"answers": "verified", **settings})


@pytest.mark.parametrize("where", ["engine", "memory", "disk"])
def test_a_chat_that_is_repeated_is_drafted_from_what_followed(where: str, tmp_path: Path) -> None:
    expected = reply_of(FakeEngine(), CHAT, **ENDLESS)
    session = repeated(tmp_path, memory_limit="0" if where == "disk" else "64MB")
    first = session.chat(CHAT, **ENDLESS)
    session.flush()
    if where == "disk":
        session.close()
        session = repeated(tmp_path, memory_limit="0")
    if where == "memory":
        session.cache.unpark()
    for _ in range(2):
        again = session.chat(CHAT, **ENDLESS)
        assert again.text == first.text == expected.text and again.tokens == expected.tokens
        assert again.usage.drafted_tokens > COUNT / 2 and again.as_dict()["usage"]["drafted_tokens"] > 0
        assert " drafted)" in again.summary()
        session.flush()
        if where != "engine":
            session.cache.unpark()
    session.close()


def test_a_longer_reply_is_drafted_as_far_as_any_was_known(tmp_path: Path) -> None:
    """A short reply first, a long one later: the long one is the better draft."""
    with repeated(tmp_path) as session:
        for count in (5, 40, 40):
            reply = session.chat(CHAT, max_tokens=count, min_tokens=count)
            session.flush()
            session.cache.unpark()
        assert reply.usage.drafted_tokens > 25


def test_nothing_is_drafted_where_it_is_off(tmp_path: Path) -> None:
    with repeated(tmp_path, answers="off") as session:
        replies = [session.chat(CHAT, **ENDLESS) for _ in range(2)]
        assert [reply.usage.drafted_tokens for reply in replies] == [0, 0]
        assert session.chat(CHAT, **ENDLESS, answers="verified").usage.drafted_tokens > 0
    with repeated(tmp_path) as session:
        assert session.chat(CHAT, **ENDLESS, answers="off").usage.drafted_tokens == 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """What every request got told of earlier replies."""
    from rekindle.session import session as module

    got: list[tuple[int, ...]] = []
    real = module.drafts_for

    def noted(request: Any, known: Any, engine: Any, costs: Any) -> Any:
        parked = () if known.parked is None else known.parked.tokens
        got.append((*known.matches.goes_on, *parked))
        return real(request, known, engine, costs)

    monkeypatch.setattr(module, "drafts_for", noted)
    yield got


@pytest.mark.parametrize(
    "whose", [{"tenant": "other"}, {"cache_salt": "salt"}, {"adapter": "a1"}, {"adapter": ""}], ids=str
)
@pytest.mark.parametrize("parked", [True, False])
def test_what_somebody_else_was_told_is_never_a_draft(
    whose: dict[str, str], parked: bool, tmp_path: Path, loras: list[Path], seen: list[tuple[int, ...]]
) -> None:
    with repeated(tmp_path) as session:
        for number, folder in enumerate(loras):
            session.adapters.load(f"a{number}", folder)
        own = {"adapter": "a0"} if "adapter" in whose else {}
        session.generate(list(PROMPT), **ENDLESS, **own)
        session.flush()
        if not parked:
            session.cache.unpark()
        theirs = session.generate(list(PROMPT), **ENDLESS, **whose)
        assert theirs.usage.drafted_tokens == 0 and seen[-1] == ()
        session.flush()
        assert session.generate(list(PROMPT), **ENDLESS, **own).usage.drafted_tokens > 0


def test_a_prompt_that_goes_on_otherwise_gets_what_followed_it_alone(tmp_path: Path) -> None:
    """Two replies to one prompt are kept: either may be the draft, and neither changes the text."""
    with repeated(tmp_path) as session:
        drawn = [session.chat(CHAT, **ENDLESS, temperature=1.2, seed=seed) for seed in range(3)]
        session.flush()
        session.cache.unpark()
        for seed, reply in enumerate(drawn):
            again = session.chat(CHAT, **ENDLESS, temperature=1.2, seed=seed)
            assert again.tokens == reply.tokens
        assert session.chat(CHAT, **ENDLESS).tokens == reply_of(FakeEngine(), CHAT, **ENDLESS).tokens
