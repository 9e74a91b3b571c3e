"""An origin to read from: published once, copied for who changes it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rekindle.codec.cipher import Secret
from rekindle.core.cells import Cell
from rekindle.remote.fetch import RemoteChunkFetch
from rekindle.remote.remote_kv import RemoteFetch, RemoteKv
from rekindle.remote.signing import SigningKey
from tests.remote.places import Liar, lying, publish
from tests.server.serving import eventually, stops_soon  # noqa: F401


@dataclass(frozen=True)
class Place:
    """A folder with one context, at two levels, and who published it."""

    folder: Path
    key: SigningKey
    secret: Secret | None
    context: str

    @property
    def files(self) -> Path:
        return self.folder / "contexts" / self.context


@pytest.fixture(scope="session", params=["plain", "encrypted"])
def _published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder, key = tmp_path_factory.mktemp("origin"), SigningKey.new()
    secret = Secret.new() if request.param == "encrypted" else None
    return Place(folder, key, secret, publish(folder, key, "raw,q4", secret=secret).context)


@pytest.fixture
def place(_published: Place, tmp_path: Path) -> Place:
    folder = tmp_path / "copy"
    shutil.copytree(_published.folder, folder)
    return Place(folder, _published.key, _published.secret, _published.context)


@pytest.fixture
def liar(place: Place) -> Iterator[Liar]:
    with lying(place.folder) as server:
        yield server


@pytest.fixture
def origin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session computes nothing of a prompt before its origin has answered, and sent the last chunk or the passages
    that it has. Else it depends on the load of the machine how much comes."""
    begin = RemoteKv.start_fetch

    def ask(self: RemoteKv, *asked: Any) -> RemoteFetch | None:
        sought = begin(self, *asked)
        if sought is not None:
            eventually(lambda: _has_come(sought))
        return sought

    monkeypatch.setattr(RemoteKv, "start_fetch", ask)


def _has_come(sought: RemoteFetch) -> bool:
    if isinstance(sought, RemoteChunkFetch):
        return not sought.left()
    if (offer := sought.offer) is None:
        return sought.over
    last = [Cell(offer.cells.chunks - 1, layer) for layer in range(1, offer.cells.layers)]  # the lowest is computed
    return sought.failed is not None or sought.arrived_cells.issuperset(last)
