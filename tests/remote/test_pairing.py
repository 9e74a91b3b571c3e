"""A model takes KV that was published for the same weights in other dtypes; in other files once it was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.cache import cost
from rekindle.core.identity import Identity
from rekindle.core.kv import LayerKv, LayerShape
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting
from rekindle.remote import remote_kv as streams
from rekindle.remote.client import Origin
from rekindle.remote.index import KvModel
from rekindle.remote.pairing import MAX_KL, ModelPairing, recall_pairing, remember_pairing
from rekindle.remote.publish.publisher import Publisher
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.remote.signing import SigningKey
from rekindle.remote.slices import regroup_heads, reorder_keys
from rekindle.session.publish import choose_published, computed, levels_of, pair
from tests.cli.test_origin import ok
from tests.parity.engines import gguf_file, make
from tests.remote.places import MODEL

TEXT = "The keeper lights the lamp at dusk and writes the hour into the book. " * 6


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests are small: as if their prompts were worth streaming."""
    monkeypatch.setattr(streams, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(streams, "MIN_SHARE", 0.0)
    monkeypatch.setattr(cost, "FREE", replace(cost.FREE, compute=(0.0, 1.0, 0.0)))


@contextmanager
def published(engine: Any, folder: Path, key: SigningKey, levels: str = "raw,quantized") -> Iterator[str]:
    with Session(engine, cache="off") as session, computed(session, Request.of(TEXT)) as source:
        Publisher(folder, key).publish(source, levels_of(levels, session))
    with OriginServer(folder, OriginSettings(port=0)).running() as url:
        yield url


# -- the same files ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float16"), ("float16", "float32")])
def test_quantized_kv_is_exchanged_between_dtypes_of_the_same_files(
    dtypes: tuple[str, str], tiny_folder: Path, tmp_path: Path, one_thread: None
) -> None:
    there, here = dtypes
    key = SigningKey.new()
    options: dict[str, Any] = {"engine": "hf", "device": "cpu"}
    with Session(tiny_folder, cache="off", dtype=there, **options) as session:
        assert session.engine.layout.dtype == there
        with computed(session, Request.of(TEXT)) as source:
            Publisher(tmp_path / "files", key).publish(source, levels_of("raw,quantized", session))
    with OriginServer(tmp_path / "files", OriginSettings(port=0)).running() as url:
        own: dict[str, Any] = {"origin": url, "origin_keys": key.public, "dtype": here, **options}
        with Session(tiny_folder, cache=tmp_path / "quantized", reuse="quantized", **own) as session:
            reply = session.generate(TEXT + "And then", max_tokens=2)
            assert reply.reuse.streamed > 0 and reply.reuse.level == "quantized"
        with Session(tiny_folder, cache=tmp_path / "exact", **own) as session:
            reply = session.generate(TEXT + "And then", max_tokens=2)
            assert reply.reuse.streamed == 0 and reply.reuse.origin_miss == "dtype"


def test_a_model_is_the_same_in_every_dtype_and_another_with_other_weights_config_or_rope() -> None:
    own = Identity("w", "c", "t", "x", "float32", "plain")
    assert own.model == replace(own, dtype="bfloat16", tokenizer="t2", template="x2").model
    assert len({own.model, *(replace(own, **{name: "other"}).model for name in ("weights", "config", "rope"))}) == 4
    gguf = Identity("w", "llama.cpp 1", "w", "x", "f16", "plain")
    assert gguf.model == replace(gguf, config="llama.cpp 2, flash attention", dtype="f32").model != own.model


# -- other files ------------------------------------------------------------------------------------------------------


def twin_of(path: Path) -> Any:
    """The tiny llama of a GGUF as a model of transformers: the rows of its queries and keys are in another order."""
    import gguf
    import torch

    from rekindle.engine.hf.device import choose_placement
    from rekindle.engine.hf.engine import HfEngine
    from tests.tiny import byte_tokenizer, tiny_model

    tensors = {tensor.name: torch.tensor(np.array(tensor.data)) for tensor in gguf.GGUFReader(path).tensors}
    kv_heads = tensors["blk.0.attn_k.weight"].shape[0] // 32
    model = tiny_model(
        "llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=kv_heads, head_dim=32, intermediate_size=64,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip

    def halves(name: str, heads: int) -> torch.Tensor:
        rows = tensors[name]
        return rows.reshape(heads, 16, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    state = {"model.embed_tokens.weight": tensors["token_embd.weight"], "lm_head.weight": tensors["output.weight"]}
    state["model.norm.weight"] = tensors["output_norm.weight"]
    names = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm"}
    names |= {"post_attention_layernorm": "ffn_norm"} | {f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    for layer in range(4):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        state |= {f"{ours}{a}.weight": tensors[f"{theirs}{b}.weight"] for a, b in names.items()}
        state[f"{ours}self_attn.q_proj.weight"] = halves(f"{theirs}attn_q.weight", 2)
        state[f"{ours}self_attn.k_proj.weight"] = halves(f"{theirs}attn_k.weight", kv_heads)
    model.load_state_dict(state)
    return HfEngine(model, byte_tokenizer(), name="twin", placement=choose_placement("cpu", "float32"))


def gguf_engine(path: Path) -> Any:
    from rekindle.engine.llamacpp.engine import LlamaCppEngine
    from rekindle.engine.llamacpp.options import LlamaOptions
    from tests.tiny_gguf import files_of

    return LlamaCppEngine(files_of(path), LlamaOptions(device="cpu", threads=1))


@pytest.mark.llamacpp
@pytest.mark.usefixtures("origin_first")
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("publisher", ["transformers", "llama.cpp"])
def test_a_gguf_and_the_files_it_was_made_of_exchange_kv_once_they_are_paired(
    kv_heads: int, publisher: str, tmp_path: Path, one_thread: None
) -> None:
    pytest.importorskip("xllamacpp")
    from tests.tiny_gguf import write_llama

    key, path = SigningKey.new(), write_llama(tmp_path / "tiny.gguf", kv_heads=kv_heads)
    with (
        closing(twin_of(path)) as transformers,
        closing(gguf_engine(path)) as llama,
        closing(llama if publisher == "llama.cpp" else transformers) as there,
        published(there, tmp_path / "files", key) as url,
    ):
        here, order = (llama, "interleaved") if there is transformers else (transformers, "halves")
        assert llama.layout.layers[0].kv_heads == 1  # all heads in one
        own: dict[str, Any] = {"origin": url, "origin_keys": key.public}

        def ask(**more: Any) -> Any:
            with Session(here, cache=tmp_path / f"cache{len(list(tmp_path.iterdir()))}", **own, **more) as session:
                return session.generate(TEXT + "And then", max_tokens=4).reuse

        assert ask(reuse="quantized").origin_miss == "nothing"
        origin = Origin(url, [key.public])
        pairing = pair(here, origin)
        assert pairing.key_order == order and pairing.kl < MAX_KL / 2 and pairing.top1 > 0.8
        assert pairing.positions > 50 and recall_pairing(KvModel.of(here, 1)) == pairing
        came = ask(reuse="quantized")
        assert came.streamed > 0 and came.level == "quantized"
        assert ask().origin_miss == "nothing"  # what is exact is never exchanged
        origin.close()


@pytest.mark.llamacpp
def test_other_weights_are_never_matched_whatever_the_user_says(tmp_path: Path, one_thread: None) -> None:
    pytest.importorskip("xllamacpp")
    key = SigningKey.new()
    with (
        closing(twin_of(gguf_file(seed=1))) as there,
        closing(make("llamacpp")) as here,
        published(there, tmp_path / "files", key) as url,
    ):
        origin = Origin(url, [key.public])
        with pytest.raises(InvalidSetting, match="does not serve this model: the KL"):
            pair(here, origin)
        assert recall_pairing(KvModel.of(here, 1)) is None
        origin.close()


def test_what_is_to_be_paired_must_be_there_in_a_quantized_level_and_be_one(tmp_path: Path) -> None:
    key = SigningKey.new()
    with published(FakeEngine(seed=1), tmp_path / "files", key, "raw") as url:
        origin = Origin(url, [key.public])
        with pytest.raises(InvalidSetting, match="in no quantized level"):
            pair(FakeEngine(), origin)
        with pytest.raises(InvalidSetting, match="nothing to pair this model with: models of its shape there: fake-1"):
            pair(FakeEngine(), origin, "other")
        with pytest.raises(InvalidSetting, match="no other model there has its shape"):
            pair(FakeEngine(seed=1), origin)
        with published(FakeEngine(seed=2), tmp_path / "files", key):
            assert {one.title for one in origin.models()} == {"fake-1", "fake-2"}
            with pytest.raises(InvalidSetting, match=r"\(fake-1, fake-2\): name one"):
                choose_published(KvModel.of(FakeEngine(), 1), origin.models(), None)
        strangers = Origin(url, [SigningKey.new().public])
        assert strangers.models() == []
        strangers.close()
        origin.close()


def test_the_command_says_what_it_measured(tiny_folder: Path, tmp_path: Path, one_thread: None) -> None:
    """The same weights in another file: its digest is another one."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    weights.write_bytes((size + 8).to_bytes(8, "little") + data[8 : 8 + size] + b" " * 8 + data[8 + size :])
    (tmp_path / "manual.txt").write_text(TEXT, "utf-8")
    ok("origin", "key", tmp_path / "key")
    ok("origin", "publish", tiny_folder, "--to", tmp_path / "files", "--key", tmp_path / "key", "--file",
       tmp_path / "manual.txt")  # fmt: skip
    with OriginServer(tmp_path / "files", OriginSettings(port=0)).running() as url:
        asked = [url, "--model", copy, "--origin-keys", tmp_path / "key.pub"]
        nothing = ok("origin", "check", *asked)
        assert (
            "nothing is there for this model" in nothing and "tiny has its shape. The same in other files?" in nothing
        )
        found = json.loads(ok("origin", "pair", *asked, "--json"))
        assert found["title"] == "tiny" and found["kl"] <= MAX_KL and found["key_order"] == "same"
        assert "takes quantized KV of tiny, measured: KL 0.0" in ok("origin", "pair", *asked)
        assert "paired with tiny, measured" in ok("origin", "check", *asked, "--reuse", "quantized")


def test_a_pairing_that_is_damaged_or_was_not_near_counts_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path))
    near = ModelPairing("ff" * 16, "other", "halves", {"q5": 0.01}, 0.01, 0.9, 100, 3, 1.0)
    remember_pairing(MODEL, near)
    assert recall_pairing(MODEL) == near
    model = near.model(MODEL)
    assert (model.weights, model.key_order, model.exact) == ("ff" * 16, "halves", MODEL.exact)
    for damaged in (replace(near, kl=1.0), replace(near, kl=float("nan")), replace(near, key_order="other")):  # type: ignore[arg-type]
        remember_pairing(MODEL, damaged)
        assert recall_pairing(MODEL) is None
    (tmp_path / "pairings.json").write_text('{"' + MODEL.weights + '": [1]}', "utf-8")
    assert recall_pairing(MODEL) is None


def test_keys_change_their_order_and_back() -> None:
    keys = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    kv = LayerKv(keys, keys + 1)
    turned = reorder_keys(kv, "interleaved", 8)
    assert turned.keys[0, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7] and turned.values is kv.values
    assert np.array_equal(reorder_keys(turned, "halves", 8).keys, keys) and reorder_keys(kv, "same", 8) is kv


def test_heads_are_put_together_and_taken_apart() -> None:
    keys = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)
    apart, one = LayerShape(2, 8, 8), LayerShape(1, 16, 16)
    kv = LayerKv(keys, keys + 1)
    merged = regroup_heads(kv, one)
    assert merged.keys.shape == (1, 3, 16) and merged.keys[0, 1].tolist() == [*keys[0, 1], *keys[1, 1]]
    again = regroup_heads(merged, apart)
    assert np.array_equal(again.keys, keys) and np.array_equal(again.values, keys + 1)
    before = regroup_heads(reorder_keys(kv, "interleaved", 8), one)  # in either order
    assert np.array_equal(before.keys, reorder_keys(merged, "interleaved", 8).keys)
