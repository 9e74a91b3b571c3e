"""`rekindle bench`: the time to the first token with your model on your machine, cold, warm and after a restart;
`rekindle calibrate`: the recompute budget and bits that your model needs.

A prompt of the bench is a prefix that was asked before and an ending that was not.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.options import AsJson, Model, app, engine_options, print_json, print_table, takes
from rekindle.core.size import count_of
from rekindle.errors import EngineMissing, InvalidSetting, RekindleError
from rekindle.machine import describe_machine
from rekindle.settings import Settings

if TYPE_CHECKING:
    from rekindle.session.calibrate.calibration import Calibration
    from rekindle.session.session import Session

SECONDS = 60.0
_SIZES = (256, 512, 1024, 2048, 4096)  # tokens of a prefix: the largest that computes within its share of the time
_COLD_SHARE = 1 / 15  # of the time, for one cold start
_RESTART_SHARE = 1 / 4  # of the time, for all starts in the new process
_MIN_ROUNDS, _MAX_ROUNDS = 3, 30
_PROBE_TOKENS = 128
_TITLES = {
    "cold": "cold",
    "engine": "warm in the engine",
    "memory": "warm from memory",
    "restart": "restarted, from disk",
}
_IN_RESTARTED = "from rekindle.cli.bench import restarted; restarted()"


@dataclass(frozen=True)
class _Prompts:
    """A prefix, and endings that differ from their first token on."""

    prefix: list[int]
    ending: list[int]
    firsts: Iterator[int]

    @classmethod
    def of(cls, session: Session, size: int) -> _Prompts:
        from rekindle.session.calibrate.prompts import sample_text

        tokens = session.engine.tokenizer.encode(sample_text())
        repeated = list(itertools.islice(itertools.cycle(tokens), size))
        return cls(repeated, tokens[:15], iter(range(session.engine.tokenizer.vocabulary_size)))

    def next(self) -> list[int]:
        return [*self.prefix, next(self.firsts), *self.ending]


@app.command()
@takes(loading=engine_options)
def bench(
    model: Model,
    loading: dict[str, Any],
    seconds: Annotated[float, typer.Option(min=1, help="About how long to measure; loading comes on top.")] = SECONDS,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this .png file.")] = None,
    json: AsJson = False,
) -> None:
    """Measure the time to the first token with your model on this machine: cold, warm, and after a restart."""
    from rekindle.cli.console import notes, progress
    from rekindle.session.session import Session

    figure: Any = None if plot is None else _figure()
    with tempfile.TemporaryDirectory(prefix="rekindle-") as folder:
        kept: dict[str, Any] = {
            "cache": folder,
            "reuse": "exact",
            "disk_limit": "90%",
            "deterministic": False,
            "origin": "none",
        }
        with progress(model) as report, Session(model, **loading, **kept, progress=report) as session:
            with notes.status("bench: cold and warm"):
                prompts = _Prompts.of(session, _size(session, seconds))
                times, reused = _measure(session, prompts, seconds)
            about = {
                "model": session.engine.name,
                "engine": session.engine_kind,
                "device": session.engine.device,
                "dtype": session.engine.identity(session.engine.regime(1)).dtype,
                "tokens": len(prompts.next()),
            }
        with notes.status("bench: a new process"):
            task = {"model": model, "settings": {**loading, **kept, "memory_limit": 0}, "prompts": vars(prompts)}
            times["restart"], reused["restart"] = _restart({**task, "seconds": seconds * _RESTART_SHARE})
    summaries = {name: _summary(name, times, reused) for name in _TITLES}
    if figure is not None:
        _draw(figure, summaries, about)
        figure.savefig(plot, dpi=120)
    if json:
        print_json({**about, "machine": describe_machine(), "restart": "a new process", "first_token": summaries})
        return
    rows = [
        [_TITLES[name], _shown(one), f"{one['speedup']:.1f}x", str(one["rounds"]), str(one["reused_tokens"])]
        for name, one in summaries.items()
    ]
    where = f"{about['model']} on {about['device']} ({about['dtype']})"
    title = f"Time to the first token of a prompt of {about['tokens']:,} tokens, {where}"
    print_table(["start", "median (min-max)", "against cold", "rounds", "reused"], rows, title=title)


def _size(session: Session, seconds: float) -> int:
    """How long a prefix may be: computing it once takes about a fifteenth of the time."""
    probe = session.engine.tokenizer.encode("A word about speed. " * _PROBE_TOKENS)[:_PROBE_TOKENS]
    session.generate(probe, max_tokens=1, reuse="off")  # the first of its kind is always slower
    rate = len(probe) / session.generate(probe, max_tokens=1, reuse="off").timings.first_token_seconds
    room = session.engine.context_tokens - 32
    fitting = [size for size in _SIZES if size <= room] or [max(1, room)]
    return max([size for size in fitting if size / rate <= seconds * _COLD_SHARE], default=fitting[0])


def _measure(
    session: Session, prompts: _Prompts, seconds: float
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Cold, from the engine and from memory, in turns until the time is up."""

    def ask(**options: Any) -> Any:
        reply = session.generate(prompts.next(), max_tokens=1, **options)
        session.flush()
        return reply

    def from_memory() -> Any:
        session.cache.unpark()
        return ask()

    jobs: dict[str, Callable[[], Any]] = {"cold": lambda: ask(reuse="off"), "engine": ask, "memory": from_memory}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    reused: dict[str, list[int]] = {name: [] for name in jobs}
    session.warm(prompts.prefix)
    ask()  # what comes first is always slower
    from_memory()
    until = time.perf_counter() + seconds * (1 - _RESTART_SHARE)
    while _goes_on(times["memory"], until):
        for name, job in jobs.items():  # memory comes last and leaves the prefix in the engine
            reply = job()
            times[name].append(reply.timings.first_token_seconds)
            reused[name].append(reply.reuse.reused)
    return times, reused


