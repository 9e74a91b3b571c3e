"""A session: the same text whichever way it is asked, and it stops when told."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.engine.base import Row
from rekindle.engine.fake import FakeEngine
from rekindle.errors import (
    Cancelled,
    Closed,
    ContextOverflow,
    InvalidPrompt,
    InvalidSampling,
    InvalidSetting,
    RekindleError,
)

PROMPT = "Tell me about lamps."


@pytest.fixture
def session() -> Iterator[Session]:
    with Session(FakeEngine(context_tokens=300)) as session:
        yield session


def by_hand(engine: FakeEngine, tokens: list[int], count: int) -> list[int]:
    """Greedy decoding without any of the machinery."""
    sequence = engine.open(len(tokens) + count, "plain")
    out: list[int] = []
    while len(out) < count:
        (logits,) = engine.step([Row.following(sequence, out[-1:] or tokens)])
        out.append(int(logits[0].argmax()))
    return out


def test_a_reply_is_greedy_decoding(session: Session) -> None:
    engine = session.engine
    reply = session.generate(PROMPT, max_tokens=12, min_tokens=12)
    expected = by_hand(engine, engine.tokenizer.encode(PROMPT), 12)
    assert 256 not in expected, "the fake model wants to stop; take another prompt"
    assert list(reply.tokens) == expected
    assert reply.text == engine.tokenizer.decode(expected)
    assert reply.finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (20, 12, 32)
    assert reply.timings.first_token_seconds > 0 and reply.timings.tokens_per_second is not None


def test_every_way_to_ask_gives_the_same(session: Session) -> None:
    options = {"max_tokens": 15, "temperature": 0.9, "seed": 5}
    whole = session.generate(PROMPT, **options)
    assert "".join(session.stream(PROMPT, **options)) == whole.text
    assert session.stream(PROMPT, **options).reply.tokens == whole.tokens
    assert session.generate(session.engine.tokenizer.encode(PROMPT), **options).tokens == whole.tokens

    async def asynchronously() -> None:
        assert (await session.agenerate(PROMPT, **options)).tokens == whole.tokens
        pieces = [piece async for piece in session.astream(PROMPT, **options)]
        assert "".join(pieces) == whole.text
        chat = await session.achat(PROMPT, **options)
        assert chat.tokens == session.chat(PROMPT, **options).tokens
        # A synchronous call inside a running loop, as in a notebook.
        assert session.generate(PROMPT, **options).tokens == whole.tokens

    asyncio.run(asynchronously())


def test_a_chat_is_the_templates_tokens(session: Session) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    from rekindle.core.request import parse_prompt

    tokens = session.engine.tokenizer.encode_chat(parse_prompt(messages))
    assert session.chat(messages, max_tokens=8).tokens == session.generate(tokens, max_tokens=8).tokens
    assert session.chat("Hi", max_tokens=8).tokens == session.chat(messages[1:], max_tokens=8).tokens
    assert session.stream(messages, max_tokens=8).reply.tokens == session.chat(messages, max_tokens=8).tokens


def test_threads_do_not_disturb_each_other(session: Session) -> None:
    prompts = [f"Prompt number {i}" for i in range(4)]
    expected = [session.generate(p, max_tokens=10).tokens for p in prompts]
    got: dict[int, object] = {}
    threads = [
        threading.Thread(target=lambda i=i, p=p: got.update({i: session.generate(p, max_tokens=10).tokens}))
        for i, p in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(4)] == expected


def test_zero_tokens_only_read_the_prompt(session: Session) -> None:
    reply = session.generate(PROMPT, max_tokens=0)
    assert (reply.text, reply.tokens, reply.finish_reason) == ("", (), "length")
    assert reply.usage.completion_tokens == 0 and reply.timings.tokens_per_second is None


def test_one_token(session: Session) -> None:
    reply = session.generate(PROMPT, max_tokens=1)
    assert len(reply.tokens) == 1 and reply.timings.tokens_per_second is None


def test_a_stop_token_ends_the_reply(session: Session) -> None:
    """Found by sampling: some seed draws the end within a few tokens."""
    replies = [session.generate(PROMPT, max_tokens=40, temperature=3.0, seed=s) for s in range(12)]
    stopped = [r for r in replies if r.finish_reason == "stop"]
    assert stopped and all(r.tokens[-1] == 256 and 256 not in r.tokens[:-1] for r in stopped)
    longer = session.generate(PROMPT, max_tokens=40, min_tokens=40, temperature=3.0, seed=0)
    assert len(longer.tokens) == 40 and 256 not in longer.tokens


def test_a_stop_string_ends_the_text_before_it(session: Session) -> None:
    whole = session.generate(PROMPT, max_tokens=30, min_tokens=30).text
    stop = whole[7:9]
    reply = session.generate(PROMPT, max_tokens=30, min_tokens=30, stop=["never", stop])
    assert reply.text == whole[: whole.index(stop)] and reply.finish_reason == "stop"
    assert len(reply.tokens) < 30


def test_half_a_stop_string_at_the_end_is_text(session: Session) -> None:
    whole = session.generate(PROMPT, max_tokens=10, min_tokens=10)
    reply = session.generate(PROMPT, max_tokens=10, min_tokens=10, stop=whole.text[-2:] + "\x00never")
    assert reply.text == whole.text and reply.finish_reason == "length"


def test_cancelling_a_stream_stops_within_a_token(session: Session) -> None:
    steps = count_steps(session.engine)
    stream = session.stream(PROMPT, max_tokens=200, min_tokens=200)
    for _ in range(3):
        next(stream)
    before = steps[0]
    stream.cancel()
    assert list(stream) == []
    assert steps[0] <= before + 1
    with pytest.raises(Cancelled):
        _ = stream.reply


def test_cancelling_stops_inside_a_prefill(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = session.stream(PROMPT, max_tokens=5)
    computed: list[int] = []
    real = session.engine._layer

    def cancel_after_the_first_layer(layer: int, *rest: object) -> object:
        computed.append(layer)
        stream.cancel()
        return real(layer, *rest)

    monkeypatch.setattr(session.engine, "_layer", cancel_after_the_first_layer)
    assert list(stream) == []
    assert computed == [0]


def test_leaving_the_loop_frees_the_context(session: Session) -> None:
    opened = watch_sequences(session.engine)
    with session.stream(PROMPT, max_tokens=50, min_tokens=50) as stream:
        for _ in stream:
            break
    session.cache.unpark()
    assert len(opened) == 1 and opened[0]._closed


def test_cancelling_the_task_stops_the_model(session: Session) -> None:
    steps = count_steps(session.engine)

    async def run() -> None:
        task = asyncio.create_task(session.agenerate(PROMPT, max_tokens=250, min_tokens=250))
        while steps[0] < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        at_return = steps[0]
        await asyncio.sleep(0.05)
        assert steps[0] == at_return, "the model went on after the task had ended"

    asyncio.run(run())
    assert steps[0] < 200


def test_leaving_an_async_loop_stops_the_model(session: Session) -> None:
    opened = watch_sequences(session.engine)

    async def run() -> None:
        async with session.astream(PROMPT, max_tokens=250, min_tokens=250) as stream:
            async for _ in stream:
                break

    asyncio.run(run())
    session.cache.unpark()
    assert opened[0]._closed


def test_the_event_loop_stays_free(session: Session) -> None:
    async def run() -> None:
        ticks = 0
        task = asyncio.create_task(session.agenerate(PROMPT, max_tokens=60, min_tokens=60))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0)
        assert ticks > 10

    asyncio.run(run())


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(session: Session) -> None:
    with pytest.raises(ContextOverflow, match="301 tokens.*300") as raised:
        session.generate("x" * 301)
    assert (raised.value.prompt_tokens, raised.value.context_tokens) == (301, 300)
    with pytest.raises(ContextOverflow, match="300 tokens"):
        session.generate("x" * 300)  # no room for a single token
    assert session.generate("x" * 300, max_tokens=0).usage.prompt_tokens == 300


def test_a_reply_ends_where_the_context_does(session: Session) -> None:
    reply = session.generate("x" * 295, max_tokens=100, min_tokens=100)
    assert len(reply.tokens) == 5 and reply.finish_reason == "length"


def chat_of(turns: int) -> list[dict[str, str]]:
    lead = [{"role": "system", "content": "Be brief."}]
    return [
        *lead,
        *({"role": ("user", "assistant")[i % 2], "content": f"turn {i:02d} " + "x" * 20} for i in range(turns)),
    ]


def test_a_chat_too_long_is_refused_unless_the_oldest_may_go(session: Session) -> None:
    long = chat_of(21)
    with pytest.raises(ContextOverflow, match="overflow='drop-oldest'"):
        session.chat(long)
    reply = session.chat(long, overflow="drop-oldest", max_tokens=3)
    dropped = reply.usage.dropped_messages
    assert 0 < dropped < 21 and reply.usage.prompt_tokens < 300
    kept = [long[0], *long[1 + dropped :]]
    assert reply.tokens == session.chat(kept, max_tokens=3).tokens, "system and newest stay, in order"
    one_more = [long[0], *long[dropped:]]
    with pytest.raises(ContextOverflow):
        session.chat(one_more)


def test_what_must_stay_may_still_be_too_long(session: Session) -> None:
    for messages in ([{"role": "system", "content": "x" * 400}, *chat_of(3)], [{"role": "user", "content": "x" * 400}]):
        with pytest.raises(ContextOverflow, match="alone are too long"):
            session.chat(messages, overflow="drop-oldest")


def test_a_short_chat_loses_nothing(session: Session) -> None:
    assert session.chat(chat_of(3), overflow="drop-oldest", max_tokens=2).usage.dropped_messages == 0


def test_token_ids_outside_the_vocabulary_are_refused(session: Session) -> None:
    for ids in ([5, 258], [-1]):
        with pytest.raises(InvalidPrompt, match="outside the model's vocabulary"):
            session.generate(ids)


def test_bad_options_are_refused_before_anything_runs(session: Session) -> None:
    steps = count_steps(session.engine)
    with pytest.raises(InvalidSampling):
        session.stream(PROMPT, temperature=-1)
    with pytest.raises(InvalidSetting):
        session.stream(PROMPT, temprature=1)  # type: ignore[call-arg]
    for ask in (session.generate, session.chat):
        with pytest.raises(InvalidPrompt, match="empty"):
            ask("")
    assert steps[0] == 0


def test_a_closed_session_says_so() -> None:
    session = Session(FakeEngine())
    session.close()
    session.close()
    with pytest.raises(Closed, match="session was closed"):
        session.generate("x")
    assert repr(session) == "<Session closed>"


def test_a_failing_step_frees_the_context(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = watch_sequences(session.engine)
    monkeypatch.setattr(session.engine, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.generate(PROMPT)
    assert opened[0]._closed


def count_steps(engine: FakeEngine) -> list[int]:
    steps = [0]
    real = engine.step

    def counted(*args: object) -> object:
        steps[0] += 1
        return real(*args)

    engine.step = counted
    return steps


def watch_sequences(engine: FakeEngine) -> list:
    opened: list = []
    real = engine.open

    def watched(*args: object) -> object:
        opened.append(real(*args))
        return opened[-1]

    engine.open = watched
    return opened


def test_a_stream_may_be_closed_while_another_thread_reads_it(session: Session) -> None:
    opened = watch_sequences(session.engine)
    for _ in range(5):
        stream = session.stream(PROMPT, max_tokens=200, min_tokens=200)
        pieces: list[str] = []
        reader = threading.Thread(target=lambda s=stream, p=pieces: p.extend(s))
        reader.start()
        while not pieces:
            pass
        stream.close()
        reader.join()
    session.cache.unpark()
    assert opened and all(sequence._closed for sequence in opened)


def test_a_cancelled_task_leaves_nothing_behind(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    opened = watch_sequences(session.engine)

    async def run() -> None:
        complaints: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        tasks = [asyncio.create_task(session.agenerate(PROMPT, max_tokens=200, min_tokens=200)) for _ in range(3)]
        while len(opened) < 3:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        session.cache.unpark()
        assert all(sequence._closed for sequence in opened)
        del tasks, task
        gc.collect()
        await asyncio.sleep(0.01)
        assert complaints == []

    asyncio.run(run())
    assert "never retrieved" not in caplog.text


def test_a_full_pool_of_the_application_does_not_keep_a_reply_waiting(session: Session) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        gate = threading.Event()
        blocked = loop.run_in_executor(None, gate.wait)
        reply = await asyncio.wait_for(session.agenerate(PROMPT, max_tokens=2), timeout=60)
        assert len(reply.tokens) == 2
        gate.set()
        await blocked

    asyncio.run(run())


def test_after_an_error_the_reply_is_not_called_cancelled(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = session.stream(PROMPT)
    monkeypatch.setattr(session.engine, "step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(stream)
    with pytest.raises(RekindleError, match="incomplete") as raised:
        _ = stream.reply
    assert not isinstance(raised.value, Cancelled)


def test_a_template_that_wants_alternation_survives_dropping(session: Session) -> None:
    """Dropping a question alone would leave its answer first, which many templates refuse."""
    real = session.engine.tokenizer.encode_chat

    def strict(messages, written=None, **_):
        said = [m.role for m in messages if m.role != "system"]
        assert said == [("user", "assistant")[i % 2] for i in range(len(said))], said
        return real(messages)

    session.engine.tokenizer.encode_chat = strict
    reply = session.chat(chat_of(21), overflow="drop-oldest", max_tokens=1)
    assert reply.usage.dropped_messages % 2 == 0


def test_short_requests_on_the_side_do_not_drive_a_chat_out_of_the_engine(tmp_path: Path) -> None:
    """The title of a chat, its tags, a suggestion: each leaves a context of its own behind."""
    with Session(FakeEngine(), cache=tmp_path / "kv") as session:
        chat = "The chat goes on and on. " * 20
        session.generate(chat, max_tokens=2)
        for number in range(20):
            session.generate(f"{number}: a title", max_tokens=1)
        assert session.generate(chat + "More.", max_tokens=1).reuse.engine >= len(chat)


def test_no_request_at_a_time_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidSetting, match="parallel=0"):
        Session("no-such-model", parallel=0)


def test_what_a_session_kept_can_be_cleared_and_is_computed_again(tmp_path: Path) -> None:
    prompt = PROMPT * 8
    with Session(FakeEngine(context_tokens=300), cache=tmp_path / "cache") as session:
        first = session.generate(prompt, max_tokens=4)
        assert session.flush(60) and session.generate(prompt, max_tokens=4).reuse.reused > 0
        assert session.flush(60) and session.cache.clear() > 0
        again = session.generate(prompt, max_tokens=4)
        assert again.reuse.reused == 0 and again.text == first.text


def test_a_chat_of_thousands_of_turns_is_encoded_a_few_times_only(session: Session) -> None:
    real, encoded = session.engine.tokenizer.encode_chat, []

    def counting(messages, **how):
        encoded.append(len(messages))
        return real(messages, **how)

    session.engine.tokenizer.encode_chat = counting
    reply = session.chat(chat_of(4001), overflow="drop-oldest", max_tokens=1)
    assert 0 < reply.usage.dropped_messages < 4001
    assert len(encoded) < 30
