"""The ONNX Runtime engine, beyond the contract: shared buffers, shared runs, rounding, identity, loading."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
pytest.importorskip("onnx", reason="the tiny graphs of tests are written with the package onnx")

from rekindle import Session
from rekindle.core.adapter import Lora
from rekindle.core.kv import Span
from rekindle.engine.base import HeldKv, Row
from rekindle.engine.load import EngineOptions, choose_engine, load_engine
from rekindle.engine.onnx import export as exporting
from rekindle.engine.onnx.graph_runner import providers
from rekindle.engine.onnx.onnx_options import OnnxOptions
from rekindle.errors import AdapterRefused, Cancelled, EngineMissing, InvalidSetting, NotAModel
from rekindle.settings import Settings
from tests.engine.contract import Garbage
from tests.faults.folders import REPOSITORY
from tests.parity.engines import make, onnx_folder
from tests.parity.sessions import PROMPT, N, ask, opened, tokens_of

COUNT = 40
TOKENS = tokens_of(COUNT, seed=5)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = make("onnx")
    yield made
    made.close()


@pytest.fixture
def runs(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences in each run of the graph."""
    real, seen = engine._runner.run, []

    def run(tokens: np.ndarray, *rest: Any) -> None:
        seen.append(len(tokens))
        real(tokens, *rest)

    monkeypatch.setattr(engine._runner, "run", run)
    return seen


def computed(engine: Any, tokens: list[int], capacity: int = 100) -> tuple[Any, np.ndarray]:
    sequence = engine.open(capacity, "plain")
    return sequence, engine.step([Row.following(sequence, tokens, logits="all")])[0]


def test_both_kinds_of_attention_give_the_same_logits(engine: Any) -> None:
    """The tiny graphs are written in different ways: one fused operator, and many plain ones."""
    other = make("onnx-packed")
    ours, theirs = computed(engine, TOKENS)[1], computed(other, TOKENS)[1]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    other.close()


def test_kv_stays_where_it_is_from_step_to_step(engine: Any) -> None:
    sequence, _ = computed(engine, TOKENS)
    before = [(layer.keys.ctypes.data, layer.values.ctypes.data) for layer in sequence.kv.layers]
    for token in TOKENS[:9]:
        engine.step([Row.following(sequence, [token])])
    assert [(layer.keys.ctypes.data, layer.values.ctypes.data) for layer in sequence.kv.layers] == before
    sequence.close()


def test_a_feed_fills_the_buffers_that_the_graph_reads(engine: Any) -> None:
    sequence = engine.open(100, "plain")
    own, places = [layer.keys.ctypes.data for layer in sequence.kv.layers], []

    class Noting(Garbage):
        def fill(self, layer: int, out: Any) -> None:
            super().fill(layer, out)
            places.append(out.keys.ctypes.data)

    engine.step([Row(sequence, TOKENS[20:], range(20, COUNT), feeds=(Noting(Span(0, 20), len(own)),))])
    assert places == own
    sequence.close()


def test_replies_in_adjacent_slots_share_a_run(engine: Any, runs: list[int]) -> None:
    lengths = (5, 11, 31, 17)
    made = [computed(engine, TOKENS[:length])[0] for length in lengths]
    alone = [engine.step([Row.following(s, [TOKENS[n]])])[0] for s, n in zip(made, lengths, strict=True)]
    for sequence, length in zip(made, lengths, strict=True):
        sequence.truncate(length)
    runs.clear()
    rows = [Row.following(s, [TOKENS[n]]) for s, n in zip(made, lengths, strict=True)]
    together = engine.step([rows[2], rows[0], rows[3], rows[1]])
    assert runs == [4]
    for got, place in zip(together, (2, 0, 3, 1), strict=True):
        np.testing.assert_allclose(got, alone[place], atol=1e-4)
    assert [s.length for s in made] == [n + 1 for n in lengths]
    made[1].close()
    runs.clear()
    engine.step([Row.following(s, [5]) for s in (made[0], made[2], made[3])])
    assert sorted(runs) == [1, 2], "the one whose neighbour is gone runs alone"
    for sequence in (made[0], made[2], made[3]):
        sequence.close()


