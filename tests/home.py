"""The Rekindle home of a test run: the models of the user's own home can be read in it, nothing is written there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

_COPIED_BYTES = 1 << 20  # larger files, the weights, are linked: nothing writes to those


def fill_home(home: Path, users: Path) -> None:
    """Give a new home the models of the user's."""
    for file in (users / "models").rglob("*"):
        inside = file.relative_to(users / "models")
        if file.is_file() and file.suffix != ".lock" and inside.parts[0] != ".downloads":
            _take(file, home / "models" / inside, users)
    if (users / "digests.json").is_file():  # else the weights are read once more
        shutil.copyfile(users / "digests.json", home / "digests.json")


def live_in(home: Path) -> None:
    """Use a home in this process and in those that it starts, also for settings."""
    os.environ["REKINDLE_HOME"] = str(home)
    os.environ["XDG_CONFIG_HOME"] = str(home / "config")


def _take(file: Path, place: Path, users: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    if file.name == "model.json":  # the record of a model names the place of its files
        record = json.loads(file.read_text("utf-8"))
        moved = {
            name: value.replace(str(users), str(place.parents[2])) if name in ("folder", "gguf") and value else value
            for name, value in record.items()
        }
        place.write_text(json.dumps(moved), "utf-8")
    elif file.stat().st_size > _COPIED_BYTES:
        place.symlink_to(file)
    else:
        shutil.copyfile(file, place)
