"""A `rekindle.toml` in the current folder may be anybody's: it sets nothing. The user's own is read with care."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle import Session
from rekindle.cache import cost
from rekindle.cli.main import app
from rekindle.engine.fake import FakeEngine
from rekindle.errors import CacheUnusable, InvalidSetting
from rekindle.remote import remote_kv as streams
from rekindle.settings import Settings
from rekindle.settings import file as settings_file
from tests.recorder import recording

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a repository of somebody else."""
    folder = tmp_path / "cloned"
    folder.mkdir()
    monkeypatch.chdir(folder)
    settings_file._say_unread.cache_clear()
    return folder


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """The user's own file, which is not there yet."""
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "rekindle" / "rekindle.toml"
    path.parent.mkdir(parents=True)
    return path


def test_a_cloned_repository_has_no_token_sent_to_its_server(
    cloned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    monkeypatch.setattr(streams, "MAX_PATIENCE_SECONDS", 30.0)  # the server is asked before anything is computed
    monkeypatch.setattr(cost, "FREE", replace(cost.FREE, compute=(0.0, 100.0, 0.0)))
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".cache" / "huggingface" / "token"
    token.parent.mkdir(parents=True)
    token.write_text(TOKEN)
    token.chmod(0o600)
    with recording() as server:
        lines = {"origin": server.url, "origin_keys": "ab" * 32, "origin_token": "~/.cache/huggingface/token"}
        text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in lines.items())
        (cloned / "rekindle.toml").write_text(text)
        with Session(FakeEngine(), cache=tmp_path / "cache") as session:
            assert session.settings.origin is None
            session.generate("The keeper lights the lamp at dusk. " * 12, max_tokens=2)
        assert server.connections == 0 and server.seen == []
        monkeypatch.setenv("REKINDLE_CONFIG", "rekindle.toml")  # so that the above proves something
        with Session(FakeEngine(), cache=tmp_path / "cache") as session:
            session.generate("Another prompt that nobody has computed yet. " * 12, max_tokens=2)
        assert server.connections > 0 and TOKEN in "".join(server.seen)


def test_a_file_in_the_current_folder_is_not_read_and_is_named_once_a_process(
    cloned: Path, users: Path, caplog: pytest.LogCaptureFixture
) -> None:
    users.write_text('tenant = "me"')
    (cloned / "rekindle.toml").write_text("this is not TOML")
    for _ in range(3):
        assert Settings.load() == Settings(tenant="me")
    (message,) = caplog.messages
    assert message.startswith(f"{cloned}/rekindle.toml is not read") and "rekindle --config rekindle.toml" in message


def test_the_users_own_file_is_read_also_from_its_own_folder(
    users: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    users.write_text('tenant = "me"')
    monkeypatch.chdir(users.parent)
    assert Settings.load() == Settings(tenant="me") and not caplog.messages


def test_a_command_takes_the_file_it_is_given(cloned: Path, users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CONFIG", "")  # put back afterwards: the option sets it
    users.write_text('cache = "mine"')
    (cloned / "named.toml").write_text('cache = "theirs"')
    done = CliRunner().invoke(app, ["--config", "named.toml", "cache", "stats"])
    assert isinstance(done.exception, CacheUnusable) and str(cloned / "theirs") in str(done.exception)
    done = CliRunner().invoke(app, ["--config", "nosuch.toml", "cache", "stats"])
    assert isinstance(done.exception, InvalidSetting) and "nosuch.toml" in str(done.exception)


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs")
def test_what_is_no_small_regular_file_is_refused_at_once(users: Path) -> None:
    file = users
    os.mkfifo(file)  # opened as a file, it would wait for somebody to write
    with pytest.raises(InvalidSetting, match="rekindle.toml cannot be read: it is not a regular file"):
        Settings.load()
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(InvalidSetting, match="not a regular file"):
        Settings.load()
    file.unlink()
    with file.open("wb") as huge:
        huge.truncate(1 << 40)
    with pytest.raises(InvalidSetting, match="more than 16,384 bytes"):
        Settings.load()


@pytest.mark.parametrize("text", ["a = " + "[" * 16_000, "context = " + "9" * 16_000, "a." * 4_000 + "a = 1"])
def test_a_file_made_to_hurt_the_parser_is_refused_in_words(text: str, users: Path) -> None:
    users.write_text(text)
    with pytest.raises(InvalidSetting):
        Settings.load()
