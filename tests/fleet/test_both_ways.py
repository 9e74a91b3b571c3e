"""KV of `Session` in vLLM, and the other way round: greedy texts are the same as without any cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rekindle import Session
from rekindle.machine import models_folder
from rekindle.vllm.served_model import SHARED_FAMILIES
from tests.fleet.servers import Served, prompt, save_model, serving

COUNT = 16
PROMPT = prompt(300)


def session_reply(model: Path, cache: Path | str, tokens: list[int], count: int = COUNT) -> Served:
    """A greedy reply by the transformers engine."""
    options = {"engine": "hf", "device": "cpu", "dtype": "float32", "answers": "off"}
    with Session(str(model), cache=str(cache), **options) as session:
        reply = session.generate(tokens, max_tokens=count, temperature=0.0)
        return Served(tuple(reply.tokens), reply.usage.cached_tokens)


@pytest.mark.parametrize(("family", "window"), [*((name, None) for name in sorted(SHARED_FAMILIES)), ("mistral", 64)])
def test_a_session_and_vllm_use_each_others_kv(tmp_path: Path, family: str, window: int | None) -> None:
    """With a window in all layers, too, as the first Mistral has it."""
    model = save_model(tmp_path / "model", family, **({} if window is None else {"sliding_window": window}))
    cold = session_reply(model, "off", PROMPT)
    with serving(model) as server:
        assert server.reply(PROMPT, COUNT).tokens == cold.tokens
    session_reply(model, tmp_path / "from session", PROMPT)
    with serving(model, tmp_path / "from session") as server:
        assert server.reply(PROMPT, COUNT) == Served(cold.tokens, len(PROMPT) - 1)
    with serving(model, tmp_path / "from vllm") as server:
        server.reply(PROMPT, COUNT)
    assert session_reply(model, tmp_path / "from vllm", PROMPT) == Served(cold.tokens, len(PROMPT) - 1)


@pytest.mark.real
def test_real_weights_say_the_same_with_kv_of_the_other(tmp_path: Path) -> None:
    model = models_folder() / "smollm2" / "hf"
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "The lighthouse keeper writes down every ship that passes, its flag, its course and the weather. "
    tokens = tokenizer("\n".join(f"{day}. {text}" for day in range(1, 14))).input_ids
    cold = session_reply(model, "off", tokens)
    session_reply(model, tmp_path / "from session", tokens)
    with serving(model, tmp_path / "from session") as server:
        assert server.reply(tokens, COUNT) == Served(cold.tokens, len(tokens) - 1)
    with serving(model, tmp_path / "from vllm") as server:
        assert server.reply(tokens, COUNT) == Served(cold.tokens, 0)
    assert session_reply(model, tmp_path / "from vllm", tokens) == Served(cold.tokens, len(tokens) - 1)