def test_a_prompt_beside_replies_has_a_run_of_its_own(engine: Any, runs: list[int]) -> None:
    (first, _), (second, _) = computed(engine, TOKENS[:9]), computed(engine, TOKENS[:7])
    third = engine.open(100, "plain")
    runs.clear()
    engine.step([Row.following(first, [5]), Row.following(third, TOKENS), Row.following(second, [6])])
    assert sorted(runs) == [1, 2]
    for sequence in (first, second, third):
        sequence.close()


def test_a_token_of_a_prompt_rounds_as_among_the_others(engine: Any) -> None:
    """All but one token reused: the logits are those of the whole prompt, to the last bit."""
    whole, logits = computed(engine, TOKENS)
    sequence = engine.open(100, "plain")
    fed = HeldKv(whole.export(Span(0, COUNT - 1)))
    (got,) = engine.step([Row(sequence, TOKENS[-1:], [COUNT - 1], feeds=(fed,), prefill=True)])
    np.testing.assert_array_equal(got[0], logits[-1])
    assert sequence.length == COUNT
    whole.close()
    sequence.close()


def test_the_last_place_of_the_context_can_be_computed(engine: Any) -> None:
    tokens = tokens_of(engine.longest_context, seed=2)
    sequence = engine.open(len(tokens), "plain")
    (expected,) = engine.step([Row.following(sequence, tokens)])
    sequence.truncate(len(tokens) - 1)
    (got,) = engine.step([Row(sequence, tokens[-1:], [len(tokens) - 1], prefill=True)])
    np.testing.assert_allclose(got, expected, atol=1e-3)
    sequence.close()


def test_a_short_context_can_be_chosen() -> None:
    options = EngineOptions(onnx=OnnxOptions(threads=1, context_tokens=3))
    small: Any = load_engine(str(onnx_folder()), options)
    _, logits = computed(small, TOKENS[:3], capacity=3)
    assert logits.shape == (3, small.tokenizer.vocabulary_size)
    small.close()


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_size_of_a_batch_does_not_matter(size: int, engine: Any) -> None:
    small: Any = make("onnx", batch_tokens=size)
    (first, got), (second, _) = computed(small, TOKENS), computed(small, TOKENS)
    np.testing.assert_allclose(got, computed(engine, TOKENS)[1], atol=1e-4)
    both = small.step([Row.following(first, [5]), Row.following(second, [5])])
    np.testing.assert_array_equal(*both)
    small.close()


@pytest.mark.parametrize("kind", ["onnx", "onnx-packed"])
def test_buffers_that_a_hanging_feed_writes_to_are_left_to_it(kind: str) -> None:
    """A step that is cancelled does not wait for the disk, and what comes late harms nobody."""
    engine: Any = make(kind)
    whole, logits = computed(engine, TOKENS)
    hangs, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    class Hanging(Garbage):
        def fill(self, layer: int, out: Any) -> None:
            hangs.set()
            may_end.wait(60)
            super().fill(layer, out)
            if layer == self.layers[-1]:
                ended.set()

    sequence = engine.open(100, "plain")
    engine.step([Row.following(sequence, TOKENS[:9], logits="none")])
    row = Row(sequence, TOKENS[30:], range(30, COUNT), feeds=(Hanging(Span(9, 30), len(engine.layout.layers)),))
    with pytest.raises(Cancelled):
        engine.step([row], hangs.is_set)
    assert sequence.length == 9
    (got,) = engine.step([Row.following(sequence, TOKENS[9:], logits="all")])
    may_end.set()
    assert ended.wait(60)
    (again,) = engine.step([Row.following(sequence, TOKENS[:1], logits="none")])
    assert again.shape[0] == 0
    np.testing.assert_allclose(got, logits[9:], atol=1e-4)
    for ours, theirs in zip(sequence.export(Span(0, COUNT)).layers, whole.export(Span(0, COUNT)).layers, strict=True):
        np.testing.assert_allclose(ours.keys, theirs.keys, atol=1e-4)
    engine.close()


def test_kv_of_another_precision_is_never_served(tmp_path: Path) -> None:
    with opened("onnx", tmp_path / "cache") as session:
        session.warm([PROMPT])
    with opened("onnx-f16", tmp_path / "cache") as session:
        assert ask(session, PROMPT).reuse.reused == 0
    with opened("onnx", tmp_path / "cache") as session:
        assert ask(session, PROMPT).reuse.reused == N - 1


