"""Explaining: where KV comes from, why not more of it is reused, and what would help."""

from __future__ import annotations

import shutil
import unicodedata
from dataclasses import asdict
from pathlib import Path

import pytest

from rekindle import Session
from rekindle.cache.divergence import compare, find_volatile
from rekindle.cache.explain import Explanation
from rekindle.cache.miss_reason import common_content, content_of, differences
from rekindle.core.keys import KvSpace, Namespace
from rekindle.core.kv import Span
from rekindle.engine.fake import FakeEngine
from rekindle.store import disk, history
from rekindle.store.history import MAX_TOKENS
from rekindle.text.visible import find_only_difference, visible

RULES = "The keeper lights the lamp at dusk, and writes the hour into the book. " * 4


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "cache")


def ask(session: Session, text: str, **options: object) -> None:
    session.generate(text, max_tokens=2, **options)  # type: ignore[arg-type]
    session.flush()


def test_spans_tile_the_prompt_and_name_their_source(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        ask(session, RULES)
        session.cache.unpark()
        told = session.explain(RULES + "And now?")
        assert [p.start for p in told.parts] == [0, *(p.stop for p in told.parts[:-1])]
        assert told.parts[-1].stop == told.tokens and told.reused == len(RULES)
        *loads, computed = told.parts
        assert {p.source for p in loads} == {"memory"} and computed.source == "compute"
        assert {p.entry for p in loads} <= {row.name for row in session.cache.store.disk.entries()}
    with Session(FakeEngine(), cache=folder) as session:
        assert session.explain(RULES + "And now?").parts[0].source == "disk"


def test_explaining_changes_nothing(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        ask(session, RULES)
        before = session.explain(RULES + "x").parts
        assert session.explain(RULES + "x").parts == before and before[0].source == "engine"
        session.flush()
        assert len(history.last(session.cache.store.disk, 10)) == 1


def test_the_first_differing_token_is_shown_with_both_texts(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        ask(session, "You are kind. " + RULES)
        told = session.explain("You are\u00a0kind. " + RULES)
        assert told.reason.kind == "differs" and told.difference is not None
        assert told.difference.position == len("You are") and told.difference.before.endswith("You·are")
        assert "NO-BREAK SPACE" in told.difference.ours and told.difference.known.startswith("·kind.")
        assert told.difference.only_in == "Unicode form"  # a no-break space is a space in another form
        text = str(told)
        assert "first difference: token 7" in text and "NO-BREAK SPACE" in text
        assert "<pre>" in told._repr_html_() and "computed</span>" in told._repr_html_()


def test_a_difference_in_whitespace_or_form_only_is_called_that() -> None:
    composed, combining = (unicodedata.normalize(form, "café au lait") for form in ("NFC", "NFD"))
    assert find_only_difference(composed, combining) == "Unicode form"
    assert find_only_difference("a  b c", "a b c") == "whitespace" and find_only_difference("Rules", "rules") == "case"
    assert find_only_difference("something", "else") is None and find_only_difference("", "x") is None
    assert visible("a b\n\té") == "a·b⏎⇥é"
    assert "COMBINING ACUTE ACCENT" in visible(combining) and "ZERO WIDTH SPACE" in visible("\u200b")


def test_a_prompt_that_goes_on_from_all_that_is_known_ends_there(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        ask(session, RULES[:64])
        session.cache.unpark()
        known = session.explain(RULES[:64])
        assert known.reason.kind == "complete"
        fresh = session.explain("Nothing like it")
        assert fresh.reason.kind == "new" and fresh.reused == 0 and fresh.difference is None
        marked = session.explain("\ufeff" + RULES)  # a byte order mark: nothing is shared, and nobody can see why
        assert marked.reused == 0 and marked.difference is not None
        assert "ZERO WIDTH NO-BREAK SPACE" in marked.difference.ours
        assert marked.difference.only_in == "invisible characters"


def test_what_was_evicted_is_told_from_what_is_new(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        ask(session, RULES)
        session.cache.unpark()
        store = session.cache.store
        store.disk.remove(store.disk.entries())
        told = session.explain(RULES)
        assert told.reason.kind == "gone" and "evicted" in told.reason.sentence


def test_a_prompt_larger_than_the_disk_limit_says_so_and_its_beginning_is_reused(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_MIN_LOG_BYTES", 1 << 18)  # so that a prompt of a small model is large
    engine, limit = FakeEngine(), 600_000
    text = (RULES * 50)[: 8 * limit // 5 // engine.layout.token_bytes]
    assert len(text) * engine.layout.token_bytes > 1.5 * limit
    said = "larger than the disk limit"
    with Session(engine, cache=folder, disk_limit=str(limit)) as session:
        session.generate(text, max_tokens=2)
        session.flush()
        session.cache.unpark()
        reply = session.generate(text, max_tokens=2)
        assert 0 < reply.reuse.reused < len(text) / 1.5
        assert reply.reuse.miss == "limit" and "disk limit" in str(reply.reuse)
        session.flush()
        assert said in history.last(session.cache.store.disk, 1)[0].record["reason"]["sentence"]
        session.cache.unpark()
        assert said in str(session.explain(text))
        assert session.generate(RULES, max_tokens=2).reuse.miss != "limit"


def test_what_is_too_old_is_called_expired(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(FakeEngine(), cache=folder, ttl="1h") as session:
        ask(session, RULES)
        session.cache.unpark()
        store = session.cache.store
        now = store.disk.clock()
        monkeypatch.setattr(store.disk, "clock", lambda: now + 7200)
        monkeypatch.setattr(store.disk.room, "_clock", lambda: now + 7200)
        assert session.explain(RULES).reason.kind == "expired"


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"tenant": "bob"}, "tenant"),
        ({"cache_salt": "s"}, "cache_salt"),
        ({"deterministic": True}, "prefill step size (deterministic)"),
    ],
)
def test_what_is_known_elsewhere_is_named_by_what_differs(folder: str, changed: dict[str, object], word: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        ask(session, RULES)
    with Session(FakeEngine(), cache=folder, **changed) as session:  # type: ignore[arg-type]
        told = session.explain(RULES)
        assert told.reason.kind == "elsewhere" and told.reason.differs_in == (word,) and told.reused == 0


def test_quantized_kv_is_not_called_another_step_size(folder: str) -> None:
    with Session(FakeEngine(), cache=folder, reuse="quantized", codec="q8") as session:
        ask(session, RULES)
    with Session(FakeEngine(), cache=folder) as session:
        assert session.explain(RULES).reason.differs_in == ("reuse level (quantized)",)


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"weights": "x"}, "model"),
        ({"config": "x"}, "model"),
        ({"tokenizer": "x"}, "tokenizer"),
        ({"template": "x"}, "template"),
        ({"dtype": "x"}, "number type"),
        ({"rope": "x"}, "RoPE scaling"),
        ({"adapter": "x"}, "adapter"),
    ],
)
def test_every_way_in_which_kv_spaces_differ_has_a_word(changed: dict[str, str], word: str) -> None:
    engine = FakeEngine()
    own = engine.identity("plain")
    kv_space = KvSpace(Namespace(own.digest), engine.layout)
    other = {"tenant": "local", "salt": "", "adapter": None, "codec": "raw", "identity": "y"}
    fields = asdict(own)
    assert differences(kv_space, fields, {**other, "identity": own.digest}, fields) == []
    there = other | {k: v for k, v in changed.items() if k in other}
    its = fields | {k: v for k, v in changed.items() if k in fields}
    assert differences(kv_space, fields, there, its) == [word]
    assert differences(kv_space, fields, other, {}) == ["model"], "an identity that was never noted"


def test_another_template_is_named(folder: str, tiny_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text("utf-8").replace("assistant", "model"), "utf-8")
    with Session(tiny_folder, cache=folder) as session:
        session.chat(RULES, max_tokens=2)
    with Session(other, cache=folder) as session:
        told = session.explain([{"role": "user", "content": RULES}])
        assert told.reason.differs_in == ("template",) and told.reused == 0


@pytest.mark.measured_costs
def test_costs_are_remembered_so_that_the_first_plan_of_a_process_predicts(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        guessed = session.explain(RULES).cold_seconds
        assert guessed is not None and guessed > 0
        session.cache.costs.computed(Span(0, 100), 50.0)
        measured = session.explain(RULES).cold_seconds
        assert measured is not None and measured > 1000 * guessed
    with Session(FakeEngine(), cache=folder) as session:
        assert session.explain(RULES).cold_seconds == measured
    with Session(FakeEngine(seed=3), cache=folder) as session:
        assert session.explain(RULES).cold_seconds == guessed, "another model has costs of its own"


def test_another_model_is_named(folder: str) -> None:
    with Session(FakeEngine(seed=1), cache=folder) as session:
        ask(session, RULES)
    with Session(FakeEngine(seed=2), cache=folder) as session:
        told = session.explain(RULES)
        assert told.reason.differs_in == ("model",) and "fake-1" in told.reason.sentence


def test_a_reader_who_may_not_know_of_other_tenants_learns_nothing_of_them(folder: str) -> None:
    with Session(FakeEngine(), cache=folder, tenant="owner") as session:
        ask(session, RULES, tenant="alice")
        assert session.explain(RULES, tenant="bob").reason.kind == "new"
        assert session.explain(RULES).reason.kind == "elsewhere"


def test_a_salt_learns_nothing_of_another_and_the_owner_of_the_folder_does(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        ask(session, RULES, cache_salt="one")
        assert session.explain(RULES, cache_salt="other").reason.kind == "new"
        own = session.explain(RULES).reason
        assert own.kind == "elsewhere" and own.differs_in == ("cache_salt",)
        session.cache.owner_asks = False  # as a server does it
        assert session.explain(RULES).reason.kind == "new"
        ask(session, RULES)
        assert Explanation.from_dict(history.last(session.cache.store.disk)[0].record).reason.kind == "new"


def test_what_others_ask_does_not_drive_out_what_is_known_of_ones_own(folder: str) -> None:
    """The last requests are looked at: those of others do not count."""
    with Session(FakeEngine(seed=1), cache=folder) as session:
        ask(session, RULES, cache_salt="one")
    with Session(FakeEngine(seed=2), cache=folder) as session:
        before = session.explain(RULES, cache_salt="one").reason
        for number in range(65):
            ask(session, f"{number}", tenant="another")
        assert session.explain(RULES, cache_salt="one").reason == before and before.differs_in == ("model",)


def test_text_that_changes_with_every_request_is_named_with_what_moving_it_saves(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        for day in ("Monday", "Tuesday", "Friday"):
            ask(session, f"Today is {day}. {RULES}")
        told = session.explain(f"Today is Sunday. {RULES}")
        assert told.change is not None and told.change.requests == 3
        assert told.change.now in "·Sunday" and told.change.earlier[0] in "·Friday"
        assert told.change.shared_tokens >= len(RULES) - 8 and told.change.saved_seconds > 0
        assert "changes with every request" in str(told)
        assert session.explain(f"{RULES} Today is Sunday.").change is None


def test_questions_that_differ_at_the_end_are_no_volatile_prefix() -> None:
    rules = list(range(200))
    asked = [[*rules, *range(1000 + 50 * n, 1030 + 50 * n), 7, 8, 9] for n in range(4)]
    assert find_volatile(asked[0], asked[1:]) is None
    assert compare(rules, rules) is None and compare(rules, rules[:50]) is None


def test_what_changes_may_have_any_length() -> None:
    rest = list(range(500, 900))
    change = compare([1, 2, 3, *rest], [1, 2, 9, 9, 9, 9, *rest])
    assert change is not None and (change.start, change.stop, change.other_stop) == (2, 3, 6)
    assert change.shared == len(rest)


def test_the_last_request_is_explained_without_a_model(folder: str) -> None:
    with Session(FakeEngine(), cache=folder) as session:
        ask(session, RULES)
        ask(session, RULES + "More.")
        first, second = (Explanation.from_dict(a.record) for a in reversed(history.last(session.cache.store.disk, 2)))
    assert first.reason.kind == "new" and first.reused == 0 and first.first_token_seconds > 0
    assert second.reused == len(RULES) and second.at >= first.at
    assert Explanation.from_dict(second.as_dict()) == second


def test_history_is_bounded_and_goes_with_clear(folder: str) -> None:
    with Session(FakeEngine(), cache=folder, disk_limit="50MB") as session:
        store = session.cache.store
        kv_space = session.cache.kv_spaces.of(_request("x"), 1)
        identity = session.engine.identity("plain")
        for number in range(300):
            store.note(kv_space, identity, [number] * (MAX_TOKENS + 5), b"", {"number": number})
        kept = history.recent(store.disk, kv_space, 1000)
        assert len(kept) == 256 and kept[0].record["number"] == 299 and len(kept[0].tokens) == 4 * MAX_TOKENS
        store.clear()
        assert history.last(store.disk, 10) == []


def test_history_never_makes_a_full_cache_exceed_its_limit(folder: str) -> None:
    limit = 4_000_000
    with Session(FakeEngine(), cache=folder, disk_limit=limit, memory_limit=0) as session:
        store, kv_space = session.cache.store, session.cache.kv_spaces.of(_request("x"), 1)
        for number in range(200):
            store.note(kv_space, session.engine.identity("plain"), [number] * MAX_TOKENS, b"", {"n": "x" * 4000})
            size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
            assert size <= limit
        assert history.last(store.disk, 1)


def test_content_is_compared_whatever_the_template() -> None:
    one = content_of(_request([{"role": "system", "content": "a" * 300}, {"role": "user", "content": "b"}]).prompt)
    two = content_of(_request([{"role": "system", "content": "a" * 300}, {"role": "user", "content": "c"}]).prompt)
    assert common_content(one, two) == 2 and common_content(one, one) == 3
    assert content_of((1, 2, 3)) == b"" and common_content(content_of("x"), content_of("y")) == 0


def _request(prompt: object):
    from rekindle.core.request import Request

    return Request.of(prompt)  # type: ignore[arg-type]
