"""The cache of a session, with what it may use besides a stored prefix: passages, and an origin."""

from __future__ import annotations

from rekindle.cache.checkpoint_kv import CheckpointKv
from rekindle.cache.coders import quantized_coder
from rekindle.cache.open_store import open_store
from rekindle.cache.prefix_cache import PrefixCache
from rekindle.cache.stored_kv import StoredKv
from rekindle.chunks.prefill import ChunkPrefill
from rekindle.engine.base import Engine
from rekindle.engine.lora_manager import LoraManager
from rekindle.settings import Settings


def open_cache(engine: Engine, settings: Settings, adapters: LoraManager) -> PrefixCache:
    """Raises `InvalidSetting`, and `CacheUnusable` for a folder that was named."""
    can = engine.capabilities
    store = open_store(settings, share=1.0 if can.crowded else 0.5, quantized=quantized_coder(engine, settings))
    kv = (StoredKv if can.spans else CheckpointKv)(engine, settings, store)
    chunks = ChunkPrefill(kv, settings)
    if settings.origin is None:
        return PrefixCache(kv, settings, adapters, chunks)
    from rekindle.remote.remote_kv import RemoteKv  # what checks signatures is not always installed

    return PrefixCache(kv, settings, adapters, chunks, RemoteKv(chunks, settings))
