"""Names of models in requests: the model itself, its adapters, and aliases for names that clients insist on."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from rekindle.errors import InvalidSetting, nearest
from rekindle.server.errors import ApiError


class ModelNames:
    """What each name stands for. An alias is `PATTERN=NAME`; the first that matches counts, `*=NAME` is a default."""

    def __init__(self, model: str, aliases: Sequence[str] = ()) -> None:
        """Raises `InvalidSetting` for an alias of another form."""
        self._model = model
        self._aliases = []
        for alias in aliases:
            pattern, _, name = (part.strip() for part in alias.partition("="))
            if not pattern or not name:
                raise InvalidSetting(f"alias={alias!r} has no name. Give PATTERN=MODEL, as in 'claude-*={model}'.")
            self._aliases.append((pattern, name))

    def adapter_of(self, name: str | None, adapters: Sequence[str]) -> str:
        """The adapter that a name stands for, "" for the base model. Raises `ApiError` 404 for unknown names."""
        adapter = self._known(name, adapters)
        if adapter is None:
            alias = next((known for pattern, known in self._aliases if fnmatchcase(name or "", pattern)), None)
            adapter = None if alias is None else self._known(alias, adapters)
        if adapter is None:
            near = nearest(name or "", [self._model, *adapters])
            raise ApiError(404, f"The model {name!r} is not served here.{near}", code="model_not_found")
        return adapter

    def _known(self, name: str | None, adapters: Sequence[str]) -> str | None:
        """The adapter of a name that is no alias: the model, an adapter, or MODEL:ADAPTER."""
        if not name or name == self._model:
            return ""
        own = name.removeprefix(f"{self._model}:")
        return own if own in adapters else None
