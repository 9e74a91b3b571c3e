"""A damaged library loses what stood on the damaged page and nothing else, says so, and no damaged file is removed."""

from __future__ import annotations

import logging
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from rekindle.errors import KnowledgeUnusable
from rekindle.knowledge.library import Library
from rekindle.knowledge.library_file import check_library, current_file, next_file
from rekindle.knowledge.rows import put_document
from rekindle.knowledge.sqlite_pages import SqlitePages
from tests.knowledge.conftest import cut, library
from tests.knowledge.test_library import ROOT, check_words, found

pytestmark = pytest.mark.thorough

PAGE = 4096
DOCUMENTS = 24
Texts = dict[str, list[str]]


def made(folder: Path, documents: int = DOCUMENTS) -> tuple[Library, Texts]:
    """A library of some pages, closed: documents of several passages, files, tokens; one that was removed."""
    rng = random.Random(5)
    words = ["".join(rng.choice("bcdfghjklm") for _ in range(6)) for _ in range(400)]
    known = library(folder)
    texts = {
        f"/docs/{number}.md": [" ".join(rng.choice(words) for _ in range(60)) for _ in range(3)]
        for number in range(documents)
    }
    for number, (source, passages) in enumerate(texts.items()):
        known.put([cut(source, *passages, title=f"title {number}", file=source, seed=number * 9)], "e")
        known.finish_file(source, f"digest {number}", "how", [source])
    known.put([cut("gone", "what was removed")], "e")
    known.remove([known.find("gone")[0].id])
    known.purge_removed(known.removed_passages())
    ids = [chunk.id for entry in known.entries() for chunk in known.chunks_of(entry.id)]
    assert known.note_tokens("t", {id: rng.randbytes(120) for id in ids})
    known.close()
    return known, texts


