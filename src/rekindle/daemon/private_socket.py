"""The sockets of this user's daemons: in a folder that nobody else can enter. Messages are lines of JSON."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

SUPPORTED = hasattr(socket, "AF_UNIX")
_CONNECT_SECONDS = 5.0


def private_folder() -> Path:
    """The folder of the sockets, made if need be. Raises `OSError` if it is not this user's alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        folder = Path(runtime) / "rekindle"
    else:
        folder = Path(tempfile.gettempdir()) / f"rekindle-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise PermissionError(f"{folder} is not a folder of this user alone")
    return folder


def sockets() -> list[Path]:
    """The sockets of this user's daemons; the daemon may be gone."""
    try:
        return sorted(private_folder().glob("*.sock")) if SUPPORTED else []
    except OSError:
        return []


def connect(path: Path) -> JobConnection | None:
    """A connection to the daemon at a socket; None if there is none."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.settimeout(_CONNECT_SECONDS)
    try:
        made.connect(str(path))
    except OSError:
        made.close()
        return None
    made.settimeout(None)  # a long prompt may take long
    return JobConnection(made)


class JobConnection:
    """One end of a connection. Several threads may send."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lines = connected.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Raises `OSError` if the other end is gone."""
        line = json.dumps(message).encode() + b"\n"
        with self._sending:
            self._socket.sendall(line)

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if the other end is gone or takes longer."""
        self._socket.settimeout(seconds)
        message = next(self.messages(), None)
        self._socket.settimeout(None)
        return message

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the other end sends, until it closes the connection."""
        try:
            for line in self._lines:
                yield json.loads(line)
        except (OSError, ValueError):  # it died in the middle of a line
            return

    def close(self) -> None:
        """The other end sees the end of the messages, also while this one is being read."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()
