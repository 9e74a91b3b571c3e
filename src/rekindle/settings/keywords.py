"""The settings as keyword arguments. Written by `make reference` from the declarations in `rekindle.settings`.

Type checkers read no table at run time, so the types are written out here.
"""

from __future__ import annotations

import os
from typing import Literal, TypedDict


class CacheSettings(TypedDict, total=False):
    """The settings of a cache as keyword arguments; None counts as not given."""

    cache: str | os.PathLike[str] | None
    reuse: Literal["exact", "quantized", "approximate", "off"] | None
    codec: Literal["auto", "raw", "q8", "q5", "q4", "q3"] | None
    memory_limit: str | int | None
    disk_limit: str | int | None
    tiers: str | None
    redis: str | None
    redis_limit: str | int | None
    s3: str | None
    s3_limit: str | int | None
    tier_secret: str | os.PathLike[str] | None
    tenant: str | None
    cache_salt: str | None
    policy: str | None
    ttl: str | int | None
    killed_ttl: str | int | None
    admission: Literal["always", "second-use"] | None
    write_budget: str | int | None
    key_file: str | os.PathLike[str] | None


class SettingsLike(CacheSettings, total=False):
    """All settings of a session as keyword arguments; None counts as not given."""

    engine: Literal["auto", "hf", "llamacpp", "onnx"] | None
    device: str | None
    dtype: str | None
    context: int | None
    threads: int | None
    gpu_layers: int | None
    llama_library: str | os.PathLike[str] | None
    flash_attention: Literal["auto", "on", "off"] | None
    kv_type: str | None
    kv_tokens: int | None
    swa_full: bool | None
    batch_tokens: int | None
    micro_batch_tokens: int | None
    adapter: str | None
    deterministic: bool | None
    keep_reply_tokens: bool | None
    recompute_budget: float | None
    library: str | os.PathLike[str] | None
    library_limit: str | int | None
    embedder: str | None
    answers: Literal["auto", "off", "verified", "direct"] | None
    similarity_threshold: float | None
    answers_limit: str | int | None
    origin: str | None
    origin_keys: str | None
    origin_token: str | os.PathLike[str] | None
    origin_secret: str | os.PathLike[str] | None
    kl_budget: float | None
    local_tenants: str | None
    parallel: int | None
    keep_alive: str | int | None
    adapter_memory: str | int | None
