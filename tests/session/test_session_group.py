"""Sessions that share memory: a model leaves for another, comes back warm, and nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.load import load_engine
from rekindle.errors import Cancelled, Closed, OutOfMemory
from rekindle.session.session_group import SessionGroup
from rekindle.settings import Settings

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_thread")]

PATIENCE_SECONDS = 60.0
CHAT = [
    {"role": "system", "content": "You look after a lighthouse and write down the wind every morning."},
    {"role": "user", "content": "What was the wind like today?"},
]


class Group(SessionGroup):
    """Notes which models are in memory whenever one was loaded."""

    def __init__(self, limit: int, settings: Settings) -> None:
        super().__init__(limit, settings)
        self.sessions: list[Session] = []
        self.seen: list[int] = []

    def load(self, member: Any, load: Any) -> Any:
        engine = super().load(member, load)
        self.seen.append(1 + sum(one is not member and not one.resting for one in self.sessions))
        return engine


@pytest.fixture
def start(two_folders: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., tuple[Session, Session]]]:
    """Open both models within a limit, as a multiple of the size of one."""
    settings: dict[str, Any] = {"engine": "hf", "device": "cpu", "cache": str(tmp_path / "cache"), "parallel": 2}
    opened: list[Session] = []

    def begin(models: float, **more: Any) -> tuple[Session, Session]:
        with Session(two_folders[0], **settings) as one:
            size = one.engine.memory_bytes
        given = {**settings, **more}
        group = Group(int(models * size), Settings.load(given))
        for folder in two_folders:
            opened.append(Session(folder, group=group, **given))
            group.sessions.append(opened[-1])
        return opened[-2], opened[-1]

    yield begin
    for session in opened:
        session.close()


def ask(session: Session, **options: Any) -> Reply:
    return session.chat(CHAT, max_tokens=8, min_tokens=8, **options)


def group_of(session: Session) -> Group:
    group = session._group
    assert isinstance(group, Group)
    return group


def eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never became so"
        time.sleep(0.005)


@pytest.fixture
def expected(two_folders: tuple[Path, Path]) -> list[str]:
    """What each model says alone and without a cache."""
    texts = []
    for folder in two_folders:
        with Session(folder, engine="hf", device="cpu", cache="off") as session:
            texts.append(ask(session).text)
    assert texts[0] != texts[1]
    return texts


def test_a_model_leaves_for_another_and_is_warm_from_disk_when_it_returns(
    start: Callable[..., tuple[Session, Session]], expected: list[str]
) -> None:
    alpha, beta = start(1.5)
    assert alpha.resting and not beta.resting, "the second took the place of the first"
    first = ask(alpha)
    assert beta.resting and not alpha.resting and first.text == expected[0]
    other = ask(beta)
    assert alpha.resting and other.text == expected[1] and other.reuse.reused == 0, "KV of another model is not its own"
    again = ask(alpha)
    assert again.text == expected[0] and again.reuse.disk == first.usage.prompt_tokens - 1
    assert max(group_of(alpha).seen) == 1


def test_models_that_fit_stay_and_the_least_recently_used_leaves_first(
    start: Callable[..., tuple[Session, Session]], two_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    alpha, beta = start(2.5)
    assert not alpha.resting and not beta.resting
    ask(beta)
    ask(alpha)
    settings = alpha.settings
    with Session(
        two_folders[0], group=group_of(alpha), engine="hf", device="cpu", cache=settings.cache, parallel=2
    ) as third:
        assert beta.resting and not alpha.resting and not third.resting
        assert ask(third).reuse.reused, "the same weights: the same KV"


def test_a_model_in_use_stays_and_the_other_waits_for_it(start: Callable[..., tuple[Session, Session]]) -> None:
    alpha, beta = start(1.5)
    stream = alpha.stream(CHAT, max_tokens=30, min_tokens=30)
    pieces = [next(iter(stream))]
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask, beta)
        eventually(lambda: group_of(alpha)._wanted_by is beta)
        late = pool.submit(ask, alpha)  # does not overtake the one that waits
        pieces += list(stream)
        assert other.result(PATIENCE_SECONDS).tokens and late.result(PATIENCE_SECONDS).tokens
    assert len(stream.reply.tokens) == 30 and max(group_of(alpha).seen) == 1


def test_many_requests_to_both_get_what_each_model_says(
    start: Callable[..., tuple[Session, Session]], expected: list[str]
) -> None:
    both = start(1.5)
    with ThreadPoolExecutor(6) as pool:
        asked = [(number % 2, pool.submit(ask, both[number % 2])) for number in range(12)]
        for number, reply in asked:
            assert reply.result(PATIENCE_SECONDS).text == expected[number]
    assert max(group_of(both[0]).seen) == 1


def test_what_does_not_fit_alone_is_refused_with_both_sizes(start: Callable[..., tuple[Session, Session]]) -> None:
    with pytest.raises(OutOfMemory, match=r"alpha takes .*B of memory, and model_memory allows .*B"):
        start(0.5)


def test_a_request_that_is_cancelled_leaves_while_its_model_is_loaded(
    start: Callable[..., tuple[Session, Session]], monkeypatch: pytest.MonkeyPatch, expected: list[str]
) -> None:
    alpha, beta = start(1.5)
    go, begun = threading.Event(), threading.Event()

    def slow(*given: Any, **more: Any) -> Any:
        begun.set()
        assert go.wait(PATIENCE_SECONDS)
        return load_engine(*given, **more)

    monkeypatch.setattr("rekindle.session.session.load_engine", slow)
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(lambda: alpha.answer(Request.of(CHAT), cancelled).reply)
        assert begun.wait(PATIENCE_SECONDS)
        cancelled.set()
        with pytest.raises(Cancelled):
            gone.result(PATIENCE_SECONDS)
    assert alpha.resting
    go.set()
    assert ask(alpha).text == expected[0] and ask(beta).text == expected[1]


def test_a_load_that_waits_for_memory_ends_when_the_group_is_closed(
    start: Callable[..., tuple[Session, Session]],
) -> None:
    alpha, beta = start(1.5)
    with alpha.stream(CHAT, max_tokens=30, min_tokens=30) as stream, ThreadPoolExecutor(1) as pool:
        next(iter(stream))
        waiting = pool.submit(ask, beta)
        eventually(lambda: group_of(alpha)._wanted_by is beta)
        group_of(alpha).stop()
        with pytest.raises(Closed):
            waiting.result(PATIENCE_SECONDS)


def test_a_model_that_cannot_be_loaded_again_gives_its_place_back(
    start: Callable[..., tuple[Session, Session]], monkeypatch: pytest.MonkeyPatch
) -> None:
    alpha, beta = start(1.5)

    def broken(*_: Any, **__: Any) -> Any:
        raise OutOfMemory("There is no memory.")

    with monkeypatch.context() as patch:
        patch.setattr("rekindle.session.session.load_engine", broken)
        with pytest.raises(OutOfMemory):
            ask(alpha)
    assert ask(beta).tokens and ask(alpha).tokens


def test_what_is_forgotten_is_forgotten_in_all(start: Callable[..., tuple[Session, Session]]) -> None:
    both = start(2.5)
    for session in both:
        ask(session)
        assert ask(session).reuse.reused
    group_of(both[0])._purge("local", "", [], [], everything=True)
    assert [ask(session).reuse.reused for session in both] == [0, 0]


def test_a_context_fits_the_limit_of_the_group(two_folders: tuple[Path, Path], tmp_path: Path) -> None:
    with Session(two_folders[0], engine="hf", device="cpu", cache="off") as alone:
        size, longest = alone.engine.memory_bytes, alone.engine.context_tokens
        token_bytes = alone.engine.layout.token_bytes
    group = SessionGroup(size + 2 * 512 * token_bytes, Settings.load({"cache": "off"}))
    given: dict[str, Any] = {"engine": "hf", "device": "cpu", "cache": "off", "group": group}
    with Session(two_folders[0], **given) as session:
        assert session.engine.context_tokens == min(512, longest)
