"""Archives: what is exported is imported, and nothing else ever is."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.core.keys import KvSpace, Namespace
from rekindle.errors import BrokenArchive, EntryNotFound, InvalidSetting
from rekindle.store.archive import MANIFEST, export, import_, manifest_bytes, member_info, tar_writer
from rekindle.store.check import check
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import SMALL, keep, load

ROOMY = StoreSettings(disk_limit="50MB", memory_limit=0)
OTHER = KvSpace(Namespace("synthetic", tenant="somebody else"), SMALL)
PROMPTS = [list(range(100)), [*range(64), *range(500, 620)], [*range(64), *range(500, 620), 7, 8, 9]]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    with TieredStore(tmp_path / "from", ROOMY) as store:
        for tokens in PROMPTS:
            keep(store, tokens)
        keep(store, PROMPTS[0], OTHER)
        exported = export(store.disk, tmp_path / "a.tar")
    assert (exported.entries, exported.left_out) == (4, 0)
    return tmp_path / "a.tar"


def bring(path: Path, folder: Path, settings: StoreSettings = ROOMY, evict: bool = False) -> tuple[int, int, int]:
    done = import_(lambda: TieredStore(folder, settings), path, evict=evict)
    return done.kept, done.known, len(done.refused)


def test_what_was_exported_is_there_after_importing(archive: Path, tmp_path: Path) -> None:
    assert bring(archive, tmp_path / "to") == (4, 0, 0)
    with TieredStore(tmp_path / "to", ROOMY) as store:
        assert [load(store, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]
        assert load(store, PROMPTS[0], OTHER) == 100
        assert check(store.disk).problems == ()
    assert bring(archive, tmp_path / "to") == (0, 4, 0)


def test_an_archive_crosses_keys(archive: Path, tmp_path: Path) -> None:
    keyed = StoreSettings(disk_limit="50MB", memory_limit=0, key=bytes(32))
    assert bring(archive, tmp_path / "keyed", keyed) == (4, 0, 0)
    with TieredStore(tmp_path / "keyed", keyed) as store:
        export(store.disk, tmp_path / "b.tar")
    assert bring(tmp_path / "b.tar", tmp_path / "plain") == (4, 0, 0)
    with TieredStore(tmp_path / "plain", ROOMY) as store:
        assert load(store, PROMPTS[2]) == len(PROMPTS[2])


def test_a_named_entry_brings_what_it_hangs_on(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "from", ROOMY) as store:
        for tokens in PROMPTS:
            keep(store, tokens)
        deepest = max(store.disk.entries(), key=lambda row: row.depth)
        assert export(store.disk, tmp_path / "a.tar", [deepest.name[:10]]).entries == 3
        with pytest.raises(EntryNotFound, match="no entry"):
            export(store.disk, tmp_path / "b.tar", ["zzz"])
    assert not (tmp_path / "b.tar").exists()


def test_what_is_half_known_is_completed(archive: Path, tmp_path: Path) -> None:
    with TieredStore(tmp_path / "to", ROOMY) as store:
        keep(store, PROMPTS[0][:70])
    kept, known, refused = bring(archive, tmp_path / "to")
    assert (kept + known, refused) == (4, 0)
    with TieredStore(tmp_path / "to", ROOMY) as store:
        assert [load(store, tokens) for tokens in PROMPTS] == [len(tokens) for tokens in PROMPTS]


def test_importing_evicts_nothing_unless_it_may(tmp_path: Path) -> None:
    def prompt(number: int) -> list[int]:
        return [number * 5000 + place for place in range(2000)]

    small = StoreSettings(disk_limit=(2 << 20) + 1_200_000, memory_limit=0)
    with TieredStore(tmp_path / "from", ROOMY) as store:
        for number in range(10, 16):
            keep(store, prompt(number))
        export(store.disk, tmp_path / "a.tar")
    with TieredStore(tmp_path / "to", small) as store:
        for number in range(4):
            assert keep(store, prompt(number)).outcome == "kept"
    refused = bring(tmp_path / "a.tar", tmp_path / "to", small)[2]
    with TieredStore(tmp_path / "to", small) as store:
        assert refused and [load(store, prompt(number)) for number in range(4)] == [2000] * 4
    assert bring(tmp_path / "a.tar", tmp_path / "to", small, evict=True)[0] > 0


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The archive with its files changed by `change`, in the form that is written here."""
    with tarfile.open(path) as tar:
        files = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
    change(files)
    with path.open("wb") as file, tar_writer(file) as writer:
        for name, data in files.items():
            writer.addfile(member_info(name, len(data)), io.BytesIO(data))
    return path


def entry(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, bytes]], None]:
    """Change the first entry."""

    def apply(files: dict[str, bytes]) -> None:
        name = next(name for name in files if name.startswith("entries/"))
        fields = json.loads(files[name])
        change(fields)
        files[name] = json.dumps(fields).encode()

    return apply


def without_the_first(files: dict[str, bytes]) -> None:
    for name in [*files][1:3]:
        del files[name]
    files[MANIFEST] = manifest_bytes(3)


