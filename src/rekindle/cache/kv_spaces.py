"""The KV space of a request."""

from __future__ import annotations

from dataclasses import replace

from rekindle.codec.coder import QUANTIZED, is_quantized
from rekindle.core.identity import digest_of_fields
from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.request import Request
from rekindle.core.scope import Scope, scope_of
from rekindle.engine.base import Engine
from rekindle.engine.lora_manager import LoraManager
from rekindle.errors import InvalidSetting
from rekindle.settings import Settings

_MAX_SPACES = 256  # remembered
_EXACT = "raw"


class KvSpaces:
    """The KV spaces of a session: by the regime of a prompt's length, the tenant, the salt, the adapter and the level.

    Quantized KV has its own: exact KV never meets it.
    """

    def __init__(self, engine: Engine, settings: Settings, adapters: LoraManager, piece_tokens: int | None) -> None:
        """`piece_tokens`: the piece length of deterministic prefills."""
        self._engine = engine
        self._adapters = adapters
        self._settings = settings
        self._piece_tokens = piece_tokens
        self._known: dict[tuple[str, Scope, str | None, bool], KvSpace] = {}
        if settings.deterministic and settings.reuse == "quantized":
            raise InvalidSetting("reuse='quantized' and deterministic exclude each other: leave one of them out.")

    def of(self, request: Request, tokens: int) -> KvSpace:
        """The KV space of a prompt with `tokens` tokens. Raises `AdapterNotFound` and what loading one raises."""
        scope = scope_of(self._settings, request.tenant, request.cache_salt)
        regime = self._engine.regime(tokens)
        adapter = self._adapters.digest(request.adapter)
        quantized = self._is_quantized(request)
        known = self._known.get((regime, scope, adapter, quantized))
        if known is None:
            namespace = Namespace(self._engine.identity(regime).digest, scope.tenant, scope.salt)
            # Pieces are part of what the bits depend on: KV computed in others is in another KV space.
            bits = digest_of_fields(str(self._piece_tokens), self._engine.arithmetic)
            codec = QUANTIZED if quantized else f"{_EXACT}/{bits}" if self._piece_tokens else _EXACT
            known = KvSpace(namespace, self._engine.layout, adapter, codec, self._engine.name)
            if len(self._known) >= _MAX_SPACES:
                self._known.clear()
            self._known[regime, scope, adapter, quantized] = known
        return known

    def exact(self, kv_space: KvSpace) -> KvSpace | None:
        """The exact counterpart of a quantized KV space; None for any other."""
        return replace(kv_space, codec=_EXACT) if is_quantized(kv_space.codec) else None

    def _is_quantized(self, request: Request) -> bool:
        """Whether a request may use quantized KV, and its own may be quantized.

        With chunk reuse only if a codec was chosen: one source of error is enough, unless the user wants both.
        """
        settings = self._settings
        level = settings.reuse if request.reuse is None else request.reuse
        chosen = settings.codec not in ("auto", "raw")
        return not settings.deterministic and (level == "quantized" or (level == "approximate" and chosen))
