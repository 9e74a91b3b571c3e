"""Who is let in: keys, names of hosts, web pages of others."""

from __future__ import annotations

import socket
from dataclasses import replace

import openai
import pytest

from rekindle.core.scope import Scope
from rekindle.errors import InvalidSetting
from rekindle.server.auth import AnsweredHosts, ApiKeys, check_settings
from rekindle.server.ollama import OLLAMA
from rekindle.server.protocol import OPENAI
from rekindle.server.routes import ENDPOINTS, Endpoint
from rekindle.settings import ServerSettings
from tests.server.conftest import Serve
from tests.server.hostile import head, raw
from tests.server.serving import ADMIN, ALICE, BOB, Served

CHAT = [{"role": "user", "content": "Hi"}]
ORIGIN = "https://app.example"


@pytest.mark.parametrize("key", ["sk-nobody-000", ALICE[:-1], ALICE + "0", "alice", f"alice={ALICE}"])
def test_a_wrong_key_is_refused(keyed: Served, key: str) -> None:
    with pytest.raises(openai.AuthenticationError) as raised:
        keyed.openai(key).chat.completions.create(model="fake-0", messages=CHAT, max_tokens=1)
    assert raised.value.code == "invalid_api_key" and raised.value.type == "authentication_error"
    assert raised.value.response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("header", [f"Basic {ALICE}", ALICE, f"Token {ALICE}", "Bearer"])
def test_a_key_counts_as_a_bearer_only(keyed: Served, header: str) -> None:
    assert keyed.get("/v1/models", Authorization=header).status_code == 401


@pytest.mark.parametrize("key", [ALICE, BOB, ADMIN])
def test_every_key_that_was_given_is_let_in(keyed: Served, key: str) -> None:
    reply = keyed.openai(key).chat.completions.create(model="fake-0", messages=CHAT, max_tokens=1)
    assert reply.usage.completion_tokens == 1
    assert keyed.get("/v1/models", Authorization=f"bearer {key}").status_code == 200


def test_nothing_but_health_and_the_documents_is_open(keyed: Served) -> None:
    with keyed.http() as client:
        for endpoint in ENDPOINTS:
            answer = client.request(endpoint.method, endpoint.path.replace("{", "").replace("}", ""), json={})
            assert not endpoint.open or endpoint.path in ("/", "/health")
            assert answer.status_code == (200 if endpoint.open else 401), endpoint.path
        assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 200


def test_a_body_is_not_judged_before_the_key(keyed: Served) -> None:
    with keyed.http() as client:
        assert client.post("/v1/chat/completions", content=b"{not json").status_code == 401


def test_without_keys_any_key_will_do(served: Served) -> None:
    assert served.get("/v1/models", "sk-whatever").status_code == served.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("keys", "admin"), [(["short"], []), ([ALICE, f"alice={ALICE}"], []), ([ALICE], [ALICE]), (["a\nb\nc\nd\ne"], [])]
)
def test_keys_that_protect_nothing_are_refused(keys: list[str], admin: list[str]) -> None:
    with pytest.raises(InvalidSetting):
        ApiKeys(keys, admin)


def test_a_single_key_is_the_operators_and_several_are_not() -> None:
    (alone,) = {ApiKeys([ALICE]).identify(f"Bearer {ALICE}")}
    assert alone is not None and alone.operator
    several = ApiKeys([ALICE, BOB], [ADMIN])
    assert [several.identify(f"Bearer {key}").operator for key in (ALICE, BOB, ADMIN)] == [False, False, True]


def test_others_are_let_in_without_a_key_only_on_demand() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "example.org", "::"):
        with pytest.raises(InvalidSetting, match="--allow-unauthenticated"):
            check_settings(ServerSettings(host=host), ApiKeys())
        let_in = ServerSettings(host=host, allow_unauthenticated=True)
        check_settings(let_in, ApiKeys())
        hosts = AnsweredHosts.of(let_in, ApiKeys())
        own = (host if ":" not in host else f"[{host}]", "192.168.1.7:8377", "[fe80::1]:80", "localhost", "10.0.0.1")
        assert all(map(hosts.includes, (*own, socket.gethostname().lower())))
        foreign = ("evil.example", "192.168.1.7.evil.example", "1.evil:8377", "", "localhost.evil:1")
        assert not any(map(hosts.includes, foreign)), "a web page may have made its name point here"
        assert AnsweredHosts.of(let_in, ApiKeys([ALICE])).includes("api.example.com")
        assert AnsweredHosts.of(replace(let_in, allowed_hosts=("a.example",)), ApiKeys()).includes("a.example:1")
        check_settings(ServerSettings(host=host), ApiKeys([ALICE]))
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        check_settings(ServerSettings(host=host), ApiKeys())


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8377", "127.0.0.1.evil.example", "", "localhost.evil:1"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/docs", "/openapi.json", "/metrics"])
def test_another_name_is_not_answered(served: Served, host: str, path: str) -> None:
    answer = served.get(path, Host=host)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "bad_host"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1", "127.0.0.1:8377", "[::1]:8377", "[::1]"])
def test_the_machines_own_names_are_answered(served: Served, host: str) -> None:
    assert served.get("/v1/models", Host=host).status_code == 200


