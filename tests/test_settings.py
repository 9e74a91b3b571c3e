"""Settings: where they come from, which source wins, and what is refused in which words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from rekindle.cli.options import loading_options, server_options, serving_options, settings_options, takes
from rekindle.errors import InvalidSetting
from rekindle.machine import config_folder
from rekindle.settings import GONE, GROUPS, SETTINGS, ServerSettings, Settings, names_in, warn_once

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"
NAMES = list(Settings.__annotations__)


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, where the user's own rekindle.toml would be."""
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "rekindle"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


def refusal(load: Callable[[], object]) -> str:
    with pytest.raises(InvalidSetting) as raised:
        load()
    return str(raised.value)


# --- sources


def test_without_any_source_the_defaults_hold() -> None:
    assert Settings.load() == Settings.load({}, environment={}) == Settings()


def test_a_flag_beats_the_environment_and_the_environment_beats_the_file(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_folder / "rekindle.toml").write_bytes(b'tenant = "file"\npolicy = "file"\ndevice = "file"\n')
    monkeypatch.setenv("REKINDLE_TENANT", "environment")
    monkeypatch.setenv("REKINDLE_POLICY", "environment")
    assert Settings.load({"tenant": "flag"}) == Settings(tenant="flag", policy="environment", device="file")


def test_none_and_empty_variables_count_as_not_given(own_folder: Path) -> None:
    (own_folder / "rekindle.toml").write_bytes(b'cache = "off"\ntenant = "file"\n')
    settings = Settings.load({"cache": None}, environment={"REKINDLE_TENANT": "", "REKINDLE_UNHEARD_OF": ""})
    assert settings == Settings(cache="off", tenant="file")


def test_the_word_none_overrules_a_weaker_source(own_folder: Path) -> None:
    (own_folder / "rekindle.toml").write_bytes(b'cache = "off"\nttl = "7d"\ncontext = 9\n')
    settings = Settings.load({"cache": "none"}, environment={"REKINDLE_TTL": "None"})
    assert settings == Settings(context=9)


