"""A cache that raises, hangs, lies or is taken away: every request still gets the right text within a bounded time.

A hang here takes 30 seconds, or until the test lets it go; no request may take ten. When the cache recovers it is used
again: every test counts its hits.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache.cost import FREE, Costs
from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.errors import CacheUnusable, KvLost
from rekindle.store.check import check
from rekindle.store.feed import StoredFeed
from rekindle.store.prefix_index import Match
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NOBODY, REPOSITORY, flip, open_to_all
from tests.parity.engines import KINDS, PRINCIPAL, WITH_SPANS, each, params, reused
from tests.parity.sessions import MESSAGE, PROMPT, N, ask, assert_right, cancel_when_asked, cold, opened, tokens_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("one_thread")]

HANG_SECONDS = 30.0
BOUND_SECONDS = 10.0
NO_MEMORY = {"memory_limit": 0}  # nothing is parked and nothing held: every hit comes from the disk
KNOWN = {kind: reused(kind, PROMPT, PROMPT) for kind in KINDS}  # so many tokens of PROMPT are reused where it is known


def beside(value: object, *kinds: str) -> list[Any]:
    """Parameters: each of the kinds, where it is installed, and a value."""
    return [pytest.param(*kind.values, value, marks=kind.marks) for kind in params(*kinds)]


hanging = each("hf", "llamacpp", "llamacpp-opaque")  # each law takes seconds: the fake engine is spared


@pytest.fixture(autouse=True)
def deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than on a machine of one's own, far shorter than the hangs."""
    monkeypatch.setattr("rekindle.cache.stored_kv.LOOKUP_SECONDS", 2.0)
    monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 2.0)


class Hang:
    """A place where calls hang until they are let go."""

    def __init__(self) -> None:
        self.calls = 0
        self.over = threading.Event()
        self.through = threading.Event()  # a call that hung has returned

    def wait(self) -> None:
        self.calls += 1
        self.over.wait(HANG_SECONDS)

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The function, but every call hangs first."""

        def hanging(*args: Any, **named: Any) -> Any:
            self.wait()
            try:
                return real(*args, **named)
            finally:
                self.through.set()

        return hanging


@pytest.fixture
def hang() -> Iterator[Hang]:
    place = Hang()
    yield place
    place.over.set()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits a second for what is to be kept."""
    monkeypatch.setattr("rekindle.cache.prefix_cache.CLOSE_SECONDS", 1.0)


@pytest.fixture(params=params(*PRINCIPAL))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def warmed(kind: str, folder: Path, prompts: Sequence[Sequence[int]] = (PROMPT,), **settings: Any) -> Session:
    """A fresh session on a folder where the prompts are kept, and only on disk."""
    with opened(kind, folder, **NO_MEMORY) as session:
        session.warm([list(prompt) for prompt in prompts])
    return opened(kind, folder, **{**NO_MEMORY, **settings})


def store_of(session: Session) -> TieredStore:
    assert session.cache.store is not None
    return session.cache.store


def ask_in_time(session: Session, tokens: Sequence[int] = PROMPT, count: int = 5, **options: Any) -> Reply:
    """A reply that comes within the bound."""
    started = time.monotonic()
    reply = ask(session, tokens, count, **options)
    assert time.monotonic() - started < BOUND_SECONDS
    return reply


def assert_recovered(kind: str, session: Session) -> None:
    """The cache serves again what it served before, or keeps it anew and then serves it."""

    def is_served() -> bool:
        reply = ask_in_time(session)
        assert_right(kind, reply)
        assert session.flush()
        return reply.reuse.disk == KNOWN[kind]

    assert settles(is_served)


# -- looking up ----------------------------------------------------------------------------------------------------

ERRORS = [
    OSError(errno.EIO, "Input/output error"),
    PermissionError(errno.EACCES, "Permission denied"),
    sqlite3.OperationalError("disk I/O error"),
    sqlite3.DatabaseError("database disk image is malformed"),
    CacheUnusable("The folder cannot be used."),
    ValueError("a row makes no sense"),
]
OTHER_ERRORS = [*ERRORS, KvLost("lost"), MemoryError(), RuntimeError("can't start new thread")]
by_name = {"ids": lambda error: type(error).__name__}


@pytest.mark.parametrize("error", ERRORS, **by_name)
def test_a_catalog_that_cannot_be_read_knows_nothing(kind: str, error: Exception, folder: Path) -> None:
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        store = store_of(session)
        patch.setattr(store.disk, "view", raising(error))
        reply = ask_in_time(session)
        assert reply.reuse.reused == 0
        assert_right(kind, reply)
        assert store.counts.read_failures > 0
        patch.undo()
        again = ask_in_time(session)
        assert again.reuse.disk == KNOWN[kind]
        assert_right(kind, again)


@pytest.mark.parametrize("error", OTHER_ERRORS, **by_name)
def test_a_store_whose_lookup_raises_knows_nothing(kind: str, error: Exception, folder: Path) -> None:
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_of(session), "lookup", raising(error))
        reply = ask_in_time(session)
        assert reply.reuse.reused == 0
        assert_right(kind, reply)
        patch.undo()
        assert ask_in_time(session).reuse.disk == KNOWN[kind]


