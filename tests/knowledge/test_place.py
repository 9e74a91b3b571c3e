"""Documents are kept apart from caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.knowledge.library_folder import knowledge_folder
from rekindle.machine import data_folder
from rekindle.settings import Settings


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


def test_one_cache_has_one_library_whichever_way_leads_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    monkeypatch.chdir(tmp_path / "kv")
    ways = (tmp_path / "link", "../kv", ".", f"{tmp_path}/kv/")
    assert {knowledge_folder(Settings(cache=str(way))) for way in ways} == {tmp_path / "kv-library"}
