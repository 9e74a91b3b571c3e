"""The state of an app, by whatever name its platform has for it.

Three states are enough to know what its KV is worth: foreground (in use), background (may return), killed (gone).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rekindle.core.scope import APP_STATES, AppState
from rekindle.errors import InvalidSetting, nearest

__all__ = ["APP_STATES", "LIFECYCLE", "AppState", "Lifecycle", "Platform", "state_of"]

Platform = Literal["ios", "android", "web"]


@dataclass(frozen=True)
class Lifecycle:
    """A platform's name for a state. `also` are other names, such as the callback that announces it."""

    platform: Platform
    name: str
    state: AppState
    also: tuple[str, ...] = ()


LIFECYCLE = (
    Lifecycle("ios", "active", "foreground", ("sceneDidBecomeActive", "applicationDidBecomeActive")),
    Lifecycle("ios", "inactive", "foreground", ("sceneWillResignActive", "sceneWillEnterForeground")),
    Lifecycle("ios", "background", "background", ("sceneDidEnterBackground", "applicationDidEnterBackground")),
    # As published, a suspended app counts as killed. But it is in memory, and a tap away: its KV is worth keeping.
    Lifecycle("ios", "suspended", "background"),
    Lifecycle("ios", "unattached", "killed", ("sceneDidDisconnect",)),
    Lifecycle("ios", "not running", "killed", ("applicationWillTerminate", "terminated")),
    Lifecycle("android", "resumed", "foreground", ("onResume",)),
    Lifecycle("android", "started", "foreground", ("onStart",)),
    Lifecycle("android", "created", "background", ("onCreate",)),
    Lifecycle("android", "paused", "foreground", ("onPause",)),  # partly visible, or about to be hidden
    Lifecycle("android", "stopped", "background", ("onStop",)),
    Lifecycle("android", "destroyed", "killed", ("onDestroy",)),
    Lifecycle("android", "IMPORTANCE_FOREGROUND", "foreground"),
    Lifecycle("android", "IMPORTANCE_VISIBLE", "foreground"),
    Lifecycle("android", "IMPORTANCE_FOREGROUND_SERVICE", "background"),
    Lifecycle("android", "IMPORTANCE_TOP_SLEEPING", "background"),
    Lifecycle("android", "IMPORTANCE_PERCEPTIBLE", "background"),
    Lifecycle("android", "IMPORTANCE_SERVICE", "background"),
    Lifecycle("android", "IMPORTANCE_CANT_SAVE_STATE", "background"),
    Lifecycle("android", "IMPORTANCE_CACHED", "background"),
    Lifecycle("android", "IMPORTANCE_GONE", "killed"),
    # onTrimMemory: what it implies for the app itself, not how scarce memory is.
    Lifecycle("android", "TRIM_MEMORY_RUNNING_MODERATE", "foreground"),
    Lifecycle("android", "TRIM_MEMORY_RUNNING_LOW", "foreground"),
    Lifecycle("android", "TRIM_MEMORY_RUNNING_CRITICAL", "foreground"),
    Lifecycle("android", "TRIM_MEMORY_UI_HIDDEN", "background"),
    Lifecycle("android", "TRIM_MEMORY_BACKGROUND", "background"),
    Lifecycle("android", "TRIM_MEMORY_MODERATE", "background"),
    Lifecycle("android", "TRIM_MEMORY_COMPLETE", "background"),
    Lifecycle("web", "visible", "foreground"),
    Lifecycle("web", "passive", "foreground"),
    Lifecycle("web", "hidden", "background", ("pagehide",)),
    Lifecycle("web", "frozen", "background"),
    Lifecycle("web", "discarded", "killed"),
)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


_STATES: dict[str, AppState] = {
    **{_plain(name): row.state for row in LIFECYCLE for name in (row.name, *row.also)},
    **{state: state for state in APP_STATES},
}


def state_of(name: str) -> AppState:
    """The state of a name: one of the three, or of `LIFECYCLE`. Case, spaces and underscores do not matter.

    Raises `InvalidSetting` with the nearest name.
    """
    state = _STATES.get(_plain(name))
    if state is None:
        known = [*APP_STATES, *(row.name for row in LIFECYCLE)]
        raise InvalidSetting(f"{name[:80]!r} is no state of an app.{nearest(name, known)} Use {', '.join(APP_STATES)}.")
    return state