@pytest.mark.parametrize("error", [error for error in OTHER_ERRORS if not isinstance(error, KvLost)], **by_name)
@pytest.mark.parametrize("where", ["load", "fill"])
def test_a_store_whose_load_raises_anything_is_done_without(
    kind: str, error: Exception, where: str, folder: Path
) -> None:
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        if where == "load":
            patch.setattr(store_of(session), "load", raising(error))
        else:
            patch.setattr(StoredFeed, "_fill", raising(error))
        reply = ask_in_time(session)
        assert (reply.reuse.reused, reply.reuse.miss) == (0, "lost")
        assert_right(kind, reply)
        patch.undo()
        assert_recovered(kind, session)


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("kind", "where"), [*beside("lookup", "hf", "llamacpp", "llamacpp-opaque"), *beside("view", "hf")]
)
def test_a_lookup_that_hangs_delays_one_request_and_only_for_a_moment(
    kind: str, where: str, folder: Path, hang: Hang
) -> None:
    with warmed(kind, folder) as session:
        store = store_of(session)
        keeping = session.cache.writer
        assert keeping is not None
        keeping.offer = lambda job: False  # type: ignore[method-assign]  # only requests ask the store here
        with pytest.MonkeyPatch.context() as patch:
            if where == "lookup":
                patch.setattr(store, "lookup", hang.wrap(store.lookup))
            else:
                patch.setattr(store.disk, "view", hanging_inside(store.disk.view, hang))
            reply = ask_in_time(session)
            assert (reply.reuse.reused, reply.reuse.miss) == (0, "late")
            assert_right(kind, reply)
            assert hang.calls == 1
            for _ in range(5):
                again = ask_in_time(session)
                assert again.reuse.miss == "late"
                assert_right(kind, again)
            assert hang.calls == 1, "nobody waits for it a second time"
        del keeping.offer
        hang.over.set()
        assert settles(lambda: ask(session, PROMPT).reuse.disk == KNOWN[kind]), "it recovered and is used again"
        assert_right(kind, ask(session, PROMPT))


def hanging_inside(real: Callable[..., Any], hang: Hang) -> Callable[..., Any]:
    """A view that hangs with the catalog's lock in its hands."""

    @contextmanager
    def view(*args: Any) -> Iterator[Any]:
        with real(*args) as rows:
            hang.wait()
            yield rows

    return view


def settles(holds: Callable[[], bool], seconds: float = BOUND_SECONDS) -> bool:
    """Whether something holds before long."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@hanging
def test_while_a_lookup_hangs_what_is_in_the_engine_is_still_reused(kind: str, folder: Path, hang: Hang) -> None:
    with warmed(kind, folder, memory_limit="64MB") as session, pytest.MonkeyPatch.context() as patch:
        known = [*PROMPT, *ask(session, PROMPT).tokens[:-1]]
        session.flush()
        patch.setattr(store_of(session), "lookup", hang.wrap(store_of(session).lookup))
        longer = [*known, *tokens_of(20, seed=1)]
        reply = ask_in_time(session, longer)
        assert reply.reuse.engine == len(known)
        assert_right(kind, reply, longer)
        hang.over.set()


def test_a_hang_that_is_over_leaves_no_thread_behind(folder: Path) -> None:
    """Twenty hangs, each of them over before the next."""
    with warmed("fake", folder) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr("rekindle.cache.stored_kv.LOOKUP_SECONDS", 0.01)
        real = store_of(session).lookup
        before = threading.active_count()
        for number in range(20):
            hang = Hang()
            patch.setattr(store_of(session), "lookup", hang.wrap(real))
            ask(session, tokens_of(10, seed=number), 1)
            hang.over.set()
            assert hang.through.wait(HANG_SECONDS)
            patch.setattr(store_of(session), "lookup", real)
            session.flush()
        assert settles(lambda: threading.active_count() <= before + 5, seconds=3)


# -- lies ----------------------------------------------------------------------------------------------------------

OTHER = [*tokens_of(MESSAGE - 1, seed=77), PROMPT[MESSAGE - 1], *tokens_of(N - MESSAGE, seed=78)]


def match_of(session: Session, tokens: Sequence[int]) -> Match:
    """What is found of a prompt: its KV, or the pages of its last checkpoint."""
    with session.cache.peek(Request.of(list(tokens)), tokens) as prefill:
        match = prefill.lookup.matches.match
    assert match is not None
    return match


def of_other_tokens(ours: Match, other: Match) -> Match:
    return other


def of_other_extents(ours: Match, other: Match) -> Match:
    pieces = zip(ours.pieces, other.pieces, strict=True)
    return replace(ours, pieces=tuple(replace(p, extent=q.extent, name=q.name) for p, q in pieces))


def of_another_number(ours: Match, other: Match) -> Match:
    return replace(ours, pieces=tuple(replace(p, extent=p.extent + 1000) for p in ours.pieces))


def of_another_block(ours: Match, other: Match) -> Match:
    return replace(ours, pieces=tuple(replace(p, first=p.first + 1) for p in ours.pieces))


def of_keys_swapped(ours: Match, other: Match) -> Match:
    return replace(ours, keys=other.keys)


LIES = [
    pytest.param(of_other_tokens),
    of_other_extents,
    of_another_number,
    of_another_block,
    of_keys_swapped,
]


@pytest.mark.parametrize("lie", LIES)
def test_a_lookup_that_lies_is_not_believed(kind: str, lie: Callable[[Match, Match], Match], folder: Path) -> None:
    with warmed(kind, folder, [PROMPT, OTHER]) as session, pytest.MonkeyPatch.context() as patch:
        told = lie(match_of(session, PROMPT), match_of(session, OTHER))
        patch.setattr(store_of(session), "lookup", lambda *_: told)
        message = [*PROMPT[:MESSAGE], 251]  # ends where a checkpoint of the other one ends, too
        for tokens in (PROMPT, message):
            assert_right(kind, ask_in_time(session, tokens), tokens)
        patch.undo()
        assert_recovered(kind, session)


def test_rows_of_the_catalog_that_tell_of_other_tokens_are_not_believed(kind: str, folder: Path) -> None:
    """Every block of one prompt is listed under the other's keys and tokens."""
    with warmed(kind, folder, [PROMPT, OTHER]) as session:
        ours, other = match_of(session, PROMPT), match_of(session, OTHER)
    with sqlite3.connect(folder / "catalog.sqlite") as rows:
        rows.execute("UPDATE blocks SET extent=-extent")
        for mine, yours in ((ours, other), (other, ours)):
            rows.execute("UPDATE blocks SET extent=? WHERE extent=?", (yours.pieces[0].extent, -mine.pieces[0].extent))
        rows.execute("UPDATE blocks SET extent=-extent WHERE extent<0")
    rows.close()
    with opened(kind, folder, **NO_MEMORY) as session:
        assert match_of(session, PROMPT).pieces[0].name == other.pieces[0].name, "the lie is not told"
        for tokens in (PROMPT, OTHER):
            reply = ask_in_time(session, tokens)
            assert reply.reuse.reused == 0
            assert_right(kind, reply, tokens)
        assert store_of(session).counts.quarantined == 2
        assert_recovered(kind, session)


