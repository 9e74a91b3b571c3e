"""What a bench takes and gives, and how things are compared: in one process, interleaved, by medians."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rekindle import __version__
from rekindle.engine.base import Engine
from rekindle.machine import describe_machine

T = TypeVar("T")
Advance = Callable[[str], None]  # called before each part of a bench, with what it is; may raise `TimeIsUp`


class TimeIsUp(Exception):
    """The `--minutes` of a run are over: a bench reports the parts that are done."""


@contextmanager
def until_time_is_up(done: Sized) -> Iterator[None]:
    """Stop measuring where `TimeIsUp` comes. Goes on raising it where nothing is done yet."""
    try:
        yield
    except TimeIsUp:
        if not done:
            raise


@dataclass(frozen=True)
class BenchOptions:
    """The options of every bench."""

    model: str = "smollm2"
    engine: str = "hf"
    device: str = "auto"
    dtype: str = "auto"
    data: Path | None = None
    shape: str | None = None
    limit: int | None = None
    seed: int = 0
    quick: bool = False
    calibrate: bool = False  # chunks: find the budget of a model, and keep it
    quality: float | None = None  # for this ROUGE-L to the full computation
    adapters: Path | None = None  # adapters: a folder of folders that PEFT saved
    pairs: Path | None = None  # answers: labelled pairs of questions
    traces: Path | None = None  # stream: a folder of bandwidth over time
    users: int | None = None  # answers: of each set
    tokens: int | None = None  # slower, fleet: the largest prompt
    gap: float | None = None  # fleet: mean seconds between two requests
    workload: str | None = None  # serve: trace, rag; chunks: endurance

    def rounds(self, full: int, quick: int = 3) -> int:
        """How often a measurement is repeated."""
        return self.limit or (quick if self.quick else full)


@dataclass(frozen=True)
class TableRow:
    """One line of the table: ours against theirs, and the bar."""

    measure: str
    ours: str
    baseline: str = ""
    ratio: str = ""
    bar: str = ""


@dataclass
class Report:
    """What a bench found. `fields` is the JSON object; a number that could not be measured is null with a reason."""

    bench: str
    rows: list[TableRow] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The JSON object; `table` is what people see."""
        command = " ".join(["python", "-m", "benchmarks", *sys.argv[1:]])
        about = {"bench": self.bench, "command": command, "machine": describe_machine(), "versions": versions()}
        return {**about, **self.fields, "table": [asdict(row) for row in self.rows]}


def about(engine: Engine, options: BenchOptions) -> dict[str, Any]:
    """The fields that say what was measured with."""
    dtype = engine.identity(engine.regime(1)).dtype
    return {"model": engine.name, "engine": options.engine, "device": engine.device, "dtype": dtype}


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when the block ends."""
    return tempfile.TemporaryDirectory(prefix="rekindle-bench-")


def known(values: Iterable[float | None]) -> list[float]:
    """Those that were measured."""
    return [value for value in values if value is not None]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean; None where one is missing, or all are."""
    every = list(values)
    measured = known(every)
    return statistics.fmean(measured) if measured and len(measured) == len(every) else None


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing, in seconds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    def as_json(self) -> dict[str, float]:
        """Median and spread."""
        return {"median_s": self.median, "min_s": min(self.seconds), "max_s": max(self.seconds)}

    def __str__(self) -> str:
        return f"{self.median * 1e3:,.1f} ms ({min(self.seconds) * 1e3:,.1f}-{max(self.seconds) * 1e3:,.1f})"


def seconds_of(job: Callable[[], object]) -> float:
    """The seconds a job takes."""
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def repeat(job: Callable[[], object], rounds: int) -> Timing:
    """Time one job again and again."""
    return Timing(tuple(seconds_of(job) for _ in range(rounds)))


def interleave(
    jobs: Mapping[str, Callable[[], object]], rounds: int, settle: Callable[[], object]
) -> dict[str, Timing]:
    """Time every job `rounds` times, in turns (A B C A B C), after one unmeasured turn of each.

    `settle` waits until the device is idle.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(rounds + 1):
        for name, job in jobs.items():
            settle()
            start = time.perf_counter()
            job()
            settle()
            if turn > 0:
                times[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(seconds)) for name, seconds in times.items()}


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items, another one first each turn: what comes after a long prefill finds a slower processor."""
    start = turn % max(1, len(items))
    return [*items[start:], *items[:start]]


def interval(values: Any) -> tuple[float, float]:
    """The range of 95 % of the values, such as medians of a measurement that were resampled."""
    low, high = np.percentile(values, [2.5, 97.5]).tolist()
    return low, high


def paired_ratio(ours: Timing, theirs: Timing) -> float:
    """The median of the ratios of neighbouring measurements: what a shared machine disturbs least."""
    return statistics.median(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True))


def drop_pages(*paths: Path) -> bool:
    """Make the system forget the pages of files, so that the disk is read; False where it cannot be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


def folder_bytes(folder: Path) -> int:
    """What the files of a folder take; they may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def versions() -> dict[str, str]:
    """The versions that matter."""
    found = {"rekindle": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "xllamacpp"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
