"""The Hugging Face hub, through its own client and cache (`HF_HOME`): resumable, shared with other tools."""

from __future__ import annotations

import errno
import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import httpx

from rekindle.addresses import refuse_plain_http
from rekindle.errors import DownloadFailed, EngineMissing, ModelNotFound, NoSpace
from rekindle.models.other_tools import hub_cache

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
    try:
        from huggingface_hub import errors as hub
    except ImportError as error:
        raise EngineMissing("Models of the Hugging Face hub need its client: pip install 'rekindle[hf]'") from error
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
