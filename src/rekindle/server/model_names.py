"""Names of models in requests: the models themselves, their adapters, and aliases for names that clients insist on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rekindle.errors import InvalidSetting, nearest
from rekindle.models import ollama
from rekindle.server.errors import ApiError

_LATEST = ":latest"


class NamedModel(NamedTuple):
    """What a name stands for: a model, and one of its adapters; "" for the model alone."""

    model: str
    adapter: str


def without_latest(name: str) -> str:
    """A name without the tag that Ollama's clients add."""
    return name.removesuffix(_LATEST)


class ModelNames:
    """What each name stands for. An alias is `PATTERN=NAME`; the first that matches counts, `*=NAME` is a default.

    `llama3.2` and `llama3.2:latest` also stand for `ollama:llama3.2`.
    """

    def __init__(self, default: str, aliases: Sequence[str] = ()) -> None:
        """`default` is the model of requests that name none. Raises `InvalidSetting` for an alias of another form."""
        self._default = default
        self._aliases = []
        for alias in aliases:
            pattern, _, name = (part.strip() for part in alias.partition("="))
            if not pattern or not name:
                raise InvalidSetting(f"alias={alias!r} has no name. Give PATTERN=MODEL, as in 'claude-*={default}'.")
            self._aliases.append((pattern, name))

    def resolve(self, name: str | None, adapters: Mapping[str, Sequence[str]]) -> NamedModel:
        """What a name stands for; `adapters` has those of each model. Raises `ApiError` 404 for unknown names."""
        if not name:
            return NamedModel(self._default, "")
        short = without_latest(name)
        spellings = list(dict.fromkeys((name, short, f"{ollama.PREFIX}{name}", f"{ollama.PREFIX}{short}")))
        meant = [known for pattern, known in self._aliases for one in spellings if fnmatchcase(one, pattern)]
        for one in (*spellings, *meant[:1]):
            if (found := _known(one, adapters)) is not None:
                return found
        near = nearest(name, [*adapters, *(adapter for some in adapters.values() for adapter in some)])
        raise ApiError(404, f"The model {name!r} is not served here.{near}", code="model_not_found")


def _known(name: str, adapters: Mapping[str, Sequence[str]]) -> NamedModel | None:
    """What a name that is no alias stands for: a model, MODEL:ADAPTER, or an adapter of the first model that has it."""
    if name in adapters:
        return NamedModel(name, "")
    for model, some in adapters.items():
        if (own := name.removeprefix(f"{model}:")) in some:
            return NamedModel(model, own)
    return None
