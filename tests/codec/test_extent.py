"""The format of extents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rekindle.codec.digest import KeyedDigester, PlainDigester
from rekindle.codec.extent import ExtentHeader, ExtentPlan, digest_cells, digest_layer, header_length, parse_header
from rekindle.core.keys import NodeKey, Shelf, parse_layout, token_bytes
from rekindle.core.kv import KvLayout, LayerKv, LayerShape, Span
from rekindle.store.extents import ExtentFiles
from rekindle.store.files import Files
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import SHELF, keep, load, make_kv


def plan(tokens: int = 70, layout: KvLayout = SHELF.layout) -> ExtentPlan:
    return ExtentPlan("name", "shelf", NodeKey(bytes(16)), layout, token_bytes(range(tokens)), "xxh3-64", 8)


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
    shelf = Shelf(SHELF.namespace, layout)
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", memory_limit=0)) as store:
        tokens = list(range(300))
        assert keep(store, tokens, shelf).outcome == "kept"
        assert load(store, tokens, shelf) == 300
        assert load(store, tokens[:77], shelf) == 77


@pytest.mark.parametrize("key", [None, bytes(range(32))])
def test_not_a_number_and_infinity_are_kept_as_they_are(tmp_path: Path, key: bytes | None) -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    layout = KvLayout("float32", (LayerShape(1, 2, 2),))
    shelf = Shelf(SHELF.namespace, layout)
    kv = make_kv(range(2), Span(0, 2), shelf)
    kv.layers[0].keys[...] = odd.reshape(1, 2, 2)
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", memory_limit=0, key=key)) as store:
        store.keep(shelf, [0, 1], kv)
        out = LayerKv(np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 2), np.float32))
        with store.load(shelf, store.lookup(shelf, [0, 1])) as feed:
            feed.fill(0, out)
    assert out.keys.tobytes() == odd.tobytes()


def test_a_buffer_whose_rows_do_not_stand_side_by_side_is_filled_too(tmp_path: Path) -> None:
    tokens = list(range(50))
    with TieredStore(tmp_path / "c", StoreSettings(disk_limit="50MB", memory_limit=0)) as store:
        keep(store, tokens)
        right = make_kv(tokens, Span(0, 50))
        with store.load(SHELF, store.lookup(SHELF, tokens)) as feed:
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
    assert header_length(header[:8]) == len(header) == made.header_bytes
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
        header_length(junk)


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
    files.write(plan(70), make_kv(range(70), Span(0, 70)).layers)
    assert Counting.syncs == 1
