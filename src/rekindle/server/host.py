"""The models of a server: each is opened when a request first names it, and has a service from then on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from starlette.types import Receive

from rekindle.core.scope import Scope
from rekindle.core.size import parse_duration, parse_limit
from rekindle.errors import Closed, InvalidSetting, RekindleError, nearest
from rekindle.idle.idle import IdleOptions
from rekindle.models import adapter_registry, ollama
from rekindle.models.download import Progress
from rekindle.server.auth import ApiKeys
from rekindle.server.client_apps import ClientApps
from rekindle.server.errors import ApiError
from rekindle.server.idle_thread import IdleThread
from rekindle.server.metrics import Metrics
from rekindle.server.protocol import until_disconnect
from rekindle.server.recent_requests import RecentRequests
from rekindle.server.service import Service, Shared, too_late
from rekindle.session.session import Session
from rekindle.session.session_group import SessionGroup
from rekindle.settings import ServerSettings, Settings

_LATEST = ":latest"


class NamedModel(NamedTuple):
    """What a name stands for: a model, and one of its adapters; "" for the model alone."""

    model: str
    adapter: str


def without_latest(name: str) -> str:
    """A name without the tag that Ollama's clients add."""
    return name.removesuffix(_LATEST)


class ModelNames:
    """What each name stands for. An alias is `PATTERN=NAME`; the first that matches counts, `*=NAME` is a default.

    `llama3.2` and `llama3.2:latest` also stand for `ollama:llama3.2`.
    """

    def __init__(self, default: str, aliases: Sequence[str] = ()) -> None:
        """`default` is the model of requests that name none. Raises `InvalidSetting` for an alias of another form."""
        self._default = default
        self._aliases = []
        for alias in aliases:
            pattern, _, name = (part.strip() for part in alias.partition("="))
            if not pattern or not name:
                raise InvalidSetting(f"alias={alias!r} has no name. Give PATTERN=MODEL, as in 'claude-*={default}'.")
            self._aliases.append((pattern, name))

    def resolve(self, name: str | None, adapters: Mapping[str, Sequence[str]]) -> NamedModel:
        """What a name stands for; `adapters` has those of each model. Raises `ApiError` 404 for unknown names."""
        if not name:
            return NamedModel(self._default, "")
        if len(name) > _MAX_NAME_CHARACTERS:
            message = f"{name[:50]!r}... is no model: names have up to {_MAX_NAME_CHARACTERS:,} characters."
            raise ApiError(404, message, code="model_not_found")
        for one in (*_spellings(name), *self.aliased(name)[:1]):
            if (found := _known(one, adapters)) is not None:
                return found
        near = nearest(name, [*adapters, *(adapter for some in adapters.values() for adapter in some)])
        raise ApiError(404, f"The model {name!r} is not served here.{near}", code="model_not_found")

    def aliased(self, name: str) -> list[str]:
        """The names that aliases give to a name."""
        if len(name) > _MAX_NAME_CHARACTERS:
            return []
        return [known for pattern, known in self._aliases for one in _spellings(name) if fnmatchcase(one, pattern)]


def _spellings(name: str) -> list[str]:
    short = without_latest(name)
    return list(dict.fromkeys((name, short, f"{ollama.PREFIX}{name}", f"{ollama.PREFIX}{short}")))


def _known(name: str, adapters: Mapping[str, Sequence[str]]) -> NamedModel | None:
    """What a name that is no alias stands for: a model, MODEL:ADAPTER, or an adapter of the first model that has it."""
    if name in adapters:
        return NamedModel(name, "")
    for model, some in adapters.items():
        if (own := name.removeprefix(f"{model}:")) in some:
            return NamedModel(model, own)
    return None


_MAX_NAME_CHARACTERS = 1024
_LOOK_SECONDS = 0.1  # how often a server that stops looks whether it shall hurry


class ServedModel:
    """A model that is served. `service` is None until it was opened."""

    def __init__(self, name: str, open_session: Callable[[Progress], Session], adapters: Sequence[str] = ()) -> None:
        """`adapters` are loaded with it: NAME=PATH, NAME=PATH,scale=0.5, or a registered name."""
        self.name = name
        self.open_session = open_session
        self.adapter_texts = tuple(adapters)
        self.service: Service | None = None
        self.opening: Future[Service] | None = None
        self.waiting = 0  # requests, until it is opened

    @property
    def loaded(self) -> bool:
        """Whether it is in memory now."""
        return self.service is not None and not self.service.session.resting

    @property
    def adapters(self) -> list[str]:
        """The names of its adapters."""
        if self.service is not None:
            return [adapter.name for adapter in self.service.session.adapters]
        return [adapter_registry.parse(text).name if "=" in text else text for text in self.adapter_texts]


