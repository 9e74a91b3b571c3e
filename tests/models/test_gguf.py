"""GGUF headers: read when whole, named when not."""

from __future__ import annotations

import io
from pathlib import Path

import gguf
import numpy as np
import pytest

from rekindle.errors import BrokenModel, NotAModel
from rekindle.models import gguf as module
from rekindle.models.gguf import check_parts, embeds, read_header
from tests.models.ggufs import write_gguf


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
    assert header.lengths == {"tokenizer.ggml.tokens": 50, "tokenizer.ggml.scores": 50}
    assert header.values == 4 * 8 + 3 * 64 and header.tensors == 2


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


def test_absurd_lengths_of_arrays_are_not_believed(file: Path) -> None:
    whole = file.read_bytes()
    for name, inner in ((b"tokens", 8), (b"scores", 6)):
        at = whole.index(name) + len(name) + 4
        assert int.from_bytes(whole[at : at + 4], "little") == inner
        for count in (10**6, 2**60, 2**64 - 1):
            file.write_bytes(whole[: at + 4] + count.to_bytes(8, "little") + whole[at + 12 :])
            with pytest.raises(BrokenModel, match="damaged GGUF header"):
                read_header(file)
    first_token = whole.index(b"tokens") + len(b"tokens") + 16
    for length in (2**40, 2**63, 2**64 - 1):
        file.write_bytes(whole[:first_token] + length.to_bytes(8, "little") + whole[first_token + 8 :])
        with pytest.raises(BrokenModel, match="damaged GGUF header"):
            read_header(file)


def test_an_absurd_alignment_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("general.alignment", 0)
    writer.add_tensor("first", np.ones((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BrokenModel, match="an alignment of 0"):
        read_header(path)


def test_a_buffer_of_any_size_gives_the_same_header(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read_header(file)
    for size in (8, 9, 13, 64, 1000):
        monkeypatch.setattr(module, "_BUFFER_BYTES", size)
        assert read_header(file) == expected


def test_a_large_vocabulary_takes_few_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{i}" for i in range(150_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    reads = []

    class Counting(io.BufferedReader):
        def read(self, size: int | None = -1) -> bytes:
            reads.append(size)
            return super().read(size)

    monkeypatch.setattr(module, "_open", lambda path: Counting(io.FileIO(path)))
    assert read_header(path).lengths["tokenizer.ggml.tokens"] == 150_000
    assert len(reads) < 50


def test_the_sizes_of_tensor_types_are_those_of_the_reference() -> None:
    reference = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert module._BLOCKS.items() <= reference.items()


def test_a_vocabulary_alone_is_whole_but_no_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "vocabulary.gguf", tensors=0)
    assert read_header(path).tensors == 0
    with pytest.raises(NotAModel, match="holds a vocabulary but no weights"):
        check_parts([path])


def test_each_part_is_checked_by_itself_and_all_together(tmp_path: Path) -> None:
    write_gguf(tmp_path / "big.gguf", parts=3, tensors=5)
    parts = sorted(tmp_path.glob("big-*.gguf"))
    assert [read_header(part).tensors for part in parts] == [2, 2, 1]
    assert check_parts(parts) == read_header(parts[0])
    with pytest.raises(BrokenModel, match="part 2 of 3; by its name it is part 1 of 3. Give it the name"):
        check_parts([parts[1], parts[0], parts[2]])
    with pytest.raises(BrokenModel, match="calls itself part 1 of 3; by its name it is part 1 of 1"):
        check_parts(parts[:1])
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    with pytest.raises(BrokenModel, match="00003-of-00003.gguf ends after"):
        check_parts(parts)


def test_parts_of_different_models_are_told(tmp_path: Path) -> None:
    write_gguf(tmp_path / "big.gguf", parts=2, tensors=4)
    write_gguf(tmp_path / "small.gguf", parts=2, tensors=2)
    with pytest.raises(BrokenModel, match="have 3 tensors, the model has 4: they do not belong together"):
        check_parts([tmp_path / "big-00001-of-00002.gguf", tmp_path / "small-00002-of-00002.gguf"])


def test_what_embeds_is_told_from_the_first_bytes(tmp_path: Path) -> None:
    assert embeds(write_gguf(tmp_path / "a.gguf", architecture="bert"))
    assert not embeds(write_gguf(tmp_path / "b.gguf"))
    for content in (b"", b"text", b"GGUF", b"GGUF\x09\0\0\0", b"GGUF\x03\0\0\0" + b"\xff" * 40):
        (tmp_path / "c.gguf").write_bytes(content)
        assert not embeds(tmp_path / "c.gguf")
    assert not embeds(tmp_path / "none.gguf")
