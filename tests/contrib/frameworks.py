"""What the tests of all frameworks share: a session with three documents, and an engine that counts its steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rekindle import Session
from rekindle.engine.base import Logits, Row
from rekindle.engine.fake import FakeEngine
from rekindle.knowledge.retrieve import RetrievalResult

LAMPS = "The lamp in the hall burns for nine hours. Its oil comes from the harbour town of Vesk."
BOATS = "Boats leave Vesk on Tuesdays. The ferry to Ormund costs eleven crowns."
BREAD = "Bread is baked at four in the morning. The baker is called Tomas Ivarsen."
DOCUMENTS = [{"text": text, "source": text[:5], "title": text.split()[0]} for text in (LAMPS, BOATS, BREAD)]


class CountingEngine(FakeEngine):
    """Counts its steps; `busy` is set when it has begun to write a reply."""

    def __init__(self) -> None:
        super().__init__(context_tokens=4000)
        self.steps = 0
        self.busy = threading.Event()

    def step(self, rows: Sequence[Row], cancelled: Callable[[], bool] | None = None) -> list[Logits]:
        self.steps += 1
        if self.steps > 3:
            self.busy.set()
        return super().step(rows, cancelled)


def session_in(folder: Path, embedder: str) -> Session:
    """A session that knows the documents."""
    session = Session(CountingEngine(), cache=folder / "cache", embedder=embedder)
    session.ingest(documents=DOCUMENTS)
    return session


def wait_in_search(session: Session, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let searches wait until the event is set."""
    go, search = threading.Event(), session.knowledge.search

    def waiting(*args: Any, **options: Any) -> RetrievalResult:
        assert go.wait(10), "the event loop was blocked"
        return search(*args, **options)

    monkeypatch.setattr(session.knowledge, "search", waiting)
    return go
