"""What can rot is run: commands and code of README and guide, the reference, links, names, the built wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import rekindle

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
ALL_PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text("utf-8"), re.DOTALL)):
            found.append((f"{page.relative_to(ROOT)}#{number}", block))
    return found


COMMANDS = [
    (where, line.removeprefix("$ ")) for where, block in blocks("console") for line in block.splitlines() if line
]


CLIENTS = Path(sys.executable).parents[1] / "clients" / "bin" / "python"  # `make clients`


def _skip_without_llamacpp(where: str) -> None:
    if "llamacpp" in where:
        pytest.importorskip("llama_cpp")


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


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """Where the server of the guide listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = str(free.getsockname()[1])
    rekindle = Path(sys.executable).parent / "rekindle"
    server = subprocess.Popen([rekindle, "serve", "smollm2", "--port", number], cwd=ROOT, stderr=subprocess.PIPE)
    try:
        assert server.stderr is not None and b"/v1" in server.stderr.readline()
        yield number
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()


def _at_port(request: pytest.FixtureRequest, text: str) -> str:
    """The text, with the port of a server that runs, if it is about one."""
    return text.replace("8377", request.getfixturevalue("port")) if "8377" in text else text


@pytest.mark.docs
@pytest.mark.parametrize(("where", "command"), COMMANDS, ids=[f"{w}: {c[:40]}" for w, c in COMMANDS])
def test_a_command_of_the_docs_works(where: str, command: str, request: pytest.FixtureRequest) -> None:
    _skip_without_llamacpp(where)
    command = _at_port(request, command)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{where}: {command}\n{done.stderr}"
    assert done.stdout


@pytest.mark.docs
@pytest.mark.parametrize(("where", "code"), blocks("python"), ids=[w for w, _ in blocks("python")])
def test_the_code_of_the_docs_works(where: str, code: str, request: pytest.FixtureRequest) -> None:
    _skip_without_llamacpp(where)
    python, code = _python_for(code), _at_port(request, code)
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{where}\n{done.stderr}"
    assert done.stdout


def test_there_is_something_to_run() -> None:
    assert len(COMMANDS) >= 8 and len(blocks("python")) >= 5
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "make demo" in readme and "make test" in readme


def test_the_reference_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "tools" / "write_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, content in module.pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text("utf-8") == content, f"{name} is old: make reference"


def test_links_lead_somewhere() -> None:
    for page in ALL_PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_modules_and_tests_named_in_the_docs_exist() -> None:
    for page in ALL_PAGES:
        for name in re.findall(r"`((?:tests|tools|docs)/[\w/.-]+)`", page.read_text("utf-8")):
            if "NAME" not in name:
                assert (ROOT / name).exists(), f"{page.relative_to(ROOT)} names {name}"


def test_every_public_name_exists_and_is_documented() -> None:
    assert sorted(rekindle.__all__) == dir(rekindle)
    for name in rekindle.__all__:
        value = getattr(rekindle, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError):
        _ = rekindle.nothing_of_the_kind


def test_every_error_is_in_the_tree() -> None:
    from rekindle import errors

    tree = errors.__doc__ or ""
    names = [n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)]
    assert names and all(re.search(rf"\b{name}\b", tree) for name in names)


def test_the_numbers_page_names_its_commands() -> None:
    from rekindle.cli.bench import BENCHES

    page = (ROOT / "docs" / "numbers.md").read_text("utf-8")
    for name in BENCHES:
        assert f"rekindle bench {name}" in page and "- machine: " in page and "- commit: " in page


@pytest.mark.docs
def test_the_built_wheel_has_everything_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")} <= names
    assert {"rekindle/py.typed", "rekindle/bench/sample.txt"} <= names
    assert all(n.startswith(("rekindle/", "rekindle-")) for n in names)
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)", metadata, re.MULTILINE)
    assert "numpy" in required and "torch" not in required and "transformers" not in required


def test_every_metric_is_documented() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from rekindle.engine.fake import FakeEngine
    from rekindle.server.keys import Caller
    from rekindle.server.serve import Server
    from rekindle.server.settings import ServerSettings

    page = (ROOT / "docs" / "guide" / "server.md").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        session = rekindle.Session(FakeEngine(), cache=folder, parallel=2)
        server = Server(session, ServerSettings(port=0))
        with server.running():
            told = server.app.state.service.metrics.text(Caller("local", operator=True)).decode()
    families = list(text_string_to_metric_families(told))
    assert len(families) > 15
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in page, f"{name} is not in the guide"
