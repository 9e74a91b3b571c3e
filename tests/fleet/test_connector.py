"""The connector in a running vLLM: the same tokens with and without it, and more of them from the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest

from tests.fleet.servers import Served, prompt, save_model, serving
from tests.lora import save_lora

PROMPT = prompt(300)


@pytest.fixture(scope="module")
def plain(llama: Path) -> Served:
    """What vLLM says without the connector."""
    with serving(llama) as server:
        return server.reply(PROMPT, 48)


@pytest.mark.parametrize("load", ["async", "layers"])
def test_what_one_process_computed_another_loads(llama: Path, plain: Served, tmp_path: Path, load: str) -> None:
    with serving(llama, tmp_path / "kv") as server:
        assert server.reply(PROMPT, 48) == plain
    with serving(llama, tmp_path / "kv", settings={"load": load}) as server:
        assert server.reply(PROMPT, 48) == Served(plain.tokens, len(PROMPT) - 1)
        longer = [*PROMPT, *plain.tokens]
        warm = server.reply(longer)
        counts = server.counts()
    assert warm.cached >= len(longer) - 32  # the reply was kept, too, but for less than a block
    assert counts["loads"] == 2
    assert counts["loaded_tokens"] == len(PROMPT) - 1 + warm.cached - 256  # whose first blocks vLLM still had
    assert counts["loaded_bytes"] > 0
    assert "failed_loads" not in counts or counts["failed_loads"] == 0


@pytest.mark.parametrize("load", ["async", "layers"])
def test_damaged_kv_is_computed_again(llama: Path, plain: Served, tmp_path: Path, load: str) -> None:
    """vLLM itself serves whatever is in its blocks: zeroed files gave garbage with tokens reported as cached."""
    with serving(llama, tmp_path / "kv") as server:
        server.reply(PROMPT, 48)
    for file in extents(tmp_path / "kv"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        file.write_bytes(data)
    with serving(llama, tmp_path / "kv", settings={"load": load}) as server:
        assert server.reply(PROMPT, 48).tokens == plain.tokens
        assert server.counts()["failed_loads"] >= 1
        server.forget()
        for _ in range(3):  # damaged files are found out one by one
            again = server.reply(PROMPT, 48)
            assert again.tokens == plain.tokens
            server.forget()
    with serving(llama, tmp_path / "kv") as server:
        assert server.reply(PROMPT, 48) == Served(plain.tokens, len(PROMPT) - 1)


def test_a_removed_file_is_a_miss(llama: Path, plain: Served, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "kv") as server:
        server.reply(PROMPT, 48)
        server.forget()
        for file in extents(tmp_path / "kv"):
            file.unlink()
        server.blocks.close()  # it holds what it wrote in memory: so does no other process
    with serving(llama, tmp_path / "kv") as server:
        assert server.reply(PROMPT, 48).tokens == plain.tokens


def test_salts_see_only_their_own(llama: Path, plain: Served, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "kv") as server:
        assert server.reply(PROMPT, 48, salt="anna").cached == 0
        assert server.reply(PROMPT, 48).cached == 0
        assert server.reply(PROMPT, 48, salt="ben") == plain
    with serving(llama, tmp_path / "kv", settings={"tenant": "other"}) as server:
        assert server.reply(PROMPT, 48, salt="anna") == plain
    with serving(llama, tmp_path / "kv") as server:
        assert server.reply(PROMPT, 48, salt="anna") == Served(plain.tokens, len(PROMPT) - 1)


def test_adapters_are_known_by_their_matrices(llama: Path, tmp_path: Path) -> None:
    one, other = (adapter(tmp_path / name, seed) for name, seed in (("one", 1), ("other", 2)))
    options = {"enable_lora": True, "max_lora_rank": 8}
    with serving(llama, **options) as server:
        cold = [server.reply(PROMPT, lora=LoRARequest("a", 1, str(place))) for place in (one,)]
        cold.append(server.reply(PROMPT, lora=LoRARequest("b", 2, str(other))))
    assert cold[0].tokens != cold[1].tokens
    with serving(llama, tmp_path / "kv", **options) as server:
        assert server.reply(PROMPT, lora=LoRARequest("a", 1, str(one))) == cold[0]
        assert server.reply(PROMPT).cached == 0
        assert server.reply(PROMPT, lora=LoRARequest("b", 2, str(other))) == cold[1]
    moved = one.rename(tmp_path / "moved")
    with serving(llama, tmp_path / "kv", **options) as server:
        warm = server.reply(PROMPT, lora=LoRARequest("another name", 3, str(moved)))
    assert warm == Served(cold[0].tokens, len(PROMPT) - 1)


def test_a_reset_removes_what_is_stored(llama: Path, plain: Served, tmp_path: Path) -> None:
    with serving(llama, tmp_path / "kv") as server:
        server.reply(PROMPT, 48)
        assert server.llm.reset_prefix_cache(reset_connector=True)
        assert server.reply(PROMPT, 48) == plain
        server.forget()
        assert server.reply(PROMPT, 48).cached == len(PROMPT) - 1
        assert server.llm.reset_prefix_cache(reset_connector=True)
    with serving(llama, tmp_path / "kv") as server:
        assert server.reply(PROMPT, 48) == plain


def test_prompts_together_in_chunks_say_the_same(llama: Path, tmp_path: Path) -> None:
    """Chunked prefills, shared beginnings, and requests that are preempted for want of blocks."""
    prompts = [[*PROMPT[:200], *prompt(150 + 10 * i, seed=3 + i)] for i in range(6)]
    options = {"max_num_batched_tokens": 128, "num_gpu_blocks_override": 12, "max_model_len": 512}
    with serving(llama, **options) as server:
        cold = server.replies(prompts, 64)
    with serving(llama, tmp_path / "kv", **options) as server:
        assert [one.tokens for one in server.replies(prompts, 64)] == [one.tokens for one in cold]
    with serving(llama, tmp_path / "kv", **options) as server:
        warm = server.replies(prompts, 64)
        failed = server.counts().get("failed_loads", 0)
    assert [one.tokens for one in warm] == [one.tokens for one in cold]
    assert all(one.cached >= len(tokens) - 1 for one, tokens in zip(warm, prompts, strict=True))
    assert failed == 0


def test_hybrid_models_load_what_lies_in_the_window(tmp_path: Path) -> None:
    """Layers with a sliding window have blocks of their own: the hybrid allocator's groups."""
    layers = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    model = save_model(tmp_path / "model", "gemma3_text", sliding_window=64, layer_types=layers)
    options = {"block_size": 32}
    with serving(model, **options) as server:
        cold = server.reply(PROMPT, 48)
        assert len(server.core.scheduler.kv_cache_config.kv_cache_groups) > 1
    with serving(model, tmp_path / "kv", **options) as server:
        assert server.reply(PROMPT, 48) == cold
    with serving(model, tmp_path / "kv", **options) as server:
        warm = server.reply(PROMPT, 48)
    assert warm == Served(cold.tokens, 288)
    for file in extents(tmp_path / "kv"):
        file.write_bytes(file.read_bytes()[:-5000] + bytes(5000))
    with serving(model, tmp_path / "kv", **options) as server:
        assert server.reply(PROMPT, 48).tokens == cold.tokens


