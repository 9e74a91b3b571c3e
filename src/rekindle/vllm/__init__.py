"""Rekindle behind vLLM: a KV connector that keeps what vLLM computes in the ordinary cache folder, and loads it again.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "RekindleConnector",
    "kv_connector_module_path": "rekindle.vllm", "kv_role": "kv_both"}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["RekindleConnector"]

if TYPE_CHECKING:
    from rekindle.vllm.connector import RekindleConnector


def __getattr__(name: str) -> object:
    if name != "RekindleConnector":
        raise AttributeError(f"module 'rekindle.vllm' has no attribute {name!r}")
    from rekindle.vllm.connector import RekindleConnector  # imports vLLM, which the other modules here do without

    return RekindleConnector
