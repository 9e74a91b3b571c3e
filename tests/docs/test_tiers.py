"""The guide, tiers.md: what it says can be done is."""

import importlib.util
import shutil

import pytest

from tests.docs.pages import test_a_command_of_the_docs_works, test_the_code_of_the_docs_works

__all__ = ["test_a_command_of_the_docs_works", "test_the_code_of_the_docs_works"]
PAGES = ["docs/guide/tiers.md"]
MISSING = importlib.util.find_spec("redis") is None or shutil.which("redis-server") is None
pytestmark = [pytest.mark.long, pytest.mark.skipif(MISSING, reason="redis or redis-server is not installed")]
