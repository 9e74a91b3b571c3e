"""Sessions of one process that share memory and documents: a model each, within one limit.

A model that must be loaded makes the least recently used ones leave that no request uses; it waits while all are used.
Requests for loaded models that come meanwhile wait behind it. The KV of a model that left is on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol
from weakref import WeakKeyDictionary

from rekindle.cache.prefix_cache import PrefixCache
from rekindle.core.size import Limit, human_bytes, parse_limit
from rekindle.engine.base import Engine, Reserve
from rekindle.engine.threaded_job import stop_if
from rekindle.errors import Closed, OutOfMemory
from rekindle.session.library import Knowledge, purging
from rekindle.settings import Settings
from rekindle.store.purge import TokenRun

log = logging.getLogger("rekindle.models")

_LOOK_SECONDS = 0.05  # how often a wait looks again
_LONGEST_SECONDS = 600.0


class GroupMember(Protocol):
    """What the group needs of a session."""

    model: str
    cache: PrefixCache

    @property
    def resting(self) -> bool:
        """Whether its model is out of memory."""

    @property
    def last_used(self) -> float:
        """When its last request ended, by `time.monotonic`."""

    def leave(self) -> bool:
        """Free the model unless it is used; whether it is out of memory now."""


class SessionGroup:
    """Give it to each `Session`. Thread-safe."""

    def __init__(self, limit: str | int | Limit = "80%", settings: Settings | None = None) -> None:
        """`limit` is for the memory of all loaded models; a share is one of the memory of their device. The settings
        are for the documents that the sessions share.

        Raises `InvalidSetting`.
        """
        self._settings = settings or Settings.load()
        self._limit = parse_limit(limit, "model_memory")
        self.knowledge = Knowledge(self._settings, self._purge)
        self._turn = threading.Lock()  # of the model that is being loaded: one at a time
        self._changed = threading.Condition()
        self._members: list[GroupMember] = []
        self._bytes: WeakKeyDictionary[GroupMember, int] = WeakKeyDictionary()  # of models, when they were last loaded
        self._wanted_by: GroupMember | None = None  # whose model waits for memory
        self._stopped = False

    def add(self, member: GroupMember) -> None:
        """From now on its model may have to leave."""
        self._members.append(member)

    def remove(self, member: GroupMember) -> None:
        """It was closed."""
        if member in self._members:
            self._members.remove(member)

    def load(self, member: GroupMember, load: Callable[[Reserve], Engine]) -> Engine:
        """Load the model of a member, with room made for it. Raises `OutOfMemory`, `Closed`, and what `load` raises."""
        with ExitStack() as held:
            has_turn = False

            def reserve(size_bytes: int, device_bytes: int) -> int:
                nonlocal has_turn
                if not has_turn:  # not before: getting the files may take long
                    held.enter_context(self._turn)
                    has_turn = True
                return self._make_room(member, size_bytes, self._limit.resolve(device_bytes))

            engine = load(reserve)
            self._bytes[member] = engine.memory_bytes
            log.info("%s is loaded: %s of memory", _name(member), human_bytes(engine.memory_bytes))
            return engine

    def wait(self, member: GroupMember, cancelled: Callable[[], bool] | None) -> None:
        """Wait while another member's model waits for memory: a request must not overtake it. Raises `Cancelled`."""
        with self._changed:
            while self._wanted_by not in (None, member):
                stop_if(cancelled)
                self._changed.wait(_LOOK_SECONDS)

    def stop(self) -> None:
        """End all waits for memory: they raise `Closed`."""
        self._stopped = True

    def close(self) -> None:
        """Close the documents, once the sessions are closed."""
        self.stop()
        self.knowledge.close()

    def _make_room(self, member: GroupMember, size_bytes: int, limit_bytes: int) -> int:
        """Let others leave until the model of a member fits; returns how much it may take."""
        needed = max(size_bytes, self._bytes.get(member, 0))
        if needed > limit_bytes:
            raise OutOfMemory(
                f"{_name(member)} takes {human_bytes(needed)} of memory, and model_memory allows "
                f"{human_bytes(limit_bytes)}. Raise it, or use a smaller model or a shorter context."
            )
        ends = time.monotonic() + _LONGEST_SECONDS
        try:
            while self._others_bytes(member) + needed > limit_bytes:
                if not self._free_one(member):
                    self._wait_for_others(member, ends)
        finally:
            with self._changed:
                self._wanted_by = None
                self._changed.notify_all()
        return limit_bytes - self._others_bytes(member)

    def _others_bytes(self, member: GroupMember) -> int:
        loaded = [(other, size) for other, size in self._bytes.items() if other is not member and not other.resting]
        return sum(size for _, size in loaded)

    def _free_one(self, member: GroupMember) -> bool:
        """Let the least recently used model leave that nobody uses; False if there is none."""
        for other in sorted(self._members, key=lambda one: one.last_used):
            if other is not member and not other.resting and other.leave():
                log.info("%s left memory for %s", _name(other), _name(member))
                return True
        return False

    def _wait_for_others(self, member: GroupMember, ends: float) -> None:
        if self._stopped:
            raise Closed("The server is stopping.")
        if time.monotonic() > ends:
            raise OutOfMemory(
                f"There is no memory for {_name(member)}: the requests of other models did not end within "
                f"{_LONGEST_SECONDS:.0f} s. Raise model_memory."
            )
        with self._changed:
            if self._wanted_by is None:
                log.info("%s waits for memory: all other models are in use", _name(member))
            self._wanted_by = member
            self._changed.wait(_LOOK_SECONDS)

    def _purge(
        self, tenant: str, salt: str, runs: Sequence[TokenRun], texts: Sequence[str], *, everything: bool = False
    ) -> None:
        caches = [member.cache for member in self._members if member.cache.store is not None]
        for cache in caches:
            cache.purge(tenant, salt, runs, texts, everything=everything)
        if not caches:  # what another session kept in the folder goes, too
            purging(self._settings)(tenant, salt, runs, texts, everything=everything)


def _name(member: GroupMember) -> str:
    """Without the folder: clients read it."""
    return Path(member.model).name
