"""`rekindle calibrate`: find what a model needs where answers may be nearly the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.app import app
from rekindle.cli.options import AsJson, Model, engine_options, takes

if TYPE_CHECKING:
    from rekindle.session.calibrate.calibration import Calibration


@app.command()
@takes(loading=engine_options)
def calibrate(
    model: Model,
    loading: dict[str, Any],
    quality: Annotated[
        float, typer.Option(help="How near answers from reused passages must be to the full computation (ROUGE-L).")
    ] = 0.9,
    adapters: Annotated[
        Path | None, typer.Option(help="A folder of adapters that PEFT saved: differences are measured with them.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A folder of your own: .jsonl with question and contexts, .txt, .md.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="So many questions at most.")] = 24,
    json: AsJson = False,
) -> None:
    """Find the budget of reused passages and the bits of quantized KV for a model, and keep them for its sessions."""
    from rekindle.cli.console import notes, print_json, progress
    from rekindle.engine.load import EngineOptions, load_engine
    from rekindle.session.calibrate.calibration import calibrate
    from rekindle.settings import Settings

    with progress(model) as report:
        engine = load_engine(model, EngineOptions.of(Settings.load(loading)), report)
    try:
        with notes.status(f"calibrate {model}") as status:
            found = calibrate(
                engine,
                quality=quality,
                adapters=adapters,
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
    from rekindle.cli.console import print_table

    if found.budget is not None:
        columns = ["budget", "ROUGE-L", "KL", "computed"]
        rows = [
            [f"{one.budget:g}", f"{one.rouge_l:.3f}", f"{one.kl:.4f}", f"{one.computed_share:.1%}"]
            for one in found.budget.tried
        ]
        title = f"reused passages, {found.budget.prompts} prompts, wanted ROUGE-L {found.budget.quality:g}"
        print_table(columns, rows, title=title)
        typer.echo()
    if found.bits is not None:
        rows = [[one.form, one.plan, f"{one.bits:.2f}", f"{one.kl:.4f}", f"{one.top1:.1%}"] for one in found.bits.tried]
        print_table(["KV", "bits by layer", "bits a number", "KL", "same first choice"], rows, title="quantized KV")
        typer.echo()
    for note in found.notes:
        typer.echo(note)
    typer.echo(found.summary)
