"""KV belongs to the bytes of a model: a changed model is another one, an unchanged copy is the same.

Per engine, with models as people have them: a folder of transformers, a GGUF file.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from tests.parity.engines import each, gguf_file, onnx_folder
from tests.parity.sessions import PROMPT, ROOM, N, ask
from tests.unmeasured_costs import UnmeasuredCosts

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("one_thread")]

both = each("hf", "llamacpp", "onnx")
SETTINGS: dict[str, dict[str, Any]] = {"hf": {"dtype": "float32"}, "llamacpp": {"threads": 1}, "onnx": {"threads": 1}}


@pytest.fixture
def model(kind: str, request: pytest.FixtureRequest) -> Path:
    """A model that is not to be changed."""
    if kind == "hf":
        folder: Path = request.getfixturevalue("tiny_folder")
        return folder
    return gguf_file() if kind == "llamacpp" else onnx_folder()


@contextmanager
def loaded(kind: str, model: Path, folder: Path, **changes: Any) -> Iterator[Session]:
    settings = {**SETTINGS[kind], **ROOM, **changes}
    with Session(model, engine=kind, cache=folder, device="cpu", **settings) as session:
        session.cache.kv.costs = UnmeasuredCosts()
        yield session


@pytest.fixture
def warmed(kind: str, model: Path, tmp_path: Path) -> Path:
    """A cache folder in which the model's KV of PROMPT is."""
    with loaded(kind, model, tmp_path / "cache") as session:
        session.warm([PROMPT])
    return tmp_path / "cache"


def copy_of(model: Path, place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copytree(model, place) if model.is_dir() else shutil.copy(model, place.with_suffix(".gguf")))


def change_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    name = sorted(name for name in tensors if "mlp.down_proj" in name)[-1]
    changed = tensors[name].clone()
    changed[3, 5] += 1.0
    save_file({**tensors, name: changed}, path, metadata={"format": "pt"})


def change_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text(path.read_text() + "{# another #}")


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    known = json.loads(path.read_text())
    added = {**known["added_tokens"][-1], "id": known["added_tokens"][-1]["id"] + 1, "content": "<|another|>"}
    path.write_text(json.dumps({**known, "added_tokens": [*known["added_tokens"], added]}))


def change_config(folder: Path) -> None:
    path = folder / "config.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, "rms_norm_eps": 1e-3}))


def flip_a_weight(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)


def change_an_epsilon(folder: Path) -> None:
    import onnx

    model = onnx.load(folder / "model.onnx", load_external_data=False)
    norm = next(node for node in model.graph.node if node.op_type == "SimplifiedLayerNormalization")
    norm.attribute[0].f = 1e-3
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def write_another_template(path: Path) -> None:
    from tests.tiny_gguf import CHAT_TEMPLATE, write_llama

    write_llama(path, template=CHAT_TEMPLATE + "{# another #}")


def rename_a_token(path: Path) -> None:
    data = path.read_bytes()
    assert b"<unused7>" in data
    path.write_bytes(data.replace(b"<unused7>", b"<unusedX>", 1))


def write_another_epsilon(path: Path) -> None:
    from tests.tiny_gguf import write_llama

    write_llama(path, epsilon=1e-3)


CHANGES: dict[str, dict[str, Callable[[Path], None]]] = {
    "hf": {
        "weight": change_weight,
        "template": change_template,
        "tokenizer": change_tokenizer,
        "config": change_config,
    },
    "onnx": {
        "weight": lambda folder: flip_a_weight(folder / "model.onnx.data"),
        "template": change_template,
        "tokenizer": change_tokenizer,
        "config": change_an_epsilon,
    },
    "llamacpp": {
        "weight": flip_a_weight,
        "template": write_another_template,
        "tokenizer": rename_a_token,
        "config": write_another_epsilon,
    },
}


