"""The chief law, per engine: the same answer with and without the cache. Every test counts its hits.

Costs are not measured here: while nothing is measured, whatever is known is reused, so hits are certain. Where only
whole states are reused, there is a hit where a checkpoint can be: `tests.parity.engines.reused`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle import Session
from rekindle.cache.cost import FREE, Costs
from rekindle.core.kv import KvLayout, LayerShape
from rekindle.core.reply import Reply
from rekindle.core.request import parse_prompt
from rekindle.engine.base import Engine
from rekindle.errors import Cancelled
from rekindle.store.feed import StoredFeed
from tests.parity.engines import KINDS, PRINCIPAL, STOP, WITH_SPANS, common, each, make, needs, params, reused
from tests.parity.sessions import (
    PROMPT,
    N,
    ask,
    assert_right,
    cancel_when_asked,
    entries,
    is_open,
    opened,
    record,
    tokens_of,
    watch,
)

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("one_thread")]

principal = each(*PRINCIPAL)
with_spans = each(*WITH_SPANS)
every = each(*KINDS)

# -- partial hits, to the token or to the checkpoint ---------------------------------------------------------------


def sharing(shared: int, tail: int = 3) -> list[int]:
    """A prompt that shares exactly `shared` tokens with PROMPT, and no more with any other of these."""
    other = 251 if shared == N else (PROMPT[shared] + 1) % 250
    return [*PROMPT[:shared], other, *tokens_of(tail - 1, seed=1000 + shared)]


@pytest.mark.parametrize("order", ["rising", "falling", "mixed"])
@principal
def test_within_the_process_a_prompt_reuses_exactly_what_it_shares(kind: str, order: str, tmp_path: Path) -> None:
    lengths = list(range(N + 1) if order == "mixed" else range(0, N + 1, 4))
    if order == "falling":
        lengths.reverse()
    if order == "mixed":
        np.random.default_rng(7).shuffle(lengths)
    with opened(kind, tmp_path / "cache") as session:
        session.warm([PROMPT])
        for shared in lengths:
            question = sharing(shared)
            reply = ask(session, question)
            assert reply.reuse.reused == reply.usage.cached_tokens == reused(kind, question, PROMPT), shared
            assert reply.reuse.computed == len(question) - reply.reuse.reused
            assert_right(kind, reply, question)


@every
def test_after_a_restart_a_prompt_reuses_exactly_what_it_shares(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path / "cache") as session:
        session.warm([PROMPT])
    with opened(kind, tmp_path / "cache", memory_limit=0) as session:
        for shared in range(N, -1, -1):
            question = sharing(shared)
            reply = ask(session, question)
            assert reply.reuse.disk == reply.reuse.reused == reused(kind, question, PROMPT), shared
            assert_right(kind, reply, question)


@principal
def test_of_a_prompt_known_whole_only_the_last_token_is_computed(kind: str, tmp_path: Path) -> None:
    """Every beginning of it: the logits after its last token must come from somewhere."""
    with opened(kind, tmp_path / "cache") as session:
        session.warm([PROMPT])
    with opened(kind, tmp_path / "cache", memory_limit=0) as session:
        for count in range(1, N + 1):
            reply = ask(session, PROMPT[:count], 3)
            assert reply.reuse.disk == count - reply.reuse.computed == reused(kind, PROMPT[:count], PROMPT)
            assert KINDS[kind].whole or reply.reuse.computed == 1
            assert_right(kind, reply, PROMPT[:count], 3)


@with_spans
@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_reply_computed_is_reused_to_the_token(kind: str, restarted: bool, tmp_path: Path) -> None:
    """All of the reply but its last token, which nobody computed."""
    session = opened(kind, tmp_path / "cache")
    reply = ask(session, PROMPT[:40], 30)
    assert_right(kind, reply, PROMPT[:40], 30)
    known = [*PROMPT[:40], *reply.tokens[:-1]]
    if restarted:
        session.close()
        session = opened(kind, tmp_path / "cache")
    session.flush()
    for shared in range(41, len(known) + 1, 4):
        question = [*known[:shared], 251, 7]
        again = ask(session, question)
        assert again.reuse.reused == shared
        assert_right(kind, again, question)
    longer = [*known, reply.tokens[-1], 9]
    assert ask(session, longer).reuse.reused == len(known)
    session.close()


@each("llamacpp-opaque")
@pytest.mark.parametrize("restarted", [False, True])
def test_where_a_reply_ended_there_is_a_checkpoint(kind: str, restarted: bool, tmp_path: Path) -> None:
    """For whoever goes on from exactly there, with whatever."""
    session = opened(kind, tmp_path / "cache", memory_limit=0)
    reply = ask(session, PROMPT[:40], 30)
    assert_right(kind, reply, PROMPT[:40], 30)
    known = [*PROMPT[:40], *reply.tokens[:-1]]
    if restarted:
        session.close()
        session = opened(kind, tmp_path / "cache", memory_limit=0)
    session.flush()
    for tail in ([251], [STOP, 9, 8, 7], [251, 7]):
        again = ask(session, [*known, *tail])
        assert again.reuse.reused == again.reuse.disk == len(known)
        assert_right(kind, again, [*known, *tail])
    for shared in (41, 55, len(known) - 1):
        assert ask(session, [*known[:shared], 251, 7]).reuse.reused == 0
    session.close()


@each("llamacpp-opaque")
def test_of_a_large_state_every_message_is_kept_too(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a recurrent model, whose state has more pages than the prompt has tokens."""
    pages = KvLayout("uint8", (LayerShape(1, 32, 32),))
    monkeypatch.setattr("rekindle.engine.llamacpp.engine._PAGES", pages)
    with opened(kind, tmp_path / "cache", memory_limit=0) as session:
        chat: list[int] = []
        for turn in range(5):
            known = len(chat)
            chat = [*chat, *tokens_of(39, seed=turn), STOP]
            question = [*chat, 5, 6, 7]
            reply = ask(session, question)
            session.flush()
            assert reply.reuse.disk == known
            assert_right(kind, reply, question)


