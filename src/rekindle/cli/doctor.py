"""`rekindle doctor`: what is installed and what Rekindle chooses."""

from __future__ import annotations

import platform
import shutil
import sys
from typing import Any

import typer

from rekindle import __version__
from rekindle.cli.options import AsJson, app, print_json, print_table
from rekindle.core.size import human_bytes
from rekindle.errors import EngineMissing, InvalidSetting
from rekindle.machine import cache_folder, describe_machine, home_folder, models_folder, usable_cores
from rekindle.settings import Settings

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "gguf",
    "safetensors",
    "xllamacpp",
    "llama-cpp-python",
    "onnxruntime",
    "onnxruntime-genai",
    "tokenizers",
    "numpy",
)


@app.command()
def doctor(json: AsJson = False) -> None:
    """Show versions, engines, cores, memory, the number type chosen and why, where things are kept, and what was
    calibrated."""

    facts = examine()
    if json:
        print_json(facts)
        return
    rows = [[_label(name), _say(value)] for name, value in facts.items() if not isinstance(value, dict)]
    rows += [[f"package: {name}", _say(value)] for name, value in facts["packages"].items()]
    rows += [[f"engine: {name}", _say(value)] for name, value in facts["engines"].items()]
    rows += [[name, _say(value)] for name, value in facts["choices"].items()]
    rows += [[f"tier: {name}", _say(value)] for name, value in facts["tiers"].items()]
    rows += [
        [f"calibrated: {name}", _say(parts) if parts else f"nothing: rekindle calibrate {name}"]
        for name, parts in facts["calibrated"].items()
    ]
    print_table(["what", "found"], rows)
    if not facts["engines_ready"]:
        typer.echo(
            "\nNo engine is installed. Get one with: pip install 'rekindle-llm[llamacpp,knowledge]', or with "
            "'rekindle-llm[onnx]' or 'rekindle-llm[hf]' (brings torch)",
            err=True,
        )
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Facts about this machine, as plain values."""
    import psutil

    from rekindle.models.registry import entries
    from rekindle.session.calibrate.calibration import calibrated_parts

    here, chosen = describe_machine(), Settings.load().cache
    home = home_folder()
    existing = next(path for path in (home, *home.parents) if path.exists())
    engines, choices = _engines()
    models = entries()
    return {
        "rekindle": __version__,
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "system": platform.platform(),
        "processor": here["processor"],
        "cores": here["cores"],
        "memory_bytes": here["memory_bytes"],
        "memory_free_bytes": psutil.virtual_memory().available,
        "models_folder": str(models_folder()),
        "cache_folder": str(cache_folder() if chosen is None else chosen),
        "disk_free_bytes": shutil.disk_usage(existing).free,
        "models": [entry.name for entry in models],
        "calibrated": {entry.name: calibrated_parts(entry.name) for entry in models if entry.kind == "decoder"},
        "packages": {name: _version(name) for name in _PACKAGES},
        "engines": engines,
        "choices": choices,
        "tiers": _tiers(),
        "engines_ready": any(state == "ready" for state in engines.values()),
    }


def _tiers() -> dict[str, str]:
    """The tiers of the cache with their limits, and whether the shared ones answer."""
    from rekindle.cache.open_store import shared_tiers
    from rekindle.codec.digest import PlainDigester
    from rekindle.errors import ExtraMissing
    from rekindle.store.shared_tier import SharedTier

    chosen = Settings.load()
    tiers = {"memory": f"limit {chosen.memory_limit}", "disk": f"limit {chosen.disk_limit}"}
    try:
        shared = [SharedTier(objects, PlainDigester()) for objects in shared_tiers(chosen)]
    except (InvalidSetting, ExtraMissing) as trouble:
        return {**tiers, "shared": str(trouble)}
    for tier in shared:
        limit = chosen.redis_limit if tier.name == "redis" else chosen.s3_limit
        try:
            tier.ping()
            tiers[tier.name] = f"answers; limit {limit}"
        except OSError as error:
            tiers[tier.name] = f"does not answer: {error}"
        tier.close()
    return tiers


def _engines() -> tuple[dict[str, str], dict[str, str]]:
    """Which engines work, and how they would run a model."""
    from rekindle.engine.load import ENGINES, packages_beside, require_packages

    have = packages_beside(Settings.load().llama_library)
    engines: dict[str, str] = {}
    choices: dict[str, str] = {}
    for name in ENGINES:
        try:
            require_packages(name, have)
            choices |= {"hf": _hf_choices, "llamacpp": _llamacpp_choices, "onnx": _onnx_choices}[name]()
            engines[name] = "ready"
        # RuntimeError: a shared library that does not load. InvalidSetting: llama_library names none.
        except (EngineMissing, InvalidSetting, OSError, RuntimeError) as trouble:
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
    from rekindle.engine.llamacpp.c_api import llama
    from rekindle.engine.llamacpp.loaded_model import build

    llama.load(Settings.load().llama_library)
    return {
        "llamacpp: library": f"{llama.name} ({llama.path})",
        "llamacpp: built with": build(),
        "llamacpp: threads": str(usable_cores()),
    }


def _onnx_choices() -> dict[str, str]:
    from rekindle.engine.onnx.export import missing_exporter
    from rekindle.engine.onnx.graph_runner import providers

    lacking = missing_exporter()
    return {
        "onnx: execution providers": ", ".join(f"{name} ({state})" for name, state in providers().items()),
        "onnx: exporting": f"needs {', '.join(lacking)}" if lacking else "ready",
        "onnx: threads": str(usable_cores()),
    }


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _say(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value > 10**6:
        return human_bytes(value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
