"""The level `quantized`: KV is kept quantized, every reply that used it says so, and nothing exact ever meets it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.cache.coders import default_coder, remember_coder
from rekindle.cache.cost import Costs
from rekindle.codec.coder import Coder
from rekindle.codec.quantizer import BitPlan
from rekindle.core.kv import Span
from rekindle.engine.fake import FakeEngine
from rekindle.errors import InvalidSetting
from tests.laws.test_plan_laws import PRIOR
from tests.lora import fake_pairs, save_lora
from tests.unmeasured_costs import UnmeasuredCosts

pytestmark = pytest.mark.thorough

PROMPT = "Once there was a harbour with three cranes, and each of them had a name of its own. " * 3


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield save_lora(tmp_path / "lora", fake_pairs(1))


def opened(tmp_path: Path, **settings: Any) -> Session:
    """A session with nothing but the folder: what it knows, it reads."""
    return Session(FakeEngine(), cache=str(tmp_path / "cache"), memory_limit="0", **settings)


def codings(session: Session) -> set[str]:
    session.flush()
    assert session.cache.store is not None
    return {row.coding for row in session.cache.store.disk.entries()}


def ask(session: Session, **options: Any) -> Any:
    session.flush()
    session.cache.kv.costs = UnmeasuredCosts()  # whatever is known is reused
    return session.generate(PROMPT, max_tokens=4, **options).reuse


def test_kv_is_kept_quantized_and_the_reply_says_so(tmp_path: Path) -> None:
    with opened(tmp_path, reuse="quantized") as session:
        first = ask(session)
        assert (first.level, first.quantized) == ("exact", 0)  # computed: nothing was lost yet
        assert codings(session) == {"quantized"}
        again = ask(session)
        assert again.level == "quantized"
        assert again.quantized == again.disk > 0
        assert "quantized" in session.generate(PROMPT, max_tokens=1).summary()


def test_exact_requests_never_meet_what_was_quantized(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        ask(session, reuse="quantized")
        assert codings(session) == {"quantized"}
        assert ask(session).reused == 0
        assert ask(session).level == "exact"


def test_near_requests_use_what_is_exact_and_say_that(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        ask(session)
        found = ask(session, reuse="quantized")
        assert (found.level, found.quantized) == ("exact", 0)
        assert found.disk > 0


@pytest.mark.parametrize("level", ["exact", "quantized"])
def test_an_adapter_is_kept_as_a_difference(tmp_path: Path, folder: Path, level: Any) -> None:
    with opened(tmp_path, reuse=level) as session:
        session.adapters.load("writer", folder)
        ask(session)
        ask(session, adapter="writer")
        found = ask(session, adapter="writer")
        assert found.level == level
        assert found.disk > 0
        assert codings(session) == ({"raw", "exact"} if level == "exact" else {"quantized"})
        store = session.cache.store
        assert store is not None
        with store.disk.database.reading() as connection:
            assert connection.execute("SELECT count(*) FROM delta_bases").fetchone() == (1,)


def test_exact_answers_with_an_adapter_are_those_without_a_cache(tmp_path: Path, folder: Path) -> None:
    with Session(FakeEngine(), cache="off") as alone:
        alone.adapters.load("writer", folder)
        right = alone.generate(PROMPT, max_tokens=24, adapter="writer").text
    with opened(tmp_path) as session:
        session.adapters.load("writer", folder)
        session.generate(PROMPT, max_tokens=24)
        for _ in range(2):
            session.flush()
            session.cache.kv.costs = UnmeasuredCosts()
            assert session.generate(PROMPT, max_tokens=24, adapter="writer").text == right


@pytest.mark.parametrize(
    ("codec", "level", "expected"),
    [
        ("raw", "quantized", {"raw"}),
        ("raw", "exact", {"raw"}),
        ("q4", "quantized", {"quantized"}),
        ("q4", "exact", {"raw", "exact"}),
        ("auto", "approximate", {"raw", "exact"}),
        ("q8", "approximate", {"quantized"}),
    ],
)
def test_the_codec_is_what_was_chosen(tmp_path: Path, folder: Path, codec: Any, level: Any, expected: set[str]) -> None:
    with opened(tmp_path, codec=codec, reuse=level) as session:
        session.adapters.load("writer", folder)
        ask(session)
        ask(session, adapter="writer")
        assert codings(session) == expected


def test_a_context_that_stays_in_the_engine_remembers_what_was_quantized(tmp_path: Path) -> None:
    with opened(tmp_path, reuse="quantized") as session:
        ask(session)
    with Session(FakeEngine(), cache=str(tmp_path / "cache"), reuse="quantized") as session:
        loaded = ask(session)
        stayed = ask(session)
        assert loaded.quantized > 0
        assert stayed.engine > 0
        assert (stayed.level, stayed.quantized) == ("quantized", loaded.quantized)


def test_near_and_deterministic_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="deterministic"):
        opened(tmp_path, reuse="quantized", deterministic=True)
    with opened(tmp_path, deterministic=True) as session:  # per request, the promise of the session counts
        ask(session, reuse="quantized")
        assert "quantized" not in codings(session)


@pytest.mark.measured_costs
def test_a_difference_that_takes_longer_than_computing_is_not_loaded(tmp_path: Path, folder: Path) -> None:
    with opened(tmp_path) as session:
        session.adapters.load("writer", folder)
        ask(session)
        ask(session, adapter="writer")
        session.flush()
        costs = session.cache.kv.costs = Costs(PRIOR)
        for size_bytes in [1 << binary for binary in range(10, 30)] * 3:
            costs.computed(Span(0, 256), 1e-2)
            costs.loaded("coded", size_bytes, 10.0)
        slow = session.generate(PROMPT, max_tokens=1, adapter="writer").reuse
        assert (slow.miss, slow.reused) == ("slower", 0)
        assert session.generate(PROMPT, max_tokens=1).reuse.disk > 0  # what is not coded is


@pytest.mark.measured_costs
def test_a_miss_says_what_loading_and_computing_take(tmp_path: Path) -> None:
    with opened(tmp_path, reuse="quantized") as session:
        ask(session)
        session.flush()
        costs = session.cache.kv.costs = Costs(PRIOR)
        for _ in range(3):
            costs.computed(Span(0, 256), 0.025)
            costs.loaded("coded", len(PROMPT) * session.engine.layout.token_bytes, 1000.0)
        assert session.generate(PROMPT, max_tokens=1).reuse.miss == "slower"
        said = session.explain(PROMPT).reason
        assert said.kind == "slower" and "s, and 25 ms computed" in said.sentence


def test_replies_say_whether_the_bits_were_calibrated(tmp_path: Path, folder: Path) -> None:
    engine, layers = FakeEngine(), len(FakeEngine().layout.layers)
    usual, measured = default_coder(layers), BitPlan.uniform(layers, 5.0)

    def said(name: str, **settings: Any) -> tuple[bool | None, bool | None, bool | None, bool]:
        """Of the first reply, of the second, of the second with an adapter; whether the line for people names it."""
        with opened(tmp_path / name, reuse="quantized", **settings) as session:
            session.adapters.load("writer", folder)
            first, second = ask(session), ask(session)
            ask(session, adapter="writer")
            adapted = ask(session, adapter="writer")
            return first.calibrated_bits, second.calibrated_bits, adapted.calibrated_bits, "calibrate" in str(second)

    assert said("nobody") == (None, False, False, True)
    remember_coder(engine, Coder(measured, usual.delta))
    assert said("alone") == (None, True, False, False)
    remember_coder(engine, Coder(measured, measured))
    assert said("adapters") == (None, True, True, False)
    assert said("chosen", codec="q4") == (None, False, True, True)
    with opened(tmp_path / "exact") as session:
        ask(session)
        assert ask(session).calibrated_bits is None
