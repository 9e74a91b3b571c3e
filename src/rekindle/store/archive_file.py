"""The file of an archive: a tar of extents, each preceded by a description and its digest.

    manifest.json        the format, and how many entries there are
    entries/NAME.json    an entry: model, tenant, salt, ...; the digest of the file that follows
    extents/NAME.kv      its extent, not coded
    ...

It is read from front to end, in place: nothing is unpacked, and at most one extent and the tokens of those before it
are in memory. Lengths in it are checked against the size of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from rekindle.codec.digest import PlainDigester
from rekindle.codec.extent import ExtentPlan, header_length, parse_header
from rekindle.core.chunk import is_nonprefix
from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.kv import KvLayout, LayerKv, Span
from rekindle.errors import BrokenArchive, why_unreadable
from rekindle.safe_read import parse_untrusted_json
from rekindle.store.extents import Damaged, ExtentFiles, OpenExtent
from rekindle.store.files import Files, Handle

FORMAT = "rekindle-archive/3"
MANIFEST = "manifest.json"
MANIFEST_BYTES = 128  # always: it is written again when the number of entries is known
LARGEST_ENTRY_BYTES = 64 << 10
_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
BLOCK_BYTES = tarfile.BLOCKSIZE
_LONGEST_NAME = 100
_END_BYTES = 2 * BLOCK_BYTES  # zeros behind the last member
_LARGEST_END_BYTES = tarfile.RECORDSIZE + _END_BYTES  # a record is filled


def tar_writer(file: BinaryIO) -> tarfile.TarFile:
    """Writes an archive: `addfile` with a `member_info`."""
    return tarfile.TarFile(
        fileobj=file, mode="w", format=tarfile.GNU_FORMAT, encoding="ascii", errors="strict", copybufsize=1 << 20
    )


def member_info(name: str, size_bytes: int) -> tarfile.TarInfo:
    """What precedes a file: without times, and without the names and rights of this machine's users.

    Raises `ValueError` for what no member has.
    """
    if len(name) > _LONGEST_NAME or not 0 <= size_bytes < 1 << 63:
        raise ValueError("no name and size of a member")
    info = tarfile.TarInfo(name)
    info.size, info.mode = size_bytes, 0o600
    return info


def header_of(name: str, size_bytes: int) -> bytes:
    """The same as bytes: always the same, whatever wrote it."""
    return member_info(name, size_bytes).tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar, and the range of its bytes."""

    name: str
    data: Span


