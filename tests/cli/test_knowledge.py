"""`rekindle ingest`, `rekindle knowledge` and `rekindle forget`, end to end, without a model that writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rekindle.cli.main import app
from rekindle.errors import DocumentNotFound, InvalidSetting, LibraryFull, NothingKnown, RekindleError
from rekindle.knowledge import paths as watch
from rekindle.knowledge.ingest import Ingester
from tests.knowledge.conftest import embedder_folder

__all__ = ["embedder_folder"]  # a fixture

Run = Callable[..., Result]
HOSTILE = "red \x1b[31m bell \x07 back \x08 c1 \x9b5m turned \u202e end"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "walrus.md").write_text("# Tusks\n\nThe walrus has tusks.")
    (folder / "penguin.txt").write_text("The penguin has none.")
    return folder


@pytest.fixture
def run(tmp_path: Path, embedder_folder: Path) -> Run:
    where = ["--library", str(tmp_path / "knowledge"), "--embedder", str(embedder_folder)]

    def invoked(*command: str | Path, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [*map(str, command), *where], input=stdin)

    return invoked


def parsed(result: Result) -> Any:
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def listed(run: Run) -> dict[str, dict[str, Any]]:
    return {Path(entry["source"]).name: entry for entry in parsed(run("knowledge", "ls", "--json"))}


def assert_tame(output: str) -> None:
    steering = [
        char for char in output if (ord(char) < 32 and char != "\n") or 127 <= ord(char) < 160 or char == "\u202e"
    ]
    assert steering == []


def test_ingest_counts_and_tells_again_that_nothing_changed(run: Run, files: Path) -> None:
    first = run("ingest", files)
    assert first.exit_code == 0 and "2 documents added, 0 changed, 0 removed, 0 unchanged" in first.stdout
    assert "2 unchanged" in run("ingest", files).stdout
    (files / "walrus.md").unlink()
    done = parsed(run("ingest", files, "--json"))
    assert (done["added"], done["removed"], done["unchanged"], done["problems"]) == (0, 1, 1, [])


def test_problems_are_a_table_and_a_status_and_the_rest_is_read(run: Run, files: Path) -> None:
    (files / "broken.json").write_text("{")
    result = run("ingest", files)
    assert result.exit_code == 1 and "2 documents added" in result.stdout
    assert "broken.json" in result.stdout.replace("\n", "") and "1 problem" in result.stdout


def test_ingest_fails_where_nothing_could_be_read(run: Run, files: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    for nothing in (tmp_path / "broken.json", tmp_path / "none*.txt"):
        assert run("ingest", nothing).exit_code == 1
        result = run("ingest", nothing, "--json")
        assert result.exit_code == 1 and len(json.loads(result.stdout)["problems"]) == 1
    result = run("ingest", files, tmp_path / "missing.txt")
    assert result.exit_code == 1 and str(result.exception) == f"There is no file or folder {tmp_path / 'missing.txt'}."


def test_ingest_says_what_it_skipped_and_that_it_found_nothing(run: Run, files: Path, tmp_path: Path) -> None:
    for name in ("pic.png", "b.zip", "c.bin", "d.exe", ".hidden"):
        (files / name).write_bytes(b"x")
    result = run("ingest", files)
    line = "note: skipped, because their kind is not read: b.zip, c.bin, d.exe, 1 more. Name a file itself to read it "
    assert result.exit_code == 0 and result.stderr.startswith(line) and "2 documents added" in result.stdout
    assert len(parsed(run("ingest", files, "--json"))["skipped"]) == 4
    (tmp_path / "empty").mkdir()
    result = run("ingest", tmp_path / "empty")
    assert result.exit_code == 0 and result.stderr.startswith("note: no documents were found there")


@pytest.mark.parametrize("wrong", [["--size", "100000"], ["--by", "letters"], ["--overlap", "99"]])
def test_a_wrong_splitting_is_refused(run: Run, files: Path, wrong: list[str]) -> None:
    assert isinstance(run("ingest", files, *wrong).exception, InvalidSetting)


def test_passages_are_as_long_as_asked_for(run: Run, files: Path) -> None:
    (files / "long.txt").write_text(" ".join(f"This is sentence number {number}." for number in range(50)))
    run("ingest", files, "--size", "20")
    assert listed(run)["long.txt"]["chunks"] >= 10


def test_ls_and_show_tell_what_there_is(run: Run, files: Path) -> None:
    run("ingest", files, "--app", "mail")
    entry = listed(run)["walrus.md"]
    assert entry["title"] == "Tusks" and entry["chunks"] == 1 and entry["app"] == "mail"
    table = run("knowledge", "ls").stdout
    assert entry["name"] in table and "Tusks" in table and "mail" in table
    for name in (entry["name"], files / "walrus.md"):
        shown = run("knowledge", "show", name)
        assert "walrus has tusks" in shown.stdout and "1 of 1" in shown.stdout
    (found,) = parsed(run("knowledge", "show", entry["name"], "--json"))
    assert [passage["text"] for passage in found["passages"]] == ["The walrus has tusks."]
    with pytest.raises(DocumentNotFound, match="rekindle knowledge ls"):
        raise run("knowledge", "show", "nothing").exception or AssertionError


@pytest.mark.parametrize("retrieval", ["fused", "weighted", "bm25", "embedding"])
def test_search_finds_passages_with_their_ranks(run: Run, files: Path, retrieval: str) -> None:
    run("ingest", files)
    hits = parsed(run("knowledge", "search", "walrus", "--retrieval", retrieval, "--top-k", "1", "--json"))
    assert len(hits) == 1 and set(hits[0]) == {"chunk", "score", "bm25_rank", "embedding_rank", "relevance"}
    if retrieval == "bm25":
        assert hits[0]["chunk"]["title"] == "Tusks" and (hits[0]["bm25_rank"], hits[0]["embedding_rank"]) == (1, None)
        assert "| The walrus has tusks." in run("knowledge", "search", "walrus").stdout


def test_search_in_an_empty_library_and_by_unknown_ways_says_what_to_do(run: Run, files: Path) -> None:
    assert isinstance(run("knowledge", "search", "walrus").exception, NothingKnown)
    run("ingest", files)
    assert isinstance(run("knowledge", "search", "walrus", "--retrieval", "fuse").exception, InvalidSetting)


def test_stats_sum_up(run: Run, files: Path, tmp_path: Path) -> None:
    run("ingest", files)
    found = parsed(run("knowledge", "stats", "--json"))
    assert (found["documents"], found["chunks"], found["embedded"], found["top_retrieved"]) == (2, 2, 2, [])
    assert found["file_bytes"] > 0 and found["folder"] == str(tmp_path / "knowledge")
    assert "2 documents, 2 passages (2 with a vector)" in run("knowledge", "stats").stdout


def test_forget_by_name_or_path_removes_it_to_the_last_byte(run: Run, files: Path, tmp_path: Path) -> None:
    run("ingest", files)
    assert "forgot" in run("forget", listed(run)["walrus.md"]["name"]).stdout
    gone = parsed(run("forget", files / "penguin.txt", "--json"))
    assert gone["passages"] == 1 and gone["documents"][0]["source"] == str(files / "penguin.txt")
    assert listed(run) == {}
    left = b"".join(path.read_bytes() for path in (tmp_path / "knowledge").rglob("*") if path.is_file())
    assert not any(word in left for word in (b"walrus", b"penguin", b"tusk"))
    assert "2 documents added" in run("ingest", files).stdout  # and it can be taken in again


def test_forget_by_app_and_by_time(run: Run, files: Path) -> None:
    run("ingest", files / "walrus.md", "--app", "mail")
    run("ingest", files / "penguin.txt")
    assert parsed(run("forget", "--app", "nobody", "--json"))["documents"] == []
    assert parsed(run("forget", "--before", "1d", "--json"))["documents"] == []
    assert parsed(run("forget", "--before", "2020-01-01T12:00", "--json"))["documents"] == []
    run("forget", "--app", "mail")
    assert set(listed(run)) == {"penguin.txt"}
    run("forget", "--before", "2999-01-31")
    assert listed(run) == {}
    for wrong in (["--before", "soon"], []):
        assert isinstance(run("forget", *wrong).exception, InvalidSetting)


def test_forget_all_asks(run: Run, files: Path) -> None:
    run("ingest", files)
    for answer in ("n\n", ""):
        asked = run("forget", "--all", stdin=answer)
        assert asked.exit_code == 1 and "Forget all documents?" in asked.output
    assert len(listed(run)) == 2
    assert run("forget", "--all", stdin="y\n").exit_code == 0 and listed(run) == {}
    run("ingest", files)
    assert run("forget", "--all", "--yes").exit_code == 0 and listed(run) == {}


def test_one_name_that_is_unknown_forgets_nothing(run: Run, files: Path) -> None:
    run("ingest", files)
    assert isinstance(run("forget", files / "walrus.md", "nothing").exception, RekindleError)
    assert len(listed(run)) == 2


def test_nothing_in_documents_steers_the_terminal(run: Run, files: Path) -> None:
    lines = [{"id": HOSTILE, "title": HOSTILE, "text": f"{HOSTILE} [bold]walrus[/bold] [/] {HOSTILE}"}, {"text": ""}]
    (files / "bad \x1b[31m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    first = run("ingest", files, "--app", "evil \x1b[31m")
    assert first.exit_code == 1 and "1 problem" in first.stdout
    assert_tame(first.output)
    (name,) = (entry["name"] for entry in listed(run).values() if "bell" in entry["title"])
    knowledge = (["knowledge", *words] for words in (["ls"], ["show", name], ["search", "walrus"], ["stats"]))
    for command in (*knowledge, ["forget", name]):
        result = run(*command)
        assert result.exit_code == 0, result.exception
        assert_tame(result.output)
        if command[1] in ("show", "search"):
            assert "ESCAPE" in result.output or "U+001B" in result.output
            assert "[bold]walrus[/bold] [/]" in result.output


def test_tenants_do_not_see_each_other(run: Run, files: Path) -> None:
    run("ingest", files, "--tenant", "one")
    assert listed(run) == {} and len(parsed(run("knowledge", "ls", "--json", "--tenant", "one"))) == 2


def test_watch_ingests_everything_first_and_then_what_is_told(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(paths: list[str]) -> Any:
        yield paths
        (files / "new.txt").write_text("gull")
        yield [str(files / "new.txt")]
        raise KeyboardInterrupt

    monkeypatch.setattr(watch, "watch_changes", told)
    result = run("ingest", files, "--watch")
    assert result.exit_code == 0 and "2 documents added" in result.stdout and "1 document added" in result.stdout


# -- damage, backups, the limit


def wreck(tmp_path: Path) -> Path:
    """Zero the first page of the library."""
    (path,) = (tmp_path / "knowledge").glob("*.sqlite")
    with path.open("r+b") as file:
        file.write(bytes(4096))
    return path


def test_every_command_tells_a_loss_until_it_is_acknowledged(
    run: Run, files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run("ingest", files)
    damaged = wreck(tmp_path)
    commands = [
        ("knowledge", "ls"), ("knowledge", "stats"), ("knowledge", "search", "walrus", "--retrieval", "bm25"),
        ("knowledge", "show", files / "walrus.md"), ("ingest", files), ("forget", files / "penguin.txt"),
        ("knowledge", "export", tmp_path / "backup"), ("knowledge", "import", tmp_path / "backup"),
    ]  # fmt: skip

    def told(some: int) -> list[bool]:
        said = []
        for command in commands[:some]:
            caplog.clear()
            assert run(*command).exit_code == 0, command
            said.append("The library was damaged" in caplog.text and str(damaged) in caplog.text)
        return said

    assert told(len(commands)) == [True] * len(commands)
    found = parsed(run("knowledge", "check", "--json"))
    assert found["damage"] is None and found["damaged_files"] == [str(damaged)] and len(found["lost"]) == 1
    assert parsed(run("knowledge", "check", "--acknowledge", "--json"))["lost"] == []
    assert told(3) == [False] * 3
    assert damaged.exists()


def test_check_only_looks_and_fix_saves(run: Run, files: Path, tmp_path: Path) -> None:
    run("ingest", files)
    assert "no damage" in run("knowledge", "check").stdout
    damaged = wreck(tmp_path)
    looked = run("knowledge", "check")
    assert looked.exit_code == 1 and "--fix" in looked.stdout
    assert [path.name for path in (tmp_path / "knowledge").glob("*.sqlite")] == [damaged.name]
    fixed = run("knowledge", "check", "--fix")
    assert fixed.exit_code == 0 and "saved: 2 documents with 2 passages" in fixed.stdout
    assert set(listed(run)) == {"walrus.md", "penguin.txt"}


def test_forget_names_damaged_files_and_only_an_order_removes_them(run: Run, files: Path, tmp_path: Path) -> None:
    run("ingest", files)
    damaged = wreck(tmp_path)
    gone = parsed(run("forget", "--all", "--json"))
    assert gone["damaged_files"] == [str(damaged)] and len(gone["documents"]) == 2
    assert damaged.exists()
    assert run("knowledge", "check", "--remove-damaged", stdin="n\n").exit_code == 1 and damaged.exists()
    assert "1 damaged file removed" in run("knowledge", "check", "--remove-damaged", "--yes").stdout
    left = b"".join(path.read_bytes() for path in (tmp_path / "knowledge").iterdir())
    assert not damaged.exists() and b"walrus" not in left and listed(run) == {}


def test_a_backup_goes_out_and_comes_back(run: Run, files: Path, tmp_path: Path) -> None:
    run("ingest", files)
    before = {name: {**entry, "id": 0} for name, entry in listed(run).items()}
    exported = run("knowledge", "export", tmp_path / "backup")
    assert "2 documents with 2 passages exported" in exported.stdout
    run("forget", "--all", "--yes")
    assert "2 documents with 2 passages added, 0 were there" in run("knowledge", "import", tmp_path / "backup").stdout
    assert "0 documents with 0 passages added, 2 were there" in run("knowledge", "import", tmp_path / "backup").stdout
    assert {name: {**entry, "id": 0} for name, entry in listed(run).items()} == before
    assert "2 documents, 2 passages (2 with a vector)" in run("knowledge", "stats").stdout
    assert "0 documents added, 0 changed" in run("ingest", files).stdout
    assert isinstance(run("knowledge", "import", files / "walrus.md").exception, RekindleError)


def test_a_full_library_refuses_more_and_stats_tell_the_limit(run: Run, files: Path) -> None:
    run("ingest", files)
    refused = run("ingest", files.parent / "files" / "walrus.md", "--size", "50", "--library-limit", "1MB")
    assert isinstance(refused.exception, LibraryFull) and set(listed(run)) == {"walrus.md", "penguin.txt"}
    told = parsed(run("knowledge", "stats", "--json", "--library-limit", "1MB"))
    assert told["limit_bytes"] == 10**6 and told["folder_bytes"] >= told["file_bytes"] > 0
    assert "library_limit 1.0 MB" in run("knowledge", "stats", "--library-limit", "1MB").stdout
    assert "no limit" in run("knowledge", "stats", "--library-limit", "none").stdout


def test_an_ingestion_that_is_interrupted_says_what_is_kept(
    run: Run, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Ingester._file

    def interrupted(self: Ingester, path: Path, known: Any) -> None:
        if path.name == "walrus.md":
            raise KeyboardInterrupt
        read(self, path, known)

    monkeypatch.setattr(Ingester, "_file", interrupted)
    result = run("ingest", files)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == (
        "stopped; the library holds 1 document with 1 passage. The same command goes on from there."
    )
    monkeypatch.undo()
    assert "1 document added, 0 changed, 0 removed, 1 unchanged" in run("ingest", files).stdout
