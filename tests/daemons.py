"""The background processes that commands of tests leave."""

from __future__ import annotations

from pathlib import Path

import psutil


def daemons(runtime: Path) -> list[psutil.Process]:
    """Those that listen in a folder (`XDG_RUNTIME_DIR`), or that are still ending."""
    found = []
    for process in psutil.process_iter():
        try:
            if "rekindle.daemon.process" not in process.cmdline():
                continue
            if process.environ().get("XDG_RUNTIME_DIR") == str(runtime):
                found.append(process)
        except psutil.Error:
            continue
    return found
