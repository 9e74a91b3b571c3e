"""The format of extents."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rekindle.codec.coder import EXACT, Coder
from rekindle.codec.digest import KeyedDigester, PlainDigester
from rekindle.codec.extent import (
    FORMAT,
    Coding,
    ExtentHeader,
    ExtentPlan,
    digest_cells,
    digest_layer,
    header_length,
    parse_header,
)
from rekindle.codec.quantizer import BitPlan
from rekindle.core.keys import KvSpace, NodeKey, parse_layout, token_bytes
from rekindle.core.kv import KvLayout, LayerKv, LayerShape, Span
from rekindle.store.extents import ExtentFiles
from rekindle.store.files import Files
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep, load, make_kv


def plan(tokens: int = 70, layout: KvLayout = KV_SPACE.layout) -> ExtentPlan:
    return ExtentPlan("name", "kv_space", NodeKey(bytes(16)), layout, token_bytes(range(tokens)), "xxh3-64", 8)


def test_other_tools_can_open_an_extent(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB")) as store:
        keep(store, list(range(70)))
    (path,) = (tmp_path / "c" / "extents").iterdir()
    tensors = load_file(path)
    right = make_kv(range(70), Span(0, 70))
    assert sorted(tensors) == ["layer.0.keys", "layer.0.values", "layer.1.keys", "layer.1.values"]
    for number, layer in enumerate(right.layers):
        assert np.array_equal(tensors[f"layer.{number}.keys"], layer.keys)
        assert np.array_equal(tensors[f"layer.{number}.values"], layer.values)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_type_of_number_comes_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    layout = KvLayout(dtype, (LayerShape(3, 16, 8),) * 3)  # type: ignore[arg-type]
    kv_space = KvSpace(KV_SPACE.namespace, layout)
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", memory_limit=0)) as store:
        tokens = list(range(300))
        assert keep(store, tokens, kv_space).outcome == "kept"
        assert load(store, tokens, kv_space) == 300
        assert load(store, tokens[:77], kv_space) == 77


@pytest.mark.parametrize("key", [None, bytes(range(32))])
def test_not_a_number_and_infinity_are_kept_as_they_are(tmp_path: Path, key: bytes | None) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    layout = KvLayout("float32", (LayerShape(1, 2, 2),))
    kv_space = KvSpace(KV_SPACE.namespace, layout)
    kv = make_kv(range(2), Span(0, 2), kv_space)
    kv.layers[0].keys[...] = odd.reshape(1, 2, 2)
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", memory_limit=0, key=key)) as store:
        store.keep(kv_space, [0, 1], kv)
        out = LayerKv(np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 2), np.float32))
        with store.load(kv_space, store.lookup(kv_space, [0, 1])) as feed:
            feed.fill(0, out)
    assert out.keys.tobytes() == odd.tobytes()


def test_a_buffer_whose_rows_do_not_stand_side_by_side_is_filled_too(tmp_path: Path) -> None:
    tokens = list(range(50))
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", memory_limit=0)) as store:
        keep(store, tokens)
        right = make_kv(tokens, Span(0, 50))
        with store.load(KV_SPACE, store.lookup(KV_SPACE, tokens)) as feed:
            for number, layer in enumerate(right.layers):
                wide = [
                    np.zeros((*half.shape[:2], half.shape[2] * 2), half.dtype) for half in (layer.keys, layer.values)
                ]
                feed.fill(number, LayerKv(wide[0][:, :, ::2], wide[1][:, :, ::2]))
                assert np.array_equal(wide[0][:, :, ::2], layer.keys)
                assert np.array_equal(wide[1][:, :, ::2], layer.values)


@given(tokens=st.integers(1, 200), layers=st.integers(1, 4), heads=st.integers(1, 3))
def test_a_header_says_where_everything_is_and_reads_back(tokens: int, layers: int, heads: int) -> None:
    made = plan(tokens, KvLayout("float16", tuple(LayerShape(heads, 4 + n, 8) for n in range(layers))))
    digests = bytes(range(256)) * 100
    header = made.header(digests[: 8 * (2 + made.blocks) * layers])
    assert header_length(header[:8], made.file_bytes) == len(header) == made.header_bytes
    parsed = parse_header(header)
    assert parsed.plan == made
    assert made.file_bytes == made.header_bytes + tokens * made.layout.token_bytes
    assert made.start(0, "keys") == made.header_bytes


def test_a_header_with_a_changed_byte_is_none_or_says_something_else() -> None:
    made = plan(40)
    good = made.header(bytes(8 * (2 + made.blocks) * 2))
    whole = ExtentHeader(made, bytes(8 * (2 + made.blocks) * 2))
    for place in range(8, len(good)):
        changed = bytearray(good)
        changed[place] ^= 0x01
        try:
            assert parse_header(bytes(changed)) != whole
        except ValueError:
            continue


@pytest.mark.parametrize("junk", [b"", b"1234567", bytes(8), b"\xff" * 8 + b"{}"])
def test_what_is_no_extent_has_no_header_length(junk: bytes) -> None:
    with pytest.raises(ValueError, match="no header length"):
        header_length(junk, 1 << 20)


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '{"dtype":"int8","layers":[]}', '{"dtype":"float32","layers":[[1]]}', "x"]
)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        parse_layout(text)


@pytest.mark.parametrize("digester", [PlainDigester(), KeyedDigester(bytes(32))])
def test_every_bit_of_a_cell_counts(digester: PlainDigester | KeyedDigester) -> None:
    kv = make_kv(range(33), Span(0, 33)).layers[0]
    before = digest_cells(digester, kv)
    assert len(before) == 2 * digester.width
    assert digest_layer(digester, kv)[2 * digester.width :] == before
    kv.values[-1, 32, 3] += 1
    after = digest_cells(digester, kv)
    assert before[: digester.width] == after[: digester.width] and before != after


def test_another_key_gives_another_name_and_never_shows_the_key() -> None:
    one, two = KeyedDigester(b"1" * 16), KeyedDigester(b"2" * 16)
    assert one.name != two.name and "1111" not in repr(one)
    assert one.header(b"x") != two.header(b"x")


def test_an_extent_is_written_with_one_fsync(tmp_path: Path) -> None:
    class Counting(Files):
        syncs = 0

        def sync(self, handle: object) -> None:
            Counting.syncs += 1
            super().sync(handle)  # type: ignore[arg-type]

    files = ExtentFiles(tmp_path, Counting(), PlainDigester())
    files.write(replace(plan(70), name="0" * 16), make_kv(range(70), Span(0, 70)).layers)
    assert Counting.syncs == 1


# -- coded extents -----------------------------------------------------------------------------------------------------

QUANTIZED = Coder(BitPlan.uniform(2, 8), BitPlan.uniform(2, 3))
CODINGS = {
    "exact difference": Coding(EXACT, "base", (4, 1000)),
    "quantized difference": Coding(QUANTIZED, "base", (4, 1000)),
    "quantized whole": Coding(QUANTIZED, None, (2000, 1000)),
}


def coded(name: str, tokens: int = 70) -> ExtentHeader:
    made = replace(plan(tokens), coding=CODINGS[name])
    return ExtentHeader(made, bytes(range(8 * made.layer_digests * 2)))


def text_of(header: ExtentHeader) -> bytes:
    return header.plan.header(header.digests)


@pytest.mark.parametrize("name", CODINGS)
def test_a_coded_header_says_where_everything_is_and_reads_back(name: str) -> None:
    header = coded(name)
    text, made = text_of(header), header.plan
    assert header_length(text[:8], made.file_bytes) == len(text) == made.header_bytes
    assert parse_header(text) == header
    first, second = made.coded_at(0), made.coded_at(1)
    assert (first.start, first.stop, second.stop) == (made.header_bytes, second.start, made.file_bytes)
    assert (len(first), len(second)) == CODINGS[name].sizes
    assert made.coded_as == name.split()[0]


@pytest.mark.parametrize("name", CODINGS)
def test_a_coded_header_with_a_changed_byte_is_none_or_says_something_else(name: str) -> None:
    header = coded(name, 40)
    good = text_of(header)
    for place in range(8, len(good)):
        changed = bytearray(good)
        changed[place] ^= 0x01
        try:
            assert parse_header(bytes(changed)) != header
        except ValueError:
            continue


@pytest.mark.parametrize("name", CODINGS)
def test_a_coded_header_that_is_cut_off_is_none(name: str) -> None:
    good = text_of(coded(name))
    for stop in range(0, len(good), 37):
        with pytest.raises(ValueError):
            parse_header(good[:stop])


def test_the_digests_of_a_coded_layer_stand_apart() -> None:
    header = coded("exact difference")
    assert [header.half_digests(layer) for layer in range(2)] == [bytes(range(16)), bytes(range(24, 40))]
    assert [header.coded_digest(layer) for layer in range(2)] == [bytes(range(16, 24)), bytes(range(40, 48))]
    assert coded("quantized whole").coded_digest(1) == bytes(range(8, 16))


def with_coding(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A header whose coding was changed, whole in every other way."""
    good = text_of(coded("exact difference"))
    content = json.loads(good[8:])
    coding = json.loads(content["__metadata__"]["coding"])
    change(coding)
    content["__metadata__"]["coding"] = json.dumps(coding, separators=(",", ":"))
    return repacked(content)


