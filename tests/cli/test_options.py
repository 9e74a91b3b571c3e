"""What commands share: tables that break no word, and sentences where there is nothing to list."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.cli import doctor
from rekindle.cli.main import app
from rekindle.cli.options import brief, print_table
from rekindle.settings import names_in

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


def test_on_a_terminal_a_row_takes_several_lines_where_its_columns_do_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "xterm")  # rich takes a dumb terminal for one of 80 columns
    columns = ["entry", "model", "adapter", "tokens", "size", "coding", "hits", "saved", "used", ""]
    row = ["9af3cb23", "qwen2.5-coder", "pirate", "64+179", "8.3 MB", "raw", "12", "3.4 s", "10 min ago", "pinned"]
    print_table(columns, [row, [*row[:2], "", *row[3:]]])
    shown = [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in lines(capsys)]
    assert max(map(len, shown)) <= 60 and len(shown) % 3 == 0
    cells = [[part.strip() for part in line.split("  ") if part.strip()] for line in shown]
    heights = len(shown) // 3
    assert [cell for line in cells[:heights] for cell in line] == columns[:-1]
    assert [cell for line in cells[heights : 2 * heights] for cell in line] == row
    assert shown[heights].startswith("9af3cb23") and all(
        line.startswith("  ") for line in shown[heights + 1 : -heights]
    )
    for line, header in zip(shown[heights : 2 * heights], shown, strict=False):  # cells stand below their names
        assert any(line[at] != " " for at, char in enumerate(header) if char != " " and at < len(line))


def test_help_shows_twenty_options_first_and_the_rest_under_headings() -> None:
    shown = CliRunner().invoke(app, ["run", "--help"]).stdout
    first, *rest = shown.partition("\nOptions:\n")[2].split("\n\n")
    names = [line.split()[0] for line in first.splitlines() if line.startswith("  -")]
    assert len(names) == 21 and names[-1] == "-h,"
    headings = [block.splitlines()[0] for block in rest if block.strip()]
    assert headings == ["Sampling:", "Model:", "Cache:", "Chunk reuse:", "Documents:", "Answers:", "Remote KV:"]
    assert all(f"--{name.replace('_', '-')}" in shown for name in names_in("model", "cache", "remote"))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("rekindle run smollm2 --reuse ", {"exact", "quantized", "approximate", "off"}),
        ("rekindle run smollm2 --reuse q", {"quantized"}),
        ("rekindle ask --adapter p", {"pirate"}),
        ("rekindle warm --codec q", {"q8", "q5", "q4", "q3"}),
    ],
)
def test_the_shell_completes_values(words: str, values: set[str]) -> None:
    asked = {"_REKINDLE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = CliRunner().invoke(app, env=asked, prog_name="rekindle")
    assert set(done.stdout.split()) == values


@pytest.mark.parametrize(("chosen", "shown"), [("off", "off"), ("elsewhere", "elsewhere")])
def test_doctor_shows_the_cache_folder_in_use(chosen: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE", chosen)
    monkeypatch.setattr(doctor, "_engines", lambda: ({"hf": "ready"}, {}))
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["cache_folder"] == shown


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