def test_allowed_hosts_are_answered_and_no_others(serve: Serve) -> None:
    named = serve(allowed_hosts=("llm.example", "Other.example"))
    assert named.get("/health", Host="llm.example:443").status_code == 200
    assert named.get("/health", Host="other.example").status_code == 200
    assert named.get("/health", Host="localhost").status_code == 403
    assert serve(allowed_hosts=("*",)).get("/health", Host="anything").status_code == 200


EVIL = "https://evil.example"
_BY_OTHERS = {
    "another origin": ["Origin: https://evil.example"],
    "another port": ["Origin: http://localhost:1", "Sec-Fetch-Site: same-site"],
    "another scheme": ["Origin: https://localhost"],
    "no origin at all": ["Origin: null"],
    "an image of another site": ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"],
    "an image of another port": ["Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"],
    "a frame of another site": ["Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"],
    "its own origin, of another site": ["Origin: http://localhost", "Sec-Fetch-Site: cross-site"],
}


def _asked(endpoint: Endpoint, *lines: str) -> bytes:
    path = endpoint.path.replace(":path", "").replace("{", "").replace("}", "")
    if endpoint.body is None:
        return head(endpoint.method, path, *lines, "Connection: close")
    # The body never comes: whoever waits for it waits for ever.
    return head(endpoint.method, path, *lines, "Content-Type: text/plain", "Content-Length: 1000", "Connection: close")


@pytest.mark.parametrize("headers", _BY_OTHERS.values(), ids=list(_BY_OTHERS))
@pytest.mark.parametrize("key", [None, ADMIN])
def test_no_endpoint_does_anything_for_a_page_of_another_origin(serve: Serve, headers: list[str], key: str) -> None:
    served = serve(keys=ApiKeys([], [key])) if key else serve()
    sent = [*headers, f"Authorization: Bearer {key}"] if key else headers
    for endpoint in ENDPOINTS:
        (answer,) = raw(served.url, _asked(endpoint, *sent))
        assert answer.status == 403, endpoint
        error = answer.json()["error"]
        assert endpoint.protocol is not OPENAI or error["code"] == "foreign_origin", endpoint
        message = error if endpoint.protocol is OLLAMA else error["message"]
        assert ("--cors-origin" in message) == (headers != ["Origin: null"])
    assert served.engine.steps == 0 and served.service.apps.merge_catalog(Scope("local"), []) == []
    assert not served.session.knowledge.holds("local", None)


def test_a_page_of_another_origin_is_told_nothing_by_what_needs_no_key(served: Served) -> None:
    for path in ("/docs", "/openapi.json", "/nothing"):
        assert served.get(path, Origin=EVIL).status_code == 403
        assert served.get(path, **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}).status_code == 403


def test_a_page_that_was_given_our_address_under_its_own_name_is_not_answered(served: Served) -> None:
    name = "evil.example:8377"
    given = {"Host": name, "Origin": f"http://{name}", "Sec-Fetch-Site": "same-origin"}
    answer = served.get("/v1/models", **given)
    assert answer.status_code == 403 and answer.json()["error"]["code"] == "bad_host"


def test_links_lead_to_the_documents_and_to_nothing_else(served: Served) -> None:
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert served.get("/docs", **followed).status_code == served.get("/openapi.json", **followed).status_code == 200
    assert served.get("/v1/models", **followed).status_code == served.get("/metrics", **followed).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
        {"Origin": "http://LOCALHOST:8377", "Host": "localhost:8377", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_programs_and_the_servers_own_pages_are_answered(served: Served, headers: dict[str, str]) -> None:
    with served.http(**headers) as client:
        body = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
        form = {"Content-Type": "application/x-www-form-urlencoded"}  # as `curl -d` has it
        assert client.post("/v1/chat/completions", content=body, headers=form).status_code == 200


def test_every_page_may_ask_where_all_are_allowed(serve: Serve) -> None:
    served = serve(cors_origin=("*",))
    for origin in (EVIL, "null"):
        answer = served.get("/v1/models", Origin=origin, **{"Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"


def test_the_origin_that_any_page_can_send_is_never_advised_nor_allowed(served: Served) -> None:
    told = served.get("/v1/models", Origin="null").json()["error"]["message"]
    assert "--cors-origin" not in told
    with pytest.raises(InvalidSetting, match="null"):
        check_settings(ServerSettings(cors_origin=("null",)), ApiKeys())


def test_by_default_no_other_page_may_read_replies(served: Served) -> None:
    answer = served.get("/v1/models", Origin=ORIGIN)
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    with served.http() as client:
        asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
        before = client.options("/v1/chat/completions", headers=asked)
    assert before.status_code == 403 and "access-control-allow-origin" not in before.headers


def test_pages_of_an_allowed_origin_may_and_others_not(serve: Serve) -> None:
    served = serve(cors_origin=(ORIGIN,))
    assert served.get("/v1/models", Origin=ORIGIN).headers["access-control-allow-origin"] == ORIGIN
    assert "access-control-allow-origin" not in served.get("/v1/models", Origin="https://evil.example").headers
    with served.http() as client:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        allowed = client.options("/v1/chat/completions", headers={"Origin": ORIGIN, **asked})
        refused = client.options("/v1/chat/completions", headers={"Origin": "https://evil.example", **asked})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers


def test_a_page_that_may_read_replies_may_read_the_plan(serve: Serve) -> None:
    served = serve(cors_origin=(ORIGIN,))
    with served.http(Origin=ORIGIN) as client:
        answer = client.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1})
    assert "x-rekindle-plan" in answer.headers["access-control-expose-headers"].lower()
