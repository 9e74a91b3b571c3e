"""A model that is let go when nobody uses it, and comes back when somebody does: nothing else changes."""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.core.reply import Reply
from rekindle.engine.fake import FakeEngine
from rekindle.engine.reloadable import ReloadableEngine
from rekindle.errors import Closed, InvalidSetting
from rekindle.session.keep_alive import KeepAlive
from tests.lora import save_lora

pytestmark = pytest.mark.thorough

HAS_LLAMACPP = importlib.util.find_spec("xllamacpp") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None

CHAT = [
    {"role": "system", "content": "You look after a lighthouse and write down the wind every morning."},
    {"role": "user", "content": "What was the wind like today?"},
]
LATER = [*CHAT, {"role": "assistant", "content": "Calm."}, {"role": "user", "content": "And before?"}]


@pytest.fixture(
    params=[
        pytest.param(
            "llamacpp",
            marks=[pytest.mark.llamacpp, pytest.mark.skipif(not HAS_LLAMACPP, reason="no llama.cpp here")],
        ),
        pytest.param("hf", marks=pytest.mark.skipif(not HAS_TORCH, reason="no torch here")),
    ]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What to open: a tiny model of each engine."""
    if request.param == "hf":
        request.getfixturevalue("one_thread")
        return {"model": str(request.getfixturevalue("tiny_folder")), "engine": "hf", "device": "cpu"}
    from tests.tiny_gguf import write_llama

    path = write_llama(tmp_path_factory.mktemp("resting") / "tiny.gguf")
    return {"model": str(path), "engine": "llamacpp", "threads": 1}


@pytest.fixture
def start(model: dict[str, Any], tmp_path: Path) -> Iterator[Callable[..., Session]]:
    opened: list[Session] = []

    def begin(**settings: Any) -> Session:
        given = {**model, "cache": str(tmp_path / "cache"), "disk_limit": "200MB", **settings}
        opened.append(Session(given.pop("model"), **given))
        return opened[-1]

    yield begin
    for session in opened:
        session.close()


def ask(session: Session, chat: Any = CHAT, **options: Any) -> Reply:
    return session.chat(chat, max_tokens=8, min_tokens=8, **options)


def resting(session: Session) -> bool:
    assert isinstance(session.engine, ReloadableEngine)
    return session.engine.resting


def loads_of(session: Session) -> list[None]:
    """Grows by one with every load of the model from now on."""
    engine: Any = session.engine
    loads: list[None] = []
    load = engine._load

    def counted() -> object:
        loads.append(None)
        return load()

    engine._load = counted
    return loads


def eventually(what: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.005)
    return what()


def test_a_model_rests_when_nobody_used_it_and_comes_back_on_demand(start: Callable[..., Session]) -> None:
    expected = [ask(start(cache="off"), chat).text for chat in (CHAT, LATER)]
    session = start(keep_alive="0.05s")
    loads = loads_of(session)
    for _ in range(3):
        assert eventually(lambda: resting(session))
        before = len(loads)
        assert ask(session).text == expected[0] and len(loads) > before
        assert ask(session, LATER).text == expected[1]


def test_a_model_that_nobody_ever_used_rests_too(start: Callable[..., Session]) -> None:
    session = start(keep_alive="0.05s")
    assert eventually(lambda: resting(session))
    assert ask(session).tokens


def test_kv_is_reused_from_memory_when_the_model_comes_back(start: Callable[..., Session]) -> None:
    session = start(keep_alive="0.05s")
    first = ask(session)
    assert eventually(lambda: resting(session))
    again = ask(session)
    assert again.text == first.text
    assert again.reuse.memory == again.reuse.reused == first.usage.prompt_tokens - 1
    assert again.reuse.engine == 0, "the sequences went with the model"


def test_kv_is_reused_from_disk_after_a_restart(start: Callable[..., Session]) -> None:
    session = start(keep_alive="0.05s")
    first = ask(session)
    assert eventually(lambda: resting(session))
    session.close()
    again = ask(start(keep_alive="0.05s"))
    assert again.text == first.text and again.reuse.disk == first.usage.prompt_tokens - 1


def test_a_model_stays_while_somebody_reads_its_reply(start: Callable[..., Session]) -> None:
    session = start(keep_alive="0.02s")
    stream = session.stream(CHAT, max_tokens=30, min_tokens=30)
    pieces = []
    for piece in stream:
        pieces.append(piece)
        time.sleep(0.04)  # twice as long as it may rest
        assert not resting(session)
    assert len(stream.reply.tokens) == 30 and "".join(pieces) == stream.reply.text
    assert eventually(lambda: resting(session))


def test_a_model_rests_after_a_stream_that_nobody_reads_to_its_end(start: Callable[..., Session]) -> None:
    session = start(keep_alive="0.02s")
    with session.stream(CHAT, max_tokens=30, min_tokens=30) as stream:
        next(stream)
    assert eventually(lambda: resting(session))
    abandoned = session.stream(CHAT, max_tokens=30, min_tokens=30)
    next(abandoned)
    time.sleep(0.1)
    assert not resting(session)
    del abandoned
    assert eventually(lambda: resting(session))


def test_a_request_that_fails_lets_the_model_rest(start: Callable[..., Session]) -> None:
    session = start(keep_alive="0.02s")
    with pytest.raises(ValueError):
        session.generate([10**9])
    assert eventually(lambda: resting(session))


def test_closing_while_it_rests(start: Callable[..., Session]) -> None:
    session = start(keep_alive="0.02s")
    ask(session)
    assert eventually(lambda: resting(session))
    session.close()
    session.close()
    with pytest.raises(Closed):
        ask(session)


def test_closing_ends_the_waiting(start: Callable[..., Session]) -> None:
    session = start(keep_alive="3600s")
    ask(session)
    session.close()
    assert eventually(lambda: not any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))


def test_explaining_wakes_it_and_tells_the_same(start: Callable[..., Session]) -> None:
    session = start(keep_alive="0.05s")
    ask(session)
    assert session.flush()
    assert eventually(lambda: resting(session))
    explained = session.explain(CHAT)
    assert explained.reused == explained.tokens - 1 and explained.reason.kind == "complete"
    assert eventually(lambda: resting(session))
    assert session.explain(LATER).reused > 20
    assert eventually(lambda: resting(session))
    assert ask(session, LATER).reuse.reused > 20


def test_requests_at_the_very_moment_of_resting_are_answered(start: Callable[..., Session]) -> None:
    """Again and again, from several threads, after pauses about as long as it stays."""
    expected = {str(chat): ask(start(cache="off"), chat).text for chat in (CHAT, LATER)}
    session, chance = start(keep_alive="0.01s"), random.Random(0)
    loads, wrong = loads_of(session), list[object]()

    def work(pause: float, chat: list[dict[str, str]]) -> None:
        time.sleep(pause)
        try:
            text = ask(session, chat).text
            if text != expected[str(chat)]:
                wrong.append(text)
            if pause < 0.005:
                session.explain(chat)
        except BaseException as error:  # noqa: BLE001  (it is looked at below)
            wrong.append(error)

    for number in range(200):
        if number >= 20 and len(loads) >= 5:
            break
        longest = 0.02 + number * 0.001  # a machine with much else to do gives a moment of rest at last
        given = [(chance.uniform(0.0, longest), chance.choice((CHAT, LATER))) for _ in range(3)]
        threads = [threading.Thread(target=work, args=one) for one in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert len(loads) >= 5, "it hardly rested: the test shows nothing"
    assert eventually(lambda: resting(session))


def test_closing_at_the_very_moment_of_resting_ends(start: Callable[..., Session]) -> None:
    for number in range(10):
        session = start(keep_alive="0.01s", cache="off")
        ask(session)
        time.sleep(number * 0.003)
        session.close()


def test_a_time_that_is_none_is_refused_before_anything_is_loaded(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rekindle.session import session

    loaded: list[object] = []
    monkeypatch.setattr(session, "load_engine", lambda *how: loaded.append(how) or FakeEngine())
    for wrong in ("soon", "-1s", "5 weeks", ""):
        with pytest.raises(InvalidSetting, match="time"):
            start(keep_alive=wrong)
    assert not loaded


def test_how_far_the_first_load_has_come_is_told(start: Callable[..., Session]) -> None:
    told: list[str] = []
    session = start(keep_alive="1h", progress=lambda stage, done, total: told.append(stage))
    assert "load" in told
    ask(session)


def test_an_engine_that_was_given_stays(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="an engine that was given stays loaded"):
        Session(FakeEngine(), keep_alive="1s", cache=str(tmp_path / "cache"))


# The parts alone


class Counting(FakeEngine):
    """A fake engine that knows how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


def test_an_engine_is_loaded_once_however_many_ask_at_once() -> None:
    loaded: list[Counting] = []

    def load() -> Counting:
        time.sleep(0.02)
        loaded.append(Counting())
        return loaded[-1]

    engine = ReloadableEngine(load)
    for _ in range(3):
        engine.rest()
        engine.rest()
        before = len(loaded)
        threads = [threading.Thread(target=lambda: engine.open(5, "plain")) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(loaded) == before + 1
    engine.close()
    engine.close()
    assert all(one.closed == 1 for one in loaded)
    for use in (
        lambda: engine.tokenizer,
        lambda: engine.open(5, "plain"),
        lambda: engine.step([]),
        lambda: engine.inner,
    ):
        with pytest.raises(Closed):
            use()


def test_what_is_known_of_an_engine_does_not_wake_it() -> None:
    engine = ReloadableEngine(Counting)
    regime = engine.regime(5)
    identity = engine.identity(regime)
    assert engine.tokenizer.encode("x")
    engine.rest()
    assert (engine.name, engine.device, engine.context_tokens, engine.prefill_tokens) and engine.layout
    assert engine.capabilities.spans and engine.identity(regime) == identity and engine.tokenizer.encode("x")
    assert engine.resting
    engine.close()


def test_a_load_that_fails_can_be_tried_again() -> None:
    outcomes: list[Any] = [FakeEngine(), OSError("gone"), FakeEngine()]

    def load() -> FakeEngine:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    engine = ReloadableEngine(load)
    engine.rest()
    with pytest.raises(OSError, match="gone"):
        engine.open(5, "plain")
    assert engine.resting and engine.open(5, "plain").capacity == 5


def test_a_model_is_kept_for_its_last_user() -> None:
    rested: list[float] = []
    alive = KeepAlive(0.02, lambda: rested.append(time.monotonic()))
    with alive.use():
        with alive.use():
            time.sleep(0.05)
        time.sleep(0.05)
        assert not rested
    assert eventually(lambda: len(rested) == 1)
    with alive.use():
        pass
    assert eventually(lambda: len(rested) == 2)
    with alive.use():
        pass
    alive.close()
    time.sleep(0.05)
    assert len(rested) == 2


def test_a_model_that_is_to_stay_stays() -> None:
    rested: list[int] = []
    alive = KeepAlive(None, lambda: rested.append(1))
    with alive.use():
        pass
    time.sleep(0.02)
    assert not rested
    alive.close()


@pytest.mark.llamacpp
@pytest.mark.skipif(not HAS_LLAMACPP, reason="no llama.cpp here")
def test_a_model_whose_state_is_kept_whole_rests_too(tmp_path: Path) -> None:
    from tests.tiny_hybrids import write_mamba

    path = write_mamba(tmp_path / "mamba.gguf")
    how: dict[str, Any] = {"engine": "llamacpp", "threads": 1}
    with Session(str(path), cache="off", **how) as without:
        expected = [ask(without, chat).text for chat in (CHAT, LATER)]
    with Session(str(path), cache=str(tmp_path / "cache"), keep_alive="0.02s", **how) as session:
        for number in range(3):
            reply, later = ask(session), ask(session, LATER)
            assert [reply.text, later.text] == expected
            assert number == 0 or (reply.reuse.memory > 60 and later.reuse.reused > 60)
            assert eventually(lambda: resting(session))


def test_a_model_that_rested_has_its_adapters_again(start: Callable[..., Session], tmp_path: Path) -> None:
    session = start(keep_alive="1h")
    hidden = 64 if session.engine_kind == "llamacpp" else 32
    drawn = np.random.default_rng(0)
    down, up = drawn.normal(0, 1, (2, hidden)).astype("f4"), drawn.normal(0, 1, (hidden, 2)).astype("f4")
    session.adapters.load("writer", save_lora(tmp_path / "lora", {"model.layers.1.self_attn.q_proj": (down, up)}))
    before = ask(session, adapter="writer").text
    assert before != ask(session).text
    session._rest()
    assert resting(session) and session.adapters.loaded_bytes == 0
    assert ask(session, adapter="writer", reuse="off").text == before
    assert session.adapters.loaded_bytes > 0
