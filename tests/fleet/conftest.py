"""Nothing here is collected without `TEST_FLEET`, whatever happens to be installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler and its worker can be looked at
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

if os.environ.get("TEST_FLEET"):
    os.environ.update(IN_PROCESS)
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def whatever_is_stored_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes sooner than it loads, and a shared machine may be slow."""
    from tests.unmeasured_costs import UnmeasuredCosts

    monkeypatch.setattr("rekindle.vllm.block_store.LOAD_SECONDS", 120.0)
    monkeypatch.setattr("rekindle.vllm.served_model.Costs", lambda prior, compiles: UnmeasuredCosts())


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama. vLLM's CPU kernels want heads of 32 numbers at least."""
    from tests.fleet.servers import save_model

    return save_model(tmp_path_factory.mktemp("models") / "llama", "llama")
