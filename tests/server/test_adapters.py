"""Adapters are models to clients: listed, asked, loaded and unloaded while the server runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle import Session
from rekindle.engine.base import Row
from tests.lora import fake_pairs, save_lora
from tests.server.serving import ADMIN, ALICE, Served, eventually, serving

LONG = "The keeper of the lighthouse wrote down the wind every morning, and the boats that he counted at night. "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_lora(tmp_path / "lora", fake_pairs(0))


def load(served: Served, name: str, folder: Path, **more: object) -> int:
    return served.post("/v1/load_lora_adapter", **{"lora_name": name, "lora_path": str(folder), **more}).status_code


def ask(served: Served, model: str | None) -> dict:  # type: ignore[type-arg]
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 6, "temperature": 0}
    answer = served.post("/v1/chat/completions", **(body if model is None else {**body, "model": model}))
    return {"status": answer.status_code, **answer.json()}


def test_an_adapter_is_a_model_from_load_to_unload(served: Served, folder: Path) -> None:
    assert ask(served, "writer")["status"] == 404
    assert load(served, "writer", folder) == 200
    listed = {model["id"]: model for model in served.get("/v1/models").json()["data"]}
    assert listed["writer"]["parent"] == "fake-0"
    assert served.get("/v1/models/writer").status_code == 200
    assert listed["writer"]["loaded"] is False
    adapted, plain = ask(served, "writer"), ask(served, None)
    assert served.get("/v1/models/writer").json()["loaded"] is True
    assert (adapted["model"], plain["model"]) == ("writer", "fake-0")
    texts = [told["choices"][0]["message"]["content"] for told in (adapted, plain)]
    assert texts[0] != texts[1]
    direct = served.session.chat(LONG, max_tokens=6, adapter="writer", reuse="off")
    assert texts[0] == direct.text
    served.session.flush()
    assert ask(served, "writer")["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert served.post("/v1/unload_lora_adapter", lora_name="writer").status_code == 200
    assert ask(served, "writer")["status"] == 404
    assert served.post("/v1/unload_lora_adapter", lora_name="writer").status_code == 404


def test_completions_warming_and_explaining_take_an_adapter_too(served: Served, folder: Path) -> None:
    assert load(served, "writer", folder) == 200
    warmed = served.post("/v1/rekindle/warm", prompt=LONG, model="writer")
    assert warmed.status_code == 200
    body = {"prompt": LONG, "max_tokens": 3, "temperature": 0}
    assert served.post("/v1/completions", **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    told = served.post("/v1/completions", **{**body, "model": "writer"}).json()
    assert told["model"] == "writer" and told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert served.post("/v1/rekindle/explain", prompt=LONG, model="writer").status_code == 200
    assert served.post("/v1/rekindle/explain", prompt=LONG, model="nobody").status_code == 404


def test_only_operators_load_and_what_is_wrong_is_said(keyed: Served, folder: Path, tmp_path: Path) -> None:
    body = {"lora_name": "writer", "lora_path": str(folder)}
    assert keyed.post("/v1/load_lora_adapter", ALICE, **body).status_code == 403
    assert keyed.post("/v1/unload_lora_adapter", ALICE, lora_name="writer").status_code == 403
    missing = keyed.post("/v1/load_lora_adapter", ADMIN, **{**body, "lora_path": str(tmp_path / "no")})
    assert missing.status_code == 404 and "There is no folder" in missing.json()["error"]["message"]
    dora = save_lora(tmp_path / "dora", fake_pairs(1), use_dora=True)
    refused = keyed.post("/v1/load_lora_adapter", ADMIN, **{**body, "lora_path": str(dora)})
    assert refused.status_code == 400 and "use_dora" in refused.json()["error"]["message"]
    own = keyed.post("/v1/load_lora_adapter", ADMIN, **{**body, "lora_name": "fake-0"})
    assert own.status_code == 400 and own.json()["error"]["param"] == "lora_name"
    assert keyed.post("/v1/load_lora_adapter", ADMIN, **body).status_code == 200
    assert keyed.post("/v1/load_lora_adapter", ADMIN, **{**body, "lora_name": "a b"}).status_code == 400


def test_a_hundred_adapters_take_the_memory_of_a_few_and_share_steps(
    tiny_folder: Path, tmp_path: Path, one_thread: None
) -> None:
    pytest.importorskip("torch")
    drawn, settings = np.random.default_rng(0), {"engine": "hf", "device": "cpu", "dtype": "float32", "cache": "off"}
    layers = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]
    loras = {
        f"a{number}": save_lora(
            tmp_path / f"a{number}",
            {layer: tuple(drawn.normal(0, 1, shape).astype("f4") for shape in ((2, 32), (32, 2))) for layer in layers},
        )
        for number in range(100)
    }
    with Session(tiny_folder, **settings) as alone:
        for name, lora in loras.items():
            alone.adapters.load(name, lora)
        expected = {name: alone.chat(LONG, adapter=name, max_tokens=6).text for name in loras}
        limit = 8 * next(iter(alone.adapters)).memory_bytes
    assert len(set(expected.values())) > 90
    with Session(tiny_folder, parallel=6, adapter_memory=limit, **settings) as session, serving(session) as served:
        assert {load(served, name, lora) for name, lora in loras.items()} == {200}
        engine: Any = session.engine.inner.inner  # type: ignore[attr-defined]
        step, together, held = engine.step, set[int](), set[int]()

        def watched(rows: Sequence[Row], cancelled: Any = None) -> Any:
            if not together:  # held until others wait for the next step
                eventually(lambda: served.service.admission.running == 6)
            together.add(len({row.sequence.adapter for row in rows}))  # type: ignore[attr-defined]
            held.add(session.adapters.loaded_bytes)
            return step(rows, cancelled)

        engine.step = watched
        with ThreadPoolExecutor(6) as threads:
            told = dict(zip(loras, threads.map(lambda name: ask(served, name), loras), strict=True))
        assert {name: one["choices"][0]["message"]["content"] for name, one in told.items()} == expected
        assert max(together) > 1 and 0 < max(held) <= limit
        assert limit < sum(adapter.memory_bytes for adapter in session.adapters) / 10
