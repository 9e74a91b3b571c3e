"""Hybrid models: the KV of attention layers is stored by spans, and checkpoints are only of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xllamacpp")

from rekindle import Session
from rekindle.cache.checkpoint_kv import GRID_TOKENS, places
from rekindle.core.kv import PAGES
from rekindle.store.catalog import catalog
from tests.tiny_hybrids import write_gemma2, write_lfm2

pytestmark = [pytest.mark.llamacpp]

TOKENS = np.random.default_rng(9).integers(3, 250, 900).tolist()
STOP = 256  # ends a message
WINDOWED = {"swa_full": False}


@pytest.fixture(scope="module", params=["lfm2", "gemma2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write = {"lfm2": write_lfm2, "gemma2": write_gemma2}[request.param]
    return write(tmp_path_factory.mktemp("split") / f"{request.param}.gguf", context=1024)


@pytest.fixture
def session(path: Path, tmp_path: Path) -> Iterator[Session]:
    with opened(path, tmp_path) as session:
        assert session.engine.capabilities.split
        yield session


def opened(path: Path, tmp_path: Path) -> Session:
    settings: dict[str, Any] = {"threads": 1, "disk_limit": "200MB", "kv_type": "f32", "memory_limit": 0, **WINDOWED}
    return Session(str(path), engine="llamacpp", cache=str(tmp_path / "cache"), **settings)


def entries(session: Session, *, pages: bool) -> list[catalog.Extent]:
    """What is stored: the pages of checkpoints, or KV of tokens."""
    session.flush()
    assert session.cache.store is not None
    size = PAGES.token_bytes
    return [row for row in session.cache.store.disk.entries() if (row.size_bytes >= row.tokens * size) == pages]


def chat_of(turns: int) -> list[int]:
    """A chat whose messages have forty tokens each, with a question behind it."""
    messages = [[*TOKENS[40 * turn : 40 * turn + 39], STOP] for turn in range(turns)]
    return [*(token for message in messages for token in message), 7, 8, 9]


def assert_right(session: Session, prompt: list[int], tokens: tuple[int, ...]) -> None:
    assert tokens == session.generate(prompt, max_tokens=len(tokens), min_tokens=len(tokens), reuse="off").tokens


def test_a_turn_writes_the_kv_of_what_is_new_and_a_small_checkpoint(session: Session) -> None:
    session.generate(chat_of(4), max_tokens=2, min_tokens=2)
    known = sum(row.tokens for row in entries(session, pages=False))
    for turn in range(5, 9):
        reply = session.generate(chat_of(turn), max_tokens=2, min_tokens=2)
        assert reply.reuse.reused == 40 * (turn - 1)
        now = sum(row.tokens for row in entries(session, pages=False))
        assert now - known <= 40 + 5 + 64, "what is new, and the blocks at both ends of it"
        known = now


def test_a_prompt_that_differs_late_computes_from_the_last_checkpoint(path: Path, tmp_path: Path) -> None:
    with opened(path, tmp_path) as session:
        session.generate(chat_of(6), max_tokens=2, min_tokens=2)
        session.flush()
    other = [*chat_of(6)[:240], *TOKENS[500:530]]
    with opened(path, tmp_path) as session:
        reply = session.generate(other, max_tokens=8, min_tokens=8)
        assert reply.reuse.disk == 240
        assert_right(session, other, reply.tokens)


def test_what_changes_from_prompt_to_prompt_has_a_checkpoint_before_it(session: Session) -> None:
    """A date in the middle of a long system message: from the third prompt on only what follows it is computed."""
    prompts = [[*TOKENS[:400], 5 + day, *TOKENS[401:699], STOP, *TOKENS[700 + day : 740]] for day in range(4)]
    reused = []
    for prompt in prompts:
        reply = session.generate(prompt, max_tokens=4, min_tokens=4)
        reused.append(reply.reuse.reused)
        session.flush()
        session.cache.unpark()
        assert_right(session, prompt, reply.tokens)
    assert reused == [0, 0, 400, 400]


@pytest.mark.parametrize("pages", [True, False])
def test_one_part_without_the_other_is_computed(path: Path, tmp_path: Path, pages: bool) -> None:
    prompt = chat_of(5)
    with opened(path, tmp_path) as session:
        session.generate(prompt, max_tokens=2, min_tokens=2)
        gone = entries(session, pages=pages)
        assert gone and entries(session, pages=not pages)
        assert session.cache.store is not None
        for row in gone:
            session.cache.store.disk.extents.path(row.name).unlink()
    with opened(path, tmp_path) as session:
        for _ in range(len(gone) + 1):  # files that are gone are noticed one by one
            reply = session.generate(prompt, max_tokens=8, min_tokens=8)
            session.flush()
            session.cache.unpark()
            assert_right(session, prompt, reply.tokens)
        assert reply.reuse.disk >= 200, "and written again"


def test_more_checkpoints_are_where_messages_end_and_in_long_ones() -> None:
    tokens = [*([1] * 99 + [STOP]) * 10, *[1] * 2000]
    usual = places(tokens, {STOP})
    assert usual == (100, 900, 1000)
    assert places(tokens, {STOP}, more=1) == (100, 600, 900, 1000), "not so near that they cut the prefill into crumbs"
    many = places(tokens, {STOP}, more=20)
    assert many == (100, 600, 900, 1000, *(1000 + GRID_TOKENS * n for n in (1, 2, 3)))
    assert all(len(places(tokens, {STOP}, more=more)) <= 3 + more for more in range(20))
