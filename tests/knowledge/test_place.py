"""Documents are kept apart from caches. Those of earlier versions move, once; none is overwritten or removed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rekindle.cache.open_store import open_store
from rekindle.errors import CacheUnusable
from rekindle.knowledge.library import Library
from rekindle.knowledge.library_folder import knowledge_folder
from rekindle.machine import data_folder
from rekindle.settings import Settings
from rekindle.store.disk import DiskStore
from rekindle.store.settings import StoreSettings
from tests.knowledge.conftest import cut


def held(folder: Path, source: str) -> dict[str, bytes]:
    """A folder with a library in it, and its files."""
    known = Library(folder)
    known.put([cut(source, f"text of {source}")], "e")
    known.close()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sources(folder: Path) -> list[str]:
    return [entry.source for entry in Library(folder).entries()]


def test_a_library_stands_beside_a_named_cache_and_in_the_users_data_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "kv"
    assert knowledge_folder(Settings(cache=str(cache))) == tmp_path / "kv-library"
    assert knowledge_folder(Settings(cache=f"{cache}/")) == tmp_path / "kv-library"
    assert knowledge_folder(Settings(cache=str(cache), library=str(tmp_path / "own"))) == tmp_path / "own"
    assert knowledge_folder(Settings()) == tmp_path / "home" / "knowledge"  # REKINDLE_HOME
    monkeypatch.delenv("REKINDLE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert (
        knowledge_folder(Settings(cache="off")) == data_folder() / "knowledge" == tmp_path / "data/rekindle/knowledge"
    )
    monkeypatch.delenv("XDG_DATA_HOME")
    assert tmp_path / "caches" not in data_folder().parents


@pytest.mark.parametrize("named", [True, False])
def test_a_library_in_a_cache_folder_is_moved_once_and_that_is_said(
    tmp_path: Path, named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("REKINDLE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    settings = Settings(cache=str(tmp_path / "kv")) if named else Settings()
    old = tmp_path / "kv" / "knowledge" if named else tmp_path / "caches" / "rekindle" / "knowledge"
    files = held(old, "a")
    with caplog.at_level(logging.WARNING):
        new = knowledge_folder(settings)
    assert {path.name: path.read_bytes() for path in new.iterdir()} == files and sources(new) == ["a"]
    assert not old.exists() and [record.getMessage().count(str(new)) for record in caplog.records] == [1]
    caplog.clear()
    assert knowledge_folder(settings) == new and caplog.records == []


def test_where_both_places_hold_one_the_new_is_used_and_the_old_one_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "kv" / "knowledge", tmp_path / "kv-library"
    before = held(old, "old"), held(new, "new")
    with caplog.at_level(logging.WARNING):
        assert knowledge_folder(Settings(cache=str(tmp_path / "kv"))) == new
    assert str(old) in caplog.text and sources(new) == ["new"]
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before[0]


def test_a_library_that_cannot_be_moved_stays_in_use_where_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "kv" / "knowledge"
    files = held(old, "a")
    (tmp_path / "kv-library").mkdir()
    (tmp_path / "kv-library" / "mine.txt").write_text("somebody else's")
    with caplog.at_level(logging.WARNING):
        assert knowledge_folder(Settings(cache=str(tmp_path / "kv"))) == old
    assert {path.name: path.read_bytes() for path in old.iterdir()} == files and str(old) in caplog.text
    assert (tmp_path / "kv-library" / "mine.txt").read_text() == "somebody else's"


def test_a_folder_of_that_name_without_a_library_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kv" / "knowledge").mkdir(parents=True)
    (tmp_path / "kv" / "knowledge" / "notes.txt").write_text("mine")
    assert knowledge_folder(Settings(cache=str(tmp_path / "kv"))) == tmp_path / "kv-library"
    assert (tmp_path / "kv" / "knowledge" / "notes.txt").read_text() == "mine"


def test_opening_a_cache_moves_the_documents_out_of_it_first(tmp_path: Path) -> None:
    held(tmp_path / "kv" / "knowledge", "a")
    store = open_store(Settings(cache=str(tmp_path / "kv")))
    assert store is not None
    store.close()
    assert not (tmp_path / "kv" / "knowledge").exists() and sources(tmp_path / "kv-library") == ["a"]


def test_one_cache_has_one_library_whichever_way_leads_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    monkeypatch.chdir(tmp_path / "kv")
    ways = (tmp_path / "link", "../kv", ".", f"{tmp_path}/kv/")
    assert {knowledge_folder(Settings(cache=str(way))) for way in ways} == {tmp_path / "kv-library"}


def test_a_cache_of_before_that_holds_documents_is_never_called_safe_to_delete(tmp_path: Path) -> None:
    held(tmp_path / "kv" / "knowledge", "a")
    with pytest.raises(CacheUnusable, match=r"move its documents from .*kv/knowledge to .*kv-library; then you may"):
        DiskStore(tmp_path / "kv", StoreSettings())