def test_the_identity_is_that_of_what_was_loaded(tmp_path: Path) -> None:
    """Also after the files of tokenizer and template are gone."""
    folder = Path(shutil.copytree(onnx_folder(), tmp_path / "tiny"))
    engine: Any = load_engine(str(folder), EngineOptions(onnx=OnnxOptions(threads=1)))
    before = engine.identity("plain")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink()
    assert engine.identity("plain") == before
    engine.close()


def test_a_folder_is_used_in_place_and_without_torch(tmp_path: Path) -> None:
    program = f"""
import sys
from rekindle import Session
folder, cache = {str(onnx_folder())!r}, {str(tmp_path / "cache")!r}
for _ in range(2):
    with Session(folder, cache=cache, threads=1) as session:
        assert session.engine_kind == "onnx"
        reply = session.chat("Where is the key? " * 9, max_tokens=4, min_tokens=4)
        print(reply.tokens)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first == second


def test_a_graph_is_loaded_by_its_own_engine(tmp_path: Path) -> None:
    folder = str(onnx_folder())
    for spec in (folder, f"{folder}/model.onnx"):
        assert choose_engine(spec, "auto") == "onnx"
    with pytest.raises(NotAModel, match="as an ONNX graph; llama.cpp needs a GGUF file"):
        load_engine(folder, EngineOptions(engine="llamacpp"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_type": "q8_0"}, "kv_type='q8_0' is for llama.cpp"),
        ({"dtype": "bfloat16"}, "Use auto, float32, float16, int4"),
        ({"dtype": "int4"}, "a graph has its own numbers"),
        ({"device": "warp"}, "is not a provider of this ONNX Runtime. It has: cpu"),
        ({"context": 9999}, "out of range: this model takes 1 to 512"),
        ({"threads": 0}, "threads=0 makes no sense"),
    ],
)
def test_settings_that_it_cannot_take_are_a_sentence(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        load_engine(str(onnx_folder()), EngineOptions.of(Settings.load({"engine": "onnx", **settings})))


def test_providers_are_listed_with_what_was_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["CUDAExecutionProvider", "AzureExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: names)
    assert providers() == {"cuda": "untested", "cpu": "tested"}


def test_an_adapter_is_refused(engine: Any) -> None:
    lora = Lora({}, source="an adapter")
    for use in (engine.check_adapter, engine.load_adapter):
        with pytest.raises(AdapterRefused, match="a graph is fixed"):
            use(lora)


def test_without_the_exporter_one_sentence_says_what_to_do(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "missing_exporter", lambda: ["onnxscript"])
    with pytest.raises(EngineMissing, match=r"needs onnxscript.*rekindle-llm\[onnx-export\].*--format onnx"):
        Session(tiny_folder, engine="onnx", cache="off")


@pytest.mark.skipif(bool(exporting.missing_exporter()), reason="the extra onnx-export is not installed")
def test_an_exported_model_answers_as_the_one_it_came_from(tiny_folder: Path, tmp_path: Path) -> None:
    """With the same tokens, which each engine's own tokenizer gives; and it is exported once."""
    from tests.tiny import tiny_model

    question, folder = "What is kept, and where?", tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    tiny_model("llama", eos_token_id=256, head_dim=16).save_pretrained(folder)  # fewer dimensions it does not take
    with Session(folder, engine="hf", cache="off", dtype="float32", device="cpu") as session:
        expected = session.chat(question, max_tokens=8, min_tokens=8)
    seen: list[str] = []
    for _ in range(2):
        report = lambda stage, done, total: seen.append(stage)  # noqa: E731
        with Session(folder, engine="onnx", threads=1, cache=tmp_path / "cache", progress=report) as session:
            reply = session.chat(question, max_tokens=8, min_tokens=8)
            assert (reply.tokens, reply.usage.prompt_tokens) == (expected.tokens, expected.usage.prompt_tokens)
    assert seen.count("export") == 2, "begun and ended, once"
    assert reply.reuse.reused == reply.usage.prompt_tokens - 1
