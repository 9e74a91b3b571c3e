"""What a bench takes and gives, and how things are compared: in one process, interleaved, by medians."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

import rekindle
from rekindle import __version__
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.machine import describe_machine

T = TypeVar("T")
Advance = Callable[[str], None]  # called before each part of a bench, with what it is


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
    kl: float | None = None  # for this mean KL from the full computation
    adapters: Path | None = None  # adapters: a folder of folders that PEFT saved
    pairs: Path | None = None  # answers: labelled pairs of questions
    traces: Path | None = None  # stream: a folder of bandwidth over time
    users: int | None = None  # answers: of each set
    tokens: int | None = None  # slower, fleet: the largest prompt
    gap: float | None = None  # fleet: mean seconds between two requests
    workload: str | None = None  # serve: trace, rag; chunks: endurance
    minutes: float | None = None  # from `started` on, until what is measured is reported
    resume: Path | None = None  # the file of `Units`
    part: tuple[str, ...] = ()  # of its units
    started: float = field(default_factory=time.monotonic)

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
    """What a bench found. `fields` is the JSON object; a number that could not be measured is null with a reason.

    `measured_by`: the runs that measured it, where these are not just this one: see `Units`.
    """

    bench: str
    rows: list[TableRow] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    measured_by: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The JSON object; `table` is what people see."""
        about = {"bench": self.bench, **this_run()}
        if self.measured_by:
            names = ("machine", "versions", "commit")
            about |= {"measured_by": self.measured_by, **{name: self.measured_by[0][name] for name in names}}
        return {**about, **self.fields, "table": [asdict(row) for row in self.rows]}


def this_run() -> dict[str, Any]:
    """What a result says of the run that measured it."""
    command = " ".join(["python", "-m", "benchmarks", *sys.argv[1:]])
    return {"command": command, "machine": describe_machine(), "versions": versions()}


class TimeIsUp(Exception):
    """The `--minutes` of a run are over: a bench reports what is measured."""


def timed(options: BenchOptions, advance: Advance) -> Advance:
    """`advance` that raises `TimeIsUp` when the minutes of a run are over."""
    deadline = math.inf if options.minutes is None else options.started + 60.0 * options.minutes

    def timed_advance(part: str) -> None:
        if time.monotonic() >= deadline:
            raise TimeIsUp
        advance(part)

    return timed_advance


@contextmanager
def until_time_is_up(done: Sized) -> Iterator[None]:
    """Stop measuring where `TimeIsUp` comes. Raises `InvalidSetting` where nothing is done yet."""
    try:
        yield
    except TimeIsUp as error:
        if not done:
            raise InvalidSetting(_NOTHING) from error


_NOTHING = "Nothing was measured: give more --minutes, or another --part."
_NO_SETTINGS = ("minutes", "resume", "part", "started")  # options that say nothing about what is measured
_PLACE = ("device", "dtype", "processor", "code")
_ROOT = Path(__file__).parents[1]