def _goes_on(done: list[float], until: float) -> bool:
    return len(done) < _MIN_ROUNDS or (len(done) < _MAX_ROUNDS and time.perf_counter() < until)


def _restart(task: dict[str, Any]) -> tuple[list[float], list[int]]:
    """The same prefix in a process of its own, which loads the model and finds the KV on disk."""
    task["prompts"] = {**task["prompts"], "firsts": list(itertools.islice(task["prompts"]["firsts"], _MAX_ROUNDS + 2))}
    done = subprocess.run(
        [sys.executable, "-c", _IN_RESTARTED], input=json.dumps(task), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise InvalidSetting(
            f"The restarted process failed: {(done.stderr.strip() or str(done.returncode)).splitlines()[-1]}"
        )
    found = json.loads(done.stdout)
    return found["times"], found["reused"]


def restarted() -> None:
    """What the new process does: a task as JSON on standard input, what it measured on standard output."""
    from rekindle.session.session import Session

    task = json.load(sys.stdin)
    try:
        with Session(task["model"], **task["settings"]) as session:
            given = task["prompts"]
            prompts = _Prompts(given["prefix"], given["ending"], iter(given["firsts"]))
            session.generate(prompts.ending, max_tokens=1, reuse="off")  # the first of its kind is always slower
            times: list[float] = []
            reused: list[int] = []
            until = time.perf_counter() + task["seconds"]
            while _goes_on(times, until):
                reply = session.generate(prompts.next(), max_tokens=1)
                times.append(reply.timings.first_token_seconds)
                reused.append(reply.reuse.disk)
                session.flush()
                session.cache.unpark()
    except RekindleError as error:
        sys.exit(f"error: {error}")
    json.dump({"times": times, "reused": reused}, sys.stdout)


def _summary(name: str, times: dict[str, list[float]], reused: dict[str, list[int]]) -> dict[str, Any]:
    own = times[name]
    return {
        "median_s": statistics.median(own),
        "min_s": min(own),
        "max_s": max(own),
        "speedup": statistics.median(times["cold"]) / statistics.median(own),
        "rounds": len(own),
        "reused_tokens": min(reused[name]),
    }


def _shown(one: dict[str, Any]) -> str:
    return f"{one['median_s'] * 1e3:,.0f} ms ({one['min_s'] * 1e3:,.0f}-{one['max_s'] * 1e3:,.0f})"


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EngineMissing("Plots need matplotlib: pip install 'rekindle-llm[bench]'") from error
    return Figure(figsize=(8, 3), layout="constrained")


def _draw(figure: Any, summaries: dict[str, dict[str, Any]], about: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = list(summaries.values())
    spread = [[one["median_s"] - one["min_s"] for one in rows], [one["max_s"] - one["median_s"] for one in rows]]
    axes.barh([_TITLES[name] for name in summaries], [one["median_s"] for one in rows], xerr=spread)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"seconds to the first token of {about['tokens']}, {about['model']}")


@app.command()
@takes(loading=engine_options)
def calibrate(
    model: Model,
    loading: dict[str, Any],
    kl: Annotated[
        float,
        typer.Option(
            help="How far next tokens after reused passages may be from the full computation: mean KL in nats. With "
            "0.015 about 96 of 100 tokens are chosen alike; less recomputes more."
        ),
    ] = 0.015,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "--adapters",
            help="Your own adapter, to measure differences with: a name known from `rekindle adapters`, NAME=PATH, a "
            "folder that PEFT saved, or a folder of such folders. Repeatable.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder of your own: .jsonl with question and contexts, .txt, .md.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="The largest number of questions.")] = 24,
    json: AsJson = False,
) -> None:
    """Find the budget of reused passages and the bits of quantized KV for a model, and keep them for its sessions."""
    from rekindle.cli.console import notes, progress
    from rekindle.engine.load import EngineOptions, load_engine
    from rekindle.session.calibrate.calibration import calibrate

    with progress(model) as report:
        engine = load_engine(model, EngineOptions.of(Settings.load(loading)), report)
    try:
        with notes.status(f"calibrate {model}") as status:
            found = calibrate(
                engine,
                max_kl=kl,
                adapters=adapter,
                data=data,
                prompts=prompts,
                progress=lambda part: status.update(f"calibrate {model}: {part}"),
            )
    finally:
        engine.close()
    if json:
        print_json(found.as_dict())
        return
    _print(found)


def _print(found: Calibration) -> None:
    if found.budget is not None:
        columns = ["budget", "KL", "same top token", "ROUGE-L", "computed"]
        rows = [
            [f"{one.budget:g}", f"{one.kl:.4f}", f"{one.top1:.1%}", f"{one.rouge_l:.3f}", f"{one.computed_share:.1%}"]
            for one in found.budget.tried
        ]
        title = f"Reused passages: {count_of(found.budget.prompts, 'prompt')}, wanted KL {found.budget.max_kl:g}"
        print_table(columns, rows, title=title)
        typer.echo()
    if found.bits is not None:
        rows = [[one.form, one.plan, f"{one.bits:.2f}", f"{one.kl:.4f}", f"{one.top1:.1%}"] for one in found.bits.tried]
        print_table(["KV", "bits by layer", "bits per number", "KL", "same top token"], rows, title="Quantized KV")
        typer.echo()
    for note in found.notes:
        typer.echo(note)
    typer.echo(found.summary)
