"""The apps that ask, and whether somebody looks at them now."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

AppState = Literal["foreground", "background", "killed"]
MOST_APPS = 1024  # of a tenant


@dataclass
class App:
    """One app of one tenant."""

    id: str
    state: AppState = "foreground"
    requests: int = 0
    seen: float = field(default_factory=time.time)


class Apps:
    """All apps, by tenant. Used by one event loop; the longest unseen of a tenant are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._of: dict[str, dict[str, App]] = {}

    def of(self, tenant: str) -> list[App]:
        """The apps of a tenant, those seen last at the end."""
        return list(self._of.get(tenant, {}).values())

    def see(self, tenant: str, id: str, state: AppState | None = None) -> App:
        """An app is here; `state` is what it says of itself. One that was killed and asks again is alive."""
        own = self._of.setdefault(tenant, {})
        app = own.pop(id, None) or App(id)
        if state is not None:
            app.state = state
        elif app.state == "killed":
            app.state = "foreground"
        app.seen = self._clock()
        own[id] = app
        while len(own) > MOST_APPS:
            del own[next(iter(own))]
        return app

    def set(self, tenant: str, id: str, state: AppState) -> App:
        """What somebody says of an app."""
        app = self.see(tenant, id)
        app.state = state
        return app