# -- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "size", "read_at"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ENOENT, errno.ESTALE])
def test_a_load_that_fails_is_computed_instead(kind: str, call: str, code: int, folder: Path) -> None:
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_of(session).disk.files, call, raising(OSError(code, os.strerror(code))))
        reply = ask_in_time(session)
        assert (reply.reuse.reused, reply.reuse.miss) == (0, "lost")
        assert_right(kind, reply)
        assert store_of(session).counts.read_failures > 0
        patch.undo()
        assert_recovered(kind, session)


READS = {"fake": (3, 4, 7, 12), "hf": (3, 4, 7, 12, 16), "llamacpp": (3, 4, 7, 12, 16), "llamacpp-opaque": (3, 4)}


@pytest.mark.parametrize(("kind", "nth"), [case for kind in READS for nth in READS[kind] for case in beside(nth, kind)])
def test_a_feed_that_fails_in_any_layer_is_computed_instead(kind: str, nth: int, folder: Path) -> None:
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        files, calls = store_of(session).disk.files, [0]
        real = files.read_at

        def fail_once(*args: Any) -> None:
            calls[0] += 1
            if calls[0] == nth:
                raise OSError(errno.EIO, "Input/output error")
            real(*args)

        patch.setattr(files, "read_at", fail_once)
        reply = ask_in_time(session)
        assert calls[0] >= nth, "the fault never came"
        assert (reply.reuse.reused, reply.reuse.miss) == (0, "lost")
        assert_right(kind, reply)
        assert_recovered(kind, session)


@hanging
def test_a_load_that_hangs_delays_one_request_and_only_for_a_moment(kind: str, folder: Path, hang: Hang) -> None:
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        files = store_of(session).disk.files
        patch.setattr(files, "open", hang.wrap(files.open))
        for number in range(4):
            reply = ask_in_time(session)
            assert reply.reuse.reused == 0
            assert reply.reuse.miss == ("late" if number else "lost")
            assert_right(kind, reply)
        patch.undo()
        hang.over.set()
        assert settles(lambda: ask(session, PROMPT).reuse.disk == KNOWN[kind])
        assert_right(kind, ask(session, PROMPT))


class HangingReads:
    """Reads that hang from the `nth` on; once let go they bring rubbish, as a disk that is dying might."""

    def __init__(self, files: Any, nth: int, hang: Hang) -> None:
        self._real, self._nth, self._hang = files.read_at, nth, hang
        self._calls = 0

    def __call__(self, handle: Any, offset: int, out: memoryview) -> None:
        self._calls += 1
        if self._calls < self._nth or self._hang.over.is_set():
            self._real(handle, offset, out)
            return
        self._hang.wait()
        bytes_of = out.cast("B")
        bytes_of[:] = b"\x7f" * len(bytes_of)
        self._hang.through.set()


