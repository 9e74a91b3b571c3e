"""Commands and code of README and guide, run: a module for each page names it (`PAGES`), so they go in parallel.

What they print is checked, too: see `outputs`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_MARK = "--- block ---"
_RUN = f"""
import json, sys
for where, code in json.load(sys.stdin):
    print({_MARK!r}, flush=True)
    exec(compile(code, where, "exec"), {{"__name__": "__main__"}})
    sys.stdout.flush()
"""
CLIENTS = Path(sys.executable).parents[1] / "clients" / "bin" / "python"  # `make clients`


def blocks(pages: Sequence[str], language: str) -> list[tuple[str, str]]:
    """The blocks of a language, and where they stand."""
    return [
        (f"{page}#{number}", block)
        for page in pages
        for number, block in enumerate(
            re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
        )
    ]


def outputs(pages: Sequence[str], language: str) -> list[list[str]]:
    """For each block of a language, the patterns of what it prints: a comment behind it, a regular expression a line.

    <!-- prints
    tokens reused
    -->
    """
    pattern = rf"```{language}\n.*?```\n(?:\n?<!-- prints\n(.*?)-->)?"
    found = [re.findall(pattern, (ROOT / page).read_text("utf-8"), re.DOTALL) for page in pages]
    return [expected.splitlines() for page in found for expected in page]


def commands(pages: Sequence[str]) -> list[tuple[str, str, str]]:
    """The commands, where they stand, and what each prints: of a block's patterns, one is for each command."""
    found = []
    for (where, block), expected in zip(blocks(pages, "console"), outputs(pages, "console"), strict=True):
        lines = [line.removeprefix("$ ") for line in block.splitlines() if line]
        assert len(lines) == len(expected), f"{where}: {len(lines)} commands print {len(expected)} patterns"
        found += [(where, line, pattern) for line, pattern in zip(lines, expected, strict=True)]
    return found


@pytest.mark.docs
@pytest.mark.usefixtures("stays_loaded")
def test_a_command_of_the_docs_works(
    where: str, command: str, prints: str, checkout: Path, request: pytest.FixtureRequest
) -> None:
    _skip_without_llamacpp(where)
    command = _at_port(request, command)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=checkout,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stderr}"
    said = f"{done.stdout}\n{done.stderr}"
    assert done.stdout and re.search(prints, said), f"{where}: {command} does not print {prints!r}:\n{said}"


@pytest.mark.docs
def test_the_code_of_the_docs_works(page: str, checkout: Path, request: pytest.FixtureRequest) -> None:
    """Block after block, each with names of its own; in one process, because most of the time is for importing."""
    _skip_without_llamacpp(page)
    found = [(where, _at_port(request, code)) for where, code in blocks([page], "python")]
    said: dict[str, str] = {}
    for python, group in groupby(found, key=lambda block: _python_for(block[1])):
        todo = list(group)
        done = subprocess.run(
            [python, "-c", _RUN], input=json.dumps(todo), cwd=checkout, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"
        said.update(zip((where for where, _ in todo), done.stdout.split(_MARK)[1:], strict=True))
    for (where, _), expected in zip(found, outputs([page], "python"), strict=True):
        assert expected, f"{where} does not say what it prints"
        for pattern in expected:
            assert re.search(pattern, said[where]), f"{where} does not print {pattern!r}:\n{said[where]}"


def _skip_without_llamacpp(where: str) -> None:
    if "llamacpp" in where:
        pytest.importorskip("xllamacpp")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it is a part of
        return False


def _python_for(code: str) -> str:
    """What can run an example: this Python, or that of the clients whose versions do not go together with ours."""
    packages = re.findall(r"^(?:from|import) ([\w.]+)", code, re.MULTILINE)
    if all(_is_installed(package) for package in packages):
        return sys.executable
    if not (CLIENTS.parents[2] / ".clients").exists():  # written when all of them are installed
        pytest.skip(f"{', '.join(packages)}: not installed (make clients)")
    return str(CLIENTS)


def _at_port(request: pytest.FixtureRequest, text: str) -> str:
    """The text, with the port of a server that runs, if it is about one."""
    return text.replace("8377", request.getfixturevalue("port")) if "8377" in text else text
