"""`rekindle doctor`: what is installed, what this machine has, and what Rekindle chooses."""

from __future__ import annotations

import platform
import shutil
import sys
from typing import Any

import typer

from rekindle import __version__
from rekindle.cli.app import app
from rekindle.cli.options import AsJson
from rekindle.errors import EngineMissing
from rekindle.settings.folders import cache_folder, home_folder, models_folder

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "gguf",
    "safetensors",
    "llama-cpp-python",
    "tokenizers",
    "numpy",
)


@app.command()
def doctor(json: AsJson = False) -> None:
    """Show versions, engines, cores, memory, the number type chosen and why, and where things are kept."""
    from rekindle.cli.console import print_json, print_table

    facts = examine()
    if json:
        print_json(facts)
        return
    rows = [[_label(name), _say(value)] for name, value in facts.items() if not isinstance(value, dict)]
    for group in ("packages", "engines", "choices"):
        rows += [[f"{group.rstrip('s')}: {name}", _say(value)] for name, value in facts[group].items()]
    print_table(["what", "found"], rows)
    if not facts["engines_ready"]:
        typer.echo(
            "\nNo engine is installed. Get one with: pip install 'rekindle[hf]' or 'rekindle[llamacpp]'", err=True
        )
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Facts about this machine, as plain values."""
    import psutil

    from rekindle.machine import describe_machine
    from rekindle.models.registry import entries

    here = describe_machine()
    home = home_folder()
    existing = next(path for path in (home, *home.parents) if path.exists())
    engines, choices = _engines()
    return {
        "rekindle": __version__,
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "system": platform.platform(),
        "processor": here["processor"],
        "cores": here["cores"],
        "memory_bytes": here["memory_bytes"],
        "memory_free_bytes": psutil.virtual_memory().available,
        "models_folder": str(models_folder()),
        "cache_folder": str(cache_folder()),
        "disk_free_bytes": shutil.disk_usage(existing).free,
        "models": [entry.name for entry in entries()],
        "packages": {name: _version(name) for name in _PACKAGES},
        "engines": engines,
        "choices": choices,
        "engines_ready": any(state == "ready" for state in engines.values()),
    }


def _engines() -> tuple[dict[str, str], dict[str, str]]:
    """Which engines work, and how they would run a model."""
    from rekindle.engine.load import ENGINES, require_packages

    engines: dict[str, str] = {}
    choices: dict[str, str] = {}
    for name in ENGINES:
        try:
            require_packages(name)
            choices |= _hf_choices() if name == "hf" else _llamacpp_choices()
            engines[name] = "ready"
        except (EngineMissing, OSError, RuntimeError) as trouble:  # RuntimeError: a shared library that does not load
            engines[name] = str(trouble)
    return engines, choices


def _hf_choices() -> dict[str, str]:
    from rekindle.engine.hf.device import DTYPES, choose_placement, cpu_computes_bfloat16

    choices = {}
    for name, stored in DTYPES.items():
        placement = choose_placement(stored=stored)
        choices[f"hf: {name} weights"] = f"{placement.dtype_name} on {placement.device} ({placement.reason})"
    choices["hf: bfloat16 arithmetic on this CPU"] = "yes" if cpu_computes_bfloat16() else "no"
    return choices


def _llamacpp_choices() -> dict[str, str]:
    from rekindle.engine.llamacpp.library import build, cores

    return {"llamacpp: built with": build(), "llamacpp: threads": str(cores())}


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _say(value: Any) -> str:
    from rekindle.core.size import human_bytes

    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value > 10**6:
        return human_bytes(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
