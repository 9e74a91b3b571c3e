"""Working ahead in a server: only for those who asked, and never while somebody asks."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")  # makes the tiny embedder

from rekindle.core.request import Request
from rekindle.predict.populate import Conditions
from rekindle.run.idle import IdleOptions
from rekindle.run.work import last_work
from rekindle.server.keys import Keys
from tests.server.conftest import Serve
from tests.server.serving import ALICE, BOB, Asking, Gated, Served, eventually
from tests.server.soak import tiny_embedder

OWN = "/v1/rekindle"
TEXT = "The lamp of the lighthouse is lit at dusk by the keeper, who carries the oil up two hundred steps."
AHEAD = IdleOptions(stride=1, settle_seconds=0.0, max_tokens=4, sources=("passage",))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture
def start(serve: Serve, embedder: str) -> Any:
    def started(ahead: IdleOptions | None = AHEAD, quiet: float = 0.0) -> Served:
        keys = Keys([f"alice={ALICE}", f"bob={BOB}"])
        session = {"embedder": embedder, "answers": "verified"}
        served = serve(Gated(), session, keys=keys, ahead=ahead, quiet_seconds=quiet)
        for key in (ALICE, BOB):
            assert served.post(f"{OWN}/documents", key, documents=[{"text": TEXT}]).status_code == 200
        return served

    return started


def work(served: Served, tenant: str) -> int:
    with served.session.knowledge.library(tenant).reading() as connection:
        return int(connection.execute("SELECT count(*) FROM work").fetchone()[0])


def test_after_a_request_it_works_ahead_for_whoever_asked(start: Any) -> None:
    served = start()
    served.chat("hello", ALICE)
    eventually(lambda: work(served, "alice") > 0)
    assert work(served, "bob") == 0


def test_without_the_flag_nothing_is_done(start: Any) -> None:
    served = start(None)
    assert served.service.idler is None
    served.chat("hello", ALICE)
    assert work(served, "alice") == 0


def test_a_request_stops_it_before_it_takes_its_place_and_is_answered(start: Any) -> None:
    served = start()
    engine, idler = served.engine, served.service.idler
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
    (stopped,) = last_work(served.session.knowledge.library("alice"), 1)
    assert stopped.tokens == 0 and stopped.tflop is None
    assert engine.steps == steps  # not one was finished
    engine.go.set()
    assert asking.result()["choices"]
    eventually(lambda: work(served, "alice") > 1)  # and it goes on when that is answered


def test_nothing_is_done_before_it_was_quiet_for_long_enough(start: Any) -> None:
    served = start(quiet=3600.0)
    served.chat("hello", ALICE)
    assert work(served, "alice") == 0


def test_a_hindrance_is_heeded(start: Any) -> None:
    served = start(IdleOptions(settle_seconds=0.0, conditions=Conditions(most_load=0.0, on_battery=True)))
    served.chat("hello", ALICE)
    idler = served.service.idler
    assert idler is not None
    eventually(lambda: all(idle.hindered for idle in idler._whose.values()))
    assert work(served, "alice") == 0
