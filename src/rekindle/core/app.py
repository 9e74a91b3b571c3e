"""An app that asks, and whether somebody looks at it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from rekindle.errors import InvalidSetting

AppState = Literal["foreground", "background", "killed"]
APP_STATES: tuple[AppState, ...] = get_args(AppState)
MOST_NAME = 256  # characters of an app's name


@dataclass(frozen=True, slots=True)
class Asker:
    """The app that a request comes from, and whose it is. `state` is what it says of itself; None: as said before.

    One that asks is alive, so it is never "killed". `at` is when the request began: what is said of the app after that
    counts for more than what is noted of the request later; None: when it is noted. Raises `InvalidSetting`.
    """

    tenant: str
    name: str
    state: AppState | None = None
    at: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.state not in (None, "foreground", "background"):
            raise InvalidSetting(f"app_state={self.state!r} makes no sense for an app that asks. {_HINT}")


_HINT = "Use 'foreground' or 'background'; `rekindle.apps.state.state_of` maps the names of iOS and Android."


def check_name(name: str) -> None:
    """Raises `InvalidSetting` if no app can have that name."""
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
        raise InvalidSetting(f"The name of an app has 1 to {MOST_NAME} characters; {str(name)[:40]!r} does not.")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidSetting(f"The app's name {name[:40]!r} has half a character in it. Give it as Unicode.") from None
