"""Files with keys and tokens: only regular ones of bounded size, and only those that nobody else can read."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.cli.cache import open_cache
from rekindle.cli.origin import _read_tokens
from rekindle.cli.server import _read_keys
from rekindle.codec.cipher import read_secret
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey, make_secret, make_signing_key, read_public
from rekindle.safe_read import read_secret_file, read_small_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes of files mean nothing there")

SHARED = [0o644, 0o640, 0o604, 0o444, 0o660, 0o620, 0o602, 0o777, 0o601]
PRIVATE = [0o600, 0o400, 0o700]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "a key"
    path.write_bytes(b"ab" * 32)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", SHARED)
def test_a_secret_that_others_can_reach_is_refused_with_what_to_do(mode: int, key: Path) -> None:
    key.chmod(mode)
    with pytest.raises(InvalidSetting) as raised:
        read_secret_file(key, "The key file")
    assert str(raised.value) == (
        f"The key file {key} can be read by other users (mode {mode:04o}, owner {os.geteuid()}), so it is refused. "
        f"Make it yours alone: chmod 600 '{key}'"
    )


@pytest.mark.parametrize("mode", PRIVATE)
def test_a_secret_of_ours_alone_is_read(mode: int, key: Path) -> None:
    key.chmod(mode)
    assert read_secret_file(key, "The key file") == b"ab" * 32
    link = key.with_name("link")
    link.symlink_to(key)
    assert read_secret_file(link, "The key file") == b"ab" * 32


def test_a_secret_of_another_user_is_refused_and_one_of_root_is_not(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        assert read_secret_file(key, "The key file")  # root's
        os.chown(key, 4712, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(InvalidSetting, match="other users .*chown 4711 .* && chmod 600 "):
        read_secret_file(key, "The key file")


def test_the_credentials_of_a_systemd_service_may_be_open_to_their_group(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As systemd makes them for another user: root's, 0440, with an ACL for that user."""
    key.chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "elsewhere"))
    with pytest.raises(InvalidSetting, match="other users"):
        read_secret_file(key, "The key file")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_secret_file(key, "The key file")
    key.chmod(0o444)
    with pytest.raises(InvalidSetting, match="other users"):
        read_secret_file(key, "The key file")


def test_only_regular_files_of_bounded_size_are_read(key: Path, tmp_path: Path) -> None:
    fifo, huge = tmp_path / "fifo", tmp_path / "huge"
    os.mkfifo(fifo, 0o600)
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    huge.chmod(0o600)
    for path in (fifo, tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_small_file(path, 100)
        with pytest.raises(InvalidSetting, match="not a regular file"):
            read_secret_file(path, "The key file")
    with pytest.raises(InvalidSetting, match="more than 1,048,576 bytes"):
        read_secret_file(huge, "The key file")
    assert len(read_small_file(key, 64)) == 64
    with pytest.raises(OSError, match="more than 63 bytes"):
        read_small_file(key, 63)
    with pytest.raises(InvalidSetting, match="cannot be read"):
        read_secret_file(Path("~nobody-of-this-name/key"), "The key file")


READERS: dict[str, Callable[[Path], object]] = {
    "key_file": lambda path: Session(FakeEngine(), cache=path.parent / "cache", key_file=path),
    "cache commands": lambda path: open_cache(_cache(path.parent), path).__enter__(),
    "origin_token": lambda path: _with_origin(path, origin_token=path),
    "origin_secret": lambda path: _with_origin(path, origin_secret=path),
    "signing key": SigningKey.read,
    "secret": read_secret,
    "api keys": lambda path: _read_keys(str(path), "REKINDLE_API_KEYS"),
    "tokens": _read_tokens,
    "tls": lambda path: OriginServer(path.parent, OriginSettings(port=0, tls_cert=path, tls_key=path)),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_of_a_secret_refuses_one_that_others_can_read(reader: str, key: Path) -> None:
    key.chmod(0o644)
    with pytest.raises(InvalidSetting, match="can be read by other users.*chmod 600"):
        READERS[reader](key)


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_of_a_secret_waits_for_a_fifo(reader: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(InvalidSetting, match="not a regular file"):
        READERS[reader](tmp_path / "fifo")


def test_what_we_write_we_read(tmp_path: Path) -> None:
    made = make_signing_key(tmp_path / "publisher")
    assert SigningKey.read(tmp_path / "publisher").public == made.public
    assert read_public(str(tmp_path / "publisher.pub")) == made.public  # which everybody may read
    assert make_secret(tmp_path / "secret").key == read_secret(tmp_path / "secret").key


def _cache(folder: Path) -> Path:
    with Session(FakeEngine(), cache=folder / "cache") as session:
        session.generate("Hello", max_tokens=1)
    return folder / "cache"


def _with_origin(path: Path, **secrets: Path) -> Session:
    place = {"origin": "http://127.0.0.1:1", "origin_keys": "ab" * 32}
    return Session(FakeEngine(), cache=path.parent / "cache", **place, **secrets)  # type: ignore[arg-type]
