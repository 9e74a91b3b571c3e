"""`python -m benchmarks NAME`: measure, against the rivals, on this machine."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from rekindle.cli.options import AsJson, print_json, print_table
from rekindle.errors import InvalidSetting, RekindleError

BENCHES = {
    "engine": "benchmarks.engine",
    "store": "benchmarks.store",
    "prefix": "benchmarks.prefix.bench",
    "serve": "benchmarks.serve.bench",
    "knowledge": "benchmarks.knowledge",
    "chunks": "benchmarks.chunks.bench",
    "anywhere": "benchmarks.chunks.anywhere",
    "text": "benchmarks.text_places",
    "adapters": "benchmarks.adapters.bench",
    "policies": "benchmarks.adapters.replay",
    "warmstart": "benchmarks.adapters.warm_start",
    "answers": "benchmarks.answers.bench",
    "stream": "benchmarks.stream.bench",
    "sparse": "benchmarks.sparse.bench",
    "slower": "benchmarks.never_slower",
    "agents": "benchmarks.agents.bench",
    "fleet": "benchmarks.fleet.bench",
}
_WITHOUT_ENGINE = {"store", "text", "knowledge", "policies", "fleet"}
_IN_UNITS = ("slower", "adapters", "chunks", "answers", "stream", "serve")  # serve: rag
_OPTIONS_OF = {  # options that only some benches take
    "calibrate": ("chunks", "adapters"),
    "kl": ("chunks",),
    "adapters": ("adapters", "warmstart", "slower"),
    "pairs": ("answers",),
    "traces": ("stream",),
    "users": ("answers",),
    "tokens": ("slower", "stream", "fleet"),
    "gap": ("fleet",),
    "minutes": (*_IN_UNITS, "fleet"),
    "resume": _IN_UNITS,
    "part": _IN_UNITS,
    "workload": ("serve", "chunks"),
}

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"Which bench: {', '.join(BENCHES)}.")],
    model: Annotated[str, typer.Option(help="The model to measure with.")] = "smollm2",
    engine: Annotated[str, typer.Option(help="The engine: hf, llamacpp.")] = "hf",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    shape: Annotated[str | None, typer.Option(help="Random weights of this shape: for time only.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder of .jsonl texts, or of a trace for serve and fleet.")
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(
            help="adapters, warmstart, slower: a folder of folders that PEFT saved; else those of the package."
        ),
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="answers: a .jsonl file of labelled pairs of questions (a, b, paraphrase).")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="stream: a folder of .csv files of bandwidth over time (time_s,mbps).")
    ] = None,
    users: Annotated[int | None, typer.Option(min=1, help="answers: how many users of each set.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="slower, fleet: the largest prompt; stream: the context.")
    ] = None,
    gap: Annotated[float | None, typer.Option(min=0, help="fleet: mean seconds between two requests.")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Report what is measured by then: slower, adapters, chunks, answers, stream, fleet, serve (rag).",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Write each unit that is measured into this file, and do not measure what it has."),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Measure some units only: every eighth from the third, 3/8, or by name, such as '*4096*'."),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            help="serve: trace (shared beginnings), rag (pasted passages); chunks: endurance (1,000 questions)."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How often each measurement is repeated.")] = None,
    seed: Annotated[int, typer.Option(help="For everything drawn at random.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions: under three minutes.")] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="chunks: find how much to recompute with this model, and keep it; adapters: the bits of its KV.",
        ),
    ] = False,
    kl: Annotated[
        float | None, typer.Option(help="chunks: calibrate for this mean KL from the full computation, in nats.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this .png file.")] = None,
    json: AsJson = False,
) -> None:
    """Run a bench: every baseline in the same process, interleaved, as medians and ratios."""
    given = locals()
    from benchmarks.base import BenchOptions
    from benchmarks.charts import save_chart
    from rekindle.cli.console import notes
    from rekindle.engine.load import choose_engine, require_packages

    if name not in BENCHES:
        raise InvalidSetting(f"There is no bench {name!r}. Use {', '.join(BENCHES)}.")
    for option, benches in _OPTIONS_OF.items():
        if given[option] not in (None, False, []) and name not in benches:
            only = f"the bench{'es' * (len(benches) > 1)} {' and '.join(benches)}"
            raise InvalidSetting(f"--{option} is for {only}: leave it out with {name}.")
    if name not in _WITHOUT_ENGINE:
        require_packages(choose_engine(model, engine))
    given["part"] = tuple(part or ())
    options = BenchOptions(**{option: given[option] for option in BenchOptions.__dataclass_fields__ if option in given})
    with notes.status(f"bench {name}") as status:

        def advance(part: str) -> None:
            status.update(f"bench {name}: {part}")
            if not notes.is_terminal:  # a log shows how far a run of an hour is
                notes.print(f"bench {name}: {part}", soft_wrap=True, highlight=False, markup=False)

        report = import_module(BENCHES[name]).run(options, advance)
    if plot is not None:
        save_chart(report.as_json(), plot)
    if json:
        print_json(report.as_json())
        return
    columns = ["measure", "ours", "baseline", "ratio", "bar"]
    print_table(columns, [[getattr(row, column) for column in columns] for row in report.rows], title=f"bench {name}")


def main() -> None:
    """An error of ours is one sentence on standard error and exit status 1."""
    try:
        app()
    except RekindleError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
