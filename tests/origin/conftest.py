"""An origin to read from: published once, copied for who changes it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rekindle.codec.cipher import Secret
from rekindle.origin.signing import SigningKey
from tests.origin.places import Liar, lying, publish


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