@each("llamacpp-opaque")
def test_a_warmed_prompt_is_still_known_after_many_other_requests(kind: str, tmp_path: Path) -> None:
    prompt = tokens_of(N)  # a text, which no message ends
    with opened(kind, tmp_path / "cache", memory_limit=0) as session:
        session.warm([prompt])
        for number in range(40):
            ask(session, tokens_of(9, seed=number), 1)
        session.flush()
        assert ask(session, [*prompt, 4, 5, 6]).reuse.reused == N


# -- at random -----------------------------------------------------------------------------------------------------


@principal
def test_any_requests_in_any_order_get_the_same_text_and_reuse_all_that_is_known(kind: str) -> None:
    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    @given(memory=st.sampled_from([0, 300_000, "64MB"]), data=st.data())
    def holds(memory: Any, data: st.DataObject) -> None:
        folder = Path(tempfile.mkdtemp(prefix="rekindle-laws-"))
        try:
            run_at_random(kind, folder / "cache", memory, data)
        finally:
            shutil.rmtree(folder)

    holds()


def run_at_random(kind: str, folder: Path, memory: Any, data: st.DataObject) -> None:
    session = opened(kind, folder, memory_limit=memory)
    kept: dict[tuple[str, str], list[list[int]]] = {}
    try:
        for _ in range(data.draw(st.integers(3, 9), "requests")):
            who = data.draw(st.sampled_from([("local", ""), ("local", "salt"), ("other", "")]), "who")
            known = kept.setdefault(who, [])
            head: list[int] = []
            everybody = [context for contexts in kept.values() for context in contexts]
            if everybody and data.draw(st.integers(0, 4), "new") > 0:
                head = data.draw(st.sampled_from(everybody), "head")
                head = head[: data.draw(st.integers(0, len(head)), "shared")]
            tail = data.draw(st.lists(st.integers(3, 6), min_size=1, max_size=40), "tail")
            tokens = [*head, *tail][:200]
            count = data.draw(st.integers(0, 6), "reply")
            flushed = data.draw(st.booleans(), "flush")
            if flushed:
                assert session.flush()
            if data.draw(st.integers(0, 4), "restart") == 0:
                session.close()
                session, flushed = opened(kind, folder, memory_limit=memory), True
            off = data.draw(st.integers(0, 5), "off") == 0
            reply = ask(session, tokens, count, tenant=who[0], cache_salt=who[1], reuse="off" if off else None)
            assert_right(kind, reply, tokens, count)
            if off:
                assert reply.reuse.reused == 0
                continue
            assert_all_that_is_known_is_reused(kind, reply, tokens, known, flushed)
            known.append([*tokens, *reply.tokens[: max(0, count - 1)]])
    finally:
        session.close()


