"""Keys and tokens never go to another machine over plain http: refused before anything is sent, by every client."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.addresses import is_loopback, refuse_plain_authorization, refuse_plain_http
from rekindle.cli.server import _ask
from rekindle.cli.server_client import ServerRunner, make_client
from rekindle.errors import InvalidSetting, RekindleError
from rekindle.models import hub
from rekindle.models.download import download, http_client
from rekindle.remote.client import Origin
from rekindle.remote.connection import OriginFailed, OriginLimits, Stop, Timeouts
from rekindle.remote.http import HttpClient
from tests.recorder import recording

KEY = "a-key-of-many-characters"
HERE = ["127.0.0.1", "127.0.0.2", "127.255.255.254", "::1", "localhost"]
ELSEWHERE = [
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example",
    "127.1",
    "2130706433",
    "0x7f000001",
    "0177.0.0.1",
    "0.0.0.0",
    "::",
    "192.168.1.5",
    "10.0.0.1",
    "169.254.169.254",
    "fe80::1",
    "fd00::1",
    "::2",
    "localhost.",
    "",
]


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name server, and no connection to another machine."""
    resolve = socket.getaddrinfo

    def local(host: Any, *rest: Any, **more: Any) -> Any:
        assert host in ("127.0.0.1", "::1", "localhost", b"127.0.0.1", b"localhost"), f"{host} was looked up"
        return resolve(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", local)


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def test_loopback_is_told_by_the_address_alone() -> None:
    assert all(map(is_loopback, HERE)) and not any(map(is_loopback, ELSEWHERE))


def test_a_secret_may_go_over_https_or_stay_here() -> None:
    for host in (*HERE, *ELSEWHERE):
        refuse_plain_http("https", host, "The key")
    for host in HERE:
        refuse_plain_http("http", host, "The key")
    for host in ELSEWHERE:
        with pytest.raises(InvalidSetting, match="The key is not sent to .* over plain http.*https"):
            refuse_plain_http("http", host, "The key")


URLS = [
    *(f"http://{in_url(host)}:8377" for host in ELSEWHERE if host),
    "HTTP://evil.example",
    "http://127.0.0.1@evil.example",
    "http://127.0.0.1:8377@evil.example/",
    "http://evil.example/127.0.0.1",
    "http://evil.example?127.0.0.1",
    "http://evil.example#@127.0.0.1",
]


@pytest.mark.parametrize("url", URLS)
def test_the_token_of_an_origin_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(InvalidSetting):
        Origin(url, ["ab" * 32], token=KEY)


def test_an_origin_without_a_token_may_be_anywhere_and_with_one_here_or_behind_tls() -> None:
    HttpClient("http://evil.example")
    HttpClient("https://evil.example", KEY)
    for host in HERE:
        HttpClient(f"http://{in_url(host)}:8378", KEY)


def test_an_address_that_is_none_is_refused_or_means_this_machine() -> None:
    for url in ("http://[::1].evil.example", "http://[::1", "http://[evil.example]", "http://::1"):
        with contextlib.suppress(InvalidSetting):
            assert HttpClient(url, KEY).host == "::1"  # as some Pythons read the first


JOB = {"kind": "generate", "prompt": [{"role": "user", "content": "Hello"}], "options": {}}


@pytest.mark.parametrize("url", URLS)
def test_the_key_of_a_server_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises((RekindleError, httpx.InvalidURL)):
        ServerRunner(url, KEY).run(JOB, print)
    if "//0.0.0.0:" not in url and "//[::]:" not in url:  # there, `rekindle ps` asks this machine
        assert "over plain http" in _ask(url, KEY)["state"] or "InvalidURL" in _ask(url, KEY)["state"]


def test_a_password_in_an_address_counts_as_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="evil.example over plain http"):
        ServerRunner("http://me:password@evil.example").run(JOB, print)
    with pytest.raises(InvalidSetting, match="evil.example over plain http"):
        download("http://me:password@evil.example/x.whl", tmp_path / "x.whl", sha256="0" * 64)


def test_a_key_goes_to_this_machine_and_past_every_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with recording() as server, recording() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            with pytest.raises(RekindleError, match="404"):
                ServerRunner(url, KEY).run(JOB, print)
        assert _ask(server.url.replace("127.0.0.1", "0.0.0.0"), KEY)["state"].startswith("does not answer")
    assert len(server.seen) == 3 and all(KEY in seen for seen in server.seen)
    assert proxy.connections == 0


def clients() -> dict[str, Callable[[str], httpx.Client]]:
    return {
        "server": lambda url: make_client(url, KEY, httpx.Timeout(30)),
        "downloads": lambda url: http_client(),
    }


@pytest.mark.parametrize("which", ["server", "downloads"])
def test_no_redirect_carries_a_key_elsewhere(which: str) -> None:
    with recording() as thief, recording(redirect=thief.url + "/stolen") as server:
        with clients()[which](server.url) as http:
            headers = {"Authorization": f"Bearer {KEY}"}
            http.get(server.url + "/first", headers=headers)
        assert KEY in server.seen[0] and not any(KEY in seen for seen in thief.seen)


def test_a_key_that_a_redirect_would_carry_to_plain_http_is_refused() -> None:
    """Whatever the library does with redirects: each request is looked at before it is sent."""
    request = httpx.Request("GET", "http://evil.example/", headers={"authorization": f"Bearer {KEY}"})
    with pytest.raises(InvalidSetting, match="over plain http"):
        refuse_plain_authorization(request)
    refuse_plain_authorization(httpx.Request("GET", "http://evil.example/"))


def test_an_origin_that_sends_clients_elsewhere_gets_no_second_request() -> None:
    with recording() as thief, recording(redirect=thief.url) as server:
        client = HttpClient(server.url, KEY)
        with pytest.raises(OriginFailed, match="not followed"):
            client.get("x", 100, Timeouts(OriginLimits(), Stop()))
        client.close()
    assert len(server.seen) == 1 and KEY in server.seen[0] and thief.connections == 0


def test_the_token_of_the_hub_goes_nowhere_over_plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("HF_TOKEN", "hf_" + KEY)
    monkeypatch.setattr(constants, "ENDPOINT", "http://evil.example")
    for ask in (hub.list_files, hub.fetch_folder, lambda name: hub.fetch_files(name, ["x"])):
        with pytest.raises(InvalidSetting, match="HF_ENDPOINT: .* evil.example over plain http"):
            ask("some/model")
    for safe in ("https://huggingface.co", "http://127.0.0.1:8080", "http://localhost:8080"):
        monkeypatch.setattr(constants, "ENDPOINT", safe)
        hub._refuse_plain_token()
    monkeypatch.setattr(constants, "ENDPOINT", "http://evil.example")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    hub._refuse_plain_token()


def test_no_redirect_of_the_hub_carries_its_token_elsewhere() -> None:
    pytest.importorskip("huggingface_hub")
    code = (
        "from contextlib import suppress\n"
        "from rekindle.errors import ModelError\n"
        "from rekindle.models import hub\n"
        "for ask in (hub.list_files, hub.fetch_folder):\n"
        "    with suppress(ModelError): ask('some/model')\n"
    )
    with recording() as thief, recording(redirect=thief.url + "/stolen") as server:
        variables = {**os.environ, "HF_ENDPOINT": server.url, "HF_TOKEN": "hf_" + KEY, "NO_PROXY": "*"}
        subprocess.run([sys.executable, "-c", code], env=variables, check=True, timeout=120)
    assert any(KEY in seen for seen in server.seen)
    assert thief.seen and not any(KEY in seen for seen in thief.seen)