def test_the_file_is_the_named_one_else_the_users_own(
    own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, argument = tmp_path / "named.toml", tmp_path / "argument.toml"
    (own_folder / "rekindle.toml").write_text('context = 1\ntenant = "me"')
    assert Settings.load() == Settings(context=1, tenant="me")
    named.write_text("context = 3")
    monkeypatch.setenv("REKINDLE_CONFIG", str(named))
    assert Settings.load() == Settings(context=3)
    argument.write_text("context = 4")
    assert Settings.load(file=argument).context == 4


def test_the_users_folder_follows_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert config_folder() == tmp_path / ".config" / "rekindle"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("APPDATA", str(tmp_path / "roaming"))
    assert config_folder() == tmp_path / "roaming" / "rekindle"


def test_a_user_without_a_home_has_no_file_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert config_folder() is None
    assert Settings.load() == Settings()


def test_a_folder_that_may_not_be_entered_holds_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", locked)
    assert Settings.load() == Settings()


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Settings.load().tenant = "other"  # type: ignore[misc]


# --- unknown names


def test_an_unknown_name_is_refused_with_the_nearest_one(own_folder: Path) -> None:
    said = refusal(lambda: Settings.load({"memory_limt": "1GB"}))
    assert said == "Unknown argument 'memory_limt'. Did you mean 'memory_limit'?"
    said = refusal(lambda: Settings.load(environment={"REKINDLE_DISK_LIMITS": "1GB"}))
    assert said == "Unknown variable 'REKINDLE_DISK_LIMITS'. Did you mean 'REKINDLE_DISK_LIMIT'?"
    (own_folder / "rekindle.toml").write_text('polciy = "lru"')
    assert refusal(Settings.load) == f"Unknown key in {own_folder}/rekindle.toml: 'polciy'. Did you mean 'policy'?"
    (own_folder / "rekindle.toml").write_text('[store]\npolicy = "lru"')
    assert refusal(Settings.load).startswith(f"Unknown key in {own_folder}/rekindle.toml: 'store'.")
    assert "cache_salt" in refusal(lambda: Settings.load({"zzz": None}))  # nothing is near: all are named


@pytest.mark.parametrize("where", ["file", "variable", "argument"])
def test_a_setting_that_is_gone_has_no_effect_and_is_named_once_a_process(
    where: str, own_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    if where == "file":
        (own_folder / "rekindle.toml").write_text("idle_tflop = 5.0\nidle_seconds = 60")
    given = {"idle_tflop": 5.0, "idle_seconds": 60} if where == "argument" else {}
    variables = {"REKINDLE_IDLE_TFLOP": "5", "REKINDLE_IDLE_SECONDS": "60"} if where == "variable" else {}
    for _ in range(2):
        assert ServerSettings.load(given, environment=variables) == ServerSettings(idle_seconds="60")
        Settings.load(environment=variables)
    assert caplog.messages == [GONE["idle_tflop"]]
    assert not GONE.keys() & SETTINGS.keys()
    assert all(name in sentence and "idle_seconds" in sentence for name, sentence in GONE.items())


def test_what_is_gone_and_not_given_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    assert ServerSettings.load({"idle_joules": None}) == ServerSettings() and not caplog.messages


def test_the_variables_of_folders_are_known() -> None:
    assert (
        Settings.load(environment={"REKINDLE_HOME": "/home", "PATH": "/bin", "_REKINDLE_COMPLETE": "x"}) == Settings()
    )


# --- values


def test_a_value_is_read_as_the_type_of_its_setting(own_folder: Path) -> None:
    words = {"true": True, "1": True, "Yes": True, "on": True, "FALSE": False, "0": False, "no": False, "off": False}
    for word, value in words.items():
        assert Settings.load(environment={"REKINDLE_DETERMINISTIC": word}).deterministic is value
    assert Settings.load(environment={"REKINDLE_CONTEXT": "4096"}).context == 4096
    assert Settings.load(environment={"REKINDLE_REUSE": "off"}).reuse == "off"
    (own_folder / "rekindle.toml").write_bytes("\ufeffdeterministic = true\r\nmemory_limit = 1000\r\n".encode())
    assert Settings.load() == Settings(deterministic=True, memory_limit="1000")
    assert Settings.load({"tiers": "memory>disk >redis"}).tiers == "memory > disk > redis"
    numbers = Settings.load({"disk_limit": 5, "write_budget": 6, "ttl": 7})
    assert (numbers.disk_limit, numbers.write_budget, numbers.ttl) == ("5", "6", "7")


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("engine", 1, "auto, hf, llamacpp or onnx"),
        ("tenant", "", "a text"),
        ("context", 1.5, "a whole number, or none"),
        ("context", True, "a whole number, or none"),
        ("context", "many", "a whole number, or none"),
        ("cache", False, "the path of a folder, or off, or none"),
        ("cache", "", "the path of a folder, or off, or none"),
        ("cache", "~nobody-of-this-name/kv", "the path of a folder, or off, or none"),
        ("key_file", 7, "the path of a file, or none"),
        ("reuse", "some", "exact, quantized, approximate or off"),
        ("reuse", False, "exact, quantized, approximate or off"),
        ("admission", "never", "always or second-use"),
        ("memory_limit", True, "a size (512MB, 10%)"),
        (
            "tiers",
            "disk > memory",
            "memory > disk or memory > disk > redis or memory > disk > s3 or memory > disk > redis > s3",
        ),
        ("write_budget", 1.5, "a size (40GB), or none"),
        ("ttl", ["7d"], "a time (12h, 7d), or none"),
        ("deterministic", "maybe", "true or false"),
        ("deterministic", 2, "true or false"),
    ],
)
def test_a_wrong_value_is_refused_in_words_that_name_its_source(
    name: str, value: Any, right: str, own_folder: Path
) -> None:
    assert refusal(lambda: Settings.load({name: value})) == f"The argument {name} is {value!r}. Use {right}."
    (own_folder / "rekindle.toml").write_bytes(f"{name} = {json.dumps(value)}".encode())
    stated = refusal(Settings.load)
    assert stated == f"{name} in {own_folder}/rekindle.toml is {value!r}. Use {right}."
    (own_folder / "rekindle.toml").unlink()
    variable = SETTINGS[name].variable
    if isinstance(value, str) and value:
        said = refusal(lambda: Settings.load(environment={variable: value}))
        assert said == f"The variable {variable} is {value!r}. Use {right}."


