"""Where the KV of a request belongs."""

from __future__ import annotations

from dataclasses import replace

from rekindle.codec.coder import NEAR, is_near
from rekindle.core.identity import digest_of_fields
from rekindle.core.keys import Namespace, Shelf
from rekindle.core.request import Request
from rekindle.engine.base import Engine
from rekindle.errors import InvalidSetting
from rekindle.run.adapters import Adapters
from rekindle.settings import Settings

_MOST = 256  # remembered
_EXACT = "raw"


class Shelves:
    """The shelves of a session: by the regime of a prompt's length, the tenant, the salt, the adapter and the level.

    KV that may have lost something stands apart: what is exact never meets it.
    """

    def __init__(self, engine: Engine, settings: Settings, adapters: Adapters, piece_tokens: int | None) -> None:
        """`piece_tokens`: what deterministic prefills are cut into."""
        self._engine = engine
        self._adapters = adapters
        self._settings = settings
        self._piece_tokens = piece_tokens
        self._known: dict[tuple[str, str, str, str | None, bool], Shelf] = {}
        if settings.deterministic and settings.reuse == "near":
            raise InvalidSetting("reuse='near' and deterministic exclude each other: leave one of them out.")

    def of(self, request: Request, tokens: int) -> Shelf:
        """Where KV of a prompt of so many tokens belongs. Raises `AdapterNotFound` and what loading one raises."""
        tenant = self._settings.tenant if request.tenant is None else request.tenant
        salt = self._settings.cache_salt if request.cache_salt is None else request.cache_salt
        regime = self._engine.regime(tokens)
        adapter = self._adapters.digest(request.adapter)
        near = self._near(request)
        known = self._known.get((regime, tenant, salt, adapter, near))
        if known is None:
            namespace = Namespace(self._engine.identity(regime).digest, tenant, salt)
            # Pieces are part of what the bits depend on: KV computed in others is on another shelf.
            bits = digest_of_fields(str(self._piece_tokens), self._engine.arithmetic)
            codec = NEAR if near else f"{_EXACT}/{bits}" if self._piece_tokens else _EXACT
            known = Shelf(namespace, self._engine.layout, adapter, codec, self._engine.name)
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[regime, tenant, salt, adapter, near] = known
        return known

    def exact(self, shelf: Shelf) -> Shelf | None:
        """The shelf beside one for KV that may have lost something, where nothing has; None for any other."""
        return replace(shelf, codec=_EXACT) if is_near(shelf.codec) else None

    def _near(self, request: Request) -> bool:
        """Whether a request may be answered from KV that was quantized, and its own may be.

        Where passages are mended, only if a codec was chosen: one error is enough, unless somebody wants both.
        """
        settings = self._settings
        level = settings.reuse if request.reuse is None else request.reuse
        chosen = settings.codec not in ("auto", "raw")
        return not settings.deterministic and (level == "near" or (level == "approximate" and chosen))
