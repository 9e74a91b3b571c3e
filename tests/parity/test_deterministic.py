"""`deterministic=True`: cold and warm logits are equal to the last bit, per engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.engines import KINDS, PRINCIPAL, assert_same, each, make
from tests.parity.sessions import ask, assert_bit_equal, opened, record, tokens_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("one_thread")]

every = each(*KINDS)
principal = each(*PRINCIPAL)


def long(kind: str, **changes: Any) -> partial[Any]:
    return partial(make, kind, context_tokens=2048, **changes)


def logits_of(kind: str, folder: Path, prompts: Sequence[Sequence[int]], restarts: bool, **settings: Any) -> Any:
    """Reply and logits of the last of the prompts, after the others were asked."""
    session = opened(long(kind), folder, deterministic=True, **settings)
    for prompt in prompts[:-1]:
        ask(session, prompt, 4)
        session.flush()
    if restarts:
        session.close()
        session = opened(long(kind), folder, deterministic=True, **settings)
    seen = record(session.engine)
    reply = ask(session, prompts[-1], 6)
    session.close()
    return reply, seen


@every
@pytest.mark.parametrize("restarts", [False, True])
def test_deterministic_logits_are_bit_equal_cold_and_warm_at_every_split(
    kind: str, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = 32
    monkeypatch.setattr("rekindle.cache.stored_kv.PIECE_TOKENS", piece)
    prompt = tokens_of(150, seed=5)
    _, expected = logits_of(kind, tmp_path / "cold", [prompt], restarts=False)
    splits = range(0, 151, 9 if restarts else 13)

    def before(split: int) -> None:  # each split has a salt, so that none knows of the others
        ask(session, [*prompt[:split], 251, *tokens_of(20, seed=split)], 4, cache_salt=str(split))

    session = opened(long(kind), tmp_path / "cache", deterministic=True)
    if restarts:
        for split in splits:
            before(split)
        session.close()
        session = opened(long(kind), tmp_path / "cache", deterministic=True)
    seen = record(session.engine)
    for split in splits:
        if not restarts:
            before(split)
            session.flush()
        seen.clear()
        reply = ask(session, prompt, 6, cache_salt=str(split))
        assert reply.reuse.reused == min(split, len(prompt) - 1) // piece * piece
        assert_bit_equal(seen, expected)
    session.close()


@principal
@pytest.mark.parametrize("settings", [{}, {"memory_limit": 0}])
@pytest.mark.parametrize("split", [255, 256, 600, 700])
def test_deterministic_logits_are_bit_equal_with_pieces_as_they_are(
    kind: str, split: int, settings: Any, tmp_path: Path
) -> None:
    prompt = tokens_of(700, seed=6)
    _, expected = logits_of(kind, tmp_path / "cold", [prompt], restarts=False)
    reply, got = logits_of(kind, tmp_path / "warm", [[*prompt[:split], 251, 9], prompt], bool(settings), **settings)
    assert reply.reuse.reused == min(split, 699) // 256 * 256
    assert_bit_equal(got, expected)


@principal
def test_deterministic_logits_are_bit_equal_whatever_chats_went_before(kind: str, tmp_path: Path) -> None:
    """What was decoded token by token is not reused: it was computed in other company."""
    prompt = tokens_of(300, seed=8)
    with opened(long(kind), tmp_path / "cache", deterministic=True) as session:
        reply = ask(session, prompt, 260)
        following = [*prompt, *reply.tokens, *tokens_of(20, seed=9)]
        session.flush()
        seen = record(session.engine)
        again = ask(session, following, 3)
        assert again.reuse.reused == 256
    _, expected = logits_of(kind, tmp_path / "cold", [following], restarts=False)
    assert_bit_equal(seen, expected[:3])


@principal
def test_kv_computed_in_other_pieces_is_in_another_kv_space(kind: str, tmp_path: Path) -> None:
    prompt = tokens_of(600, seed=10)
    following = [*prompt, 251]
    with opened(long(kind), tmp_path / "cache") as session:
        session.warm([prompt])
    with opened(long(kind), tmp_path / "cache", deterministic=True) as session:
        assert ask(session, following).reuse.reused == 0
        session.flush()
    with opened(long(kind), tmp_path / "cache", deterministic=True) as session:
        assert ask(session, following).reuse.disk == 512
    with opened(long(kind), tmp_path / "cache") as session:
        assert ask(session, following).reuse.disk == 600


@principal
def test_beside_another_reply_deterministic_logits_are_equal_as_far_as_sequences_are_apart(
    kind: str, tmp_path: Path
) -> None:
    """To the last bit, but with llama.cpp, where all sequences share one buffer: there, up to rounding.

    Which cells a token gets decides in which order it is summed up, cold or warm.
    """
    prompt = tokens_of(700, seed=6)
    _, expected = logits_of(kind, tmp_path / "cold", [prompt], restarts=False)
    with opened(long(kind), tmp_path / "warm", deterministic=True, memory_limit=0) as session:
        ask(session, prompt, 0)
        session.flush()
        seen = record(session.engine)
        worst = 0.0
        for length in (8, 22, 36, 50):
            other = session.stream(tokens_of(length, seed=length), max_tokens=30, min_tokens=30)
            next(other)
            seen.clear()
            assert ask(session, prompt, 6).reuse.reused == 512
            for ours, theirs in zip(seen, expected, strict=True):
                assert_same(kind, ours, theirs)
                worst = max(worst, float(np.abs(ours - theirs).max()))
            other.close()
        if not session.engine.capabilities.crowded:
            assert worst == 0.0


@each("llamacpp")
def test_deterministic_logits_are_bit_equal_though_others_computed_with_flash_attention(
    kind: str, tmp_path: Path
) -> None:
    prompt = tokens_of(700, seed=6)
    _, expected = logits_of(kind, tmp_path / "cold", [prompt], restarts=False)
    with opened(long(kind, flash_attention="on"), tmp_path / "warm", deterministic=True) as session:
        session.warm([prompt])
    _, got = logits_of(kind, tmp_path / "warm", [prompt], restarts=False)
    assert_bit_equal(got, expected)
