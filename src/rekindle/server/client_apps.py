"""The apps that send requests to a server, and their states. The catalog of the cache stores them permanently."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rekindle.apps import App
from rekindle.core.scope import AppState, Scope

MAX_APPS = 1024  # per tenant


@dataclass
class ClientApp:
    """One app of one tenant and salt."""

    id: str
    state: AppState = "foreground"
    requests: int = 0
    seen: float = field(default_factory=time.time)
    process: int | None = None


class ClientApps:
    """All apps, by scope. Used by one event loop; a tenant's least recently seen ones are dropped."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._of: dict[str, dict[tuple[str, str], ClientApp]] = {}  # by tenant, then by salt and name

    def of(self, scope: Scope) -> list[ClientApp]:
        """The apps of a scope, the most recently seen last."""
        return [app for (salt, _), app in self._of.get(scope.tenant, {}).items() if salt == scope.salt]

    def record(self, scope: Scope, id: str, state: AppState | None = None) -> ClientApp:
        """Record a request of an app, with its own `state` if it gave one. A killed app that asks again is alive."""
        own, key = self._of.setdefault(scope.tenant, {}), (scope.salt, id)
        app = own.pop(key, None) or ClientApp(id)
        if state is not None:
            app.state = state
        elif app.state == "killed":
            app.state = "foreground"
        app.seen = self._clock()
        own[key] = app
        while len(own) > MAX_APPS:
            del own[next(iter(own))]
        return app

    def set(self, scope: Scope, id: str, state: AppState) -> ClientApp:
        """Set the state of an app."""
        app = self.record(scope, id)
        app.state = state
        return app

    def merge_catalog(self, scope: Scope, kept: Sequence[App]) -> list[ClientApp]:
        """All apps of a scope, updated from the catalog, which other processes may have changed since."""
        own = {app.id: app for app in self.of(scope)}
        others = []
        for row in kept:
            app = own.get(row.name)
            if app is None:
                others.append(ClientApp(row.name, row.state, row.requests, row.seen))
                app = others[-1]
            elif row.since > app.seen:
                app.state = row.state
            app.requests = max(app.requests, row.requests)
            app.process = row.process
        return [*others, *own.values()]
