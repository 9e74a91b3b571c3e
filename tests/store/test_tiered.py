"""Reading: which files are opened for a prompt, and how much of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import CacheUnusable
from rekindle.store.settings import StoreSettings
from rekindle.store.tiered import TieredStore
from tests.kvs import KV_SPACE, keep, load

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
