"""What was exported comes back as it was, once, into whoever imports it; what is no backup changes nothing."""

from __future__ import annotations

import json
import random
import stat
import threading
from pathlib import Path

import pytest

from rekindle.errors import BrokenBackup, InvalidSetting, LibraryFull
from rekindle.knowledge.backup import Backup, export, import_
from rekindle.knowledge.library import Library
from rekindle.knowledge.library_folder import LibraryLimit
from tests.knowledge.conftest import cut, library
from tests.knowledge.test_damage import damage, made, texts_of
from tests.knowledge.test_library import check_words, found

ODD = "nul\0inside \u2028 \x1b[31m 日本 🐧 'quote\" \\n {}"


def told(known: Library) -> list[tuple[object, ...]]:
    """Everything that a backup holds of a library."""
    with known.reading() as connection:
        return connection.execute(
            "SELECT d.name, d.source, d.title, d.file, d.app, d.added, d.digest, d.splitting, d.characters, c.place, "
            "c.heading, c.text FROM documents d JOIN chunks c ON c.document=d.id ORDER BY d.source, c.place"
        ).fetchall()


def test_an_export_restores_every_document_passage_and_date_in_another_library(tmp_path: Path) -> None:
    known, _ = made(tmp_path / "one", 5)
    known.put([cut("odd", ODD, title="ti\0tle", file=None)], "e")
    known.set_app(["odd"], "mail")
    done = export(known, tmp_path / "backup.jsonl")
    assert done == Backup(6, 16)
    other = library(tmp_path / "two", "bob", "salt")
    assert import_(other, tmp_path / "backup.jsonl") == Backup(6, 16)
    assert told(other) == told(known) and other.about("tenant") == "bob" and other.about("salt") == "salt"
    check_words(other)
    assert found(other, "日本") == {"odd"} and len(other.without_vector("e", 99)) == 16


def test_importing_twice_changes_nothing_and_never_replaces_what_is_there(tmp_path: Path) -> None:
    known, _ = made(tmp_path / "one", 3)
    export(known, tmp_path / "backup.jsonl")
    known.put([cut("/docs/1.md", "newer than the backup")], "e")
    before, generation = told(known), known.generation
    assert import_(known, tmp_path / "backup.jsonl") == Backup(0, 0, known=3)
    assert told(known) == before and known.generation == generation


def test_a_backup_brings_back_what_damage_took(tmp_path: Path) -> None:
    known, texts = made(tmp_path)
    export(known, tmp_path / "backup.jsonl")
    known.close()
    damage(known.path, 40, bytes(4096))
    damage(known.path, 44, bytes(4096))
    opened = library(tmp_path)
    assert texts_of(opened) != texts
    done = import_(opened, tmp_path / "backup.jsonl")
    assert texts_of(opened) == texts and 0 < done.documents < len(texts)


