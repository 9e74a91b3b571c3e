"""The state of an app, by whatever name its system has for it.

Three states are enough to know what KV is worth: somebody looks at the app, it may be looked at again, it is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rekindle.core.app import APP_STATES, AppState
from rekindle.errors import InvalidSetting, nearest

__all__ = ["APP_STATES", "LIFECYCLE", "AppState", "Lifecycle", "Platform", "state_of"]

Platform = Literal["ios", "android", "web"]


@dataclass(frozen=True)
class Lifecycle:
    """What one system calls a state. `also` are other names of it, such as the callback that tells of it."""

    platform: Platform
    name: str
    state: AppState
    also: tuple[str, ...] = ()


LIFECYCLE = (
    Lifecycle("ios", "active", "foreground", ("sceneDidBecomeActive", "applicationDidBecomeActive")),
    Lifecycle("ios", "inactive", "foreground", ("sceneWillResignActive", "sceneWillEnterForeground")),
    Lifecycle("ios", "background", "background", ("sceneDidEnterBackground", "applicationDidEnterBackground")),
    # The source counts a suspended app as killed. But it is in memory, and a tap away: its KV is worth keeping.
    Lifecycle("ios", "suspended", "background"),
    Lifecycle("ios", "unattached", "killed", ("sceneDidDisconnect",)),
    Lifecycle("ios", "not running", "killed", ("applicationWillTerminate", "terminated")),
    Lifecycle("android", "resumed", "foreground", ("onResume",)),
    Lifecycle("android", "started", "foreground", ("onStart",)),
    Lifecycle("android", "created", "background", ("onCreate",)),
    Lifecycle("android", "paused", "foreground", ("onPause",)),  # in part on screen, or about to leave it
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
    # onTrimMemory: what it says of the app itself, not how short memory is.
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
    """The state that a name means: one of the three, or of `LIFECYCLE`. Case, spaces and lines do not matter.

    Raises `InvalidSetting` with the nearest name.
    """
    state = _STATES.get(_plain(name))
    if state is None:
        known = [*APP_STATES, *(row.name for row in LIFECYCLE)]
        raise InvalidSetting(f"{name[:80]!r} is no state of an app.{nearest(name, known)} Use {', '.join(APP_STATES)}.")
    return state
