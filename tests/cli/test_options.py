"""What commands share: tables that break no word, and sentences where there is nothing to list."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.cli.main import app
from rekindle.cli.options import brief, print_table

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_table_wraps_between_words_only(capsys: pytest.CaptureFixture[str]) -> None:
    about = "An adapter that was trained to answer as a pirate would, with all that belongs to it"
    rows = [["pirate", "6", "1.8 MB", MODEL, about], ["lost", "-", "-", "-", "-"]]
    print_table(["adapter", "rank", "size", "made for", "about"], rows)
    shown = lines(capsys)
    assert all(len(line) <= 80 for line in shown) and "1.8 MB" in shown[1] and MODEL in shown[1]
    assert set(about.split()) <= set(" ".join(shown).split())


def test_a_table_whose_words_do_not_fit_is_wider_than_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/" + "a-long-folder/" * 6 + "file.txt"
    print_table(["document", "source"], [["aa2159afb84b", path]])
    assert lines(capsys)[1] == f"aa2159afb84b  {path}"


def test_on_a_terminal_paths_lose_their_first_folders_instead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    path = "/" + "a-long-folder/" * 6 + "file.txt"
    print_table(["document", "app", "source"], [["aa2159afb84b", "", path], ["bb", "", "/short"]])
    shown = lines(capsys)
    assert shown[0].split() == ["document", "source"]  # no document has an app
    assert shown[1] == f"aa2159afb84b  …/{'a-long-folder/' * 4}file.txt" and shown[2].split() == ["bb", "/short"]


def test_a_title_is_not_broken_by_a_narrow_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["n"], [["1"]], title="Entries that saved most")
    assert lines(capsys) == ["Entries that saved most", "n", "1"]


def test_a_table_shows_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name"], [["[bold]x[/bold]"]], title="[red]t")
    assert lines(capsys) == ["[red]t", "name", "[bold]x[/bold]"]


def test_a_long_text_is_cut_at_a_word() -> None:
    assert brief("When does the depot open?", 60) == "When does the depot open?"
    assert brief("When does the\ndepot open on Sundays?", 20) == "When does the depot…"
    assert brief("x" * 100, 10) == "x" * 9 + "…"
    assert all(len(brief("ab cde fgh " * 9, size)) <= size for size in range(2, 60))


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("ps", "No server is running, and no model is loaded in the background."),
        ("cache ls", "is empty."),
        ("apps ls", "No app has sent a request yet."),
        ("knowledge ls", "Nothing was ingested yet."),
        ("answers ls", "No question is stored yet."),
        ("idle --log", "No idle work was done yet."),
    ],
)
def test_an_empty_list_says_what_is_empty(command: str, sentence: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0 and result.stdout.strip().endswith(sentence) and len(result.stdout.splitlines()) == 1


def test_a_list_of_adapters_says_that_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.models.adapter_registry.entries", list)
    assert CliRunner().invoke(app, ["adapters", "ls"]).stdout == "No adapter is registered.\n"


def test_an_empty_list_is_an_empty_list_for_programs() -> None:
    for command in ("ps", "cache ls", "apps ls", "knowledge ls", "answers ls"):
        result = CliRunner().invoke(app, [*command.split(), "--json"])
        assert result.exit_code == 0 and result.stdout == "[]\n", command


@pytest.mark.parametrize("command", ["run smollm2 -f", "warm", "explain", "origin publish smollm2 --to o --key k -f"])
def test_an_empty_file_is_called_empty(command: str, tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.touch()
    result = CliRunner().invoke(app, [*command.split(), str(file)])
    assert result.exit_code == 1 and str(result.exception).startswith(f"{file} is empty")


@pytest.mark.parametrize("command", ["run smollm2 -f", "warm", "explain", "knowledge import", "cache ls --key-file"])
def test_a_file_that_is_not_there_is_named_in_the_same_words(command: str, tmp_path: Path) -> None:
    file = tmp_path / "gone.txt"
    if command.startswith("cache ls"):
        command = f"cache ls --folder {tmp_path} --key-file"
        (tmp_path / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n# rekindle cache 2\n")
    result = CliRunner().invoke(app, [*command.split(), str(file)])
    assert result.exit_code == 1 and str(result.exception).startswith(f"There is no file {file}."), result.output