def test_a_backup_is_the_owners_only_and_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = made(tmp_path / "one", 2)
    target = tmp_path / "backup.jsonl"
    export(known, target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    whole = target.read_bytes()
    monkeypatch.setattr("rekindle.store.files.Files.sync_file", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(InvalidSetting, match="cannot be written"):
        export(known, target)
    assert target.read_bytes() == whole and [path.name for path in tmp_path.iterdir() if path.is_file()] == [
        target.name
    ]
    with pytest.raises(InvalidSetting, match="cannot be written"):
        export(known, tmp_path / "nowhere" / "backup.jsonl")


def test_a_backup_that_is_damaged_anywhere_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    known, _ = made(tmp_path / "one", 2)
    export(known, tmp_path / "backup.jsonl")
    whole = (tmp_path / "backup.jsonl").read_bytes()
    rng = random.Random(3)
    broken = [whole[:length] for length in rng.sample(range(len(whole)), 30)]
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << rng.randrange(8)
        broken.append(bytes(data))
    broken += [whole + b"{}\n", whole.replace(b'"format": 1', b'"format": 2'), b"", b"\n", b"\0" * 100, whole + whole]
    other = library(tmp_path / "two")
    for number, data in enumerate(broken):
        (tmp_path / "broken").write_bytes(data)
        with pytest.raises(BrokenBackup, match="backup"):
            import_(other, tmp_path / "broken")
        assert other.entries() == [], number
    with pytest.raises(BrokenBackup, match="There is no file"):
        import_(other, tmp_path / "absent")


@pytest.mark.parametrize(
    "change",
    [
        {"source": ""}, {"source": 7}, {"source": None}, {"title": ["a"]}, {"file": {}}, {"app": 1}, {"added": "now"},
        {"added": True}, {"added": 10**400}, {"passages": -1}, {"passages": 0}, {"passages": 10**12},
        {"passages": True},
        {"characters": 1.5}, {"characters": 10**30}, {"digest": None}, {"source": "\ud800"},
    ],
)  # fmt: skip
def test_a_document_of_another_shape_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    document = {"source": "a", "title": "a", "file": None, "app": None, "added": 1.0, "digest": "d", "splitting": "s"}
    document |= {"characters": 1, "passages": 1, **change}
    lines = [
        {"rekindle": "library", "format": 1}, {"document": document}, {"passage": {"heading": "", "text": "x"}},
    ]  # fmt: skip
    (tmp_path / "backup").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(BrokenBackup, match="a document has wrong fields"):
        import_(library(tmp_path), tmp_path / "backup")


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"document":' * 50_000, b"x" * (17 << 20)])
def test_lines_that_are_deep_or_endless_are_refused(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "backup").write_bytes(b'{"rekindle": "library", "format": 1}\n' + line + b"\n")
    with pytest.raises(BrokenBackup):
        import_(library(tmp_path), tmp_path / "backup")


# -- the limit


def folder_bytes(folder: Path) -> int:
    return LibraryLimit(folder).used_bytes()


def test_what_does_not_fit_under_the_limit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    folder, limit = tmp_path / "library", 16 << 20
    known = Library(folder, limit=LibraryLimit(folder, limit))
    rng = random.Random(1)
    seen, kept, done = [0], 0, threading.Event()

    def look() -> None:
        while not done.wait(0.001):
            seen.append(folder_bytes(folder))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with pytest.raises(LibraryFull, match="rekindle forget.*library_limit"):
            for number in range(1000):
                texts = [" ".join(f"{rng.randrange(10**6):x}" for _ in range(800)) for _ in range(20)]
                known.put([cut(f"d{number}", *texts, seed=number)], "e")
                kept += 1
    finally:
        done.set()
        looking.join(60)
    assert kept > 5 and max(seen) <= limit and folder_bytes(folder) <= limit, "at every moment"
    assert len(known.entries()) == kept, "what was refused left nothing"
    assert all(entry.chunks == 20 for entry in known.entries())
    with pytest.raises(LibraryFull):  # that of another tenant counts, too
        Library(folder, "bob", limit=LibraryLimit(folder, limit)).put([cut("a", "x" * 1_000_000)], "e")
    (chunk, *_) = known.chunks_of(known.entries()[0].id)
    assert not known.note_tokens("t", {chunk.id: bytes(2 << 20)}), "then no KV of it is kept"
    known.remove([entry.id for entry in known.entries()])
    known.purge_removed(known.removed_passages())
    known.put([cut("again", "there is room")], "e")


@pytest.mark.parametrize("kind", ["text", "link"])
def test_an_export_replaces_a_backup_and_nothing_else(tmp_path: Path, kind: str) -> None:
    known, _ = made(tmp_path / "one", 3)
    backup, notes = tmp_path / "backup.jsonl", tmp_path / "notes.md"
    export(known, backup)
    assert export(known, backup).documents == 3
    notes.write_text("the only copy")
    target = notes
    if kind == "link":
        target = tmp_path / "link"
        target.symlink_to(notes)
    with pytest.raises(InvalidSetting):
        export(known, target)
    assert notes.read_text() == "the only copy" and target.is_symlink() == (kind == "link")
