"""Commands as clients of the daemon: find the one for their model, or start it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle import errors
from rekindle.daemon.private_socket import JobConnection, connect, sockets
from rekindle.daemon.spec import DaemonSpec
from rekindle.errors import DaemonFailed, RekindleError
from rekindle.machine import open_private

if TYPE_CHECKING:
    from rekindle.daemon.jobs import Event, Job, Send
    from rekindle.models.download import Progress

log = logging.getLogger("rekindle.daemon")

_START_SECONDS = 60.0  # to import and listen; the model is loaded after that
_STATUS_SECONDS = 5.0
_ATTEMPTS = 3  # a daemon may be leaving at that moment


class DaemonClient:
    """Runs jobs in the daemon of a model."""

    def __init__(self, spec: DaemonSpec, keep_alive_seconds: float | None, progress: Progress) -> None:
        """`keep_alive_seconds`: how long the model stays loaded after a job; None: for ever.

        Raises `OSError` if this user cannot have a private socket.
        """
        self._path = spec.socket_path
        self._server_path = spec.server_socket_path
        self._request = {
            "kind": "job",
            "model": spec.model,
            "settings": spec.settings,
            "keep_alive": keep_alive_seconds,
        }
        self._progress = progress

    def run(self, job: Job, send: Send) -> dict[str, Any]:
        """See `JobRunner`. Raises what the session raises, and `DaemonFailed`."""
        if (served := connect(self._server_path)) and (result := self._exchange(served, job, send)):
            return result
        for _ in range(_ATTEMPTS):
            result = self._exchange(connect(self._path) or self._start(), job, send)
            if result is not None:
                return {**result, "stays_seconds": self._request["keep_alive"]}
        raise self._failed("It left three times before it answered.")

    def _exchange(self, connection: JobConnection, job: Job, send: Send) -> dict[str, Any] | None:
        """None if the daemon left without an answer."""
        result, answered = None, False
        try:
            connection.send({**self._request, "job": job})
            for event in connection.messages():  # also after the result: the KV is written until the end
                answered = True
                result = event.get("result", result)
                self._take(event, send)
        except OSError:
            if answered:
                raise
        finally:
            connection.close()
        if result is None and answered:
            raise self._failed("It ended before it answered.")
        return result

    def _take(self, event: Event, send: Send) -> None:
        if "stage" in event:
            self._progress(*event["stage"])
        elif "warning" in event:
            log.warning("%s", event["warning"])
        elif "error" in event:
            raise _error_of(event["error"])
        elif "result" not in event:
            send(event)

    def _start(self) -> JobConnection:
        """Start the daemon. One model at a time stays: those of others that are idle leave first."""
        for path in sockets():
            ask(path, {"kind": "leave", "only_if_idle": True})
        with open_private(self._log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rekindle.daemon.process"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd="/",
                start_new_session=True,  # Ctrl-C is for the command
            )
        assert process.stdin is not None
        with process.stdin as described:
            described.write(json.dumps({**self._request, "socket": str(self._path)}).encode() + b"\n")
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            ended = process.poll()  # before connecting: it may have found another one, which listens
            if (connection := connect(self._path)) is not None:
                process.returncode = 0  # it goes on without this process
                return connection
            if ended:
                raise self._failed(f"It ended with status {ended}.")
            time.sleep(0.02)
        raise self._failed("It does not answer.")

    @property
    def _log(self) -> Path:
        return self._path.with_suffix(".log")

    def _failed(self, reason: str) -> DaemonFailed:
        return DaemonFailed(
            f"The background process for the model failed: {reason} Its log: {self._log}. --no-daemon does without it."
        )


def ask(path: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """The result of a request to the daemon at a socket; None if there is none."""
    connection = connect(path)
    if connection is None:
        return None
    try:
        connection.send(request)
        answer = connection.receive(_STATUS_SECONDS)
    except OSError:
        return None
    finally:
        connection.close()
    return None if answer is None else answer.get("result")


def is_running(spec: DaemonSpec) -> bool:
    """Whether a daemon or a server with this model answers commands now."""
    for path in (spec.server_socket_path, spec.socket_path):
        if (connection := connect(path)) is not None:
            connection.close()
            return True
    return False


def running() -> list[tuple[Path, dict[str, Any]]]:
    """This user's daemons: socket and status."""
    asked = [(path, ask(path, {"kind": "status"})) for path in sockets()]
    return [(path, status) for path, status in asked if status is not None]


def _error_of(about: dict[str, str]) -> RekindleError:
    """The error that the session raised, of the same class."""
    kind = getattr(errors, about["type"], RekindleError)
    error: RekindleError = RekindleError.__new__(kind)
    Exception.__init__(error, about["message"])
    return error
