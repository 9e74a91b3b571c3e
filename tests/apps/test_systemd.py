"""Apps of a Linux desktop: systemd's user manager has a cgroup for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle import apps as apps_module
from rekindle.apps import Apps, follow_units, list_apps, running_apps, systemd_manager
from rekindle.cli.main import app
from rekindle.core.scope import Scope
from rekindle.errors import InvalidSetting
from rekindle.store.disk import DiskStore
from rekindle.store.settings import StoreSettings

OWN = Scope("local")
MAIL, NOTES = "app-gnome-org.example.Mail@12.service", r"app-org.example.Note\x2dbook-77.scope"

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="a system without users' numbers has no systemd")


@pytest.fixture
def manager(tmp_path: Path) -> Path:
    folder = tmp_path / "user.slice" / f"user-{os.getuid()}.slice" / f"user@{os.getuid()}.service"
    (folder / "app.slice").mkdir(parents=True)
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path / "c", StoreSettings(disk_limit="50MB"))
    yield store
    store.close()


def states(disk: DiskStore) -> dict[str, str]:
    return {one.name: one.state for one in list_apps(disk)}


@pytest.mark.parametrize(
    ("unit", "id"),
    [
        ("app-gnome-org.gnome.Evince@12345.service", "org.gnome.Evince"),
        ("app-flatpak-org.telegram.desktop@1.service", "org.telegram.desktop"),
        ("app-org.kde.amarok.service", "org.kde.amarok"),
        ("app-org.gnome.Evince-12345.scope", "org.gnome.Evince"),
        ("app-gnome-firefox-2342.scope", "firefox"),
        (r"app-KDE-org.example.Note\x2dbook-9.scope", "org.example.Note-book"),
        ("session-1.scope", None),
        ("dbus.service", None),
        ("app-org.gnome.Terminal.slice", None),
    ],
)
def test_the_id_of_an_app_is_a_part_of_the_name_of_its_unit(manager: Path, unit: str, id: str | None) -> None:
    (manager / "app.slice" / unit).mkdir()
    assert running_apps(manager) == ({id} if id else set())


def test_units_are_found_in_slices_and_files_and_links_are_none(manager: Path, tmp_path: Path) -> None:
    nested = manager / "app.slice" / "app-org.example.slice" / MAIL
    nested.mkdir(parents=True)
    (manager / "app.slice" / "app-org.example.File-1.scope").write_text("")
    (manager / "app.slice" / "app-org.example.Link-1.scope").symlink_to(tmp_path)
    assert running_apps(manager) == {"org.example.Mail"}
    assert running_apps(tmp_path / "gone") == set()


def test_an_app_is_killed_when_its_last_unit_ends_and_alive_when_it_runs_again(disk: DiskStore, manager: Path) -> None:
    units = [manager / "app.slice" / name for name in (MAIL, MAIL.replace("12", "13"), NOTES)]
    for unit in units:
        unit.mkdir()
    Apps(disk, OWN).set("org.example.Mail", "background")
    running, changed = follow_units(disk, OWN, manager, set())
    assert running == {"org.example.Mail", "org.example.Note-book"} and changed == []
    units[0].rmdir()
    running, changed = follow_units(disk, OWN, manager, running)
    assert changed == [] and states(disk) == {"org.example.Mail": "background"}
    units[1].rmdir()
    units[2].rmdir()  # it never asked: there is nothing to remember about it
    running, changed = follow_units(disk, OWN, manager, running)
    assert [(one.name, one.state) for one in changed] == [("org.example.Mail", "killed")]
    assert states(disk) == {"org.example.Mail": "killed"}
    units[0].mkdir()
    running, changed = follow_units(disk, OWN, manager, running)
    assert [(one.name, one.state) for one in changed] == [("org.example.Mail", "foreground")]
    assert follow_units(disk, OWN, manager, running) == (running, [])


def test_the_manager_is_that_of_this_user(manager: Path, tmp_path: Path) -> None:
    assert systemd_manager((str(tmp_path / "none"), str(tmp_path))) == manager
    with pytest.raises(InvalidSetting, match=r"apps watch PID.*PUT /v1/rekindle/apps"):
        systemd_manager((str(tmp_path / "none"),))


def test_the_command_follows_the_units_until_it_is_interrupted(
    disk: DiskStore, manager: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Apps(disk, OWN).set("org.example.Mail", "foreground")
    unit = manager / "app.slice" / MAIL
    unit.mkdir()
    looks = iter([unit.rmdir, lambda: None])

    def sleep(_: float) -> None:
        look = next(looks, None)
        if look is None:
            raise KeyboardInterrupt
        look()

    monkeypatch.setattr(apps_module, "_CGROUPS", (str(tmp_path),))
    monkeypatch.setattr(apps_module.time, "sleep", sleep)
    done = CliRunner().invoke(app, ["apps", "watch", "--systemd", "--folder", str(tmp_path / "c")])
    assert done.stdout.splitlines()[1:] == ["org.example.Mail is killed"]
    assert states(disk) == {"org.example.Mail": "killed"}


def test_without_systemd_the_command_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps_module, "_CGROUPS", (str(tmp_path),))
    done = CliRunner().invoke(app, ["apps", "watch", "--systemd", "--folder", str(tmp_path / "c")])
    assert isinstance(done.exception, InvalidSetting) and "apps watch PID" in str(done.exception)


@pytest.mark.parametrize("arguments", [[], ["1", "--systemd"]])
def test_watch_takes_a_process_or_systemd(tmp_path: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["apps", "watch", *arguments, "--folder", str(tmp_path / "c")])
    assert isinstance(done.exception, InvalidSetting) and "--systemd" in str(done.exception)
