"""Tenants: one key hits what it computed itself, and learns nothing of any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rekindle.engine.base import Logits, Row
from rekindle.errors import (
    AdapterRefused,
    BrokenModel,
    CacheUnusable,
    InvalidPrompt,
    InvalidSetting,
    ModelNotFound,
    NothingKnown,
    RekindleError,
)
from rekindle.server.auth import ApiKeys
from rekindle.server.errors import api_error_of
from tests.server.conftest import Serve
from tests.server.serving import ADMIN, ALICE, BOB, Asking, Gated, Served, eventually

SECRET = "The vault of the bank opens with the word kestrel and the number 5519, which nobody else may know."
OWN = "/v1/rekindle"


def cached(reply: dict[str, Any]) -> int:
    count: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.fixture
def told(keyed: Served) -> Served:
    """Alice asked something, and all of it is kept."""
    keyed.chat(SECRET, ALICE, app_id="alices-app")
    assert keyed.session.flush()
    return keyed


def test_the_same_key_hits_and_another_misses(told: Served) -> None:
    other = told.chat(SECRET, BOB)
    assert cached(other) == 0 and other["rekindle"]["miss"] == "unknown"
    assert cached(told.chat(SECRET, ADMIN)) == 0, "nor does the operator's"
    again = told.chat(SECRET, ALICE)
    assert cached(again) == again["usage"]["prompt_tokens"] - 1
    assert other["choices"] == again["choices"]


def test_nor_does_another_hit_what_has_reached_the_disk(told: Served) -> None:
    store = told.session.cache.store
    assert store is not None and store.memory.size_bytes
    told.session.cache.unpark()
    assert cached(told.chat(SECRET + " Really.", BOB)) == 0
    assert cached(told.chat(SECRET + " Really.", ALICE)) > len(SECRET)


def test_a_salt_narrows_what_a_key_hits(keyed: Served) -> None:
    keyed.chat(SECRET, ALICE, cache_salt="room 1")
    assert cached(keyed.chat(SECRET, ALICE, cache_salt="room 2")) == 0
    assert cached(keyed.chat(SECRET, ALICE)) == 0
    assert cached(keyed.chat(SECRET, BOB, cache_salt="room 1")) == 0, "a salt alone opens nothing"
    again = keyed.chat(SECRET, ALICE, cache_salt="room 1")
    assert cached(again) == again["usage"]["prompt_tokens"] - 1


def test_a_salt_cannot_be_made_to_look_like_another_tenant(keyed: Served) -> None:
    keyed.chat(SECRET, ALICE)
    for salt in ("alice", "local", "\x00alice", "alice\x00", ""):
        assert cached(keyed.chat(SECRET, BOB, cache_salt=salt)) == 0


def test_fields_of_the_body_do_not_choose_the_tenant(told: Served) -> None:
    reply = told.chat(SECRET, BOB, tenant="alice", app_id="alices-app", user="alice", session_id="alice")
    assert cached(reply) == 0 and reply["rekindle"]["ignored"] == ["tenant"]


@pytest.mark.parametrize("error", [BrokenModel, ModelNotFound, CacheUnusable, InvalidSetting, AdapterRefused])
def test_no_error_shows_a_tenant_the_paths_of_the_server(
    serve: Serve, error: type[RekindleError], caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Gated):
        def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
            raise error("/srv/rekindle/models/own model.gguf cannot be read. Get it again.")

    keyed = serve(Failing(), keys=ApiKeys([f"alice={ALICE}"], [ADMIN]))
    chat = {"messages": [{"role": "user", "content": "Where is the file /etc/alices/own?"}], "max_tokens": 2}
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
        for stream in (False, True):
            said = keyed.post(path, ALICE, model="fake-0", stream=stream, **chat).text
            assert "its log says why" in said and "srv" not in said and "own model" not in said, path
            assert (
                "/srv/rekindle/models/own model.gguf"
                in keyed.post(path, ADMIN, model="fake-0", stream=stream, **chat).text
            )
    assert "/srv/rekindle/models/own model.gguf cannot be read" in caplog.text


def test_a_refused_request_is_told_its_own_words() -> None:
    assert api_error_of(InvalidPrompt("The name '/etc/alices/own' is refused.")).message.startswith("The name '/etc/")
    assert api_error_of(NothingKnown("")).message.endswith("POST /v1/rekindle/documents.")


def test_stats_hold_what_is_ones_own(told: Served) -> None:
    mine, others, all_of_it = (told.get(f"{OWN}/stats", key).json() for key in (ALICE, BOB, ADMIN))
    assert mine["models"] and not others["models"]
    assert "tiers" in all_of_it and "tiers" not in mine and "tiers" not in others
    numbers = [value for value in others.values() if isinstance(value, (int, float)) and not isinstance(value, bool)]
    assert numbers and not any(numbers), "nothing is there for whoever asked nothing"
    assert all_of_it["models"] == mine["models"]


def test_entries_are_ones_own(told: Served) -> None:
    mine, others, all_of_it = (told.get(f"{OWN}/entries", key).json() for key in (ALICE, BOB, ADMIN))
    assert mine["total"] == len(mine["data"]) > 0 and others == {"data": [], "total": 0, "has_more": False}
    told.chat(SECRET, BOB)
    assert told.session.flush()
    names = [{entry["name"] for entry in told.get(f"{OWN}/entries", key).json()["data"]} for key in (ALICE, BOB, ADMIN)]
    assert names[0] == {entry["name"] for entry in mine["data"]} and names[1].isdisjoint(names[0])
    assert names[2] == names[0] | names[1] and all_of_it["total"] < len(names[2])


def test_entries_of_others_cannot_be_pinned_or_removed(told: Served) -> None:
    (entry, *_) = told.get(f"{OWN}/entries", ALICE).json()["data"]
    place = f"{OWN}/entries/{entry['name']}"
    with told.http(BOB) as bob:
        answers = [bob.put(f"{place}/pin"), bob.delete(f"{place}/pin"), bob.delete(place)]
        unknown = bob.delete(f"{OWN}/entries/{'0' * len(entry['name'])}")
    assert [answer.status_code for answer in answers] == [404, 404, 404] == [unknown.status_code] * 3
    said = {answer.json()["error"]["message"].replace(entry["name"], "") for answer in answers}
    assert said == {unknown.json()["error"]["message"].replace("0" * len(entry["name"]), "")}, "as if it were not there"
    assert told.get(f"{OWN}/entries", ALICE).json()["data"][0] == entry


def test_explaining_a_prompt_tells_of_ones_own(told: Served) -> None:
    asked = {"messages": [{"role": "user", "content": SECRET + " Is it?"}]}
    mine, others = (told.post(f"{OWN}/explain", key, **asked).json() for key in (ALICE, BOB))
    nobody = told.post(f"{OWN}/explain", BOB, cache_salt="nobody", **asked).json()
    assert mine["reason"]["kind"] != "new"
    assert others["reason"]["kind"] == "new" and others["difference"] is others["change"] is None
    assert {name: others[name] for name in ("reason", "parts", "tokens")} == {
        name: nobody[name] for name in ("reason", "parts", "tokens")
    }, "it is as for something nobody ever asked"


def test_the_last_request_is_ones_own(told: Served) -> None:
    assert told.get(f"{OWN}/explain/last", ALICE).status_code == 200
    missing = told.get(f"{OWN}/explain/last", BOB)
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "nothing_asked"
    told.chat("Something else entirely.", BOB)
    tokens = [told.get(f"{OWN}/explain/last", key).json()["tokens"] for key in (ALICE, BOB)]
    assert tokens[0] > tokens[1]
    assert told.get(f"{OWN}/explain/last", ADMIN).status_code == 404, "texts are not for operators either"


@pytest.mark.parametrize("key", [ALICE, ADMIN])
def test_explaining_a_prompt_does_not_tell_that_another_salt_has_it(keyed: Served, key: str) -> None:
    asked = {"messages": [{"role": "user", "content": SECRET}]}
    unknown = keyed.post(f"{OWN}/explain", key, cache_salt="room 2", **asked).json()["reason"]
    keyed.chat(SECRET, key, cache_salt="room 1")
    assert keyed.session.flush()
    assert keyed.post(f"{OWN}/explain", key, cache_salt="room 2", **asked).json()["reason"] == unknown
    keyed.chat(SECRET, key, cache_salt="room 2")
    noted = keyed.get(f"{OWN}/explain/last?cache_salt=room+2", key).json()
    assert noted["reason"] == unknown, "nor does what is noted of a request"


@pytest.mark.parametrize("key", [ALICE, ADMIN])
def test_the_last_request_is_that_of_ones_salt(keyed: Served, key: str) -> None:
    keyed.chat("word " * 20, key, cache_salt="room 1")
    for query in ("", "?cache_salt=room+2"):
        assert keyed.get(f"{OWN}/explain/last{query}", key).status_code == 404
    assert keyed.get(f"{OWN}/explain/last?cache_salt=room+1", key).json()["tokens"] > 100


def test_an_app_of_another_salt_goes_on(keyed: Served) -> None:
    keyed.engine.go.clear()
    body = {"prompt": "one", "max_tokens": 4, "temperature": 0, "app_id": "mail", "cache_salt": "room 1"}
    asked = Asking(lambda: keyed.post("/v1/completions", ALICE, **body))
    eventually(lambda: keyed.service.admission.running == 1)
    with keyed.http(ALICE) as client:
        said = client.put(f"{OWN}/apps/mail", json={"state": "killed", "cache_salt": "room 2"}).json()
    keyed.engine.go.set()
    assert said["stopped_requests"] == 0 and asked.result().status_code == 200
    (app,) = keyed.get(f"{OWN}/apps?cache_salt=room+1", ALICE).json()["data"]
    assert (app["id"], app["state"], app["requests"]) == ("mail", "foreground", 1)
    assert keyed.get(f"{OWN}/apps", ALICE).json()["data"] == []


def test_an_operator_counts_everybody_and_under_a_salt_only_its_own(told: Served) -> None:
    assert told.get(f"{OWN}/entries", ADMIN).json()["total"] > 0
    assert told.get(f"{OWN}/entries?cache_salt=room+1", ADMIN).json()["total"] == 0
    assert "tiers" not in told.get(f"{OWN}/stats?cache_salt=room+1", ADMIN).json()


def test_a_tenant_cannot_pin_everything(serve: Serve) -> None:
    keys = ApiKeys([f"alice={ALICE}", f"bob={BOB}"], [ADMIN])
    served = serve(session={"disk_limit": "3MB", "memory_limit": "0"}, keys=keys)
    for number in range(12):
        served.chat(f"{number} {SECRET}", ALICE)
    assert served.session.flush()
    names = [entry["name"] for entry in served.get(f"{OWN}/entries", ALICE).json()["data"]]
    with served.http(ALICE) as alice:
        answers = [alice.put(f"{OWN}/entries/{name}/pin") for name in names]
    refused = [answer.json()["error"] for answer in answers if answer.status_code == 409]
    assert 0 < len(refused) < len(names) == len([answer for answer in answers if answer.status_code in (200, 409)])
    assert {error["code"] for error in refused} == {"pins_full"}
    assert not any(character.isdigit() for error in refused for character in error["message"]), "nor what others pin"
    served.chat(SECRET, BOB)
    assert served.session.flush()
    assert served.get(f"{OWN}/entries", BOB).json()["total"] > 0


@pytest.mark.parametrize("name", ["local", "nobody", "key-0123456789abcdef", "key-"])
def test_a_key_cannot_be_named_like_somebody_else(name: str) -> None:
    """An API key named `local` would have the library and the KV of whoever owns the machine."""
    for keys in ([f"{name}={ALICE}"], [f"{name}={ALICE}", BOB]):
        with pytest.raises(InvalidSetting, match="another name"):
            ApiKeys(keys, [ADMIN])
    with pytest.raises(InvalidSetting, match="another name"):
        ApiKeys([f"anna={ALICE}", BOB], tenant="anna")


def test_two_keys_of_one_name_are_one_tenant() -> None:
    """So a key is changed without a gap."""
    keys = ApiKeys([f"alice={ALICE}", f"alice={BOB}"])
    assert keys.identify(f"Bearer {ALICE}") == keys.identify(f"Bearer {BOB}")


def test_metrics_are_ones_own(told: Served) -> None:
    told.chat("Something else entirely.", BOB)
    mine, others, all_of_it = (told.get("/metrics", key).text for key in (ALICE, BOB, ADMIN))
    assert 'tenant="alice"' in mine and 'tenant="bob"' not in mine
    assert 'tenant="bob"' in others and "alice" not in others
    assert 'tenant="alice"' in all_of_it and 'tenant="bob"' in all_of_it
    for name in ("rekindle_running_requests", "rekindle_cache_bytes", "rekindle_evicted_bytes", "rekindle_write_jobs"):
        assert name in all_of_it and name not in mine and name not in others


def test_apps_are_ones_own(told: Served) -> None:
    assert [app["id"] for app in told.get(f"{OWN}/apps", ALICE).json()["data"]] == ["alices-app"]
    assert told.get(f"{OWN}/apps", BOB).json()["data"] == []
    with told.http(BOB) as bob:
        assert bob.put(f"{OWN}/apps/alices-app", json={"state": "killed"}).json()["stopped_requests"] == 0
    assert told.get(f"{OWN}/apps", ALICE).json()["data"][0]["state"] == "foreground"


def test_what_the_machine_does_is_for_operators(told: Served) -> None:
    mine, all_of_it = (told.get(f"{OWN}/server", key).json() for key in (ALICE, ADMIN))
    assert {"pid", "running", "waiting", "parallel"} <= set(all_of_it) and not {"pid", "running"} & set(mine)
    assert told.post(f"{OWN}/check", ALICE).status_code == 403
    assert told.post(f"{OWN}/check", ADMIN).status_code == 200


def test_the_secret_is_nowhere_another_looks(told: Served) -> None:
    told.post("/v1/completions", BOB, prompt="hm", max_tokens=1)
    paths = ("/metrics", f"{OWN}/stats", f"{OWN}/entries", f"{OWN}/apps", f"{OWN}/explain/last", f"{OWN}/server")
    for path in paths:
        text = told.get(path, BOB).text
        assert "kestrel" not in text and "alice" not in text, path


def test_only_an_operator_says_how_long_the_model_stays(keyed: Served) -> None:
    """One tenant must not be able to unload the model of all others."""
    assert keyed.chat("Hello.", ALICE, keep_alive="0s")["rekindle"]["ignored"] == ["keep_alive"]
    assert keyed.chat("Hello.", ADMIN, keep_alive="5m")["rekindle"]["ignored"] == []