class Host:
    """One per server. Used by one event loop; models are opened in threads."""

    def __init__(
        self,
        models: Session | Sequence[ServedModel],
        settings: ServerSettings,
        keys: ApiKeys,
        idle: IdleOptions | None = None,
        group: SessionGroup | None = None,
        session_settings: Settings | None = None,
    ) -> None:
        """The first model is the default. `idle` replaces the idle work that the settings say. `group` is the one of
        the models' sessions."""
        given = [ServedModel(models.engine.name, lambda _: models)] if isinstance(models, Session) else list(models)
        self.models = {model.name: model for model in given}
        self.default = given[0]
        self.body_bytes = parse_limit(settings.max_body, "max_body").resolve(0)
        self.client_seconds = parse_duration(settings.client_timeout)
        self.failure: BaseException | None = None  # why the default model could not be opened at the start
        self.stopping = False
        self._drained = asyncio.Event()  # nobody waits for a model any more
        self.calls: set[asyncio.Task[Any]] = set()  # of all endpoints
        self._names = ModelNames(self.default.name, settings.alias)
        self._timeout_seconds = parse_duration(settings.timeout)
        self._stop_seconds = parse_duration(settings.stop_timeout)
        self._idle = IdleOptions.of(settings) if idle is None and settings.idle else idle
        self._group = group
        self._closed = threading.Event()
        chosen = models.settings if isinstance(models, Session) else session_settings or Settings.load()
        metrics = Metrics(chosen.cache_salt, list(self.models), self.services)
        recent = RecentRequests() if settings.page else RecentRequests(max_rows=0)
        self.shared = Shared(settings, chosen, keys, ClientApps(), metrics, recent)
        if isinstance(models, Session):
            self._serve(self.default, models)

    def services(self) -> list[Service]:
        """Those of the models that were opened."""
        return [model.service for model in self.models.values() if model.service is not None]

    def resolve(self, name: str | None) -> NamedModel:
        """The model and the adapter that a name stands for. Raises `ApiError` 404 for unknown names."""
        return self._names.resolve(name, {model.name: model.adapters for model in self.models.values()})

    def is_embedder(self, name: str) -> bool:
        """Whether a name stands for the embedder: its own, or one with an alias, which no language model has."""
        embedder, short = self.shared.session_settings.embedder, without_latest(name)
        return embedder in (name, short) or (embedder in self._names.aliased(name) and short not in self.models)

    def start(self, failed: Callable[[], None]) -> None:
        """Open the default model; `failed` is called, in a thread, if that fails: `failure` says why."""

        def look(opening: Future[Service]) -> None:
            if not self._closed.is_set() and (failure := opening.exception()) is not None:
                self.failure = failure
                failed()

        if self.default.service is None:
            self._open(self.default).add_done_callback(look)

    async def service_of(self, model: ServedModel, receive: Receive) -> Service:
        """The service of a model, which is opened if it must be.

        Raises what opening it raises, and `ApiError` if too many wait for that, or it takes too long.
        """
        if model.service is not None:
            return model.service
        if model.waiting > self.shared.settings.queue:
            raise ApiError(
                429,
                f"{model.name} is being loaded, and {model.waiting} requests wait for it. Try again later.",
                code="queue_full",
                headers={"Retry-After": "5"},
            )
        model.waiting += 1
        idle_thread = self.shared.idle_thread
        if idle_thread is not None:
            idle_thread.arrive()
        try:
            return await until_disconnect(receive, self._opened(model))
        finally:
            model.waiting -= 1
            if idle_thread is not None:
                idle_thread.leave()

    async def _opened(self, model: ServedModel) -> Service:
        opening = asyncio.wrap_future(self._open(model))
        opening.add_done_callback(lambda over: over.cancelled() or over.exception())  # nobody may wait for it any more
        drained = asyncio.ensure_future(self._drained.wait())
        either: set[asyncio.Future[Any]] = {opening, drained}
        done, _ = await asyncio.wait(either, timeout=self._timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        if opening.done():
            return opening.result()
        raise Closed("The server is stopping.") if done else too_late(self._timeout_seconds)

    def _open(self, model: ServedModel) -> Future[Service]:
        """Begin to open a model, unless somebody did; once it failed, it is tried again."""
        if self._closed.is_set():
            raise Closed("The server is stopping.")
        if model.opening is None or (model.opening.done() and model.opening.exception() is not None):
            opening = model.opening = Future()

            def work() -> None:
                try:
                    opening.set_result(self._serve(model, self._open_session(model)))
                except BaseException as error:  # noqa: BLE001  (raised again by those who wait)
                    opening.set_exception(error)

            threading.Thread(target=work, name="rekindle-open", daemon=True).start()
        return model.opening

    def _open_session(self, model: ServedModel) -> Session:
        def stop_if_closed(*_: object) -> None:
            if self._closed.is_set():
                raise Closed("The server is stopping.")

        session = model.open_session(stop_if_closed)
        try:
            for text in model.adapter_texts:
                session.adapters.load_text(text)
            stop_if_closed()
        except RekindleError:
            session.close()
            raise
        return session

    def _serve(self, model: ServedModel, session: Session) -> Service:
        if model is self.default and self._idle is not None:
            self.shared.idle_thread = IdleThread(session, self._idle, parse_duration(self.shared.settings.quiet))
        model.service = Service(model.name, session, self.shared)
        return model.service

    def kill(self, scope: Scope, app: str) -> int:
        """Stop all requests of an app, queued ones too, and return their number."""
        return sum(service.kill(scope, app) for service in self.services())

    async def drain(self, in_a_hurry: Callable[[], bool]) -> None:
        """Refuse new requests; let replies go on for the stop timeout, or until it is urgent, then end them."""
        self.stopping = True
        deadline = time.monotonic() + self._stop_seconds
        while self.calls and time.monotonic() < deadline and not in_a_hurry():
            await asyncio.wait(self.calls, timeout=_LOOK_SECONDS)
        self._drained.set()
        for service in self.services():
            service.cancel()

    def close(self) -> None:
        """Stop all work, keep computed KV, free the models. A model that is being opened is waited for a while."""
        self._closed.set()
        if self._group is not None:
            self._group.stop()
        if self.shared.idle_thread is not None:
            self.shared.idle_thread.close()
        ends = time.monotonic() + self._stop_seconds
        for model in self.models.values():
            if model.opening is not None:
                with suppress(Exception):  # whatever it was, nobody waits for it any more
                    model.opening.result(max(0.0, ends - time.monotonic()))
            if model.service is not None:
                model.service.close()
        if self._group is not None:
            self._group.close()