HANGS = {"hf": (3, 9, 16), "llamacpp": (3, 16), "llamacpp-opaque": (3,)}


@pytest.mark.parametrize(("kind", "nth"), [case for kind in HANGS for nth in HANGS[kind] for case in beside(nth, kind)])
def test_a_feed_that_hangs_in_the_middle_of_a_layer_is_left_alone(
    kind: str, nth: int, folder: Path, hang: Hang
) -> None:
    """And what it writes much later reaches nobody."""
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        files = store_of(session).disk.files
        patch.setattr(files, "read_at", HangingReads(files, nth, hang))
        reply = ask_in_time(session, count=12)
        assert (reply.reuse.reused, reply.reuse.miss) == (0, "lost")
        assert_right(kind, reply, count=12)
        for _ in range(3):
            again = ask_in_time(session)
            assert again.reuse.miss == "late"
            assert_right(kind, again)
        assert hang.calls <= 2, "keys and values of one layer, and nobody after them"
        # It comes back while another request is in the middle of its reply, in whatever buffers are free.
        stream = session.stream(OTHER, max_tokens=30, min_tokens=30)
        next(stream)
        hang.over.set()
        assert hang.through.wait(HANG_SECONDS)
        time.sleep(0.1)
        assert_right(kind, stream.reply, OTHER, 30)
        for number in range(6):
            tokens = [*PROMPT[: 10 * number], *tokens_of(30, seed=number)]
            assert_right(kind, ask_in_time(session, tokens), tokens)
        patch.undo()
        assert_recovered(kind, session)


@each("hf", "llamacpp")
def test_several_threads_survive_a_feed_that_hangs(kind: str, folder: Path, hang: Hang, monkeypatch: Any) -> None:
    monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 1.0)
    prompts = [[*PROMPT[:90], *tokens_of(10, seed=number)] for number in range(6)]
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        files = store_of(session).disk.files
        patch.setattr(files, "read_at", HangingReads(files, 4, hang))
        replies: dict[int, Reply] = {}
        threads = [
            threading.Thread(target=lambda i=i: replies.update({i: ask(session, prompts[i])}))
            for i in range(len(prompts))
        ]
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Each of them may have begun to load before the first was found to hang: one deadline each, at most.
        assert time.monotonic() - started < 2 * BOUND_SECONDS
        hang.over.set()
        for number, prompt in enumerate(prompts):
            assert_right(kind, replies[number], prompt)
        patch.undo()
        assert_recovered(kind, session)


@hanging
def test_cancelling_does_not_wait_for_a_feed_that_hangs(kind: str, folder: Path, hang: Hang, monkeypatch: Any) -> None:
    monkeypatch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 20.0)
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        files = store_of(session).disk.files
        patch.setattr(files, "read_at", HangingReads(files, 3, hang))
        stream = session.stream(PROMPT, max_tokens=5)
        reader = threading.Thread(target=lambda: list(stream))
        reader.start()
        assert settles(lambda: hang.calls > 0)
        stream.cancel()
        reader.join(BOUND_SECONDS)
        assert not reader.is_alive()
        hang.over.set()
        patch.undo()
        assert_recovered(kind, session)


def _has_answered(session: Session) -> bool:
    hanging = session.cache.kv.deadlines._hanging
    return hanging is None or hanging.answered.is_set()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
@pytest.mark.parametrize("how", ["cancelled", "late", "failed"])
def test_a_load_that_is_given_up_leaves_no_file_open(kind: str, how: str, folder: Path) -> None:
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        engine: Any = session.engine
        files = store_of(session).disk.files
        ask(session, PROMPT)  # whatever is opened once is open
        session.flush()
        real_step, real_read, real_open = engine.step, files.read_at, files.open
        before = len(list(Path("/proc/self/fd").iterdir()))
        hits = 0
        for number in range(8):
            stream = session.stream([*PROMPT, number], max_tokens=1)
            if how == "cancelled":
                cancel_when_asked(engine, stream.cancel, 0)
                assert list(stream) == []
                engine.step = real_step
                hits += 1
            elif how == "failed":
                patch.setattr(files, "read_at", raising(OSError(errno.EIO, "Input/output error")))
                hits += stream.reply.reuse.miss == "lost"
                patch.setattr(files, "read_at", real_read)
            else:  # the files are opened when nobody waits for them any more
                hang = Hang()
                patch.setattr("rekindle.cache.stored_kv.LOAD_SECONDS", 0.05)
                patch.setattr(files, "open", hang.wrap(real_open))
                missed = stream.reply.reuse.miss
                hits += missed == "lost"
                hang.over.set()
                assert missed != "lost" or hang.through.wait(HANG_SECONDS)  # a busy machine may not even look it up
                patch.setattr(files, "open", real_open)
                settles(lambda: _has_answered(session), seconds=3)
            session.flush()
        assert hits >= 4
        assert settles(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 2, seconds=3)


