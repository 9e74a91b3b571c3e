"""A cache, or some entries of it, as one archive: a tar of extents, each preceded by a description and its digest.

    manifest.json        the format, and how many entries there are
    entries/NAME.json    an entry: model, tenant, salt, ...; the digest of the file that follows
    extents/NAME.kv      its extent, not coded
    ...

It is read from front to end, in place: nothing is unpacked, and at most one extent and the tokens of those before it
are in memory. Lengths in it are checked against the size of the file.

An archive carries plain digests whatever key the cache has; importing recomputes every key from the tokens and checks
every byte before anything is kept. It carries exact KV only: variants of chunks are listed again when they are
computed, and non-prefix KV is left out.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rekindle.codec.coder import is_quantized
from rekindle.codec.digest import PlainDigester
from rekindle.codec.extent import ExtentPlan, header_length, parse_header
from rekindle.core.chunk import is_nonprefix
from rekindle.core.keys import BLOCK_BYTES, TOKEN_BYTES, KvSpace, Namespace, chain
from rekindle.core.kv import Kv, KvLayout, LayerKv, Span
from rekindle.errors import BrokenArchive, InvalidSetting, why_unreadable
from rekindle.safe_read import parse_untrusted_json
from rekindle.store.catalog import catalog
from rekindle.store.catalog.variant_rows import nonprefix_kv_spaces
from rekindle.store.disk import DiskStore
from rekindle.store.extents import Damaged, ExtentFiles, OpenExtent
from rekindle.store.files import Files, Handle
from rekindle.store.tiered import Kept, TieredStore

FORMAT = "rekindle-archive/3"
MANIFEST = "manifest.json"
MANIFEST_BYTES = 128  # always: it is written again when the number of entries is known
LARGEST_ENTRY_BYTES = 64 << 10
_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST_NAME = 100
_END_BYTES = 2 * tarfile.BLOCKSIZE  # zeros behind the last member
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
        header = self._file.read(tarfile.BLOCKSIZE)
        try:
            found = tarfile.TarInfo.frombuf(header, "ascii", "strict")
            plain = header_of(found.name, found.size) == header
        except (tarfile.TarError, ValueError):
            plain = False
        if not plain:
            raise ValueError(f"byte {self._at:,} is not the beginning of a plain file")
        name, size_bytes, start = found.name, found.size, self._at + tarfile.BLOCKSIZE
        padding_bytes = -size_bytes % tarfile.BLOCKSIZE
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
        if _sha256(partial(self._files.read_at, handle), size_bytes) != entry.sha256:
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


_PART = "archive"
_KV_SPACE_FIELDS = ("model", "identity", "tenant", "salt", "adapter", "codec")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Imported:
    """The outcome of importing an archive."""

    kept: int
    known: int
    refused: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """The content of an archive, and the number of entries that could not be read."""

    entries: int
    left_out: int


def export(store: DiskStore, path: Path, names: Sequence[str] = (), progress: Progress | None = None) -> Exported:
    """Write entries, and the prefixes they continue, into an archive at `path`. All, if none are named.

    The file appears when it is complete. Raises `EntryNotFound`, and `InvalidSetting` if the path exists: nothing is
    overwritten. Unreadable entries are left out.
    """
    if os.path.lexists(path):
        raise InvalidSetting(f"{path} already exists. Choose another name for the archive, or remove it first.")
    with store.database.reading() as connection:
        apart = nonprefix_kv_spaces(connection)
    rows = _with_ancestors(store, [row for row in store.entries(names) if row.kv_space not in apart])
    try:
        with tempfile.TemporaryDirectory(dir=path.absolute().parent, prefix=".rekindle-export-") as folder:
            written = _write(store, rows, Path(folder), progress)
            part = Path(folder) / _PART
            part.chmod(0o600)  # it holds the tokens of prompts
            store.files.place(part, path)
    except OSError as error:
        raise InvalidSetting(f"The archive {path} cannot be written: {error}.") from error
    return Exported(written, len(rows) - written)


def _write(store: DiskStore, rows: Sequence[catalog.Extent], folder: Path, progress: Progress | None) -> int:
    copies = ExtentFiles(folder, store.files, PlainDigester())
    keys: set[tuple[int, bytes]] = set()
    written = 0
    with (folder / _PART).open("w+b") as file:
        with tar_writer(file) as tar:
            tar.addfile(member_info(MANIFEST, MANIFEST_BYTES), io.BytesIO(manifest_bytes(0)))
            for number, row in enumerate(rows):
                entry = _copy_out(store, row, copies, keys)
                if entry is not None:
                    path, about = copies.path(entry.name), entry.to_bytes()
                    tar.addfile(member_info(entry_member(entry.name), len(about)), io.BytesIO(about))
                    with path.open("rb") as extent:
                        tar.addfile(member_info(extent_member(entry.name), path.stat().st_size), extent)
                    path.unlink()
                    written += 1
                if progress is not None:
                    progress(number + 1, len(rows))
        file.seek(len(header_of(MANIFEST, MANIFEST_BYTES)))
        file.write(manifest_bytes(written))
    return written


def import_(
    open_store: Callable[[], TieredStore], path: Path, evict: bool, progress: Progress | None = None
) -> Imported:
    """Verify the whole archive; only then open the store and keep what is new. Raises `BrokenArchive`."""
    with opened_archive(path) as archive:
        count, steps = 0, 2 * archive.entries
        nodes: dict[bytes, _Node] = {}
        for found in archive.extents():
            found.verify()
            _place(found, nodes)
            count += 1
            if progress is not None:
                progress(count, steps)
        outcomes: list[Kept] = []
        with open_store() as store:
            for found in archive.extents():
                outcomes.append(_keep(store, found, nodes, evict))
                count += 1
                if progress is not None:
                    progress(count, steps)
    refused = tuple(kept.reason for kept in outcomes if kept.outcome in ("refused", "failed"))
    kept, known = (sum(o.outcome == name for o in outcomes) for name in ("kept", "known"))
    return Imported(kept, known, refused)


@dataclass(frozen=True, slots=True)
class _Node:
    """A block of an entry: the block above the entry, and the tokens of the entry up to and including this block."""

    above: _Node | None
    tokens: bytes
    size: int

    def prefix(self) -> bytes:
        """All tokens up to and including it."""
        parts = [self.tokens[: self.size]]
        above = self.above
        while above is not None:
            parts.append(above.tokens[: above.size])
            above = above.above
        return b"".join(reversed(parts))


def _with_ancestors(store: DiskStore, rows: Sequence[catalog.Extent]) -> list[catalog.Extent]:
    chosen = {row.id: row for row in rows}
    todo = list(rows)
    with store.database.reading() as connection:
        while todo:
            row = todo.pop()
            above = connection.execute(
                "SELECT a.extent FROM blocks b JOIN blocks a ON a.key=b.parent AND a.kv_space=b.kv_space "
                "WHERE b.extent=? AND b.place=0",
                (row.id,),
            ).fetchone()
            if above is not None and above[0] not in chosen and (found := catalog.extent(connection, above[0])):
                chosen[found.id] = found
                todo.append(found)
    return sorted(chosen.values(), key=lambda row: (row.depth, row.id))


def _copy_out(
    store: DiskStore, row: catalog.Extent, copies: ExtentFiles, keys: set[tuple[int, bytes]]
) -> ArchiveEntry | None:
    """The live part of an extent as a separate file; None if it, or its prefix, can no longer be read."""
    with store.database.reading() as connection:
        kv_space = connection.execute(
            f"SELECT digest, {', '.join(_KV_SPACE_FIELDS)} FROM kv_spaces WHERE id=?", (row.kv_space,)
        ).fetchone()
        blocks = connection.execute(
            "SELECT tokens, key FROM blocks WHERE extent=? ORDER BY place", (row.id,)
        ).fetchall()
    tokens = b"".join(block[0] for block in blocks)
    if not tokens:
        return None
    try:
        extent = store.open(row, kv_space[0])
        try:
            old = extent.header.plan
            if row.depth and (row.kv_space, bytes(old.parent)) not in keys:
                return None
            digester = PlainDigester()
            plan = ExtentPlan(row.name, "", old.parent, old.layout, tokens, digester.name, digester.width)
            copies.write(plan, store.extents.layers(extent, plan.token_count))
        finally:
            store.extents.release(extent)
    except (OSError, Damaged):
        copies.path(row.name).unlink(missing_ok=True)
        return None
    entry = ArchiveEntry(
        name=row.name,
        sha256=_sha256_of(store.files, copies.path(row.name)),
        **{field: kv_space[number] for number, field in enumerate(_KV_SPACE_FIELDS, start=1)},
    )
    if len(entry.to_bytes()) > LARGEST_ENTRY_BYTES:  # a very long salt
        copies.path(row.name).unlink(missing_ok=True)
        return None
    keys |= {(row.kv_space, block[1]) for block in blocks}
    return entry


def _place(found: ArchivedExtent, nodes: dict[bytes, _Node]) -> None:
    """Record the nodes of an extent. Raises `BrokenArchive` if its parent is not in the archive."""
    plan, kv_space = found.plan, found.kv_space
    on = kv_space.digest.encode()
    above = nodes.get(on + plan.parent)
    if above is None and plan.parent != kv_space.namespace.root:
        raise BrokenArchive(f"{extent_member(plan.name)} in the archive depends on an entry that is not in it.")
    for number, key in enumerate(chain(plan.parent, plan.tokens), start=1):
        nodes[on + key] = _Node(above, plan.tokens, min(number * BLOCK_BYTES, len(plan.tokens)))


def _keep(store: TieredStore, found: ArchivedExtent, nodes: dict[bytes, _Node], evict: bool) -> Kept:
    kv_space, plan = found.kv_space, found.plan
    above = nodes.get(kv_space.digest.encode() + plan.parent)
    before = above.prefix() if above else b""
    tokens: Any = np.frombuffer(before + plan.tokens, "<u4")
    start = len(before) // TOKEN_BYTES
    kv = Kv(Span(start, start + plan.token_count), kv_space.layout, tuple(found.layers()))
    return store.keep(kv_space, tokens, kv, evict=evict, lossy=is_quantized(found.entry.codec))


def _sha256_of(files: Files, path: Path) -> str:
    handle = files.open(path)
    try:
        return _sha256(partial(files.read_at, handle), files.size(handle))
    finally:
        files.close(handle)


def _sha256(read_at: Callable[[int, memoryview], None], size_bytes: int) -> str:
    state, buffer = hashlib.sha256(), memoryview(bytearray(min(1 << 20, size_bytes)))
    for at in range(0, size_bytes, 1 << 20):
        part = buffer[: size_bytes - at]
        read_at(at, part)
        state.update(part)
    return state.hexdigest()
