"""The packaged adapters on the real model: they do what they are for, as with PEFT, and the cache keeps them apart."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from peft import PeftModel

from rekindle import Session
from rekindle.engine.base import Row
from rekindle.models.adapter_registry import lookup

pytestmark = pytest.mark.real

NAMES = ("json", "list", "pirate")
QUESTION = "How do I keep my bicycle chain from rusting?"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    cache = tmp_path_factory.mktemp("adapters") / "cache"
    with Session("smollm2", engine="hf", device="cpu", dtype="float32", cache=str(cache)) as opened:
        yield opened


def test_they_do_what_they_are_for_and_are_kept_apart(session: Session) -> None:
    texts = {}
    for _ in range(2):  # the second time from the cache
        for name in ("", *NAMES):
            reply = session.chat(QUESTION, adapter=name, max_tokens=70)
            assert texts.setdefault(name, reply.text) == reply.text
            session.flush()
        session.cache.unpark()
    assert reply.reuse.reused > 0
    assert set(json.loads(texts["json"])) == {"subject", "topic", "answer", "tip"}
    assert all(line.startswith("- ") for line in texts["list"].splitlines())
    assert any(word in texts["pirate"] for word in ("Ahoy", "Arr", "Yo ho ho", "matey", "timbers", "Avast"))
    assert len(set(texts.values())) == 4


def test_they_answer_as_with_peft(session: Session) -> None:
    engine = session.engine
    model = copy.deepcopy(engine.model)  # type: ignore[attr-defined]
    tokens = engine.tokenizer.encode(QUESTION)
    for name in NAMES:
        entry = lookup(name)
        assert entry is not None
        peft = PeftModel.from_pretrained(model, entry.path)
        with torch.inference_mode():
            expected = peft(torch.tensor([tokens])).logits[0].numpy()
        model = peft.unload()
        with session.adapters.use(name) as digest:
            sequence = engine.open(64, engine.regime(64), digest)
            (got,) = engine.step([Row.following(sequence, tokens, logits="all")])
            sequence.close()
        assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()
    assert {adapter.name: adapter.same_layers for adapter in session.adapters} == {"json": 0, "list": 0, "pirate": 16}