def test_an_unknown_layout_is_left_alone(
    llama: Path, plain: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.vllm.paged_kv._keys_transposed", lambda *_: None)
    with serving(llama, tmp_path / "kv") as server:
        assert server.reply(PROMPT, 48) == plain
        server.forget()
        assert server.reply(PROMPT, 48) == plain
        assert "layout" in server.connector._planner.unusable


def test_stored_blocks_are_announced(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}, "block_size": 32}
    with serving(llama, tmp_path / "kv", **options) as server:
        published: list[BlockStored] = []
        publisher = server.core.scheduler.kv_event_publisher
        monkeypatch.setattr(publisher, "publish", lambda batch: published.extend(batch.events))
        server.reply(PROMPT, 48)
    by_medium = {medium: [e for e in published if e.medium == medium] for medium in ("STORAGE", "CPU", "GPU")}
    stored = by_medium["STORAGE"]
    own = [hash for event in by_medium["CPU"] + by_medium["GPU"] for hash in event.block_hashes]
    hashes = [hash for event in stored for hash in event.block_hashes]
    assert hashes[: len(PROMPT) // 32] == own[: len(PROMPT) // 32]
    assert [token for event in stored for token in event.token_ids][:288] == PROMPT[:288]
    assert stored[0].parent_block_hash is None


def adapter(folder: Path, seed: int) -> Path:
    random = np.random.default_rng(seed)
    names = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(4) for part in "qkv"]
    outputs = {"q": 128, "k": 64, "v": 64}
    pairs = {
        name: (
            random.normal(0, 0.5, (4, 128)).astype(np.float32),
            random.normal(0, 0.5, (outputs[name[-6]], 4)).astype(np.float32),
        )
        for name in names
    }
    return save_lora(folder, pairs, target_modules=["q_proj", "k_proj", "v_proj"])


def extents(folder: Path) -> list[Path]:
    found = [file for file in folder.rglob("*.kv") if file.is_file()]
    assert found
    return found