class TarReader:
    """Reads members in their order. Raises `ValueError` for anything that `tar_writer` does not write."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size_bytes = os.fstat(file.fileno()).st_size
        self._at = 0

    def next(self) -> Member:
        """The next member; its bytes are complete."""
        self._file.seek(self._at)
        header = self._file.read(BLOCK_BYTES)
        try:
            found = tarfile.TarInfo.frombuf(header, "ascii", "strict")
            plain = header_of(found.name, found.size) == header
        except (tarfile.TarError, ValueError):
            plain = False
        if not plain:
            raise ValueError(f"byte {self._at:,} is not the beginning of a plain file")
        name, size_bytes, start = found.name, found.size, self._at + BLOCK_BYTES
        padding_bytes = -size_bytes % BLOCK_BYTES
        if start + size_bytes + padding_bytes > self._size_bytes:
            raise ValueError(f"it ends inside {name}")
        self._file.seek(start + size_bytes)
        if any(self._file.read(padding_bytes)):
            raise ValueError(f"something follows {name}")
        self._at = start + size_bytes + padding_bytes
        return Member(name, Span(start, start + size_bytes))

    def read(self, member: Member, max_bytes: int) -> bytes:
        """The bytes of a small member."""
        if len(member.data) > max_bytes:
            raise ValueError(f"{member.name} has {len(member.data):,} bytes, more than {max_bytes:,}")
        self._file.seek(member.data.start)
        return self._file.read(len(member.data))

    def check_end(self) -> None:
        """Raises `ValueError` unless the tar ends here."""
        left_bytes = self._size_bytes - self._at
        self._file.seek(self._at)
        if not _END_BYTES <= left_bytes <= _LARGEST_END_BYTES or any(self._file.read(left_bytes)):
            raise ValueError("it is cut off, or goes on behind its end")


@dataclass(frozen=True)
class ArchiveEntry:
    """The owner of an extent in an archive. Everything else is in the extent."""

    name: str
    sha256: str
    model: str
    identity: str
    tenant: str
    salt: str
    adapter: str | None
    codec: str

    @classmethod
    def parse(cls, data: bytes) -> ArchiveEntry:
        """Parse its file. Raises `ValueError`."""
        fields = parse_untrusted_json(data)
        if not isinstance(fields, dict) or set(fields) != set(cls.__dataclass_fields__):
            raise ValueError("an entry has other fields")
        if not all(isinstance(text, str) for name, text in fields.items() if (name, text) != ("adapter", None)):
            raise ValueError("an entry's field is no text")
        entry = cls(**fields)
        if not _NAME.fullmatch(entry.name) or not _SHA256.fullmatch(entry.sha256) or is_nonprefix(entry.codec):
            raise ValueError("an entry is invalid")
        return entry

    def to_bytes(self) -> bytes:
        """The content of its file."""
        return json.dumps(asdict(self)).encode()

    def kv_space(self, layout: KvLayout) -> KvSpace:
        return KvSpace(Namespace(self.identity, self.tenant, self.salt), layout, self.adapter, self.codec, self.model)


def manifest_bytes(entries: int) -> bytes:
    """The manifest; always the same bytes for the same number."""
    return json.dumps({"format": FORMAT, "entries": entries}).encode().ljust(MANIFEST_BYTES)


def entry_member(name: str) -> str:
    """The path of an entry in the archive."""
    return f"entries/{name}.json"


def extent_member(name: str) -> str:
    return f"extents/{name}.kv"


@dataclass
class _FilesWithin(Files):
    """Reads a part of a file, from its byte `start` on, as if it were a separate file."""

    start: int = 0

    def read_some(self, handle: Handle, offset: int, out: memoryview) -> int:
        """Read as much as the system gives at once."""
        return super().read_some(handle, self.start + offset, out)


@dataclass(frozen=True)
class ArchivedExtent:
    """An extent of an archive, its header read and its digest checked."""

    entry: ArchiveEntry
    extents: ExtentFiles
    extent: OpenExtent

    @property
    def plan(self) -> ExtentPlan:
        return self.extent.header.plan

    @property
    def kv_space(self) -> KvSpace:
        return self.entry.kv_space(self.plan.layout)

    def layers(self) -> Iterator[LayerKv]:
        """Its KV, layer by layer. Raises `BrokenArchive`."""
        try:
            yield from self.extents.layers(self.extent, self.plan.token_count)
        except (Damaged, OSError) as error:
            raise BrokenArchive(f"{extent_member(self.entry.name)} in the archive is damaged: {error}.") from error

    def verify(self) -> None:
        """Raises `BrokenArchive` unless it is complete and undamaged."""
        for _ in self.layers():
            pass  # reading checks


class ArchiveReader:
    """Reads an archive from the front, any number of times."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Raises `BrokenArchive`."""
        self._path = path
        self._file = file
        self._files = _FilesWithin()
        self._extents = ExtentFiles(Path(), self._files, PlainDigester())
        try:
            self.entries = self._begin(TarReader(file))
        except ValueError as error:
            raise BrokenArchive(f"{path} is not an archive of a cache, or one of another version ({error}).") from error

    def close(self) -> None:
        """End the helper thread of reading."""
        self._extents.close()

    def extents(self) -> Iterator[ArchivedExtent]:
        """The extents in order; each must be used before the next is requested. Raises `BrokenArchive`."""
        tar = TarReader(self._file)
        try:
            for _ in range(self._begin(tar)):
                about = tar.next()
                entry = ArchiveEntry.parse(tar.read(about, LARGEST_ENTRY_BYTES))
                member = tar.next()
                if (about.name, member.name) != (entry_member(entry.name), extent_member(entry.name)):
                    raise ValueError(f"{about.name} is not followed by its extent")
                yield ArchivedExtent(entry, self._extents, self._open(entry, member))
            tar.check_end()
        except (ValueError, EOFError) as error:
            raise BrokenArchive(f"{self._path} is damaged, or not an archive of a cache: {error}.") from error
        except OSError as error:
            raise BrokenArchive(why_unreadable(self._path, error)) from error

    def _begin(self, tar: TarReader) -> int:
        """The number of entries, from the first member. Raises `ValueError`."""
        data = tar.read(tar.next(), MANIFEST_BYTES)
        fields = parse_untrusted_json(data)
        entries = fields.get("entries") if isinstance(fields, dict) else None
        if type(entries) is not int or entries < 0 or manifest_bytes(entries) != data:
            raise ValueError("its manifest is of another format")
        return entries

    def _open(self, entry: ArchiveEntry, member: Member) -> OpenExtent:
        """Raises `ValueError` unless it is a plain extent of the file's length."""
        handle, size_bytes = Handle(self._file.fileno()), len(member.data)
        self._files.start = member.data.start
        if self._digest(handle, size_bytes) != entry.sha256:
            raise ValueError(f"the digest of {member.name} does not match")
        first = bytearray(min(8, size_bytes))
        self._files.read_at(handle, 0, memoryview(first))
        data = bytearray(header_length(bytes(first), size_bytes))
        self._files.read_at(handle, 0, memoryview(data))
        header, digester = parse_header(bytes(data)), self._extents.digester
        plan = header.plan
        found = (plan.name, plan.kv_space, plan.digest_name, plan.digest_width, plan.coding, plan.file_bytes)
        if found != (entry.name, "", digester.name, digester.width, None, size_bytes):
            raise ValueError(f"{member.name} is not what its entry says")
        return OpenExtent(handle, header)

    def _digest(self, handle: Handle, size_bytes: int) -> str:
        state, buffer = hashlib.sha256(), memoryview(bytearray(min(1 << 20, size_bytes)))
        for at in range(0, size_bytes, 1 << 20):
            part = buffer[: size_bytes - at]
            self._files.read_at(handle, at, part)
            state.update(part)
        return state.hexdigest()


@contextmanager
def opened_archive(path: Path) -> Iterator[ArchiveReader]:
    """An archive to read. Raises `BrokenArchive`."""
    try:
        if path.exists() and not path.is_file():
            raise BrokenArchive(f"{path} is not a file.")
        file = path.open("rb", buffering=0)  # on some systems parallel reads move the file position
    except OSError as error:
        raise BrokenArchive(why_unreadable(path, error)) from error
    except ValueError as error:  # a NUL in the path
        raise BrokenArchive(f"{path} cannot be read: {error}.") from error
    with file:
        archive = ArchiveReader(path, file)
        try:
            yield archive
        finally:
            archive.close()