def assert_all_that_is_known_is_reused(
    kind: str, reply: Reply, tokens: list[int], known: list[list[int]], flushed: bool
) -> None:
    if KINDS[kind].whole:
        kept = {0, *(len(context) for context in known if context == tokens[: len(context)])} - {len(tokens)}
        assert reply.reuse.reused in kept, "a state that was kept, of exactly these tokens"
        assert not flushed or reply.reuse.reused == max(kept)
        return
    most = min(max((common(tokens, context) for context in known), default=0), len(tokens) - 1)
    assert reply.reuse.reused <= most
    assert not flushed or reply.reuse.reused == most


# -- chats ---------------------------------------------------------------------------------------------------------


def plainspoken(kind: str) -> Engine:
    """An engine that says printable characters only, so that what it said is tokenized as it said it."""
    engine: Any = make(kind, context_tokens=1024)
    tokenizer, real = engine.tokenizer, engine.step
    plain = [t for t in range(STOP) if (text := tokenizer.decode([t])).isascii() and text.isprintable()]
    silent = np.setdiff1d(np.arange(tokenizer.vocabulary_size), [*plain, *tokenizer.stop_ids])

    def step(*args: Any) -> list[np.ndarray]:
        logits: list[np.ndarray] = real(*args)
        for array in logits:
            array[:, silent] = -np.inf
        return logits

    engine.step = step
    return engine


@principal
@pytest.mark.parametrize("restarting", [False, True])
def test_each_turn_of_a_chat_computes_only_the_new_message(kind: str, restarting: bool, tmp_path: Path) -> None:
    plain = opened(partial(plainspoken, kind), "off")
    memory = 0 if restarting else "64MB"
    session = opened(partial(plainspoken, kind), tmp_path / "cache", memory_limit=memory)
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief, be kind, be plain."}]
    known = 0
    for turn in range(10):
        messages.append({"role": "user", "content": f"Question number {turn}, which is new. " + "?" * turn})
        if restarting and turn % 2:
            session.close()
            session = opened(partial(plainspoken, kind), tmp_path / "cache", memory_limit=memory)
        reply = session.chat(messages, max_tokens=12, min_tokens=4)
        assert reply.tokens == plain.chat(messages, max_tokens=12, min_tokens=4).tokens
        assert reply.reuse.reused == known, f"turn {turn}: everything before the new message, the last reply too"
        known = reply.usage.prompt_tokens + len(reply.tokens) - 1
        messages.append({"role": "assistant", "content": reply.text})
        session.flush()
    session.close()
    plain.close()


