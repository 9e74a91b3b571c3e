"""Fixtures for all tests. Every test has a Rekindle home of its own; those marked `real` or `docs` use the models of
whoever runs them, and share a cache that goes with the run.

No test sees the settings of whoever runs it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)  # how long an example takes says nothing here
settings.load_profile("shared machine")

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


# What takes longest without real weights: processes, servers, thousands of faults. Left out of `make quick`.
THOROUGH = frozenset(
    """
    bench cli docs engine/llamacpp faults integrate origin parity real server tools
    engine/test_calls.py engine/test_constrain.py engine/test_embedder.py engine/test_qkv.py engine/test_turn.py
    knowledge/test_read.py knowledge/test_split.py knowledge/test_watch.py laws/test_plan_laws.py
    laws/test_stream_laws.py reuse/test_latency.py run/test_adapters.py run/test_answers.py run/test_arrivals.py
    run/test_ask.py run/test_draft.py run/test_flight.py run/test_forget.py run/test_idle.py run/test_keep_alive.py
    run/test_layer_costs.py run/test_mend.py run/test_near.py run/test_streaming.py run/test_streams.py
    store/test_evict_apps.py store/test_policy.py store/test_purge.py
    """.split()  # noqa: SIM905
)


def is_thorough(path: Path) -> bool:
    place = path.relative_to(Path(__file__).parent)
    return any(str(part) in THOROUGH for part in (place, *place.parents))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What is left out need not be imported either: half of the time of `make quick`."""
    return True if "not thorough" in config.option.markexpr and is_thorough(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_thorough(item.path):
            item.add_marker(pytest.mark.thorough)
    # The longest first: two workers that take a file each end at the same time.
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("real", "docs", "storm")))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared") / "cache"


@pytest.fixture(autouse=True)
def own_home(
    request: pytest.FixtureRequest, tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith("REKINDLE_") and n != "REKINDLE_HOME"]:
        monkeypatch.delenv(name)
    if any(request.node.get_closest_marker(name) for name in ("real", "docs")):
        monkeypatch.setenv("REKINDLE_CACHE", str(shared_cache))
    else:
        monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))
        for name in ("OLLAMA_MODELS", "HF_HOME"):  # what other tools have here is none of a test's business
            monkeypatch.setenv(name, str(tmp_path / "others" / name))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared machine may be slow: only tests of deadlines have any."""
    monkeypatch.setattr("rekindle.run.cache.LOOKUP_SECONDS", 120.0)
    monkeypatch.setattr("rekindle.run.cache.LOAD_SECONDS", 120.0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for tiny models: several only wait for each other, ten times longer where others work too."""
    try:
        import torch
    except ImportError:  # then nothing here computes with it
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a byte tokenizer and a chat template, as a model folder. Do not change it: copy it."""
    from transformers import PreTrainedTokenizerFast

    from tests.tiny import byte_backend, tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama", eos_token_id=256).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_backend(), eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    return folder
