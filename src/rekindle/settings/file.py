"""A file of settings: where the user's own is, and how any is read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rekindle.errors import InvalidSetting, why_unreadable
from rekindle.machine import config_folder
from rekindle.safe_read import read_small_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger("rekindle.settings")

FILE_NAME = "rekindle.toml"
_MAX_BYTES = 1 << 14  # the parser takes a second for the worst input of this size, and quadratic time
_LONGEST_LINE_BYTES = 1 << 12  # of a name with n dots the parser keeps n * n / 2 parts: 16 MB, not 250


@dataclass(frozen=True)
class SettingsFile:
    """A file and what it said when it was read."""

    path: Path
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> SettingsFile:
        """Raises `InvalidSetting` for one that cannot be read."""
        try:
            content = read_small_file(path, _MAX_BYTES)
            if max(map(len, content.split(b"\n"))) > _LONGEST_LINE_BYTES:
                raise ValueError(f"a line has more than {_LONGEST_LINE_BYTES:,} bytes")
            values = tomllib.loads(content.decode("utf-8-sig"))  # some editors put a byte order mark first
        except OSError as error:
            raise InvalidSetting(f"{why_unreadable(path, error)} Name another: --config or REKINDLE_CONFIG.") from None
        except UnicodeDecodeError as error:
            raise InvalidSetting(f"{path} is not UTF-8 text: byte {error.start}. Save it as UTF-8.") from None
        except (ValueError, RecursionError) as error:  # also of numbers with too many digits
            raise InvalidSetting(f'{path} is not TOML: {error}. Lines look like memory_limit = "1GB".') from None
        return cls(path, values)


def users_file() -> Path | None:
    """The user's own file; None if there is none."""
    folder = config_folder()
    own = None if folder is None or not _is_there(folder / FILE_NAME) else folder / FILE_NAME
    here = Path(FILE_NAME)
    if _is_there(here) and not (own is not None and here.samefile(own)):
        _say_unread(here.absolute())
    return own


@cache  # once a process, however often settings are read
def _say_unread(path: Path) -> None:
    log.warning("%s is not read: no file of the current folder is. To use it: rekindle --config %s", path, FILE_NAME)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # a folder that this user may not enter holds nothing of theirs
        return False
