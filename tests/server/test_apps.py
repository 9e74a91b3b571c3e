"""Apps over HTTP: what is kept for them, what the catalog remembers, and what other processes say of them."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.apps import Apps, list_apps
from rekindle.core.scope import Scope
from tests.server.conftest import Serve
from tests.server.serving import ALICE, BOB, Served, eventually

OWN = "/v1/rekindle"
LONG = "The keeper of the lighthouse wrote down the wind every morning, and the boats that he counted at night. "


def apps(served: Served, key: str | None = None) -> dict[str, dict[str, Any]]:
    assert served.session.flush()
    assert served.session.cache.store is not None
    served.session.cache.store.maintain()
    data = served.get(f"{OWN}/apps", key).json()["data"] if key else served.get(f"{OWN}/apps").json()["data"]
    return {app["id"]: app for app in data}


def put(served: Served, app: str, state: str) -> Any:
    with served.http() as client:
        return client.put(f"{OWN}/apps/{app}", json={"state": state})


def test_an_app_is_listed_with_its_state(served: Served) -> None:
    served.chat(LONG, app_id="mail", app_state="background")
    told = apps(served)["mail"]
    assert told["state"] == "background" and told["requests"] == 1 and told["process"] is None


def tokens_kept(served: Served) -> int:
    return sum(entry["tokens"] for entry in served.get(f"{OWN}/entries").json()["data"])


@pytest.mark.usefixtures("crowded")
def test_the_kv_of_a_killed_app_goes_and_what_others_ask_for_stays(serve: Serve) -> None:
    served = serve(session={"killed_ttl": "0s"})
    served.chat(LONG + "One.", app_id="mail")
    served.chat("Something else entirely. " * 5, app_id="notes")
    before = tokens_kept(served)
    assert put(served, "mail", "killed").json()["state"] == "killed"
    assert apps(served)["mail"]["state"] == "killed"
    assert 0 < tokens_kept(served) < before
    served.chat("Something else entirely. " * 5, app_id="notes")
    again = served.chat("Something else entirely. " * 5, app_id="notes")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_another_process_says_of_an_app_is_seen(served: Served) -> None:
    served.chat(LONG, app_id="mail")
    apps(served)
    store = served.session.cache.store
    assert store is not None
    Apps(store.disk, Scope("local")).set("calendar", "background")
    eventually(lambda: apps(served)["mail"]["requests"] == 1)
    tenant = next(app.tenant for app in list_apps(store.disk) if app.name == "mail")
    Apps(store.disk, Scope(tenant)).set("mail", "killed")
    assert apps(served)["mail"]["state"] == "killed"
    served.chat(LONG, app_id="mail")
    assert apps(served)["mail"]["state"] == "foreground"


def test_an_app_that_is_killed_before_its_request_is_noted_stays_killed(served: Served) -> None:
    served.chat(LONG, app_id="mail")
    assert put(served, "mail", "killed").json()["state"] == "killed"
    assert apps(served)["mail"]["state"] == "killed"
    store = served.session.cache.store
    assert store is not None and [(app.state, app.requests) for app in list_apps(store.disk)] == [("killed", 1)]


def test_sessions_and_users_are_no_apps_of_the_cache(served: Served) -> None:
    """Nobody tells when they end, so their KV is nobody's private one."""
    served.chat(LONG, session_id="chat", user="somebody")
    assert set(apps(served)) == {"chat"}
    store = served.session.cache.store
    assert store is not None and list_apps(store.disk) == []


def test_apps_of_the_same_name_of_two_tenants_are_two(keyed: Served) -> None:
    keyed.chat(LONG, ALICE, app_id="mail")
    keyed.chat(LONG, BOB, app_id="mail", app_state="background")
    assert (apps(keyed, ALICE)["mail"]["state"], apps(keyed, BOB)["mail"]["state"]) == ("foreground", "background")


def test_without_a_cache_a_state_is_still_heeded(serve: Serve) -> None:
    served = serve(session={"cache": "off"})
    served.chat(LONG, app_id="mail")
    assert put(served, "mail", "background").json()["state"] == "background"
    assert [app["state"] for app in served.get(f"{OWN}/apps").json()["data"]] == ["background"]


@pytest.mark.parametrize(
    ("said", "state"), [("background", "background"), ("foreground", "foreground"), ("killed", "killed")]
)
def test_a_helper_may_report_an_app_before_it_asks_and_repeat_itself(served: Served, said: str, state: str) -> None:
    for _ in range(2):
        answer = put(served, "org.example%20mail", said)
        assert answer.status_code == 200
        assert (answer.json()["id"], answer.json()["state"]) == ("org.example mail", state)
        assert answer.json()["stopped_requests"] == 0
    assert apps(served)["org.example mail"]["state"] == state


def test_what_is_no_state_or_no_name_is_refused_with_what_to_send(served: Served) -> None:
    wrong = put(served, "mail", "asleep")
    assert wrong.status_code == 400 and "foreground" in wrong.json()["error"]["message"]
    assert put(served, "m" * 257, "killed").status_code == 400
    assert apps(served) == {}


def test_a_helper_needs_a_key_where_the_server_has_keys(keyed: Served) -> None:
    with keyed.http() as client:
        client.headers.pop("authorization", None)
        assert client.put(f"{OWN}/apps/mail", json={"state": "killed"}).status_code == 401


def test_a_killed_app_has_freed_its_memory_before_the_reply(served: Served) -> None:
    served.chat(LONG * 5, app_id="mail")
    apps(served)
    store = served.session.cache.store
    assert store is not None and len(store.memory) > 0
    assert put(served, "mail", "killed").status_code == 200
    assert len(store.memory) == 0
