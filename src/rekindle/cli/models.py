"""`rekindle pull`, `list`, `rm`: the models on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from rekindle.cli.app import app
from rekindle.cli.options import AsJson, complete_model

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Names (smollm2, minilm), folders, .gguf files, ollama:NAME, or ORG/NAME[:QUANT] on the hub.",
        autocompletion=complete_model,
    ),
]


@app.command()
def pull(models: Names, json: AsJson = False) -> None:
    """Download models, verify their digests, and make them ready to run offline.

    An interrupted download continues where it stopped. Folders, .gguf files and Ollama's models are used in place.
    """
    from rekindle.cli.console import print_json, progress
    from rekindle.core.size import human_bytes
    from rekindle.engine.load import convert_gguf, missing_packages
    from rekindle.models.pull import pull as get

    got = []
    for model in models:
        with progress(model) as report:
            entry = get(model, report)
            if entry.kind == "decoder" and not (entry.in_place and entry.files.gguf):  # llama.cpp takes that as it is
                if not missing_packages("hf"):
                    convert_gguf(entry.files, report)
                elif entry.files.gguf is None or missing_packages("llamacpp"):
                    names = "'rekindle[hf]'" + ("" if entry.files.gguf is None else " or 'rekindle[llamacpp]'")
                    typer.echo(f"note: no engine for it is installed. Get one with: pip install {names}", err=True)
        got.append({"name": entry.name, "kind": entry.kind, "source": entry.source, "bytes": entry.size_bytes()})
        if not json:
            typer.echo(f"{entry.name}: ready ({human_bytes(entry.size_bytes())}, {entry.kind}, from {entry.source})")
    if json:
        print_json(got)


@app.command("list")
def list_models(json: AsJson = False) -> None:
    """List pulled models, those of other tools that can be used in place, and the named ones."""
    from rekindle.cli.console import print_json, print_table
    from rekindle.core.size import human_bytes
    from rekindle.models.other_tools import list_in_place
    from rekindle.models.registry import entries
    from rekindle.models.sources import NAMED

    pulled = entries()
    known = {e.name for e in pulled}
    others = [other for other in list_in_place() if other.name not in known]
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
            + [
                {
                    "name": other.name,
                    "kind": other.kind,
                    "source": other.tool,
                    "bytes": other.size_bytes,
                    "folder": None,
                    "gguf": str(other.gguf),
                    "in_place": True,
                    "added": None,
                }
                for other in others
            ]
        )
        return
    rows = [[e.name, e.kind, human_bytes(e.size_bytes()), e.source, e.added[:10]] for e in pulled]
    rows += [[o.name, o.kind, human_bytes(o.size_bytes), f"in place: {o.tool}", "-"] for o in others]
    rows += [[m.name, m.kind, "-", f"not pulled: {m.about}", "-"] for m in NAMED.values() if m.name not in known]
    print_table(["model", "kind", "size", "source", "added"], rows)


@app.command()
def rm(models: Names) -> None:
    """Remove pulled models. Files used in place, and the hub's own cache, stay."""
    from rekindle.models.registry import remove

    for model in models:
        entry = remove(model)
        kept = f"; its files stay in {entry.files.gguf or entry.files.folder}" if entry.in_place else ""
        typer.echo(f"{model}: removed{kept}")
