"""Adapters of a session: each has KV of its own, found again by what it does and not by what it is called."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.engine import lora_manager
from rekindle.engine.fake import FakeEngine
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import (
    AdapterNotFound,
    AdapterRefused,
    Cancelled,
    InvalidSetting,
    ModelNotFound,
    OutOfMemory,
)
from rekindle.models import adapter_registry as known
from tests.lora import fake_pairs, save_lora

pytestmark = pytest.mark.thorough

PROMPT = "Once there was a harbour with three cranes, and each of them had a name of its own. " * 3


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [save_lora(tmp_path / f"lora{seed}", fake_pairs(seed)) for seed in range(3)]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with open_session(tmp_path) as opened:
        yield opened


def open_session(tmp_path: Path, **settings: Any) -> Session:
    return Session(FakeEngine(), cache=str(tmp_path / "cache"), **settings)


def reused(session: Session, **options: Any) -> int:
    """How many tokens of the prompt were known, in the store or in the engine."""
    session.flush()
    return session.generate(PROMPT, max_tokens=1, **options).reuse.reused


def uncached(folder: Path | None, prompt: str, tokens: int) -> str:
    with Session(FakeEngine(), cache="off") as alone:
        if folder is not None:
            alone.adapters.load("x", folder)
        return alone.generate(prompt, max_tokens=tokens, adapter="x" if folder else None).text


def test_an_adapter_answers_as_without_a_cache_and_others_as_if_it_were_not_there(
    session: Session, folders: list[Path]
) -> None:
    for number, folder in enumerate(folders):
        session.adapters.load(f"a{number}", folder)
    texts = {}
    for _ in range(2):  # the second time from the cache
        for name, folder in [(None, None), *((f"a{n}", f) for n, f in enumerate(folders))]:
            texts[name] = session.generate(PROMPT, max_tokens=12, adapter=name).text
            assert texts[name] == uncached(folder, PROMPT, 12)
            session.flush()
    assert len(set(texts.values())) == 4


def test_kv_is_found_by_what_an_adapter_does_and_never_by_its_name(
    session: Session, folders: list[Path], tmp_path: Path
) -> None:
    session.adapters.load("writer", folders[0])
    assert reused(session, adapter="writer") == 0
    assert reused(session, adapter="writer") > 0
    assert reused(session) == 0  # the model alone is something else
    session.adapters.load("renamed", folders[0])
    assert reused(session, adapter="renamed") > 0
    session.adapters.load("writer", folders[1])  # another one under the same name
    assert reused(session, adapter="writer") == 0
    session.adapters.load("weaker", folders[0], 0.5)
    assert reused(session, adapter="weaker") == 0
    with open_session(tmp_path) as again:
        again.adapters.load("another.name", folders[0])
        assert reused(again, adapter="another.name") > 0


def test_a_long_walk_over_adapters_gives_what_no_cache_gives(folders: list[Path], tmp_path: Path) -> None:
    draw = random.Random(5)
    pieces = ["The crane called Ada lifts a box. ", "Nobody looked. ", "It rained on the quay and on us all. "]
    expected: dict[tuple[int | None, str], str] = {}
    for _ in range(3):
        with open_session(tmp_path, memory_limit="200KB") as session:
            for number, folder in enumerate(folders):
                session.adapters.load(f"a{number}", folder)
            for _ in range(12):
                number = draw.choice([None, 0, 1, 2])
                prompt = "".join(draw.choices(pieces, k=draw.randint(2, 5)))
                got = session.generate(prompt, max_tokens=4, adapter=None if number is None else f"a{number}").text
                if (number, prompt) not in expected:
                    expected[number, prompt] = uncached(None if number is None else folders[number], prompt, 4)
                assert got == expected[number, prompt]
                if draw.random() < 0.3:
                    session.cache.unpark()


def test_the_adapter_of_a_session_and_none(folders: list[Path], tmp_path: Path) -> None:
    with open_session(tmp_path, adapter=f"writer={folders[0]}") as session:
        assert session.generate(PROMPT, max_tokens=8).text == uncached(folders[0], PROMPT, 8)
        assert session.generate(PROMPT, max_tokens=8, adapter="").text == uncached(None, PROMPT, 8)
        assert [adapter.name for adapter in session.adapters] == ["writer"]
    with open_session(tmp_path, adapter=f"writer={folders[0]},scale=0.5") as session:
        assert [adapter.scale for adapter in session.adapters] == [0.5]


def test_a_known_adapter_is_loaded_when_it_is_named(session: Session, folders: list[Path]) -> None:
    known.add("writer", folders[0])
    assert session.generate(PROMPT, max_tokens=8, adapter="writer").text == uncached(folders[0], PROMPT, 8)
    known.remove("writer")
    assert all(entry.packaged for entry in known.entries())
    with pytest.raises(AdapterNotFound):
        known.remove("writer")


def test_an_adapter_that_is_unloaded_goes_when_its_last_reply_is_through(session: Session, folders: list[Path]) -> None:
    engine = session.engine
    assert isinstance(engine, FakeEngine)
    digest = session.adapters.load("writer", folders[0]).digest
    session.adapters.load("same", folders[0])
    stream = session.stream(PROMPT, max_tokens=9, adapter="writer")
    begun = next(iter(stream))
    session.adapters.unload("writer")
    session.adapters.unload("same")
    assert digest in engine._adapted
    rest = "".join(stream)
    assert begun + rest == uncached(folders[0], PROMPT, 9)
    assert digest not in engine._adapted
    with pytest.raises(AdapterNotFound, match="writer"):
        session.generate(PROMPT, max_tokens=1, adapter="writer")


def test_a_reply_keeps_the_adapter_it_began_with(session: Session, folders: list[Path]) -> None:
    session.adapters.load("writer", folders[0])
    stream = session.stream(PROMPT, max_tokens=9, adapter="writer")
    begun = next(iter(stream))
    session.adapters.load("writer", folders[1])
    assert begun + "".join(stream) == uncached(folders[0], PROMPT, 9)
    assert session.generate(PROMPT, max_tokens=9, adapter="writer").text == uncached(folders[1], PROMPT, 9)


def test_what_cannot_be_loaded_says_why_and_changes_nothing(
    session: Session, folders: list[Path], tmp_path: Path
) -> None:
    session.adapters.load("writer", folders[0])
    before = session.generate(PROMPT, max_tokens=6, adapter="writer").text
    with pytest.raises(ModelNotFound, match="adapter_config.json"):
        session.adapters.load("writer", tmp_path)
    odd = {"layers.7.q": (np.ones((2, 32), "f4"), np.ones((32, 2), "f4"))}
    with pytest.raises(AdapterRefused, match=r"layers\.7\.q"):
        session.adapters.load("writer", save_lora(tmp_path / "odd", odd))
    with pytest.raises(InvalidSetting, match="cannot be called"):
        session.adapters.load("", folders[0])
    with pytest.raises(InvalidSetting, match="NAME=PATH"):
        session.adapters.load_text("writer=x,scale=much")
    with pytest.raises(AdapterNotFound, match=r"Did you mean .*writer"):
        session.generate(PROMPT, adapter="wrter")
    assert session.generate(PROMPT, max_tokens=6, adapter="writer").text == before


def test_warming_is_for_one_adapter(session: Session, folders: list[Path]) -> None:
    session.adapters.load("writer", folders[0])
    session.warm(PROMPT, adapter="writer")
    session.cache.unpark()
    assert reused(session, adapter="writer") > 0
    assert reused(session) == 0


def test_a_digest_is_no_name(session: Session, folders: list[Path]) -> None:
    digest = session.adapters.load("writer", folders[0]).digest
    stream = session.stream(PROMPT, max_tokens=9, adapter="writer")
    next(iter(stream))
    with pytest.raises(AdapterNotFound):
        session.generate(PROMPT, adapter=digest)
    session.adapters.load(digest, folders[1])
    assert session.generate(PROMPT, max_tokens=6, adapter=digest).text == uncached(folders[1], PROMPT, 6)
    stream.close()


def test_explaining_loads_nothing(session: Session, folders: list[Path]) -> None:
    known.add("writer", folders[0])
    session.explain(PROMPT, adapter="writer")
    assert not list(session.adapters)
    session.generate(PROMPT, max_tokens=1, adapter="writer")
    session.flush()
    assert session.explain(PROMPT, adapter="writer").reused > 0
    assert session.explain(PROMPT).reused == 0


def test_a_session_keeps_its_own_adapter_and_a_server_loads_none_by_itself(folders: list[Path], tmp_path: Path) -> None:
    known.add("known", folders[1])
    with open_session(tmp_path, adapter=f"writer={folders[0]}") as session:
        with pytest.raises(InvalidSetting, match="default adapter"):
            session.adapters.unload("writer")
        session.adapters.loads_known = False
        with pytest.raises(AdapterNotFound):
            session.generate(PROMPT, adapter="known")


def test_loading_again_while_the_last_reply_ends_leaves_it_usable(session: Session, folders: list[Path]) -> None:
    """The engine has it while it is named again; then the last reply ends."""
    engine = session.engine
    assert isinstance(engine, FakeEngine)
    session.adapters.load("writer", folders[0])
    stream = session.stream(PROMPT, max_tokens=5, adapter="writer")
    next(iter(stream))
    session.adapters.unload("writer")
    check = engine.check_adapter

    def slow(lora: Any) -> Any:
        fit = check(lora)
        "".join(stream)  # the last reply ends now
        return fit

    engine.check_adapter = slow  # type: ignore[method-assign]
    session.adapters.load("again", folders[0])
    assert session.generate(PROMPT, max_tokens=6, adapter="again").text == uncached(folders[0], PROMPT, 6)


def loaded(session: Session) -> list[str]:
    """Names of the adapters in memory; the engine has just those."""
    engine = session.engine
    assert isinstance(engine, FakeEngine)
    found = [adapter for adapter in session.adapters if session.adapters.is_loaded(adapter)]
    assert set(engine._adapted) == {adapter.digest for adapter in found}
    assert session.adapters.loaded_bytes == sum(adapter.memory_bytes for adapter in found)
    return [adapter.name for adapter in found]


@pytest.fixture
def narrow(folders: list[Path], tmp_path: Path) -> Iterator[Session]:
    """A session with three adapters a0, a1, a2 and memory for two."""
    one = read_adapter(folders[0]).size_bytes
    with open_session(tmp_path, adapter_memory=str(2 * one)) as session:
        for number, folder in enumerate(folders):
            session.adapters.load(f"a{number}", folder)
        yield session


def test_adapters_are_loaded_when_needed_and_the_least_recently_used_leaves(
    narrow: Session, folders: list[Path]
) -> None:
    assert loaded(narrow) == []
    for number, stay in ((0, ["a0"]), (1, ["a0", "a1"]), (0, ["a0", "a1"]), (2, ["a0", "a2"]), (1, ["a1", "a2"])):
        text = narrow.generate(PROMPT, max_tokens=6, adapter=f"a{number}").text
        assert text == uncached(folders[number], PROMPT, 6)
        assert loaded(narrow) == stay
    narrow.explain(PROMPT, adapter="a0")
    assert loaded(narrow) == ["a1", "a2"]


def test_an_adapter_in_use_stays_and_the_next_request_waits_for_memory(narrow: Session, folders: list[Path]) -> None:
    streams = [narrow.stream(PROMPT, max_tokens=9, adapter=f"a{number}") for number in (0, 1)]
    begun = [next(iter(stream)) for stream in streams]
    waiting = narrow.stream(PROMPT, max_tokens=9, adapter="a2")
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append("".join(waiting)))
    thread.start()
    assert begun[1] + "".join(streams[1]) == uncached(folders[1], PROMPT, 9)  # then a1 may leave
    thread.join(60)
    assert texts == [uncached(folders[2], PROMPT, 9)]
    assert loaded(narrow) == ["a0", "a2"]
    assert begun[0] + "".join(streams[0]) == uncached(folders[0], PROMPT, 9)


def test_a_request_that_waits_for_memory_can_be_cancelled_and_says_at_last_what_to_raise(
    narrow: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [narrow.stream(PROMPT, max_tokens=9, adapter=f"a{number}") for number in (0, 1)]
    for stream in streams:
        next(iter(stream))
    with pytest.raises(Cancelled), narrow.adapters.use("a2", lambda: True):
        pass
    monkeypatch.setattr(lora_manager, "_LONGEST_SECONDS", 0.0)
    with pytest.raises(OutOfMemory, match=r"adapter_memory.*Raise it"):
        narrow.generate(PROMPT, max_tokens=1, adapter="a2")
    assert loaded(narrow) == ["a0", "a1"]
    for stream in streams:
        stream.close()
    narrow.generate(PROMPT, max_tokens=1, adapter="a2")


def test_an_adapter_that_never_fits_is_refused_with_the_setting(tmp_path: Path, folders: list[Path]) -> None:
    with open_session(tmp_path, adapter_memory=100) as session:
        with pytest.raises(AdapterRefused, match=r"adapter_memory allows 100 B\. Raise it"):
            session.adapters.load("writer", folders[0])
        assert not list(session.adapters)


def test_files_that_changed_since_are_another_adapter(narrow: Session, folders: list[Path]) -> None:
    narrow.generate(PROMPT, max_tokens=1, adapter="a0")
    save_lora(folders[0], fake_pairs(7))
    narrow.generate(PROMPT, max_tokens=1, adapter="a0")  # still in memory as it was
    for name in ("a1", "a2"):
        narrow.generate(PROMPT, max_tokens=1, adapter=name)
    with pytest.raises(AdapterRefused, match=r"changed since it was loaded as 'a0'.*Load it again"):
        narrow.generate(PROMPT, max_tokens=1, adapter="a0")
    assert loaded(narrow) in (["a1", "a2"], ["a2"])
    narrow.adapters.load("a0", folders[0])
    assert narrow.generate(PROMPT, max_tokens=6, adapter="a0").text == uncached(folders[0], PROMPT, 6)


def test_many_threads_over_few_places_give_what_each_adapter_gives_alone(narrow: Session, folders: list[Path]) -> None:
    wrong: list[str] = []
    expected = [uncached(folder, PROMPT, 4) for folder in folders]

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(6):
            number = draw.randrange(3)
            text = narrow.generate(PROMPT, max_tokens=4, adapter=f"a{number}").text
            wrong.extend([] if text == expected[number] else [text])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert len(loaded(narrow)) == 2


def test_a_lent_engine_has_no_adapters_left_when_the_session_closes(tmp_path: Path, folders: list[Path]) -> None:
    engine = FakeEngine()
    with Session(engine, cache="off", adapter=f"writer={folders[0]}") as session:
        session.generate(PROMPT, max_tokens=1)
        assert engine._adapted
    assert not engine._adapted


def test_sessions_that_share_an_engine_take_no_adapters_from_each_other(folders: list[Path]) -> None:
    engine = FakeEngine()
    with Session(engine, cache="off") as session:
        session.adapters.load("writer", folders[0])
        before = session.generate(PROMPT, max_tokens=6, adapter="writer").text
        with Session(engine, cache="off", adapter=f"other.name={folders[0]}") as second:
            assert second.generate(PROMPT, max_tokens=6).text == before
        assert session.generate(PROMPT, max_tokens=6, adapter="writer").text == before
    assert not engine._adapted
