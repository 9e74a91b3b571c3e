"""The cache folder that the settings name, as a store."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

from rekindle.codec.coder import EXACT, Coder
from rekindle.config import cache_folder
from rekindle.core.size import parse_duration, parse_limit
from rekindle.errors import CacheUnusable, InvalidSetting
from rekindle.settings import Settings
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore

log = logging.getLogger("rekindle.cache")


def open_store(settings: Settings, *, share: float = 0.5, near: Coder | None = None) -> TieredStore | None:
    """The store that the settings name; None if they want none, or the user's own folder cannot be used.

    `share` of the memory limit is for its memory tier; the rest is for contexts parked in the engine. `near` is how KV
    is coded under the level of that name.
    """
    if settings.cache == "off" or settings.reuse == "off":
        return None
    memory = parse_limit(settings.memory_limit).resolve(psutil.virtual_memory().total)
    chosen = StoreSettings(
        disk_limit=settings.disk_limit,
        memory_limit=int(memory * share),
        policy=settings.policy,
        ttl_seconds=None if settings.ttl is None else parse_duration(settings.ttl),
        killed_ttl_seconds=None if settings.killed_ttl is None else parse_duration(settings.killed_ttl),
        admission=settings.admission,
        write_budget=settings.write_budget,
        exact=None if settings.codec == "raw" else EXACT,
        near=near,
        key=None if settings.key_file is None else _read_key(Path(settings.key_file)),
    )
    try:
        return TieredStore(settings.cache or cache_folder(), chosen)
    except CacheUnusable as error:
        if settings.cache is not None:
            raise
        log.warning("There is no cache, so everything is computed: %s", error)
        return None


def _read_key(path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise InvalidSetting(f"The key file {path} cannot be read: {error}.") from error
