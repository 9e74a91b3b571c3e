"""The daemon: a process that keeps an engine loaded, does the jobs of commands, and leaves when nobody needs it.

Commands start it in the background: `python -m rekindle.daemon.process`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from rekindle.daemon.answering import REQUEST_SECONDS, Listener, answer_job
from rekindle.daemon.private_socket import JobConnection
from rekindle.daemon.spec import DaemonSpec
from rekindle.engine.base import Engine
from rekindle.engine.load import EngineOptions, load_engine
from rekindle.machine import open_private
from rekindle.models import adapter_registry
from rekindle.models.files import file_version
from rekindle.models.sources import model_version
from rekindle.session.keep_alive import KeepAlive
from rekindle.session.model_memo import ModelMemo
from rekindle.session.session import Session
from rekindle.settings import SETTINGS, Settings

log = logging.getLogger("rekindle.daemon")

_LOOK_SECONDS = 0.05  # how often a client that waits is shown how far loading is


def main() -> None:
    """Run the daemon that a line of JSON on standard input describes, unless one is running."""
    about = json.loads(sys.stdin.readline())
    path = Path(about["socket"])
    with open_private(path.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another one is running, and answers
            return
        path.unlink(missing_ok=True)
        daemon = Daemon(path, lock, DaemonSpec(about["model"], about["settings"]), about["keep_alive"])
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=daemon.leave).start())
        daemon.serve()


class Daemon:
    """Listens at a socket as soon as it exists; jobs wait until the engine is loaded.

    Once it is leaving, a connection is closed without an answer, and the client starts another daemon.
    """

    def __init__(self, path: Path, lock: IO[str], spec: DaemonSpec, keep_alive_seconds: float | None) -> None:
        """The process that holds `lock` may listen at `path`."""
        self._path = path
        self._lock = lock
        self._started = time.time()
        self._model = _LoadedModel(spec)
        self._session = _SharedSession()
        self._leaving = False
        self._leaving_lock = threading.Lock()
        self._listener = Listener(str(path), self._answer)
        self._alive = KeepAlive(keep_alive_seconds, self.leave)

    def serve(self) -> None:
        """Answer until `leave`; then what was computed is kept and the model freed."""
        threading.Thread(target=self._model.load, name="rekindle-load", daemon=True).start()
        logging.getLogger("rekindle").addHandler(_ForwardedWarnings(self._session))
        with self._listener:  # leaving it waits for the last answers
            self._listener.serve_forever()
        self._alive.close()
        self._session.close()
        self._model.close()

    def leave(self) -> None:
        """Stop listening. Jobs that run are finished."""
        with self._leaving_lock:
            if self._leaving:
                return
            self._leaving = True
            self._path.unlink(missing_ok=True)
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # another one may start while this one ends
            threading.Thread(target=self._listener.shutdown).start()

    def _answer(self, client: JobConnection) -> None:
        request = client.receive(REQUEST_SECONDS)
        if request is None or self._leaving:
            return
        if request["kind"] == "status":
            client.send({"result": self._status()})
        elif request["kind"] == "leave":
            if not (request["only_if_idle"] and self._alive.users):
                self.leave()
            client.send({"result": {"leaving": self._leaving}})
        else:
            with self._alive.use():
                if not self._leaving:
                    self._do(request, client)

    def _do(self, request: dict[str, Any], client: JobConnection) -> None:
        try:
            self._alive.stay(request["keep_alive"])
            waited = self._model.wait(client)
            if self._model.has_changed():
                self.leave()  # without an answer, so that another one is started
                return
            settings = DaemonSpec(request["model"], request["settings"])
            with self._session.use(self._model, settings, client) as session:
                answer_job(session, request["job"], client, waited)
        finally:
            if self._model.failed:
                self.leave()

    def _status(self) -> dict[str, Any]:
        return {
            "model": self._model.spec.model,
            "pid": os.getpid(),
            "loaded": self._model.loaded,
            "running": self._alive.users,
            "uptime_seconds": time.time() - self._started,
            "leaves_in_seconds": self._alive.seconds_left,
        }


class _LoadedModel:
    """The engine once it is loaded, how far that is, or why it failed."""

    def __init__(self, spec: DaemonSpec) -> None:
        self.spec = spec
        self._engine: Future[Engine] = Future()
        self._stage: tuple[str, int, int] | None = None
        self.version: str | None = None

    @property
    def engine(self) -> Engine:
        """Raises why it cannot be loaded."""
        return self._engine.result()

    @property
    def loaded(self) -> bool:
        return self._engine.done() and not self.failed

    @property
    def failed(self) -> bool:
        return self._engine.done() and self._engine.exception() is not None

    def load(self) -> None:
        version = model_version(self.spec.model)  # before, so that no later change is missed
        try:
            engine = load_engine(self.spec.model, EngineOptions.of(Settings(**self.spec.settings)), self._report)
            self.version = version or model_version(self.spec.model)
            self._engine.set_result(engine)
        except Exception as error:  # noqa: BLE001  (raised again by the jobs that wait)
            self._engine.set_exception(error)

    def wait(self, client: JobConnection) -> float | None:
        """Wait until it is loaded and return how long that took; None if it was. Raises as `engine`."""
        started, sent = time.perf_counter(), None
        waited = not self._engine.done()
        while wait([self._engine], _LOOK_SECONDS).not_done:
            if self._stage != sent:
                sent = self._stage
                client.send({"stage": sent})
        self._engine.result()
        return time.perf_counter() - started if waited else None

    def has_changed(self) -> bool:
        """Whether the model's files are no longer those that were loaded."""
        return model_version(self.spec.model) != self.version

    def close(self) -> None:
        if self.loaded:
            self.engine.close()

    def _report(self, stage: str, done: int, total: int) -> None:
        self._stage = (stage, done, total)


