"""Connections of commands, and the jobs they bring: to the daemon, or to a server that has their model loaded."""

from __future__ import annotations

import logging
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rekindle.daemon.jobs import Job, run_job
from rekindle.daemon.private_socket import JobConnection
from rekindle.daemon.spec import DaemonSpec
from rekindle.errors import RekindleError
from rekindle.models.files import file_version
from rekindle.models.sources import model_version
from rekindle.session.reply_stream import ReplyStream
from rekindle.session.session import Session

log = logging.getLogger("rekindle.daemon")

REQUEST_SECONDS = 10.0  # for a client to send its request


@contextmanager
def accepting_commands(session: Session, spec: DaemonSpec) -> Iterator[None]:
    """While the block runs, this user's commands for the same model and settings run here: a server has it loaded."""
    version = model_version(spec.model)

    def answer(client: JobConnection) -> None:
        request = client.receive(REQUEST_SECONDS)
        if request is not None and request["kind"] == "job" and version == model_version(spec.model):
            answer_job(session, request["job"], client)

    try:
        path = spec.server_socket_path
        path.unlink(missing_ok=True)  # of a server that was killed, or of an older one: the newest gets the commands
        listener = Listener(str(path), answer)
    except OSError as error:
        log.info("commands start a model of their own: %s", error)
        yield
        return
    bound = file_version(path)
    with listener:
        threading.Thread(target=listener.serve_forever, name="rekindle-commands", daemon=True).start()
        try:
            yield
        finally:
            with suppress(OSError):
                if file_version(path) == bound:
                    path.unlink()
            listener.shutdown()


class Listener(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A thread for each connection. What `answer` raises is raised again by the client."""

    request_queue_size = 64

    def __init__(self, path: str, answer: Callable[[JobConnection], None]) -> None:
        self._answer = answer
        super().__init__(path, socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  (the name is given)
        client = JobConnection(request)
        try:
            self._answer(client)
        except ConnectionError:
            log.info("a client left", exc_info=True)
        except Exception as error:  # noqa: BLE001  (raised again by the client)
            _send_error(client, error)
        finally:
            client.close()


def answer_job(session: Session, job: Job, client: JobConnection, load_seconds: float | None = None) -> None:
    """Do a job and send its events and its result. The client sees the end when all of its KV is on disk.

    Its reply is cancelled when the client goes away, also while its prompt is computed.
    """
    gone, streams = threading.Event(), list[ReplyStream]()

    def watch() -> None:
        for _ in client.messages():  # nothing more is expected from it, but the end
            pass
        gone.set()
        for stream in streams:
            stream.cancel()

    def started(stream: ReplyStream) -> None:
        streams.append(stream)
        if gone.is_set():
            stream.cancel()

    threading.Thread(target=watch, daemon=True).start()
    result = run_job(session, job, client.send, started)
    client.send({"result": {**result, "load_seconds": load_seconds}})
    session.flush()


def _send_error(client: JobConnection, error: Exception) -> None:
    kind, message = type(error).__name__, str(error)
    if not isinstance(error, RekindleError):
        log.error("a job failed", exc_info=error)
        kind, message = "RekindleError", f"The model failed in the background: {error!r}"
    with suppress(OSError):
        client.send({"error": {"type": kind, "message": message}})
