"""The LoRA adapters of a session: by name for people, by digest for the cache.

A request names an adapter. A registered one is loaded when first used; one that is unloaded while requests use it is
freed after the last of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.core.adapter import Adapter
from rekindle.engine.base import Engine
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import AdapterNotFound, AdapterRefused, InvalidSetting, nearest
from rekindle.models import adapter_registry


class AdapterDigest(str):
    """The digest of a request's adapter, "" for none: replaces its name once it is resolved."""


class LoraManager:
    """Thread-safe. With `loads_known` a request may name a registered adapter that is not loaded yet."""

    def __init__(self, engine: Engine, default: str | None = None) -> None:
        """`default` is for requests that name none, in the form of `Settings.adapter`; it is loaded at once.

        Raises as `load` does.
        """
        self._engine = engine
        self.loads_known = True
        self._default: str | None = None
        self._lock = threading.Lock()
        self._named: dict[str, Adapter] = {}
        self._used: Counter[str] = Counter()  # number of requests, by digest
        if default:
            self._default = self.load_text(default).name

    def __iter__(self) -> Iterator[Adapter]:
        """The loaded adapters, by name."""
        with self._lock:
            return iter(sorted(self._named.values(), key=lambda adapter: adapter.name))

    def load(self, name: str, path: str | Path | None = None, scale: float = 1.0) -> Adapter:
        """Load an adapter under a name, replacing one of that name; without a path, the registered one.

        Raises `AdapterNotFound`, `ModelNotFound`, `AdapterRefused`, `InvalidSetting`; then nothing has changed.
        """
        adapter_registry.check_name(name)
        if path is None:
            entry = self._registered(name)
            path, scale = entry.path, entry.scale
        if not self._engine.capabilities.adapters:
            raise AdapterRefused(f"{self._engine.name} takes no adapters with this engine.")
        lora = read_adapter(path, scale)
        with self._using(lora.digest):  # so that it is not unloaded before it has a name
            same = self._engine.load_adapter(lora)
            adapter = Adapter(name, lora.digest, lora.source, scale, lora.rank, lora.size_bytes, same)
            with self._lock:
                before = self._named.get(name)
                self._named[name] = adapter
                if before is not None:
                    self._unload_unused(before.digest)
        return adapter

    def load_text(self, text: str) -> Adapter:
        """Load NAME=PATH, NAME=PATH,scale=0.5, or a registered name. Raises as `load` does."""
        if "=" not in text:
            return self.load(text)
        entry = adapter_registry.parse(text)
        return self.load(entry.name, entry.path, entry.scale)

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises `AdapterNotFound`, and `InvalidSetting` for the session's default."""
        if name == self._default:
            raise InvalidSetting(f"{name!r} is the default adapter of this session. Open a session without it.")
        with self._lock:
            adapter = self._named.pop(name, None)
            if adapter is None:
                raise AdapterNotFound(self._missing(name))
            self._unload_unused(adapter.digest)

    @contextmanager
    def use(self, name: str | None) -> Iterator[AdapterDigest]:
        """An adapter, for None the default: loaded if necessary, and kept loaded inside the block.

        Yields its digest, which stays valid whatever is loaded under the name meanwhile. Raises as `load` does.
        """
        name = self._default if name is None else name
        if not name:
            yield AdapterDigest("")
            return
        while True:
            found = self._named.get(name) or self.load(name)
            with self._lock:
                stays = self._named.get(name) == found
                self._used[found.digest] += stays
            if stays:
                break
        try:
            yield AdapterDigest(found.digest)
        finally:
            self._release(found.digest)

    @contextmanager
    def _using(self, digest: str) -> Iterator[None]:
        with self._lock:
            self._used[digest] += 1
        try:
            yield
        finally:
            self._release(digest)

    def _release(self, digest: str) -> None:
        with self._lock:
            self._used[digest] -= 1
            self._unload_unused(digest)

    def digest(self, name: str | None) -> str | None:
        """The digest of an adapter, for None of the default; loads nothing. Raises as `load` does."""
        if isinstance(name, AdapterDigest):
            return str(name) or None
        name = self._default if name is None else name
        if not name:
            return None
        if (found := self._named.get(name)) is not None:
            return found.digest
        entry = self._registered(name)
        return read_adapter(entry.path, entry.scale).digest

    def _registered(self, name: str) -> adapter_registry.RegisteredAdapter:
        entry = adapter_registry.lookup(name) if self.loads_known else None
        if entry is None:
            raise AdapterNotFound(self._missing(name))
        return entry

    def _unload_unused(self, digest: str) -> None:
        """Unload an adapter from the engine if it has no name and no user any more."""
        if not self._used[digest]:
            self._used.pop(digest, None)
            if all(adapter.digest != digest for adapter in self._named.values()):
                self._engine.unload_adapter(digest)

    def _missing(self, name: str) -> str:
        names = {*self._named, *(entry.name for entry in adapter_registry.entries())}
        hint = "Load it with NAME=PATH, or make it known with `rekindle adapters add`."
        return f"No adapter is called {name!r}.{nearest(name, names)} {hint}"