# -- damage --------------------------------------------------------------------------------------------------------


def extent_of(session: Session, folder: Path) -> Path:
    """The file that a request with PROMPT reads."""
    piece, *_ = match_of(session, PROMPT).pieces
    (path,) = (folder / "extents").glob(f"{piece.name}*")
    return path


@pytest.mark.parametrize("share", [0.0, 0.002, 0.02, 0.1, 0.3, 0.6, 0.9, 1.0])
def test_a_flipped_bit_is_quarantined_counted_and_computed_again(kind: str, share: float, folder: Path) -> None:
    """In the header, among the digests, in keys and in values."""
    session = warmed(kind, folder)
    path = extent_of(session, folder)
    flip(path, int(share * (path.stat().st_size - 1)), bit=2)
    with session:
        reply = ask_in_time(session)
        assert_right(kind, reply)
        counts = store_of(session).counts
        assert reply.reuse.disk in (0, KNOWN[kind])
        if reply.reuse.disk:  # only where the bit is padding, which nobody reads
            assert counts.quarantined == 0
            return
        assert reply.reuse.miss == "lost"
        assert counts.quarantined == 1 and counts.read_failures == 1
        again = ask_in_time(session)
        assert_right(kind, again)
        assert_recovered(kind, session)
        assert counts.quarantined == 1, "once found, never read again"
    with opened(kind, folder, **NO_MEMORY) as session:
        assert ask(session, PROMPT).reuse.disk == KNOWN[kind]
        assert check(store_of(session).disk).problems == ()


def test_most_bits_of_an_extent_are_guarded(folder: Path) -> None:
    """Flipped one after the other, at random: never a wrong token, and found nearly always."""
    with warmed("fake", folder) as session:
        path = extent_of(session, folder)
    whole, found = path.read_bytes(), 0
    for number in range(40):
        shutil.copytree(folder, folder.with_name(f"copy-{number}"))
        copy = folder.with_name(f"copy-{number}") / "extents" / path.name
        flip(copy, (number * 7919) % len(whole), bit=number % 8)
        with opened("fake", folder.with_name(f"copy-{number}"), **NO_MEMORY) as session:
            reply = ask(session, PROMPT, 3)
            assert reply.tokens == cold("fake", tuple(PROMPT), 3)
            found += reply.reuse.miss == "lost"
    assert found >= 30


@pytest.mark.parametrize("how", ["cut short", "empty", "gone", "a folder", "rubbish"])
def test_a_file_that_is_not_what_it_was_is_computed_again(kind: str, how: str, folder: Path) -> None:
    session = warmed(kind, folder)
    path = extent_of(session, folder)
    whole = path.read_bytes()
    path.unlink()
    if how == "cut short":
        path.write_bytes(whole[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "rubbish":
        path.write_bytes(os.urandom(len(whole)))
    elif how == "a folder":
        path.mkdir()
    with session:
        reply = ask_in_time(session)
        assert (reply.reuse.reused, reply.reuse.miss) == (0, "lost")
        assert_right(kind, reply)
        assert_recovered(kind, session)


def test_what_was_lost_and_computed_again_is_kept_again(kind: str, folder: Path) -> None:
    """Also where the prompt is all there is to keep, as when it is warmed."""
    session = warmed(kind, folder)
    path = extent_of(session, folder)
    flip(path, path.stat().st_size - 100)
    with session:
        (reuse,) = session.warm([PROMPT])
        assert reuse.miss == "lost"
    with opened(kind, folder, **NO_MEMORY) as session:
        (reuse,) = session.warm([PROMPT])
        assert reuse.disk == KNOWN[kind]


def test_what_was_lost_is_kept_again_though_its_context_is_gone_by_then(kind: str, folder: Path, hang: Hang) -> None:
    """The keeper is busy, the context was given back: what it copied must begin where the store's knowledge ends."""
    session = warmed(kind, folder)
    path = extent_of(session, folder)
    flip(path, path.stat().st_size - 100)
    store = store_of(session)
    with session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "admit", hang.wrap(store.admit))
        question = [*PROMPT[:-1], *tokens_of(40, seed=5)]  # of a checkpoint, only what the first message needs
        reply = ask_in_time(session, question)
        assert reply.reuse.miss == "lost"
        hang.over.set()
        session.flush()
        patch.undo()
        assert ask(session, question).reuse.disk == reused(kind, question, question)


# -- keeping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["create", "write_at", "sync", "close", "free_bytes"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_takes_nothing_costs_nothing_but_the_hits(kind: str, call: str, code: int, folder: Path) -> None:
    with opened(kind, folder, **NO_MEMORY) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_of(session).disk.files, call, raising(OSError(code, os.strerror(code))))
        for _ in range(2):
            assert_right(kind, ask_in_time(session))
            assert session.flush(BOUND_SECONDS)
        patch.undo()
        assert_recovered(kind, session)


