"""This machine: what it has, and the folders where Rekindle keeps things on it."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import IO, Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and system."""
    import psutil

    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.system(),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """The physical cores that this process may use."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, int(psutil.cpu_count(logical=False) or allowed)))


def free_memory() -> int:
    """Bytes that this process could still take without swapping: of the machine, and of its control group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, min(free, limit - used + int(counts["file"])))
    except (OSError, ValueError, KeyError):  # no limit, or no such file
        return free


def home_folder() -> Path:
    """The folder of everything Rekindle keeps: `REKINDLE_HOME`, else `rekindle` in the user's cache folder."""
    if chosen := os.environ.get("REKINDLE_HOME"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "rekindle"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "rekindle"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rekindle"
    return Path.home() / ".cache" / "rekindle"


def data_folder() -> Path:
    """The folder of what cannot be computed again: `REKINDLE_HOME`, else `rekindle` in the user's folder of data.

    Never a cache folder: those are skipped by backups and emptied by people and programs.
    """
    if chosen := os.environ.get("REKINDLE_HOME"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_DATA_HOME"):
        return Path(xdg).expanduser() / "rekindle"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "rekindle-data"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "rekindle"
    return Path.home() / ".local" / "share" / "rekindle"


def cache_folder() -> Path:
    """Where KV is kept unless another folder is named."""
    return home_folder() / "cache"


def models_folder() -> Path:
    """Where pulled models live, one folder each."""
    return home_folder() / "models"


def make_private_folder(folder: Path) -> None:
    """Make a folder, and its missing parents, that nobody else can enter. In our home, existing ones are narrowed.

    A home that holds files of others keeps its mode. Raises `OSError`.
    """
    for missing in reversed([path for path in folder.parents if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    homes = set[Path]()
    for place in (home_folder, data_folder):
        with contextlib.suppress(RuntimeError):  # a user without a home
            homes.add(place())
    for path in (folder, *folder.parents):
        if homes.intersection((path, *path.parents)) and (_holds_only_ours if path in homes else _is_no_link)(path):
            narrow(path)


def narrow(path: Path) -> None:
    """Remove other users' permissions from a file or folder, if it is this user's and its file system has them."""
    with contextlib.suppress(OSError):
        about = path.stat()
        if os.name == "posix" and about.st_mode & 0o077 and about.st_uid == os.geteuid():
            path.chmod(about.st_mode & 0o700)


def narrow_tree(folder: Path) -> None:
    """Remove other users' permissions from a folder that another library wrote, and from all in it."""
    for path in filter(_is_no_link, (folder, *folder.rglob("*"))):
        narrow(path)


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open a file as `open` does; only its owner can read a new one. Raises `OSError`."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


_OWN_FOLDERS = {"cache", "models", "servers", "usage", "knowledge", "lost+found"}  # the last is an empty volume's


def _holds_only_ours(home: Path) -> bool:
    with contextlib.suppress(OSError):
        return all(path.name in _OWN_FOLDERS or ".json" in path.name for path in home.iterdir())
    return False


def _is_no_link(path: Path) -> bool:
    return not path.is_symlink()


def config_folder() -> Path | None:
    """Where the user's own `rekindle.toml` is looked for: `rekindle` in the user's folder of settings.

    None: this user has no home.
    """
    if xdg := os.environ.get("XDG_CONFIG_HOME"):
        return Path(xdg).expanduser() / "rekindle"
    if sys.platform == "win32" and (roaming := os.environ.get("APPDATA")):
        return Path(roaming) / "rekindle"
    try:
        return Path.home() / ".config" / "rekindle"
    except RuntimeError:  # a user without an entry in the system's list, as in some containers
        return None
