"""Whatever an origin sends in place of what was published, a client notices, within its limits, and says so."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rekindle.codec.cipher import Secret
from rekindle.core.cells import Cell
from rekindle.errors import Cancelled, InvalidSetting
from rekindle.remote.client import Origin, PublishedPrefix
from rekindle.remote.connection import OriginFailed, OriginLimits, Stop
from rekindle.remote.ladder import LevelLimit
from rekindle.remote.manifest import SignedManifest
from rekindle.remote.signing import SigningKey, TrustedKeys
from tests.remote.conftest import Place
from tests.remote.places import LAYOUT, MODEL, QUICK, TOKENS, Liar, Reply, cells_of, fetch_all, find, publish, synthetic


@pytest.fixture
def origin(place: Place, liar: Liar) -> Iterator[Origin]:
    made = Origin(liar.url, [place.key.public], secret=place.secret, limits=QUICK)
    yield made
    made.close()


@pytest.fixture
def found(origin: Origin) -> PublishedPrefix:
    found = find(origin)
    assert found is not None
    return found


def on(part: str, change: Callable[[Reply], None]) -> Callable[[Reply], None]:
    """A lie about files whose path holds `part`."""
    return lambda reply: change(reply) if part in reply.path else None


# ---- manifests and indexes


def test_the_truth_is_believed(origin: Origin, found: PublishedPrefix, liar: Liar) -> None:
    assert found.chunks == 6 and len(fetch_all(origin, found)) == 18
    assert liar.connections == 1  # kept alive


def test_without_a_trusted_key_nothing_is_used(place: Place, liar: Liar) -> None:
    with pytest.raises(InvalidSetting, match="public key"):
        Origin(liar.url, [])
    stranger = Origin(liar.url, [SigningKey.new().public], secret=place.secret)
    assert find(stranger) is None
    assert not any("manifest" in path for path in liar.paths)  # it says who signed it: no need to look
    stranger.close()


def test_a_manifest_signed_by_another_key_is_refused(place: Place, liar: Liar) -> None:
    """The index says that it is trusted; the manifest is not."""
    trusted = SigningKey.new()
    for index in (place.folder / "by-chunk").iterdir():
        index.write_text(index.read_text().replace(place.key.name, trusted.name))
    origin = Origin(liar.url, [trusted.public], secret=place.secret)
    with pytest.raises(OriginFailed, match="not trusted"):
        find(origin)
    forged = SignedManifest.from_bytes((place.files / "manifest").read_bytes())
    forged = replace(forged, header=replace(forged.header, key=trusted.name))
    (place.files / "manifest").write_bytes(forged.to_bytes())
    with pytest.raises(OriginFailed, match="signature is wrong"):
        find(origin)
    origin.close()


@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_changed_byte_of_a_manifest_is_believed(where: float, flip: int, place: Place) -> None:
    data = bytearray((place.files / "manifest").read_bytes())
    data[int(where * len(data))] ^= flip
    keys = TrustedKeys([place.key.public])
    with pytest.raises(ValueError):
        SignedManifest.from_bytes(bytes(data)).open(keys, place.secret)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("no signature", lambda data: data.split(b"\n", 2)[0] + b"\n\n" + data.split(b"\n", 2)[2]),
        ("an empty one", lambda data: b""),
        ("half of it", lambda data: data[: len(data) // 2]),
        ("something behind it", lambda data: data + b" "),
        ("another signature", lambda data: data.replace(data.split(b"\n")[1], b"ab" * 64, 1)),
        ("a page of errors", lambda data: b"<html>\n" * 100),
        ("nothing but brackets", lambda data: b"[" * 100_000),
    ],
)
def test_other_manifests_are_refused(what: str, change: Callable[[bytes], bytes], origin: Origin, liar: Liar) -> None:
    def lie(reply: Reply) -> None:
        reply.body = change(reply.body)

    liar.lie = on("manifest", lie)
    with pytest.raises(OriginFailed, match="is refused"):
        find(origin)


def test_a_manifest_of_another_context_or_model_is_refused(
    place: Place, liar: Liar, origin: Origin, tmp_path: Path
) -> None:
    """Both are signed by the same key: what is signed must also be what was asked for."""
    models = (replace(MODEL, weights="cc" * 16), replace(MODEL, adapter="dd" * 16))
    others = [synthetic(model) for model in models] + [synthetic(tokens=TOKENS[:400])]
    for source in others:
        other = publish(tmp_path / "other", place.key, "raw", source, place.secret).context
        data = (tmp_path / "other" / "contexts" / other / "manifest").read_bytes()

        def lie(reply: Reply, data: bytes = data) -> None:
            reply.body = data

        liar.lie = on(f"{place.context}/manifest", lie)
        with pytest.raises(OriginFailed, match="another context"):
            find(origin)


def test_other_models_adapters_and_layouts_find_nothing(origin: Origin) -> None:
    assert find(origin, model=replace(MODEL, weights="cc" * 16)) is None
    assert find(origin, model=replace(MODEL, adapter="dd" * 16)) is None
    for layout in (replace(LAYOUT, layers=LAYOUT.layers[:2]), replace(LAYOUT, dtype="uint8")):
        assert find(origin, model=replace(MODEL, layout=layout)) is None


def test_another_dtype_device_or_engine_finds_quantized_levels_alone(origin: Origin) -> None:
    for model in (replace(MODEL, exact="cc" * 16), replace(MODEL, layout=replace(LAYOUT, dtype="float16"))):
        found = find(origin, model=model)
        assert found is not None and found.levels == ("q4",) and not LevelLimit().allows(found)
        assert LevelLimit().why_none(found) == "dtype" and LevelLimit(0.01).why_none(found) == "budget"


def test_a_plain_manifest_is_not_taken_from_who_has_a_secret_nor_the_other_way_round(tmp_path: Path) -> None:
    key, secret = SigningKey.new(), Secret.new()
    for own, others in ((None, secret), (secret, None), (Secret.new(), secret)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        context = publish(folder, key, "raw", secret=own).context
        signed = SignedManifest.from_bytes((folder / "contexts" / context / "manifest").read_bytes())
        with pytest.raises(ValueError, match="encrypted"):
            signed.open(TrustedKeys([key.public]), others)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b"null",
        b'{"format":"rekindle-index/2","full":false,"contexts":[]}',
        b'{"format":"rekindle-index/1","full":false,"contexts":[{"context":"../../x","key":"","hints":""}]}',
        b'{"format":"rekindle-index/1","full":false,"contexts":[{"context":7,"key":"","hints":""}]}',
        b'{"format":"rekindle-index/1","full":false,"contexts":7}',
    ],
)
def test_an_index_that_is_none_is_said_to_be_none(body: bytes, origin: Origin, liar: Liar) -> None:
    def lie(reply: Reply) -> None:
        reply.body = body

    liar.lie = on("by-chunk", lie)
    with pytest.raises(OriginFailed, match="index cannot be read"):
        find(origin)


def test_an_index_that_names_what_is_not_there_wastes_a_few_requests_only(
    place: Place, origin: Origin, liar: Liar
) -> None:
    def lie(reply: Reply) -> None:
        fields = json.loads(reply.body)
        fields["contexts"] = [{**fields["contexts"][0], "context": f"{number:032x}"} for number in range(32)]
        fields["full"] = True
        reply.body = json.dumps(fields).encode()

    liar.lie = on("by-chunk", lie)
    assert find(origin) is None
    assert len(liar.paths) <= 3 + QUICK.candidates


# ---- slices


def test_swapped_slices_are_noticed(place: Place, origin: Origin, found: PublishedPrefix, liar: Liar) -> None:
    """Slices of the same size, each of them signed for, in each other's place."""
    level = found.manifest.level("q4")
    pairs = [(a, b) for a in cells_of(found) for b in cells_of(found) if a < b]
    first, second = next((a, b) for a, b in pairs if len(level.place(a)) == len(level.place(b)))
    path = place.files / level.file
    data = bytearray(path.read_bytes())
    a, b = level.place(first), level.place(second)
    data[a.start : a.stop], data[b.start : b.stop] = data[b.start : b.stop], data[a.start : a.stop]
    path.write_bytes(data)
    with pytest.raises(OriginFailed, match="not the one that was published"):
        fetch_all(origin, found, "q4")


