"""The packaged adapters on the real model: they do what they are for, as with PEFT, and the cache keeps them apart."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rekindle import Session
from rekindle.engine.base import Engine, Row
from rekindle.models.adapter_registry import lookup
from tests.lora import save_lora
from tests.server.serving import Served, serving

pytestmark = pytest.mark.real

NAMES = ("json", "list", "pirate")
QUESTION = "How do I keep my bicycle chain from rusting?"


@pytest.fixture(scope="module")
def session(smollm2: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session(smollm2, cache=tmp_path_factory.mktemp("adapters") / "cache") as opened:
        yield opened


def test_they_do_what_they_are_for_and_are_kept_apart(session: Session) -> None:
    texts = {
        name: session.chat(QUESTION, adapter=name, max_tokens=70 if name == "json" else 12).text
        for name in ("", *NAMES)
    }
    session.flush()
    session.cache.unpark()
    for name, text in texts.items():
        again = session.chat(QUESTION, adapter=name, max_tokens=4)
        assert text.startswith(again.text) and again.reuse.reused > 0
    assert set(json.loads(texts["json"])) == {"subject", "topic", "answer", "tip"}
    assert all(line.startswith("- ") for line in texts["list"].splitlines())
    assert any(word in texts["pirate"] for word in ("Ahoy", "Arr", "Yo ho ho", "matey", "timbers", "Avast"))
    assert len(set(texts.values())) == 4


def test_they_answer_as_with_peft(session: Session) -> None:
    from peft import PeftModel

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


COUNT = 100
SHORT = "Name a river."
OUTPUTS = (("q", 576), ("v", 192))
SETTINGS: dict[str, Any] = {"engine": "hf", "device": "cpu", "dtype": "float32", "cache": "off"}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Small adapters of ranks 2 to 8, each of which changes what the model says."""
    place = tmp_path_factory.mktemp("many")
    return [random_lora(place / f"a{number}", number) for number in range(COUNT)]


def random_lora(folder: Path, seed: int) -> Path:
    drawn, rank = np.random.default_rng(seed), 2 + seed % 7
    shapes = {f"model.layers.{layer}.self_attn.{name}_proj": out for layer in range(30) for name, out in OUTPUTS}
    pairs = {
        name: (drawn.normal(0, 0.2, (rank, 576)).astype("f4"), drawn.normal(0, 0.2, (out, rank)).astype("f4"))
        for name, out in shapes.items()
    }
    return save_lora(folder, pairs)


def ask(served: Served, name: str) -> str:
    text: str = served.chat(SHORT, model=name, max_tokens=3)["choices"][0]["message"]["content"]
    return text


@pytest.mark.long  # on a tiny model: tests/server/test_adapters.py
def test_a_hundred_adapters_on_one_server_take_the_memory_of_a_few_and_share_steps(many: list[Path]) -> None:
    names = [f"a{number}" for number in range(COUNT)]
    with Session("smollm2", **SETTINGS) as alone:
        for name, folder in zip(names, many, strict=True):
            alone.adapters.load(name, folder)
        expected = {name: alone.chat(SHORT, adapter=name, max_tokens=3).text for name in names}
    assert len(set(expected.values())) > COUNT // 3
    limit = 10_000_000
    with Session("smollm2", parallel=6, adapter_memory=limit, **SETTINGS) as session, serving(session) as served:
        for name, folder in zip(names, many, strict=True):
            assert served.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder)).status_code == 200
        assert session.adapters.loaded_bytes == 0
        engine: Any = session.engine.inner.inner  # type: ignore[attr-defined]
        step, together, most_bytes = engine.step, set[int](), [0]

        def watched(rows: Sequence[Row], cancelled: Any = None) -> Any:
            together.add(len({row.sequence.adapter for row in rows}))  # type: ignore[attr-defined]
            most_bytes[0] = max(most_bytes[0], session.adapters.loaded_bytes)
            return step(rows, cancelled)

        engine.step = watched
        with ThreadPoolExecutor(6) as threads:
            texts = dict(zip(names, threads.map(lambda name: ask(served, name), names), strict=True))
        assert texts == expected
        assert max(together) > 1  # several different ones in one step
        assert 0 < most_bytes[0] <= limit < sum(adapter.memory_bytes for adapter in session.adapters) / 10
        assert {name: ask(served, name) for name in names[:5]} == {name: expected[name] for name in names[:5]}
