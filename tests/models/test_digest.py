"""Digests of weights: another weight, another digest; the same file, no second read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rekindle.models import files
from rekindle.models.files import digest_of_files


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which files were really read."""
    seen: list[Path] = []
    real = files._digest_of_file

    def counted(path: Path, *rest: Any) -> str:
        seen.append(path)
        return real(path, *rest)

    monkeypatch.setattr(files, "_digest_of_file", counted)
    return seen


def test_one_changed_byte_changes_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 1000)
    before = digest_of_files([path])
    data = bytearray(path.read_bytes())
    data[123_456] ^= 1
    path.write_bytes(data)
    assert digest_of_files([path]) != before


def test_an_edit_that_sets_the_time_back_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 1000)
    about = path.stat()
    before = digest_of_files([path])
    with path.open("r+b") as file:
        file.write(b"b")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_mtime_ns == about.st_mtime_ns
    assert digest_of_files([path]) != before


def test_an_unchanged_file_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 1000)
    assert digest_of_files([path]) == digest_of_files([path])
    assert reads == [path]


def test_a_damaged_memory_only_costs_a_read(tmp_path: Path, reads: list[Path]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 1000)
    before = digest_of_files([path])
    (tmp_path / "home" / "digests.json").write_text("not json")
    assert digest_of_files([path]) == before
    assert reads == [path, path]


def test_order_counts_and_names_do_not(tmp_path: Path) -> None:
    for name, content in (("a", b"1"), ("b", b"2"), ("c", b"1")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (tmp_path / name for name in "abc")
    assert digest_of_files([a, b]) != digest_of_files([b, a])
    assert digest_of_files([a, b]) == digest_of_files([c, b])


def test_a_file_over_several_pieces_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", 1000)
    path = tmp_path / "weights"
    seen = set()
    for position in (0, 999, 1000, 2500, 4999):
        data = bytearray(5000)
        data[position] = 1
        path.write_bytes(data)
        seen.add(digest_of_files([path]))
    assert len(seen) == 5


def test_progress_counts_bytes(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"a" * 1000)
    told: list[tuple[int, int]] = []
    digest_of_files([path], lambda done, total: told.append((done, total)))
    assert told == [(1000, 1000)]
