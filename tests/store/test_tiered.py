"""Reading: which files are opened for a prompt, and how much of them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.core.kv import LayerKv, Span
from rekindle.errors import CacheUnusable, KvLost
from rekindle.store.extents import ExtentFiles
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep, load, make_kv

PROMPT = list(range(1000, 1100))  # three whole blocks and four tokens more


def test_a_prompt_that_went_on_is_still_read_from_its_own_file(tmp_path: Path) -> None:
    """Its last block was kept again with what followed; the four tokens of it are in the first file too."""
    with TieredStore(tmp_path / "cache", StoreSettings(memory_limit=0)) as store:
        keep(store, PROMPT)
        keep(store, [*PROMPT, 1, 2, 3])
        asked = [*PROMPT, 7, 8, 9]
        match = store.lookup(KV_SPACE, asked)
        assert match.length == len(PROMPT) and len(match.pieces) == 2
        with store.load(KV_SPACE, match) as feed:
            assert len(feed._sources) == 1 and len(feed.span) == len(PROMPT)
        assert load(store, asked) == len(PROMPT)
        assert load(store, [*PROMPT, 1, 2, 9]) == len(PROMPT) + 2


def test_any_part_of_any_chain_comes_back_right(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "cache", StoreSettings(memory_limit=0)) as store:
        for stop in (5, 40, 64, 100):
            keep(store, PROMPT[:stop])
        keep(store, [*PROMPT[:70], 1, 2, 3])
        for count in range(1, len(PROMPT) + 1):
            assert load(store, PROMPT[:count]) == count
            assert load(store, [*PROMPT[:count], 5]) == count


def test_layers_are_filled_by_several_threads_at_once(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "cache", StoreSettings(memory_limit=0)) as store:
        keep(store, PROMPT)
        feed = store.load(KV_SPACE, store.lookup(KV_SPACE, PROMPT))
        outs = {layer: _empty(layer, len(PROMPT)) for layer in feed.layers}
        with ThreadPoolExecutor(len(outs)) as threads:
            list(threads.map(lambda layer: feed.fill(layer, outs[layer]), feed.layers))
        for layer, expected in enumerate(make_kv(PROMPT, Span(0, len(PROMPT))).layers):
            np.testing.assert_array_equal(outs[layer].keys, expected.keys)
            np.testing.assert_array_equal(outs[layer].values, expected.values)
        assert feed._open == (), "its files are closed after the last layer"


def test_a_file_that_a_thread_reads_is_closed_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be another file's as soon as it is closed: what is read then would look damaged."""
    with TieredStore(tmp_path / "cache", StoreSettings(memory_limit=0)) as store:
        keep(store, PROMPT)
        feed = store.load(KV_SPACE, store.lookup(KV_SPACE, PROMPT))
        reading, go_on, read = threading.Event(), threading.Event(), ExtentFiles.read

        def slowly(self: ExtentFiles, *given: Any) -> None:
            reading.set()
            assert go_on.wait(30)
            read(self, *given)

        monkeypatch.setattr(ExtentFiles, "read", slowly)
        out = _empty(0, len(PROMPT))
        with ThreadPoolExecutor(1) as thread:
            filling = thread.submit(feed.fill, 0, out)
            assert reading.wait(30)
            feed.close()
            assert feed._open, "a thread reads it"
            go_on.set()
            filling.result(30)
        assert feed._open == ()
        np.testing.assert_array_equal(out.keys, make_kv(PROMPT, Span(0, len(PROMPT))).layers[0].keys)
        with pytest.raises(KvLost, match="closed"):
            feed.fill(1, _empty(1, len(PROMPT)))


def _empty(layer: int, tokens: int) -> LayerKv:
    shape, dtype = KV_SPACE.layout.layers[layer], KV_SPACE.layout.numpy_dtype
    return LayerKv(
        np.zeros((shape.kv_heads, tokens, shape.key_dim), dtype),
        np.zeros((shape.kv_heads, tokens, shape.value_dim), dtype),
    )


def test_documents_in_the_folder_of_a_cache_are_left_alone_and_make_none_of_another_folder(tmp_path: Path) -> None:
    TieredStore(tmp_path / "c").close()
    for name in ("c", "other"):
        (tmp_path / name / "knowledge").mkdir(parents=True)
        (tmp_path / name / "knowledge" / "0123456789abcdef.kv").write_bytes(b"a document")
    with TieredStore(tmp_path / "c") as store:
        store.disk.collect()
    with pytest.raises(CacheUnusable, match="somebody else's"):
        TieredStore(tmp_path / "other")
    for name in ("c", "other"):
        assert (tmp_path / name / "knowledge" / "0123456789abcdef.kv").read_bytes() == b"a document"
