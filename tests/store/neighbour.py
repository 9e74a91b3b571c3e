"""Another process that uses a cache folder: it reads all the time, and does one thing for every line it is sent.

python -m tests.store.neighbour FOLDER TENANT SALT APP

`keep A B C` keeps and uses these tokens, `look A B C` answers how many of them it finds, `maintain` does what waits.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.scope import AppRef
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import REPOSITORY
from tests.kvs import SMALL, keep, load

WITH_MEMORY = StoreSettings(disk_limit="50MB", memory_limit="10MB")
WAIT_SECONDS = 60


class Neighbour:
    """The process, from outside. It answers within a bounded time, or the test fails."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, command: str, tokens: Sequence[int] = ()) -> str:
        """Let it do one thing; what it answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join([command, *map(str, tokens)]) + "\n")
        self._process.stdin.flush()
        late = threading.Timer(WAIT_SECONDS, self._process.kill)
        late.start()
        try:
            answer = self._process.stdout.readline().strip()
        finally:
            late.cancel()
        assert answer, "the other process died, or took too long"
        return answer


@contextmanager
def neighbour(folder: Path, tenant: str, salt: str, app: str) -> Iterator[Neighbour]:
    """Start one, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.store.neighbour", str(folder), tenant, salt, app],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Neighbour(process)
    finally:
        process.communicate(timeout=WAIT_SECONDS)  # its input ends, so it does


def _serve(folder: Path, tenant: str, salt: str, app: str) -> None:
    kv_space, last, over = KvSpace(Namespace("synthetic", tenant=tenant, salt=salt), SMALL), [[1]], threading.Event()
    with TieredStore(folder, WITH_MEMORY) as store:

        def read() -> None:
            while not over.wait(0.001):
                store.lookup(kv_space, last[0])

        reader = threading.Thread(target=read)
        reader.start()
        for line in sys.stdin:
            command, *words = line.split()
            tokens = [int(word) for word in words]
            if command == "keep":
                answer = keep(store, tokens, kv_space).outcome
                last[0] = tokens
                store.record_use(store.lookup(kv_space, tokens), 1.0, AppRef(tenant, app))
            elif command == "look":
                answer = f"found {load(store, tokens, kv_space)}"
            else:
                store.maintain()
                answer = "tended"
            print(answer, flush=True)
        over.set()
        reader.join()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), *sys.argv[2:5])
