"""The one form of tar that is read."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from rekindle.store.archive import TarReader, header_of, member_info, tar_writer


def write(path: Path, members: dict[str, bytes]) -> Path:
    with path.open("wb") as file, tar_writer(file) as tar:
        for name, data in members.items():
            tar.addfile(member_info(name, len(data)), io.BytesIO(data))
    return path


def test_what_is_written_is_read_and_other_tools_read_it_too(tmp_path: Path) -> None:
    members = {"a": b"", "extents/b.kv": b"x" * 513, "c": bytes(512)}
    path = write(tmp_path / "a.tar", members)
    with path.open("rb", buffering=0) as file:
        reader = TarReader(file)
        found = [reader.next() for _ in members]
        assert {one.name: reader.read(one, 1000) for one in found} == members
        reader.check_end()
        with pytest.raises(ValueError, match="more than"):
            reader.read(found[1], 512)
    with tarfile.open(path) as tar:
        assert [info.name for info in tar] == list(members)


@pytest.mark.parametrize("size_bytes", [0, 1, 8**11 - 1, 8**11, 9 << 30])
def test_a_header_is_what_other_tools_write(size_bytes: int) -> None:
    info = tarfile.TarInfo("extents/x.kv")
    info.size, info.mode = size_bytes, 0o600
    assert header_of("extents/x.kv", size_bytes) == info.tobuf(tarfile.GNU_FORMAT)


def test_a_member_may_be_larger_than_octal_digits_can_say(tmp_path: Path) -> None:
    size_bytes = 9 << 30
    with (tmp_path / "a.tar").open("w+b", buffering=0) as file:
        file.write(header_of("large", size_bytes))
        file.truncate(512 + size_bytes + 1024)  # a hole: it takes no room
        reader = TarReader(file)
        assert len(reader.next().data) == size_bytes
        reader.check_end()


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.AREGTYPE]
)
def test_links_folders_and_devices_are_no_members(tmp_path: Path, form: int, kind: bytes) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.linkname = kind, "/etc/passwd"
    (tmp_path / "a.tar").write_bytes(info.tobuf(form) + bytes(10240))
    with (tmp_path / "a.tar").open("rb", buffering=0) as file, pytest.raises(ValueError, match="plain file"):
        TarReader(file).next()


@pytest.mark.parametrize("end", [b"", bytes(512), bytes(1024) + b"x" * 512, bytes(1 << 20)])
def test_what_stands_behind_the_last_member_is_zeros_and_few(tmp_path: Path, end: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(header_of("x", 0) + end)
    with (tmp_path / "a.tar").open("rb", buffering=0) as file:
        reader = TarReader(file)
        assert reader.next().name == "x"
        with pytest.raises(ValueError, match="cut off"):
            reader.check_end()