@pytest.mark.parametrize("region", ["header", "side", "codes", "end"])
@pytest.mark.parametrize("level", ["raw", "q4"])
def test_every_flipped_bit_is_noticed_and_what_came_before_is_good(
    region: str, level: str, place: Place, origin: Origin, found: PublishedPrefix
) -> None:
    file, cell = found.manifest.level(level), Cell(3, 1)
    span = file.place(cell)
    at = {"header": 5, "side": len(span) // 4, "codes": len(span) // 2, "end": len(span) - 1}[region]
    path = place.files / file.file
    data = bytearray(path.read_bytes())
    data[span.start + at] ^= 0x10
    path.write_bytes(data)
    came = []
    with pytest.raises(OriginFailed, match="chunk 3, layer 1 is not the one"):
        for one in origin.fetch(found, cells_of(found), level):
            came.append(one.cell)
    assert came == cells_of(found)[:10]


def test_slices_of_another_level_context_or_secret_are_noticed(
    place: Place, origin: Origin, found: PublishedPrefix
) -> None:
    level = found.manifest.level("q4")
    cells = cells_of(found)
    (place.files / level.file).write_bytes((place.files / found.manifest.level("raw").file).read_bytes())
    with pytest.raises(OriginFailed, match="other bytes than were asked for"):
        fetch_all(origin, found, "q4", cells)  # another size
    (place.files / level.file).write_bytes(bytes(level.size_bytes))
    with pytest.raises(OriginFailed, match="not the one that was published"):
        fetch_all(origin, found, "q4", cells)


def test_an_encrypted_slice_cannot_be_opened_as_another_one(tmp_path: Path) -> None:
    """Even by somebody who could sign for it."""
    from rekindle.remote.manifest import slice_place

    cipher = Secret.new().cipher(b"slices", bytes(32))
    sealed = cipher.seal(5, b"kv", slice_place("c" * 32, "q4", Cell(1, 2)))
    assert cipher.open(5, sealed, slice_place("c" * 32, "q4", Cell(1, 2))) == b"kv"
    others = (("d" * 32, "q4", Cell(1, 2)), ("c" * 32, "q5", Cell(1, 2)), ("c" * 32, "q4", Cell(2, 1)))
    for other in others:
        with pytest.raises(ValueError, match="changed, or encrypted"):
            cipher.open(5, sealed, slice_place(*other))
    with pytest.raises(ValueError, match="changed, or encrypted"):
        cipher.open(6, sealed, slice_place("c" * 32, "q4", Cell(1, 2)))


def _whole(reply: Reply) -> None:
    reply.status, reply.headers = 200, {}


def _shifted(reply: Reply) -> None:
    reply.headers["Content-Range"] = "bytes 1-2/3"


def _unknown_size(reply: Reply) -> None:
    reply.headers["Content-Range"] = reply.headers["Content-Range"].split("/")[0] + "/*"


def _no_range(reply: Reply) -> None:
    reply.headers["Content-Range"] = ""


def _longer(reply: Reply) -> None:
    reply.body += b"more"


def _less(reply: Reply) -> None:
    reply.headers["Content-Length"] = str(len(reply.body))
    reply.body = reply.body[:-10]
    reply.headers["Connection"] = "close"


def _short(reply: Reply) -> None:
    reply.body = reply.body[:-10]


def _lying_length(reply: Reply) -> None:
    reply.headers["Content-Length"] = "99999999999"


def _no_length(reply: Reply) -> None:
    reply.headers["Content-Length"] = ""
    reply.headers["Connection"] = "close"


def _odd_length(reply: Reply) -> None:
    reply.headers["Content-Length"] = "٣"


def _gzip(reply: Reply) -> None:
    reply.headers["Content-Encoding"] = "gzip"


def _elsewhere(reply: Reply) -> None:
    reply.status, reply.headers["Location"] = 302, "http://127.0.0.1:1/else"


def _gone(reply: Reply) -> None:
    reply.status = 404


def _error(reply: Reply) -> None:
    reply.status = 503


def _chunked(reply: Reply) -> None:
    data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(reply.body), reply.body)
    reply.headers |= {"Transfer-Encoding": "chunked", "Content-Length": ""}
    reply.body = data


