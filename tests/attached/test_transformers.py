"""`attach`: the same answer with and without it, whatever is done with the model; and nothing wrong is ever kept."""

from __future__ import annotations

import copy
import gc
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, T5Config, T5ForConditionalGeneration

from rekindle.attached.transformers import Attached, attach
from rekindle.cache.cost import FREE, Costs
from rekindle.core.keys import KvSpace
from rekindle.core.kv import Kv
from rekindle.engine.hf.sequence import raw_view
from rekindle.errors import Closed, InvalidPrompt, InvalidSetting, UnsupportedModel
from rekindle.store.report import kv_spaces
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import Kept, TieredStore
from tests.tiny import FAMILIES, OTHERS, VOCABULARY, WINDOW, tiny_model

PROMPT = 3 * WINDOW - 5  # well past the sliding window, and past a block
NEW = WINDOW + 9  # decoding past it too
ROOT = Path(__file__).resolve().parents[2]
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 64,
    },
    "original_max_position_embeddings": 64,
    "max_position_embeddings": 256,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}


def ids_of(count: int, seed: int = 1) -> Tensor:
    return torch.tensor([np.random.default_rng(seed).integers(3, VOCABULARY - 1, count).tolist()])


def greedy(model: PreTrainedModel, ids: Tensor, new: int = NEW, **options: Any) -> list[int]:
    out = model.generate(
        ids.to(model.device), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    return out[0, ids.shape[1] :].tolist() if out.ndim == 2 else out.tolist()


def fresh_kv(model: PreTrainedModel, tokens: list[int]) -> list[tuple[Tensor, Tensor]]:
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([tokens], device=model.device), past_key_values=cache)
    return [(layer.keys[0].cpu(), layer.values[0].cpu()) for layer in cache.layers]


