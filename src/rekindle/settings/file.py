"""`rekindle.toml`: where it is searched, what it may contain, and which files of other folders are trusted.

The user's own file is trusted. So is one in the current folder after `rekindle trust FILE`, as long as its content
stays what it was then: its path and digest are recorded beside the user's own file.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import InvalidSetting, why_unreadable
from rekindle.json_file import JsonMemo
from rekindle.machine import config_folder
from rekindle.safe_read import read_small_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "rekindle.toml"
_RECORD = "trusted.json"
_MAX_TRUSTED = 1000
_MAX_BYTES = 1 << 14  # the parser takes a second for the worst input of this size, and quadratic time
_LONGEST_LINE_BYTES = 1 << 12  # of a name with n dots the parser keeps n * n / 2 parts: 16 MB, not 250


@dataclass(frozen=True)
class SettingsFile:
    """A file and what it said when it was read."""

    path: Path
    digest: str
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
            raise InvalidSetting(f"{why_unreadable(path, error)} Name another file in REKINDLE_CONFIG.") from None
        except UnicodeDecodeError as error:
            raise InvalidSetting(f"{path} is not UTF-8 text: byte {error.start}. Save it as UTF-8.") from None
        except (ValueError, RecursionError) as error:  # also of numbers with too many digits
            raise InvalidSetting(f'{path} is not TOML: {error}. Lines look like memory_limit = "1GB".') from None
        return cls(path, hashlib.sha256(content).hexdigest(), values)

    @property
    def place(self) -> str:
        """Its path from the root, whatever links lead to its folder: what it is trusted as."""
        return place_of(self.path)


def users_file() -> Path | None:
    """The user's own file; None if there is none."""
    folder = config_folder()
    return None if folder is None or not _is_there(folder / FILE_NAME) else folder / FILE_NAME


def local_file() -> Path | None:
    """The file in the current folder, unless that is the user's own; None if there is none."""
    path, own = Path(FILE_NAME), config_folder()
    if not _is_there(path) or (own is not None and place_of(path) == place_of(own / FILE_NAME)):
        return None
    return path


def place_of(path: Path) -> str:
    """The path of a file from the root; of links only those above it are followed."""
    return str(path.expanduser().parent.resolve() / path.name)


def is_trusted(file: SettingsFile) -> bool:
    """Whether the user trusts this file with this content."""
    record = _record()
    return record is not None and record.recall(file.place) == file.digest


def trust(file: SettingsFile) -> None:
    """Trust this file as long as its content stays. Raises `InvalidSetting` if that cannot be recorded."""
    record = _record()
    if record is not None:
        record.keep(file.place, file.digest)
    if record is None or record.recall(file.place) != file.digest:
        raise InvalidSetting(
            f"{config_folder() or 'A home of this user'} cannot be written, where trust is recorded. Make it "
            "writable, or name the file in REKINDLE_CONFIG."
        )


def distrust(path: Path) -> bool:
    """Trust the file at this path no longer; whether it was. Raises `InvalidSetting` if that cannot be recorded."""
    record = _record()
    if record is None or place_of(path) not in record.names():
        return False
    record.forget(place_of(path))
    if place_of(path) in record.names():
        raise InvalidSetting(
            f"{config_folder()} cannot be written, where trust is recorded. Make it writable and try again."
        )
    return True


def trusted_places() -> dict[str, str]:
    """The files that were trusted, by their paths: the digest of what stood in them."""
    record = _record()
    return {} if record is None else {name: str(record.recall(name)) for name in record.names()}


def _record() -> JsonMemo | None:
    folder = config_folder()
    return None if folder is None else JsonMemo(folder / _RECORD, _MAX_TRUSTED)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:  # a folder that this user may not enter holds nothing of theirs
        return False
