"""Cache folders to be damaged: made, copied, looked into, and judged.

The judgement is always the same: whatever happened, a store serves the right numbers or nothing, and heals.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rekindle.core.keys import KvSpace
from rekindle.errors import KvLost
from rekindle.store.check import CacheProblem, check
from rekindle.store.folder import CATALOG, FORMAT, MARKER
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep, load

NO_MEMORY = StoreSettings(disk_limit="50MB", memory_limit=0)
WITH_MEMORY = StoreSettings(disk_limit="50MB", memory_limit="10MB")
NOBODY = 65534
REPOSITORY = Path(__file__).parents[2]


def prompt(number: int, count: int = 80) -> list[int]:
    """Tokens that no prompt of another number begins with."""
    return [number * 1000 + place for place in range(count)]


def fill(folder: Path, prompts: Sequence[Sequence[int]], settings: StoreSettings = NO_MEMORY) -> None:
    """Keep prompts in a folder, and close it."""
    with TieredStore(folder, settings) as store:
        for tokens in prompts:
            assert keep(store, tokens).outcome == "kept"


def make_older(folder: Path) -> None:
    """Make a cache one of format 1: its marker, its catalog of then, which has other tables, and its extents."""
    text = (folder / MARKER).read_text()
    (folder / MARKER).write_text(text.replace(f"format {FORMAT}", "format 1"))
    with closing(sqlite3.connect(folder / CATALOG)) as connection, connection:
        connection.execute("ALTER TABLE delta_bases RENAME TO anchors")
        connection.execute("PRAGMA user_version=8")


def copy(folder: Path, name: str) -> Path:
    """A copy of a folder beside it; an older copy of that name goes."""
    target = folder.with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(folder, target))


def extent_of(
    folder: Path, tokens: Sequence[int], settings: StoreSettings = NO_MEMORY, kv_space: KvSpace = KV_SPACE
) -> Path:
    """The file that the beginning of a prompt is in."""
    with TieredStore(folder, settings) as store:
        match = store.lookup(kv_space, tokens)
        (row,) = [row for row in store.disk.entries() if row.id == match.pieces[0].extent]
        return store.disk.extents.path(row.name)


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def load_or_lose(store: TieredStore, tokens: Sequence[int], kv_space: KvSpace = KV_SPACE) -> int | None:
    """How many tokens were served, every number right; None if they were found but lost."""
    try:
        return load(store, tokens, kv_space)
    except KvLost:
        return None


def heals(store: TieredStore, tokens: Sequence[int]) -> bool:
    """Load a prompt, and if it is lost, keep and load it again. Whether it was lost."""
    before = store.lookup(KV_SPACE, tokens).length
    served = load_or_lose(store, tokens)
    if served is None:
        assert store.lookup(KV_SPACE, tokens).length < before, "what was lost is found again"
    if served != len(tokens):
        assert keep(store, tokens).outcome == "kept"
    assert load(store, tokens) == len(tokens)
    return served is None


def problems(folder: Path, settings: StoreSettings = NO_MEMORY, *, fix: bool = False) -> tuple[CacheProblem, ...]:
    """What a check of the folder finds."""
    with TieredStore(folder, settings) as store:
        return check(store.disk, fix=fix).problems


def file_bytes(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def open_to_all(folder: Path) -> None:
    """Let everybody read a folder and what is in it, and nobody but its owner write."""
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def as_nobody(code: str, *arguments: object) -> dict[str, object]:
    """Run code in a process that may not write what is root's; what it put into `answer`.

    The code has `arguments` as strings, everything of `tests.kvs` and of this module.
    """
    script = (
        "import json, os, sys\n"
        "from tests.kvs import *\n"
        "from tests.faults.folders import *\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "arguments, answer = sys.argv[1:], {}\n"
        f"{code}\n"
        "print(json.dumps(answer))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer
