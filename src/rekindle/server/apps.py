"""The apps that ask a server, and whether somebody looks at them now. The catalog of the cache remembers them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.apps.known import App as KeptApp
from rekindle.core.app import AppState

MOST_APPS = 1024  # of a tenant


@dataclass
class App:
    """One app of one tenant."""

    id: str
    state: AppState = "foreground"
    requests: int = 0
    seen: float = field(default_factory=time.time)
    process: int | None = None
    size_bytes: int = 0
    private_bytes: int = 0


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

    def learn(self, tenant: str, kept: Sequence[KeptApp]) -> list[App]:
        """All apps of a tenant, with what the catalog knows of them: other processes may have said something since."""
        own = {app.id: app for app in self.of(tenant)}
        others = []
        for row in kept:
            app = own.get(row.name)
            if app is None:
                others.append(App(row.name, row.state, row.requests, row.seen))
                app = others[-1]
            elif row.since > app.seen:
                app.state = row.state
            app.requests = max(app.requests, row.requests)
            app.process, app.size_bytes, app.private_bytes = row.process, row.size_bytes, row.private_bytes
        return [*others, *own.values()]
