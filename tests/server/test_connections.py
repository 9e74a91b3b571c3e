"""However many connections others open, those there are go on, and the process keeps files for itself."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import psutil
import pytest

from rekindle.errors import InvalidSetting
from rekindle.remote.publish.folder import OriginFolder
from rekindle.remote.publish.serve import OriginServer, OriginSettings
from rekindle.server.auth import ApiKeys, check_settings
from rekindle.settings import ServerSettings
from tests.server.conftest import Serve
from tests.server.hostile import answers_in, connected, head, read_until_closed
from tests.server.serving import eventually

LIMIT, MORE = 8, 150
_ASKED = head("GET", "/health")


def _status(connection: socket.socket) -> int:
    """Of a reply, which is read to its end; the connection stays open."""
    connection.sendall(_ASKED)
    answer = HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def _serves_no_more_than_its_limit(url: str, expected: int) -> None:
    process = psutil.Process()
    with ExitStack() as held:
        first = [held.enter_context(connected(url)) for _ in range(LIMIT)]
        assert [_status(one) for one in first] == [expected] * LIMIT
        before = process.num_fds()
        with ExitStack() as late:
            further = [late.enter_context(connected(url)) for _ in range(MORE)]
            further[0].sendall(_ASKED)
            (refused,) = answers_in(read_until_closed(further[0]))
            assert refused.status == 503 and refused.headers["retry-after"] and refused.headers["connection"] == "close"
            for one in further[1:]:
                read_until_closed(one)  # each is closed by the server, although it said nothing
            assert [_status(one) for one in first] == [expected] * LIMIT, "those there were go on"
        eventually(lambda: process.num_fds() <= before)
    eventually(lambda: _is_let_in(url, expected))


def _is_let_in(url: str, expected: int) -> bool:
    with connected(url) as connection:
        return _status(connection) == expected


def test_a_server_holds_no_more_connections_than_it_may(serve: Serve) -> None:
    _serves_no_more_than_its_limit(serve(max_connections=LIMIT).url, 200)


def test_an_origin_holds_no_more_connections_than_it_may(tmp_path: Path) -> None:
    OriginFolder(tmp_path, create=True)
    with OriginServer(tmp_path, OriginSettings(port=0, connections=LIMIT)).running() as url:
        _serves_no_more_than_its_limit(url, 404)


def test_a_server_without_connections_makes_no_sense() -> None:
    assert 0 < ServerSettings().max_connections <= 512, "half of the files that a process may have on many systems"
    with pytest.raises(InvalidSetting, match="connections"):
        check_settings(ServerSettings(max_connections=0), ApiKeys())
