"""Whose data is meant: tenant, cache salt, and the app that makes a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from rekindle.errors import InvalidSetting
from rekindle.settings import Settings


@dataclass(frozen=True, slots=True)
class Scope:
    """One tenant under one cache salt. All stored, listed and counted data belongs to one scope."""

    tenant: str
    salt: str = ""


def scope_of(settings: Settings, tenant: str | None, salt: str | None) -> Scope:
    """The scope of a request: the session's tenant and salt unless it names its own."""
    return Scope(settings.tenant if tenant is None else tenant, settings.cache_salt if salt is None else salt)


AppState = Literal["foreground", "background", "killed"]
APP_STATES: tuple[AppState, ...] = get_args(AppState)
MAX_NAME = 256  # characters of an app's name


@dataclass(frozen=True, slots=True)
class AppRef:
    """The app that makes a request, and its scope. `state` is its state by its own account; None: unchanged.

    It is alive, so never "killed". `at` is when the request began, None for now: a later report of the app's state wins
    over what is recorded of this request. Raises `InvalidSetting`.
    """

    tenant: str
    name: str
    state: AppState | None = None
    at: float | None = field(default=None, compare=False)
    salt: str = ""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.state not in (None, "foreground", "background"):
            raise InvalidSetting(f"app_state={self.state!r} makes no sense for an app that asks. {_HINT}")

    @property
    def scope(self) -> Scope:
        """Apps of other salts may have the same name."""
        return Scope(self.tenant, self.salt)


_HINT = "Use 'foreground' or 'background'."


def check_name(name: str) -> None:
    """Raise `InvalidSetting` for an invalid app name."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidSetting(f"The name of an app has 1 to {MAX_NAME} characters; {str(name)[:40]!r} does not.")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidSetting(f"The app's name {name[:40]!r} has a lone surrogate in it. Give valid Unicode.") from None
