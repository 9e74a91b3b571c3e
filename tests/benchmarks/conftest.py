"""What baselines put into the product is there only while a test needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.baselines import policies
from rekindle.store import disk_space, tiered
from rekindle.store.evict import POLICIES


@pytest.fixture
def published_policies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(disk_space, "Eviction", disk_space.Eviction)
    monkeypatch.setattr(tiered, "DiskStore", tiered.DiskStore)
    before = dict(POLICIES)
    policies.install()
    yield
    POLICIES.clear()
    POLICIES.update(before)
