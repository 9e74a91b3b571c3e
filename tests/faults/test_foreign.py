"""Other people's files, in and around a folder that is named as a cache: not a byte of them ever changes."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.cli import cache as commands
from rekindle.errors import CacheUnusable, RekindleError
from rekindle.store.check import check
from rekindle.store.disk import DiskStore, Machine
from rekindle.store.files import Files, Handle
from rekindle.store.folder import CATALOG, FORMAT, MARKER, CacheFolder
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.faults.folders import NO_MEMORY, REPOSITORY, copy, fill, load_or_lose, make_older, problems, prompt
from tests.kvs import keep, load

SHORT = StoreSettings(disk_limit="50MB", memory_limit=0, ttl_seconds=60)
OURS = "0123456789abcdef"
SIGNATURE = "Signature: 8a477f597d28d172789f06886806bc55"
linux = pytest.mark.skipif(sys.platform != "linux", reason="makes sockets without a socket")

# -- the three cases of the audit --------------------------------------------------------------------------------------


def _refused(folder: Path) -> None:
    """Nothing that uses a cache folder takes this one."""
    for use in (
        lambda: TieredStore(folder, NO_MEMORY),
        lambda: DiskStore(folder, NO_MEMORY),
        lambda: commands.check(fix=True, folder=folder),
        lambda: commands.clear(yes=True, folder=folder),
        lambda: commands.gc(folder=folder),
    ):
        with pytest.raises(CacheUnusable, match=r"\.$"):
            use()


def test_a_folder_that_merely_has_a_subfolder_called_extents_is_left_as_it_is(tmp_path: Path) -> None:
    shapes = tmp_path / "gis" / "extents" / "germany" / "map.shp"
    shapes.parent.mkdir(parents=True)
    shapes.write_bytes(b"shapes")
    before = _everything(tmp_path)
    _refused(tmp_path / "gis")
    assert _everything(tmp_path) == before


def test_a_link_called_extents_is_not_followed(tmp_path: Path) -> None:
    photos, folder = tmp_path / "photos", tmp_path / "cache"
    photos.mkdir()
    for name in ("holiday.jpg", f"{OURS}.kv"):
        (photos / name).write_bytes(b"a photo")
    folder.mkdir()
    (folder / "extents").symlink_to(photos)
    before = _everything(tmp_path)
    _refused(folder)
    assert _everything(tmp_path) == before
    (folder / "extents").unlink()
    fill(folder, [prompt(1)])  # and not in a folder that is a cache, either
    shutil.rmtree(folder / "extents")
    (folder / "extents").symlink_to(photos)
    before = _everything(photos)
    _refused(folder)
    assert _everything(photos) == before


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("damage", ["none", "cut", "overwritten"])
def test_a_database_of_another_program_is_never_replaced_or_set_aside(
    tmp_path: Path, marked: bool, damage: str
) -> None:
    folder = tmp_path / "cache"
    if marked:
        fill(folder, [])
        (folder / CATALOG).unlink()
    folder.mkdir(exist_ok=True)
    _make_recipes(folder / CATALOG)
    size = (folder / CATALOG).stat().st_size
    with (folder / CATALOG).open("r+b") as file:
        if damage == "cut":
            file.truncate(size - 2000)
        elif damage == "overwritten":
            file.seek(110)
            file.write(b"\xff" * (size - 110))
    before = (folder / CATALOG).read_bytes()
    _refused(folder)
    assert (folder / CATALOG).read_bytes() == before
    assert [path.name for path in folder.iterdir() if "broken" in path.name] == []


def _make_recipes(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name TEXT)")
        connection.execute("INSERT INTO recipes VALUES ('soup')")
        connection.commit()


# -- any tree ----------------------------------------------------------------------------------------------------------

_SUFFIXES = ["", "-wal", "-shm", "-journal", ".broken-1", ".broken-1-wal", ".broken-x", ".bak"]
_NAMES = st.sampled_from(
    [
        *(CATALOG + suffix for suffix in _SUFFIXES),
        *(MARKER, f"{MARKER}.{OURS}", f"{MARKER}.old", "extents", "writers", "knowledge"),
        *(OURS, f"{OURS}.kv", f"{OURS}.kv.part", f"{OURS.upper()}.kv", f"{OURS}.kv\n", "map.shp", ".git", "\udcff"),
    ]
)
_PARTS = st.sampled_from(["", "", "extents", "writers", "knowledge", f"extents/{OURS}.kv"])
_KINDS = st.sampled_from(
    ["file", "sqlite", "folder", "link to a file", "link to a folder", "link to nothing", "fifo", "socket", "hard link"]
)
_THINGS = st.lists(st.tuples(_PARTS, _NAMES, _KINDS), min_size=1, max_size=5)


def _put(path: Path, kind: str, outside: Path) -> None:
    """Put something in place of whatever is there; nothing where that cannot be."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if kind == "file":
            path.write_bytes(b"somebody's")
            path.chmod(0o644)
        elif kind == "sqlite":
            _make_recipes(path)
        elif kind == "folder":
            path.mkdir()
            for name in ("inside", f"{OURS}.kv", OURS):
                (path / name).write_bytes(b"inside")
        elif kind.startswith("link to "):
            path.symlink_to(outside / {"file": "letter", "folder": "photos", "nothing": "none"}[kind.split()[-1]])
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        else:
            path.hardlink_to(outside / "ledger")


