"""Working ahead in a server: for everybody who has documents, and never while somebody asks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

pytest.importorskip("torch")  # makes the tiny embedder

from rekindle.answers.bank_rows import BankEntry
from rekindle.cache.coders import recall_coder
from rekindle.core.request import Request
from rekindle.idle.idle import Idle, IdleOptions
from rekindle.idle.log import recent_actions
from rekindle.idle.worker import IdleConditions
from rekindle.server.auth import ApiKeys
from tests.idle.idling import DETAILED, FROM_HISTORY, SAID, TerseScripted, free_words
from tests.server.conftest import Serve
from tests.server.serving import ALICE, BOB, Asking, Gated, Served, eventually
from tests.server.soak import tiny_embedder

__all__ = ["free_words"]  # a fixture
OWN = "/v1/rekindle"
TEXT = "The lamp of the lighthouse is lit at dusk by the keeper, who carries the oil up two hundred steps."
AHEAD = IdleOptions(stride=1, settle_seconds=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


def _asking() -> Gated:
    """An engine that is large enough to ask questions, though none that documents answer."""
    engine = Gated()
    engine.parameters = 10**9
    return engine


@pytest.fixture
def start(serve: Serve, embedder: str) -> Any:
    def started(ahead: IdleOptions | None = AHEAD, quiet: float = 0.0) -> Served:
        keys = ApiKeys([f"alice={ALICE}", f"bob={BOB}"])
        session = {"embedder": embedder, "answers": "verified"}
        served = serve(_asking(), session, keys=keys, ahead=ahead, quiet=f"{quiet}s")
        for key in (ALICE, BOB):
            assert served.post(f"{OWN}/documents", key, documents=[{"text": TEXT}]).status_code == 200
        return served

    return started


def work(served: Served, tenant: str) -> int:
    with served.session.knowledge.library(tenant).reading() as connection:
        return int(connection.execute("SELECT count(*) FROM work").fetchone()[0])


def test_it_works_ahead_for_everybody_with_documents_also_after_a_restart(
    start: Any, serve: Serve, embedder: str
) -> None:
    served = start()
    eventually(lambda: work(served, "alice") > 0 and work(served, "bob") > 0)  # nobody asked anything yet
    served.session.knowledge.ingest(documents=[TEXT.replace("lamp", "fire")], tenant="carol")  # not through the server
    served.chat("hello", ALICE)  # after a request it looks who has documents
    eventually(lambda: work(served, "carol") > 0)
    again = serve(_asking(), {"embedder": embedder, "answers": "verified"}, ahead=AHEAD, quiet="0s")
    with again.session.knowledge.library("bob").writing() as connection:
        connection.execute("DELETE FROM work")
        connection.execute("DELETE FROM answers")
        connection.execute("DELETE FROM about WHERE name GLOB 'foreseen-*'")
    again.chat("hello", ALICE)
    eventually(lambda: work(again, "bob") > 0)


def test_a_restart_does_not_predict_the_same_again(start: Any) -> None:
    first = start()
    eventually(lambda: work(first, "alice") > 0)
    idler = first.service.idle_thread
    assert idler is not None
    idler.close()
    idle = Idle(first.session, AHEAD, "alice", "")
    idle.run()
    before = work(first, "alice")
    assert Idle(first.session, AHEAD, "alice", "").run() == [] and work(first, "alice") == before


def test_without_the_flag_nothing_is_done(start: Any) -> None:
    served = start(None)
    assert served.service.idle_thread is None
    served.chat("hello", ALICE)
    assert work(served, "alice") == 0


def test_every_option_of_idle_work_is_a_setting_of_the_server(serve: Serve) -> None:
    given = {
        "idle_stride": 2, "idle_rounds": 3, "idle_per_hit": "1m", "idle_sources": ("history", "passage"),
        "idle_settle": "5s", "idle_passages": 4, "idle_seconds": "2m", "idle_load": 0.25,
    }  # fmt: skip
    idler = serve(idle=True, quiet="1h", **given).service.idle_thread
    assert idler is not None
    assert idler._options == IdleOptions(
        stride=2,
        rounds=3,
        seconds_per_hit=60.0,
        sources=("history",),
        settle_seconds=5.0,
        warm_passages=4,
        budget_seconds=120.0,
        conditions=IdleConditions(max_load=0.25),
    )


def test_the_settings_say_whether_it_works_and_on_battery(serve: Serve) -> None:
    idler = serve(idle=True, on_battery=True, quiet="1h").service.idle_thread
    assert idler is not None and idler._options.conditions == IdleConditions(on_battery=True)
    assert idler._options.calibrate_seconds == 0
    idler = serve(idle=True, idle_calibrate="10m", quiet="1h").service.idle_thread
    assert idler is not None and idler._options.calibrate_seconds == 600


def test_a_server_calibrates_while_it_is_idle_if_it_may(serve: Serve) -> None:
    served = serve(Gated(), {"reuse": "quantized"}, ahead=IdleOptions(calibrate_seconds=600.0), quiet="0s")
    served.chat("hello")
    eventually(lambda: recall_coder(served.session.engine) is not None)


def test_a_request_stops_it_before_it_takes_its_place_and_is_answered(start: Any) -> None:
    served = start()
    engine, idler = served.engine, served.service.idle_thread
    assert idler is not None
    engine.entered.clear()
    engine.go.clear()
    request = Request("hello", tenant="alice")
    idler.arrive(request)
    idler.leave()
    eventually(engine.entered.is_set)  # it waits in the engine
    steps = engine.steps
    asking = Asking(lambda: served.chat("hello", ALICE))
    eventually(lambda: work(served, "alice") == 1)  # it stopped, and says so
    (stopped,) = recent_actions(served.session.knowledge.library("alice"), 1)
    assert stopped.tokens == 0
    assert engine.steps == steps  # not one was finished
    engine.go.set()
    assert asking.result()["choices"]
    eventually(lambda: work(served, "alice") > 1)  # and it goes on when that is answered


def test_nothing_is_done_before_it_was_quiet_for_long_enough(start: Any) -> None:
    served = start(quiet=3600.0)
    served.chat("hello", ALICE)
    assert work(served, "alice") == 0


def test_a_hindrance_is_heeded(start: Any) -> None:
    served = start(IdleOptions(settle_seconds=0.0, conditions=IdleConditions(max_load=0.0, on_battery=True)))
    served.chat("hello", ALICE)
    idler = served.service.idle_thread
    assert idler is not None
    eventually(lambda: all(idle.blocked_by for idle in idler._whose.values()))
    assert work(served, "alice") == 0


@pytest.mark.usefixtures("free_words")
def test_what_is_prepared_is_found_by_the_next_request_of_each_application(serve: Serve, embedder: str) -> None:
    asking = "1. What is Lighthouse about?"  # the tiny embedder takes most others for the one that is asked
    served = serve(
        TerseScripted({**SAID, DETAILED: asking, FROM_HISTORY: asking}),
        {"embedder": embedder, "answers": "direct"},
        ahead=AHEAD,
        quiet="0s",
    )
    assert served.post(f"{OWN}/documents", documents=[{"text": TEXT, "title": "Lighthouse"}]).status_code == 200

    def mail(question: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": "You are the mail app."}, {"role": "user", "content": question}]
        told = served.chat(messages, max_tokens=8, min_tokens=4, rekindle={"knowledge": {"top_k": 2}})
        return {"text": told["choices"][0]["message"]["content"], **told["rekindle"]}

    def calendar(question: str) -> dict[str, Any]:
        how = {"instructions": "You are the calendar.", "max_tokens": 8, "min_tokens": 4, "top_k": 1}
        told = served.post(f"{OWN}/ask", question=question, **how).json()
        return {"text": told["answer"], **told["rekindle"]}

    def predicted() -> list[BankEntry]:
        return served.session.answers.bank().entries(where="origin!='user' AND state='fresh'")

    first = [application("Who lights the lamp?") for application in (mail, calendar)]
    assert [one["stored"] for one in first] == [None, None]
    eventually(lambda: any(sum(same.question == one.question for same in predicted()) == 2 for one in predicted()))
    counts = Counter(entry.question for entry in predicted())
    question = next(question for question, count in counts.items() if count == 2)
    for application in (mail, calendar):
        told = application(question)
        assert told["stored"]["way"] == "direct" and told["stored"]["origin"] in ("abstract", "history")
        assert told["computed"] == 0 and told["text"] in {entry.answer.text for entry in predicted() if entry.answer}
