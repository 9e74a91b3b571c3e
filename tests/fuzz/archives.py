"""Archives: tars of other members, other headers and other extents, with checksums and digests that fit."""

from __future__ import annotations

import hashlib
import json
import tarfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import NoReturn

from rekindle.errors import BrokenArchive
from rekindle.store.archive import export, header_of, import_, manifest_bytes
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.fuzz import extents, mutations
from tests.fuzz.family import Family
from tests.kvs import keep

_TYPES = b"0123456789ABCDLKSVXxg\0"
_FIELDS = {"name": (0, 100), "mode": (100, 8), "uid": (108, 8), "size": (124, 12), "mtime": (136, 12), "type": (156, 1),
           "link": (157, 100), "magic": (257, 8), "prefix": (345, 155)}  # fmt: skip


class Verified(Exception):
    """All of an archive was verified: now the store would be opened."""


class Inputs(Family):
    """An archive of three extents, two of them in one chain."""

    errors = (BrokenArchive,)

    def __init__(self, folder: Path) -> None:
        self.path = folder / "a.tar"
        with TieredStore(folder / "cache", StoreSettings(disk_limit="50MB", memory_limit=0)) as store:
            for tokens in (list(range(100)), [*range(64), *range(500, 620)], [1, 2, 3]):
                keep(store, tokens)
            export(store.disk, self.path)
        with tarfile.open(self.path) as tar:
            self.members = [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]
        self.coded = extents.Inputs(folder).samples

    def prepare(self, random: Random) -> int:
        members = list(self.members)
        for _ in range(random.randint(0, 2)):
            members = self._changed(random, members)
        headers = [header_of(ascii(name)[1:-1][:90], len(data)) for name, data in members]
        if random.randrange(3) == 0 and headers:
            at = random.randrange(len(headers))
            headers[at] = _other_header(random, headers[at])
        parts = []
        for header, (_, data) in zip(headers, members, strict=True):
            parts += [header, data, bytes(-len(data) % 512)]
        data = b"".join([*parts, bytes(random.choice((0, 512, 1024, 10240)))])
        if random.randrange(4) == 0:
            data = mutations.bits(random, data)
        self.path.write_bytes(data)
        return len(data)

    def read(self) -> None:
        with suppress(Verified):
            import_(_verified, self.path, evict=False)

    def _changed(self, random: Random, members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        kind, at = random.randrange(7), random.randrange(len(members) or 1)
        if not members:
            return members
        name, data = members[at]
        if kind == 0:
            return random.choice((members[:at], [*members, members[at]], members[::-1], members[1:]))
        if kind == 1:
            count = random.choice((0, 1, 2, 4, (len(members) - 1) // 2, 10**9, 10**50))
            return [(members[0][0], manifest_bytes(count)[: random.choice((128, 128, 100))]), *members[1:]]
        if kind == 2:
            changed = random.choice((name + "x", "../" + name, "/etc/passwd", "", "é", members[0][0]))
            return [*members[:at], (changed, data), *members[at + 1 :]]
        if name.endswith(".json"):
            return [*members[:at], (name, _json(random, data)), *members[at + 1 :]]
        return self._other_extent(random, members, at)

    def _other_extent(self, random: Random, members: list[tuple[str, bytes]], at: int) -> list[tuple[str, bytes]]:
        """Another extent, and its digest in the entry before it."""
        name, data = members[at]
        if random.randrange(3) == 0:
            data = random.choice(self.coded)
        for _ in range(random.randint(0, 2)):
            length = int.from_bytes(data[:8], "little") + 8
            if random.randrange(2) and length <= len(data):
                try:
                    fields = mutations.tree(random, json.loads(data[8:length]), 1)
                except (ValueError, RecursionError):
                    continue
                text = mutations.text_of(fields).encode("utf-8", "surrogatepass")
                data = len(text).to_bytes(8, "little") + text + data[length:]
            else:
                data = mutations.bits(random, data)
        changed = [*members[:at], (name, data), *members[at + 1 :]]
        if at and members[at - 1][0].startswith("entries/"):
            try:
                entry = json.loads(members[at - 1][1])
                entry["sha256"] = hashlib.sha256(data).hexdigest()
                changed[at - 1] = (members[at - 1][0], json.dumps(entry).encode())
            except (ValueError, TypeError, RecursionError):
                pass
        return changed


def _json(random: Random, data: bytes) -> bytes:
    try:
        root = json.loads(data)
    except (ValueError, RecursionError):
        return mutations.bits(random, data)
    return mutations.text_of(mutations.tree(random, root)).encode("utf-8", "surrogatepass")


def _other_header(random: Random, header: bytes) -> bytes:
    """A field changed and the checksum corrected; or one that has a pax or sparse header before it."""
    kind = random.randrange(4)
    if kind == 0:
        info = tarfile.TarInfo("extents/" + "n" * random.choice((3, 120)))
        info.size = random.choice((5, 1 << 40))
        info.pax_headers = {
            random.choice(("size", "path", "GNU.sparse.size", "mtime")): random.choice(("-5", "9" * 30))
        }
        return info.tobuf(tarfile.PAX_FORMAT)
    start, width = random.choice([*_FIELDS.values()])
    field = random.choice(
        (
            b"-0000000512",
            b"\x80" + random.randbytes(11),
            b"\xff" * 12,
            b"77777777777",
            bytes([random.choice(_TYPES)]),
            random.randbytes(width),
            b"0000000 0000",
        )
    )[:width].ljust(width, b"\0")
    changed = bytearray(header[:512])
    changed[start : start + width] = field
    if random.randrange(4):
        changed[148:156] = b" " * 8
        changed[148:156] = b"%06o\0 " % sum(changed)
    return bytes(changed) + header[512:]


def _verified() -> NoReturn:
    raise Verified("it is sound")
