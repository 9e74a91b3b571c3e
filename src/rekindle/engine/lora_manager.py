"""The LoRA adapters of a session: by name for people, by digest for the cache.

Naming one reads and checks it. Its matrices are loaded when a request needs them, within a limit: the least recently
used that no request uses leave for others. One that is unloaded while requests use it is freed after the last of them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.core.adapter import Adapter
from rekindle.core.size import human_bytes, parse_limit
from rekindle.engine.base import Engine
from rekindle.engine.lora_files import read_adapter
from rekindle.errors import AdapterNotFound, AdapterRefused, Cancelled, InvalidSetting, OutOfMemory, nearest
from rekindle.models import adapter_registry

_LOOK_SECONDS = 0.05  # how often a wait checks for cancellation
_LONGEST_SECONDS = 600.0


class AdapterDigest(str):
    """The digest of a request's adapter, "" for none: replaces its name once it is resolved."""


class LoraManager:
    """Thread-safe. With `loads_known` a request may name a registered adapter that nobody loaded here."""

    def __init__(self, engine: Engine, default: str | None = None, limit: str = "10%") -> None:
        """`default` is for requests that name none, in the form of `Settings.adapter`; `limit` is for the memory of
        loaded adapters, in the form of `Settings.adapter_memory`.

        Raises as `load` does.
        """
        self._engine = engine
        self._limit_bytes = parse_limit(limit, "adapter_memory").resolve(engine.device_bytes)
        self.loads_known = True
        self._default: str | None = None
        self._changed = threading.Condition()  # of what follows
        self._named: dict[str, Adapter] = {}
        self._loaded: dict[str, int] = {}  # memory by digest, the least recently used first
        self._users: Counter[str] = Counter()  # number of requests, by digest
        self._taking = False  # whether a request is loading an adapter, or waits for memory to
        if default:
            self._default = self.load_text(default).name

    def __iter__(self) -> Iterator[Adapter]:
        """The adapters that have a name, by name."""
        with self._changed:
            return iter(sorted(self._named.values(), key=lambda adapter: adapter.name))

    def is_loaded(self, adapter: Adapter) -> bool:
        """Whether it is in memory now."""
        return adapter.digest in self._loaded

    def loaded_names(self) -> set[str]:
        """The names of those that are in memory now."""
        return {adapter.name for adapter in self if self.is_loaded(adapter)}

    @property
    def loaded_bytes(self) -> int:
        """Memory that loaded adapters take."""
        with self._changed:
            return sum(self._loaded.values())

    def load(self, name: str, path: str | Path | None = None, scale: float = 1.0) -> Adapter:
        """Name an adapter, in place of one of that name; without a path, the registered one.

        It is read and checked now, and loaded when it is used. Raises `AdapterNotFound`, `ModelNotFound`,
        `AdapterRefused`, `InvalidSetting`; then nothing has changed.
        """
        adapter_registry.check_name(name)
        if path is None:
            entry = self._registered(name)
            path, scale = entry.path, entry.scale
        if not self._engine.capabilities.adapters:
            raise AdapterRefused(f"{self._engine.name} takes no adapters with this engine.")
        lora = read_adapter(path, scale)
        fit = self._engine.check_adapter(lora)
        if fit.memory_bytes > self._limit_bytes:
            raise AdapterRefused(
                f"{lora.source} takes {human_bytes(fit.memory_bytes)} in memory, and adapter_memory allows "
                f"{human_bytes(self._limit_bytes)}. Raise it."
            )
        adapter = Adapter(
            fit.same_layers, fit.memory_bytes, name, lora.digest, lora.source, scale, lora.rank, lora.size_bytes
        )
        with self._changed:
            before = self._named.get(name)
            self._named[name] = adapter
            if before is not None:
                self._unload_unwanted(before.digest)
        return adapter

    def load_text(self, text: str) -> Adapter:
        """`load` of NAME=PATH, NAME=PATH,scale=0.5, or a registered name. Raises as `load` does."""
        if "=" not in text:
            return self.load(text)
        entry = adapter_registry.parse(text)
        return self.load(entry.name, entry.path, entry.scale)

    def unload(self, name: str) -> None:
        """Unload an adapter. Raises `AdapterNotFound`, and `InvalidSetting` for the session's default."""
        if name == self._default:
            raise InvalidSetting(f"{name!r} is the default adapter of this session. Open a session without it.")
        with self._changed:
            adapter = self._named.pop(name, None)
            if adapter is None:
                raise AdapterNotFound(self._missing(name))
            self._unload_unwanted(adapter.digest)

    def unload_unused(self) -> None:
        """Free the memory of all that no request uses; their names stay."""
        with self._changed:
            self._make_room(self._limit_bytes)

    @contextmanager
    def use(self, name: str | None, cancelled: Callable[[], bool] = lambda: False) -> Iterator[AdapterDigest]:
        """An adapter, for None the default: loaded if necessary, and kept loaded inside the block.

        Yields its digest, which stays valid whatever is loaded under the name meanwhile. Waits while the adapters of
        other requests fill the memory. Raises as `load` does, `AdapterRefused` if its files have changed, `Cancelled`,
        and `OutOfMemory` after a long wait.
        """
        name = self._default if name is None else name
        if not name:
            yield AdapterDigest("")
            return
        adapter = self._named.get(name) or self.load(name)
        self._take(adapter, cancelled)
        try:
            yield AdapterDigest(adapter.digest)
        finally:
            self._release(adapter.digest)

    def _take(self, adapter: Adapter, cancelled: Callable[[], bool]) -> None:
        """Load an adapter if necessary, and count a user.

        One at a time: a request that waits for memory is not overtaken by others that use what is loaded.
        """
        digest = adapter.digest
        with self._changed:
            self._wait_until(lambda: not self._taking, cancelled)
            self._taking = True
        try:
            with self._changed:
                self._wait_until(lambda: digest in self._loaded or self._make_room(adapter.memory_bytes), cancelled)
                loaded = digest in self._loaded
                self._loaded[digest] = self._loaded.pop(digest, adapter.memory_bytes)  # the last one now
                self._users[digest] += 1
            if not loaded:
                self._load(adapter)
        finally:
            with self._changed:
                self._taking = False
                self._changed.notify_all()

    def _load(self, adapter: Adapter) -> None:
        try:
            lora = read_adapter(adapter.source, adapter.scale)
            if lora.digest != adapter.digest:
                raise AdapterRefused(
                    f"{adapter.source} has changed since it was loaded as {adapter.name!r}: it is another adapter now. "
                    "Load it again under its name."
                )
            self._engine.load_adapter(lora)
        except BaseException:
            with self._changed:
                del self._loaded[adapter.digest]
            self._release(adapter.digest)
            raise

    def _wait_until(self, ready: Callable[[], bool], cancelled: Callable[[], bool]) -> None:
        ends = time.monotonic() + _LONGEST_SECONDS
        while not self._changed.wait_for(ready, _LOOK_SECONDS):
            if cancelled():
                raise Cancelled("The request was cancelled.")
            if time.monotonic() > ends:
                raise OutOfMemory(
                    f"The adapters of other requests fill adapter_memory ({human_bytes(self._limit_bytes)}), and "
                    f"none ended within {_LONGEST_SECONDS:.0f} s. Raise it, and read streams to the end, or close them."
                )

    def _make_room(self, size_bytes: int) -> bool:
        """Unload adapters that no request uses, the least recently used first; whether `size_bytes` fit then."""
        room = self._limit_bytes - sum(self._loaded.values())
        for digest in [digest for digest in self._loaded if not self._users[digest]]:
            if room >= size_bytes:
                break
            room += self._loaded[digest]
            self._unload(digest)
        return room >= size_bytes

    def _release(self, digest: str) -> None:
        with self._changed:
            self._users[digest] -= 1
            self._unload_unwanted(digest)
            self._changed.notify_all()

    def _unload_unwanted(self, digest: str) -> None:
        """Unload an adapter that has no name and no user any more."""
        if not self._users[digest]:
            del self._users[digest]
            if all(adapter.digest != digest for adapter in self._named.values()):
                self._unload(digest)

    def _unload(self, digest: str) -> None:
        if self._loaded.pop(digest, None) is not None:
            self._engine.unload_adapter(digest)

    def resolve(self, name: str | None) -> AdapterDigest:
        """The digest of an adapter, for None of the default; loads nothing. Raises as `load` does."""
        if isinstance(name, AdapterDigest):
            return name
        name = self._default if name is None else name
        if not name:
            return AdapterDigest("")
        if (found := self._named.get(name)) is not None:
            return AdapterDigest(found.digest)
        entry = self._registered(name)
        return AdapterDigest(read_adapter(entry.path, entry.scale).digest)

    def digest(self, name: str | None) -> str | None:
        """The same as a plain text, None for the model alone."""
        return str(self.resolve(name)) or None

    def _registered(self, name: str) -> adapter_registry.RegisteredAdapter:
        entry = adapter_registry.lookup(name) if self.loads_known else None
        if entry is None:
            raise AdapterNotFound(self._missing(name))
        return entry

    def _missing(self, name: str) -> str:
        names = {*self._named, *(entry.name for entry in adapter_registry.entries())}
        hint = "Load it with NAME=PATH, or make it known with `rekindle adapters add`."
        return f"No adapter is called {name!r}.{nearest(name, names)} {hint}"