def _make_outside(outside: Path) -> None:
    (outside / "photos" / "extents").mkdir(parents=True)
    for name in ("letter", "ledger", "photos/holiday.jpg", f"photos/{OURS}.kv", f"photos/{OURS}", f"photos/{CATALOG}"):
        (outside / name).write_bytes(b"the only copy of " + name.encode())
        (outside / name).chmod(0o644)


def _everything(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything under a folder: what it is, whose, since when, and what is in it. Links are not followed."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in [".", *folders, *files]:
            path = Path(folder, name)
            about = path.lstat()
            content: object = None
            if stat.S_ISREG(about.st_mode):
                content = path.read_bytes()
            elif stat.S_ISLNK(about.st_mode):
                content = str(path.readlink())
            found[str(path.relative_to(root))] = (about.st_mode, about.st_ino, about.st_uid, about.st_mtime_ns, content)
    return found


def _is_ours(folder: Path, path: Path) -> bool:
    """Whether a marked folder's rule gives this path to the cache: written down here once more, in other words."""
    place = path.relative_to(folder).parts
    about = path.lstat()
    if stat.S_ISDIR(about.st_mode):
        return place in ((), ("extents",), ("writers",))
    if not stat.S_ISREG(about.st_mode):
        return False
    is_hex = len(place[-1].removesuffix(".kv")) == 16 and set(place[-1].removesuffix(".kv")) <= set("0123456789abcdef")
    if place[:-1] == ("extents",):
        return is_hex and place[-1].endswith(".kv")
    if place[:-1] == ("writers",):
        return is_hex and not place[-1].endswith(".kv")
    if len(place) > 1:
        return False
    if place[0] == CATALOG:
        return b"recipes" not in path.read_bytes()
    set_aside = place[0] in (f"{CATALOG}.broken-1", f"{CATALOG}.broken-1-wal")
    return set_aside or place[0] in (f"{CATALOG}-wal", f"{CATALOG}-shm", f"{CATALOG}-journal", MARKER)


def _is_marked(folder: Path) -> bool:
    path = folder / MARKER
    is_file = path.is_file() and not path.is_symlink()
    return is_file and path.read_text(errors="replace").startswith(
        (f"{SIGNATURE}\n# Rekindle cache, format 1\n", f"{SIGNATURE}\n# Rekindle cache, format 2\n")
    )


def _foreign(root: Path, folder: Path, *, marked: bool) -> dict[str, tuple[object, ...]]:
    """Everything under `root` that is not the cache's. A folder whose content changes may have another time."""
    found = {}
    for name, about in _everything(root).items():
        path = root / name
        if path == root or (path == folder and marked):
            continue
        if not (marked and path.is_relative_to(folder) and _is_ours(folder, path)):
            found[name] = about
    return found


@contextmanager
def _tolerant() -> Iterator[None]:
    """What a folder in trouble may raise, by contract."""
    try:
        yield
    except RekindleError as error:
        assert str(error).endswith("."), "not a sentence"
    except (OSError, sqlite3.Error, typer.Exit):
        pass


def _use_everything(folder: Path, meanwhile: Callable[[], None]) -> None:
    now = [1.9e9]
    with _tolerant(), TieredStore(folder, SHORT, Machine(clock=lambda: now[0], write_timeout_seconds=0.2)) as store:
        keep(store, prompt(1))
        meanwhile()
        load_or_lose(store, prompt(1))
        keep(store, prompt(2))
        now[0] += 61
        store.maintain()
        keep(store, prompt(3))
        with _tolerant():
            check(store.disk, fix=True)
        with _tolerant():
            store.disk.collect()
        with _tolerant():
            store.disk.remove(store.disk.entries())
    for command in (
        lambda: commands.check(fix=True, folder=folder),
        lambda: commands.gc(folder=folder),
        lambda: commands.clear(yes=True, folder=folder),
    ):
        with _tolerant():
            command()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with two prompts."""
    folder = tmp_path_factory.mktemp("foreign") / "sound"
    fill(folder, [prompt(1), prompt(4)])
    return folder


@linux
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(things=_THINGS, cached=st.sampled_from([None, FORMAT, 1]), while_used=st.booleans())
def test_nothing_foreign_changes_whatever_is_in_the_folder(
    sound: Path, things: list[tuple[str, str, str]], cached: int | None, while_used: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folder = root / "cache"
        _make_outside(root / "outside")
        if cached is not None:
            shutil.copytree(sound, folder)
        if cached == 1:
            make_older(folder)
        before: dict[str, tuple[object, ...]] = {}
        ours = []

        def put() -> None:
            if while_used:  # the catalog that is open stays ours, also without the marker
                ours.append(_is_marked(folder))
            for part, thing, kind in things:
                _put(folder / part / thing, kind, root / "outside")
            ours.append(_is_marked(folder))
            before.update(_foreign(root, folder, marked=any(ours)))
            if while_used:  # SQLite removes its log when it is closed, and does not look what stands there by then
                for suffix in ("-wal", "-shm"):
                    before.pop(f"cache/{CATALOG}{suffix}", None)

        if while_used:
            _use_everything(folder, put)
        else:
            put()
            _use_everything(folder, lambda: None)
        after = _foreign(root, folder, marked=any(ours))
        # A folder of somebody else's may become emptier or fuller only if it is one of the cache's own.
        assert {name: after.get(name) for name in before} == before
        assert while_used or after.keys() <= before.keys()


# -- the marker --------------------------------------------------------------------------------------------------------


def test_a_new_cache_bears_the_marker_of_the_convention_with_our_name_and_format(tmp_path: Path) -> None:
    fill(tmp_path / "cache", [prompt(1)])
    lines = (tmp_path / "cache" / MARKER).read_text("ascii").splitlines()
    assert lines[:2] == [SIGNATURE, "# Rekindle cache, format 2"]
    assert len(lines) > 2 and all(line.startswith("# ") for line in lines[1:])


@linux
@pytest.mark.parametrize("kind", ["empty", "another's", "newer", "cut", "link", "fifo", "socket", "folder"])
def test_a_marker_that_is_not_ours_is_refused_with_what_to_do_and_left(tmp_path: Path, sound: Path, kind: str) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound, folder)
    marker, text = folder / MARKER, (folder / MARKER).read_text()
    marker.unlink()
    if kind == "link":
        (tmp_path / "real").write_text(text)
        marker.symlink_to(tmp_path / "real")
    elif kind == "fifo":
        os.mkfifo(marker)
    elif kind == "socket":
        os.mknod(marker, stat.S_IFSOCK | 0o600)
    elif kind == "folder":
        marker.mkdir()
    else:
        texts = {"empty": "", "another's": f"{SIGNATURE}\n# ccache\n", "cut": text[:60]}
        marker.write_text(texts.get(kind, text.replace("format 2", "format 3")))
    before = _everything(tmp_path)
    with pytest.raises(CacheUnusable, match="Upgrade, or choose" if kind == "newer" else "Choose another folder"):
        TieredStore(folder, NO_MEMORY)
    _refused(folder)
    assert _everything(tmp_path) == before


def test_a_cache_of_an_older_rekindle_is_refused_with_what_to_do_and_left(tmp_path: Path, sound: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound, folder)
    (folder / MARKER).unlink()
    before = _everything(folder)
    with pytest.raises(CacheUnusable, match=r"Choose another folder .* older Rekindle, you may delete it\.$"):
        TieredStore(folder, NO_MEMORY)
    _refused(folder)
    assert _everything(folder) == before


def test_after_the_marker_vanished_while_in_use_nothing_is_written_or_removed_and_what_is_there_is_served(
    tmp_path: Path, sound: Path
) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound, folder)
    now = [1.9e9]
    with TieredStore(folder, SHORT, Machine(clock=lambda: now[0])) as store:
        assert keep(store, prompt(2)).outcome == "kept"
        assert load(store, prompt(2)) == 80
        marker = (folder / MARKER).read_bytes()
        (folder / MARKER).unlink()
        files = {path: path.read_bytes() for path in folder.glob("extents/*")}
        assert load(store, prompt(2)) == 80
        kept = keep(store, prompt(3))
        assert (kept.outcome, kept.reason[-1]) == ("failed", ".")
        now[0] += 61
        store.maintain()
        for use in (
            store.disk.collect,
            store.disk.room.remove_strays,
            lambda: store.disk.remove(store.disk.entries()),
            lambda: store.disk.place.remove("extents", next(iter(files)).name),
        ):
            with contextlib.suppress(CacheUnusable):
                use()
        assert {path: path.read_bytes() for path in folder.glob("extents/*")} == files
        (folder / MARKER).write_bytes(marker)
        assert keep(store, prompt(3)).outcome == "kept"
        store.maintain()
        assert load(store, prompt(3)) == 80
        assert check(store.disk).problems == ()


def test_a_folder_named_through_a_link_is_the_one_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    fill(tmp_path / "cache", [prompt(1)])
    assert (tmp_path / "cache").is_symlink()
    with TieredStore(tmp_path / "disk", NO_MEMORY) as store:
        assert load(store, prompt(1)) == 80


# -- several at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["names", "make_folder", "create", "write_some", "sync", "place", "open"])
def test_whoever_makes_the_same_folder_at_the_same_time_gets_the_same_cache(tmp_path: Path, method: str) -> None:
    """Another store opens the folder, and keeps something, before the first such call of ours, and after it."""
    for number, late in enumerate((False, True)):
        folder = tmp_path / str(number)
        todo = [True]

        def other(folder: Path = folder, todo: list[bool] = todo) -> None:
            if todo:
                todo.clear()
                fill(folder, [prompt(1)])

        def call(files: Files, *arguments: object, late: bool = late, other: Callable[[], None] = other) -> object:
            if late:
                try:
                    return getattr(Files, method)(files, *arguments)
                finally:
                    other()
            other()
            return getattr(Files, method)(files, *arguments)

        files = type("Racing", (Files,), {method: call})()
        with TieredStore(folder, NO_MEMORY, Machine(files=files)) as store:
            assert not todo
            assert load(store, prompt(1)) == 80
            assert keep(store, prompt(2)).outcome == "kept"
            store.disk.collect()
        assert problems(folder) == ()
        assert [path.name for path in folder.glob(f"{MARKER}*")] == [MARKER]


def test_processes_that_make_the_same_folders_all_keep_into_them(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.faults.folders import NO_MEMORY, TieredStore, keep, prompt\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for number in range(12):\n"
        "    with TieredStore(Path(sys.argv[1]) / str(number), NO_MEMORY) as store:\n"
        "        print(keep(store, prompt(int(sys.argv[2]))).outcome)\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path), str(number)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert [process.communicate(timeout=120)[0].split() for process in started] == [["kept"] * 12] * 3
    finally:
        for process in started:
            process.kill()
            process.wait()
    for number in range(12):
        with TieredStore(tmp_path / str(number), NO_MEMORY) as store:
            assert [load(store, prompt(one)) for one in range(3)] == [80] * 3


def test_a_draft_of_a_marker_that_a_killed_process_left_is_no_hindrance(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    class Dying(Files):
        def place(self, draft: Path, path: Path) -> None:
            raise KeyboardInterrupt

        def remove(self, path: Path) -> bool:
            raise OSError("dead")

    with pytest.raises(KeyboardInterrupt):
        CacheFolder(folder, Dying()).claim()
    assert len(list(folder.iterdir())) == 1
    fill(folder, [prompt(1)])
    with TieredStore(folder, NO_MEMORY) as store:
        assert load(store, prompt(1)) == 80


# -- in place of a file ------------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("kind", ["fifo", "socket", "link to a fifo", "device"])
def test_what_is_no_file_in_place_of_an_extent_is_damaged_at_once(tmp_path: Path, sound: Path, kind: str) -> None:
    if kind == "device" and os.geteuid() != 0:
        pytest.skip("needs root to make a device")
    folder = tmp_path / "cache"
    shutil.copytree(sound, folder)
    with TieredStore(folder, NO_MEMORY) as store:
        (path,) = [store.disk.extents.path(row.name) for row in store.disk.entries()[:1]]
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "device":
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(5, 0))  # the terminal
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.faults.folders import *\n"
        "folder = Path(sys.argv[1])\n"
        "print([(problem.kind, problem.entry) for problem in problems(folder)])\n"
        "with TieredStore(folder, NO_MEMORY) as store:\n"
        "    print([load_or_lose(store, prompt(1)), load_or_lose(store, prompt(4))])\n"
        "print([problem.kind for problem in problems(folder, fix=True)], problems(folder))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == [str([("damaged", path.stem)]), "[None, 80]"], done.stderr
    assert lines[2].endswith(" ()")
    assert path.is_symlink() or not path.is_file(), "it is not ours to remove"
    assert os.path.lexists(path)


def test_a_row_that_names_a_file_elsewhere_never_reads_or_removes_it(tmp_path: Path, sound: Path) -> None:
    folder = copy(sound, "rows")
    outside = folder.parent / "outside.kv"
    outside.write_bytes(b"the only copy")
    with closing(sqlite3.connect(folder / CATALOG, isolation_level=None)) as connection:
        connection.execute("UPDATE extents SET name='../../outside', state='dropping' WHERE id=1")
        connection.execute(
            "UPDATE extents SET name='../../out' || 'side ', writer='../../outside.kv', state='writing' WHERE id=2"
        )
    with TieredStore(folder, NO_MEMORY) as store:
        store.maintain()
        store.disk.collect()
        check(store.disk, fix=True)
        assert check(store.disk).problems == ()
        assert store.disk.entries() == []
    assert outside.read_bytes() == b"the only copy"


def test_the_rights_of_a_file_that_has_another_name_elsewhere_stay(tmp_path: Path, sound: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound, folder)
    (path, *_) = (folder / "extents").iterdir()
    path.chmod(0o644)
    (tmp_path / "backup").hardlink_to(path)
    before = path.read_bytes()
    problems(folder, fix=True)
    assert problems(folder) == ()
    assert (tmp_path / "backup").read_bytes() == before
    assert stat.S_IMODE((tmp_path / "backup").stat().st_mode) == 0o644


def test_a_catalog_that_has_another_name_elsewhere_is_refused_and_left(tmp_path: Path, sound: Path) -> None:
    folder = tmp_path / "cache"
    shutil.copytree(sound, folder)
    (tmp_path / "backup").hardlink_to(folder / CATALOG)
    before = (tmp_path / "backup").read_bytes()
    with pytest.raises(CacheUnusable, match="hard link"):
        TieredStore(folder, NO_MEMORY)
    assert (tmp_path / "backup").read_bytes() == before


def test_a_lock_is_taken_on_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"foreign")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo"):
        with pytest.raises(OSError):
            Files().try_lock(tmp_path / name)
    handle = Files().try_lock(tmp_path / "lock")
    assert isinstance(handle, Handle)
    Files().close(handle)
