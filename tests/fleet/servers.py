"""vLLM in this process, with Rekindle's connector or without one."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tests.tiny import tiny_model
from tests.tiny_tokenizer import byte_backend

PATIENCE_SECONDS = 60.0
SIZES = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 2048}


def save_model(folder: Path, family: str, **changes: Any) -> Path:
    """A tiny model, without sliding windows unless they are asked for."""
    whole: dict[str, Any] = {"sliding_window": None, "use_sliding_window": False}
    if hasattr(AutoConfig.for_model(family), "layer_types"):  # a Mistral that has them is read as a Ministral
        whole["layer_types"] = None
    tiny_model(family, **{**SIZES, **(changes or whole)}).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_backend()).save_pretrained(folder)
    return folder


def prompt(length: int, seed: int = 7) -> list[int]:
    return [(i * seed + i // 31) % 250 + 1 for i in range(length)]


@dataclass(frozen=True)
class Served:
    """A reply, and how many tokens of its prompt were not computed."""

    tokens: tuple[int, ...]
    cached: int


class VllmServer:
    """A running vLLM."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self.connector: Any = self.core.scheduler.connector

    def reply(self, tokens: Sequence[int], count: int = 16, **options: Any) -> Served:
        return self.replies([tokens], count, **options)[0]

    def replies(
        self, prompts: Sequence[Sequence[int]], count: int = 16, salt: str | None = None, lora: Any = None
    ) -> list[Served]:
        """Greedy replies; then what they computed is stored."""
        given = [{"prompt_token_ids": list(tokens), **({"cache_salt": salt} if salt else {})} for tokens in prompts]
        how = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = self.llm.generate(given, how, use_tqdm=False, lora_request=lora)
        self.settle()
        return [Served(tuple(one.outputs[0].token_ids), one.num_cached_tokens or 0) for one in outputs]

    def settle(self) -> None:
        """Run the steps that free the blocks of finished requests, and wait until all is written."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.core.scheduler.has_requests() and time.monotonic() < deadline:
            self.llm.llm_engine.step()
        assert not self.core.scheduler.has_requests()
        if (blocks := self.blocks) is not None:
            assert blocks.flush(PATIENCE_SECONDS)

    @property
    def blocks(self) -> Any:
        """The worker's side of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        return get_kv_transfer_group()._blocks if has_kv_transfer_group() else None

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.llm.reset_prefix_cache()

    def counts(self) -> dict[str, float]:
        """vLLM's counters of the connector."""
        found = [metric for metric in self.llm.get_metrics() if metric.name.startswith("vllm:rekindle_")]
        return {metric.name.removeprefix("vllm:rekindle_"): metric.value for metric in found}  # type: ignore[attr-defined]


@contextmanager
def serving(model: Path, cache: Path | None = None, *, settings: Any = None, **options: Any) -> Iterator[VllmServer]:
    """vLLM with a model; with a cache folder, through the connector."""
    if cache is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "RekindleConnector",
            "kv_connector_module_path": "rekindle.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cache": str(cache), **(settings or {})},
        }
    chosen = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True, **options}
    llm = LLM(str(model), disable_log_stats=False, **chosen)
    try:
        yield VllmServer(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
