"""Fixtures for the laws of the cache."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared machine may be slow: here no answer is too late."""
    monkeypatch.setattr("rekindle.run.cache.LOOKUP_SECONDS", 120.0)
    monkeypatch.setattr("rekindle.run.cache.LOAD_SECONDS", 120.0)
