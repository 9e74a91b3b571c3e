"""Benches that are cut go on, and several that share the work make one report: `--resume FILE`, `--part`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import base, never_slower
from benchmarks.base import Advance, BenchOptions, TimeIsUp, Units
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting

NAMES = [f"unit {number}" for number in range(7)]
ABOUT = {"model": "m", "engine": "hf", "device": "cpu", "dtype": "float32"}
OVER = BenchOptions(minutes=0)


@dataclass(frozen=True)
class Measured:
    name: str
    pairs: tuple[tuple[float, bool], ...]
    missing: float | None = None


def units(options: BenchOptions, advance: Advance = lambda part: None, **about: str) -> Units:
    return Units("made up", options, {**ABOUT, **about}, advance)


def collect(some: Units, measured: list[str]) -> list[Measured | None]:
    def measure(name: str) -> Measured:
        measured.append(name)
        return Measured(name, ((0.1, True), (float(len(measured)), False)))

    return [some.one(name, Measured, lambda name=name: measure(name)) for name in NAMES]


def stopping_after(count: int) -> Advance:
    left = iter(range(count))

    def advance(part: str) -> None:
        if next(left, None) is None:
            raise TimeIsUp

    return advance


def test_what_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    options, measured = BenchOptions(resume=tmp_path / "units.jsonl"), list[str]()
    first = collect(units(options, stopping_after(3)), measured)
    assert measured == NAMES[:3] and first[3:] == [None] * 4
    with (tmp_path / "units.jsonl").open("a") as file:
        file.write('\n{"unit": "unit 3", "res')  # a run that was killed while it wrote
    assert collect(units(options), measured)[:3] == first[:3] and measured == NAMES
    again = units(options)
    assert [one and one.pairs[1][0] for one in collect(again, measured)] == [1, 2, 3, 4, 5, 6, 7] and measured == NAMES
    assert [part["steps"] for part in again.report().measured_by] == [3, 4]


def test_parts_of_several_runs_cover_every_unit_once(tmp_path: Path) -> None:
    files, measured = [tmp_path / f"{number}.jsonl" for number in range(3)], list[str]()
    for number, file in enumerate(files, start=1):
        found = collect(units(BenchOptions(resume=file, part=(f"{number}/3",))), measured)
        assert sum(one is not None for one in found) == (3, 2, 2)[number - 1]
    assert sorted(measured) == NAMES
    (whole := tmp_path / "all.jsonl").write_text("".join(file.read_text() for file in files))
    pooled = units(replace(OVER, resume=whole))
    assert [one and one.name for one in collect(pooled, measured)] == NAMES and len(measured) == len(NAMES)
    said = pooled.report().as_json()
    assert [part["steps"] for part in said["measured_by"]] == [3, 2, 2]
    assert all({"command", "machine", "versions", "commit", "run"} <= set(part) for part in said["measured_by"])


def test_a_part_may_be_named(tmp_path: Path) -> None:
    measured: list[str] = []
    collect(units(BenchOptions(part=("unit [2-5]", "2/2"))), measured)
    assert measured == ["unit 3", "unit 5"], "the share is one of those that are named"


def test_what_every_part_needs_is_measured_by_all() -> None:
    some = units(BenchOptions(part=("2/2",)))
    assert some.one("costs", int, lambda: 3, shared=True) == 3
    assert [some.one(name, int, lambda: 4) for name in NAMES[:2]] == [None, 4], "it is no unit of the parts"
    alone = units(BenchOptions(part=("nothing",)))
    assert alone.one("costs", int, lambda: 3, shared=True) == 3 and alone.one("unit", int, lambda: 4) is None
    with pytest.raises(InvalidSetting, match="Nothing was measured"):
        alone.report()


@pytest.mark.parametrize(
    ("other", "about", "name"),
    [({"seed": 1}, {}, "seed"), ({"limit": 2}, {}, "limit"), ({}, {"dtype": "float16"}, "dtype")],
)
def test_lines_of_other_settings_are_refused(tmp_path: Path, other: Any, about: Any, name: str) -> None:
    options = BenchOptions(resume=tmp_path / "units.jsonl")
    collect(units(options), [])
    with pytest.raises(InvalidSetting, match=f"line 2: measured with {name} = "):
        units(replace(options, **other), **about)


def test_lines_of_other_code_or_another_machine_are_only_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BenchOptions(resume=tmp_path / "units.jsonl")
    collect(units(options), [])
    monkeypatch.setattr(base, "_code", lambda: "other")
    with pytest.raises(InvalidSetting, match="measured with code = "):
        units(options)
    reported = units(replace(options, minutes=0), device="cuda")
    assert [one and one.name for one in collect(reported, [])] == NAMES
    assert reported.report().fields["device"] == "cpu", "where it was measured"
    newer = units(BenchOptions(resume=tmp_path / "newer.jsonl"))
    collect(newer, [])
    both = tmp_path / "both.jsonl"
    both.write_text((tmp_path / "units.jsonl").read_text() + (tmp_path / "newer.jsonl").read_text())
    with pytest.raises(InvalidSetting, match="measured with code = "):
        units(replace(OVER, resume=both))


def test_the_data_counts_not_where_it_is(tmp_path: Path) -> None:
    for name, text in (("here", "one"), ("there", "one"), ("other", "two words")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "texts.jsonl").write_text(text)
    file = tmp_path / "units.jsonl"
    collect(units(BenchOptions(resume=file, data=tmp_path / "here")), [])
    units(BenchOptions(resume=file, data=tmp_path / "there"))
    with pytest.raises(InvalidSetting, match="measured with data = "):
        units(BenchOptions(resume=file, data=tmp_path / "other"))


def test_steps_that_follow_each_other_find_what_was_left(tmp_path: Path) -> None:
    options = BenchOptions(resume=tmp_path / "units.jsonl")

    def run(some: Units) -> list[int]:
        @contextmanager
        def begin() -> Iterator[Callable[[int], int]]:
            with some.kept("counter") as folder:
                folder.mkdir(exist_ok=True)
                yield lambda step: count(folder / "count")

        return some.steps("counter", int, 4, begin)

    def count(path: Path) -> int:
        number = int(path.read_text()) if path.exists() else 0
        path.write_text(str(number + 1))
        return number

    folder = tmp_path / "units.jsonl.counter"
    assert run(units(options, stopping_after(3))) == [0, 1] and folder.is_dir()
    assert run(units(options)) == [0, 1, 2, 3] and not folder.exists()
    (tmp_path / "units.jsonl").unlink()
    run(units(options, stopping_after(3)))
    (folder / "count").unlink()
    folder.rmdir()
    with pytest.raises(InvalidSetting, match="is gone"):
        run(units(options))
    assert run(units(replace(options, minutes=0))) == [0, 1]
    assert run(units(BenchOptions())) == [0, 1, 2, 3]


def test_no_step_begins_when_the_minutes_are_over() -> None:
    late = BenchOptions(minutes=1, started=time.monotonic() - 60)
    some = units(late)
    assert some.steps("unit", int, 2, lambda: nullcontext(lambda step: step)) == []
    with pytest.raises(InvalidSetting, match="Nothing was measured"):
        some.report()


def facts(report: dict[str, Any]) -> Any:
    """A report of `slower` without its times, and what the law of costs makes of them."""
    times = {"ours_s", "computing_s", "ratio", "interval", "loss_ms", "fails", "reused"}
    return [{name: value for name, value in row.items() if name not in times} for row in report["rows"]]


def test_slower_goes_on_between_two_pairs_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(never_slower, "load", lambda options: FakeEngine())

    def run(advance: Advance = lambda part: None, **more: Any) -> dict[str, Any]:
        return never_slower.run(BenchOptions(quick=True, limit=2, **more), advance).as_json()

    whole, file = run(), tmp_path / "units.jsonl"
    cut = run(stopping_after(6), resume=file)  # before the second pair of chunks
    assert {row["mechanism"] for row in cut["rows"]} == {*never_slower._PREFIXES, "chunks"}
    assert facts(run(resume=file)) == facts(whole)
    parts = [tmp_path / f"part-{number}.jsonl" for number in (1, 2)]
    for number, part in enumerate(parts, start=1):
        run(resume=part, part=(f"{number}/2",))
    (pooled := tmp_path / "pooled.jsonl").write_text("".join(part.read_text() for part in parts))
    steps = [json.loads(line) for line in pooled.read_text().splitlines() if line]
    assert len({(one["unit"], one["step"]) for one in steps}) == len(steps) == 2 * 3 * 2
    report = run(resume=pooled, minutes=0)
    assert facts(report) == facts(whole) and len(report["measured_by"]) == 2


def test_the_command_takes_a_file_and_parts(tiny_folder: Path, tmp_path: Path) -> None:
    """In a process of its own, which ends with what it measured."""
    file = tmp_path / "units.jsonl"
    arguments = ["slower", "--quick", "--limit", "1", "--model", str(tiny_folder), "--device", "cpu", "--json"]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks", *arguments, "--resume", str(file), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    done = run("--part", "drafts, 64 tokens")
    assert done.returncode == 0, done.stderr
    assert {row["mechanism"] for row in json.loads(done.stdout)["rows"]} == {"right drafts", "wrong drafts"}
    again = json.loads(run("--minutes", "0").stdout)
    assert len(again["rows"]) == 4 and "--part 'drafts" not in again["command"] and len(again["measured_by"]) == 1
    refused = run("--minutes", "0", "--seed", "5")
    assert refused.returncode == 1 and "measured with seed = 0, not 5" in refused.stderr
