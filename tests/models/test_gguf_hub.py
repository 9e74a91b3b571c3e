"""GGUF files fetched from the hub: only what is wanted, once, and every failure has its sentence."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import BrokenModel, DownloadFailed, ModelNotFound, NoSpace, NotAModel
from rekindle.models import registry
from rekindle.models.pull import obtain, pull
from rekindle.models.sources import find
from tests.models.ggufs import Hub


def test_only_the_wanted_file_is_fetched_and_only_once(hub: Hub) -> None:
    hub.publish("org/name", "README.md", "config.json", "a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-F16.gguf")
    entry = pull("org/name:q8_0")
    assert hub.asked == ["list org/name", "a-Q8_0.gguf"]
    assert (
        entry.name == "org/name:Q8_0" and entry.kind == "decoder" and entry.source == "hub org/name" and entry.in_place
    )
    assert pull("org/name:Q8_0") == entry and obtain("org/name:q8_0") == find("org/name") == entry.files
    assert len(hub.asked) == 2
    assert [e.name for e in registry.entries()] == ["org/name:Q8_0"] and registry.lookup("org/name:Q8_0") == entry
    registry.remove("org/name:Q8_0")
    assert entry.files.gguf is not None and entry.files.gguf.is_file() and registry.entries() == []


def test_a_repository_that_has_only_gguf_gives_the_default(hub: Hub) -> None:
    hub.publish("org/name", "config.json", "a-Q4_K_M.gguf", "a-Q8_0.gguf")
    files = obtain("org/name")
    assert files.gguf is not None and files.gguf.name == "a-Q4_K_M.gguf"
    assert hub.asked == ["config.json", "list org/name", "a-Q4_K_M.gguf"]
    assert obtain("org/name") == files == obtain("org/name", form="gguf") and len(hub.asked) == 3
    hub.publish("org/bare", "a-Q4_K_M.gguf")
    assert obtain("org/bare").name == "org/bare:Q4_K_M"


def test_all_parts_are_fetched(hub: Hub) -> None:
    parts = [f"Q4_0/a-Q4_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    hub.publish("org/name", *parts, "a-Q8_0.gguf")
    files = obtain("org/name:Q4_0")
    assert hub.asked[1:] == parts and len(files.parts) == 3
    files.parts[1].unlink()
    with pytest.raises(BrokenModel, match="rekindle pull org/name:Q4_0"):
        find("org/name:Q4_0")
    assert pull("org/name:Q4_0").files == find("org/name:Q4_0")


def test_a_file_is_fetched_by_its_name(hub: Hub) -> None:
    hub.publish("org/name", "a/x.gguf", "b/x.gguf", "c+[1].gguf", "c+1.gguf")
    with pytest.raises(NotAModel, match="Name one: org/name/a/x.gguf, org/name/b/x.gguf"):
        pull("org/name/x.gguf")
    assert obtain("org/name/b/x.gguf").name == "org/name/b/x.gguf"
    assert obtain("org/name/c+1.gguf").name == "org/name/c+1.gguf"
    assert [name for name in hub.asked if not name.startswith("list")] == ["b/x.gguf", "c+1.gguf"]


def test_folder_form_is_fetched_unless_gguf_is_asked_for(hub: Hub, tiny_folder: Path) -> None:
    names = sorted(path.name for path in tiny_folder.iterdir())
    hub.publish("org/both", *names, "a-Q8_0.gguf")
    assert obtain("org/both", form="gguf").name == "org/both:Q8_0"
    assert hub.asked == ["list org/both", "a-Q8_0.gguf"]
    hub.publish("org/both2", *names, "a-Q8_0.gguf")
    assert obtain("org/both2").gguf is None and obtain("org/both2").converted


def test_a_repository_without_gguf_is_told_before_anything_is_fetched(hub: Hub, tiny_folder: Path) -> None:
    hub.publish("org/name", *(path.name for path in tiny_folder.iterdir()))
    with pytest.raises(NotAModel, match=r"has no GGUF files, and llama.cpp needs one.*org/name-GGUF.*engine='hf'"):
        obtain("org/name", form="gguf")
    assert hub.asked == ["list org/name"]
    hub.publish("org/pickles", "config.json", "pytorch_model.bin")
    with pytest.raises(NotAModel, match="no weights"):
        obtain("org/pickles")


def test_what_the_hub_has_is_told_when_another_is_wanted(hub: Hub) -> None:
    hub.publish("org/name", "a-Q4_K_S.gguf", "a-Q8_0.gguf")
    with pytest.raises(ModelNotFound) as caught:
        pull("org/name:Q2_K")
    assert str(caught.value) == "org/name has no GGUF file Q2_K. It has: org/name:Q4_K_S, org/name:Q8_0"
    with pytest.raises(NotAModel, match="Name one: org/name:Q4_K_S, org/name:Q8_0"):
        pull("org/name")


def test_names_that_lead_out_of_a_repository_are_not_seen(hub: Hub) -> None:
    hub.publish("org/name", "../../a-Q4_0.gguf", "b-Q8_0.gguf")
    assert obtain("org/name", form="gguf").name == "org/name:Q8_0"


def test_every_failure_of_the_hub_is_told(hub: Hub) -> None:
    from httpx import Request, Response
    from huggingface_hub import errors

    class Timeout(errors.HTTPError):
        """What the client's HTTP library raises."""

    def answer(kind: type[Exception]) -> Callable[[], Exception]:
        return lambda: kind("words", response=Response(404, request=Request("GET", "http://hub")))

    cases: list[tuple[Callable[[], Exception], type[Exception], str]] = [
        (answer(errors.GatedRepoError), DownloadFailed, "is gated: accept its terms"),
        (answer(errors.RepositoryNotFoundError), ModelNotFound, "The hub has no org/name"),
        (answer(errors.HfHubHTTPError), DownloadFailed, r"could not be fetched from the hub \(words\)"),
        (lambda: Timeout(""), DownloadFailed, r"\(Timeout\). Check the network; what has arrived is kept"),
        (lambda: OSError(errno.ENOSPC, "full"), NoSpace, "too full for org/name. Free some, or set HF_HOME"),
        (lambda: ConnectionError("refused"), DownloadFailed, "refused"),
    ]
    for hub.failure, kind, sentence in cases:
        for spec in ("org/name", "org/name:Q4_0"):
            with pytest.raises(kind, match=sentence):
                pull(spec)


@pytest.mark.thorough
def test_an_unreachable_hub_is_told_by_the_real_client(tmp_path: Path) -> None:
    env = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path / "hf"),
        "REKINDLE_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-m", "rekindle", "pull", "some/model:Q4_0"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "some/model could not be fetched from the hub" in done.stderr and "Traceback" not in done.stderr


def test_a_mistyped_path_is_told_as_such(hub: Hub) -> None:
    from httpx import Request, Response
    from huggingface_hub.errors import RepositoryNotFoundError

    hub.failure = lambda: RepositoryNotFoundError("x", response=Response(404, request=Request("GET", "http://hub")))
    with pytest.raises(ModelNotFound, match="There is no file models/llama/x.gguf here. The hub has no models/llama"):
        obtain("models/llama/x.gguf")
