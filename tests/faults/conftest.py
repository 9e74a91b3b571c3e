"""Fixtures for tests of faults."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that other users can enter: pytest's own they cannot."""
    folder = Path(tempfile.mkdtemp(prefix="rekindle-readable-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
