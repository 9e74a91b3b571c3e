"""A library as a text file: a backup, and a way to another machine. One JSON value per line.

    {"rekindle": "library", "format": 1}
    {"document": {"source": ..., "title": ..., "file": ..., "app": ..., "added": ..., "digest": ..., "splitting": ...,
                  "characters": ..., "passages": 2}}
    {"passage": {"heading": ..., "text": ...}}          as many as the document says, in order
    {"end": {"documents": 1, "passages": 2, "digest": BLAKE2b of all lines before}}

Passages are stored as they were split, so a restored library is exactly the same. Not in it: vectors and the word
index, which are rebuilt; stored answers; the tenant: a backup goes into the library of the tenant who imports it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rekindle.core.document import Document, Passage
from rekindle.errors import BrokenBackup, InvalidSetting, why_unreadable
from rekindle.knowledge.library import Library
from rekindle.knowledge.rows import BackedUp, SplitDocument
from rekindle.store.files import Files

_HEAD = b'{"rekindle": "library", "format": 1}\n'
_MAX_LINE_BYTES = 16 << 20
_MAX_PASSAGES = 1_000_000  # per document
_AT_ONCE = 64
_FIELDS = ("source", "title", "file", "app", "added", "digest", "splitting", "characters", "passages")
_TEXTS = ("source", "title", "digest", "splitting")
_LOST = ""  # the digest of an incomplete document


@dataclass(frozen=True)
class Backup:
    """Numbers of documents and passages written or added; `known` documents were already in the library."""

    documents: int
    passages: int
    known: int = 0


def export(library: Library, path: Path) -> Backup:
    """Write a library to a file that only its owner can read; it appears when it is complete and durable.

    An earlier backup there is replaced. Raises `InvalidSetting` if anything else is there, or it cannot be written.
    """
    folder = path.absolute().parent
    try:
        _check_replaceable(path)
        with tempfile.NamedTemporaryFile("wb", dir=folder, prefix=f".{path.name}.", delete=False) as file:  # 0600
            part = Path(file.name)
            try:
                done = _write(library, file)
                file.flush()
                Files().sync_file(part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        Files().sync_folder(folder)
    except OSError as error:
        raise InvalidSetting(f"The backup {path} cannot be written: {error}.") from error
    return done


def _check_replaceable(path: Path) -> None:
    with suppress(FileNotFoundError):
        if Files().read(path, len(_HEAD)) != _HEAD:
            raise InvalidSetting(f"{path} exists and is not a backup of a library. Name another file.")


def _write(library: Library, file: IO[bytes]) -> Backup:
    digest = hashlib.blake2b(digest_size=32)
    documents = passages = 0

    def line(value: dict[str, Any]) -> None:
        data = json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        if len(data) > _MAX_LINE_BYTES:
            raise InvalidSetting("A passage is too long for a backup. Split that document into shorter ones.")
        digest.update(data)
        file.write(data)

    digest.update(_HEAD)
    file.write(_HEAD)
    with library.long_reading() as connection:  # one snapshot: later changes are in the next backup
        chosen = connection.execute(
            "SELECT id, source, title, file, app, added, digest, splitting, characters, "
            "(SELECT count(*) FROM chunks c WHERE c.document=d.id) FROM documents d ORDER BY id"
        )
        for id, *values in chosen:
            line({"document": dict(zip(_FIELDS, values, strict=True))})
            documents += 1
            for heading, text in connection.execute(
                "SELECT heading, text FROM chunks WHERE document=? ORDER BY place", (id,)
            ):
                line({"passage": {"heading": heading, "text": text}})
                passages += 1
    end = {"documents": documents, "passages": passages, "digest": digest.hexdigest()}
    file.write(json.dumps({"end": end}).encode() + b"\n")
    return Backup(documents, passages)


def import_(library: Library, path: Path) -> Backup:
    """Verify a whole backup, then add the documents that the library lacks or has incompletely. Others stay.

    Raises `BrokenBackup`, and `LibraryFull`: then run it again when there is room.
    """
    try:
        with path.open("rb") as file:
            for _ in _documents(file, path):
                pass
            file.seek(0)
            return _add(library, _documents(file, path))
    except OSError as error:
        raise BrokenBackup(why_unreadable(path, error)) from error


def _add(library: Library, cuts: Iterator[SplitDocument]) -> Backup:
    done = Backup(0, 0)
    waiting: list[SplitDocument] = []
    for cut in cuts:
        known = library.stored_digest(cut.document.source)
        if known is not None and known[0] != _LOST:
            done = replace(done, known=done.known + 1)
            continue
        waiting.append(cut)
        done = replace(done, documents=done.documents + 1, passages=done.passages + len(cut.passages))
        if sum(len(one.passages) for one in waiting) >= _AT_ONCE:
            library.put(waiting, None)
            waiting = []
    if waiting:
        library.put(waiting, None)
    return done


def _documents(file: IO[bytes], path: Path) -> Iterator[SplitDocument]:
    """The documents of a backup, one at a time. Raises `BrokenBackup` for anything `export` does not write."""
    digest = hashlib.blake2b(digest_size=32)

    def broken(reason: str) -> BrokenBackup:
        return BrokenBackup(f"{path} is not a complete backup of a library ({reason}). Nothing more of it is imported.")

    def line(*kinds: str) -> tuple[str, Any]:
        before = digest.hexdigest()
        data = file.readline(_MAX_LINE_BYTES + 1)
        if not data.endswith(b"\n"):
            raise broken("it is cut off" if len(data) <= _MAX_LINE_BYTES else "a line is too long")
        digest.update(data)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise broken("a line is not JSON") from None
        kind = next((kind for kind in kinds if isinstance(value, dict) and isinstance(value.get(kind), dict)), None)
        if kind is None:
            raise broken(f"a line is not what is expected: {' or '.join(kinds)}")
        return kind, {**value[kind], "before": before} if kind == "end" else value[kind]

    head = file.readline(len(_HEAD) + 1)
    digest.update(head)
    if head != _HEAD:
        raise broken("it does not begin like one, or comes from a newer Rekindle")
    documents = passages = 0
    while True:
        kind, value = line("document", "end")
        if kind == "end":
            expected = {"documents": documents, "passages": passages, "digest": value["before"]}
            if {name: value.get(name) for name in expected} != expected or file.read(1):
                raise broken("its last line does not match the rest")
            return
        if not _is_document(value):
            raise broken("a document has wrong fields")
        parts = [line("passage")[1] for _ in range(value["passages"])]
        if not all(_is_text(part.get("heading")) and _is_text(part.get("text")) for part in parts):
            raise broken("a passage has wrong fields")
        documents, passages = documents + 1, passages + len(parts)
        yield _cut(value, [Passage(part["text"], part["heading"]) for part in parts])


def _cut(value: dict[str, Any], passages: list[Passage]) -> SplitDocument:
    return SplitDocument(
        Document(value["source"], value["title"], ()),
        passages,
        [None] * len(passages),
        value["splitting"],
        value["file"],
        value["app"],
        BackedUp(value["digest"], value["characters"], float(value["added"])),
    )


def _is_document(value: dict[str, Any]) -> bool:
    return (
        set(value) == set(_FIELDS)
        and all(_is_text(value[name]) for name in _TEXTS)
        and bool(value["source"])
        and all(value[name] is None or _is_text(value[name]) for name in ("file", "app"))
        and all(type(value[name]) is int and 0 <= value[name] < 1 << 53 for name in ("characters", "passages"))
        and 1 <= value["passages"] <= _MAX_PASSAGES
        and type(value["added"]) in (int, float)
        and 0 <= value["added"] < 1 << 53
    )


def _is_text(value: object) -> bool:
    """Whether it is valid Unicode text, without surrogates."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
