"""The adapters of a session: by name for people, by digest for the cache.

A request names an adapter. One that is not loaded yet but known to this machine is loaded then; one that is unloaded
while requests use it goes when the last of them is through.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rekindle.core.adapter import Adapter
from rekindle.engine.adapters import read_adapter
from rekindle.engine.base import Engine
from rekindle.errors import AdapterNotFound, AdapterRefused, InvalidSetting, nearest
from rekindle.models import adapters as known


class Chosen(str):
    """The digest of the adapter that a request goes on with, "" for none: in place of its name, once it is found."""


class Adapters:
    """Used from several threads.

    With `loads_known` a request may name an adapter that is known to this machine and not loaded yet.
    """

    def __init__(self, engine: Engine, default: str | None = None) -> None:
        """`default` is the one of requests that name none, as `Settings.adapter` has it; it is loaded at once.

        Raises as `load` does.
        """
        self._engine = engine
        self.loads_known = True
        self._default: str | None = None
        self._lock = threading.Lock()
        self._named: dict[str, Adapter] = {}
        self._used: Counter[str] = Counter()  # by how many requests, by digest
        if default:
            self._default = self.load_text(default).name

    def __iter__(self) -> Iterator[Adapter]:
        """Those that are loaded, by name."""
        with self._lock:
            return iter(sorted(self._named.values(), key=lambda adapter: adapter.name))

    def load(self, name: str, path: str | Path | None = None, scale: float = 1.0) -> Adapter:
        """Load an adapter under a name, in place of another one of that name; without a path, the one known so.

        Raises `AdapterNotFound`, `ModelNotFound`, `AdapterRefused`, `InvalidSetting`; then nothing has changed.
        """
        known.check_name(name)
        if path is None:
            entry = self._known(name)
            path, scale = entry.path, entry.scale
        if not self._engine.capabilities.adapters:
            raise AdapterRefused(f"{self._engine.name} takes no adapters with this engine.")
        lora = read_adapter(path, scale)
        with self._using(lora.digest):  # so that nobody takes it off before it has a name
            same = self._engine.load_adapter(lora)
            adapter = Adapter(name, lora.digest, lora.source, scale, lora.rank, lora.size_bytes, same)
            with self._lock:
                before = self._named.get(name)
                self._named[name] = adapter
                if before is not None:
                    self._let_go(before.digest)
        return adapter

    def load_text(self, text: str) -> Adapter:
        """Load what a command was given: NAME=PATH, NAME=PATH,scale=0.5, or a known name. Raises as `load` does."""
        if "=" not in text:
            return self.load(text)
        entry = known.parse(text)
        return self.load(entry.name, entry.path, entry.scale)

    def unload(self, name: str) -> None:
        """Unload the adapter of that name. Raises `AdapterNotFound`, and `InvalidSetting` for the session's own."""
        if name == self._default:
            raise InvalidSetting(f"This session answers with {name!r} unless told otherwise. Make one without it.")
        with self._lock:
            adapter = self._named.pop(name, None)
            if adapter is None:
                raise AdapterNotFound(self._missing(name))
            self._let_go(adapter.digest)

    @contextmanager
    def use(self, name: str | None) -> Iterator[Chosen]:
        """An adapter, for None the default one: loaded if it must be, and staying so inside the block.

        What it yields stands for the name, whatever is loaded under that meanwhile. Raises as `load` does.
        """
        name = self._default if name is None else name
        if not name:
            yield Chosen("")
            return
        while True:
            found = self._named.get(name) or self.load(name)
            with self._lock:
                stays = self._named.get(name) == found
                self._used[found.digest] += stays
            if stays:
                break
        try:
            yield Chosen(found.digest)
        finally:
            self._leave(found.digest)

    @contextmanager
    def _using(self, digest: str) -> Iterator[None]:
        with self._lock:
            self._used[digest] += 1
        try:
            yield
        finally:
            self._leave(digest)

    def _leave(self, digest: str) -> None:
        with self._lock:
            self._used[digest] -= 1
            self._let_go(digest)

    def digest(self, name: str | None) -> str | None:
        """The digest of an adapter, for None of the default one; nothing is loaded. Raises as `load` does."""
        if isinstance(name, Chosen):
            return str(name) or None
        name = self._default if name is None else name
        if not name:
            return None
        if (found := self._named.get(name)) is not None:
            return found.digest
        entry = self._known(name)
        return read_adapter(entry.path, entry.scale).digest

    def _known(self, name: str) -> known.KnownAdapter:
        entry = known.lookup(name) if self.loads_known else None
        if entry is None:
            raise AdapterNotFound(self._missing(name))
        return entry

    def _let_go(self, digest: str) -> None:
        """Take an adapter off the engine if nobody knows or uses it any more."""
        if not self._used[digest]:
            self._used.pop(digest, None)
            if all(adapter.digest != digest for adapter in self._named.values()):
                self._engine.unload_adapter(digest)

    def _missing(self, name: str) -> str:
        names = {*self._named, *(entry.name for entry in known.entries())}
        hint = "Load it with NAME=PATH, or make it known with `rekindle adapters add`."
        return f"No adapter is called {name!r}.{nearest(name, names)} {hint}"