@principal
def test_a_chat_reuses_whatever_its_tokens_have_in_common_with_the_last_turn(kind: str, tmp_path: Path) -> None:
    """A reply that is tokenized otherwise than it was said is reused as far as it is the same."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    last: list[int] = []
    with opened(kind, tmp_path / "cache") as session:
        for turn in range(10):
            messages.append({"role": "user", "content": f"Question {turn}"})
            tokens = session.engine.tokenizer.encode_chat(parse_prompt(messages))
            reply = session.chat(messages, max_tokens=6)
            assert_right(kind, reply, tokens, 6, least=0)
            if KINDS[kind].whole:
                end = len(last) - last[::-1].index(STOP) if last else 0
                assert end <= reply.reuse.reused <= common(tokens, last)
            else:
                assert reply.reuse.reused == common(tokens, last)
            assert turn == 0 or reply.reuse.reused > 10
            last = [*tokens, *reply.tokens[:-1]]
            messages.append({"role": "assistant", "content": reply.text})
            session.flush()


# -- who may share -------------------------------------------------------------------------------------------------

FOLLOWING = [*PROMPT, 251]  # all of PROMPT can be reused for it


@principal
@pytest.mark.parametrize("name", ["tenant", "cache_salt"])
@pytest.mark.parametrize("how", ["request", "session"])
@pytest.mark.parametrize("restarted", [False, True])
def test_nobody_else_is_served_and_the_same_one_is(
    kind: str, name: str, how: str, restarted: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    session = opened(kind, folder)

    def ask_as(who: str | None, tokens: list[int], count: int) -> Reply:
        if who is None:
            return ask(session, tokens, count)
        if how == "request":
            return ask(session, tokens, count, **{name: who})
        with opened(kind, folder, **{name: who}) as other:
            return ask(other, tokens, count)

    assert ask_as("a", PROMPT, 0).reuse.reused == 0
    session.flush()
    if restarted:
        session.close()
        session = opened(kind, folder)
    for who in ("b", "A", "a ", None):
        reply = ask_as(who, FOLLOWING, 5)
        assert reply.reuse.reused == 0, who
        assert_right(kind, reply, FOLLOWING)
    session.flush()
    again = ask_as("a", FOLLOWING, 5)
    assert again.reuse.reused == N
    assert_right(kind, again, FOLLOWING)
    session.close()


@principal
def test_a_tenant_and_a_salt_of_the_same_text_are_not_the_same(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path / "cache") as session:
        ask(session, PROMPT, 0, tenant="ab", cache_salt="c")
        session.flush()
        assert ask(session, FOLLOWING, tenant="a", cache_salt="bc").reuse.reused == 0
        assert ask(session, FOLLOWING, tenant="c", cache_salt="ab").reuse.reused == 0
        assert ask(session, FOLLOWING, tenant="ab", cache_salt="c").reuse.reused == N


@principal
def test_another_model_is_never_served(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path / "cache") as session:
        session.warm([PROMPT])
    with opened(partial(make, kind, seed=1), tmp_path / "cache") as session:
        assert ask(session, FOLLOWING).reuse.reused == 0
    with opened(kind, tmp_path / "cache") as session:
        assert ask(session, FOLLOWING).reuse.reused == N


@pytest.mark.parametrize("kind", params("llamacpp"))
def test_states_and_spans_of_the_same_model_are_not_mixed_up(kind: str, tmp_path: Path) -> None:
    """As when llama.cpp is updated and its KV cannot be taken apart any more, or can again."""
    for name in ("llamacpp", "llamacpp-opaque"):
        with opened(name, tmp_path / "cache") as session:
            assert ask(session, PROMPT, 0).reuse.reused == 0
    for name in ("llamacpp", "llamacpp-opaque"):
        with opened(name, tmp_path / "cache") as session:
            reply = ask(session, FOLLOWING)
            assert reply.reuse.disk == N
            assert_right(name, reply, FOLLOWING)


# -- off -----------------------------------------------------------------------------------------------------------


@principal
def test_reuse_off_neither_reads_nor_keeps(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path / "cache") as session:
        sequences = watch(session.engine)
        first = ask(session, PROMPT, reuse="off")
        session.flush()
        assert entries(session) == 0
        assert not any(map(is_open, sequences)), "nothing of it stays in the engine"
        second = ask(session, PROMPT)
        assert second.reuse.reused == 0, "nothing of it was kept"
        session.flush()
        kept = entries(session)
        third = ask(session, [*PROMPT, 5, 6], reuse="off")
        assert (third.reuse.reused, third.reuse.level, third.reuse.miss) == (0, "off", "off")
        assert third.usage.cached_tokens == 0
        session.flush()
        assert entries(session) == kept
        known = ask(session, [*PROMPT, 5, 6])
        assert known.reuse.reused == (60 if KINDS[kind].whole else N), "what was known before is still known"
        assert_right(kind, first, PROMPT)
        assert_right(kind, second, PROMPT)


@principal
@pytest.mark.parametrize("settings", [{"cache": "off"}, {"reuse": "off"}])
def test_a_session_without_reuse_leaves_no_trace(kind: str, settings: Any, tmp_path: Path) -> None:
    engine = make(kind)
    with Session(engine, **{"cache": tmp_path / "cache", **settings}) as session:
        sequences = watch(session.engine)
        for _ in range(2):
            reply = ask(session, PROMPT, reuse="exact")
            assert reply.reuse.reused == 0
            assert_right(kind, reply, PROMPT)
        assert not any(map(is_open, sequences))
    engine.close()
    assert not (tmp_path / "cache").exists()


@principal
def test_kv_older_than_its_time_to_live_is_not_served(kind: str, tmp_path: Path) -> None:
    """Wherever it is: on disk, in memory, or still in the engine."""
    with opened(kind, tmp_path / "cache", ttl="1s") as session:
        started = time.monotonic()
        ask(session, PROMPT, 0)
        session.flush()
        soon = ask(session, FOLLOWING)
        assert soon.reuse.reused == N or time.monotonic() - started > 1
        time.sleep(1.5)
        late = ask(session, FOLLOWING)
        assert_right(kind, late, FOLLOWING)
        assert late.reuse.reused == 0


# -- cancelling ----------------------------------------------------------------------------------------------------


@principal
@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_what_a_cancelled_stream_computed_is_right_for_the_next(
    kind: str, how: str, after: int, tmp_path: Path
) -> None:
    """Its prompt and what was decoded until then are known, and nothing that is not true."""
    with opened(kind, tmp_path / "cache") as session:
        steps = record(session.engine)
        stream = session.stream(PROMPT, max_tokens=200, min_tokens=200)
        while len(steps) < after:
            next(stream)
        getattr(stream, how)()
        assert list(stream) == []
        decoded = len(steps) - 1
        if KINDS[kind].whole:  # the others go on from where it stands in the engine
            session.flush()
        again = ask(session, PROMPT, 12)
        assert again.reuse.reused == reused(kind, PROMPT, PROMPT)
        assert_right(kind, again, PROMPT, 12)
    with opened(kind, tmp_path / "cache") as session:
        following = [*PROMPT, *again.tokens[:decoded], 251]
        longer = ask(session, following)
        assert longer.reuse.disk == len(following) - 1
        assert_right(kind, longer, following)


@principal
@pytest.mark.parametrize("warm", ["cold", "parked", "disk"])
@pytest.mark.parametrize("times", [0, 1])
def test_a_prefill_that_is_cancelled_leaves_nothing_half_computed(
    kind: str, warm: str, times: int, tmp_path: Path
) -> None:
    question = [*PROMPT, *tokens_of(40, seed=3)]
    if warm != "cold":
        with opened(kind, tmp_path / "cache") as session:
            session.warm([PROMPT])
    # llama.cpp and ONNX Runtime look before each of their batches.
    small = {"batch_tokens": 16} if kind.startswith(("llamacpp", "onnx")) else {}
    small |= {"sequences": 8} if kind.startswith("llamacpp") else {}
    with opened(partial(make, kind, **small), tmp_path / "cache") as session:
        if warm == "parked":
            ask(session, PROMPT, 0)
        engine: Any = session.engine
        sequences, real = watch(engine), engine.step
        stream = session.stream(question, max_tokens=5, min_tokens=5)
        cancel_when_asked(engine, stream.cancel, times)
        assert list(stream) == []
        with pytest.raises(Cancelled):
            _ = stream.reply
        engine.step = real
        assert not any(map(is_open, sequences))
        reply = ask(session, question)
        assert_right(kind, reply, question)
        assert reply.reuse.reused == (0 if warm == "cold" else N)


# -- several at once -----------------------------------------------------------------------------------------------


@principal
@pytest.mark.parametrize("memory", [0, "64MB"])
def test_threads_that_share_prefixes_get_the_right_text_and_leak_nothing(
    kind: str, memory: Any, tmp_path: Path
) -> None:
    shared = tokens_of(60, seed=20)
    prompts = [[*shared[: 20 + 10 * (i % 5)], STOP, *tokens_of(10 + i, seed=21 + i)] for i in range(10)]
    session = opened(kind, tmp_path / "cache", memory_limit=memory)
    sequences = watch(session.engine)
    wrong: list[object] = []
    replies: list[tuple[int, Reply]] = []

    def work(number: int) -> None:
        order = np.random.default_rng(number).permutation(len(prompts))
        for index in map(int, order):
            try:
                replies.append((index, ask(session, prompts[index], 8)))
            except BaseException as error:  # noqa: BLE001  (shown below)
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for index, reply in replies:
        assert_right(kind, reply, prompts[index], 8)
    assert len(replies) == 50 and sum(reply.reuse.reused > 0 for _, reply in replies) >= 20
    assert sum(map(is_open, sequences)) <= (0 if memory == 0 else 8), "only parked contexts are open"
    session.flush()
    session.close()
    assert not any(map(is_open, sequences))
    with opened(kind, tmp_path / "cache") as again:
        for prompt in prompts:
            reply = ask(again, prompt, 8)
            assert reply.reuse.reused == (prompt.index(STOP) + 1 if KINDS[kind].whole else len(prompt) - 1)
            assert_right(kind, reply, prompt, 8)


FILLERS = {  # where the thread of a feed ends
    "hf": "rekindle.engine.hf.layer_loader.LayerLoader._fill_all",
    "llamacpp": "rekindle.engine.threaded_job.ThreadedJob._do",
}


@each(*FILLERS)
def test_a_thread_that_fills_may_end_late_and_nothing_is_lost(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the thread of a feed may still be alive when the step that it fed is through."""
    with opened(kind, tmp_path / "cache") as session:
        session.warm([PROMPT])
    ended, may_end = [], threading.Event()
    real = pytest.importorskip(FILLERS[kind].rsplit(".", 2)[0])
    owner = getattr(real, FILLERS[kind].split(".")[-2])
    fill = getattr(owner, FILLERS[kind].split(".")[-1])

    def ending_late(self: Any, *given: Any) -> None:
        fill(self, *given)
        may_end.wait(60)
        ended.append(self)

    monkeypatch.setattr(FILLERS[kind], ending_late)
    with opened(kind, tmp_path / "cache", memory_limit="64MB") as session:
        reply = ask(session, PROMPT, 12)
        assert reply.reuse.disk == N - 1
        assert ended == [], "it is still there"
        may_end.set()
        assert_right(kind, reply, PROMPT, 12)
        following = [*PROMPT, *reply.tokens[:5], 4]
        again = ask(session, following, 12)
        assert again.reuse.reused == N + 5
        assert_right(kind, again, following, 12)


