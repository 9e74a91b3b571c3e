"""The server of an origin: ranges as HTTP says, files of the format and nothing else, tokens, TLS."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from email.parser import BytesParser
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.core.kv import Span
from rekindle.errors import InvalidSetting
from rekindle.remote.client import Origin
from rekindle.remote.connection import OriginFailed
from rekindle.remote.publish.serve import (
    MAX_RANGES,
    AccessTokens,
    OriginServer,
    OriginSettings,
    RangeNotSatisfiable,
    parse_ranges,
)
from tests.remote.conftest import Place
from tests.remote.places import fetch_all, find

TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def http(place: Place) -> Iterator[httpx.Client]:
    with (
        OriginServer(place.folder, OriginSettings(port=0)).running() as url,
        httpx.Client(base_url=url, trust_env=False) as client,
    ):
        yield client


@pytest.fixture
def blob(place: Place) -> tuple[str, bytes]:
    path = min(place.files.glob("*.kv"))
    return f"/contexts/{place.context}/{path.name}", path.read_bytes()


# ---- ranges


@given(size=st.integers(0, 50), first=st.integers(0, 60), length=st.integers(1, 60))
def test_a_range_is_the_bytes_between_its_ends(size: int, first: int, length: int) -> None:
    text = f"bytes={first}-{first + length - 1}"
    if first >= size:
        with pytest.raises(RangeNotSatisfiable):
            parse_ranges(text, size)
    else:
        assert parse_ranges(text, size) == [Span(first, min(size, first + length))]


@given(size=st.integers(0, 50), count=st.integers(0, 60))
def test_a_suffix_is_the_last_bytes(size: int, count: int) -> None:
    if min(size, count) == 0:
        with pytest.raises(RangeNotSatisfiable):
            parse_ranges(f"bytes=-{count}", size)
    else:
        assert parse_ranges(f"bytes=-{count}", size) == [Span(max(0, size - count), size)]


@given(text=st.one_of(st.text(), st.from_regex(r"bytes=[0-9,\- ]{0,20}", fullmatch=True)), size=st.integers(0, 30))
def test_whatever_is_asked_for_lies_in_the_file(text: str, size: int) -> None:
    try:
        spans = parse_ranges(text, size)
    except RangeNotSatisfiable:
        return
    for span in spans or ():
        assert len(span) and span.stop <= size
    assert sum(map(len, spans or ())) <= size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes=0-0", [Span(0, 1)]),
        ("bytes=5-", [Span(5, 10)]),
        ("bytes=0-999", [Span(0, 10)]),
        ("BYTES=0-1", [Span(0, 2)]),
        ("bytes= 0-1 , 4-5,", [Span(0, 2), Span(4, 6)]),
        ("bytes=0-1,50-60", [Span(0, 2)]),
        ("bytes=6-7,0-1", [Span(6, 8), Span(0, 2)]),
        ("bytes=3-2", None),
        ("bytes=", None),
        ("bytes", None),
        ("bytes=a-b", None),
        ("bytes=--1", None),
        ("bytes=1-2-3", None),
        ("bytes=٣-٤", None),
        ("items=0-1", None),
        (None, None),
    ],
)
def test_headers_mean_what_http_says(text: str | None, expected: list[Span] | None) -> None:
    assert parse_ranges(text, 10) == expected


@pytest.mark.parametrize("text", ["bytes=10-", "bytes=-0", "bytes=0-9,0-9", "bytes=" + "0-0," * (MAX_RANGES + 1)])
def test_what_is_not_there_or_is_asked_for_twice_is_refused(text: str) -> None:
    with pytest.raises(RangeNotSatisfiable):
        parse_ranges(text, 10)


def test_a_whole_file_and_what_is_said_of_it(http: httpx.Client, blob: tuple[str, bytes]) -> None:
    path, data = blob
    answer = http.get(path)
    assert answer.status_code == 200 and answer.content == data
    assert answer.headers["accept-ranges"] == "bytes" and answer.headers["etag"] == f'"{path[-67:-3]}"'
    assert "immutable" in answer.headers["cache-control"] and "public" in answer.headers["cache-control"]
    head = http.head(path)
    assert head.status_code == 200 and head.content == b"" and head.headers["content-length"] == str(len(data))
    assert head.headers["etag"] == answer.headers["etag"]
    assert "server" not in answer.headers


def test_one_range(http: httpx.Client, blob: tuple[str, bytes]) -> None:
    path, data = blob
    answer = http.get(path, headers={"Range": "bytes=100-299"})
    assert answer.status_code == 206 and answer.content == data[100:300]
    assert answer.headers["content-range"] == f"bytes 100-299/{len(data)}"
    assert http.get(path, headers={"Range": "bytes=-7"}).content == data[-7:]
    assert http.head(path, headers={"Range": "bytes=0-1"}).headers["content-length"] == str(len(data))


def test_several_ranges(http: httpx.Client, blob: tuple[str, bytes]) -> None:
    path, data = blob
    answer = http.get(path, headers={"Range": "bytes=100-299, 0-9, -5"})
    assert answer.status_code == 206 and int(answer.headers["content-length"]) == len(answer.content)
    head = f"Content-Type: {answer.headers['content-type']}\r\n\r\n".encode()
    parts = BytesParser().parsebytes(head + answer.content).get_payload()
    assert isinstance(parts, list) and len(parts) == 3
    ends = [(100, 300), (0, 10), (len(data) - 5, len(data))]
    for part, (start, stop) in zip(parts, ends, strict=True):
        assert part["Content-Range"] == f"bytes {start}-{stop - 1}/{len(data)}"  # type: ignore[index]
    for start, stop in ends:
        assert b"\r\n\r\n" + data[start:stop] + b"\r\n--" in answer.content


def test_what_cannot_be_satisfied_is_416_with_the_size(http: httpx.Client, blob: tuple[str, bytes]) -> None:
    path, data = blob
    answer = http.get(path, headers={"Range": f"bytes={len(data)}-"})
    assert answer.status_code == 416 and answer.headers["content-range"] == f"bytes */{len(data)}"


def test_conditions(http: httpx.Client, blob: tuple[str, bytes], place: Place) -> None:
    path, data = blob
    etag = http.head(path).headers["etag"]
    assert http.get(path, headers={"If-None-Match": f'"other", {etag}'}).status_code == 304
    assert http.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    assert http.get(path, headers={"Range": "bytes=0-9", "If-Range": etag}).status_code == 206
    for other in ('"other"', f"W/{etag}", "Sat, 01 Jan 2022 00:00:00 GMT"):
        answer = http.get(path, headers={"Range": "bytes=0-9", "If-Range": other})
        assert answer.status_code == 200 and answer.content == data
    manifest = f"/contexts/{place.context}/manifest"
    first = http.get(manifest)
    assert first.headers["cache-control"] == "no-cache"
    assert http.get(manifest, headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    (place.files / "manifest").write_bytes(first.content + b" ")
    changed = http.get(manifest, headers={"If-None-Match": first.headers["etag"]})
    assert changed.status_code == 200 and changed.headers["etag"] != first.headers["etag"]


# ---- nothing else


def test_only_files_of_the_format_are_served(http: httpx.Client, place: Place, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("a secret of this machine")
    (place.folder / "by-chunk" / "notes.txt").write_text("no index")
    (place.files / "x.kv").write_text("no slices")
    name = f"{'ab' * 32}.kv"
    (place.files / name).symlink_to(tmp_path / "outside")
    (place.files / f"{'cd' * 32}.kv").mkdir()
    os.mkfifo(place.files / f"{'ef' * 32}.kv")
    context = f"/contexts/{place.context}"
    paths = [
        "/",
        "/contexts",
        "/contexts/",
        context,
        f"{context}/",
        "/.lock",
        "/.parts/",
        "/by-chunk/",
        "/by-chunk/notes.txt",
        f"{context}/x.kv",
        f"{context}/{name}",
        f"{context}/{'cd' * 32}.kv",
        f"{context}/{'ef' * 32}.kv",
        f"{context}/manifest%0a",
        f"{context}/manifest%00",
        f"{context}//manifest",
        "/contexts/../outside",
        "/../outside",
        "/..%2foutside",
        "/%2e%2e/outside",
        f"{context}/..%2f..%2f..%2foutside",
        f"{context}/%2e%2e/%2e%2e/%2e%2e/outside",
        f"//{tmp_path}/outside",
        "/contexts/..%5c..%5coutside",
    ]
    for path in paths:
        answer = _raw_get(http, path)
        assert b" 404 " in answer.split(b"\r\n")[0], path
        assert b"secret of this machine" not in answer and place.context.encode() not in answer


def test_nothing_can_be_changed(http: httpx.Client, blob: tuple[str, bytes]) -> None:
    path, data = blob
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = http.request(method, path, content=b"x")
        assert answer.status_code == 405 and "GET" in answer.headers["allow"]
    assert http.get(path).content == data


def test_a_file_that_shrinks_while_it_is_sent_ends_the_connection(
    http: httpx.Client, place: Place, blob: tuple[str, bytes]
) -> None:
    path = f"/contexts/{place.context}/{'12' * 32}.kv"
    file = place.folder / path[1:]
    file.write_bytes(bytes(64 << 20))
    with pytest.raises(httpx.HTTPError), http.stream("GET", path) as answer:
        assert answer.status_code == 200
        os.truncate(file, 10)
        answer.read()


# ---- who may read


def test_a_token_is_wanted_before_anything_is_told(place: Place, blob: tuple[str, bytes]) -> None:
    settings = OriginSettings(port=0, tokens=AccessTokens([TOKEN, "another-token-of-somebody"]))
    with OriginServer(place.folder, settings).running() as url:
        with httpx.Client(base_url=url, trust_env=False) as http:
            for header in (None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN[:-1]}", "Bearer"):
                headers = {} if header is None else {"Authorization": header}
                for path in (blob[0], "/nothing", "/"):
                    answer = http.get(path, headers=headers)
                    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            right = http.get(blob[0], headers={"Authorization": f"Bearer {TOKEN}"})
            assert right.status_code == 200 and "private" in right.headers["cache-control"]
        origin = Origin(url, [place.key.public], secret=place.secret, token=TOKEN)
        found = find(origin)
        assert found is not None and len(fetch_all(origin, found)) == 18
        origin.close()
        stranger = Origin(url, [place.key.public], secret=place.secret)
        with pytest.raises(OriginFailed, match="wants another token"):
            find(stranger)
        stranger.close()


@pytest.mark.parametrize("token", ["short", "", "has a\nline that is long", "ümlaute sind nicht erlaubt"])
def test_tokens_that_are_none_are_refused(token: str) -> None:
    with pytest.raises(InvalidSetting):
        AccessTokens([token])


def test_others_are_let_in_only_if_somebody_says_so(place: Place) -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::", "origin.example"):
        with pytest.raises(InvalidSetting, match="no token"):
            OriginSettings(host)
        assert OriginSettings(host, public=True) and OriginSettings(host, tokens=AccessTokens([TOKEN]))
    with pytest.raises(InvalidSetting, match="both"):
        OriginSettings(tls_cert=place.folder)
    with pytest.raises(InvalidSetting, match="port"):
        OriginSettings(port=70_000)


def test_a_port_that_is_taken_and_a_folder_that_is_none_are_refused(place: Place, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidSetting, match="cannot be used"):
        OriginServer(place.folder, OriginSettings(port=taken.getsockname()[1]))
    with pytest.raises(InvalidSetting, match="not the folder of an origin"):
        OriginServer(tmp_path / "nothing", OriginSettings(port=0))


def test_a_client_that_says_nothing_is_left(place: Place) -> None:
    with OriginServer(place.folder, OriginSettings(port=0, idle_seconds=0.2)).running() as url:
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        with socket.create_connection(address, 30) as silent, socket.create_connection(address, 30) as slow:
            slow.sendall(b"GET /contexts HTTP/1.1\r\n")  # and never the rest
            for client in (silent, slow):
                with suppress(ConnectionResetError):  # the same, said louder
                    assert client.recv(100) == b""


def test_many_clients_are_served_at_the_same_time(place: Place) -> None:
    results: list[int] = []
    with OriginServer(place.folder, OriginSettings(port=0)).running() as url:

        def read() -> None:
            origin = Origin(url, [place.key.public], secret=place.secret)
            found = find(origin)
            assert found is not None
            results.append(len(fetch_all(origin, found)))
            origin.close()

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [18] * 8


# ---- TLS


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    about = ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*command, *about, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return cert, key


def test_tls_hides_the_token_and_only_known_certificates_are_believed(
    place: Place, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    settings = OriginSettings(port=0, tokens=AccessTokens([TOKEN]), tls_cert=cert, tls_key=key)
    with OriginServer(place.folder, settings).running() as url:
        assert url.startswith("https://")
        known = ssl.create_default_context(cafile=str(cert))
        origin = Origin(url, [place.key.public], secret=place.secret, token=TOKEN, tls=known)
        found = find(origin)
        assert found is not None and len(fetch_all(origin, found)) == 18
        origin.close()
        stranger = Origin(url, [place.key.public], secret=place.secret, token=TOKEN)
        with pytest.raises(OriginFailed, match="certificate|There is no file"):
            find(stranger)
        plain = Origin(url.replace("https", "http"), [place.key.public], secret=place.secret)
        with pytest.raises(OriginFailed):
            find(plain)


def test_files_that_are_no_certificate_are_refused(place: Place, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    (tmp_path / "x.pem").chmod(0o600)
    for file in (tmp_path / "x.pem", tmp_path / "missing.pem"):
        with pytest.raises(InvalidSetting, match="certificate|There is no file"):
            OriginServer(place.folder, OriginSettings(port=0, tls_cert=file, tls_key=file))


def _raw_get(http: httpx.Client, path: str) -> bytes:
    """Without a client that tidies paths up."""
    with socket.create_connection((http.base_url.host, http.base_url.port or 80), 30) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)
