"""Coded KV on the real model: without loss the text is the same after a restart; quantized it is nearly the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.adapters.coding import measure
from rekindle import Reply, Session
from rekindle.cache.coders import default_coder
from rekindle.engine.base import Engine
from rekindle.engine.lora_files import read_adapter
from rekindle.models.adapter_registry import lookup
from rekindle.session.calibrate.kv_trial import Trial, read_back
from rekindle.session.calibrate.prompts import sample_text

pytestmark = pytest.mark.real

TEXT = " ".join(sample_text().split()[:140])
ADAPTERS = (None, "pirate", "list")


@pytest.fixture
def opened(smollm2: Engine, tmp_path: Path) -> Callable[..., Session]:
    return lambda **settings: Session(smollm2, cache=tmp_path, **settings)


def ask(session: Session) -> list[Reply]:
    replies = []
    for name in ADAPTERS:
        session.flush()
        replies.append(session.generate(TEXT, adapter=name, max_tokens=6, min_tokens=6))
    session.flush()
    return replies


def size_and_codings(session: Session) -> tuple[float, set[str]]:
    """What is kept, as a share of what it would take raw; and how."""
    assert session.cache.store is not None
    rows = session.cache.store.disk.entries()
    raw = sum(row.tokens for row in rows) * session.engine.layout.token_bytes
    return sum(row.size_bytes for row in rows) / raw, {row.coding for row in rows}


def texts(replies: Sequence[Reply]) -> list[str]:
    return [reply.text for reply in replies]


def test_differences_without_loss_give_the_same_text_after_a_restart(opened: Callable[..., Session]) -> None:
    with opened() as session:
        cold = ask(session)
        share, codings = size_and_codings(session)
    assert codings == {"raw", "exact"} and share < 0.9
    with opened(memory_limit="0") as session:
        warm = ask(session)
    assert texts(warm) == texts(cold)
    assert all(reply.reuse.level == "exact" and reply.reuse.disk > 100 for reply in warm)


def test_quantized_kv_takes_a_fraction_and_every_reply_says_so(opened: Callable[..., Session]) -> None:
    with opened(reuse="quantized") as session:
        ask(session)
        share, codings = size_and_codings(session)
    assert codings == {"quantized"} and share < 0.17
    with opened(reuse="quantized", memory_limit="0") as session:
        for reply in ask(session):
            assert reply.reuse.level == "quantized" and reply.reuse.quantized == reply.reuse.disk > 100


def test_what_is_not_calibrated_is_near_enough(opened: Callable[..., Session]) -> None:
    entry = lookup("pirate")
    assert entry is not None
    lora = read_adapter(Path(entry.path), 1.0)
    with opened() as session:
        engine = session.engine
        engine.load_adapter(lora)
        tokens = engine.tokenizer.encode(TEXT)
        prompt, forced = tokens[:-48], tokens[-48:]
        coder = default_coder(len(engine.layout.layers))
        with Trial(engine, prompt, forced) as base, Trial(engine, prompt, forced, lora.digest) as adapted:
            whole = measure(base, coder, None)
            delta = measure(adapted, coder, read_back(coder, base.kv.layers, None, "float32"))
    assert whole.bits < 6.5 and whole.near.mean_kl < 0.002 and whole.near.top1 > 0.9
    assert delta.bits < 2.9 and delta.near.mean_kl < 0.015 and delta.near.top1 > 0.9