@contextmanager
def busy(engine: Any, seconds: float) -> Iterator[None]:
    """Somebody else computes for a while."""
    lock, begun = engine._lock if hasattr(engine, "_lock") else engine._cells.lock, threading.Event()

    def compute() -> None:
        with lock:
            begun.set()
            time.sleep(seconds)

    thread = threading.Thread(target=compute)
    thread.start()
    assert begun.wait(10)
    yield
    thread.join()


@principal
def test_a_load_that_waited_for_the_engine_is_not_called_late(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others compute first: that is no fault of the cache, and computing everything would only take longer."""
    with opened(kind, tmp_path / "cache") as session:
        session.warm([PROMPT])
    monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 3.0)
    real = StoredFeed._fill
    monkeypatch.setattr(StoredFeed, "_fill", lambda *args: (time.sleep(0.02), real(*args))[1])
    with opened(kind, tmp_path / "cache") as session, busy(session.engine, 4.0):
        reply = ask(session, PROMPT)
        assert_right(kind, reply, PROMPT)
        assert reply.reuse.disk == reused(kind, PROMPT, PROMPT)


def test_a_load_that_is_late_is_learned_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would be tried again, and computed afterwards, every time."""
    with opened("hf", tmp_path / "cache") as session:
        session.warm([PROMPT])
    monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 0.05)
    real = StoredFeed._fill
    monkeypatch.setattr(StoredFeed, "_fill", lambda *args: (time.sleep(0.2), real(*args))[1])
    with opened("hf", tmp_path / "cache") as session:
        session.cache.kv.costs = costs = Costs(FREE)
        assert ask(session, PROMPT).reuse.miss == "lost"
        ((*_, seconds, _),) = costs.as_json()["disk"]
        assert seconds >= 0.05


