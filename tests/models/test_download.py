"""Downloads: resumed after a break, checked to the last byte, and every way to fail has its sentence."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.errors import DigestMismatch, DownloadFailed, NoSpace
from rekindle.models import download as module
from rekindle.models.download import download
from tests.models.server import Served, serving

BODY = os.urandom(700_000)
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as server:
        server.pages["/file"] = ("application/octet-stream", BODY)
        yield server


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)


def test_the_file_arrives_with_progress(served: Served, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    download(f"{served.url}/file", tmp_path / "f", sha256=SHA256, progress=lambda *what: told.append(what))
    assert (tmp_path / "f").read_bytes() == BODY
    assert told[-1] == ("download", len(BODY), len(BODY))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_a_broken_download_is_resumed_within_one_call(served: Served, tmp_path: Path) -> None:
    served.cut_after = [300_000, 100_000]
    told: list[int] = []
    download(f"{served.url}/file", tmp_path / "f", sha256=SHA256, progress=lambda what, done, total: told.append(total))
    assert (tmp_path / "f").read_bytes() == BODY
    assert served.requests[0] == ("/file", None)
    assert all(wanted is not None for _, wanted in served.requests[1:])
    assert set(told) == {len(BODY)}


def test_a_later_call_goes_on_where_an_earlier_one_stopped(served: Served, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(BODY[:500_000])
    download(f"{served.url}/file", tmp_path / "f", sha256=SHA256)
    assert served.requests == [("/file", "bytes=500000-")]
    assert (tmp_path / "f").read_bytes() == BODY
    assert not (tmp_path / "f.part").exists()


def test_a_complete_part_needs_no_more_bytes(served: Served, tmp_path: Path) -> None:
    (tmp_path / "f.part").write_bytes(BODY)
    download(f"{served.url}/file", tmp_path / "f", sha256=SHA256)
    assert (tmp_path / "f").read_bytes() == BODY


def test_a_server_without_ranges_starts_over(served: Served, tmp_path: Path) -> None:
    served.ranges = False
    (tmp_path / "f.part").write_bytes(BODY[:500_000])
    download(f"{served.url}/file", tmp_path / "f", sha256=SHA256)
    assert (tmp_path / "f").read_bytes() == BODY


def test_the_wrong_file_is_thrown_away(served: Served, tmp_path: Path) -> None:
    served.pages["/file"] = ("application/octet-stream", BODY[:-1] + b"x")
    with pytest.raises(DigestMismatch, match="pinned is " + SHA256):
        download(f"{served.url}/file", tmp_path / "f", sha256=SHA256)
    assert list(tmp_path.glob("f*")) == []


def test_a_missing_page_is_named(served: Served, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="answered 404"):
        download(f"{served.url}/other", tmp_path / "f", sha256=SHA256)
    assert len(served.requests) == 1


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="Check the network"):
        download("http://127.0.0.1:9/file", tmp_path / "f", sha256=SHA256)


def test_what_has_arrived_is_kept_when_the_network_goes(served: Served, tmp_path: Path) -> None:
    served.cut_after = [300_000, 0, 0, 0]
    with pytest.raises(DownloadFailed, match="what has arrived is kept"):
        download(f"{served.url}/file", tmp_path / "f", sha256=SHA256)
    assert 0 < (tmp_path / "f.part").stat().st_size <= 300_000
    download(f"{served.url}/file", tmp_path / "f", sha256=SHA256)
    assert (tmp_path / "f").read_bytes() == BODY


def test_a_disk_too_small_is_told_before_the_first_byte(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(NoSpace, match="700,000 bytes.*1,000 free"):
        download(f"{served.url}/file", tmp_path / "f", sha256=SHA256)


def test_a_disk_that_fills_up_is_told(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_fetch", full)
    with pytest.raises(NoSpace, match="is full"):
        download(f"{served.url}/file", tmp_path / "f", sha256=SHA256)
