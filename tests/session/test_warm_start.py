"""An adapter's first request may start from the model's KV: approximate, marked, apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache.cost import FREE, Costs
from rekindle.core.keys import KvSpace, is_warm_started, warm_started
from rekindle.core.reply import Reply
from rekindle.core.request import Request
from rekindle.engine.fake import FakeEngine
from rekindle.errors import KvLost
from rekindle.store.feed import StoredFeed
from rekindle.store.prefix_index import Match
from tests.lora import fake_pairs, save_lora

CONTEXT = "Once there was a harbour with three cranes, and each of them had a name of its own. " * 3
CHEAP = replace(FREE, compute=(0.0, 1e-3, 0.0))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(
        FakeEngine(), cache=str(tmp_path / "cache"), reuse="approximate", warm_start=True, recompute_budget=0.3
    ) as opened:
        opened.cache.kv.costs = Costs(CHEAP)
        for seed in range(2):
            opened.adapters.load(f"lora{seed}", save_lora(tmp_path / f"lora{seed}", fake_pairs(seed)))
        yield opened


def ask(session: Session, question: str, adapter: str | None, **options: Any) -> Reply:
    reply = session.generate(CONTEXT + question, max_tokens=3, adapter=adapter, **options)
    assert session.flush()
    return reply


def test_the_first_request_of_an_adapter_starts_from_the_models_kv_and_says_so(session: Session) -> None:
    ask(session, "How many?", None)
    reuse = ask(session, "Which one?", "lora0").reuse
    known = len(CONTEXT)
    assert (reuse.level, reuse.from_model) == ("approximate", known)
    assert reuse.recomputed == round(0.3 * known) and reuse.from_chunks == reuse.loaded == 0
    assert reuse.computed == len("Which one?") + reuse.recomputed and reuse.reused == known - reuse.recomputed
    assert (reuse.recompute_policy, reuse.budget) == ("adapter", 0.3)
    assert f"{known:,} from the model without the adapter, {reuse.recomputed} of them recomputed" in str(reuse)


def test_what_it_leaves_is_found_by_later_approximate_requests_and_never_by_exact_ones(session: Session) -> None:
    ask(session, "How many?", None)
    ask(session, "Which one?", "lora0")
    session.cache.unpark()
    later = ask(session, "And who?", "lora0").reuse
    assert (later.level, later.disk + later.memory, later.from_model) == ("approximate", len(CONTEXT), 0)
    exact = ask(session, "And who?", "lora0", reuse="exact")
    assert (exact.reuse.level, exact.reuse.reused) == ("exact", 0)
    with Session(FakeEngine(), cache="off") as alone:
        for adapter in session.adapters:
            alone.adapters.load(adapter.name, adapter.source)
        assert exact.text == alone.generate(CONTEXT + "And who?", max_tokens=3, adapter="lora0").text
    # Now that its own KV exists, nothing else is used.
    session.cache.unpark()
    own = ask(session, "And who?", "lora0").reuse
    assert (own.level, own.from_model, own.loaded > len(CONTEXT)) == ("exact", 0, True)


def test_another_adapters_kv_is_not_near_enough(session: Session) -> None:
    ask(session, "How many?", "lora1")
    assert ask(session, "Which one?", "lora0").reuse.reused == 0


def test_it_is_off_unless_it_was_asked_for(tmp_path: Path, session: Session) -> None:
    ask(session, "How many?", None)
    with Session(session.engine, cache=str(tmp_path / "cache"), reuse="approximate") as usual:
        usual.cache.kv.costs = Costs(CHEAP)
        usual.adapters.load("lora0", tmp_path / "lora0")
        assert ask(usual, "Which one?", "lora0").reuse.reused == 0


@pytest.mark.parametrize("options", [{"reuse": "exact"}, {"cache_salt": "other"}])
def test_nothing_is_started_from_other_kv_unasked_or_across_scopes(session: Session, options: dict[str, str]) -> None:
    ask(session, "How many?", None)
    reuse = ask(session, "Which one?", "lora0", **options).reuse
    assert (reuse.level, reuse.from_model, reuse.reused) == ("exact", 0, 0)


def test_where_it_does_not_pay_the_prompt_is_computed_and_kept_as_exact(session: Session) -> None:
    ask(session, "How many?", None)
    session.cache.kv.costs = Costs(replace(CHEAP, chunks=(100.0, 1.0)))
    refused = ask(session, "Which one?", "lora0").reuse
    assert (refused.level, refused.miss, refused.reused) == ("exact", "slower", 0)
    session.cache.unpark()
    assert ask(session, "Which one?", "lora0", reuse="exact").reuse.reused >= len(CONTEXT)


def test_recomputing_everything_answers_as_computing_does(tmp_path: Path, session: Session) -> None:
    ask(session, "How many?", None)
    with Session(
        session.engine, cache=str(tmp_path / "cache"), reuse="approximate", warm_start=True, recompute_budget=0.999
    ) as full:
        full.cache.kv.costs = Costs(replace(CHEAP, chunks=(0.0, 0.01)))
        full.adapters.load("lora0", tmp_path / "lora0")
        started = ask(full, "Which one?", "lora0")
    assert started.reuse.from_model == started.reuse.recomputed == len(CONTEXT)
    assert started.text == ask(session, "Which one?", "lora0", reuse="exact").text


def test_kv_that_is_lost_is_computed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(session, "How many?", None)
    store = session.cache.store
    assert store is not None

    def gone(kv_space: KvSpace, match: Match) -> StoredFeed:
        raise KvLost(f"{match.length} tokens of {kv_space.model} are gone")

    monkeypatch.setattr(store, "load", gone)
    reply = ask(session, "Which one?", "lora0")
    assert (reply.reuse.miss, reply.reuse.from_model) == ("lost", 0)
    assert reply.text == ask(session, "Which one?", "lora0", reuse="off").text


def test_explain_shows_it(session: Session) -> None:
    ask(session, "How many?", None)
    explanation = session.explain(CONTEXT + "Which one?", adapter="lora0")
    assert explanation.from_model == len(CONTEXT) and explanation.parts[0].source == "model"
    assert f"warm start: KV of the model without the adapter, {explanation.recomputed} of" in str(explanation)


def test_its_key_space_is_another(session: Session) -> None:
    own = session.cache.kv_spaces.of(Request.of("abc", adapter="lora0"), 3)
    assert warm_started(own).digest != own.digest
    assert is_warm_started(warm_started(own).codec) and not is_warm_started(own.codec)
