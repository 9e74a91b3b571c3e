"""Exporting a model in Hugging Face form to an ONNX graph, with onnxruntime-genai's builder in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rekindle.errors import EngineMissing, UnsupportedModel
from rekindle.machine import narrow_tree
from rekindle.models.download import no_space, require_space
from rekindle.models.files import ModelFiles
from rekindle.models.hf_folder import check_folder
from rekindle.models.onnx_folder import GRAPH, PRECISIONS, OnnxForm
from rekindle.models.registry import exported_folder

_PACKAGES = ("onnxruntime_genai", "onnx", "onnx_ir", "onnxscript", "torch", "transformers")
# The builder writes GroupQueryAttention in half precision only for GPUs; CPUs compute that graph as well.
_PROVIDERS: dict[OnnxForm, str] = {"onnx": "cpu", "onnx-fp16": "cuda", "onnx-int4": "cpu"}
_SAID_CHARACTERS = 300


def missing_exporter() -> list[str]:
    """The packages that exporting needs and that are not installed."""
    return [package for package in _PACKAGES if importlib.util.find_spec(package) is None]


def require_exporter(name: str, form: OnnxForm) -> None:
    """Raise `EngineMissing` if the packages that exporting needs are not installed."""
    if lacking := missing_exporter():
        raise EngineMissing(
            f"{name} is not here as an ONNX graph ({form}), and exporting it needs {', '.join(lacking)}. Install them "
            f"with: pip install 'rekindle-llm[onnx-export]'; or export it on another machine (rekindle pull {name} "
            f"--format {form}), copy the folder, and name that."
        )


def export(files: ModelFiles, form: OnnxForm) -> Path:
    """Export a model; returns the graph. Its folder appears only when it is complete.

    Raises `UnsupportedModel` for a model that the builder does not take, and `NoSpace`.
    """
    target = exported_folder(files, form)
    require_space(target.parent, sum(path.stat().st_size for path in check_folder(files.folder)), f"{files.name}")
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _build(files, form, work / "out", work)
        if not target.exists():  # else another process was faster
            narrow_tree(work)
            (work / "out").replace(target)
    except OSError as error:
        raise no_space(error, target) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target / GRAPH


def _build(files: ModelFiles, form: OnnxForm, out: Path, work: Path) -> None:
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(files.folder), "-o", str(out)]
    command += ["-p", PRECISIONS[form], "-e", _PROVIDERS[form], "-c", str(work / "cache")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    # From an empty folder: `-m` looks for the package in the current folder first.
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (out / GRAPH).is_file():
        said = (done.stderr.strip().splitlines() or ["it does not say why"])[-1][:_SAID_CHARACTERS]
        raise UnsupportedModel(
            f"{files.name} cannot be exported to ONNX ({said}). Use engine='hf', or a folder that somebody exported."
        )
