"""The distribution is called rekindle-llm: `rekindle` on PyPI is somebody else's. Import and command are `rekindle`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

REQUIREMENT = re.compile(
    r"""(?<![\w./-])rekindle\\*\[[\w{][^"'\]]*\]"""  # with extras
    r"""|["']rekindle\s*(?:[<>=!~]=|[<>;@])"""  # with a version or a place
    r"""|\b(?:pip[3x]?\s+(?:install|run)|uv\ add|uvx)(?:\s+-?[\w.\[\],<>=:/"'-]+)*?\s+["'`]?rekindle(?![\w./=-])"""
    r"""|\b(?:distribution|version|metadata)\(\s*["']rekindle["']"""
    r"""|\bdependencies\b[^\]]*["']rekindle["']"""
    r"""|^name\s*=\s*["']rekindle["']"""
    r"""|^[\ \t]*rekindle\s*(?:[<>=!~]=|@\ )""",
    re.MULTILINE,
)
EXAMPLES = (
    'pip install "rekindle[hf]"', "rekindle\\[onnx\\]", "rekindle-llm[a] or rekindle[b]", "'rekindle[{name}]'",
    "pip install rekindle", "pip install -q --upgrade rekindle", "python -m pip install x rekindle",
    'pip install "rekindle"', "uvx rekindle run", "pipx install rekindle", "uv add rekindle", "'rekindle>=0.1'",
    '"rekindle @ file:///x"',
    'dependencies = ["rekindle", "numpy"]', 'dependencies = [\n  "numpy",\n  "rekindle",\n]', 'name = "rekindle"',
    'metadata.version("rekindle")', "rekindle==0.1.0", "`pip install rekindle`",
)  # fmt: skip
OTHERS = (
    'pip install "rekindle-llm[hf]"', "pip install rekindle-llm", "pip uninstall rekindle",
    'reply.rekindle["documents"]',
    "pip install . contrib/langchain-rekindle", "import rekindle", '"rekindle": {"reuse": 1}', "rekindle run smollm2",
    "install -d -o rekindle /data", "/opt/rekindle/bin/pip install .", 'dependencies = ["rekindle-llm"]',
)  # fmt: skip


def texts() -> Iterator[tuple[Path, str]]:
    """The files of the repository, but for what is not text and this one."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name == ".ci" or not name.startswith((".", "__pycache__"))]
        for path in (Path(folder, name) for name in names):
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            if path != Path(__file__):
                yield path.relative_to(ROOT), text


def test_nothing_requires_the_distribution_rekindle() -> None:
    assert [text for text in EXAMPLES if not REQUIREMENT.search(text)] == []
    assert [text for text in OTHERS if REQUIREMENT.search(text)] == []
    read = dict(texts())
    assert {"pyproject.toml", "README.md", "deploy/Dockerfile", ".ci/run"} <= {path.as_posix() for path in read}
    found = {str(path): [match[0] for match in REQUIREMENT.finditer(text)] for path, text in read.items()}
    assert {path: matches for path, matches in found.items() if matches} == {}, "the distribution is rekindle-llm"


WITH_TORCH = re.compile(r"""["'`](?:rekindle-llm|\.)\[[\w,-]*\b(?:hf|onnx-export)\b""")
TORCH_FOR_CPUS = "pip install torch --index-url https://download.pytorch.org/whl/cpu"


def test_a_page_whose_install_line_brings_torch_gives_its_size_and_the_line_for_cpus() -> None:
    pages = {path: text for path, text in texts() if path.suffix == ".md" and path.name != "CHANGELOG.md"}
    found = {path.as_posix() for path, text in pages.items() if WITH_TORCH.search(text)}
    assert "docs/guide/start.md" in found
    lacking = {path for path in found if not ("5.7 GB" in pages[Path(path)] and TORCH_FOR_CPUS in pages[Path(path)])}
    assert lacking == set()


def test_documents_come_with_llamacpp() -> None:
    lines = re.compile(r"""pip install [^\n]*\[(?:llamacpp|hf,knowledge)\\*\]""")
    found = {path.as_posix() for path, text in texts() if path.name != "CHANGELOG.md" and lines.search(text)}
    assert found == set(), "documents need no torch: [llamacpp,knowledge] is the line"


@pytest.mark.parametrize(
    ("installed", "warned"),
    [
        (("rekindle_llm-0.1.0.dist-info", "rekindle-1.2.0.dist-info"), True),
        (("rekindle_llm-0.1.0.dist-info", "rekindle-1.2-py3.12.egg-info"), True),
        (("rekindle_llm-0.1.0.dist-info", "langchain_rekindle-0.1.0.dist-info"), False),
    ],
)
def test_a_distribution_in_the_same_folder_is_named_with_what_to_do(
    tmp_path: Path, installed: tuple[str, ...], warned: bool
) -> None:
    for name in installed:
        (tmp_path / name).mkdir()
    isolated = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p] + sys.argv[1:2]"
    code = f"import rekindle.cli.main\n{isolated}\nsys.argv[1:] = ['--version']\n" \
        "from rekindle.cli.entry import main\nmain()"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout.startswith("rekindle 0.")
    assert bool(lines) == warned
    if warned:
        assert lines[0].startswith("note: ")
        assert [line.split() for line in lines[-2:]] == [
            ["pip", "uninstall", "rekindle"],
            ["pip", "install", "--force-reinstall", "--no-deps", "rekindle-llm"],
        ]
