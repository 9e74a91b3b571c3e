"""Files that are no model, or not one for this engine: each is a sentence; nothing crashes, leaks or prints."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest

pytest.importorskip("xllamacpp")

from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.llamacpp.options import LlamaOptions
from rekindle.engine.load import EngineOptions, load_engine
from rekindle.errors import BrokenModel, ModelError, ModelNotFound, NotAModel, UnsupportedModel
from rekindle.models.files import ModelFiles
from tests.engine.llamacpp.alone import alone
from tests.engine.llamacpp.conftest import Load
from tests.models.ggufs import stranger, write_gguf
from tests.tiny_gguf import VOCABULARY, Weights, add_vocabulary, files_of, finish, write_llama
from tests.tiny_hybrids import write_dream

pytestmark = [pytest.mark.llamacpp]


def random_file(path: Path) -> Path:
    path.write_bytes(np.random.default_rng(0).bytes(5000))
    return path


def magic_and_noise(path: Path) -> Path:
    path.write_bytes(b"GGUF\3\0\0\0" + np.random.default_rng(0).bytes(5000))
    return path


def truncated(path: Path) -> Path:
    whole = write_llama(path).read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    return path


def cut_header(path: Path) -> Path:
    path.write_bytes(write_llama(path).read_bytes()[:900])
    return path


def empty(path: Path) -> Path:
    path.touch()
    return path


def unknown_architecture(path: Path) -> Path:
    return write_gguf(path, architecture="flatland")


def without_tensors(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    add_vocabulary(writer)
    return finish(writer, path)


def lacks_a_tensor(path: Path) -> Path:
    return write_gguf(path, architecture="llama")


def embedding(path: Path) -> Path:
    return write_gguf(path, architecture="bert")


def projector(path: Path) -> Path:
    return write_gguf(path, architecture="clip")


def translator(path: Path) -> Path:
    """An encoder and a decoder, of which llama.cpp only computes both."""
    writer = gguf.GGUFWriter(path, "t5")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_relative_attn_buckets_count(8)
    writer.add_decoder_start_token_id(0)
    writer.add_vocab_size(VOCABULARY)
    add_vocabulary(writer)
    weights = Weights(writer, 0)
    weights.matrix("token_embd.weight", VOCABULARY, 32)
    for side in ("enc", "dec"):
        block = f"{side}.blk.0."
        weights.matrix(block + "attn_rel_b.weight", 8, 1)
        for name in ("attn_q", "attn_k", "attn_v", "attn_o", "ffn_gate", "ffn_up", "ffn_down"):
            weights.matrix(block + name + ".weight", 32, 32)
        if side == "dec":
            weights.ones(block + "cross_attn_norm.weight", 32)
            for name in ("cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_o"):
                weights.matrix(block + name + ".weight", 32, 32)
        weights.ones(block + "attn_norm.weight", 32)
        weights.ones(block + "ffn_norm.weight", 32)
        weights.ones(f"{side}.output_norm.weight", 32)
    weights.matrix("output.weight", VOCABULARY, 32)
    return finish(writer, path)


Write = Callable[[Path], Path]
BY_NAME: list[tuple[Write, type[ModelError], str]] = [
    (random_file, NotAModel, "not a GGUF"),
    (magic_and_noise, BrokenModel, "GGUF"),
    (truncated, BrokenModel, "Get the file again|Get it again|cut|short|incomplete"),
    (cut_header, BrokenModel, "damaged|short|cut"),
    (empty, NotAModel, "empty|not a GGUF"),
    (unknown_architecture, UnsupportedModel, "'flatland'.*ggml 0.*A later rekindle"),
    (without_tensors, NotAModel, "vocabulary but no weights"),
    (lacks_a_tensor, BrokenModel, "cannot load"),
    (embedding, NotAModel, "embeddings"),
    (projector, NotAModel, "projector"),
    (translator, UnsupportedModel, "does not generate text"),
]


@pytest.mark.parametrize("write, kind, said", BY_NAME, ids=lambda value: getattr(value, "__name__", ""))
def test_a_file_that_cannot_be_run_is_a_sentence(
    write: Write, kind: type[ModelError], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "wrong.gguf")
    with pytest.raises(kind, match=said) as raised:
        load_engine(str(path), EngineOptions(engine="llamacpp"))
    assert str(path) in str(raised.value) or path.stem in str(raised.value)
    assert str(raised.value).endswith((".", "smollm2"))
    assert capfd.readouterr() == ("", ""), "nothing is printed"


@pytest.mark.parametrize("write", [case[0] for case in BY_NAME if case[0] not in (embedding, projector)])
def test_the_engine_itself_refuses_too(write: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A file may change between the look at its header and the load."""
    with pytest.raises(ModelError, match=r"\.( |$)"):
        LlamaCppEngine(files_of(write(tmp_path / "wrong.gguf")), LlamaOptions(threads=1, device="cpu"))
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_gone_or_a_folder_is_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.gguf").mkdir()
    for name in ("gone.gguf", "folder.gguf"):
        with pytest.raises(ModelError):
            load_engine(str(tmp_path / name), EngineOptions(engine="llamacpp"))
        with pytest.raises(ModelError, match="cannot load"):
            LlamaCppEngine(files_of(tmp_path / name), LlamaOptions())
    assert capfd.readouterr() == ("", "")


