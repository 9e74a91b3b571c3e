"""`rekindle warm`, `rekindle explain` and the settings they share, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import rekindle
from tests.knowledge.files import pdf

RULES = "Light the lamp at dusk. Write the hour into the book."


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.txt"
    path.write_text(RULES, "utf-8")
    return path


def ok(*arguments: str, stdin: str | None = None) -> str:
    result = rekindle(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result.stdout


def error(*arguments: str) -> str:
    result = rekindle(*arguments)
    assert result.exit_code == 1
    return str(result.exception)


def test_what_was_warmed_is_reused_by_another_command(tiny_folder: Path, rules: Path) -> None:
    model = str(tiny_folder)
    told = json.loads(ok("warm", str(rules), "--model", model, "--json"))
    assert told["prompts"] == 1 and told["computed_tokens"] > len(RULES) and told["known_tokens"] == 0
    again = ok("warm", str(rules), "--model", model)
    assert "1 token computed" in again
    reply = json.loads(ok("run", model, "Why?", "--file", str(rules), "-n", "2", "--json"))
    assert reply["usage"]["cached_tokens"] >= len(RULES) and reply["reuse"]["disk"] == reply["usage"]["cached_tokens"]


def test_a_file_can_be_a_system_message_messages_or_many_prompts(
    tiny_folder: Path, tmp_path: Path, rules: Path
) -> None:
    model = str(tiny_folder)
    ok("warm", str(rules), "--model", model, "--as-system")
    reply = json.loads(ok("run", model, "Why?", "--system", RULES, "-n", "2", "--json"))
    assert reply["usage"]["cached_tokens"] >= len(RULES)
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "One " * 10}]}), "utf-8")
    many = tmp_path / "many.jsonl"
    many.write_text('{"prompt": "plain text"}\n\n[{"role": "user", "content": "hi"}]\n', "utf-8")
    assert json.loads(ok("warm", str(chat), str(many), "--model", model, "--json"))["prompts"] == 3


def test_a_document_is_warmed_and_explained_as_run_reads_it(tiny_folder: Path, tmp_path: Path) -> None:
    model, path = str(tiny_folder), tmp_path / "log.pdf"
    path.write_bytes(pdf([["The lamp is lit at dusk, and the hour is written down."]]))
    ok("warm", str(path), "--model", model)
    reply = json.loads(ok("run", model, "Why?", "--file", str(path), "-n", "2", "--json"))
    assert reply["usage"]["cached_tokens"] >= 50
    assert json.loads(ok("explain", str(path), "--model", model, "--json"))["tokens"] < len(path.read_bytes()) // 4


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.pdf", "no PDF", "is damaged, or not a PDF"),
        ("a.json", "{}", "is not a prompt"),
        ("a.jsonl", '{"prompt": "x"}\n3', "line 2 is not a prompt"),
        ("a.json", '[{"role": "boss", "content": "x"}]', "Unknown role 'boss'"),
    ],
)
def test_a_file_that_is_no_prompt_is_refused_with_a_reason(
    tiny_folder: Path, tmp_path: Path, name: str, text: str, words: str
) -> None:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    assert words in error("warm", str(path), "--model", str(tiny_folder))


def test_the_last_request_can_be_explained_and_so_can_a_file(tiny_folder: Path, rules: Path) -> None:
    model = str(tiny_folder)
    ok("run", model, "Why?", "--file", str(rules), "-n", "2")
    told = ok("explain", "--last")
    assert "0 of" in told and "No earlier prompt begins like this one." in told and "first token" in told
    other = rules.with_name("other.txt")
    other.write_text(RULES.replace("Write", "write"), "utf-8")
    shown = ok("explain", str(other), "--model", model)
    assert "first difference" in shown and "they differ only in case" in shown
    values = json.loads(ok("explain", str(rules), "--model", model, "--json"))
    assert values["parts"][0]["source"] == "disk" and values["reason"]["kind"] in ("differs", "complete")
    assert len(json.loads(ok("explain", "--last", "-n", "5", "--json"))) == 1


def test_the_body_of_a_request_is_explained(tiny_folder: Path, tmp_path: Path) -> None:
    body = {"system": [{"type": "text", "text": f"x-anthropic-billing-header: v=1;\n\n{RULES}"}], "max_tokens": 9}
    path, model = tmp_path / "body.json", str(tiny_folder)
    path.write_text(json.dumps({**body, "messages": [{"role": "user", "content": "Why?"}]}), "utf-8")
    plain = tmp_path / "plain.json"
    plain.write_text(json.dumps([{"role": "system", "content": RULES}, {"role": "user", "content": "Why?"}]), "utf-8")
    tokens = [json.loads(ok("explain", str(one), "--model", model, "--json"))["tokens"] for one in (path, plain)]
    assert tokens[0] == tokens[1]
    path.write_text(json.dumps({**body, "messages": [{"role": "user", "content": [{"type": "image"}]}]}), "utf-8")
    assert "image" in error("explain", str(path), "--model", model)


def test_explain_says_what_to_do_when_there_is_nothing_to_explain(tiny_folder: Path, rules: Path) -> None:
    assert "Name a file" in error("explain")
    assert "Name a file" in error("explain", "--last", str(rules))
    assert "There is no cache" in error("explain", "--last")
    ok("run", str(tiny_folder), "Hello", "-n", "2")
    ok("cache", "clear", "--yes")
    assert "No request has used the cache" in error("explain", "--last")
    assert "no cache to warm" in error("warm", str(rules), "--model", str(tiny_folder), "--cache", "off")


def test_the_folder_and_limits_come_from_the_environment_and_the_file(
    tiny_folder: Path, rules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rekindle.toml").write_text('cache = "here"\ndisk_limit = "50MB"\n', "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REKINDLE_CONFIG", str(tmp_path / "rekindle.toml"))
    ok("warm", str(rules), "--model", str(tiny_folder))
    assert (tmp_path / "here" / "catalog.sqlite").is_file()
    stats = json.loads(ok("cache", "stats", "--json"))
    assert stats["folder"] == str(tmp_path / "here") and stats["limit"] == "50MB"
    assert 0 < stats["free_bytes"] < 50_000_000 and stats["models"][0]["room_tokens"] > 1000
    monkeypatch.setenv("REKINDLE_CACHE", str(tmp_path / "there"))
    ok("warm", str(rules), "--model", str(tiny_folder))
    assert (tmp_path / "there" / "catalog.sqlite").is_file()
    monkeypatch.setenv("REKINDLE_DISC_LIMIT", "1GB")
    assert "REKINDLE_DISK_LIMIT" in error("warm", str(rules), "--model", str(tiny_folder))


def test_stats_rank_entries_by_what_they_saved_and_say_what_fits(tiny_folder: Path, rules: Path) -> None:
    model = str(tiny_folder)
    for question in ("a", "b", "c"):
        ok("run", model, question, "--file", str(rules), "-n", "2")
    told = ok("cache", "stats")
    assert "Entries that saved most" in told and "room for" in told
    best = json.loads(ok("cache", "stats", "--json"))["best"]
    assert best[0]["hits"] >= 2 and best[0]["saved_ms"] == max(entry["saved_ms"] for entry in best)
