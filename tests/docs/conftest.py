"""What the pages of the docs need to be run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs.pages import ROOT, commands


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    pages = getattr(metafunc.module, "PAGES", None)
    if pages is not None and "command" in metafunc.fixturenames:
        found = commands(pages)
        names = [f"{where}: {command[:40]}" for where, command, _ in found]
        metafunc.parametrize(("where", "command", "prints"), found, ids=names)
    if pages is not None and "page" in metafunc.fixturenames:
        metafunc.parametrize("page", pages)


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """Where the server of the guide listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = str(free.getsockname()[1])
    rekindle = Path(sys.executable).parent / "rekindle"
    server = subprocess.Popen([rekindle, "serve", "smollm2", "--port", number], cwd=ROOT, stderr=subprocess.PIPE)
    try:
        assert server.stderr is not None and b"/v1" in server.stderr.readline()
        with httpx.Client(transport=httpx.HTTPTransport(retries=10), timeout=120) as client:
            client.get(f"http://127.0.0.1:{number}/health")  # it says where it is before it listens
        yield number
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
