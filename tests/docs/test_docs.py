"""What can rot is checked: the reference, links, names, the built wheel. What can be run is run: `pages`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from importlib import import_module
from pathlib import Path

import pytest

import rekindle
from tests.docs.pages import ROOT, blocks, commands

ALL_PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_every_page_is_run_and_there_is_something_to_run() -> None:
    modules = [import_module(f"tests.docs.{path.stem}") for path in Path(__file__).parent.glob("test_*.py")]
    run = [page for module in modules for page in getattr(module, "PAGES", ())]
    guide = [str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "guide").glob("*.md")]
    assert sorted(run) == sorted(["README.md", *guide])
    assert len(commands(run)) >= 8 and len(blocks(run, "python")) >= 5
    readme = (ROOT / "README.md").read_text("utf-8")
    assert "make demo" in readme and "make test" in readme


def test_the_reference_is_what_the_code_says() -> None:
    spec = importlib.util.spec_from_file_location("write_reference", ROOT / "tools" / "write_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, content in module.pages().items():
        assert (ROOT / name).read_text("utf-8") == content, f"{name} is old: make reference"


def test_links_lead_somewhere() -> None:
    for page in ALL_PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_files_named_in_the_docs_exist() -> None:
    """Files by their path from here, tests also from their own folder, modules also from the package."""
    roots = (ROOT, ROOT / "tests", ROOT / "src" / "rekindle")
    for page in ALL_PAGES:
        text = page.read_text("utf-8")
        names = re.findall(r"`((?:tests|tools|docs)/[\w/.-]+|(?:[a-z_]+/)*test_\w+\.py)`", text)
        if page.parent.name == "concepts":
            names += re.findall(r"`([a-z_]+/(?:[a-z_]+/)*[a-z_]*)`", text)
        for name in (name for name in names if "NAME" not in name):
            found = any((root / name).exists() or (root / f"{name}.py").exists() for root in roots)
            assert found, f"{page.relative_to(ROOT)} names {name}"


def test_every_mechanism_of_the_sources_says_where_it_is_and_how_it_is_tested() -> None:
    rows = re.findall(r"^\| (.+) \| ([\w ]+) \| (.+) \|$", (ROOT / "docs/concepts/sources.md").read_text("utf-8"), re.M)
    rows = [row for row in rows if row[0] != "mechanism"]
    assert len(rows) > 60
    for mechanism, state, here in rows:
        assert state in ("built", "in part", "replaced", "not built", "added"), mechanism
        assert state == "not built" or re.search(r"`tests/[\w/.]+`", here), mechanism
        assert state == "not built" or re.search(r"`(?!tests/)[a-z_]+/[\w/]+`", here), mechanism


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
    from benchmarks.__main__ import BENCHES

    page = (ROOT / "docs" / "numbers.md").read_text("utf-8")
    for name in BENCHES:
        assert re.search(
            rf"^- .*: machine: .*; commit: .*; [^`]*`[^`]*python -m benchmarks {name}\b", page, re.MULTILINE
        ), name


@pytest.mark.docs
def test_the_built_wheel_has_everything_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("static/*")]
    assert {str(path.relative_to(ROOT / "src")) for path in files} <= names
    assert "rekindle/py.typed" in names and not any("benchmarks" in name for name in names)
    assert all(n.startswith(("rekindle/", "rekindle_llm-")) for n in names)
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra)", metadata, re.MULTILINE)
    assert "numpy" in required and "torch" not in required and "transformers" not in required


def test_every_metric_is_documented() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    from rekindle.engine.fake import FakeEngine
    from rekindle.server.auth import Caller
    from rekindle.server.serve import Server
    from rekindle.settings import ServerSettings

    page = (ROOT / "docs" / "guide" / "server.md").read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        session = rekindle.Session(FakeEngine(), cache=folder, parallel=2)
        server = Server(session, ServerSettings(port=0))
        with server.running():
            told = server.host.shared.metrics.text(Caller("local", operator=True)).decode()
    families = list(text_string_to_metric_families(told))
    assert len(families) > 15
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in page, f"{name} is not in the guide"
