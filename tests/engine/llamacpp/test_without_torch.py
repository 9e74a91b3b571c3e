"""The command in a virtual environment with `[llamacpp,knowledge]`: no torch, and all that needs none works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest.importorskip("xllamacpp")
tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

pytestmark = [pytest.mark.llamacpp, pytest.mark.real, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
PROMPT = "Name three colours, and say where they are seen in a garden in spring."


def said(*command: str | Path, **environment: str) -> str:
    """What a command prints; fails with all of it if the command does."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **environment},
        cwd=Path(sys.prefix),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (
        f"{command} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout


def distributions(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """What is installed here of some requirements, and of theirs."""
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = [(Requirement(text), "") for text in requirements], set[tuple[str, str]]()
    while waiting:
        wanted, within = waiting.pop()
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": within}):
            continue
        name = canonicalize_name(wanted.name)
        for extra in {"", *wanted.extras} - {extra for other, extra in seen if other == name}:
            seen.add((name, extra))
            found[name] = metadata.distribution(wanted.name)
            waiting += [(Requirement(other), extra) for other in found[name].requires or ()]
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its programs: ours, and of all packages that are installed here those of `[llamacpp,knowledge]`."""
    folder = tmp_path_factory.mktemp("without") / "venv"
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    packages = Path(said(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["llamacpp"], *extras["knowledge"]]
    for distribution in distributions(wanted).values():
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(Path(str(distribution.locate_file(part))).resolve())
    (packages / "rekindle").symlink_to(ROOT / "src" / "rekindle")
    module, _, function = project["scripts"]["rekindle"].partition(":")
    script = programs / "rekindle"
    script.write_text(f"#!{programs / 'python'}\nfrom {module} import {function}\n{function}()\n")
    script.chmod(0o755)
    return programs


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("without") / "cache"


def rekindle(programs: Path, cache: Path, *arguments: str) -> str:
    return said(programs / "rekindle", *arguments, REKINDLE_CACHE=str(cache), COLUMNS="200")


def test_it_really_is_without(environment: Path) -> None:
    code = (
        "import importlib.util as u, rekindle; print(rekindle.__file__)\n"
        "print(*(n for n in ('torch', 'transformers', 'accelerate', 'safetensors', 'gguf') if u.find_spec(n)))"
    )
    where, present = said(environment / "python", "-c", code).split("\n", 1)
    assert not present.strip()
    assert Path(where).is_relative_to(environment.parent), "it is the installed one"


def test_a_prompt_is_answered_and_the_second_time_it_is_reused_from_disk(environment: Path, cache: Path) -> None:
    first, second = (
        json.loads(rekindle(environment, cache, "run", "smollm2", *engine, PROMPT, "-n", "16", "--json"))
        for engine in (("--engine", "llamacpp"), ())
    )
    assert first["reuse"]["disk"] == 0 and first["text"]
    assert second["text"] == first["text"]
    assert second["reuse"]["disk"] == first["usage"]["prompt_tokens"] - 1
    assert rekindle(environment, cache, "run", "smollm2", PROMPT, "-n", "16").strip() == first["text"].strip()
    told = rekindle(environment, cache, "explain", "--last")
    found = re.search(r"smollm2: (\d+) of (\d+) tokens reused", told)
    assert found is not None and int(found[1]) == int(found[2]) - 1
    assert "from disk" in told and "why:" in told


def test_documents_are_read_and_asked(environment: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "ferry.html").write_text("<title>Boats</title><p>The ferry to Ormund costs eleven crowns.</p>")
    rekindle(environment, cache, "ingest", str(tmp_path / "ferry.html"))
    command = ("ask", "What does the ferry to Ormund cost?", "-n", "8", "--json")
    answer = json.loads(rekindle(environment, cache, *command))
    assert "eleven crowns" in json.dumps(answer["sources"])


def test_the_cache_is_looked_at(environment: Path, cache: Path) -> None:
    told = rekindle(environment, cache, "cache", "stats")
    assert str(cache) in told and "smollm2" in told
    assert rekindle(environment, cache, "cache", "check")
    assert "smollm2" in rekindle(environment, cache, "cache", "ls")


def test_models_are_listed(environment: Path, cache: Path) -> None:
    assert re.search(r"^smollm2\s+decoder", rekindle(environment, cache, "list"), re.MULTILINE)


def test_doctor_says_what_is_ready_and_how_to_get_the_rest(environment: Path, cache: Path) -> None:
    report = json.loads(rekindle(environment, cache, "doctor", "--json"))
    assert report["engines"]["llamacpp"] == "ready" and report["engines_ready"]
    assert report["packages"]["torch"] == "not installed"
    told = " ".join(rekindle(environment, cache, "doctor").split())
    assert re.search(r"engine: llamacpp ready", told)
    assert "needs torch, transformers, accelerate, gguf, safetensors" in told
    assert "pip install 'rekindle-llm[hf]'" in told


def test_what_needs_torch_is_refused_with_what_to_install(environment: Path, cache: Path) -> None:
    command = [str(environment / "rekindle"), "run", "smollm2", "--engine", "hf", "Hi", "-n", "2"]
    done = subprocess.run(
        command, env={**os.environ, "REKINDLE_CACHE": str(cache)}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "pip install 'rekindle-llm[hf]'" in " ".join(done.stderr.split())
