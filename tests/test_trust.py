"""A `rekindle.toml` in the current folder may be anybody's: what it may set, and what waits for `rekindle trust`."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.cache import cost
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting
from rekindle.remote import remote_kv as streams
from rekindle.settings import SETTINGS, Settings
from rekindle.settings.file import SettingsFile, distrust, trust, trusted_places
from tests.recorder import recording

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
NAMES = list(SETTINGS)


@pytest.fixture(autouse=True)
def cloned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a repository of somebody else."""
    folder = tmp_path / "cloned"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """The user's own file, which is not there yet."""
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "rekindle" / "rekindle.toml"
    path.parent.mkdir(parents=True)
    return path


def trusted(path: Path) -> None:
    trust(SettingsFile.read(path))


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
        trusted(cloned / "rekindle.toml")  # so that the above proves something
        with Session(FakeEngine(), cache=tmp_path / "cache") as session:
            session.generate("Another prompt that nobody has computed yet. " * 12, max_tokens=2)
        assert server.connections > 0 and TOKEN in "".join(server.seen)


def test_only_the_context_may_be_set_by_a_file_that_is_not_trusted() -> None:
    assert [name for name, setting in SETTINGS.items() if setting.anywhere] == ["context"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "context"])
def test_what_needs_trust_is_not_even_looked_at(name: str, cloned: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where the value makes no sense: nothing was expanded, opened or compared."""
    (cloned / "rekindle.toml").write_text(f"context = 7\n{name} = [1979-05-27, '~nobody-of-this-name/x']")
    assert Settings.load() == Settings(context=7)
    (told,) = caplog.messages
    assert f": {name}. " in told and f"rekindle trust {cloned / 'rekindle.toml'}" in told


def test_what_is_ignored_is_named_once_a_process(cloned: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cloned / "rekindle.toml").write_text('tenant = "you"\ncontext = 7\norigin = "http://evil.example"\n')
    for _ in range(3):
        Settings.load()
        Session(FakeEngine(), cache="off").close()
    (told,) = [record for record in caplog.records if record.name == "rekindle.settings"]
    assert told.levelno == logging.WARNING
    assert told.getMessage() == (
        f"{cloned}/rekindle.toml is not trusted, so these settings in it are ignored: tenant, origin. "
        f"To apply them: rekindle trust {cloned}/rekindle.toml"
    )


def test_a_trusted_file_sets_everything_until_it_is_changed_moved_or_distrusted(cloned: Path, tmp_path: Path) -> None:
    file = cloned / "rekindle.toml"
    file.write_text('tenant = "us"\ncache = "kv"')
    assert Settings.load() == Settings()
    trusted(file)
    assert Settings.load() == Settings(tenant="us", cache=str(cloned / "kv"))
    file.write_text('tenant = "us"\ncache = "kv" ')
    assert Settings.load() == Settings()
    file.write_text('tenant = "us"\ncache = "kv"')
    assert Settings.load().tenant == "us"
    cloned.rename(tmp_path / "moved")
    (tmp_path / "cloned").symlink_to(tmp_path / "moved")  # the same content, reached by the old name
    assert Settings.load() == Settings()
    (tmp_path / "cloned").unlink()
    (tmp_path / "moved").rename(cloned)
    assert Settings.load().tenant == "us"
    assert distrust(file) and not distrust(file)
    assert Settings.load() == Settings()


def test_the_record_of_trust_is_the_users_alone(cloned: Path) -> None:
    file = cloned / "rekindle.toml"
    file.write_text('tenant = "us"')
    trusted(file)
    record = Path(os.environ["XDG_CONFIG_HOME"]) / "rekindle" / "trusted.json"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert list(trusted_places()) == [str(file)] and [*record.parent.iterdir()] == [record]
    record.write_text("[damaged")
    assert Settings.load() == Settings()


def test_trust_that_cannot_be_recorded_is_an_error(cloned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cloned / "rekindle.toml").write_text('tenant = "us"')
    Path(os.environ["XDG_CONFIG_HOME"]).write_text("no folder")
    with pytest.raises(InvalidSetting, match="cannot be written"):
        trusted(cloned / "rekindle.toml")


def test_a_strangers_file_does_not_switch_the_users_own_off(cloned: Path, users: Path) -> None:
    """What guards the user stays, whatever folder a command is run in."""
    users.write_text('reuse = "off"\ntenant = "me"\ncontext = 5\nlocal_tenants = "*"')
    own = Settings(reuse="off", tenant="me", context=5, local_tenants="*")
    assert Settings.load() == own
    for text, context in (("", 5), ("context = 7", 7), ('reuse = "exact"\nlocal_tenants = ""\ncontext = 8', 8)):
        (cloned / "rekindle.toml").write_text(text)
        assert Settings.load() == Settings(reuse="off", tenant="me", context=context, local_tenants="*")
    trusted(cloned / "rekindle.toml")
    assert Settings.load() == Settings(reuse="exact", tenant="me", context=8, local_tenants="")


def test_the_users_own_file_environment_and_arguments_need_no_trust(
    cloned: Path, users: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cloned / "rekindle.toml").write_text('tenant = "you"\npolicy = "you"\ndevice = "you"')
    users.write_text('tenant = "me"\npolicy = "me"\ndevice = "me"')
    monkeypatch.setenv("REKINDLE_POLICY", "environment")
    assert Settings.load({"tenant": "flag"}) == Settings(tenant="flag", policy="environment", device="me")
    (cloned / "named.toml").write_text('origin = "http://127.0.0.1:1"')
    assert Settings.load(file=Path("named.toml")).origin == "http://127.0.0.1:1"
    assert Settings.load(environment={"REKINDLE_CONFIG": "rekindle.toml"}).tenant == "you"
    monkeypatch.chdir(users.parent)
    assert Settings.load({}, environment={}) == Settings(tenant="me", policy="me", device="me")


def test_a_link_to_the_users_own_file_is_a_file_of_its_own(cloned: Path, users: Path) -> None:
    """Else relative paths in it would lead into the stranger's folder."""
    users.write_text('key_file = "key"')
    (cloned / "rekindle.toml").symlink_to(users)
    assert Settings.load() == Settings(key_file=str(users.parent / "key"))


def test_a_link_is_trusted_by_what_it_leads_to(cloned: Path, tmp_path: Path) -> None:
    target = tmp_path / "shared.toml"
    target.write_text('tenant = "us"')
    (cloned / "rekindle.toml").symlink_to(Path("..", "shared.toml"))
    assert Settings.load() == Settings()
    trusted(cloned / "rekindle.toml")
    assert Settings.load().tenant == "us"
    target.write_text('tenant = "others"')
    assert Settings.load() == Settings()


@pytest.mark.skipif(sys.platform == "win32", reason="no FIFOs")
def test_what_is_no_small_regular_file_is_refused_at_once(cloned: Path) -> None:
    file = cloned / "rekindle.toml"
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
def test_a_file_made_to_hurt_the_parser_is_refused_in_words(text: str, cloned: Path) -> None:
    (cloned / "rekindle.toml").write_text(text)
    with pytest.raises(InvalidSetting):
        Settings.load()


def test_a_misspelt_name_is_refused_also_where_it_would_be_ignored(cloned: Path) -> None:
    (cloned / "rekindle.toml").write_text('tenant = "you"\norigin_tokn = "x"')
    with pytest.raises(InvalidSetting, match="Did you mean 'origin_token'"):
        Settings.load()