def repacked(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def test_changing_nothing_of_a_coding_leaves_a_header() -> None:
    assert parse_header(with_coding(lambda coding: None)) == coded("exact difference")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"sizes": [4]}, id="a size too few"),
        pytest.param({"sizes": [4, 1000, 0]}, id="a size too many"),
        pytest.param({"sizes": [4, 1001]}, id="another size than the tensors"),
        pytest.param({"sizes": [1004, 0]}, id="the same sum"),
        pytest.param({"sizes": [-1, 1005]}, id="a negative size"),
        pytest.param({"sizes": [4, 1 << 50]}, id="a huge size"),
        pytest.param({"sizes": [4.0, 1000]}, id="a size that is no number"),
        pytest.param({"sizes": [True, 1000]}, id="a size that is a truth"),
        pytest.param({"sizes": None}, id="no sizes"),
        pytest.param({"sizes": "ab"}, id="sizes as text"),
        pytest.param({"base": 7}, id="a base that is no text"),
        pytest.param({"coder": None}, id="no coder"),
        pytest.param({"coder": "[]"}, id="a coder that is none"),
        pytest.param({"coder": '[null,"lossy"]'}, id="an unknown coder"),
        pytest.param({"coder": '[null, "exact"]'}, id="a coder written otherwise"),
        pytest.param({"more": 1}, id="a field too many"),
    ],
)
def test_a_header_whose_coding_is_none_or_contradicts_the_rest_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not an extent header"):
        parse_header(with_coding(lambda coding: coding.update(change)))


