"""A shaped link: every byte comes, in order, as fast as its trace says and no faster."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks.stream.shaping import ShapedLink, ShapedProxy
from benchmarks.stream.traces import Trace

PAYLOAD = np.random.default_rng(0).bytes(1 << 19)


@contextmanager
def serving() -> Iterator[tuple[str, int]]:
    """A server that answers whatever is asked with as many bytes of the payload as were named."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(client: socket.socket) -> None:
        with client:
            while asked := client.recv(64):
                client.sendall(PAYLOAD[: int(asked)])

    def serve() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def steady(rate: float) -> Trace:
    return Trace("steady", np.ones(1), np.full(1, rate))


def connect(proxy: ShapedProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), 10)


def fetch(proxy: ShapedProxy, size: int) -> tuple[bytes, float]:
    """So many bytes, and how long they took."""
    with connect(proxy) as client:
        started, data = time.monotonic(), b""
        client.sendall(str(size).encode())
        while len(data) < size:
            part = client.recv(1 << 16)
            assert part, "it hung up"
            data += part
        return data, time.monotonic() - started


def test_all_bytes_come_and_no_faster_than_the_trace() -> None:
    with serving() as place, ShapedProxy(*place, steady(4e6)) as proxy:
        for rate in (4e6, 1e6):
            proxy.begin(steady(rate))
            data, seconds = fetch(proxy, len(PAYLOAD))
            assert data == PAYLOAD
            assert proxy.link.carried_bytes == len(PAYLOAD)
            assert seconds >= len(PAYLOAD) / rate - 0.06  # what the bucket holds comes at once


def test_a_link_that_gets_faster_brings_less_at_first() -> None:
    """Bytes by the moment the link says they are through: no clock of this machine is in it."""
    link = ShapedLink(Trace("step", np.array([100.0, 100.0]), np.array([1e3, 1e5])))
    first = link.carry(100_000)
    assert first == pytest.approx(100.0, abs=0.5)
    assert link.carry(100_000) - first == pytest.approx(1.0, abs=0.5)


def test_time_that_was_not_used_is_gone() -> None:
    link = ShapedLink(steady(1e5))
    time.sleep(0.3)
    assert link.carry(100_000) >= 0.9


def test_connections_share_the_link() -> None:
    with serving() as place, ShapedProxy(*place, steady(1e6)) as proxy:
        took: list[float] = []
        threads = [threading.Thread(target=lambda: took.append(fetch(proxy, 1 << 17)[1])) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert proxy.link.carried_bytes == 3 << 17
        assert max(took) >= 3 * (1 << 17) / 1e6 - 0.06


def test_nothing_comes_while_the_link_is_dead_and_closing_does_not_wait_for_it() -> None:
    before = threading.active_count()
    with serving() as place:
        proxy = ShapedProxy(*place, Trace("dead for long", np.array([1000.0, 1.0]), np.array([0.0, 1e6])))
        with connect(proxy) as client:
            client.sendall(b"1000")
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.recv(1)
            proxy.close()
            proxy.close()
            client.settimeout(10)
            assert client.recv(1) == b""
        with pytest.raises(OSError, match=r".+"):
            connect(proxy)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_a_request_is_late_by_the_latency() -> None:
    with serving() as place, ShapedProxy(*place, steady(1e8), latency_seconds=0.2) as proxy:
        data, seconds = fetch(proxy, 10)
        assert data == PAYLOAD[:10] and seconds >= 0.2


def test_a_server_that_is_not_there_hangs_up() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ShapedProxy("127.0.0.1", port, steady(1e6)) as proxy, connect(proxy) as client:
        assert client.recv(1) == b""