class _SharedSession:
    """One session at a time on the engine. Jobs with the same settings share it, others wait until it is unused."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._key: object = None
        self._session: Session | None = None
        self._users = 0
        self._clients: set[JobConnection] = set()
        self._opening = False
        self._warnings: list[str] = []  # of opening it: every job gets them, as if it had opened it

    @contextmanager
    def use(self, model: _LoadedModel, spec: DaemonSpec, client: JobConnection) -> Iterator[Session]:
        key = json.dumps([spec.settings, _file_versions(spec.settings)])
        with self._changed:
            self._changed.wait_for(lambda: self._key == key or not self._users)
            if self._key != key:
                self.close()
                self._warnings, self._opening = [], True
                try:
                    memo = ModelMemo(spec.model, Settings(**spec.settings), model.version)
                    self._session = Session(model.engine, memo=memo, **spec.session_arguments)
                finally:
                    self._opening = False
                self._key = key
            for text in self._warnings:
                client.send({"warning": text})
            assert self._session is not None
            self._users += 1
            self._clients.add(client)
        try:
            yield self._session
        finally:
            with self._changed:
                self._users -= 1
                self._clients.discard(client)
                self._changed.notify_all()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._key = None

    def warn(self, text: str) -> None:
        """Send a warning to the clients whose jobs run."""
        if self._opening:
            self._warnings.append(text)
        for client in list(self._clients):
            with suppress(OSError):
                client.send({"warning": text})


class _ForwardedWarnings(logging.Handler):
    """What a session warns of goes to the commands, which print it."""

    def __init__(self, session: _SharedSession) -> None:
        super().__init__(logging.WARNING)
        self._session = session

    def emit(self, record: logging.LogRecord) -> None:
        self._session.warn(record.getMessage())


def _file_versions(settings: dict[str, Any]) -> list[str]:
    """Versions of the files that settings name: secrets, adapters. A changed one needs another session."""
    named = [Path(value) for name, value in settings.items() if isinstance(value, str) and SETTINGS[name].is_path]
    if adapter := settings["adapter"]:
        entry = adapter_registry.parse(adapter) if "=" in adapter else adapter_registry.lookup(adapter)
        folder = None if entry is None else Path(entry.path)
        named += [] if folder is None else [folder] if folder.is_file() else sorted(folder.glob("*"))
    return [file_version(path) for path in named if path.is_file()]


if __name__ == "__main__":
    main()
