"""The cache folder that the settings name, as a store."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil

from rekindle.codec.coder import EXACT, Coder
from rekindle.core.size import parse_duration, parse_limit
from rekindle.errors import CacheUnusable, InvalidSetting
from rekindle.knowledge.library_folder import knowledge_folder
from rekindle.machine import cache_folder
from rekindle.safe_read import read_secret_file
from rekindle.settings import Settings
from rekindle.store.folder import has_room
from rekindle.store.objects import ObjectStore
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore

log = logging.getLogger("rekindle.cache")


def open_store(settings: Settings, *, share: float = 0.5, quantized: Coder | None = None) -> TieredStore | None:
    """The store that the settings name; None if they want none, or if the user's own folder, or the folder of a full
    disk, cannot be used.

    `share` of the memory limit is for its memory tier; the rest is for contexts parked in the engine. `quantized` is
    how KV is coded under the level of that name.
    """
    if settings.cache == "off" or settings.reuse == "off":
        return None
    memory = parse_limit(settings.memory_limit, "memory_limit").resolve(psutil.virtual_memory().total)
    chosen = StoreSettings(
        disk_limit=settings.disk_limit,
        memory_limit=int(memory * share),
        policy=settings.policy,
        ttl_seconds=None if settings.ttl is None else parse_duration(settings.ttl, "ttl"),
        killed_ttl_seconds=None if settings.killed_ttl is None else parse_duration(settings.killed_ttl, "killed_ttl"),
        admission=settings.admission,
        write_budget=settings.write_budget,
        exact=None if settings.codec == "raw" else EXACT,
        quantized=quantized,
        key=None if settings.key_file is None else read_secret_file(Path(settings.key_file), "The key file"),
    )
    knowledge_folder(settings)  # documents of earlier versions leave a cache folder before it is opened
    try:
        return TieredStore(settings.cache or cache_folder(), chosen, shared=shared_tiers(settings))
    except CacheUnusable as error:
        if settings.cache is not None and has_room(Path(settings.cache)):
            raise CacheUnusable(f"{error} Name another folder, or go without a cache: --cache off.") from error
        log.warning("The cache cannot be used, so everything is computed: %s", error)
        return None


def shared_tiers(settings: Settings) -> list[ObjectStore]:
    """The shared tiers that the settings name, the nearest first. Raises `InvalidSetting` and `ExtraMissing`."""
    shared = settings.tiers.split(" > ")[2:]
    ttl_seconds = None if settings.ttl is None else parse_duration(settings.ttl)
    opened: list[ObjectStore] = []
    if "redis" in shared:
        from rekindle.store.redis import RedisObjects  # what it needs is not always installed

        opened.append(RedisObjects(settings.redis, _limit_bytes(settings.redis_limit, "redis_limit"), ttl_seconds))
    if "s3" in shared:
        from rekindle.store.s3 import S3Objects

        if settings.s3 is None:
            raise InvalidSetting("The tier s3 needs a bucket: set s3=s3://BUCKET/PREFIX.")
        opened.append(S3Objects(settings.s3, _limit_bytes(settings.s3_limit, "s3_limit"), ttl_seconds))
    if settings.tier_secret is None:
        return opened
    from rekindle.codec.cipher import read_secret
    from rekindle.store.sealed import SealedObjects

    secret = read_secret(Path(settings.tier_secret))
    return [SealedObjects(objects, secret) for objects in opened]


def _limit_bytes(text: str, name: str) -> int:
    size_bytes = parse_limit(text, name).size_bytes
    if size_bytes is None:
        raise InvalidSetting(f"{name}={text!r} is a share. Use a size (10GB).")
    return size_bytes