# -- memory --------------------------------------------------------------------------------------------------------


def parked_bytes(session: Session) -> int:
    """What contexts in the engine take that would be free without them: nothing, where all share one buffer."""
    if session.engine.capabilities.crowded:
        return 0
    parked = session.cache._parked
    with parked._lock:
        return sum(context.size_bytes for context in parked._parked)


def held_bytes(session: Session) -> int:
    """What the arrays of the memory tier keep from being freed, whole as they were made."""
    assert session.cache.store is not None
    owners = {}
    for held in list(session.cache.store.memory._held.values()):
        for layer in held.layers:
            for array in (layer.keys, layer.values):
                while isinstance(array.base, np.ndarray):
                    array = array.base
                owners[id(array)] = array.nbytes
    return sum(owners.values())


@principal
@pytest.mark.parametrize("limit", [0, 100_000, 700_000])
def test_parked_contexts_and_held_kv_never_exceed_the_memory_limit(kind: str, limit: int, tmp_path: Path) -> None:
    worst: list[int] = []
    running = True

    def look() -> None:
        while running:
            worst.append(parked_bytes(session) + held_bytes(session))
            time.sleep(0.001)

    with opened(kind, tmp_path / "cache", memory_limit=limit) as session:
        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            hits = 0
            for number in range(30):
                prompt = [*PROMPT[: 10 * (number % 7)], *tokens_of(20 + number, seed=number)]
                hits += ask(session, prompt, 4).reuse.reused
                if number % 4 == 0:
                    session.flush()
                worst.append(parked_bytes(session) + held_bytes(session))
            session.flush()
            assert session.cache.store is not None
            session.cache.store.maintain()
        finally:
            running = False
            watcher.join()
        worst.append(parked_bytes(session) + held_bytes(session))
        assert max(worst) <= limit
        assert limit < 700_000 or max(worst) > 0
        assert hits > 0