class Ledger(list[tuple[list[int], Kv]]):
    """Everything that was written to any store."""

    def check(self, model: PreTrainedModel) -> None:
        """The law: what is kept for some tokens is what the model computes for them."""
        for tokens, kv in self:
            for (keys, values), layer in zip(fresh_kv(model, tokens), kv.layers, strict=True):
                for expected, got in ((keys, layer.keys), (values, layer.values)):
                    theirs = raw_view(expected[:, kv.span.start : kv.span.stop].contiguous())
                    assert got.shape == theirs.shape and got.dtype == theirs.dtype
                    if theirs.dtype == np.float32:
                        assert np.abs(got - theirs).max() <= 1e-4 * np.abs(theirs).max()

    @property
    def longest(self) -> int:
        return max((kv.span.stop for _, kv in self), default=0)

    def covers(self, tokens: list[int]) -> int:
        """How many of the tokens are kept, from the first on."""
        same = (np.cumprod([a == b for a, b in zip(kept, tokens, strict=False)]).sum() for kept, _ in self)
        return max(map(int, same), default=0)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    ledger = Ledger()
    keep = TieredStore.keep

    def spy(store: TieredStore, kv_space: KvSpace, tokens: Any, kv: Kv, **options: Any) -> Kept:
        ledger.append((list(tokens[: kv.span.stop]), kv))
        return keep(store, kv_space, tokens, kv, **options)

    monkeypatch.setattr(TieredStore, "keep", spy)
    return ledger


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more, and lose a lot on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is remembered of models is not in the folder of a test, which is its cache."""
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("REKINDLE_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def kv(model: PreTrainedModel, tmp_path: Path) -> Iterator[Attached]:
    with attach(model, cache=tmp_path / "kv") as attached:
        yield attached


# -- the chief law -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_gives_the_same_tokens_cold_warm_and_after_a_restart(
    family: str, tmp_path: Path, kept: Ledger
) -> None:
    model, ids = tiny_model(family), ids_of(PROMPT)
    expected = greedy(model, ids)
    with attach(model, cache=tmp_path) as kv:
        cold = kv.match(ids)
        assert cold.reused_tokens == 0
        assert greedy(model, ids, past_key_values=cold) == expected
        warm = kv.match(ids)
        assert warm.reused_tokens == PROMPT - 1
        assert greedy(model, ids, past_key_values=warm) == expected
    with attach(model, cache=tmp_path, memory_limit=0) as kv:
        again = kv.match(ids)
        assert again.reused_tokens == PROMPT - 1
        assert greedy(model, ids, past_key_values=again) == expected
    kept.check(model)
    assert kept.covers(ids[0].tolist() + expected) == PROMPT + NEW - 1  # the last token was never computed


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "gpt_neox"])
def test_logits_after_a_load_from_disk_are_the_models_own(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), ids_of(PROMPT)
    with torch.inference_mode():
        expected = model(ids).logits[0, -1]
    with attach(model, cache=tmp_path) as kv, torch.inference_mode():
        model(input_ids=ids[:, :-5], past_key_values=kv.match(ids[:, :-5]))
    with attach(model, cache=tmp_path, memory_limit=0) as kv, torch.inference_mode():
        cache = kv.match(ids)
        assert cache.reused_tokens == PROMPT - 5
        logits = model(input_ids=ids[:, cache.reused_tokens :], past_key_values=cache).logits[0, -1]
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["mixtral", "olmo3"])
def test_a_family_that_no_test_knows_is_checked_and_then_served(family: str, tmp_path: Path) -> None:
    assert family in OTHERS
    model, ids = tiny_model(family), ids_of(PROMPT)
    expected = greedy(model, ids)
    with attach(model, cache=tmp_path) as kv:
        assert greedy(model, ids, past_key_values=kv.match(ids)) == expected
        cache = kv.match(ids)
        assert cache.reused_tokens == PROMPT - 1 and greedy(model, ids, past_key_values=cache) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = tiny_model("llama").to(dtype), ids_of(PROMPT)
    with attach(model, cache=tmp_path) as kv:
        first = kv.match(ids)
        greedy(model, ids, past_key_values=first)
    with attach(model, cache=tmp_path, memory_limit=0) as kv:
        second = kv.match(ids)
    for before, after in zip(first.layers, second.layers, strict=True):
        assert after.keys.dtype == dtype
        assert torch.equal(before.keys[:, :, : PROMPT - 1], after.keys)
        assert torch.equal(before.values[:, :, : PROMPT - 1], after.values)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_on_cuda_the_tokens_are_the_same_and_the_kv_is_right(
    family: str, dtype: torch.dtype, tmp_path: Path, kept: Ledger
) -> None:
    model, ids = tiny_model(family).to("cuda", dtype), ids_of(PROMPT)
    expected = greedy(model, ids)
    with attach(model, cache=tmp_path) as kv, torch.cuda.stream(torch.cuda.Stream()):
        first = kv.match(ids)
        got = greedy(model, ids, past_key_values=first)
        assert dtype == torch.bfloat16 or got == expected  # a random model in half precision has ties
    with attach(model, cache=tmp_path, memory_limit=0) as kv:
        second = kv.match(ids)
        assert second.reused_tokens == PROMPT - 1 and second.layers[0].keys.device.type == "cuda"
        for before, after in zip(first.layers, second.layers, strict=True):
            assert torch.equal(before.keys[:, :, : PROMPT - 1], after.keys)
            assert torch.equal(before.values[:, :, : PROMPT - 1], after.values)
        got = greedy(model, ids, past_key_values=second)
        assert dtype == torch.bfloat16 or got == expected
    kept.check(model)


# -- what is reused ------------------------------------------------------------------------------------------------


def test_a_prompt_that_shares_its_beginning_reuses_exactly_that(
    model: PreTrainedModel, kv: Attached, tmp_path: Path
) -> None:
    ids, other = ids_of(90), ids_of(90, seed=2)
    other[:, :71] = ids[:, :71]
    other[:, 71] = ids[:, 71] + 1
    greedy(model, ids, past_key_values=kv.match(ids))
    expected = greedy(model, other)
    kv.flush()
    for limit in (0, "1GB"):
        with attach(model, cache=tmp_path / "kv", memory_limit=limit) as another:
            assert another.match(other).reused_tokens == 71
    cache = kv.match(other)
    assert cache.reused_tokens == 71
    assert greedy(model, other, past_key_values=cache) == expected


def test_the_reply_is_reused_by_the_next_turn_and_after_a_restart(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = ids_of(PROMPT)
    with attach(model, cache=tmp_path) as kv:
        reply = greedy(model, ids, past_key_values=kv.match(ids))
        gc.collect()  # nobody has the cache any more
        turn = torch.cat([ids, torch.tensor([reply]), ids_of(12, seed=3)], dim=1)
        cache = kv.match(turn)
        assert cache.reused_tokens == PROMPT + NEW - 1
        assert greedy(model, turn, past_key_values=cache) == greedy(model, turn)
    with attach(model, cache=tmp_path, memory_limit=0) as kv:
        assert kv.match(turn).reused_tokens == PROMPT + NEW + 11


def test_a_cache_that_is_used_for_a_whole_chat_is_kept_whole(
    model: PreTrainedModel, kv: Attached, kept: Ledger
) -> None:
    ids = ids_of(PROMPT)
    cache = kv.match(ids)
    for seed in (3, 4):
        reply = greedy(model, ids, past_key_values=cache)
        ids = torch.cat([ids, torch.tensor([reply]), ids_of(9, seed)], dim=1)
    assert greedy(model, ids, past_key_values=cache) == greedy(model, ids)
    assert kv.flush()
    kept.check(model)
    assert kept.covers(ids[0].tolist()) == ids.shape[1]


def test_a_list_of_ids_and_a_prompt_of_one_token_are_prompts(model: PreTrainedModel, kv: Attached) -> None:
    ids = ids_of(1)
    assert greedy(model, ids, past_key_values=kv.match(ids[0].tolist())) == greedy(model, ids)
    kv.flush()
    assert kv.match(ids).reused_tokens == 0


def test_another_tenant_or_salt_reuses_nothing_and_the_same_one_does(model: PreTrainedModel, tmp_path: Path) -> None:
    ids = ids_of(PROMPT)
    with attach(model, cache=tmp_path, tenant="anna", cache_salt="s") as kv:
        greedy(model, ids, past_key_values=kv.match(ids))
    for tenant, salt, reused in (("anna", "s", PROMPT - 1), ("bert", "s", 0), ("anna", "t", 0)):
        with attach(model, cache=tmp_path, tenant=tenant, cache_salt=salt) as kv:
            assert kv.match(ids).reused_tokens == reused


def test_two_attachments_of_one_model_keep_their_own(model: PreTrainedModel, tmp_path: Path, kept: Ledger) -> None:
    ids = ids_of(PROMPT)
    with attach(model, cache=tmp_path / "a") as one, attach(model, cache=tmp_path / "b") as other:
        greedy(model, ids, past_key_values=one.match(ids))
        one.flush(), other.flush()
        assert one.match(ids).reused_tokens == PROMPT - 1 and other.match(ids).reused_tokens == 0
    kept.check(model)


def test_a_copy_of_the_model_is_another_model(tmp_path: Path, kept: Ledger) -> None:
    model, ids = tiny_model("llama"), ids_of(PROMPT)
    with attach(model, cache=tmp_path) as kv:
        other = copy.deepcopy(model)
        in_place(other)
        assert greedy(other, ids, past_key_values=kv.match(ids)) == greedy(other, ids)
        kv.flush()
        assert not kept
        torch.save(model, tmp_path / "model.pt")


def test_two_threads_may_generate_at_once(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    prompts = [ids_of(PROMPT, seed) for seed in range(4)]
    expected = [greedy(model, ids) for ids in prompts]
    got: list[list[int]] = [[]] * 4

    def work(number: int) -> None:
        for _ in range(2):
            got[number] = greedy(model, prompts[number], past_key_values=kv.match(prompts[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == expected and kv.flush()
    kept.check(model)
    assert all(kv.match(ids).reused_tokens == PROMPT - 1 for ids in prompts)


def test_switched_off_it_keeps_nothing_and_disturbs_nobody(model: PreTrainedModel) -> None:
    ids = ids_of(PROMPT)
    with attach(model, cache="off") as kv:
        for _ in range(2):
            cache = kv.match(ids)
            assert cache.reused_tokens == 0 and greedy(model, ids, past_key_values=cache) == greedy(model, ids)
        assert kv.flush()


# -- the model changes ---------------------------------------------------------------------------------------------


def in_place(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0


def behind_the_back(model: PreTrainedModel) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data += torch.ones_like(weight)


def replaced(model: PreTrainedModel) -> None:
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = nn.Linear(old.in_features, old.out_features, bias=False)


@pytest.mark.parametrize("change", [in_place, behind_the_back, replaced])
def test_changed_weights_miss_and_the_old_ones_hit_again(change: Any, tmp_path: Path, kept: Ledger) -> None:
    model, ids = tiny_model("llama"), ids_of(PROMPT)
    before = copy.deepcopy(model.state_dict())
    with attach(model, cache=tmp_path) as kv:
        greedy(model, ids, past_key_values=kv.match(ids))
        kv.flush()
        kept.check(model)
        kept.clear()
        change(model)
        cache = kv.match(ids)
        assert cache.reused_tokens == 0
        assert greedy(model, ids, past_key_values=cache) == greedy(model, ids)
        kv.flush()
        kept.check(model)
        assert kv.match(ids).reused_tokens == PROMPT - 1
        model.load_state_dict(before)
        assert kv.match(ids).reused_tokens == PROMPT - 1


def test_a_model_that_was_converted_is_another_one(tmp_path: Path, kept: Ledger) -> None:
    model, ids = tiny_model("llama"), ids_of(PROMPT)
    with attach(model, cache=tmp_path) as kv:
        greedy(model, ids, past_key_values=kv.match(ids))
        model.to(torch.bfloat16)
        for reused in (0, PROMPT - 1):
            cache = kv.match(ids)
            assert cache.reused_tokens == reused
            greedy(model, ids, past_key_values=cache)
        assert cache.layers[0].keys.dtype == torch.bfloat16


@pytest.mark.parametrize("change", [in_place, behind_the_back, replaced])
def test_kv_is_not_kept_if_the_weights_changed_between_match_and_keep(
    change: Any, tmp_path: Path, kept: Ledger
) -> None:
    model, ids = tiny_model("llama"), ids_of(PROMPT)
    with attach(model, cache=tmp_path) as kv:
        cache = kv.match(ids)
        change(model)
        greedy(model, ids, past_key_values=cache)
        kv.flush()
    assert not kept


def training(model: PreTrainedModel) -> Any:
    model.train()
    return model.eval


def steered(model: PreTrainedModel) -> Any:
    return model.model.layers[0].register_forward_hook(lambda _, __, output: output * 1.5).remove


def autocast(_: PreTrainedModel) -> Any:
    context = torch.autocast("cpu", torch.bfloat16)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


@pytest.mark.parametrize("disturb", [training, steered, autocast])
@pytest.mark.parametrize("early", [True, False])
def test_a_model_that_computes_otherwise_than_its_weights_say_reuses_and_keeps_nothing(
    disturb: Any, early: bool, tmp_path: Path, kept: Ledger
) -> None:
    model, ids = tiny_model("llama"), ids_of(PROMPT)
    with attach(model, cache=tmp_path) as kv:
        greedy(model, ids, past_key_values=kv.match(ids))
        kv.flush()
        kept.clear()
        other = ids_of(PROMPT, seed=9)
        if early:
            undo = disturb(model)
            cache = kv.match(ids)
            assert cache.reused_tokens == 0 and kv.match(other).reused_tokens == 0
        else:
            cache = kv.match(other)
            undo = disturb(model)
        greedy(model, ids if early else other, past_key_values=cache)
        undo()
        kv.flush()
        assert not kept
        assert kv.match(ids).reused_tokens == PROMPT - 1


def test_a_hook_that_comes_while_decoding_ends_the_keeping_there(tmp_path: Path, kept: Ledger) -> None:
    model, ids = tiny_model("llama"), ids_of(PROMPT)
    with attach(model, cache=tmp_path) as kv, torch.inference_mode():
        cache = kv.match(ids)
        token = model(input_ids=ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        undo = steered(model)
        for _ in range(4):
            token = model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
        undo()
        kv.flush()
    assert kept.longest == PROMPT
    kept.check(model)


def test_hidden_states_may_be_asked_for(model: PreTrainedModel, kv: Attached) -> None:
    ids = ids_of(PROMPT)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=kv.match(ids), output_hidden_states=True)
    assert kv.match(ids).reused_tokens == PROMPT - 1


# -- whatever transformers does with a cache -----------------------------------------------------------------------


@pytest.mark.parametrize("known", [0, 20, PROMPT - 1])
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 4},
        {"assistant": True},
        {"prefill_chunk_size": 7},
        {"output_attentions": True, "return_dict_in_generate": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_way_to_generate_gives_the_same_and_keeps_only_what_is_right(
    options: dict[str, Any], known: int, tmp_path: Path, kept: Ledger
) -> None:
    model, ids = tiny_model("llama", attn_implementation="eager"), ids_of(PROMPT)
    ids[:, 20:36] = ids[:, 4:20]  # something for the lookup of n-grams
    chosen = dict(options)
    if chosen.pop("assistant", False):
        chosen["assistant_model"] = tiny_model("llama", num_hidden_layers=1)
        chosen["assistant_model"].generation_config.num_assistant_tokens = 5
    chosen |= {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def sequences(**more: Any) -> list[list[int]]:
        out = model.generate(ids, **chosen, **more)
        return (out if isinstance(out, Tensor) else out.sequences).tolist()

    expected = sequences()
    with attach(model, cache=tmp_path) as kv:
        if known:
            with torch.inference_mode():
                model(input_ids=ids[:, :known], past_key_values=kv.match(ids[:, :known]))
        cache = kv.match(ids)
        assert cache.reused_tokens == known
        assert sequences(past_key_values=cache) == expected
        del cache
        kv.flush()
        kept.check(model)
        if "num_beams" not in options:  # of beams nothing is kept
            assert kept.covers(expected[0]) >= PROMPT + NEW - 1


def test_sampling_several_replies_to_one_prompt_works_and_keeps_nothing_wrong(
    model: PreTrainedModel, kv: Attached, kept: Ledger
) -> None:
    ids = ids_of(PROMPT)
    greedy(model, ids, past_key_values=kv.match(ids))
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "eos_token_id": None}
    torch.manual_seed(4)
    expected = model.generate(ids, **options)
    torch.manual_seed(4)
    assert torch.equal(model.generate(ids, past_key_values=kv.match(ids), **options), expected)
    kv.flush()
    kept.check(model)


def test_a_batch_is_refused_by_match_with_a_sentence(kv: Attached) -> None:
    with pytest.raises(InvalidPrompt, match="one prompt, not a batch of 2"):
        kv.match(torch.cat([ids_of(5), ids_of(5)]))
    for wrong in ([], [[]], torch.tensor(3), torch.tensor([[0.5]]), [-1, 2], ["a"]):
        with pytest.raises(InvalidPrompt):
            kv.match(wrong)  # type: ignore[arg-type]


def test_embeddings_are_computed_but_not_kept(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    ids = ids_of(PROMPT)
    cache = kv.match(ids)
    with torch.inference_mode():
        token = model(input_ids=ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        model(inputs_embeds=model.get_input_embeddings()(token), past_key_values=cache)
        model(input_ids=token, past_key_values=cache)
    assert kv.flush()
    assert kept.longest == PROMPT
    kept.check(model)


def test_a_prompt_with_padding_is_computed_but_not_kept(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    ids, mask = ids_of(PROMPT), torch.ones(1, PROMPT, dtype=torch.long)
    ids[:, :4], mask[:, :4] = 0, 0
    expected = greedy(model, ids, attention_mask=mask)
    assert greedy(model, ids, attention_mask=mask, past_key_values=kv.match(ids)) == expected
    assert kv.flush() and not kept


def test_padding_over_reused_tokens_is_an_error_not_a_wrong_answer(model: PreTrainedModel, kv: Attached) -> None:
    ids, mask = ids_of(PROMPT), torch.ones(1, PROMPT, dtype=torch.long)
    greedy(model, ids, past_key_values=kv.match(ids))
    mask[:, :4] = 0
    with pytest.raises(InvalidPrompt, match="no padded prompts"):
        greedy(model, ids, attention_mask=mask, past_key_values=kv.match(ids))


def test_odd_positions_and_masks_are_computed_but_not_kept(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    ids = ids_of(PROMPT)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=kv.match(ids), position_ids=torch.arange(PROMPT)[None] * 2)
        cache = kv.match(ids)
        square = torch.ones(1, 1, PROMPT, PROMPT, dtype=torch.bool)
        model(input_ids=ids, past_key_values=cache, attention_mask=square)
        assert kv.flush() and not kept
        cache = kv.match(ids)
        model(input_ids=ids, past_key_values=cache)
        model(input_ids=ids[:, :1], past_key_values=cache, position_ids=torch.tensor([[PROMPT + 3]]))
        model(input_ids=ids[:, :1], past_key_values=cache)
    assert kv.flush()
    assert kept.longest == PROMPT  # the prompt, as its first token was out before
    kept.check(model)


def test_tokens_that_do_not_follow_the_prompt_are_not_kept(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    ids, other = ids_of(PROMPT), ids_of(PROMPT, seed=5)
    greedy(model, ids, past_key_values=kv.match(ids))
    kv.flush()
    kept.clear()
    greedy(model, other, past_key_values=kv.match(ids))
    kv.flush()
    assert not kept


# -- loops written by hand -----------------------------------------------------------------------------------------


def decode(model: PreTrainedModel, ids: Tensor, cache: Any, pieces: int = 1000) -> list[int]:
    """A loop as people write them: the rest of the prompt in pieces, then token by token in one buffer."""
    out: list[int] = []
    with torch.no_grad():
        rest = ids[:, cache.get_seq_length() :]
        for start in range(0, rest.shape[1], pieces):
            logits = model(rest[:, start : start + pieces], past_key_values=cache, use_cache=True).logits
        buffer = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(NEW):
            buffer.copy_(logits[:, -1:].argmax(-1))
            out.append(int(buffer))
            logits = model(buffer, past_key_values=cache, use_cache=True).logits
            buffer.zero_()
    return out


@pytest.mark.parametrize("pieces", [1000, 9])
def test_a_loop_written_by_hand_is_kept_and_reused(
    pieces: int, model: PreTrainedModel, tmp_path: Path, kept: Ledger
) -> None:
    ids = ids_of(PROMPT)
    expected = decode(model, ids, DynamicCache())
    for known in (0, PROMPT - 1):
        with attach(model, cache=tmp_path, memory_limit=0) as kv:
            cache = kv.match(ids)
            assert cache.reused_tokens == known
            assert decode(model, ids, cache, pieces) == expected
    kept.check(model)
    assert kept.covers(ids[0].tolist() + expected) == PROMPT + NEW


def test_a_loop_with_gradients_is_kept_too(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    ids = ids_of(PROMPT)
    with torch.inference_mode():
        model(input_ids=ids[:, :20], past_key_values=kv.match(ids[:, :20]))
    for _ in range(2):
        cache = kv.match(ids)
        assert cache.reused_tokens >= 20
        model(input_ids=ids[:, cache.reused_tokens :], past_key_values=cache).logits.sum().backward()
        model.zero_grad()
    assert kv.flush() and kept.covers(ids[0].tolist()) == PROMPT
    kept.check(model)


def test_the_decoder_may_be_called_without_its_head(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    ids = ids_of(PROMPT)
    with torch.inference_mode():
        model.model(ids, past_key_values=kv.match(ids))
    assert kv.match(ids).reused_tokens == PROMPT - 1
    kv.flush()
    kept.check(model)


@pytest.mark.parametrize("pieces", [1000, 9])
def test_the_whole_prompt_given_to_a_filled_cache_is_computed_whole(
    pieces: int, model: PreTrainedModel, kv: Attached, kept: Ledger
) -> None:
    ids, positions = ids_of(PROMPT), torch.arange(PROMPT)[None]
    greedy(model, ids, past_key_values=kv.match(ids))
    with torch.inference_mode():
        expected = model(ids).logits[:, -1]
        cache = kv.match(ids)
        for start in range(0, PROMPT, pieces):
            part = slice(start, start + pieces)
            said = {"position_ids": positions[:, part]} if pieces < PROMPT else {}
            logits = model(input_ids=ids[:, part], past_key_values=cache, **said).logits[:, -1]
        assert torch.allclose(logits, expected, atol=1e-4)
    assert cache.reused_tokens == 0 and cache.get_seq_length() == PROMPT
    kv.flush()
    kept.check(model)


def test_a_cropped_cache_is_kept_as_what_it_then_holds(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    ids, other = ids_of(PROMPT), ids_of(30, seed=6)
    cache = kv.match(ids)
    with torch.inference_mode():
        for cut in (3, 0, 20):
            if cache.get_seq_length() < PROMPT:
                model(input_ids=ids[:, cache.get_seq_length() :], past_key_values=cache)
            model(input_ids=other[:, :5], past_key_values=cache)
            cache.crop(-(5 + cut))
        model(input_ids=other, past_key_values=cache)
    assert kv.flush()
    kept.check(model)
    assert kept.covers(ids[0, : PROMPT - 20].tolist() + other[0].tolist()) == PROMPT + 10


def prune(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 5:], layer.values[:, :, 5:]


def scribble(cache: Any) -> None:
    cache.layers[2].values[:, :, 3] += 1.0


def repeat_and_select(cache: Any) -> None:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([1]))


@pytest.mark.parametrize(
    "change",
    [prune, scribble, repeat_and_select, lambda c: c.reorder_cache(torch.tensor([0])), lambda c: c.reset()],
    ids=["prune", "scribble", "repeat", "reorder", "reset"],
)
def test_a_cache_that_was_changed_by_hand_is_not_kept(
    change: Any, model: PreTrainedModel, kv: Attached, kept: Ledger
) -> None:
    ids = ids_of(PROMPT)
    cache = kv.match(ids)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        change(cache)
        model(input_ids=ids[:, :1], past_key_values=cache)
        model(input_ids=ids[:, :3], past_key_values=cache)
    assert kv.flush() and not kept


def test_a_cache_that_is_written_to_before_it_was_copied_is_not_kept(
    model: PreTrainedModel, kv: Attached, kept: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, release, admit = ids_of(PROMPT), threading.Event(), TieredStore.admit
    monkeypatch.setattr(TieredStore, "admit", lambda *args, **how: release.wait(60) and admit(*args, **how))
    cache = kv.match(ids)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        prompt = cache.layers[2].values
        model(input_ids=ids[:, :1], past_key_values=cache)  # the prompt is handed on, and waits
        prompt[:, :, 3] += 1.0
    release.set()
    assert kv.flush()
    assert kept.covers(ids[0].tolist()) == PROMPT  # not from those tensors, but from the ones after them
    kept.check(model)


def test_a_layer_that_was_left_out_means_nothing_is_kept(
    model: PreTrainedModel, kv: Attached, kept: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(PROMPT)
    monkeypatch.setattr(model.model.layers[3], "forward", lambda hidden, **_: hidden)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=kv.match(ids))
    assert kv.flush() and not kept


def test_a_call_with_something_unknown_in_it_is_not_kept(model: PreTrainedModel, kv: Attached, kept: Ledger) -> None:
    ids = ids_of(PROMPT)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=kv.match(ids), steering=torch.ones(3))
    assert kv.flush() and not kept


def test_a_copy_of_a_cache_works_and_leaves_the_original_alone(
    model: PreTrainedModel, kv: Attached, kept: Ledger
) -> None:
    ids = ids_of(PROMPT)
    expected = greedy(model, ids)
    greedy(model, ids, past_key_values=kv.match(ids))
    cache = kv.match(ids)
    assert greedy(model, ids, past_key_values=copy.deepcopy(cache)) == expected
    assert cache.get_seq_length() == PROMPT - 1
    assert greedy(model, ids, past_key_values=copy.copy(cache)) == expected
    kv.flush()
    kept.check(model)


def test_a_forward_that_failed_leaves_nothing_wrong_behind(
    model: PreTrainedModel, kv: Attached, kept: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(PROMPT)
    cache = kv.match(ids)
    layer = model.model.layers[2]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with torch.inference_mode():
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(layer, "forward", fail)
            model(input_ids=ids, past_key_values=cache)
        assert kv.flush() and not kept
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            model(input_ids=ids, past_key_values=cache)  # its layers have different lengths now
    assert kv.flush() and not kept
    assert greedy(model, ids, past_key_values=kv.match(ids)) == greedy(model, ids)


def test_trouble_in_the_bookkeeping_never_ends_a_forward(
    model: PreTrainedModel, kv: Attached, kept: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ids_of(PROMPT)
    expected = greedy(model, ids)

    def fail(*_: Any) -> None:
        raise RuntimeError("no room for the notes")

    for name in ("begin", "commit", "snapshot", "tokens"):
        with monkeypatch.context() as patch:
            patch.setattr(f"rekindle.attached.tracked_cache.Track.{name}", fail)
            for new in (NEW, 1):
                assert greedy(model, ids, new, past_key_values=kv.match(ids)) == expected[:new]
            assert kv.flush()
    assert not kept


# -- rotary regimes ------------------------------------------------------------------------------------------------


def test_kv_of_another_rotary_regime_is_never_used(tmp_path: Path, kept: Ledger) -> None:
    model, long = tiny_model("phi3", **LONGROPE), ids_of(100)
    short = long[:, :60]
    with attach(model, cache=tmp_path) as kv:
        for ids in (short, long, short, long):
            assert greedy(model, ids, 3, past_key_values=kv.match(ids)) == greedy(model, ids, 3)
            kv.flush()
        assert kv.match(short).reused_tokens == 59 and kv.match(long).reused_tokens == 99
        assert kv.match(long[:, :80]).reused_tokens == 79
    kept.check(model)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_a_reply_that_crosses_into_another_regime_is_kept_up_to_there(
    family: str, tmp_path: Path, kept: Ledger
) -> None:
    model, ids = tiny_model(family, **LONGROPE), ids_of(60)
    expected = greedy(model, ids, 10)
    for _ in range(2):
        with attach(model, cache=tmp_path) as kv:
            assert greedy(model, ids, 10, past_key_values=kv.match(ids)) == expected
    assert kept.longest == 64
    kept.check(model)


def test_past_the_length_of_a_dynamic_rope_nothing_is_reused_or_kept(tmp_path: Path, kept: Ledger) -> None:
    model, plain = (tiny_model("llama", **DYNAMIC, max_position_embeddings=64) for _ in range(2))  # it has a memory
    ids = ids_of(100)
    with attach(model, cache=tmp_path) as kv:
        for length in (100, 60, 64, 60, 63):
            part = ids[:, :length]
            assert greedy(model, part, 8, past_key_values=kv.match(part)) == greedy(plain, part, 8)
            kv.flush()
    assert kept.longest == 63
    kept.check(model)


# -- trouble with the store ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["extents", "folder", "bits"])
def test_a_broken_store_gives_the_same_text(harm: str, model: PreTrainedModel, tmp_path: Path) -> None:
    ids = ids_of(PROMPT)
    expected = greedy(model, ids)
    with attach(model, cache=tmp_path / "kv") as kv:
        greedy(model, ids, past_key_values=kv.match(ids))
    with attach(model, cache=tmp_path / "kv", memory_limit=0) as kv:
        extents = [p for p in (tmp_path / "kv").rglob("*") if p.is_file() and "catalog" not in p.name]
        big = [path for path in extents if path.stat().st_size > 4096]
        assert big
        if harm == "folder":
            shutil.rmtree(tmp_path / "kv")
        for path in big if harm != "folder" else ():
            data = bytearray(path.read_bytes())
            data[len(data) // 2 :: 7] = bytes(len(data[len(data) // 2 :: 7]))
            path.write_bytes(data) if harm == "bits" else path.unlink()
        for _ in range(2):
            cache = kv.match(ids)
            assert greedy(model, ids, past_key_values=cache) == expected


def test_a_store_that_does_not_answer_is_not_waited_for(
    model: PreTrainedModel, kv: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, release = ids_of(PROMPT), threading.Event()
    expected = greedy(model, ids, past_key_values=kv.match(ids))
    kv.flush()
    lookup = TieredStore.lookup
    monkeypatch.setattr(TieredStore, "lookup", lambda *args: release.wait(60) and lookup(*args))
    for _ in range(2):
        assert greedy(model, ids, past_key_values=kv.match(ids)) == expected
    release.set()


def test_a_store_that_cannot_be_written_gives_the_same_text(
    model: PreTrainedModel, kv: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rekindle.store.disk.DiskStore.keep", full)
    ids = ids_of(PROMPT)
    for _ in range(2):
        assert greedy(model, ids, past_key_values=kv.match(ids)) == greedy(model, ids)
        assert kv.flush()


# -- attaching and detaching ---------------------------------------------------------------------------------------


def test_after_close_the_model_is_as_it_was(tmp_path: Path) -> None:
    model, ids = tiny_model("gemma3_text"), ids_of(PROMPT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, training = model.config.to_dict(), model.training
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    kv = attach(model, cache=tmp_path)
    cache = kv.match(ids)
    expected = greedy(model, ids, past_key_values=cache)
    kv.close()
    kv.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert (model.config.to_dict(), model.training) == (config, training)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert greedy(model, ids) == expected
    turn = torch.cat([ids, torch.tensor([expected])], dim=1)
    assert greedy(model, turn, past_key_values=cache) == greedy(model, turn)  # a cache outlives its attachment
    with pytest.raises(Closed):
        kv.match(ids)


def test_what_cannot_be_kept_is_refused_with_a_sentence(model: PreTrainedModel, tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        peft_config = {"default": object()}  # noqa: RUF012

    spread, loaded = copy.copy(model), copy.copy(model)
    spread.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    loaded._hf_peft_config_loaded = True
    quantized = copy.copy(model)
    quantized.is_quantized = True
    sizes = {"vocab_size": 64, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    cases = {
        "PEFT": (Wrapped(), loaded),
        "spread over": (spread,),
        "quantized": (quantized,),
        "has no weights": (copy.deepcopy(model).to("meta"),),
        "before torch.compile": (torch.compile(model),),
        "takes a transformers model": (nn.Linear(2, 2), "smollm2"),
        "encoder-decoder": (T5ForConditionalGeneration(T5Config(**sizes)),),
    }
    for sentence, refused in cases.items():
        for given in refused:
            with pytest.raises(UnsupportedModel, match=sentence):
                attach(given, cache=tmp_path)  # type: ignore[arg-type]


def test_unknown_settings_are_refused_with_the_nearest_name(model: PreTrainedModel) -> None:
    with pytest.raises(InvalidSetting, match="Did you mean 'disk_limit'"):
        attach(model, disk_limits="1GB")  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting, match="device"):
        attach(model, device="cpu")  # type: ignore[call-arg]


def test_an_origin_and_levels_are_refused_with_what_to_do(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidSetting, match=r"attach has no origin: .* Use a Session\(origin=\.\.\.\)"):
        attach(model, origin="http://127.0.0.1:9")  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting, match="leave reuse='quantized' out, or use a Session"):
        attach(model, cache=tmp_path, reuse="quantized")
    monkeypatch.setenv("REKINDLE_ORIGIN", "http://127.0.0.1:9")
    with pytest.raises(InvalidSetting, match="Unset REKINDLE_ORIGIN"):
        attach(model, cache=tmp_path)


# -- text of earlier prompts -----------------------------------------------------------------------------------------


def test_text_of_an_earlier_prompt_is_reused_where_that_is_allowed_and_never_kept_as_exact(
    tmp_path: Path, kept: Ledger
) -> None:
    model = tiny_model("llama")
    text, head, question = ids_of(200, 7), ids_of(30, 8), ids_of(40, 9)
    with attach(model, cache=tmp_path) as kv:
        first = torch.cat([head, text, question], dim=1)
        greedy(model, first, 2, past_key_values=kv.match(first))
    ids = torch.cat([ids_of(13, 10), text, ids_of(40, 12)], dim=1)
    with attach(model, cache=tmp_path) as kv:
        assert kv.match(ids).reused_tokens == 0
    with attach(model, cache=tmp_path, reuse="approximate") as kv:
        cache = kv.match(ids)
        assert cache.reuse is not None and cache.reuse.level == "approximate"
        (chunk,) = cache.reuse.chunks
        assert (chunk.start, chunk.stop, chunk.found_at) == (13, 213, 30) and chunk.recomputed > 0
        assert cache.reused_tokens == ids.shape[1] - 1
        reply = greedy(model, ids, 4, past_key_values=cache)
        assert len(reply) == 4 and kv.flush()
        longer = torch.cat([ids, torch.tensor([reply]), ids_of(20, 11)], dim=1)
        assert kv.match(longer).reused_tokens >= 13  # what is exact, or what is marked
    kept.check(model)
    assert kept.covers(ids[0].tolist()) == 13
    assert greedy(model, ids, 4) == greedy(model, ids, 4, past_key_values=DynamicCache())


@pytest.mark.measured_costs
def test_text_of_an_earlier_prompt_that_takes_longer_to_move_is_computed_and_match_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    text = ids_of(200, 7)
    slow = replace(FREE, compute=(0.0, 1e-3, 0.0), chunks=(0.0, 100.0))
    monkeypatch.setattr("rekindle.cache.stored_kv.recall_costs", lambda _: Costs(slow))
    with attach(model, cache=tmp_path, reuse="approximate") as kv:
        first = torch.cat([ids_of(30, 8), text, ids_of(40, 9)], dim=1)
        greedy(model, first, 2, past_key_values=kv.match(first))
        assert kv.flush()
        ids = torch.cat([ids_of(13, 10), text, ids_of(40, 12)], dim=1)
        cache = kv.match(ids)
        assert cache.reuse is not None and cache.reuse.level == "exact" and cache.reused_tokens == 0
        assert "200 tokens stand in an earlier prompt" in str(cache.reuse)
        assert greedy(model, ids, 4) == greedy(model, ids, 4, past_key_values=cache)
        assert kv.flush()
        assert kv.match(ids).reused_tokens == ids.shape[1] - 1  # it was kept: it is what computing gives


# -- the page about it ---------------------------------------------------------------------------------------------


@pytest.mark.real
def test_the_example_of_the_page_works_with_the_real_model(tmp_path: Path) -> None:
    (code, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/attach.md").read_text("utf-8"), re.DOTALL)
    for _ in range(2):  # the second process reuses what the first one kept
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "REKINDLE_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        reused, total = map(int, re.findall(r"(\d+) of (\d+)", done.stdout)[0])
    assert reused == total - 1


def test_kept_kv_carries_the_name_of_the_model(tmp_path: Path) -> None:
    named = tiny_model("llama")
    (tmp_path / "qwen").mkdir()
    named.config._name_or_path = str(tmp_path / "qwen")
    with attach(named, cache=tmp_path / "kv") as attached:
        greedy(named, ids_of(100), past_key_values=attached.match(ids_of(100)))
    with TieredStore(tmp_path / "kv", StoreSettings()) as store:
        assert {space.model for space in kv_spaces(store.disk).values()} == {"qwen"}