def resigned(change: Callable[[bytearray], None]) -> Callable[[dict[str, bytes]], None]:
    """Change the first extent, and its digest with it."""

    def apply(files: dict[str, bytes]) -> None:
        first_extent(change)(files)
        data = next(data for name, data in files.items() if name.endswith(".kv"))
        entry(lambda fields: fields.__setitem__("sha256", hashlib.sha256(data).hexdigest()))(files)

    return apply


def first_extent(change: Callable[[bytearray], None]) -> Callable[[dict[str, bytes]], None]:
    def apply(files: dict[str, bytes]) -> None:
        name = next(name for name in files if name.endswith(".kv"))
        data = bytearray(files[name])
        change(data)
        files[name] = bytes(data)

    return apply


def flip(data: bytearray) -> None:
    data[-1] ^= 1


BROKEN = {
    "a bit of KV": first_extent(flip),
    "a bit of the header": first_extent(lambda data: data.__setitem__(100, data[100] ^ 1)),
    "cut": first_extent(lambda data: data.__delitem__(slice(-10, None))),
    "no manifest": lambda files: files.pop(MANIFEST),
    "an extent missing": lambda files: files.pop(next(name for name in files if name.endswith(".kv"))),
    "an entry missing": lambda files: files.pop(next(name for name in files if name.startswith("entries/"))),
    "nonsense for a manifest": lambda files: files.__setitem__(MANIFEST, b"[1"),
    "another format": lambda files: files.__setitem__(MANIFEST, b'{"format": "other", "entries": 4}'),
    "more entries than there are": lambda files: files.__setitem__(MANIFEST, manifest_bytes(5)),
    "fewer entries than there are": lambda files: files.__setitem__(MANIFEST, manifest_bytes(3)),
    "another digest": entry(lambda fields: fields.__setitem__("sha256", "0" * 64)),
    "a bit of KV, and the digest with it": resigned(flip),
    "a bit of the header, and the digest with it": resigned(lambda data: data.__setitem__(60, data[60] ^ 1)),
    "a header of any length": resigned(lambda data: data.__setitem__(slice(0, 8), b"\xff" * 8)),
    "an empty extent": resigned(lambda data: data.clear()),
    "another tenant": entry(lambda fields: fields.__setitem__("tenant", "victim")),
    "an orphan": without_the_first,
    "a field too many": entry(lambda fields: fields.__setitem__("more", 1)),
    "a field missing": entry(lambda fields: fields.__delitem__("codec")),
    "a name that is none": entry(lambda fields: fields.__setitem__("identity", None)),
    "half of a pair": entry(lambda fields: fields.__setitem__("salt", "\ud800")),
    "a non-prefix entry": entry(lambda fields: fields.__setitem__("codec", "raw/nonprefix")),
    "a long entry": entry(lambda fields: fields.__setitem__("salt", "s" * 100_000)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_of_a_broken_archive_nothing_is_imported(archive: Path, tmp_path: Path, how: str) -> None:
    rewritten(archive, BROKEN[how])  # type: ignore[arg-type]
    with pytest.raises(BrokenArchive) as caught:
        bring(archive, tmp_path / "to")
    assert str(caught.value).endswith(".")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("size", [0, 100, 5000, 9000])
def test_an_archive_that_was_cut_off_is_refused(archive: Path, tmp_path: Path, size: int) -> None:
    archive.write_bytes(archive.read_bytes()[:size])
    with pytest.raises(BrokenArchive):
        bring(archive, tmp_path / "to")


def test_a_missing_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BrokenArchive, match="There is no file"):
        bring(tmp_path / "nowhere.tar", tmp_path / "to")


def test_an_archive_is_private_and_names_no_user(archive: Path) -> None:
    assert archive.stat().st_mode & 0o777 == 0o600
    with tarfile.open(archive) as tar:
        assert {(info.uid, info.uname, info.mode) for info in tar} == {(0, "", 0o600)}


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "from", ROOMY) as store:
        for tokens in PROMPTS:
            keep(store, tokens)
        keep(store, PROMPTS[0], OTHER)
        head = min(store.disk.entries(), key=lambda row: (row.depth, row.id))
        path = store.disk.extents.path(head.name)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        exported = export(store.disk, tmp_path / "a.tar")
    assert (exported.entries, exported.left_out) == (1, 3)  # what hangs on it is left out too
    assert bring(tmp_path / "a.tar", tmp_path / "to") == (1, 0, 0)


def test_an_archive_is_never_written_over_something(tmp_path: Path) -> None:
    (tmp_path / "taxes.tar").write_bytes(b"the only copy")
    (tmp_path / "link.tar").symlink_to(tmp_path / "nowhere")
    with TieredStore(tmp_path / "from", ROOMY) as store:
        keep(store, PROMPTS[0])
        for name in ("taxes.tar", "link.tar"):
            with pytest.raises(InvalidSetting, match="already exists"):
                export(store.disk, tmp_path / name)
    assert (tmp_path / "taxes.tar").read_bytes() == b"the only copy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["from", "link.tar", "taxes.tar"]
