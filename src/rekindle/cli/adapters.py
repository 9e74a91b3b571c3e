"""`rekindle adapters`: register LoRA adapters by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rekindle.cli.app import app
from rekindle.cli.options import AsJson

adapters = typer.Typer(help="Register LoRA adapters by name, for --adapter NAME.", no_args_is_help=True)
app.add_typer(adapters, name="adapters")


@adapters.command("ls")
def list_adapters(json: AsJson = False) -> None:
    """List the registered adapters."""
    from rekindle.cli.console import print_json, print_table
    from rekindle.core.size import human_bytes
    from rekindle.models.adapter_registry import entries

    found = [{**_about(entry.name, entry.path, entry.scale), "packaged": entry.packaged} for entry in entries()]
    if json:
        print_json(found)
        return
    lines = [
        [
            one["name"],
            f"{one['scale']:g}",
            "-" if one["rank"] is None else str(one["rank"]),
            "-" if one["size_bytes"] is None else human_bytes(one["size_bytes"]),
            one["base"] or "-",
            one["problem"] or ("(with Rekindle)" if one["packaged"] else one["path"]),
        ]
        for one in found
    ]
    print_table(["adapter", "scale", "rank", "size", "made for", "folder"], lines)


@adapters.command("add")
def add_adapter(
    name: Annotated[str, typer.Argument(help="The name to register.")],
    path: Annotated[Path, typer.Argument(help="A folder saved by PEFT.")],
    scale: Annotated[float, typer.Option(help="Scaling factor of its effect.")] = 1.0,
    json: AsJson = False,
) -> None:
    """Register an adapter under a name. It is validated, and stays where it is."""
    from rekindle.cli.console import print_json
    from rekindle.core.size import human_bytes
    from rekindle.engine.lora_files import read_adapter
    from rekindle.models.adapter_registry import add, check_name

    check_name(name)
    lora = read_adapter(path, scale)
    entry = add(name, path, scale)
    if json:
        print_json(_about(entry.name, entry.path, entry.scale))
    else:
        typer.echo(f"{name}: rank {lora.rank}, {human_bytes(lora.size_bytes)}, {len(lora.pairs)} layers")


@adapters.command("rm")
def remove_adapter(name: Annotated[str, typer.Argument(help="Its name.")]) -> None:
    """Unregister an adapter. Its files and the KV computed with it stay."""
    from rekindle.models.adapter_registry import remove

    remove(name)
    typer.echo(f"{name}: forgotten")


def _about(name: str, path: str, scale: float) -> dict[str, Any]:
    from rekindle.engine.lora_files import read_adapter
    from rekindle.errors import ModelError

    about: dict[str, Any] = {"name": name, "path": path, "scale": scale, "problem": None}
    try:
        lora = read_adapter(path, scale)
    except ModelError as error:
        return {**about, "problem": str(error), "rank": None, "size_bytes": None, "base": "", "digest": None}
    return {**about, "rank": lora.rank, "size_bytes": lora.size_bytes, "base": lora.base, "digest": lora.digest}
