"""A command gives a stored answer before a model is loaded, and only where the session of the model would give it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rekindle.cli.main import app
from rekindle.engine.embedding.embedder import Embedder
from rekindle.session.session import Session
from tests.server.soak import tiny_embedder

BOATS = "Boats leave Vesk on Tuesdays. The ferry to Ormund costs eleven crowns."
FERRY = "What does the ferry to Ormund cost?"
SAME = "What is the cost of the ferry to Ormund?"
Ask = Callable[..., Result]
Arguments = Callable[..., list[str]]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def boats(tmp_path: Path) -> Path:
    file = tmp_path / "boats.txt"
    file.write_text(BOATS)
    return file


@pytest.fixture
def model(tmp_path: Path, tiny_folder: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.fixture
def arguments(tmp_path: Path, model: Path, embedder: str, boats: Path) -> Arguments:
    """The command that asks a question, after the model answered one to its end."""
    where = ["--cache", str(tmp_path / "cache"), "--embedder", embedder]
    how = ["--model", str(model), "--retrieval", "bm25", "--no-daemon", "--json", "--answers", "direct", "-n", "24"]
    how += ["--similarity-threshold", "0", *where]
    assert CliRunner().invoke(app, ["ingest", str(boats), *where]).exit_code == 0
    first = CliRunner().invoke(app, ["ask", FERRY, *how])
    ends = ["--stop", json.loads(first.stdout)["text"][-1]]
    second = json.loads(CliRunner().invoke(app, ["ask", FERRY, *how, *ends]).stdout)
    assert second["finish_reason"] == "stop" and second["reuse"]["computed"] > 0
    return lambda question, *more: ["ask", question, *how, *ends, *more]


@pytest.fixture
def ask(arguments: Arguments) -> Ask:
    return lambda question=FERRY, *more: CliRunner().invoke(app, arguments(question, *more))


def refusing(monkeypatch: pytest.MonkeyPatch, *parts: tuple[type, str]) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("it was loaded")

    for owner, name in parts:
        monkeypatch.setattr(owner, name, refuse)


def test_the_same_words_need_neither_model_nor_embedder(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, (Session, "__init__"), (Embedder, "load"))
    given = json.loads(ask().stdout)
    assert given["stored"]["way"] == "direct" and given["stored"]["question"] == FERRY
    assert [source["text"] for source in given["sources"]] == [BOATS] and given["model"]
    assert given["usage"]["completion_tokens"] == 0 and given["reuse"]["computed"] == 0


def test_other_words_need_no_model(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, (Session, "__init__"))
    given = json.loads(ask(SAME).stdout)
    assert given["stored"]["way"] == "direct" and given["stored"]["question"] == FERRY


def test_another_question_loads_the_model_and_not_the_embedder_twice(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, (Session, "__init__"), (Embedder, "load"))
    assert isinstance(ask("What does the ferry to Vesk cost?").exception, AssertionError)


def test_uses_are_counted_as_in_a_session(ask: Ask, tmp_path: Path, embedder: str) -> None:
    where = ["--cache", str(tmp_path / "cache"), "--embedder", embedder]

    def uses() -> int:
        return int(json.loads(CliRunner().invoke(app, ["answers", "stats", "--json", *where]).stdout)["uses"])

    before = uses()
    ask()
    ask(SAME)
    assert uses() == before + 2


@pytest.mark.parametrize("changed", ["document", "model", "terms", "level"])
def test_whatever_changed_is_for_the_model(
    ask: Ask, changed: str, boats: Path, tmp_path: Path, embedder: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more: tuple[str, ...] = ()
    if changed == "document":
        boats.write_text(f"{BOATS} In winter it costs twelve.")
        where = ["--cache", str(tmp_path / "cache"), "--embedder", embedder]
        assert CliRunner().invoke(app, ["ingest", str(boats), *where]).exit_code == 0
    elif changed == "model":
        os.utime(model / "config.json")
    elif changed == "terms":
        more = ("--min-tokens", "2")
    else:
        more = ("--reuse", "off")
    refusing(monkeypatch, (Session, "__init__"))
    assert isinstance(ask(FERRY, *more).exception, AssertionError)


def test_no_library_of_models_is_imported_for_it(arguments: Arguments) -> None:
    code = (
        "import sys; from rekindle.cli.main import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'httpx'} & {*sys.modules}), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments(FERRY)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(result.stdout)["stored"]["way"] == "direct" and result.stderr.strip().endswith("[]")
