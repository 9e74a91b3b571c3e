"""Forks a writer for every line it reads (a delay in milliseconds), kills it after the delay, answers with a line.

python -m tests.faults.writer FOLDER LIMIT_BYTES SEED
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from benchmarks.storm import work


def nursery(folder: Path, limit_bytes: int, seed: int) -> None:
    """Answer until standard input ends. Forking spares each writer the start of an interpreter."""
    for number, line in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            try:
                work(folder, limit_bytes, random.Random(f"{seed}:{number}"), 60)
            except BaseException as error:  # noqa: BLE001  (reported by the exit status)
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        time.sleep(float(line) / 1000)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        print("killed" if os.WIFSIGNALED(status) else f"ended {status}", flush=True)


if __name__ == "__main__":
    nursery(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
