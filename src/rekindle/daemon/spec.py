"""Which daemon a command talks to: one for each model, the way its engine is loaded, and the folders it uses."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rekindle import __version__
from rekindle.daemon.private_socket import private_folder
from rekindle.machine import data_folder, home_folder
from rekindle.models import adapter_registry
from rekindle.models.sources import absolute_spec
from rekindle.session.model_memo import engine_variables
from rekindle.settings import ENGINE_SETTINGS, SETTINGS, Settings


@dataclass(frozen=True)
class DaemonSpec:
    """A model and the settings of a session, as JSON values. Relative paths are made absolute: a daemon has its own
    current folder.
    """

    model: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, model: str, settings: Settings) -> DaemonSpec:
        values = {name: _absolute(name, value) for name, value in asdict(settings).items() if name != "keep_alive"}
        return cls(absolute_spec(model), values)

    @property
    def session_arguments(self) -> dict[str, Any]:
        """For `Session`: every setting is given, so that no environment or file of the daemon matters."""
        return {name: "none" if value is None else value for name, value in self.settings.items()}

    @property
    def socket_path(self) -> Path:
        """Where its daemon listens, whatever the session's settings. Raises `OSError` without a private folder."""
        return private_folder() / f"{_digest(self._engine_key)}.sock"

    @property
    def server_socket_path(self) -> Path:
        """Where a server with this model and these settings listens for commands. Raises as `socket_path`."""
        settings = {name: value for name, value in self.settings.items() if SETTINGS[name].group != "serving"}
        return private_folder() / f"{_digest([self._engine_key, settings])}.server"

    @property
    def _engine_key(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "python": sys.executable,
            "folders": [str(home_folder().absolute()), str(data_folder().absolute())],
            "variables": engine_variables(),
            "model": self.model,
            "engine": {name: self.settings[name] for name in ENGINE_SETTINGS},
        }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _absolute(name: str, value: Any) -> Any:
    if name == "adapter" and value is not None and "=" in value:
        adapter = adapter_registry.parse(value)
        return f"{adapter.name}={Path(adapter.path).expanduser().absolute()},scale={adapter.scale}"
    if name == "origin_keys" and value is not None:  # keys, or files with them
        return ",".join(absolute_spec(part.strip()) for part in value.split(","))
    if name == "embedder":
        return absolute_spec(value)
    if isinstance(value, str) and SETTINGS[name].is_path and value != "off":
        return str(Path(value).absolute())
    return value