class Units:
    """What a bench measures, unit by unit. Each is written into `--resume FILE` as soon as it is measured; those that
    the file has are not measured again, also those of other runs. `--part` leaves units to other runs.

    A unit has one step, or several that need the same preparations or follow each other.
    """

    def __init__(self, bench: str, options: BenchOptions, about: Mapping[str, Any], advance: Advance) -> None:
        """Reads the file. Raises `InvalidSetting` where it was measured with something else."""
        self._bench, self._options, self._about = bench, options, dict(about)
        self.advance = timed(options, advance)  # for what is measured
        given = {name: value for name, value in vars(options).items() if name not in _NO_SETTINGS}
        settings = {name: _content(value) if isinstance(value, Path) else value for name, value in given.items()}
        here = {"processor": describe_machine()["processor"], "code": _code()}
        self._with = json.loads(json.dumps({"bench": bench, **settings, **about, **here}))
        self._run = {"run": uuid.uuid4().hex, "commit": _commit(), **this_run()}
        self._done: dict[str, dict[int, Any]] = {}
        self._runs: dict[str, dict[str, Any]] = {}
        self._seen = 0  # units that could be of this part
        self._found = False
        if options.resume is not None and options.resume.exists():
            for number, line in enumerate(options.resume.read_text("utf-8").splitlines(), start=1):
                self._read(line, f"{options.resume}, line {number}")

    def one(self, name: str, kind: type[T], job: Callable[[], T], *, shared: bool = False) -> T | None:
        """The result of a unit of one step; None if it is not measured. `shared`: every part needs it."""
        found = self.steps(name, kind, 1, lambda: nullcontext(lambda _: job()), shared=shared)
        return found[0] if found else None

    def steps(
        self,
        name: str,
        kind: type[T],
        count: int,
        begin: Callable[[], AbstractContextManager[Callable[[int], T]]],
        *,
        shared: bool = False,
    ) -> list[T]:
        """The results of the first steps of a unit: all `count` of them, if there is time.

        `begin` prepares what they need, if one is missing; what it gives measures a step by its number.
        """
        types = TypeAdapter(kind)
        known = self._done.setdefault(name, {})
        done = [types.validate_python(known[step]) for step in takewhile(known.__contains__, range(count))]
        if (shared or self._is_mine(name)) and len(done) < count:
            with suppress(TimeIsUp):
                self.advance(name)
                with begin() as measure:
                    for step in range(len(done), count):
                        if count > 1:
                            self.advance(f"{name}: {step + 1} of {count}")
                        started = time.perf_counter()
                        done.append(measure(step))
                        self._write(name, step, types.dump_python(done[-1], mode="json"), time.perf_counter() - started)
        self._found |= bool(done) and not shared
        return done

    @contextmanager
    def kept(self, name: str) -> Iterator[Path]:
        """A folder for what the steps of a unit leave to the next ones. It stays until all of them are done."""
        with scratch() as folder:
            resume = self._options.resume
            path = Path(folder) if resume is None else resume.with_name(f"{resume.name}.{name}")
            if self._done.get(name) and not path.is_dir():
                raise InvalidSetting(
                    f"{resume} has steps of {name}, but {path}, what they left to the next ones, is gone: report them "
                    f"with --minutes 0, or take their lines away."
                )
            yield path
            shutil.rmtree(path, ignore_errors=True)

    def report(self) -> Report:
        """A report that says what was measured with. Raises `InvalidSetting` if nothing was measured."""
        if not self._found:
            raise InvalidSetting(_NOTHING)
        runs = list(self._runs.values())
        fields = {name: runs[0]["with"][name] for name in self._about}
        only = len(runs) == 1 and runs[0]["run"] == self._run["run"]
        return Report(self._bench, fields=fields, measured_by=[] if only else runs)

    def _is_mine(self, name: str) -> bool:
        shares = [part for part in self._options.part if re.fullmatch(r"[1-9]\d*/[1-9]\d*", part)]
        if not all(fnmatchcase(name, part) for part in self._options.part if part not in shares):
            return False
        self._seen += 1
        return all((self._seen - int(number)) % int(of) == 0 for number, of in (part.split("/") for part in shares))

    def _read(self, line: str, where: str) -> None:
        try:
            found = json.loads(line)
        except ValueError:  # empty, or cut off with its run
            return
        elsewhere = _PLACE if self._options.minutes == 0 else ()  # to report is possible anywhere
        own = {name: value for name, value in self._with.items() if name not in elsewhere}
        before: Mapping[str, Any] = next((run["with"] for run in self._runs.values()), {})
        for name, value in {**before, **own}.items():
            there = found["with"].get(name)
            if there != value:
                raise InvalidSetting(
                    f"{where}: measured with {name} = {there!r}, not {value!r}. Give another --resume."
                )
        self._add(found)

    def _add(self, found: Mapping[str, Any]) -> None:
        steps = self._done.setdefault(found["unit"], {})
        if found["step"] not in steps:
            steps[found["step"]] = found["result"]
            run = self._runs.setdefault(found["run"]["run"], {**found["run"], "with": found["with"], "steps": 0})
            run["steps"] += 1

    def _write(self, name: str, step: int, result: Any, seconds: float) -> None:
        """The line break comes first: what a run that was cut off leaves is a line of its own."""
        found = {"unit": name, "step": step, "seconds": seconds, "result": result, "run": self._run}
        line = json.dumps({**found, "with": self._with})
        self._add(json.loads(line))
        if self._options.resume is not None:
            with self._options.resume.open("a", encoding="utf-8") as file:
                file.write(f"\n{line}")


def _content(path: Path) -> str:
    """A digest of what a file or a folder has, wherever it is."""
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    listed = [f"{one.relative_to(path)} {one.stat().st_size}" for one in files if one.exists()]
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]


def _code() -> str:
    """A digest of the product and the benches."""
    digest = hashlib.sha256()
    for folder in (Path(rekindle.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _commit() -> str | None:
    """What is checked out; where there is no history, what `BENCH_COMMIT` says."""
    if said := os.environ.get("BENCH_COMMIT"):
        return said
    try:
        asked = [["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--", "src", "benchmarks"]]
        commit, changes = (subprocess.run(["git", *one], cwd=_ROOT, capture_output=True, text=True) for one in asked)
    except FileNotFoundError:
        return None
    return None if commit.returncode else commit.stdout.strip() + (" with changes" if changes.stdout.strip() else "")


def about(engine: Engine, options: BenchOptions) -> dict[str, Any]:
    """The fields that say what was measured with."""
    dtype = engine.identity(engine.regime(1)).dtype
    return {"model": engine.name, "engine": options.engine, "device": engine.device, "dtype": dtype}


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes when the block ends."""
    return tempfile.TemporaryDirectory(prefix="rekindle-bench-")


def known(values: Iterable[T | None]) -> list[T]:
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