def test_a_wrong_value_is_refused_even_where_it_is_overruled(own_folder: Path) -> None:
    (own_folder / "rekindle.toml").write_text('context = "many"')
    assert f"context in {own_folder}/rekindle.toml" in refusal(lambda: Settings.load({"context": 5}))


def test_a_file_that_cannot_be_read_is_named(own_folder: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    said = refusal(lambda: Settings.load(environment={"REKINDLE_CONFIG": str(missing)}))
    assert str(missing) in said and "REKINDLE_CONFIG" in said
    assert str(missing) in refusal(lambda: Settings.load(file=missing))
    file = own_folder / "rekindle.toml"
    file.write_text('tenant = "me"\ncontext = \n')
    assert re.search(r"rekindle.toml is not TOML: .*line 2", refusal(Settings.load))
    file.write_bytes(b'tenant = "\xff"')
    assert "rekindle.toml is not UTF-8 text: byte 10." in refusal(Settings.load)
    file.unlink()
    file.mkdir()
    assert "rekindle.toml cannot be read" in refusal(Settings.load)


# --- the server's


def test_the_server_has_the_same_sources(own_folder: Path) -> None:
    lines = ["port = 1", "timeout = 90", 'cors_origin = ["http://a", "http://b"]', "context = 7"]
    (own_folder / "rekindle.toml").write_text("\n".join(lines))
    environment = {"REKINDLE_PORT": "2", "REKINDLE_ALLOWED_HOSTS": "one.example, two.example", "REKINDLE_TENANT": "me"}
    found = ServerSettings.load({"queue": 3}, environment=environment)
    assert found == ServerSettings(
        port=2,
        queue=3,
        timeout="90",
        cors_origin=("http://a", "http://b"),
        allowed_hosts=("one.example", "two.example"),
    )
    assert Settings.load(environment=environment) == Settings(context=7, tenant="me")


def test_each_takes_only_its_own_arguments_and_refuses_wrong_values_of_both() -> None:
    assert refusal(lambda: Settings.load({"port": 1})).startswith("Unknown argument 'port'.")
    assert refusal(lambda: ServerSettings.load({"context": 1})).startswith("Unknown argument 'context'.")
    for load in (Settings.load, ServerSettings.load):
        said = refusal(lambda load=load: load(environment={"REKINDLE_PORT": "http"}))
        assert said == "The variable REKINDLE_PORT is 'http'. Use a whole number."
    assert ServerSettings.load({"allowed_hosts": ["a,b", "c"]}).allowed_hosts == ("a", "b", "c")
    assert refusal(lambda: ServerSettings.load({"cors_origin": [1]})).endswith("Use texts, with commas between.")


# --- paths


def test_paths_in_a_file_start_from_its_folder(tmp_path: Path, own_folder: Path) -> None:
    file = tmp_path / "elsewhere" / "rekindle.toml"
    file.parent.mkdir()
    file.write_text('cache = "kv"\nkey_file = "../key"')
    expected = Settings(cache=str(file.parent / "kv"), key_file=str(file.parent / "../key"))
    assert Settings.load(file=file) == expected
    assert Settings.load(environment={"REKINDLE_CONFIG": os.path.relpath(file)}) == Settings(
        cache=str(own_folder / "../../elsewhere/kv"), key_file=str(own_folder / "../../elsewhere/../key")
    )
    file.write_text('cache = "off"')
    assert Settings.load(file=file) == Settings(cache="off")


def test_other_paths_stay_as_they_are() -> None:
    settings = Settings.load({"cache": Path("kv")}, environment={"REKINDLE_KEY_FILE": "key"})
    assert settings == Settings(cache="kv", key_file="key")


def test_a_tilde_is_the_home_everywhere(own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    expected = Settings(cache=str(tmp_path / "kv"))
    assert Settings.load({"cache": "~/kv"}) == Settings.load(environment={"REKINDLE_CACHE": "~/kv"}) == expected
    (own_folder / "rekindle.toml").write_bytes(b'cache = "~/kv"')
    assert Settings.load() == expected


# --- round trips

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda text: text.strip().lower() != "none"
)
PATHS = TEXT.map(lambda text: str(Path(Path.cwd().anchor, text.replace("/", "_"))))
ANY = st.builds(
    Settings,
    engine=st.sampled_from(["auto", "hf", "llamacpp", "onnx"]),
    device=TEXT,
    dtype=TEXT,
    context=st.none() | st.integers(),
    threads=st.none() | st.integers(),
    gpu_layers=st.none() | st.integers(),
    flash_attention=st.sampled_from(["auto", "on", "off"]),
    kv_type=TEXT,
    kv_tokens=st.none() | st.integers(),
    batch_tokens=st.integers(),
    micro_batch_tokens=st.integers(),
    keep_alive=st.none() | TEXT,
    cache=st.none() | st.just("off") | PATHS,
    reuse=st.sampled_from(["exact", "off"]),
    memory_limit=TEXT,
    disk_limit=TEXT,
    policy=TEXT,
    ttl=st.none() | TEXT,
    admission=st.sampled_from(["always", "second-use"]),
    write_budget=st.none() | TEXT,
    key_file=st.none() | PATHS,
    tenant=TEXT,
    cache_salt=st.just("") | TEXT,
    deterministic=st.booleans(),
    keep_reply_tokens=st.booleans(),
)


def _given(settings: Settings, name: str) -> object:
    """A value as it is given: None would count as not given where it is not the default."""
    value = getattr(settings, name)
    return "none" if value is None and SETTINGS[name].default is not None else value


@given(ANY)
def test_any_settings_come_back_from_arguments_and_from_the_environment(settings: Settings) -> None:
    values = {name: _given(settings, name) for name in NAMES}
    assert Settings.load(values, environment={}) == settings
    assert (
        Settings.load(environment={SETTINGS[name].variable: str(value) for name, value in values.items()}) == settings
    )


@given(ANY)
def test_any_settings_come_back_from_a_file(settings: Settings) -> None:
    values = {name: _given(settings, name) for name in NAMES if _given(settings, name) is not None}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "any.toml"
        file.write_text("\n".join(lines), "utf-8")
        assert Settings.load(environment={}, file=file) == settings


# --- documents and flags


def test_every_setting_is_documented() -> None:
    page = PAGE.read_text("utf-8")
    for name, setting in SETTINGS.items():
        assert setting.doc.endswith("."), name
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"`{setting.variable}`" in row and setting.doc in row
    assert {setting.group for setting in SETTINGS.values()} == set(GROUPS)


def test_the_example_of_the_reference_is_right(own_folder: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (own_folder / "rekindle.toml").write_bytes(example.encode())
    assert Settings.load().cache == str(own_folder / "kv")


def test_flags_give_only_what_was_said() -> None:
    seen: list[dict[str, Any]] = []
    app = typer.Typer()

    @app.command()
    @takes(loading=loading_options)
    def command(loading: dict[str, Any]) -> None:
        seen.append(loading)

    def said(*flags: str) -> dict[str, Any]:
        assert CliRunner().invoke(app, flags).exit_code == 0
        return seen.pop()

    assert said() == {}
    assert said("--context", "9", "--cache-salt", "", "--no-deterministic", "--keep-reply-tokens") == {
        "context": 9,
        "cache_salt": "",
        "deterministic": False,
        "keep_reply_tokens": True,
    }
    texts = [n for n in signature(loading_options).parameters if SETTINGS[n].type is str]
    for name in texts:
        assert said(f"--{name.replace('_', '-')}", "x") == {name: "x"}
    assert len(texts) > 16


def test_every_setting_is_a_flag_and_its_help_says_the_same() -> None:
    app = typer.Typer(rich_markup_mode=None)
    groups = {"loading": loading_options, "serving": serving_options, "server": server_options}
    groups["commands"] = settings_options(names_in("commands"))
    app.command()(takes(**groups)(lambda loading, serving, server, commands: None))
    options = {option.name: option for option in typer.main.get_command(app).params}  # type: ignore[attr-defined]
    for name, setting in SETTINGS.items():
        assert options[name].help == setting.doc and setting.flag in options[name].opts
    told = CliRunner().invoke(app, ["--help"]).output
    assert "exact|quantized|approximate|off" in told and "default: (8377)" in told


def test_reading_settings_loads_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "typer", "rich", "httpx", "rekindle.core", "rekindle.store")
    code = f"import sys, rekindle.settings; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"[]\n"
