"""Processes with limits: what takes too long, too much memory or fails is ended, and its parent goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rekindle.errors import Cancelled, OutOfMemory
from rekindle.text import sandbox as limited_process
from rekindle.text.sandbox import LimitExceeded, SandboxPool, SandboxProcess
from rekindle.text.sandbox_worker import serve_messages

pytestmark = pytest.mark.thorough


def _hold(message: bytes) -> bytes:
    _held.append(bytearray(int(message[1:])))
    return b"held"


def _overflow(message: bytes) -> bytes:
    import ctypes

    ctypes.string_at(0)
    return message


def _loop(message: bytes) -> bytes:
    while True:
        message = message[::-1]


def _stop(message: bytes) -> bytes:
    raise KeyError(message)


_held: list[bytearray] = []
_WORK: dict[bytes, Callable[[bytes], bytes]] = {
    b"m": _hold,
    b"o": _overflow,
    b"l": _loop,
    b"w": lambda message: time.sleep(3600) or message,  # type: ignore[func-returns-value]
    b"f": _stop,
    b"p": lambda _: str(os.getpid()).encode(),
    b"i": lambda _: "\n".join(sys.path).encode(),
}


def main() -> None:
    serve_messages(lambda message: _WORK[message[:1]](message) if message[:1] in _WORK else message)


def started() -> SandboxProcess:
    process = SandboxProcess(__name__, b"ready?")
    assert process.ask(b"hello") == b"hello"
    return process


@pytest.mark.parametrize(
    ("message", "reason"), [(b"l", "too long"), (b"m2000000000", "memory"), (b"o", "memory"), (b"f", "memory")]
)
def test_a_process_that_exceeds_its_limits_or_fails_is_ended(message: bytes, reason: str) -> None:
    process = started()
    pid = int(process.ask(b"p"))
    with pytest.raises(LimitExceeded, match=reason):
        process.ask(message)
    assert not process.usable and not psutil.pid_exists(pid)


def test_a_process_that_does_not_start_is_no_fault_of_the_message() -> None:
    with pytest.raises(OutOfMemory, match="ends as soon as it starts"):
        SandboxProcess("tests.engine.no_such_module", b"ready?").ask(b"hello")


def test_a_limit_that_cannot_be_set_is_no_fault_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "rlimit", denied, raising=False)
    process = started()
    assert process.ask(b"again") == b"again"


def test_memory_that_grows_slowly_ends_at_the_same_limit() -> None:
    process, held = started(), 0
    with pytest.raises(LimitExceeded, match="memory"):
        while True:
            process.ask(b"m10000000")
            held += 10_000_000
    assert limited_process.HEAP_BYTES * 0.7 < held <= limited_process.HEAP_BYTES


def test_a_longer_message_may_take_more_memory() -> None:
    process = started()
    with pytest.raises(LimitExceeded):
        process.ask(b"m150000000")
    assert started().ask(b"m150000000".ljust(5_000_000)) == b"held"


def test_a_process_that_waits_for_something_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    process = started()
    monkeypatch.setattr(limited_process, "_WALL_SECONDS", 0.2)
    with pytest.raises(LimitExceeded, match="too long"):
        process.ask(b"w")


def test_whoever_cancels_ends_the_process() -> None:
    process = started()
    pid = int(process.ask(b"p"))
    with pytest.raises(Cancelled):
        process.ask(b"w", lambda: True)
    assert not psutil.pid_exists(pid)


def test_a_pool_gives_out_what_it_has_and_never_what_is_ended_or_large() -> None:
    pool = SandboxPool(__name__, lambda: b"ready?", 2)
    first = pool.take()
    first.ask(b"p")
    pool.give_back(first)
    assert pool.take() is first
    other = pool.take()
    assert other is not first and other.ask(b"m60000000") == b"held"
    pool.give_back(other)
    assert not other.usable, "it holds too much"
    pool.give_back(first)
    killed = psutil.Process(int(first.ask(b"p")))
    killed.kill()
    killed.wait(60)
    last = pool.take()
    assert last.ask(b"hello") == b"hello" and last is not first
    pool.give_back(last)
    pool.close()
    assert not last.usable


def test_a_process_ends_with_its_parent_also_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    program = f"""
import os, threading
from {__name__} import started
process = started()
print(process.ask(b"p").decode(), flush=True)
threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
process.ask(b"w")
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 30
    while psutil.pid_exists(int(ran.stdout)) and psutil.Process(int(ran.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_module_of_the_current_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "llguidance", "importlib", "rekindle"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) not in started().ask(b"i").decode().split("\n")


def test_a_forked_child_does_not_use_its_parents_process() -> None:
    process = started()
    child = os.fork()
    if child == 0:
        os._exit(int(process.usable))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and process.usable
