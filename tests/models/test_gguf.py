"""GGUF headers: read when whole, named when not."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.errors import BrokenModel, NotAModel
from rekindle.models.gguf import read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small GGUF written by the reference library."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_token_list([f"tok{i}" for i in range(50)])
    writer.add_token_scores([0.5] * 50)
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_bool("flag", True)
    writer.add_tensor("first", np.ones((4, 8), dtype=np.float32))
    writer.add_tensor("second", np.ones((3, 64), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_tells_what_the_model_is(file: Path) -> None:
    header = read_header(file)
    assert header.architecture == "llama"
    assert header.metadata["tokenizer.ggml.pre"] == "smollm"
    assert header.metadata["llama.context_length"] == 128
    assert header.metadata["flag"] is True
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.values == 4 * 8 + 3 * 64


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    for content in (b"", b"GG", b"PK\x03\x04 a zip", b"just text"):
        other.write_bytes(content)
        with pytest.raises(NotAModel, match="not a GGUF file"):
            read_header(other)


def test_a_truncated_file_is_broken_wherever_it_ends(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(4, len(whole) - 1, 37), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(BrokenModel):
            read_header(cut)


def test_an_unknown_version_is_named(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4] = 9
    file.write_bytes(data)
    with pytest.raises(BrokenModel, match="version 9"):
        read_header(file)


def test_absurd_lengths_are_not_believed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[24:32] = (2**60).to_bytes(8, "little")  # the length of the first key
    file.write_bytes(data)
    with pytest.raises(BrokenModel):
        read_header(file)
