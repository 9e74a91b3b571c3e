"""Only `make test-clients` collects these tests (`-m clients`): the clients come from npm and PyPI."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if config.option.markexpr == "clients" else True
