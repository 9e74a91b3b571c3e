"""A description of this machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any


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