@each(*WITH_SPANS)
def test_what_the_store_did_not_take_is_not_counted_as_stored(kind: str, folder: Path, hang: Hang) -> None:
    """The disk was full for a moment; then the context is needed by another before the keeper comes to it."""
    longer = [*PROMPT, *tokens_of(60, seed=5)]
    with opened(kind, folder, memory_limit="64MB") as session, pytest.MonkeyPatch.context() as patch:
        store = store_of(session)
        patch.setattr(store.disk.files, "write_at", raising(OSError(errno.ENOSPC, "No space left on device")))
        ask(session, PROMPT, 1)
        session.flush()
        assert store.counts.write_failures > 0
        patch.undo()
        patch.setattr(store, "admit", hang.wrap(store.admit))
        assert ask(session, longer, 1).reuse.engine == N
        assert ask(session, [*longer[:120], 251], 1).reuse.engine == 120, "the context goes on as another prompt"
        hang.over.set()
        assert session.flush()
        patch.undo()
    with opened(kind, folder) as session:
        assert ask(session, longer).reuse.disk == len(longer) - 1


@pytest.mark.parametrize("error", OTHER_ERRORS, **by_name)
@pytest.mark.parametrize("call", ["admit", "keep"])
def test_a_keeper_survives_whatever_the_store_raises(call: str, error: Exception, folder: Path) -> None:
    with opened("fake", folder, **NO_MEMORY) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_of(session), call, raising(error))
        patch.setattr(threading, "excepthook", lambda *_: None)
        for number in range(4):
            tokens = tokens_of(30, seed=number)
            assert_right("fake", ask_in_time(session, tokens), tokens)
        assert session.flush(BOUND_SECONDS), "jobs that fail are done"
        patch.undo()
        assert_recovered("fake", session)


@pytest.mark.usefixtures("hurried")
def test_a_job_that_raises_anything_does_not_strand_those_behind_it(folder: Path, hang: Hang) -> None:
    class Failing:
        def do(self, store: TieredStore) -> str:
            hang.wait()
            raise LookupError("nobody thought of this")

        def detached_bytes(self) -> int:
            return 0

    with opened("fake", folder, **NO_MEMORY) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda *_: None)
        writer = session.cache.writer
        assert writer is not None
        assert writer.offer(Failing())
        assert_right("fake", ask_in_time(session))
        hang.over.set()
        assert session.flush(BOUND_SECONDS)
        assert ask(session, PROMPT).reuse.disk == N - 1


@hanging
def test_a_keep_that_hangs_delays_nobody_and_is_done_when_it_can_be(kind: str, folder: Path, hang: Hang) -> None:
    with warmed(kind, folder) as session, pytest.MonkeyPatch.context() as patch:
        files = store_of(session).disk.files
        patch.setattr(files, "write_at", hang.wrap(files.write_at))
        for number in range(5):
            tokens = tokens_of(40, seed=number)
            reply = ask_in_time(session, tokens, 0)
            known = ask_in_time(session)
            assert known.reuse.disk == KNOWN[kind], "what is known is served meanwhile"
            assert_right(kind, known)
        assert hang.calls == 1
        assert not session.flush(0.2)
        hang.over.set()
        assert session.flush(HANG_SECONDS)
        patch.undo()
        for number in range(5):
            following = [*tokens_of(40, seed=number), 251]
            reply = ask_in_time(session, following)
            assert reply.reuse.disk == 40
            assert_right(kind, reply, following)


@pytest.mark.usefixtures("hurried")
def test_a_keeper_that_hangs_forever_takes_a_bounded_number_of_jobs(folder: Path, hang: Hang) -> None:
    with opened("fake", folder, **NO_MEMORY) as session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_of(session), "admit", hang.wrap(store_of(session).admit))
        for number in range(120):
            ask(session, [number, 5, 6, 7], 1)
        writer = session.cache.writer
        assert writer is not None
        assert writer.backlog <= 65 and writer.outcomes["backlog"] > 0
        hang.over.set()
        assert session.flush(HANG_SECONDS)
        patch.undo()
        assert_recovered("fake", session)


# -- folders that are taken away -----------------------------------------------------------------------------------


def delete_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def delete_catalog(folder: Path) -> None:
    for path in folder.glob("catalog.sqlite*"):
        path.unlink()


def delete_catalog_but_its_log(folder: Path) -> None:
    (folder / "catalog.sqlite").unlink()


def delete_extents(folder: Path) -> None:
    shutil.rmtree(folder / "extents")


def ruin_catalog(folder: Path) -> None:
    for path in folder.glob("catalog.sqlite*"):
        with path.open("r+b") as file:  # never shorter: a process that has it mapped would die of that
            file.write(b"rubbish" * 1000)


def put_a_file_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


TAKEN = [delete_folder, delete_catalog, delete_catalog_but_its_log, delete_extents, ruin_catalog]