@with_spans
def test_the_memory_tier_keeps_no_more_from_being_freed_than_it_counts(kind: str, tmp_path: Path) -> None:
    """Also of KV that was copied in a hurry and of which only a part is admitted."""
    session = opened(kind, tmp_path / "cache", admission="second-use", memory_limit="64MB")
    store, writer = session.cache.store, session.cache.writer
    assert store is not None and writer is not None
    session.warm([PROMPT])  # met once
    session.cache.unpark()
    gate, real = threading.Event(), store.admit
    store.admit = lambda *args, **how: (gate.wait(60), real(*args, **how))[1]  # type: ignore[method-assign]
    question = [*PROMPT[:64], *tokens_of(300, seed=30)]
    ask(session, question, 1)
    assert ask(session, [*question[:200], 251], 1).reuse.engine == 200  # goes on from it: what is to be kept is copied
    gate.set()
    session.flush()
    assert len(store.memory) > 0
    assert held_bytes(session) <= store.memory.size_bytes
    session.close()


# -- a rope that changes -------------------------------------------------------------------------------------------

SWITCH = 48


def changing_engine() -> Engine:
    """A Phi-3 that changes its rotary frequencies past 48 tokens."""
    from tests.tiny import tiny_engine

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 5.0, 7.0],
        "original_max_position_embeddings": SWITCH,
    }
    return tiny_engine("phi3", rope_parameters=rope, original_max_position_embeddings=SWITCH, sliding_window=None)


