"""`rekindle pull`, `list`, `rm`: the models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from rekindle.cli import app
from rekindle.cli.options import AsJson, complete_model
from rekindle.errors import EngineMissing

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Names (smollm2, minilm), folders, .gguf files, or ORG/NAME on the hub.",
        autocompletion=complete_model,
    ),
]


@app.command()
def pull(models: Names, json: AsJson = False) -> None:
    """Get models: fetched, checked against their digest, and ready to run offline.

    An interrupted download goes on where it stopped. Folders and .gguf files are used in place.
    """
    from rekindle.cli.console import print_json, progress
    from rekindle.core.size import human_bytes
    from rekindle.models.pull import pull as get
    from rekindle.run.load import prepare, require_hf

    got = []
    for model in models:
        with progress(model) as report:
            entry = get(model, report)
            if entry.kind == "decoder":
                try:
                    require_hf()
                except EngineMissing as missing:
                    typer.echo(f"note: {missing}", err=True)
                else:
                    prepare(entry.files, report)
        got.append({"name": entry.name, "kind": entry.kind, "source": entry.source, "bytes": entry.size_bytes()})
        if not json:
            typer.echo(f"{entry.name}: ready ({human_bytes(entry.size_bytes())}, {entry.kind}, from {entry.source})")
    if json:
        print_json(got)


@app.command("list")
def list_models(json: AsJson = False) -> None:
    """Show the models that were pulled, and the named ones that can be."""
    from rekindle.cli.console import print_json, print_table
    from rekindle.core.size import human_bytes
    from rekindle.models.registry import entries
    from rekindle.models.sources import NAMED

    pulled = entries()
    if json:
        print_json(
            [
                {
                    "name": e.name,
                    "kind": e.kind,
                    "source": e.source,
                    "bytes": e.size_bytes(),
                    "folder": str(e.files.folder),
                    "gguf": None if e.files.gguf is None else str(e.files.gguf),
                    "in_place": e.in_place,
                    "added": e.added,
                }
                for e in pulled
            ]
        )
        return
    rows = [[e.name, e.kind, human_bytes(e.size_bytes()), e.source, e.added[:10]] for e in pulled]
    known = {e.name for e in pulled}
    rows += [[m.name, m.kind, "-", f"not pulled: {m.about}", "-"] for m in NAMED.values() if m.name not in known]
    print_table(["model", "kind", "size", "source", "added"], rows)


@app.command()
def rm(models: Names) -> None:
    """Remove pulled models. Files used in place, and the hub's own cache, are left alone."""
    from rekindle.models.registry import remove

    for model in models:
        entry = remove(model)
        kept = f"; its files stay in {entry.files.gguf or entry.files.folder}" if entry.in_place else ""
        typer.echo(f"{model}: removed{kept}")
