"""Two pieces of work side by side: what the helper thread does, lets go of, and leaves behind."""

from __future__ import annotations

import threading
import time
import weakref

import pytest

from rekindle.store.read_pool import ReadHelper


class _Buffer:
    """Stands for an engine's memory: something whose end can be seen."""

    def fill(self) -> None:
        pass


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rekindle-read"]


def test_both_are_done_and_the_thread_ends_with_close() -> None:
    helper, done = ReadHelper(), []
    before = _threads()
    helper.run(lambda: done.append(threading.get_ident()), lambda: done.append(threading.get_ident()))
    assert len(set(done)) == 2
    helper.close()
    assert _threads() == before
    helper.close()


def test_what_was_written_to_is_let_go_of_before_the_run_ends() -> None:
    """A thread that frees an engine's memory while the interpreter ends makes torch end the process."""
    helper, buffer = ReadHelper(), _Buffer()
    last = weakref.ref(buffer)

    def work(into: _Buffer = buffer) -> None:
        into.fill()

    del buffer
    helper.run(work, lambda: None)
    del work
    assert last() is None
    helper.close()


def test_every_caller_has_a_thread_of_its_own_as_long_as_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.store.read_pool.usable_cores", lambda: 4)
    helper, before = ReadHelper(), len(_threads())
    meet, ended, helped = threading.Barrier(5), threading.Event(), list[int]()

    def ask() -> None:
        helper.run(lambda: (meet.wait(30), helped.append(threading.get_ident())), lambda: meet.wait(30))

    callers = [threading.Thread(target=ask) for _ in range(2)]
    for caller in callers:
        caller.start()
    meet.wait(30)  # both callers and both helpers are busy at the same time
    for caller in callers:
        caller.join(30)
    assert len(set(helped)) == 2 and len(_threads()) - before == 2
    own: list[int] = []
    hold = threading.Thread(
        target=lambda: helper.run(lambda: helper.run(lambda: ended.wait(30), lambda: ended.wait(30)), lambda: None)
    )
    hold.start()
    deadline = time.monotonic() + 30
    while helper._helped < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    helper.run(lambda: own.append(threading.get_ident()), lambda: own.append(threading.get_ident()))
    assert own == [threading.get_ident()] * 2, "all threads are busy: the caller does both"
    ended.set()
    hold.join(30)
    helper.close()


def test_what_the_helper_raises_reaches_whoever_asked() -> None:
    helper = ReadHelper()

    def fail() -> None:
        raise OSError("it cannot be read")

    with pytest.raises(OSError, match="cannot be read"):
        helper.run(fail, lambda: None)
    helper.close()
