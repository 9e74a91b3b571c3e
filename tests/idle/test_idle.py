"""Working ahead: in its order, within a token of being stopped, within its budget, from nothing but the past."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("torch")  # makes the tiny embedder

from rekindle import Session
from rekindle.core.reply import Answer
from rekindle.engine.base import Logits, Row
from rekindle.errors import InvalidSetting
from rekindle.idle import worker
from rekindle.idle.idle import Idle, IdleOptions
from rekindle.idle.log import IdleAction, prediction_yield, recent_actions, summarize_actions
from rekindle.idle.worker import CpuLoad, IdleConditions, on_mains
from tests.idle.idling import (
    DETAILED,
    DOCUMENTS,
    FROM_HISTORY,
    GENERAL,
    SAID,
    Scripted,
    TerseScripted,
    free_words,
    predicted,
    session,
)
from tests.server.soak import tiny_embedder

__all__ = ["free_words"]  # a fixture
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("free_words")]

FERRY = "When does the ferry leave?"
OVEN = "Where does the oven stand?"
OPTIONS = IdleOptions(stride=2, settle_seconds=0.0, max_tokens=6)
TERSE = IdleOptions(stride=2, settle_seconds=0.0, max_tokens=6, min_tokens=4)  # answers that end: given as they are


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def own(tmp_path: Path, embedder: str) -> Iterator[Session]:
    with session(tmp_path, embedder) as made:
        yield made


def options(**more: Any) -> IdleOptions:
    return IdleOptions(**{"stride": 2, "settle_seconds": 0.0, "max_tokens": 6, **more})


def actions(done: Sequence[IdleAction]) -> list[str]:
    return list(dict.fromkeys(did.action for did in done))


def foreseen(own: Session) -> list[tuple[str, str]]:
    return [(entry.origin, entry.question) for entry in own.answers.bank().entries() if entry.origin != "user"]


def ask(own: Session, question: str, **more: Any) -> str:
    text = own.ask(question, max_tokens=6, **more).text
    own.flush()
    return text


def test_work_is_done_in_its_order_and_written_down(own: Session) -> None:
    ask(own, FERRY)
    told: list[IdleAction] = []
    done = Idle(own, options(seconds_per_hit=0.0), report=told.append).run()  # one round
    assert told == done and all(did.finished for did in done)
    assert actions(done) == ["abstract", "merge", "guess-abstract", "judge", "answer", "guess-history", "warm"]
    assert [did.what for did in done if did.action == "abstract"] == list(DOCUMENTS)
    library = own.knowledge.library()
    assert {way.action: way.count for way in summarize_actions(library)} == {
        action: sum(did.action == action for did in done) for action in actions(done)
    }
    assert [entry.action for entry in recent_actions(library, 100)][::-1] == [did.action for did in done]
    assert ("abstract", "Where does the lamp burn oil?") in foreseen(own)
    assert all(entry.state == "fresh" for entry in own.answers.bank().entries())


def test_a_second_run_finds_nothing_left_to_do(own: Session) -> None:
    ask(own, FERRY)
    idle = Idle(own, OPTIONS)
    assert idle.run() and idle.run() == []
    ask(own, OVEN)
    assert "guess-history" in actions(idle.run())


def test_questions_without_an_answer_in_the_documents_are_dropped(own: Session) -> None:
    ask(own, FERRY)
    done = Idle(own, OPTIONS).predict_from_history(2)
    assert actions(done) == ["guess-history", "judge", "answer"]
    assert foreseen(own) == [("history", "What does a ticket to Ormund cost?")]  # no zebras


def test_a_question_that_is_known_is_not_foreseen(tmp_path: Path, embedder: str) -> None:
    engine = Scripted({**SAID, FROM_HISTORY: f"1. {FERRY}\n2. Where does the oven stand?"})
    with session(tmp_path, embedder, engine) as own:
        ask(own, FERRY)
        Idle(own, OPTIONS).predict_from_history(2)
        assert foreseen(own) == [("history", OVEN)]


def test_history_is_looked_at_again_only_after_a_new_question(own: Session) -> None:
    idle = Idle(own, OPTIONS)
    assert idle.predict_from_history(2) == []
    ask(own, FERRY)
    assert idle.predict_from_history(2) and Idle(own, OPTIONS).predict_from_history(2) == []
    ask(own, OVEN)
    assert actions(idle.predict_from_history(2))[0] == "guess-history"


@pytest.mark.parametrize("later", [[OVEN, "Who keeps the lighthouse?"], ["Who keeps the lighthouse?", OVEN], []])
def test_later_questions_have_no_part_in_what_is_foreseen(tmp_path: Path, embedder: str, later: list[str]) -> None:
    engine = Scripted()
    with session(tmp_path, embedder, engine) as own:
        ask(own, FERRY)
        idle = Idle(own, OPTIONS)
        idle.abstracts()
        done = [*idle.predict_from_abstracts(2), *idle.predict_from_history(2)]
        before, prompts = foreseen(own), list(engine.asked)
        for question in later:
            ask(own, question)
        assert foreseen(own) == before  # asking adds nothing to it
        assert before == [
            ("abstract", "Where does the lamp burn oil?"),
            ("abstract", "When does the ferry to Ormund leave?"),
            ("history", "What does a ticket to Ormund cost?"),
        ]
        assert all(question not in prompt for question in later for prompt in prompts)
        assert sum(did.action == "answer" for did in done) == 3


def test_foreseen_questions_are_no_history_and_their_passages_are_not_counted_as_used(own: Session) -> None:
    idle = Idle(own, OPTIONS)
    idle.run()
    own.flush()
    assert foreseen(own) and own.answers.bank().history(10) == []
    assert own.knowledge.library().top_retrieved(10) == []
    assert idle.predict_from_history(2) == []
    ask(own, FERRY)
    assert own.knowledge.library().top_retrieved(10)


def test_each_round_other_documents_have_their_turn(own: Session) -> None:
    idle = Idle(own, OPTIONS)
    idle.abstracts()
    batches = [of._preparer.sources.next_abstracts(1) for of in (idle, Idle(own, OPTIONS), idle, idle)]
    assert [batch.documents for batch in batches] == [(1,), (2,), (3,), (1,)]
    assert [batch.trips for batch in batches] == [0, 0, 0, 1]


def assert_read(answer: Answer, passages: int) -> None:
    """The model knew the first so many passages, and no more."""
    assert len(answer.sources) > passages
    lengths = [len(source.text) for source in answer.sources]
    assert sum(lengths[:passages]) < answer.reuse.reused
    assert answer.reuse.computed > sum(lengths[passages:])


def test_with_a_high_threshold_questions_are_only_read_and_answered_when_it_falls(
    tmp_path: Path, embedder: str
) -> None:
    five = options(min_tokens=4, top_k=5)
    with session(tmp_path, embedder, answers="direct", similarity_threshold=0.95) as own:
        assert actions(predicted(Idle(own, five), 1)) == ["prefill"]
        (entry,) = own.answers.bank().entries()
        assert entry.state == "open" and entry.origin == "abstract" and entry.asked is None
        assert Idle(own, five).convert() == []  # its KV is there
        assert_read(own.ask(entry.question, max_tokens=6, top_k=5, answers="off"), passages=2)
    with session(tmp_path, embedder, TerseScripted(), answers="direct", similarity_threshold=0.8) as own:
        (did,) = Idle(own, five).convert()
        assert did.action == "decode" and did.answer == entry.id
        (answered,) = own.answers.bank().entries(where="origin='abstract'")
        assert answered.state == "fresh" and answered.answer is not None
        given = own.ask(entry.question, max_tokens=6, top_k=5, min_tokens=4)
        assert given.stored is not None and given.stored.way == "direct" and given.text == answered.answer.text


def test_the_published_rule_reads_all_of_a_question(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder, answers="direct", similarity_threshold=0.95) as own:
        (did,) = predicted(Idle(own, options(rule="percache")), 1)
        assert did.action == "prefill"
        assert own.ask(did.what, max_tokens=6, answers="off").reuse.computed <= 1


def test_kv_that_is_gone_is_computed_again_while_there_is_room(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder) as own:
        assert len(predicted(Idle(own, options(top_k=5)), 2)) == 2
    library = tmp_path / "cache-library"
    with session(tmp_path / "new", embedder, library=library) as own:
        done = Idle(own, options(top_k=5)).convert()
        assert [did.action for did in done] == ["restore", "restore"]
        assert Idle(own, options(top_k=5)).convert() == []
        assert_read(own.ask(done[0].what, max_tokens=6, top_k=5), passages=2)
    with session(tmp_path / "asked", embedder, library=library) as own:
        Idle(own, options(top_k=5)).convert()  # of what a user asked, all of it
        assert own.ask(done[0].what, max_tokens=6, top_k=5).reuse.computed <= 1
    with session(tmp_path / "full", embedder, library=library, disk_limit="1MB") as own:
        assert Idle(own, options(top_k=5)).convert() == [] and Idle(own, options(top_k=5)).warm() == []


def test_a_warm_passage_is_reused_by_whatever_question_finds_it_first(own: Session) -> None:
    done = Idle(own, OPTIONS).warm()
    assert [did.what for did in done] == ["the instructions", *(f"{name} 1" for name in DOCUMENTS)]
    assert Idle(own, OPTIONS).warm() == []
    answer = own.ask("oven brewery", max_tokens=1, retrieval="bm25", top_k=2)
    assert answer.reuse.reused > len(DOCUMENTS["bread"])
    assert Idle(own, options(warm_passages=0)).warm() == []


def test_answers_are_found_anew_when_their_documents_change(own: Session) -> None:
    old = ask(own, FERRY)
    own.ingest(documents=[{"text": "The ferry to Ormund leaves on Sundays.", "source": "ferry", "title": "ferry"}])
    done = Idle(own, OPTIONS).refresh()
    assert [(did.action, did.what) for did in done] == [("refresh", FERRY)]
    (entry,) = own.answers.bank().entries()
    assert entry.state == "fresh" and entry.origin == "user" and entry.answer is not None
    assert entry.answer.text == own.ask(FERRY, max_tokens=6, answers="off").text != old
    assert Idle(own, OPTIONS).refresh() == []


def test_a_question_that_was_given_anothers_answer_gets_its_own(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder, TerseScripted(), answers="direct", similarity_threshold=0.7) as own:
        ask(own, FERRY, min_tokens=4)
        asked = "When does the ferry leave, please?"
        given = own.ask(asked, max_tokens=6, min_tokens=4)
        own.flush()
        assert given.stored is not None and given.stored.question == FERRY
        before = [entry.asked for entry in own.answers.bank().history(10)]
        (did,) = Idle(own, TERSE).settle()
        assert did.action == "true-answer" and did.what == asked
        (entry,) = own.answers.bank().entries(where=f"question='{asked}'")
        assert entry.state == "fresh" and entry.origin == "user" and entry.answer is not None
        assert [entry.asked for entry in own.answers.bank().history(10)] == before
        assert Idle(own, TERSE).settle() == []


def test_what_is_foreseen_is_asked_as_users_ask(own: Session) -> None:
    idle = Idle(own, OPTIONS)
    assert idle._preparer.terms() == [OPTIONS.expected_terms]
    for _ in range(2):
        ask(own, FERRY, instructions="Speak like a sailor.", stop=["!"], top_k=1)
    (learnt,) = idle._preparer.terms()
    assert learnt.before[0].content == "Speak like a sailor." and (learnt.stop, learnt.top_k) == (("!",), 1)
    idle.run()
    (asked,) = {entry.terms for entry in own.answers.bank().entries()}
    assert [digest for digest, _, _ in own.answers.bank().terms()] == [asked]


def test_seldom_terms_and_those_of_another_model_are_not_prepared_for(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder) as own:
        for number, times in enumerate((3, 3, 1)):
            for _ in range(times):
                ask(own, FERRY, instructions=f"You are number {number}.")
        said = [terms.before[0].content for terms in Idle(own, OPTIONS)._preparer.terms()]
        assert sorted(said) == ["You are number 0.", "You are number 1."]
    with session(tmp_path, embedder, Scripted(seed=1)) as other:
        assert Idle(other, OPTIONS)._preparer.terms() == [OPTIONS.expected_terms]


def test_an_answer_is_refreshed_under_its_own_terms(tmp_path: Path, embedder: str) -> None:
    how: dict[str, Any] = {"instructions": "Speak like a sailor.", "min_tokens": 4, "top_k": 1, "retrieval": "bm25"}
    with session(tmp_path, embedder, TerseScripted(), answers="direct") as own:
        ask(own, FERRY, **how)
        own.ingest(documents=[{"text": "The ferry leaves on Fridays now.", "source": "ferry", "title": "ferry"}])
        assert [did.what for did in Idle(own, OPTIONS).refresh()] == [FERRY]
        own.flush()
        again = own.ask(FERRY, max_tokens=6, **how)
        assert again.stored is not None and again.stored.way == "direct"


def test_forgetting_a_document_removes_what_was_foreseen_from_it(own: Session) -> None:
    own.engine.said |= {GENERAL: "Nothing.", DETAILED: "1. Where does the lamp burn oil?"}  # type: ignore[attr-defined]
    ask(own, FERRY, top_k=1)
    Idle(own, options(stride=1)).run()
    own.flush()
    assert [question for origin, question in foreseen(own) if origin == "history"]
    own.forget("ferry")
    left = [question for _, question in foreseen(own)]
    assert all("ferry" not in question and "ticket" not in question for question in left)
    assert left == ["Where does the lamp burn oil?"]
    with own.knowledge.library().reading() as connection:
        (count,) = connection.execute("SELECT count(*) FROM abstracts").fetchone()
    assert count == 2


class Stopping(Scripted):
    """Sets an event in its step of that number."""

    def __init__(self, event: threading.Event, step: int) -> None:
        super().__init__()
        self.event, self.at, self.steps = event, step, 0

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.steps += 1
        if self.steps == self.at:
            self.event.set()
        return super().step(rows, cancelled)


@pytest.mark.parametrize("step", [1, 7, 40])
def test_it_stops_within_a_token(tmp_path: Path, embedder: str, step: int) -> None:
    stop = threading.Event()
    engine = Stopping(stop, step)
    with session(tmp_path, embedder, engine) as own:
        done = Idle(own, OPTIONS).run(stop)
        assert engine.steps == step  # that one was the last
        assert not done[-1].finished and all(did.finished for did in done[:-1])
        assert done[-1].answer is None and recent_actions(own.knowledge.library(), 1)[0].action == done[-1].action
        stop.clear()
        assert Idle(own, OPTIONS).run() and ask(own, FERRY)


def test_nothing_is_begun_once_a_budget_is_spent(own: Session) -> None:
    idle = Idle(own, options(budget_seconds=1e-9))
    (only,) = idle.run()
    assert not only.finished and idle.spent_seconds == only.seconds > 1e-9
    assert idle.run() == [] and idle.why_nothing() == "the budget is spent."
    assert Idle(own, options(budget_seconds=0.0)).run() == []


def test_a_budget_of_seconds_ends_an_action_in_its_middle(own: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(worker.time, "perf_counter", lambda: float(next(clock)))
    done = Idle(own, options(budget_seconds=5.0)).run()
    assert not done[-1].finished and len(done) == 1


def test_unknown_sources_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="dreams"):
        options(sources=("dreams",))


def test_load_and_battery_are_in_the_way(own: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "on_mains", lambda: False)
    monkeypatch.setattr(CpuLoad, "others", lambda self: 0.0)
    idle = Idle(own, options(conditions=IdleConditions()))
    assert idle.run() == [] and "battery" in str(idle.blocked_by)
    monkeypatch.setattr(worker, "on_mains", lambda: True)
    monkeypatch.setattr(CpuLoad, "others", lambda self: 0.9)
    idle = Idle(own, options(conditions=IdleConditions()))
    assert idle.run() == [] and "90%" in str(idle.blocked_by)
    assert Idle(own, options(conditions=IdleConditions(max_load=1.0), rounds=0)).run()


def test_with_answers_off_only_what_questions_begin_with_is_computed(tmp_path: Path, embedder: str) -> None:
    with session(tmp_path, embedder, answers="off") as own:
        assert actions(Idle(own, OPTIONS).run()) == ["warm"]
        assert own.answers.bank().entries() == []
    with session(tmp_path / "none", embedder, answers="off", cache="off", library=tmp_path / "library") as own:
        assert Idle(own, OPTIONS).run() == []


def test_a_model_too_small_to_ask_warms_passages_instead_and_says_so(tmp_path: Path, embedder: str) -> None:
    engine = Scripted()
    engine.parameters = 135_000_000
    with session(tmp_path, embedder, engine) as own:
        idle = Idle(own, OPTIONS)
        assert actions(idle.run()) == ["warm"] and engine.asked == []
        why = "(135 million parameters) is too small to ask, which takes 500 million parameters"
        assert why in str(idle.why_no_questions) and why in idle.why_nothing()
        ask(own, FERRY)
        own.ingest(documents=[{"text": "The ferry to Ormund leaves on Sundays.", "source": "ferry", "title": "ferry"}])
        assert actions(idle.run())[:1] == ["refresh"]  # what was asked stays answered
        assert foreseen(own) == []


def test_documents_that_keep_coming_are_not_summed_up_yet(own: Session) -> None:
    idle = Idle(own, options(settle_seconds=3600.0))
    assert idle.abstracts() == []
    assert idle.why_nothing() == "documents came less than 3600 s ago. Wait, or use --idle-settle 0s."
    assert [did.what for did in Idle(own, OPTIONS).abstracts(2)] == ["lamp", "ferry"]
    assert [did.what for did in Idle(own, OPTIONS).abstracts()] == ["bread", "the library"]


def test_tenants_are_worked_for_separately(own: Session) -> None:
    assert Idle(own, OPTIONS, tenant="other").run() == []
    own.ingest(documents=["The secret lamp is green."], tenant="other")
    own.engine.said[DETAILED] = "1. What colour is the secret lamp?"  # type: ignore[attr-defined]
    assert len(predicted(Idle(own, OPTIONS, tenant="other"), 1)) == 1
    assert own.answers.bank().entries() == [] and len(own.answers.bank("other").entries()) == 1


def test_engines_know_their_size(tiny_folder: Path) -> None:
    with Session(tiny_folder, cache="off", parallel=2) as shared, Session(tiny_folder, cache="off") as plain:
        model = plain.engine.model  # type: ignore[attr-defined]
        assert shared.engine.parameters == plain.engine.parameters == sum(w.numel() for w in model.parameters())
        assert (
            shared.engine.attention
            == plain.engine.attention
            == model.config.num_hidden_layers * model.config.hidden_size
        )


def test_abstracts_that_had_to_wait_are_guessed_from_later(own: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = Idle(own, options(settle_seconds=3600.0))
    assert "abstract" not in actions(idle.run())
    idle.options = OPTIONS
    assert actions(idle.run())[:3] == ["abstract", "merge", "guess-abstract"]
    assert idle.run() == []


def test_a_library_whose_documents_are_gone_leaves_nothing_to_do(own: Session) -> None:
    ask(own, FERRY)
    own.forget(everything=True)
    assert Idle(own, OPTIONS).run() == []  # the instructions were warm


def test_the_machine_tells_whether_it_has_mains_and_how_busy_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, expected in ((None, None), (SimpleNamespace(power_plugged=False), False)):
        monkeypatch.setattr(psutil, "sensors_battery", lambda told=told: told, raising=False)
        assert on_mains() is expected
    monkeypatch.setattr(psutil, "getloadavg", lambda: (3.0, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    load = CpuLoad()
    assert load.others() == 0.75
    later = load.others()
    assert later is None or later >= 0.0


@pytest.mark.parametrize("error", [PermissionError("denied"), NotImplementedError(), psutil.AccessDenied(1)])
def test_a_system_that_denies_its_battery_and_load_hinders_nothing(
    own: Session, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def deny() -> None:
        raise error

    for name in ("sensors_battery", "cpu_times", "getloadavg"):
        monkeypatch.setattr(psutil, name, deny, raising=False)
    assert on_mains() is None and CpuLoad().others() is None
    done = Idle(own, options(sources=("abstract",), warm_passages=0, conditions=IdleConditions())).run()
    assert "answer" in actions(done)


def test_predicting_goes_on_while_it_finds_questions_and_they_are_used(tmp_path: Path, embedder: str) -> None:
    inventive = [f"1. {question}" for question in (FERRY, OVEN, "Who keeps the lighthouse?", "What bakes Tomas?")]
    with session(tmp_path, embedder, Scripted({**SAID, GENERAL: "Nothing.", DETAILED: inventive})) as own:

        def prepared(seconds_per_hit: float) -> list[str]:
            given = options(stride=1, sources=("abstract",), warm_passages=0, seconds_per_hit=seconds_per_hit)
            return [did.what for did in Idle(own, given).run() if did.action == "answer"]

        assert prepared(0.0) == [FERRY]
        assert prepared(3600.0) == [OVEN, "Who keeps the lighthouse?", "What bakes Tomas?"]
        patient = Idle(own, options(stride=1, sources=("abstract",), warm_passages=0))
        assert patient.run() == [], "nothing is new, and the model is not asked again"
        impatient = Idle(own, options(sources=("abstract",), warm_passages=0, seconds_per_hit=0.0))
        assert impatient.run() == [] and "more would not pay" in impatient.why_nothing()
        assert "0 times" in impatient.why_nothing()
        (entry, *_) = own.answers.bank().entries(where="origin='abstract'")
        own.answers.bank().record_use(entry.id, 1.0)
        assert prediction_yield(own.knowledge.library())[0] == 1