@pytest.mark.parametrize("memory", [0, "64MB"])
@pytest.mark.parametrize("take", TAKEN)
def test_a_cache_that_is_taken_away_in_mid_session_is_built_anew(
    kind: str, take: Callable[[Path], None], memory: Any, folder: Path
) -> None:
    with warmed(kind, folder, memory_limit=memory) as session:
        assert ask(session, PROMPT).reuse.reused == KNOWN[kind]
        session.flush()
        take(folder)
        for _ in range(3):
            assert_right(kind, ask_in_time(session))
            other = [*PROMPT[20:MESSAGE], *tokens_of(10, seed=9)]
            assert_right(kind, ask_in_time(session, other), other)
            session.flush()
        session.cache.unpark()
        assert settles(lambda: ask(session, PROMPT).reuse.reused == KNOWN[kind])
        assert_right(kind, ask_in_time(session))
    with opened(kind, folder, **NO_MEMORY) as session:
        reply = ask(session, other)
        assert reply.reuse.disk == reused(kind, other, other)
        assert_right(kind, reply, other)


def test_a_file_in_the_place_of_the_folder_costs_nothing_but_the_hits(kind: str, folder: Path) -> None:
    with warmed(kind, folder) as session:
        put_a_file_in_its_place(folder)
        for _ in range(3):
            reply = ask_in_time(session)
            assert reply.reuse.reused == 0
            assert_right(kind, reply)
            session.flush()
        folder.unlink()
        assert_recovered(kind, session)


