"""Reading untrusted input safely: regular files of bounded size, secrets that only their owner can read, and JSON in
bounded memory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

from rekindle.errors import InvalidSetting, why_unreadable

_SECRET_BYTES = 1 << 20  # enough for the keys of ten thousand clients
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_CLOEXEC", "O_NOCTTY", "O_NONBLOCK", "O_BINARY"))


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """The content of a file. Raises `OSError`, also if it is larger or not a regular file."""
    return _read(path, max_bytes)[0]


def read_secret_file(path: Path, what: str) -> bytes:
    """The content of a file with a key or token, called `what` in messages.

    Raises `InvalidSetting`, also if other users can read the file. Credentials from systemd (`LoadCredential`) may be
    readable by their group.
    """
    try:
        path = path.expanduser()
        content, about = _read(path, _SECRET_BYTES)
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of an unknown user
        raise InvalidSetting(why_unreadable(path, error)) from None
    if sys.platform == "win32":  # mode bits say nothing there
        return content
    shared = stat.S_IMODE(about.st_mode) & (0o007 if _is_credential(path) else 0o077)
    if shared or about.st_uid not in (os.geteuid(), 0):
        name = shlex.quote(str(path))
        ours = "" if about.st_uid == os.geteuid() else f"chown {os.geteuid()} {name} && "
        raise InvalidSetting(
            f"{what} {path} can be read by other users (mode {stat.S_IMODE(about.st_mode):04o}, owner "
            f"{about.st_uid}), so it is refused. Make it yours alone: {ours}chmod 600 {name}"
        )
    return content


def _read(path: Path, max_bytes: int) -> tuple[bytes, os.stat_result]:
    _refuse_special(path.stat())  # opening a device may have effects
    handle = os.open(path, _FLAGS)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        _refuse_special(about)
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes")
    return content, about


def _refuse_special(about: os.stat_result) -> None:
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _is_credential(path: Path) -> bool:
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    return bool(folder) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(str(folder)))


MAX_VALUES = 1 << 17  # about 30 MB of Python objects at worst: a dictionary of one pair takes 240 bytes
VALUE_BYTES = 256  # of one value, at most
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def parse_untrusted_json(data: bytes | bytearray | str, max_values: int = MAX_VALUES) -> Any:
    """Parse JSON that a stranger may have written, in UTF-8.

    Raises `ValueError`, and nothing else, if it is not JSON, is nested too deeply, or holds more than about
    `max_values` values, integers of thousands of digits, or lone surrogates.
    """
    encoded = data.encode() if isinstance(data, str) else data
    # A value takes at least two characters.
    if len(encoded) > 2 * max_values and sum(map(encoded.count, (b"[", b"{", b","))) > max_values:
        raise ValueError("JSON of too many values")
    text = data if isinstance(data, str) else encoded.decode("utf-8")
    try:
        value = json.loads(text)
        if _HALF_OF_A_PAIR.search(text) is not None:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    return value
