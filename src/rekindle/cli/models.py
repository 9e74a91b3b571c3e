"""`rekindle pull`, `list`, `rm`, `adapters`: the models and LoRA adapters on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rekindle.cli.options import AsJson, app, command_group, complete_model, print_json, print_listing, print_table
from rekindle.core.size import count_of, human_bytes
from rekindle.errors import InvalidSetting

if TYPE_CHECKING:
    from rekindle.models.onnx_folder import OnnxForm
    from rekindle.models.registry import PulledModel

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...",
        help="Names (smollm2, minilm), folders, .gguf files, ollama:NAME, or ORG/NAME[:QUANT] on the hub.",
        autocompletion=complete_model,
    ),
]


Format = Annotated[
    str | None,
    typer.Option("--format", help="onnx, onnx-fp16, onnx-int4: as a graph for ONNX Runtime, from the hub or exported."),
]


@app.command()
def pull(models: Names, format_: Format = None, json: AsJson = False) -> None:
    """Download models, verify their digests, and make them ready to run offline.

    An interrupted download continues where it stopped. Folders, .gguf files and Ollama's models are used in place.
    """
    from rekindle.cli.console import progress
    from rekindle.engine.load import convert_gguf, export_graph, missing_packages
    from rekindle.models.pull import pull as get
    from rekindle.models.sources import with_graph

    form = None if format_ is None else _parse_format(format_)
    got = []
    for model in models:
        with progress(model) as report:
            entry = get(model, report, form=form or "any")
            if form is not None and entry.kind == "decoder":
                export_graph(with_graph(entry.files, form), form, report)
            elif entry.kind == "decoder" and not _is_taken_as_it_is(entry):
                if not missing_packages("hf"):
                    convert_gguf(entry.files, report)
                elif entry.files.gguf is None or missing_packages("llamacpp"):
                    names = "'rekindle-llm[hf]'" if entry.files.gguf is None else "'rekindle-llm[llamacpp,knowledge]'"
                    typer.echo(f"note: no engine for it is installed. Get one with: pip install {names}", err=True)
        got.append({"name": entry.name, "kind": entry.kind, "source": entry.source, "bytes": entry.size_bytes()})
        if not json:
            typer.echo(f"{entry.name}: ready ({human_bytes(entry.size_bytes())}, {entry.kind}, from {entry.source})")
    if json:
        print_json(got)


def _parse_format(text: str) -> OnnxForm:
    from rekindle.models.onnx_folder import PRECISIONS

    for form in PRECISIONS:
        if form == text:
            return form
    raise InvalidSetting(f"--format {text} is unknown. Use {', '.join(PRECISIONS)}.")


def _is_taken_as_it_is(entry: PulledModel) -> bool:
    """Whether ONNX Runtime or llama.cpp takes the user's own file."""
    return entry.files.onnx is not None or (entry.in_place and entry.files.gguf is not None)


@app.command("list")
def list_models(json: AsJson = False) -> None:
    """List pulled models, those of other tools that can be used in place, and the named ones."""
    from rekindle.models.other_tools import list_in_place
    from rekindle.models.registry import entries
    from rekindle.models.sources import NAMED

    pulled = entries()
    known = {e.name for e in pulled}
    found = list_in_place(lambda sentence: typer.echo(f"note: {sentence}", err=True))
    others = [other for other in found if other.name not in known]
    if json:
        names = ("name", "kind", "source", "bytes", "folder", "gguf", "graphs", "in_place", "added")
        listed: list[tuple[Any, ...]] = []
        for e in pulled:
            gguf = None if e.files.gguf is None else str(e.files.gguf)
            own = (str(e.files.folder), gguf, e.graph_bytes(), e.in_place, e.added)
            listed.append((e.name, e.kind, e.source, e.size_bytes(), *own))
        listed += [(o.name, o.kind, o.tool, o.size_bytes, None, str(o.gguf), {}, True, None) for o in others]
        print_json([dict(zip(names, one, strict=True)) for one in listed])
        return
    rows = []
    for e in pulled:
        rows.append([e.name, e.kind, human_bytes(e.size_bytes()), e.source, e.added[:10]])
        rows += [
            [f"{e.name}, {form}", "graph", human_bytes(size), "exported", "-"] for form, size in e.graph_bytes().items()
        ]
    rows += [[o.name, o.kind, human_bytes(o.size_bytes), f"in place: {o.tool}", "-"] for o in others]
    rows += [[m.name, m.kind, "-", f"not pulled: {m.about}", "-"] for m in NAMED.values() if m.name not in known]
    print_table(["model", "kind", "size", "source", "added"], rows, empty="There is no model here.")


@app.command()
def rm(models: Names) -> None:
    """Remove pulled models, and what was exported from them. Files used in place, and the hub's own cache, stay."""
    from rekindle.models.registry import remove

    for model in models:
        entry = remove(model)
        kept = f"; its files stay in {entry.files.gguf or entry.files.folder}" if entry.in_place else ""
        typer.echo(f"{model}: removed{kept}")


adapters = command_group("adapters", "Register LoRA adapters by name, for --adapter NAME.")


@adapters.command("ls")
def list_adapters(json: AsJson = False) -> None:
    """List the registered adapters."""
    from rekindle.models.adapter_registry import entries

    found = [{**_about(entry.name, entry.path, entry.scale), "packaged": entry.packaged} for entry in entries()]
    columns: dict[str, Callable[[dict[str, Any]], object]] = {
        "adapter": lambda one: one["name"],
        "scale": lambda one: f"{one['scale']:g}",
        "rank": lambda one: one["rank"] or "-",
        "size": lambda one: "-" if one["size_bytes"] is None else human_bytes(one["size_bytes"]),
        "made for": lambda one: one["base"] or "-",
        "folder": lambda one: one["problem"] or ("(with Rekindle)" if one["packaged"] else one["path"]),
    }
    print_listing(found, columns, json, dict, empty="No adapter is registered.")


@adapters.command("add")
def add_adapter(
    name: Annotated[str, typer.Argument(help="The name to register.")],
    path: Annotated[Path, typer.Argument(help="A folder saved by PEFT.")],
    scale: Annotated[float, typer.Option(help="Scaling factor of its effect.")] = 1.0,
    json: AsJson = False,
) -> None:
    """Register an adapter under a name. It is validated, and stays where it is."""
    from rekindle.engine.lora_files import read_adapter
    from rekindle.models.adapter_registry import add, check_name

    check_name(name)
    lora = read_adapter(path, scale)
    entry = add(name, path, scale)
    if json:
        print_json(_about(entry.name, entry.path, entry.scale))
    else:
        typer.echo(f"{name}: rank {lora.rank}, {human_bytes(lora.size_bytes)}, {count_of(len(lora.pairs), 'layer')}")


@adapters.command("rm")
def remove_adapter(name: Annotated[str, typer.Argument(help="Its name.")]) -> None:
    """Unregister an adapter. Its files and the KV computed with it stay."""
    from rekindle.models.adapter_registry import remove

    remove(name)
    typer.echo(f"{name}: removed from the list; its files stay")


def _about(name: str, path: str, scale: float) -> dict[str, Any]:
    from rekindle.engine.lora_files import read_adapter
    from rekindle.errors import ModelError

    about: dict[str, Any] = {"name": name, "path": path, "scale": scale, "problem": None}
    try:
        lora = read_adapter(path, scale)
    except ModelError as error:
        return {**about, "problem": str(error), "rank": None, "size_bytes": None, "base": "", "digest": None}
    return {**about, "rank": lora.rank, "size_bytes": lora.size_bytes, "base": lora.base, "digest": lora.digest}