def texts_of(known: Library) -> Texts:
    return {entry.source: [chunk.passage.text for chunk in known.chunks_of(entry.id)] for entry in known.entries()}


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def damage(path: Path, page: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek((page - 1) * PAGE)
        file.write(data)


def owners(path: Path) -> dict[int, set[str]]:
    """The sources of documents and passages that stand on each page, as the raw bytes have it."""
    raw = SqlitePages(path)
    documents: dict[int, str] = {}
    held: dict[int, set[int]] = {}
    for page in range(1, raw.pages + 1):
        for row in raw.rows_of(page):
            if row.rowid is not None and len(row.values) == 10:
                documents[row.rowid] = str(row.values[2])
                held.setdefault(page, set()).add(row.rowid)
            elif row.rowid is not None and len(row.values) == 9:
                held.setdefault(page, set()).add(int(str(row.values[1])))
    return {page: {documents[id] for id in ids} for page, ids in held.items()}


@pytest.mark.parametrize(("kind", "every"), [("zeros", 1), ("garbage", 7), ("end", 7)])
def test_whichever_page_is_damaged_only_what_stood_on_it_is_lost_and_that_is_told(
    tmp_path: Path, kind: str, every: int
) -> None:
    """`end`: the file ends before that page."""
    known, texts = made(tmp_path / "sound")
    pages, on_page = known.path.stat().st_size // PAGE, owners(known.path)
    assert pages >= 45 and set().union(*on_page.values()) == set(texts)
    for page in range(1, pages + 1, every):
        place = tmp_path / f"{page}"
        shutil.copytree(tmp_path / "sound", place)
        path = place / "library" / known.path.name
        if kind == "end":
            with path.open("r+b") as file:
                file.truncate((page - 1) * PAGE)
            hit = set().union(*(sources for at, sources in on_page.items() if at >= page), set())
        else:
            damage(path, page, bytes(PAGE) if kind == "zeros" else random.Random(page).randbytes(PAGE))
            hit = on_page.get(page, set())
        before = path.read_bytes()
        opened = library(place)
        left, losses = texts_of(opened), opened.losses()
        lost = {source for source in texts if left.get(source) != texts[source]}
        assert lost <= hit, f"page {page}: {lost - hit} did not stand on it"
        assert all(text in texts[source] for source, some in left.items() if source in texts for text in some)
        assert {text for some in left.values() for text in some} <= {text for some in texts.values() for text in some}
        assert losses or not lost, f"page {page}: {lost} went silently"
        if kind != "end":
            assert not lost or lost <= set(losses[0].names)
            assert not losses or losses[0].documents == len(set(texts) - set(left))
        assert path.read_bytes() == before, "a damaged file is only read"
        assert not losses or (opened.path != path and losses[0].file == str(path))
        check_words(opened)
        if page % 7 == 1:
            opened.put([cut("new", "written afterwards")], "e")
            again = library(place)
            assert "new" in texts_of(again) and again.losses() == losses
        opened.close()
        shutil.rmtree(place)


def test_what_was_lost_is_read_again_when_its_file_is_ingested_again(tmp_path: Path) -> None:
    known, texts = made(tmp_path)
    page, hit = next((page, hit) for page, hit in owners(known.path).items() if 2 <= len(hit) <= 4)
    damage(known.path, page, bytes(PAGE))
    opened = library(tmp_path)
    lost = {source for source, some in texts.items() if texts_of(opened).get(source) != some}
    assert lost and lost <= hit
    assert lost.isdisjoint(opened.files()) and set(opened.files()) >= set(texts) - hit
    assert all((opened.stored_digest(source) or ("",))[0] == "" for source in lost), "its digest is not what it was"


def test_bits_that_flip_in_the_first_page_lose_nothing_silently(tmp_path: Path) -> None:
    known, texts = made(tmp_path / "sound", 3)
    rng = random.Random(2)
    for offset in [*range(16, 28), *range(40, 72, 4), 100, 103, 108, *rng.sample(range(110, PAGE), 12)]:
        shutil.copytree(tmp_path / "sound", tmp_path / "flipped")
        path = tmp_path / "flipped" / "library" / known.path.name
        data = bytearray(path.read_bytes())
        data[offset] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            opened = library(tmp_path / "flipped")
            assert texts_of(opened) == texts
            opened.close()
        except KnowledgeUnusable as error:  # a version that may be a later one's: nothing is touched
            assert "newer" in str(error) and path.read_bytes() == bytes(data)
        shutil.rmtree(tmp_path / "flipped")


def test_an_empty_file_is_a_loss_not_a_new_library(tmp_path: Path) -> None:
    known, _ = made(tmp_path, 2)
    known.path.write_bytes(b"")
    opened = library(tmp_path)
    assert opened.entries() == [] and len(opened.losses()) == 1


def test_a_text_that_changed_on_disk_is_not_served(tmp_path: Path) -> None:
    """No page is malformed: only the digest of the passage tells."""
    known, texts = made(tmp_path)
    wrong = texts["/docs/3.md"][1]
    data = known.path.read_bytes()
    assert data.count(wrong.encode()) == 1
    known.path.write_bytes(data.replace(wrong.encode(), wrong.upper().encode()))
    opened = library(tmp_path)
    assert texts_of(opened)["/docs/3.md"] == [texts["/docs/3.md"][0], texts["/docs/3.md"][2]]
    assert opened.losses()[0].names == ("/docs/3.md",) and opened.losses()[0].passages == 1


def test_a_title_that_changed_on_disk_costs_no_passage(tmp_path: Path) -> None:
    known, texts = made(tmp_path)
    data = known.path.read_bytes()
    known.path.write_bytes(data.replace(b"title 7", b"tXtle 7"))
    opened = library(tmp_path)
    assert texts_of(opened) == texts and opened.losses()[0].names == ("/docs/7.md",)
    (entry,) = opened.find("/docs/7.md")
    assert entry.title == "7.md"


def test_what_is_only_in_the_log_is_saved_too(tmp_path: Path) -> None:
    known, texts = made(tmp_path)
    script = (
        "import os, signal, sys; from pathlib import Path; from tests.knowledge.conftest import cut, library\n"
        "library(Path(sys.argv[1])).put([cut('logged', 'only in the log')], 'e')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False, timeout=120)
    assert Path(f"{known.path}-wal").stat().st_size > 0
    damage(known.path, 40, bytes(PAGE))
    opened = library(tmp_path)
    left = texts_of(opened)
    assert left["logged"] == ["only in the log"]
    assert sum(left.get(source) == some for source, some in texts.items()) >= DOCUMENTS - 4


def test_damage_that_is_met_while_it_is_used_is_saved_and_the_next_call_goes_on(tmp_path: Path) -> None:
    known, texts = made(tmp_path)
    opened = library(tmp_path)
    assert len(opened.entries()) == DOCUMENTS
    opened.close()  # so that no page of it is in memory
    page = next(page for page, hit in owners(known.path).items() if hit)
    damage(known.path, page, bytes(PAGE))
    with pytest.raises(KnowledgeUnusable, match="damaged.*Try again"):
        for source in texts:
            opened.chunks_of(opened.find(source)[0].id)
    left = texts_of(opened)
    assert sum(left.get(source) == some for source, some in texts.items()) >= DOCUMENTS - 24 // 3
    assert len(opened.losses()) == 1 and known.path.exists() and opened.path == next_file(known.path)


def test_several_processes_meet_the_damage_and_one_saves_it(tmp_path: Path) -> None:
    known, texts = made(tmp_path)
    damage(known.path, 1, bytes(PAGE))
    script = (
        "import sys; from pathlib import Path; from tests.knowledge.conftest import cut, library\n"
        "known = library(Path(sys.argv[1])); known.put([cut(sys.argv[2], sys.argv[2])], 'e'); known.close()"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    running = [subprocess.Popen([*command, name], cwd=ROOT) for name in ("one", "two", "three")]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    opened = library(tmp_path)
    assert set(texts_of(opened)) == {*texts, "one", "two", "three"} and len(opened.losses()) == 1
    assert sorted(path.name for path in known.path.parent.glob("*.sqlite")) == sorted(
        [known.path.name, next_file(known.path).name]
    )


def test_what_is_written_while_another_saves_is_in_the_new_file(tmp_path: Path) -> None:
    known, _ = made(tmp_path)
    other = library(tmp_path)
    writing, go = threading.Event(), threading.Event()

    def write() -> None:
        with other.writing() as connection:
            put_document(connection, cut("late", "written late"))
            writing.set()
            assert go.wait(60)

    threads = [threading.Thread(target=write), threading.Thread(target=lambda: check_library(known.path, fix=True))]
    threads[0].start()
    assert writing.wait(60)
    damage(known.path, 30, bytes(PAGE))
    threads[1].start()
    eventually(lambda: known.path.with_suffix(".lock").exists())
    go.set()
    for thread in threads:
        thread.join(60)
    other.put([cut("later", "written later")], "e")
    assert {"late", "later"} <= set(texts_of(library(tmp_path))) and other.path == next_file(known.path)


def test_a_loss_is_told_until_it_is_acknowledged_and_a_second_one_beside_it(tmp_path: Path) -> None:
    known, _ = made(tmp_path)
    damage(known.path, 1, bytes(PAGE))
    opened = library(tmp_path)
    (first,) = opened.losses()
    opened.close()
    damage(opened.path, 1, bytes(PAGE))
    again = library(tmp_path)
    assert again.losses()[0] == first and len(again.losses()) == 2
    assert current_file(known.path).name == f"{known.path.stem}.3.sqlite"
    again.acknowledge()
    again.close()
    assert library(tmp_path).losses() == []
    assert known.path.exists() and opened.path.exists(), "acknowledging removes no file"


def test_the_last_file_counts_whichever_older_ones_somebody_removed(tmp_path: Path) -> None:
    known, texts = made(tmp_path, 2)
    for _ in range(2):
        opened = library(tmp_path)
        opened.close()
        damage(opened.path, 1, bytes(PAGE))
    third = library(tmp_path)
    third.close()
    for gone in ([2], [1, 2]):
        for number in gone:
            known.path.with_name(f"{known.path.stem}.{number}.sqlite").unlink(missing_ok=True)
        if 1 in gone:
            known.path.unlink()
        opened = library(tmp_path)
        assert opened.path == third.path and texts_of(opened) == texts
        opened.close()


def test_forgetting_leaves_damaged_files_and_names_them(tmp_path: Path) -> None:
    known, _ = made(tmp_path)
    damage(known.path, 1, bytes(PAGE))
    earlier = known.path.with_name(f"{known.path.name}.broken-17")
    earlier.write_bytes(b"set aside by an earlier version")
    opened = library(tmp_path)
    opened.remove([entry.id for entry in opened.entries()])
    opened.purge_removed(opened.removed_passages())
    assert opened.damaged_files() == [known.path, earlier]
    assert known.path.exists() and earlier.exists()


def test_tokens_of_lost_passages_wait_for_their_kv_to_be_removed(tmp_path: Path) -> None:
    known, _ = made(tmp_path)
    page, _ = next((page, hit) for page, hit in owners(known.path).items() if 2 <= len(hit) <= 4)
    damage(known.path, page, bytes(PAGE))
    opened = library(tmp_path)
    assert opened.unaccounted and opened.unclean
    assert opened.losses()[0].passages == len([row for row in opened.removed_passages() if row.tokens]) > 0


def test_numbers_of_lost_documents_and_passages_are_not_given_again(tmp_path: Path) -> None:
    known, _ = made(tmp_path)
    with closing(sqlite3.connect(known.path)) as connection:
        last = dict(connection.execute("SELECT name, seq FROM sqlite_sequence"))
    page = max(page for page, hit in owners(known.path).items() if f"/docs/{DOCUMENTS - 1}.md" in hit)
    damage(known.path, page, bytes(PAGE))
    opened = library(tmp_path)
    opened.put([cut("new", "a passage")], "e")
    (entry,) = opened.find("new")
    assert entry.id > last["documents"] and opened.chunks_of(entry.id)[0].id > last["chunks"]


def test_a_sound_library_is_not_checked_again_and_one_that_was_touched_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, _ = made(tmp_path, 2)
    checks: list[Path] = []
    import rekindle.knowledge.library_file as module

    real = module.damage_of
    monkeypatch.setattr(module, "damage_of", lambda path, **more: (checks.append(path), real(path, **more))[1])
    for _ in range(2):
        opened = library(tmp_path)
        opened.put([cut("a", str(len(checks)))], "e")
        opened.close()
    assert checks == [], "what was checked and is as it was left is not checked again"
    known.path.write_bytes(known.path.read_bytes())
    library(tmp_path).close()
    assert checks == [known.path]
    now = module.time.time
    monkeypatch.setattr(module.time, "time", lambda: now() + 2 * 24 * 3600)
    library(tmp_path).close()
    assert len(checks) == 2, "a day later it is"


@pytest.mark.parametrize("wrecked", ["words", "rows"])
def test_a_check_finds_damage_and_only_fix_saves(tmp_path: Path, wrecked: str) -> None:
    known, texts = made(tmp_path)
    with closing(sqlite3.connect(known.path)) as connection:
        if wrecked == "words":  # no page is malformed, and no passage is wrong
            connection.execute("UPDATE words_data SET block=zeroblob(length(block)) WHERE id > 10")
        else:
            connection.execute("UPDATE chunks SET text='other' WHERE id=2")
        connection.commit()
    found_damage = check_library(known.path, fix=False)
    assert found_damage.damage and found_damage.salvaged is None and current_file(known.path) == known.path
    saved = check_library(known.path, fix=True)
    assert saved.salvaged is not None and saved.damaged_files == (known.path,)
    assert check_library(known.path, fix=False).damage is None
    opened = library(tmp_path)
    if wrecked == "words":
        assert texts_of(opened) == texts and saved.salvaged.lost_passages == 0
        assert found(opened, texts["/docs/1.md"][0].split()[0])
    else:
        assert saved.salvaged.lost_passages == 1


def test_a_salvage_that_was_killed_is_begun_again_and_leaves_no_text_behind(tmp_path: Path) -> None:
    known, texts = made(tmp_path)
    damage(known.path, 1, bytes(PAGE))
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "import rekindle.knowledge.salvage as salvage\n"
        "salvage._Repair.run = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "from tests.knowledge.conftest import library\n"
        "library(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False, timeout=120)
    assert list(known.path.parent.glob("*.part*")) and not next_file(known.path).exists()
    opened = library(tmp_path)
    assert texts_of(opened) == texts
    assert not list(known.path.parent.glob("*.part*"))


def test_a_disk_that_cannot_be_read_just_now_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, texts = made(tmp_path)
    known.path.write_bytes(known.path.read_bytes())  # so that it is checked

    def failing(*_: object, **__: object) -> object:
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch, pytest.raises(KnowledgeUnusable, match="disk I/O error"):
        patch.setattr("rekindle.knowledge.library_file._damage_in", failing)
        library(tmp_path)
    assert texts_of(library(tmp_path)) == texts and current_file(known.path) == known.path


def test_a_salvage_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known, _ = made(tmp_path)
    damage(known.path, 1, bytes(PAGE))
    with caplog.at_level(logging.WARNING):
        library(tmp_path)
    assert str(known.path) in caplog.text and f"{DOCUMENTS} documents" in caplog.text