@both
@pytest.mark.parametrize("change", list(CHANGES["hf"]))
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_was_changed_is_never_served_the_old_ones_kv(
    kind: str, change: str, in_place: bool, model: Path, warmed: Path, tmp_path: Path
) -> None:
    copy = copy_of(model, tmp_path / "copy")
    if in_place:  # the copy's own digests are remembered from before the change
        with loaded(kind, copy, warmed) as session:
            assert ask(session, PROMPT).reuse.reused == N - 1
    CHANGES[kind][change](copy)
    with loaded(kind, copy, warmed) as session:
        reply = ask(session, PROMPT)
        assert reply.reuse.reused == 0
        assert reply.tokens == ask(session, PROMPT, reuse="off").tokens
        session.flush()
        assert ask(session, PROMPT).reuse.reused == N - 1, "its own KV it does find"
    with loaded(kind, model, warmed) as session:
        assert ask(session, PROMPT).reuse.reused == N - 1, "the old one's KV is still the old one's"


@both
def test_an_unchanged_copy_in_another_folder_is_the_same_model(
    kind: str, model: Path, warmed: Path, tmp_path: Path
) -> None:
    copy = copy_of(model, tmp_path / "elsewhere" / "with another name")
    with loaded(kind, copy, warmed) as session:
        reply = ask(session, PROMPT)
        assert reply.reuse.disk == N - 1
        assert reply.tokens == ask(session, PROMPT, reuse="off").tokens


@each("hf", "llamacpp")
def test_other_numbers_have_other_kv(kind: str, model: Path, warmed: Path) -> None:
    others = [{"dtype": "bfloat16"}] if kind == "hf" else [{"kv_type": name} for name in ("f32", "bf16", "q8_0")]
    for other in others:
        with loaded(kind, model, warmed, **other) as session:
            reply = ask(session, PROMPT)
            assert reply.reuse.reused == 0
            assert reply.tokens == ask(session, PROMPT, reuse="off").tokens
            session.flush()
        with loaded(kind, model, warmed, **other) as session:
            again = ask(session, PROMPT)
            assert again.reuse.disk == N - 1
            assert again.tokens == reply.tokens
        with loaded(kind, model, warmed) as session:
            assert ask(session, PROMPT).reuse.reused == N - 1


@each("llamacpp")
@pytest.mark.parametrize("settings", [{"flash_attention": "on"}, {"kv_tokens": 2048}, {"micro_batch_tokens": 32}])
def test_how_llama_cpp_computes_does_not_matter_to_its_kv(
    kind: str, settings: dict[str, Any], model: Path, warmed: Path
) -> None:
    with loaded(kind, model, warmed, **settings) as session:
        reply = ask(session, PROMPT)
        assert reply.reuse.disk == N - 1
        assert reply.tokens == ask(session, PROMPT, reuse="off").tokens


@each("llamacpp")
def test_kv_that_llama_cpp_was_told_to_turn_otherwise_is_not_served(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantized keys and values are mixed before they are rounded, unless the environment forbids it."""
    model = gguf_file(dim=64)
    for _ in range(2):
        with loaded(kind, model, tmp_path / "cache", kv_type="q8_0") as session:
            reply = ask(session, PROMPT)
            assert reply.tokens == ask(session, PROMPT, reuse="off").tokens
        monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")


@both
def test_a_session_whose_model_rests_and_wakes_reuses_its_kv(kind: str, model: Path, tmp_path: Path) -> None:
    """`keep_alive`: the model goes, its KV stays, and nothing of the answers changes."""
    with loaded(kind, model, tmp_path / "cache", keep_alive="0.1s") as session:
        engine: Any = session.engine
        first = ask(session, PROMPT, 12)
        for number in range(3):
            assert settles(lambda: engine.resting), "nobody asked for a while"
            question = [*PROMPT, *first.tokens[: number + 1], 251]
            reply = ask(session, question, 12)
            assert reply.reuse.reused == reply.reuse.memory + reply.reuse.disk == len(question) - 1
            assert reply.tokens == ask(session, question, 12, reuse="off").tokens
        stream = session.stream(PROMPT, max_tokens=30, min_tokens=30)
        next(stream)
        assert not settles(lambda: engine.resting, seconds=0.3), "not in the middle of a reply"
        assert stream.reply.tokens[:12] == first.tokens
    assert first.reuse.reused == 0


def settles(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something holds before long."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
