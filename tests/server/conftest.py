"""Servers over the fake engine: an open one, and one with keys; or as many as a test wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.engine.fake import FakeEngine
from rekindle.server.auth import ApiKeys
from tests.server.serving import ADMIN, ALICE, BOB, Gated, Served, fake_session, serving, stops_soon  # noqa: F401

Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a server: `engine`, settings of the session in `session`, all others are the server's."""
    with ExitStack() as stack:

        def start(engine: FakeEngine | None = None, session: dict[str, Any] | None = None, **settings: Any) -> Served:
            own = engine or Gated()
            opened = fake_session(tmp_path / "cache", own, **(session or {}))
            served = stack.enter_context(serving(opened, **settings))
            if isinstance(own, Gated):
                stack.callback(own.go.set)  # before the server stops: nothing waits for ever
            return served

        yield start


@pytest.fixture
def served(serve: Serve) -> Served:
    """A server without keys."""
    return serve()


@pytest.fixture
def keyed(serve: Serve) -> Served:
    """A server with two tenants and an operator."""
    return serve(keys=ApiKeys([f"alice={ALICE}", f"bob={BOB}"], [ADMIN]))


@pytest.fixture
def direct() -> Iterator[Session]:
    """The same model without a server or a cache: what every reply has to equal."""
    with Session(FakeEngine(), cache="off") as session:
        yield session