@pytest.mark.parametrize(
    "coding",
    [
        pytest.param(Coding(Coder(None, None), "base", (4, 1000)), id="a difference by a coder without differences"),
        pytest.param(Coding(EXACT, None, (4, 1000)), id="whole by a coder that leaves it as it is"),
        pytest.param(Coding(Coder(None, BitPlan.uniform(1, 3)), "base", (4, 1000)), id="bits for fewer layers"),
    ],
)
def test_a_coding_that_its_coder_cannot_have_made_is_refused(coding: Coding) -> None:
    """Whoever writes such an extent anew would fail."""
    made = replace(plan(), coding=coding)
    with pytest.raises(ValueError, match="not an extent header"):
        parse_header(made.header(bytes(8 * made.layer_digests * 2)))


@pytest.mark.parametrize("field", ["coder", "base", "sizes"])
def test_a_coding_that_lacks_a_field_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="not an extent header"):
        parse_header(with_coding(lambda coding: coding.pop(field)))


@pytest.mark.parametrize("coding", [None, 1, "", "[]", "null", "[" * 100_000])
def test_a_coding_that_is_no_text_of_fields_is_refused(coding: object) -> None:
    content = json.loads(text_of(coded("exact difference"))[8:])
    content["__metadata__"]["coding"] = coding
    with pytest.raises(ValueError, match="not an extent header"):
        parse_header(repacked(content))


@pytest.mark.parametrize("format", ["rekindle-extent/1", "rekindle-extent/2", "rekindle-extent/4"])
def test_another_format_is_refused(format: str) -> None:
    for text in (text_of(coded("exact difference")), plan().header(bytes(8 * 5 * 2))):
        content = json.loads(text[8:])
        assert content["__metadata__"]["format"] == FORMAT != format
        content["__metadata__"]["format"] = format
        with pytest.raises(ValueError, match="not an extent header"):
            parse_header(repacked(content))


def test_other_tools_can_open_a_coded_extent(tmp_path: Path) -> None:
    adapter = replace(KV_SPACE, adapter="some weights")
    tokens = list(range(70))
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB")) as store:
        keep(store, tokens)
        kv = make_kv(tokens, Span(0, 70))
        kv.layers[1].keys[0, 3, 2] += 1
        assert store.keep(adapter, tokens, kv).outcome == "kept"
        (row,) = [row for row in store.disk.entries() if row.coding == "exact"]
        tensors = load_file(store.disk.extents.path(row.name))
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {"layer.0.coded": "u1", "layer.1.coded": "u1"}
    assert len(tensors["layer.0.coded"]) == 4  # the anchor's own