@pytest.fixture(scope="module")
def changing() -> Iterator[Session]:
    yield Session(changing_engine(), cache="off")


@needs("hf")
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("count", [SWITCH - 20, SWITCH - 1, SWITCH])
def test_a_reply_that_crosses_into_another_rope_is_the_same_with_a_cache(
    restarted: bool, count: int, changing: Session, tmp_path: Path
) -> None:
    prompt = tokens_of(count, seed=40)
    expected = ask(changing, prompt, 40)
    session = opened(changing_engine, tmp_path / "cache")
    first = ask(session, prompt, 40)
    assert first.reuse.reused == 0 and first.tokens == expected.tokens
    session.flush()
    if restarted:
        session.close()
        session = opened(changing_engine, tmp_path / "cache")
    second = ask(session, prompt, 40)
    assert second.reuse.reused == count - 1
    assert second.tokens == expected.tokens
    session.flush()
    other = [*prompt[: count - 5], 251, 250, 249]  # stays below, then crosses
    assert ask(session, other, 40).tokens == ask(changing, other, 40).tokens
    known = [*prompt, *expected.tokens[:-1]]
    following = [*known, *tokens_of(9, seed=41)]
    longer = ask(session, following, 10)
    assert longer.reuse.reused == len(known), "all of it, as computed under the long rope"
    assert longer.tokens == ask(changing, following, 10).tokens
    session.close()


@needs("hf")
def test_kv_of_one_rope_is_never_served_under_another(changing: Session, tmp_path: Path) -> None:
    short = tokens_of(SWITCH - 2, seed=42)
    long = [*short, *tokens_of(20, seed=43)]
    with opened(changing_engine, tmp_path / "cache") as session:
        session.warm([short])
        reply = ask(session, long, 5)
        assert reply.reuse.reused == 0
        assert reply.tokens == ask(changing, long, 5).tokens
        session.flush()
        assert ask(session, short, 1).reuse.reused == len(short) - 1
        assert ask(session, long[: SWITCH + 3], 5).reuse.reused == SWITCH + 2
        back = ask(session, long[:SWITCH], 1)
        assert back.reuse.reused == len(short), "the short rope knows what it computed itself"
        assert back.tokens == ask(changing, long[:SWITCH], 1).tokens


@needs("llamacpp")
def test_llama_cpp_takes_its_rope_by_the_context_and_kv_of_another_is_not_served(tmp_path: Path) -> None:
    from rekindle.engine.llamacpp.engine import LlamaCppEngine
    from rekindle.engine.llamacpp.options import LlamaOptions
    from tests.tiny_gguf import files_of, write_llama

    files = files_of(write_llama(tmp_path / "long.gguf", context=1024, switch=512))

    def sized(context_tokens: int) -> LlamaCppEngine:
        return LlamaCppEngine(files, LlamaOptions(device="cpu", threads=1, context_tokens=context_tokens))

    replies = {}
    for tokens in (256, 1024, 256, 1024):
        with opened(partial(sized, tokens), tmp_path / "cache") as session:
            assert session.engine.regime(100) == ("short" if tokens == 256 else "long")
            reply = ask(session, PROMPT, 12)
            assert reply.tokens == replies.setdefault(tokens, reply).tokens
            assert reply.reuse.disk == (0 if reply is replies[tokens] else N - 1)
            assert reply.tokens == ask(session, PROMPT, 12, reuse="off").tokens
    assert replies[256].tokens != replies[1024].tokens, "the ropes differ, so the law is not empty"
