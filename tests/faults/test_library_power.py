"""The power goes after a call on a library has returned: what it put, noted or removed is as it said.

A shim in front of the C library remembers what every file held when it was last synced, and what every folder listed. A
process is killed right after the call; then a folder is made of what was synced alone: whatever was only written is
gone. So it is proved that SQLite and this code ask for the syncs that are needed, in an order that works. Not proved:
that the disk does what it is asked for.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.knowledge.library_file import next_file
from tests.knowledge.conftest import cut, library
from tests.knowledge.test_damage import PAGE, damage, made, texts_of
from tests.knowledge.test_library import ROOT

SHIM = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static void remember(int fd) {
    const char *place = getenv("SYNCED");
    struct stat about;
    if (!place || fstat(fd, &about)) return;
    char name[4096], draft[4100], self[64], part[65536];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    snprintf(name, sizeof name, "%s/%lu", place, (unsigned long)about.st_ino);
    snprintf(draft, sizeof draft, "%s.new", name);
    if (S_ISREG(about.st_mode)) {
        int in = open(self, O_RDONLY), out = open(draft, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        ssize_t count;
        while ((count = read(in, part, sizeof part)) > 0)
            if (write(out, part, count) != count) abort();
        close(in);
        close(out);
        rename(draft, name);
    } else if (S_ISDIR(about.st_mode)) {
        DIR *folder = opendir(self);
        FILE *out = fopen(draft, "w");
        struct dirent *entry;
        while (folder && (entry = readdir(folder)))
            fprintf(out, "%lu %s\n", (unsigned long)entry->d_ino, entry->d_name);
        fclose(out);
        closedir(folder);
        rename(draft, name);
    }
}

int fsync(int fd) {
    int done = ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
    if (!done) remember(fd);
    return done;
}

int fdatasync(int fd) {
    int done = ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
    if (!done) remember(fd);
    return done;
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shim, compiled."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("the shim needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "synced.c").write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "synced.so"), str(folder / "synced.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return folder / "synced.so"


def power_lost(shim: Path, tmp_path: Path, call: str) -> Path:
    """Run a call in a process that dies when it has returned; a folder of what was synced by then.

    What stood in the folder before the process began is on the medium.
    """
    synced = tmp_path / "synced"
    shutil.rmtree(synced, ignore_errors=True)
    synced.mkdir()
    place = tmp_path / "library"
    place.mkdir(exist_ok=True)
    for path in place.iterdir():
        shutil.copy(path, synced / str(path.stat().st_ino))
    listed = "".join(f"{path.stat().st_ino} {path.name}\n" for path in place.iterdir())
    (synced / str(place.stat().st_ino)).write_text(listed)
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom tests.knowledge.conftest import cut, library\n"
        f"known = library(Path(sys.argv[1]))\n{call}\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(shim), "SYNCED": str(synced)},
        check=False,
        timeout=120,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    after = tmp_path / "after" / "library"
    shutil.rmtree(after, ignore_errors=True)
    after.mkdir(parents=True)
    for line in (synced / str(place.stat().st_ino)).read_text().splitlines():
        inode, _, name = line.partition(" ")
        if name not in (".", "..") and not name.endswith("-shm"):  # SQLite makes that anew
            content = synced / inode
            (after / name).write_bytes(content.read_bytes() if content.exists() else b"")
    return after.parent


def test_a_document_that_was_put_is_there_also_in_a_library_that_is_new(shim: Path, tmp_path: Path) -> None:
    after = power_lost(shim, tmp_path, "known.put([cut('a', 'the only copy')], 'e')")
    assert texts_of(library(after)) == {"a": ["the only copy"]} and library(after).losses() == []


def test_each_of_many_puts_is_there(shim: Path, tmp_path: Path) -> None:
    call = "for n in range(40): known.put([cut(f'd{n}', f'text {n} ' * 400)], 'e')"
    after = power_lost(shim, tmp_path, call)
    assert texts_of(library(after)) == {f"d{n}": [f"text {n} " * 400] for n in range(40)}


def test_tokens_that_were_noted_are_noted_before_any_kv_can_be_kept(shim: Path, tmp_path: Path) -> None:
    call = "known.put([cut('a', 'text')], 'e'); assert known.note_tokens('t', {1: bytes(range(64))})"
    after = library(power_lost(shim, tmp_path, call))
    after.remove([after.find("a")[0].id])
    assert [row.tokens for row in after.removed_passages()] == [bytes(range(64))]


def test_what_was_forgotten_stays_forgotten(shim: Path, tmp_path: Path) -> None:
    known = library(tmp_path)
    known.put([cut("a", "forget this one"), cut("b", "keep this one")], "e")
    known.close()
    call = "known.remove([known.find('a')[0].id]); known.purge_removed(known.removed_passages())"
    after = library(power_lost(shim, tmp_path, call))
    assert texts_of(after) == {"b": ["keep this one"]}


def test_what_was_salvaged_is_there_with_its_note(shim: Path, tmp_path: Path) -> None:
    known, texts = made(tmp_path)
    damage(known.path, 1, bytes(PAGE))
    after = library(power_lost(shim, tmp_path, "known.put([cut('new', 'and more')], 'e')"))
    assert texts_of(after) == {**texts, "new": ["and more"]} and len(after.losses()) == 1
    assert after.path.name == next_file(known.path).name


def test_both_connections_of_a_library_sync_every_commit(tmp_path: Path) -> None:
    """The same where there is no compiler: 2 is FULL."""
    known = library(tmp_path)
    with known.reading() as reading:
        assert reading.execute("PRAGMA synchronous").fetchone()[0] == 2
    for durable in (False, True):
        with known.writing(durable=durable) as writing:
            assert writing.execute("PRAGMA synchronous").fetchone()[0] == (2 if durable else 1)
    assert known.put([cut("a", "x")], "e") is None
