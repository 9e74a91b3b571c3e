"""The Hugging Face hub: names of its repositories and their files, and downloads through its own client and cache.

A repository has one GGUF file, or one split set, for each quantization:

ORG/NAME              the only one, else Q4_K_M, else Q4_0
ORG/NAME:Q5_K_M       that quantization, in any case
ORG/NAME/FILE.gguf    that file

Files are named by their paths in the repository. The first part of a split model stands for all. The cache (`HF_HOME`)
is shared with other tools, and downloads resume.
"""

from __future__ import annotations

import errno
import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from rekindle.addresses import refuse_plain_http
from rekindle.errors import DownloadFailed, EngineMissing, ModelNotFound, NoSpace, NotAModel
from rekindle.models.files import as_path, part_names

HUB_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?::(?P<quant>[\w.-]+)|/(?P<file>[\w./ +-]+\.(?:gguf|onnx)))?",
    re.IGNORECASE,
)
_DEFAULTS = ("Q4_K_M", "Q4_0")
_QUANT = re.compile(
    r"(?<![a-z0-9])(?:UD-)?(?:[IT]?Q\d(?:_\w+)?|BF16|F16|F32|MXFP4(?:_\w+)?)(?![a-z0-9])", re.IGNORECASE | re.ASCII
)
_NO_MODEL = re.compile(r"mmproj|^imatrix|imatrix$", re.IGNORECASE)


def is_repository(text: str) -> bool:
    """Whether this is a repository's name, `ORG/NAME`, and nothing more."""
    named = HUB_NAME.fullmatch(text)
    return named is not None and named["repository"] == text


def model_names(names: Iterable[str]) -> list[str]:
    """The files that are models, sorted: no vision projectors, no importance matrices."""
    ours = (name for name in names if name.lower().endswith(".gguf"))
    return sorted({_first_part(name) for name in ours if not _NO_MODEL.search(PurePosixPath(_stem(name)).name)})


def choose_file(repository: str, names: Sequence[str], wanted: str | None) -> str | None:
    """The file that `wanted` (a quantization, a file name or None) means among `names`, which are `model_names`.

    None if there is no such file; raises `NotAModel` if there are several.
    """
    if wanted is None:
        preferred = () if len(names) == 1 else _DEFAULTS
        found = next((some for quant in preferred if (some := _of_quant(names, quant))), list(names))
    elif wanted.lower().endswith(".gguf"):
        first = _first_part(wanted)
        found = [name for name in names if name == first] or [name for name in names if name.endswith(f"/{first}")]
    else:
        found = _of_quant(names, wanted)
    if len(found) > 1:
        asked = repository if wanted is None else f"{repository}:{wanted}"
        words = ", ".join(spec_for(repository, name, names) for name in found)
        raise NotAModel(f"{asked} is not one model but {len(found)} GGUF files. Name one: {words}")
    return found[0] if found else None


def spec_for(repository: str, name: str, names: Sequence[str]) -> str:
    """What to type for a file of a repository with these `model_names`."""
    for quant in reversed(_QUANT.findall(_stem(name))):
        if _of_quant(names, quant) == [name]:
            return f"{repository}:{quant}"
    return f"{repository}/{name}"


def _of_quant(names: Iterable[str], quant: str) -> list[str]:
    # Q4_K is not Q4_K_M, and F16 is not BF16.
    whole = re.compile(rf"(?<![a-z0-9]){re.escape(quant)}(?!\w)", re.IGNORECASE | re.ASCII)
    return [name for name in names if whole.search(_stem(name))]


def _first_part(name: str) -> str:
    return part_names(name)[0]


def _stem(name: str) -> str:
    """The name without part number and suffix."""
    return re.sub(r"-00001-of-\d{5}$", "", _first_part(name)[: -len(".gguf")])


def hub_cache() -> Path:
    """The cache folder of the hub's client, by its own rules."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if chosen := os.environ.get(name):
            return as_path(chosen)
    if home := os.environ.get("HF_HOME"):
        return as_path(home) / "hub"
    return as_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


_FOLDER_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def fetch_folder(repository: str) -> Path:
    """Fetch a model in Hugging Face form; the caller checks that it is one.

    This and the other functions here raise `ModelNotFound`, `DownloadFailed`, `NoSpace`, and `EngineMissing` without
    the hub's client.
    """
    with _client_errors(repository):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, allow_patterns=_FOLDER_FILES))


def list_files(repository: str) -> list[str]:
    """All files of a repository."""
    with _client_errors(repository):
        from huggingface_hub import model_info  # its other calls retry for half a minute without a network

        names = [file.rfilename for file in model_info(repository).siblings or []]
    return [name for name in names if ".." not in PurePosixPath(name).parts]


def fetch_files(repository: str, names: Sequence[str]) -> Path:
    """Fetch these files; returns the folder they are in."""
    with _client_errors(repository):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repository, allow_patterns=[glob.escape(name) for name in names]))


def _refuse_plain_token() -> None:
    """Raise `InvalidSetting` if the client would send the user's token over plain http."""
    from huggingface_hub import constants, get_token

    if not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN and get_token() is not None:
        endpoint = urlsplit(constants.ENDPOINT)
        what = "HF_ENDPOINT: your token of the hub (HF_HUB_DISABLE_IMPLICIT_TOKEN=1 goes without it)"
        refuse_plain_http(endpoint.scheme, endpoint.hostname or "", what)


@contextmanager
def _client_errors(repository: str) -> Iterator[None]:
    """Turn the client's errors into ours."""
    import httpx  # takes a tenth of a second, which commands that fetch nothing do not wait for

    try:
        from huggingface_hub import errors as hub
    except ImportError as error:
        raise EngineMissing("Models of the Hugging Face hub need its client: pip install 'rekindle-llm[hf]'") from error
    _refuse_plain_token()
    try:
        yield
    except hub.GatedRepoError as error:
        raise DownloadFailed(
            f"{repository} is gated: accept its terms on its page, then log in with: hf auth login"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"The hub has no {repository} (or it is private: hf auth login). Check the spelling."
        ) from error
    # hub.HTTPError: the root of what its HTTP library raises, which is not always httpx
    except (hub.LocalEntryNotFoundError, hub.HfHubHTTPError, hub.HTTPError, httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise NoSpace(
                f"The disk of {hub_cache()} is too full for {repository}. Free some, or set HF_HOME to another disk."
            ) from error
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DownloadFailed(
            f"{repository} could not be fetched from the hub ({reason}). Check the network; what has arrived is kept."
        ) from error
