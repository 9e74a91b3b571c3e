"""A handful of the laws, for `make quick`: every engine that is installed answers the same with and without a cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.core.request import parse_prompt
from tests.faults.folders import REPOSITORY
from tests.parity.engines import KINDS, PRINCIPAL, STOP, each, reused
from tests.parity.sessions import PROMPT, N, ask, assert_right, opened, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")


@each(*KINDS)
def test_cold_warm_and_after_a_restart_the_answer_is_the_same(kind: str, tmp_path: Path) -> None:
    following = [*PROMPT, *tokens_of(9, seed=1)]
    with opened(kind, tmp_path / "cache") as session:
        first = ask(session, PROMPT)
        assert first.reuse.reused == 0
        session.warm([PROMPT])
        warm = ask(session, following, 9)
    with opened(kind, tmp_path / "cache", memory_limit=0) as session:
        again = ask(session, following, 9)
        partly = ask(session, [*PROMPT[:70], 4, 5])
    assert_right(kind, first)
    for reply in (warm, again):
        assert reply.reuse.reused >= N
        assert_right(kind, reply, following, 9)
    assert partly.reuse.disk == reused(kind, [*PROMPT[:70], 4, 5], PROMPT)
    assert_right(kind, partly, [*PROMPT[:70], 4, 5])


@each(*PRINCIPAL)
def test_the_next_turn_of_a_chat_is_warm(kind: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief, be kind, be plain."}, {"role": "user", "content": "Hello?"}]
    with opened(kind, tmp_path / "cache", memory_limit=0) as session:
        tokens = session.engine.tokenizer.encode_chat(parse_prompt(messages))
        reply = session.chat(messages, max_tokens=6)
        assert_right(kind, reply, tokens, 6, least=0)
        session.flush()
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "And now?"}]
        second = session.chat(messages, max_tokens=6)
        assert second.reuse.disk >= len(tokens) - tokens[::-1].index(STOP)
        assert_right(kind, second, session.engine.tokenizer.encode_chat(parse_prompt(messages)), 6, least=0)


def test_the_laws_can_be_held_without_torch() -> None:
    code = """
import sys
sys.modules.update(torch=None, transformers=None)
import tests.engine.test_contract, tests.faults.test_request_path, tests.laws.test_engine_laws
import tests.parity.test_append, tests.parity.test_changed_models, tests.parity.test_deterministic
import tests.parity.test_prefix_cache, tests.parity.test_together
from tests.parity.engines import KINDS, is_installed, make
for kind in filter(is_installed, KINDS):
    make(kind).close()
    print(kind)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    kinds = done.stdout.split()
    assert "fake" in kinds and "hf" not in kinds