@pytest.mark.parametrize("take", TAKEN)
def test_a_cache_that_is_taken_away_in_mid_reply_changes_no_token(
    kind: str, take: Callable[[Path], None], folder: Path
) -> None:
    with warmed(kind, folder) as session:
        stream = session.stream([*PROMPT, 5, 6], max_tokens=20, min_tokens=20)
        next(stream)
        take(folder)
        reply = stream.reply
        assert reply.reuse.disk == N
        assert_right(kind, reply, [*PROMPT, 5, 6], 20)
        session.flush()
        assert_recovered(kind, session)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_folder_that_can_only_be_read_from_now_on_is_read(readable: Path) -> None:
    """Nobody may write what is root's: what is there is served, and nothing new is kept."""
    folder = readable / "cache"
    with opened("fake", folder, **NO_MEMORY) as session:
        session.warm([PROMPT])
    folder.chmod(0o777)
    for path in folder.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    code = f"""
os.environ["REKINDLE_HOME"] = "/nonexistent"
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
session = opened("fake", sys.argv[1], memory_limit=0)
first = ask(session, PROMPT)
session.flush()
print(session.cache.store.disk.database.read_only, flush=True)
sys.stdin.readline()
second = ask(session, PROMPT)
new = [ask(session, tokens_of(40, seed=1)) for _ in range(2) if session.flush()]
session.close()
replies = [first, second, *new]
print(json.dumps([[reply.reuse.disk, list(reply.tokens)] for reply in replies]))
"""
    imports = "import json, os, sys\nfrom tests.parity.sessions import PROMPT, ask, opened, tokens_of\n"
    with subprocess.Popen(
        [sys.executable, "-c", imports + code, str(folder)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "False", "it could be written until now"
        open_to_all(folder)
        out, _ = process.communicate("\n", timeout=120)
        assert process.returncode == 0
    known, new = cold("fake", tuple(PROMPT), 5), cold("fake", tuple(tokens_of(40, seed=1)), 5)
    assert json.loads(out.splitlines()[-1]) == [[N - 1, list(known)]] * 2 + [[0, list(new)]] * 2


# -- closing -------------------------------------------------------------------------------------------------------


def closes_in_time(session: Session) -> None:
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(BOUND_SECONDS)
    assert not closing.is_alive()


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("kind", "call"),
    [*beside("create", "hf"), *beside("write_at", "hf", "llamacpp", "llamacpp-opaque"), *beside("sync", "hf")],
)
def test_closing_does_not_wait_for_a_keep_that_hangs(kind: str, call: str, folder: Path, hang: Hang) -> None:
    session = opened(kind, folder)
    with pytest.MonkeyPatch.context() as patch:
        files = store_of(session).disk.files
        patch.setattr(files, call, hang.wrap(getattr(files, call)))
        assert_right(kind, ask_in_time(session))
        assert settles(lambda: hang.calls > 0)
        closes_in_time(session)
        hang.over.set()
        assert hang.through.wait(HANG_SECONDS)
    with opened(kind, folder) as again:
        assert_right(kind, ask_in_time(again))
        assert check(store_of(again).disk).problems == ()


@pytest.mark.usefixtures("hurried")
def test_closing_does_not_wait_for_a_lookup_that_hangs(folder: Path, hang: Hang) -> None:
    """It has the catalog's lock, which closing the catalog needs."""
    session = warmed("fake", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_of(session).disk, "view", hanging_inside(store_of(session).disk.view, hang))
        writer = session.cache.writer
        assert writer is not None
        patch.setattr(writer, "offer", lambda job: False)  # the keeper is idle: it does not hang as well
        assert_right("fake", ask_in_time(session))
        closes_in_time(session)
        hang.over.set()


@pytest.mark.usefixtures("hurried")
def test_closing_does_not_wait_for_a_catalog_that_cannot_be_written(folder: Path, hang: Hang) -> None:
    """What was used is still to be noted, and noting it hangs."""
    session = warmed("fake", folder)
    with pytest.MonkeyPatch.context() as patch:
        assert ask(session, PROMPT, 0).reuse.disk == N - 1
        session.flush()
        database = store_of(session).disk.database
        patch.setattr(database, "writing", hang.wrap(database.writing))
        closes_in_time(session)
        hang.over.set()


@pytest.mark.usefixtures("hurried")
@hanging
def test_closing_does_not_wait_for_a_load_that_hangs(kind: str, folder: Path, hang: Hang) -> None:
    session = warmed(kind, folder)
    with pytest.MonkeyPatch.context() as patch:
        files = store_of(session).disk.files
        patch.setattr(files, "read_at", HangingReads(files, 3, hang))
        assert_right(kind, ask_in_time(session))
        closes_in_time(session)
        hang.over.set()


# -- costs ---------------------------------------------------------------------------------------------------------

NOW = time.time()
ABSURD = [
    pytest.param({"compute": [[100.0, 5000.0, 1e12, NOW]]}),  # a deadline of thousands of years
    pytest.param({"compute": [[100.0, 5000.0, 1e300, NOW]]}),
    pytest.param({"compute": [[2, 3, 10**400, NOW]]}),
    pytest.param({"compute": [[1e308, 3, 1e-3, NOW]]}),
    pytest.param({"disk": [[-2, 1e-3, NOW]]}),
    {"compute": "rubbish", "disk": {"a": 1}},
    [1, 2, 3],
]


@pytest.mark.parametrize("costs", ABSURD, ids=range(len(ABSURD)))
def test_absurd_remembered_costs_fail_no_request(costs: Any, folder: Path) -> None:
    with warmed("fake", folder) as session:
        session.cache.kv.costs = Costs(FREE, costs)
        for _ in range(2):
            assert_right("fake", ask_in_time(session))
            session.flush()


@pytest.mark.parametrize(
    "rubbish",
    [
        b"",
        b"{",
        b"[1]",
        b"\xff\xfe",
        b"null",
        pytest.param(b"[" * 50_000),
    ],
    ids=range(6),
)
def test_remembered_costs_that_cannot_be_read_are_forgotten(rubbish: bytes, folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    (home / "costs.json").write_bytes(rubbish)
    with Session(FakeEngine(), cache=folder) as session:
        assert_right("fake", ask_in_time(session))
    assert isinstance(json.loads((home / "costs.json").read_text()), dict), "what is measured now is remembered"


# -- processes that end --------------------------------------------------------------------------------------------

PROGRAM = """
import json, sys
from rekindle import Session
from tests.parity.engines import make
prompt = json.loads(sys.argv[3])
session = Session(make(sys.argv[2]), cache=sys.argv[1], disk_limit="200MB")
"""


def run_program(code: str, kind: str, folder: Path, tokens: Sequence[int] = PROMPT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM + code, str(folder), kind, json.dumps(list(tokens))],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_program_that_ends_without_closing_keeps_what_it_computed(kind: str, folder: Path) -> None:
    expected = cold(kind, tuple(PROMPT), 8)
    with run_program("print(list(session.generate(prompt, max_tokens=8, min_tokens=8).tokens))", kind, folder) as child:
        out, complaints = child.communicate(timeout=300)
    assert child.returncode == 0, complaints
    assert tuple(json.loads(out)) == expected
    with opened(kind, folder) as session:
        known = [*PROMPT, *expected[:-1]]
        reply = ask(session, [*known, 4])
        assert reply.reuse.disk == len(known)
        assert_right(kind, reply, [*known, 4])


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "1 / 0", "stream = session.stream(prompt); next(stream)"])
def test_a_program_that_ends_badly_keeps_what_it_computed(ending: str, folder: Path) -> None:
    with run_program(f"session.generate(prompt, max_tokens=3)\n{ending}", "fake", folder) as child:
        _, complaints = child.communicate(timeout=300)
    assert "Fatal" not in complaints
    with opened("fake", folder) as session:
        assert ask(session, PROMPT).reuse.disk == N - 1
        assert check(store_of(session).disk).problems == ()


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
@hanging
def test_after_kill_9_in_the_middle_of_a_reply_the_long_prompt_is_known(kind: str, folder: Path) -> None:
    long = tokens_of(300, seed=8)
    code = """
stream = session.stream(prompt, max_tokens=200, min_tokens=200)
next(stream)
while not session.cache.writer.outcomes["kept"]:
    next(stream)
print("kept", flush=True)
import time
for piece in stream:
    time.sleep(1)
"""
    with run_program(code, kind, folder, long) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "kept"
        child.send_signal(signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
    with opened(kind, folder) as session:
        reply = ask(session, [*long, 251])
        assert reply.reuse.disk == len(long)
        assert_right(kind, reply, [*long, 251])
        assert check(store_of(session).disk).problems == ()
