"""Downloading one file: resumable, checked against its digest, with progress."""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from rekindle.addresses import refuse_plain_authorization
from rekindle.errors import DigestMismatch, DownloadFailed, NoSpace
from rekindle.machine import make_private_folder, open_private

Progress = Callable[[str, int, int], None]  # stage, units done, units in all

_ATTEMPTS = 4
_CHUNK_BYTES = 1 << 18
_TIMEOUT = httpx.Timeout(30.0, connect=15.0)


def http_client() -> httpx.Client:
    """An HTTP client that uses the machine's proxies and certificates.

    Its requests raise `InvalidSetting` instead of sending a password over plain http.
    """
    return httpx.Client(
        timeout=_TIMEOUT,
        follow_redirects=True,  # httpx drops the password when a redirect leads elsewhere
        headers={"Accept-Encoding": "identity"},
        event_hooks={"request": [refuse_plain_authorization]},
    )


def split_login(url: str) -> tuple[httpx.URL, httpx.BasicAuth | None]:
    """The URL without its user and password, which no message and no log may print, and what sends these.

    Raises `DownloadFailed`, without the text, if it is no URL: part of a password may be what is wrong.
    """
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        found = httpx.URL("")
    if found.scheme not in ("http", "https") or not found.host:
        raise DownloadFailed(
            "The address of the package index is not a URL that begins with https:// or http:// (PIP_INDEX_URL). "
            "Write special characters of a password as %XX, for example / as %2F."
        )
    login = httpx.BasicAuth(found.username, found.password) if found.userinfo else None
    return found.copy_with(username=None, password=None), login


def download(url: str, target: Path, *, sha256: str, progress: Progress | None = None) -> None:
    """Download `url` to `target`, resuming an earlier attempt (`target` + `.part`).

    Raises `DownloadFailed`, `DigestMismatch` if it is not the pinned file, `NoSpace` if it does not fit.
    """
    address, login = split_login(url)
    shown = address.copy_with(query=None)  # a query may be a signature
    part = target.with_name(target.name + ".part")
    make_private_folder(target.parent)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            _fetch(address, login, part, progress)
            break
        except httpx.HTTPStatusError as error:
            raise DownloadFailed(
                f"{shown} answered {error.response.status_code}. Try later, or set PIP_INDEX_URL to a mirror."
            ) from error
        except httpx.HTTPError as error:
            if attempt == _ATTEMPTS:
                raise DownloadFailed(
                    f"{shown} could not be read ({_say(error)}). Check the network (HTTPS_PROXY, SSL_CERT_FILE) and "
                    "try again; what has arrived is kept."
                ) from error
            time.sleep(0.2 * 2**attempt)
        except OSError as error:
            raise no_space(error, part) from error
    accept(part, target, sha256=sha256, origin=str(shown))


def accept(part: Path, target: Path, *, sha256: str, origin: str) -> None:
    """Move a downloaded file into place if its digest is right; else delete it and raise `DigestMismatch`."""
    digest = _sha256(part)
    if digest != sha256:
        part.unlink()
        raise DigestMismatch(
            f"{origin} is not the file it should be: its SHA-256 is {digest}, pinned is {sha256}. It was thrown away; "
            "try again, and if that repeats, someone between here and there changes files."
        )
    part.replace(target)


def no_space(error: OSError, path: Path) -> NoSpace:
    """The error for a write that the disk refused."""
    if error.errno == errno.ENOSPC:
        free = shutil.disk_usage(path.parent).free
        return NoSpace(f"The disk of {path.parent} is full ({free:,} bytes free). Free some, or set REKINDLE_HOME.")
    return NoSpace(f"{path} cannot be written ({error}). Set REKINDLE_HOME to a folder that can.")


def require_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise `NoSpace` before the work begins, not in the middle of it."""
    make_private_folder(folder)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise NoSpace(
            f"{what} needs {needed_bytes:,} bytes, the disk of {folder} has {free:,} free. "
            "Free some, or set REKINDLE_HOME to a folder on another disk."
        )


def _fetch(url: httpx.URL, login: httpx.BasicAuth | None, part: Path, progress: Progress | None) -> None:
    have = part.stat().st_size if part.is_file() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with http_client() as http, http.stream("GET", url, headers=headers, auth=login) as response:
        if response.status_code == 416:  # nothing left to send: complete, or the file has changed; the digest decides
            return
        response.raise_for_status()
        resumed = response.status_code == 206
        done = have if resumed else 0
        length = int(response.headers.get("Content-Length", 0))
        require_space(part.parent, length, f"The download of {part.stem}")
        with open_private(part, "ab" if resumed else "wb") as file:
            for data in response.iter_bytes(_CHUNK_BYTES):
                file.write(data)
                done += len(data)
                if progress is not None:
                    progress("download", done, (have if resumed else 0) + length)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        state = hashlib.sha256()
        while data := file.read(1 << 20):
            state.update(data)
    return state.hexdigest()


def _say(error: Exception) -> str:
    return str(error) or type(error).__name__