LIES = [
    (_whole, "whole files in place of ranges"),
    (_shifted, "other bytes than were asked for"),
    (_unknown_size, "other bytes than were asked for"),
    (_no_range, "other bytes than were asked for"),
    (_longer, "announces"),
    (_less, "ends early|silent"),
    (_short, "announces"),
    (_lying_length, "announces"),
    (_no_length, "announces None"),
    (_odd_length, "announces|does not answer"),
    (_gzip, "compressed"),
    (_elsewhere, "redirect"),
    (_gone, "answers 404"),
    (_error, "answers 503"),
    (_chunked, "announces None"),
]


@pytest.mark.parametrize(("lie", "reason"), LIES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_range_that_is_not_the_one_is_refused(
    lie: Callable[[Reply], None], reason: str, origin: Origin, found: PublishedPrefix, liar: Liar
) -> None:
    liar.lie = on(".kv", lie)
    with pytest.raises(OriginFailed, match=reason):
        fetch_all(origin, found)
    liar.lie = on(".kv", lambda reply: None)
    assert len(fetch_all(origin, found)) == 18  # a lie leaves nothing behind


@pytest.mark.parametrize("part", ["by-chunk", "manifest"])
@pytest.mark.parametrize("lie", [_elsewhere, _gzip, _error, _less, _lying_length], ids=lambda value: value.__name__)
def test_small_files_are_refused_as_well(part: str, lie: Callable[[Reply], None], origin: Origin, liar: Liar) -> None:
    liar.lie = on(part, lie)
    with pytest.raises(OriginFailed):
        find(origin)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("part", ["by-chunk", "manifest"])
def test_no_file_is_read_beyond_its_limit(part: str, chunked: bool, place: Place, liar: Liar) -> None:
    limits = replace(QUICK, index_bytes=1000, manifest_bytes=20_000)
    origin = Origin(liar.url, [place.key.public], secret=place.secret, limits=limits)

    def endless(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n" if chunked else b"") + b"\r\n")
        while True:
            connection.sendall(b"fff\r\n" + b"x" * 0xFFF + b"\r\n" if chunked else b"x" * 4096)

    def lie(reply: Reply) -> None:
        reply.raw = endless

    liar.lie = on(part, lie)
    with pytest.raises(OriginFailed, match="more than"):
        find(origin)
    origin.close()


# ---- time


def _silent(connection: socket.socket) -> None:
    time.sleep(30)


def _trickling_headers(connection: socket.socket) -> None:
    for byte in b"HTTP/1.1 206 Partial Content\r\nX-Long: " + b"x" * 10_000:
        connection.sendall(bytes([byte]))
        time.sleep(0.02)


def _endless_headers(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 206 Partial Content\r\n")
    while True:
        connection.sendall(b"X-More: " + b"y" * 2000 + b"\r\n")


def _endless_continues(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def _noise(connection: socket.socket) -> None:
    connection.sendall(b"\x00\xff" * 5000)


def _hangs_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("part", ["by-chunk", "manifest", ".kv"])
@pytest.mark.parametrize(
    "trick", [_silent, _trickling_headers, _endless_headers, _endless_continues, _noise, _hangs_up]
)
def test_no_trick_holds_a_client_longer_than_its_limits(
    part: str, trick: Callable[[socket.socket], None], origin: Origin, found: PublishedPrefix, liar: Liar
) -> None:
    def lie(reply: Reply) -> None:
        reply.raw = trick

    liar.lie = on(part, lie)
    with pytest.raises(OriginFailed):
        if part == ".kv":
            fetch_all(origin, found)
        else:
            find(origin)


def test_a_body_that_trickles_is_ended_though_it_is_never_silent_for_long(
    origin: Origin, found: PublishedPrefix, liar: Liar
) -> None:
    def lie(reply: Reply) -> None:
        def trickle(connection: socket.socket) -> None:
            head = "".join(f"{name}: {value}\r\n" for name, value in reply.headers.items())
            length = f"Content-Length: {len(reply.body)}\r\n"
            connection.sendall(f"HTTP/1.1 206 Partial Content\r\n{head}{length}\r\n".encode())
            for start in range(len(reply.body)):
                connection.sendall(reply.body[start : start + 1])
                time.sleep(0.02)

        reply.raw = trickle

    liar.lie = on(".kv", lie)
    with pytest.raises(OriginFailed, match="slow"):
        fetch_all(origin, found)


def test_a_reader_that_takes_its_time_does_not_make_the_origin_slow(origin: Origin, found: PublishedPrefix) -> None:
    transfer = iter(origin.fetch(found, cells_of(found), "raw"))
    next(transfer)
    time.sleep(2 * QUICK.silence_seconds)
    assert len(list(transfer)) == 17


def test_finding_takes_no_longer_than_it_may(place: Place, liar: Liar) -> None:
    patient = OriginLimits(silence_seconds=60.0)
    origin = Origin(liar.url, [place.key.public], secret=place.secret, limits=patient)

    def lie(reply: Reply) -> None:
        reply.raw = _silent

    liar.lie = lie
    with pytest.raises(OriginFailed, match="slow"):
        origin.find(TOKENS, MODEL, timeout_seconds=0.2)
    origin.close()


@pytest.mark.parametrize("when", ["before", "headers", "body"])
def test_a_transfer_is_stopped_from_another_thread(when: str, place: Place, liar: Liar) -> None:
    patient = OriginLimits(silence_seconds=600.0)
    origin = Origin(liar.url, [place.key.public], secret=place.secret, limits=patient)
    found = find(origin)
    assert found is not None
    reached = threading.Event()

    def hang(reply: Reply) -> None:
        def send(connection: socket.socket) -> None:
            if when == "body":
                head = f"Content-Range: {reply.headers['Content-Range']}\r\nContent-Length: {len(reply.body)}\r\n\r\n"
                connection.sendall(f"HTTP/1.1 206 Partial Content\r\n{head}".encode() + reply.body[:10])
            reached.set()
            time.sleep(600)

        reply.raw = send

    liar.lie = on(".kv", hang)
    transfer = origin.fetch(found, cells_of(found), "raw")
    if when == "before":
        transfer.cancel()
    else:
        threading.Thread(target=lambda: (reached.wait(), time.sleep(0.05), transfer.cancel()), daemon=True).start()
    with pytest.raises(Cancelled):
        list(transfer)
    liar.lie = on(".kv", lambda reply: None)
    assert len(fetch_all(origin, found)) == 18
    origin.close()


def test_finding_is_stopped_from_another_thread(place: Place, liar: Liar) -> None:
    origin = Origin(liar.url, [place.key.public], limits=OriginLimits(silence_seconds=600.0), secret=place.secret)
    stop, reached = Stop(), threading.Event()

    def hang(reply: Reply) -> None:
        reply.raw = lambda connection: (reached.set(), time.sleep(600))  # type: ignore[assignment,return-value]

    liar.lie = hang
    threading.Thread(target=lambda: (reached.wait(), stop.set()), daemon=True).start()
    with pytest.raises(Cancelled):
        origin.find(TOKENS, MODEL, stop=stop)
    origin.close()


def test_nobody_at_the_address_is_a_failure_like_any_other(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        for url in (f"http://127.0.0.1:{taken.getsockname()[1]}", "http://name.invalid", "https://127.0.0.1:9"):
            origin = Origin(url, [place.key.public], limits=QUICK)
            with pytest.raises(OriginFailed):
                find(origin)


def test_a_connection_that_was_closed_while_it_waited_is_replaced(
    origin: Origin, found: PublishedPrefix, liar: Liar
) -> None:
    liar.lie = lambda reply: reply.headers.update({"Connection": "close"})  # said
    assert find(origin) is not None
    liar.lie = lambda reply: None
    assert find(origin) is not None
    (line,) = origin._http._idle
    assert line.connected is not None
    line.connected.shutdown(socket.SHUT_RDWR)  # not said
    assert len(fetch_all(origin, found)) == 18


@pytest.mark.parametrize(
    "url", ["ftp://x", "x", "http://", "http://u:p@x", "http://x?y", "http://x#y", "http://x:99999", "file:///etc"]
)
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(InvalidSetting):
        Origin(url, [SigningKey.new().public])


@pytest.mark.parametrize("token", ["with\r\nX-Header: injected", "é", " x", ""])
def test_a_token_cannot_become_something_else(token: str) -> None:
    with pytest.raises(InvalidSetting):
        Origin("http://x", [SigningKey.new().public], token=token)


# ---- requests


def test_neighbours_are_asked_for_together_and_order_is_kept(
    origin: Origin, found: PublishedPrefix, liar: Liar
) -> None:
    cells = [Cell(4, 1), Cell(4, 2), Cell(5, 0), Cell(0, 0), Cell(0, 2), Cell(1, 0)]
    transfer = origin.fetch(found, cells, "q4")
    assert transfer.requests == 3
    assert [one.cell for one in transfer] == cells


def test_no_request_asks_for_more_than_it_may(place: Place, liar: Liar) -> None:
    for most in (1, 4000, 1 << 20):
        limits = replace(QUICK, request_bytes=most, ahead_bytes=most)
        origin = Origin(liar.url, [place.key.public], secret=place.secret, limits=limits)
        found = find(origin)
        assert found is not None
        transfer = origin.fetch(found, cells_of(found), "q4")
        assert transfer.requests >= found.manifest.level("q4").size_bytes / max(most, 4000)
        assert [one.cell for one in transfer] == cells_of(found)
        origin.close()
    assert liar.connections <= 3 * 2  # the next request goes ahead on a second connection


def test_a_token_is_sent_and_only_to_the_origin(place: Place, liar: Liar) -> None:
    origin = Origin(liar.url, [place.key.public], secret=place.secret, token="correct-horse-battery")
    assert find(origin) is not None
    assert liar.authorizations == {"Bearer correct-horse-battery"}
    origin.close()


def test_tokens_that_were_changed_are_refused(place: Place, origin: Origin, found: PublishedPrefix) -> None:
    assert origin.tokens(found) == TOKENS
    path = place.files / found.manifest.token_file.file
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(OriginFailed, match="not those that were published"):
        origin.tokens(found)
    shutil.rmtree(place.files)
    with pytest.raises(OriginFailed):
        origin.tokens(found)
