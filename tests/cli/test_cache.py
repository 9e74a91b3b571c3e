"""`rekindle cache`, end to end on a folder, without a model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rekindle.cli.main import app
from rekindle.core.size import human_bytes
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import CacheUnusable, EntryNotFound, InvalidSetting, RekindleError
from rekindle.models.adapter_registry import lookup
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep

PROMPTS = [list(range(100)), [*range(64), *range(500, 620)], list(range(9000, 9300))]
ROOMY = StoreSettings(disk_limit="50MB", memory_limit=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with TieredStore(tmp_path / "c", ROOMY) as store:
        for tokens in PROMPTS:
            keep(store, tokens)
        store.record_use(store.lookup(KV_SPACE, PROMPTS[2]), saved_ms=1500)
    return tmp_path / "c"


def cache(folder: Path, command: str, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["cache", command, "--cache", str(folder), *arguments], input=stdin)


def entries(folder: Path) -> list[dict[str, object]]:
    result = cache(folder, "ls", "--json")
    assert result.exit_code == 0, result.exception
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def test_ls_shows_every_entry(folder: Path) -> None:
    found = entries(folder)
    assert [entry["tokens"] for entry in found] == [100, 120, 300]
    assert found[2]["saved_ms"] == 1500 and found[2]["hits"] == 1 and found[2]["model"] == "synthetic"
    text = cache(folder, "ls").stdout
    assert all(str(entry["name"])[:8] in text for entry in found) and "64+120" in text


def test_the_folder_is_called_cache_everywhere_and_its_old_name_says_so(folder: Path) -> None:
    known = cache(folder, "ls")
    for group, name in (("cache", "ls"), ("apps", "ls")):
        old = CliRunner().invoke(app, [group, name, "--folder", str(folder)])
        assert old.stderr == "note: --folder is called --cache now; the next version knows only that.\n"
        assert old.stdout == (known.stdout if group == "cache" else "No app has sent a request yet.\n")
    assert known.stderr == "" and "--folder" not in CliRunner().invoke(app, ["cache", "ls", "--help"]).output


def test_adapters_are_shown_by_their_names(folder: Path, tmp_path: Path) -> None:
    registered = lookup("pirate")
    assert registered is not None
    digest = read_adapter(registered.path, registered.scale).digest
    with TieredStore(folder, ROOMY) as store:
        for number, adapter in enumerate((digest, "ab" * 16)):
            keep(store, list(range(1000 * number, 1000 * number + 64)), replace(KV_SPACE, adapter=adapter))
    for command in ("ls", "stats"):
        shown = cache(folder, command).stdout
        assert "pirate" in shown and "abababab" in shown and digest not in shown and "ab" * 16 not in shown


def test_stats_sum_up_and_rank(folder: Path) -> None:
    found = json.loads(cache(folder, "stats", "--json").stdout)
    assert (found["entries"], found["tokens"], found["hits"], found["saved_ms"]) == (3, 520, 1, 1500)
    assert found["best"][0]["tokens"] == 300 and found["models"][0]["entries"] == 3
    assert found["bytes"] == sum(int(str(entry["bytes"])) for entry in entries(folder))
    shown = cache(folder, "stats").stdout
    assert "time saved  1.5 s\n" in shown and "entries     3 (0 pinned)\n" in shown and "saved ms" not in shown
    assert f"limit       10 % of the free disk ({human_bytes(found['limit_bytes'])})\n" in shown


def test_stats_say_what_was_written_and_what_may_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(cache(folder, "stats", "--json").stdout)
    assert found["written_hour_bytes"] == found["written_day_bytes"] == found["bytes"]
    assert (found["write_budget"], found["write_budget_left_bytes"]) == ("40GB", 40_000_000_000 - found["bytes"])
    written = f"{human_bytes(found['bytes'])} in the last hour, {human_bytes(found['bytes'])} in the last day"
    shown = cache(folder, "stats").stdout
    assert f"written     {written}\nbudget left 40.0 GB of 40.0 GB a day\n" in shown
    with TieredStore(folder, replace(ROOMY, write_budget=1000)) as store:
        with store.disk.database.writing() as connection:
            store.disk.room.add_written(connection, 1000)
        assert keep(store, list(range(400))).outcome == "refused"
    monkeypatch.setenv("REKINDLE_WRITE_BUDGET", "1000")
    shown = cache(folder, "stats").stdout
    assert "budget left 0 B of 1.0 kB a day; 1 write refused in the last day\n" in shown
    monkeypatch.setenv("REKINDLE_WRITE_BUDGET", "none")
    assert "budget left no limit\n" in cache(folder, "stats").stdout
    assert json.loads(cache(folder, "stats", "--json").stdout)["write_budget_left_bytes"] is None


def test_check_finds_and_fixes(folder: Path) -> None:
    good = cache(folder, "check")
    assert good.exit_code == 0 and "3 entries, " in good.stdout and "no problems" in good.stdout
    path = folder / "extents" / f"{entries(folder)[2]['name']}.kv"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    bad = cache(folder, "check", "--json")
    assert bad.exit_code == 1 and json.loads(bad.stdout)["problems"][0]["kind"] == "damaged"
    assert cache(folder, "check", "--fix").exit_code == 0
    assert cache(folder, "check").exit_code == 0 and len(entries(folder)) == 2


def test_rm_takes_names_by_their_beginning_and_what_hangs_on_them(folder: Path) -> None:
    name = str(entries(folder)[0]["name"])
    assert cache(folder, "rm", name[:9]).exit_code == 0
    assert [entry["tokens"] for entry in entries(folder)] == [300]
    for wrong in ("nothing-like-it", ""):
        with pytest.raises(EntryNotFound, match="rekindle cache ls"):
            raise cache(folder, "rm", wrong).exception or AssertionError


def test_pin_and_unpin(folder: Path) -> None:
    name = str(entries(folder)[1]["name"])
    cache(folder, "pin", name)
    cache(folder, "prune", "--to", "0")
    assert [entry["pinned"] for entry in entries(folder)] == [True, True]  # it, and what it hangs on
    cache(folder, "unpin", name)
    cache(folder, "prune", "--to", "0")
    assert entries(folder) == []


def test_prune_by_age_and_by_model(folder: Path) -> None:
    assert "0 entries removed, 3 left" in cache(folder, "prune", "--unused", "1h").stdout
    assert isinstance(cache(folder, "prune").exception, InvalidSetting)
    missing = cache(folder, "prune", "--model", "nosuch").exception
    assert isinstance(missing, EntryNotFound) and "synthetic" in str(missing)
    assert "3 entries removed, 0 left" in cache(folder, "prune", "--model", "synthetic").stdout


def test_clear_asks(folder: Path) -> None:
    assert cache(folder, "clear", stdin="n\n").exit_code == 1 and len(entries(folder)) == 3
    assert cache(folder, "clear", "--yes").exit_code == 0 and entries(folder) == []
    assert list((folder / "extents").iterdir()) == []


def test_gc_removes_strays_and_nothing_else(folder: Path) -> None:
    (folder / "extents" / "0123456789abcdef.kv").write_bytes(b"stray")
    assert "1 leftover file removed" in cache(folder, "gc").stdout
    assert len(entries(folder)) == 3 == len(list((folder / "extents").iterdir()))


@pytest.mark.parametrize("command", ["ls", "stats", "check", "gc", "clear"])
def test_looking_at_a_cache_that_is_not_there_makes_none(tmp_path: Path, command: str) -> None:
    result = cache(tmp_path / "nowhere", command)
    assert isinstance(result.exception, CacheUnusable) and "another folder" in str(result.exception)
    assert not (tmp_path / "nowhere").exists()


def test_a_locked_catalog_is_a_sentence_not_a_traceback(folder: Path) -> None:
    import sqlite3

    holder = sqlite3.connect(folder / "catalog.sqlite", isolation_level=None)
    holder.execute("PRAGMA locking_mode=EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    assert cache(folder, "ls").exit_code == 0 or isinstance(cache(folder, "ls").exception, RekindleError)
    holder.close()


def test_keyed_caches_are_looked_at_with_their_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b" 16 bytes or more\n")
    key.chmod(0o600)
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", key=key.read_bytes())) as store:
        keep(store, PROMPTS[0])
    assert "no problems" in cache(tmp_path / "c", "check", "--key-file", str(key)).stdout
    assert "not checked, written with another key: 1 entry" in cache(tmp_path / "c", "check").stdout
    assert isinstance(cache(tmp_path / "c", "check", "--key-file", str(tmp_path / "none")).exception, InvalidSetting)


def test_no_command_of_the_cache_needs_torch(folder: Path) -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom rekindle.cli.main import app\n"
        "for command in ('ls', 'stats', 'check', 'gc'):\n"
        "    assert CliRunner().invoke(app, ['cache', command, '-C', sys.argv[1]]).exit_code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], check=True)
