"""A family of inputs of one parser, and the law that holds for all of them: an input is read, or it is refused with the
error that is documented; within two seconds of CPU time, and with no more memory than was declared and 64 MB.

    python -m tests.fuzz.family NAME SEED FIRST COUNT

runs the inputs FIRST, FIRST + 1, ... of a family. The number of an input and the seed say all about it.
"""

from __future__ import annotations

import importlib
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from random import Random

SPARE_BYTES = 64 << 20
SECONDS = 2.0
_SAFETY_BYTES = 1 << 30  # address space: what tries to take more fails before it harms the machine


class Family(ABC):
    """Inputs of one parser."""

    errors: tuple[type[Exception], ...]

    @abstractmethod
    def __init__(self, folder: Path) -> None:
        """Make valid samples; `folder` is this family's own."""

    @abstractmethod
    def prepare(self, random: Random) -> int:
        """Draw an input, put it where `read` finds it, and say how many bytes are declared by those who are trusted."""

    @abstractmethod
    def read(self) -> None:
        """Read it. Raises `errors`."""


def run(family: Family, name: str, seed: str, numbers: range) -> dict[str, int]:
    """Run some inputs, and count what became of them. Raises `AssertionError` for one that breaks the law."""
    outcomes = {"read": 0, "refused": 0}
    for number in numbers:
        where = f"FUZZ_SEED={seed} python -m tests.fuzz.family {name} {seed} {number} 1"
        declared_bytes = family.prepare(Random(f"{seed}/{name}/{number}"))
        started, before_bytes = time.process_time(), _reset_peak()
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                family.read()
                outcomes["read"] += 1
            except family.errors as error:
                outcomes["refused"] += 1
                assert str(error), f"an error without a sentence: {where}"
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except BaseException as error:
            traceback.print_exc()
            raise AssertionError(f"{type(error).__name__} is not an error of this parser: {where}") from error
        seconds, taken_bytes = time.process_time() - started, _peak_bytes() - before_bytes
        assert seconds < SECONDS, f"{seconds:.1f} s: {where}"
        assert taken_bytes <= declared_bytes + SPARE_BYTES, (
            f"{taken_bytes >> 20} MB of memory, declared were {declared_bytes >> 20}: {where}"
        )
    return outcomes


class TookTooLong(BaseException):
    """Raised in whatever runs."""


def _stop(*_: object) -> None:
    raise TookTooLong(f"more than {SECONDS} s of CPU time")


def _reset_peak() -> int:
    """Begin to measure; what is taken now."""
    Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status[status.index("VmHWM:") + 6 :].split(None, 1)[0]) << 10


def load(name: str, folder: Path) -> Family:
    """The family of that name."""
    made: Family = importlib.import_module(f"tests.fuzz.{name}").Inputs(folder)
    return made


def main(name: str, seed: str, first: int, count: int) -> None:
    """See above."""
    warnings.simplefilter("ignore")  # numbers of damaged KV overflow
    signal.signal(signal.SIGPROF, _stop)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOME"] = os.environ["REKINDLE_HOME"] = folder
        family = load(name, Path(folder))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _SAFETY_BYTES, -1))
        outcomes = run(family, name, seed, range(first, first + count))
    print(f"{name}: {outcomes['read']:,} inputs read, {outcomes['refused']:,} refused")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
