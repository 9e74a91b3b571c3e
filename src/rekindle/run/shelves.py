"""Where the KV of a request belongs."""

from __future__ import annotations

from rekindle.core.identity import digest_of_fields
from rekindle.core.keys import Namespace, Shelf
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.run.adapters import Adapters
from rekindle.settings import Settings

_MOST = 256  # remembered


class Shelves:
    """The shelves of a session: by the regime of a prompt's length, the tenant, the salt and the adapter."""

    def __init__(self, engine: Engine, settings: Settings, adapters: Adapters, piece_tokens: int | None) -> None:
        """`piece_tokens`: what deterministic prefills are cut into."""
        self._engine = engine
        self._adapters = adapters
        self._settings = settings
        self._piece_tokens = piece_tokens
        self._known: dict[tuple[str, str, str, str | None], Shelf] = {}

    def of(self, request: Request, tokens: int) -> Shelf:
        """Where KV of a prompt of so many tokens belongs. Raises `AdapterNotFound` and what loading one raises."""
        tenant = self._settings.tenant if request.tenant is None else request.tenant
        salt = self._settings.cache_salt if request.cache_salt is None else request.cache_salt
        regime = self._engine.regime(tokens)
        adapter = self._adapters.digest(request.adapter)
        known = self._known.get((regime, tenant, salt, adapter))
        if known is None:
            namespace = Namespace(self._engine.identity(regime).digest, tenant, salt)
            # Pieces are part of what the bits depend on: KV computed in others is on another shelf.
            bits = digest_of_fields(str(self._piece_tokens), self._engine.arithmetic)
            codec = f"raw/{bits}" if self._piece_tokens else "raw"
            known = Shelf(namespace, self._engine.layout, adapter, codec, self._engine.name)
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[regime, tenant, salt, adapter] = known
        return known