def test_a_file_that_may_not_be_read_is_a_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_llama(tmp_path / "secret.gguf")
    path.chmod(0o600)
    for parent in path.parents:
        if parent.is_relative_to(tempfile.gettempdir()) and parent.stat().st_uid == os.getuid():
            parent.chmod(parent.stat().st_mode | 0o755)
    with stranger():
        with pytest.raises(ModelNotFound, match="may not be read by this user"):
            load_engine(str(path), EngineOptions(engine="llamacpp"))
        with pytest.raises(ModelError, match="cannot load"):
            LlamaCppEngine(files_of(path), LlamaOptions(threads=1, device="cpu"))
    assert capfd.readouterr() == ("", "")


def test_a_model_in_another_form_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match="needs a GGUF file.*engine='hf'"):
        LlamaCppEngine(ModelFiles("folder", tmp_path, None), LlamaOptions())


def test_a_model_that_writes_everything_at_once_is_refused(tmp_path: Path) -> None:
    """llama.cpp loads diffusion models, but has no memory for them: what they compute now they have forgotten next."""
    path = write_dream(tmp_path / "dream.gguf")
    alone(f"""
        from rekindle.errors import UnsupportedModel
        try:
            load({str(path)!r})
        except UnsupportedModel:
            sys.exit()
        sys.exit("it was loaded")
    """)


def test_nothing_is_printed_while_a_model_loads_computes_and_goes(tiny: Path, opaque_files: dict[str, Path]) -> None:
    for path in (tiny, opaque_files["mamba"], opaque_files["gemma2"]):
        alone(f"""
            import logging
            logging.getLogger("rekindle").setLevel(logging.CRITICAL)
            engine = load({str(path)!r})
            sequence = engine.open(300, engine.regime(300))
            engine.step([Row.following(sequence, list(range(200)))])
            sequence.close()
            engine.close()
            LlamaCppEngine(files_of(Path({str(path)!r})), LlamaOptions())
        """)


def test_what_llamacpp_says_is_in_the_log_for_those_who_look(
    tiny: Path, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "rekindle.llamacpp"):
        load(tiny)
    assert "n_ctx" in caplog.text
    assert all(record.levelname == "DEBUG" for record in caplog.records)


def used_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@pytest.mark.parametrize("write", [truncated, random_file, unknown_architecture, lacks_a_tensor, translator])
def test_a_file_that_fails_twenty_times_leaks_nothing(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path / "wrong.gguf")

    def attempt() -> None:
        with pytest.raises(ModelError):
            LlamaCppEngine(files_of(path), LlamaOptions(threads=1, device="cpu"))

    attempt()
    before, files = used_bytes(), psutil.Process().num_fds()
    for _ in range(20):
        attempt()
    assert used_bytes() - before < 8 << 20
    assert psutil.Process().num_fds() == files


def test_a_model_that_comes_and_goes_twenty_times_leaks_nothing(tmp_path: Path, load: Load) -> None:
    """Its context alone takes more than what may stay behind."""
    path = write_llama(tmp_path / "long.gguf", context=1 << 16)

    def visit() -> None:
        engine = load(path, context_tokens=1 << 14, kv_type="f32")
        sequence = engine.open(10, engine.regime(10))
        sequence.close()
        engine.close()

    visit()
    before, files = used_bytes(), psutil.Process().num_fds()
    for _ in range(20):
        visit()
    assert used_bytes() - before < 24 << 20
    assert psutil.Process().num_fds() == files


def test_how_far_a_load_has_come_is_told(tiny: Path) -> None:
    shares: list[float] = []
    LlamaCppEngine(files_of(tiny), LlamaOptions(threads=1), shares.append).close()
    assert shares == sorted(shares) and shares[-1] == 1.0


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_is_raised_while_a_load_is_told_ends_it_and_is_not_printed(
    error: type[BaseException], tiny: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A key pressed while a large model loads interrupts right there."""

    def tell(share: float) -> None:
        raise error("stop")

    with pytest.raises(error, match="stop"):
        LlamaCppEngine(files_of(tiny), LlamaOptions(threads=1), tell)
    assert capfd.readouterr() == ("", "")
