"""/v1/rekindle/: looking after the cache and the apps of a server that runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from tests.server.conftest import Serve
from tests.server.serving import Asking, Served, events, eventually, serving

OWN = "/v1/rekindle"
LONG = "The keeper of the lighthouse wrote down the wind every morning, and the boats that he counted at night. "


def entries(served: Served) -> list[dict[str, Any]]:
    assert served.session.flush()
    found: list[dict[str, Any]] = served.get(f"{OWN}/entries").json()["data"]
    return found


def test_the_server_tells_what_it_is(served: Served) -> None:
    told = served.get(f"{OWN}/server").json()
    assert (told["model"], told["loaded"], told["parallel"]) == ("fake-0", True, 4)
    assert told["running"] == told["waiting"] == 0 and told["context_tokens"] == 4096


def test_stats_grow_with_what_is_kept(served: Served) -> None:
    before = served.get(f"{OWN}/stats").json()
    served.chat(LONG)
    assert served.session.flush()
    after = served.get(f"{OWN}/stats").json()
    assert not before["models"] and after["models"]
    assert 0 < after["tiers"]["disk"]["bytes"] <= after["tiers"]["disk"]["limit_bytes"] == 200_000_000
    assert after["tiers"]["memory"]["bytes"] <= after["tiers"]["memory"]["limit_bytes"]


def test_pages_of_entries_join_to_all_of_them(served: Served) -> None:
    for number in range(5):
        served.chat(f"{number} {LONG}")
    everything = entries(served)
    assert len(everything) >= 5
    pages, after = [], ""
    while True:
        page = served.get(f"{OWN}/entries?limit=2&after={after}").json()
        pages += page["data"]
        assert page["total"] == len(everything) and len(page["data"]) <= 2
        if not page["has_more"]:
            break
        after = page["data"][-1]["name"]
    assert pages == everything


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "x", "1.5", "٣", "99999999999999999999"])
def test_a_page_has_a_sensible_size(served: Served, limit: str) -> None:
    assert served.get(f"{OWN}/entries?limit={limit}").status_code == 400


def test_an_entry_can_be_pinned_and_released(served: Served) -> None:
    served.chat(LONG)
    name = entries(served)[0]["name"]
    with served.http() as client:
        assert client.put(f"{OWN}/entries/{name}/pin").json() == {"pinned": True}
        assert entries(served)[0]["pinned"]
        assert client.delete(f"{OWN}/entries/{name}/pin").json() == {"pinned": False}
        assert not entries(served)[0]["pinned"]
        assert client.put(f"{OWN}/entries/nothing/pin").status_code == 404


def test_what_was_removed_is_computed_again(served: Served) -> None:
    tokens = served.chat(LONG)["usage"]["prompt_tokens"]
    with served.http() as client:
        for entry in entries(served):
            assert client.delete(f"{OWN}/entries/{entry['name']}").status_code in (200, 404)
    assert entries(served) == []
    assert served.chat(LONG)["rekindle"]["computed"] == tokens


def test_check_finds_and_repairs_damage(served: Served) -> None:
    served.chat(LONG)
    assert served.session.flush()
    sound = served.post(f"{OWN}/check").json()
    store = served.session.cache.store
    assert store is not None
    for path in store.disk.folder.rglob("*"):
        if path.is_file() and path.suffix not in (".db", ".db-wal", ".db-shm", ".lock") and path.stat().st_size > 4096:
            data = bytearray(path.read_bytes())
            data[-100] ^= 255
            path.write_bytes(data)
    damaged, fixed = served.post(f"{OWN}/check").json(), served.post(f"{OWN}/check", fix=True).json()
    assert sound != damaged and served.post(f"{OWN}/check").json()["problems"] == []
    assert damaged["problems"] and fixed["problems"] and not sound["problems"]


def test_what_was_warmed_starts_at_once(served: Served) -> None:
    messages = [{"role": "user", "content": LONG}]
    told = served.post(f"{OWN}/warm", messages=messages, hm=1).json()
    assert told["usage"]["cached_tokens"] == 0 and told["rekindle"]["ignored"] == ["hm"]
    assert entries(served), "it is on disk when the answer comes"
    reply = served.chat(messages)
    assert reply["usage"]["prompt_tokens"] == told["usage"]["prompt_tokens"]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == told["usage"]["prompt_tokens"] - 1


def test_explaining_computes_nothing_and_is_right(served: Served) -> None:
    messages = [{"role": "user", "content": LONG}]
    assert served.post(f"{OWN}/explain", messages=messages).json()["reason"]["kind"] == "new"
    assert served.engine.steps == 0
    tokens = served.chat(messages)["usage"]["prompt_tokens"]
    steps = served.engine.steps
    told = served.post(f"{OWN}/explain", messages=messages).json()
    assert told["reason"]["kind"] == "complete" and told["tokens"] == tokens and told["text"]
    assert served.engine.steps == steps


def test_the_last_request_is_explained(served: Served) -> None:
    assert served.get(f"{OWN}/explain/last").status_code == 404
    tokens = served.chat(LONG)["usage"]["prompt_tokens"]
    told = served.get(f"{OWN}/explain/last").json()
    assert told["tokens"] == tokens and told["reason"]["kind"] == "new"
    served.chat(LONG)
    assert served.get(f"{OWN}/explain/last").json()["reason"]["kind"] == "complete"


def test_a_prompt_is_messages_or_a_text_and_not_both(served: Served) -> None:
    for path in ("warm", "explain"):
        assert served.post(f"{OWN}/{path}").status_code == 400
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        assert served.post(f"{OWN}/{path}", **body).status_code == 400
        assert served.post(f"{OWN}/{path}", prompt=LONG).status_code == 200


def test_without_a_cache_there_is_nothing_to_look_after(serve: Serve) -> None:
    served = serve(session={"cache": "off"})
    assert served.chat(LONG)["usage"]["completion_tokens"] == 4
    for path in ("stats", "entries", "explain/last"):
        assert served.get(f"{OWN}/{path}").json()["error"]["code"] == "no_cache"
    assert served.get("/metrics").status_code == 200


def test_apps_are_those_that_asked(served: Served) -> None:
    served.chat("a", app_id="mail")
    served.chat("a", app_id="mail", app_state="background")
    served.chat("a", session_id="chat", user="somebody")
    told = served.get(f"{OWN}/apps").json()["data"]
    assert [(app["id"], app["state"], app["requests"]) for app in told] == [
        ("mail", "background", 2),
        ("chat", "foreground", 1),
    ]


def test_an_app_is_what_it_was_said_to_be_until_it_says_otherwise(served: Served) -> None:
    with served.http() as client:
        assert client.put(f"{OWN}/apps/mail", json={"state": "background"}).json()["state"] == "background"
        assert client.put(f"{OWN}/apps/mail", json={"state": "asleep"}).status_code == 400
    served.chat("a", app_id="mail")
    assert served.get(f"{OWN}/apps").json()["data"][0]["state"] == "background"
    served.chat("a", app_id="mail", app_state="foreground")
    assert served.get(f"{OWN}/apps").json()["data"][0]["state"] == "foreground"


def test_what_is_computed_for_a_killed_app_stops(served: Served) -> None:
    engine, body = served.engine, {"temperature": 0, "max_tokens": 2000, "min_tokens": 2000}
    engine.go.clear()
    whole = Asking(lambda: served.post("/v1/completions", prompt="one", app_id="mail", **body))
    with served.http() as client:
        begun = threading.Event()

        def follow() -> list[dict[str, Any]]:
            sent = {"prompt": "two", "app_id": "mail", "stream": True, **body}
            with client.stream("POST", "/v1/completions", json=sent) as answer:
                begun.set()
                return list(events(answer))

        stream = Asking(follow)
        other = Asking(lambda: served.post("/v1/completions", prompt="three", app_id="chat", max_tokens=2))
        eventually(lambda: served.service.admission.running == 3 and begun.is_set())
        with served.http() as admin:
            told = admin.put(f"{OWN}/apps/mail", json={"state": "killed"}).json()
        assert told["stopped_requests"] == 2 and told["state"] == "killed"
        engine.go.set()
        assert other.result().status_code == 200, "others are not disturbed"
        refused = whole.result()
        assert refused.status_code == 503 and refused.json()["error"]["type"] == "server_error"
        assert stream.result()[-1]["error"]["type"] == "server_error"
    assert engine.steps < 12


def test_what_stands_in_line_for_a_killed_app_does_not_start(serve: Serve) -> None:
    served = serve(session={"parallel": 1})
    served.engine.go.clear()
    first = Asking(lambda: served.post("/v1/completions", prompt="one", app_id="chat", max_tokens=2))
    eventually(lambda: served.service.admission.running == 1)
    second = Asking(lambda: served.post("/v1/completions", prompt="two", app_id="mail", max_tokens=2))
    eventually(lambda: served.service.admission.waiting == 1)
    with served.http() as admin:
        told = admin.put(f"{OWN}/apps/mail", json={"state": "killed"}).json()
    assert told["stopped_requests"] == 1
    assert second.result().status_code == 503 and served.service.admission.waiting == 0
    served.engine.go.set()
    assert first.result().status_code == 200
    assert "two" not in served.engine.prompts


def test_a_killed_app_that_asks_again_is_alive(served: Served) -> None:
    with served.http() as client:
        client.put(f"{OWN}/apps/mail", json={"state": "killed"})
    assert served.chat("a", app_id="mail")["usage"]["completion_tokens"] == 4
    assert served.get(f"{OWN}/apps").json()["data"][0]["state"] == "foreground"


@pytest.mark.usefixtures("one_thread")
def test_a_model_that_rests_comes_back_and_still_knows(tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    given: dict[str, Any] = {"cache": str(tmp_path / "cache"), "parallel": 2, "keep_alive": "10m", "device": "cpu"}
    with serving(Session(tiny_folder, **given)) as served:
        before = served.chat(LONG, keep_alive="0.2s")
        eventually(lambda: not served.get(f"{OWN}/server").json()["loaded"])
        assert 'rekindle_model_loaded{model="tiny"} 0.0' in served.get("/metrics").text
        assert served.get("/health").status_code == served.get("/v1/models").status_code == 200
        assert not served.get(f"{OWN}/server").json()["loaded"], "to look does not wake it"
        after = served.chat(LONG, keep_alive="10m")
        assert served.get(f"{OWN}/server").json()["loaded"]
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == after["usage"]["prompt_tokens"] - 1
